//! The files of a model: a folder on disk, or bytes inside the program (the embedded policy).

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

/// Something tensors are read from.
pub(super) trait ReadSeek: Read + Seek {}
impl<T: Read + Seek> ReadSeek for T {}

/// Where the files of a model are.
#[derive(Debug, Clone, Copy)]
pub enum ModelFiles<'a> {
    /// A folder.
    Folder(&'a Path),
    /// (file name, bytes), as `include_bytes!` gives them.
    Memory(&'a [(&'a str, &'a [u8])]),
}

impl<'a> ModelFiles<'a> {
    /// The path of a file, for messages.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            ModelFiles::Folder(folder) => folder.join(name),
            ModelFiles::Memory(_) => PathBuf::from(format!("(embedded)/{name}")),
        }
    }

    /// The place of all files, for messages.
    pub fn place(&self) -> PathBuf {
        match self {
            ModelFiles::Folder(folder) => folder.to_path_buf(),
            ModelFiles::Memory(_) => PathBuf::from("(embedded)"),
        }
    }

    /// The whole of a file; `None` when there is none of that name.
    ///
    /// # Errors
    /// What the system says, or that the file is larger than `limit` bytes.
    pub fn read(&self, name: &str, limit: u64) -> std::io::Result<Option<Cow<'a, [u8]>>> {
        let too_large = |size: u64| std::io::Error::other(format!("{size} bytes; at most {limit} are read"));
        match self {
            ModelFiles::Folder(folder) => {
                let path = folder.join(name);
                let size = match std::fs::metadata(&path) {
                    Ok(meta) => meta.len(),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(e) => return Err(e),
                };
                if size > limit {
                    return Err(too_large(size));
                }
                Ok(Some(Cow::Owned(std::fs::read(path)?)))
            }
            ModelFiles::Memory(files) => match files.iter().find(|(n, _)| *n == name) {
                Some((_, bytes)) if bytes.len() as u64 > limit => Err(too_large(bytes.len() as u64)),
                Some((_, bytes)) => Ok(Some(Cow::Borrowed(bytes))),
                None => Ok(None),
            },
        }
    }

    /// Whether there is a file of that name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            ModelFiles::Folder(folder) => folder.join(name).exists(),
            ModelFiles::Memory(files) => files.iter().any(|(n, _)| *n == name),
        }
    }

    /// A file to read parts of, and its size in bytes.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn open(&self, name: &str) -> std::io::Result<(Box<dyn ReadSeek + 'a>, u64)> {
        match self {
            ModelFiles::Folder(folder) => {
                let file = File::open(folder.join(name))?;
                let size = file.metadata()?.len();
                Ok((Box::new(BufReader::with_capacity(1 << 20, file)), size))
            }
            ModelFiles::Memory(files) => match files.iter().find(|(n, _)| *n == name) {
                Some((_, bytes)) => Ok((Box::new(Cursor::new(*bytes)), bytes.len() as u64)),
                None => Err(std::io::ErrorKind::NotFound.into()),
            },
        }
    }
}
