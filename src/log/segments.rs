//! Segment files of a run folder, as their logical bytes: a closed one may be packed (see [`super::packed`]), which
//! nothing above this file needs to know.

use super::error::{Error, Result};
use super::packed::Packed;
use super::record::{MAX_SEQ, RECORD_HEADER, SEGMENT_HEADER, SegmentHeader};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Files kept open at once.
const MAX_OPEN: usize = 64;

/// An open segment.
#[derive(Debug)]
enum Open {
    Plain(File),
    Packed(Box<Packed>),
}

/// Segment files of a run folder, opened once.
#[derive(Debug)]
pub struct Segments {
    folder: PathBuf,
    open: Mutex<BTreeMap<u64, Arc<Open>>>,
    /// Damaged blocks of packed segments read as zeros, so that what is around them can be told.
    lenient: bool,
    /// Packed segments are not looked at.
    plain_only: bool,
}

/// Folder of the segments of a run.
pub fn folder(dir: &Path) -> PathBuf {
    dir.join("journal")
}

impl Segments {
    /// Of a run folder; touches nothing.
    pub fn new(dir: &Path) -> Segments {
        Segments { folder: folder(dir), open: Mutex::new(BTreeMap::new()), lenient: false, plain_only: false }
    }

    /// The same, for a survey of damage.
    pub fn lenient(dir: &Path) -> Segments {
        Segments { lenient: true, ..Segments::new(dir) }
    }

    /// The same, for what is about to be packed.
    pub fn plain(dir: &Path) -> Segments {
        Segments { plain_only: true, ..Segments::new(dir) }
    }

    /// Path of a segment that is not packed.
    pub fn plain_path(&self, segment: u64) -> PathBuf {
        self.folder.join(format!("{segment:012}.seg"))
    }

    /// Path of a packed segment.
    pub fn packed_path(&self, segment: u64) -> PathBuf {
        self.folder.join(format!("{segment:012}.segz"))
    }

    /// The file that holds a segment, or would.
    pub fn path(&self, segment: u64) -> PathBuf {
        if self.is_packed(segment) { self.packed_path(segment) } else { self.plain_path(segment) }
    }

    /// Whether a segment is there in packed form. It was read back and compared before it got its name, so a plain file
    /// beside it is what a kill left.
    pub fn is_packed(&self, segment: u64) -> bool {
        !self.plain_only && self.packed_path(segment).exists()
    }

    fn open(&self, segment: u64) -> Result<Arc<Open>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(&segment) {
            return Ok(file.clone());
        }
        let (plain, packed) = (self.plain_path(segment), self.packed_path(segment));
        let found = if self.is_packed(segment) {
            match Packed::open(&packed, self.lenient) {
                // Should a plain one still be there, it may serve.
                Err(Error::Corrupt { .. }) if plain.exists() => File::open(&plain).map(Open::Plain),
                packed => Ok(Open::Packed(Box::new(packed?))),
            }
        } else {
            File::open(&plain).map(Open::Plain)
        };
        let file = match found {
            // The plain file is removed only after the packed one has its name.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && self.is_packed(segment) => {
                Open::Packed(Box::new(Packed::open(&packed, self.lenient)?))
            }
            found => found.map_err(Error::io("open", &plain))?,
        };
        let file = Arc::new(file);
        if open.len() >= MAX_OPEN {
            open.pop_first();
        }
        open.insert(segment, file.clone());
        Ok(file)
    }

    /// Lets go of an open file; the next use finds what is there then.
    pub fn close(&self, segment: u64) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&segment);
    }

    /// Whether the list of record headers of a packed segment is as it was written; plain ones have none.
    pub fn check_headers(&self, segment: u64) -> Result<()> {
        match &*self.open(segment)? {
            Open::Packed(packed) => packed.check(),
            Open::Plain(_) => Ok(()),
        }
    }

    /// Numbers of the segments that exist, ascending.
    pub fn list(&self) -> Result<Vec<u64>> {
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(e) => e,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("list", &self.folder)(e)),
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::io("list", &self.folder))?.file_name();
            let stem = name.to_str().and_then(|n| n.strip_suffix(".seg").or_else(|| n.strip_suffix(".segz")));
            // Other spellings of a number, and numbers that nothing may follow, are no segment's name.
            let number = |stem: &str| stem.parse::<u64>().ok().filter(|n| *n <= MAX_SEQ && format!("{n:012}") == stem);
            numbers.extend(stem.and_then(number));
        }
        numbers.sort_unstable();
        numbers.dedup();
        Ok(numbers)
    }

    /// Length of a segment, bytes, as it is or was before it was packed.
    pub fn len(&self, segment: u64) -> Result<u64> {
        match &*self.open(segment)? {
            Open::Plain(file) => Ok(file.metadata().map_err(Error::io("stat", &self.plain_path(segment)))?.len()),
            Open::Packed(packed) => Ok(packed.len()),
        }
    }

    /// Bytes of a segment.
    pub fn read(&self, segment: u64, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_into(segment, offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes` from a segment.
    pub fn read_into(&self, segment: u64, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let short = |path: &Path, len: usize| {
            Error::corrupt(path, offset, format!("the file ends inside the {len} bytes that belong here"))
        };
        match &*self.open(segment)? {
            Open::Plain(file) => file.read_exact_at(bytes, offset).map_err(|e| {
                let path = self.plain_path(segment);
                if e.kind() == std::io::ErrorKind::UnexpectedEof {
                    return short(&path, bytes.len());
                }
                Error::io("read", &path)(e)
            }),
            Open::Packed(packed) if offset + bytes.len() as u64 > packed.len() => {
                Err(short(&self.packed_path(segment), bytes.len()))
            }
            Open::Packed(packed) => packed.read_into(offset, bytes),
        }
    }

    /// Header of the record at an offset. Of a packed segment it comes from the list of all its headers: no block is
    /// unpacked for it.
    pub fn record_header(&self, segment: u64, offset: u64) -> Result<Vec<u8>> {
        if let Open::Packed(packed) = &*self.open(segment)?
            && let Some(header) = packed.record_header(offset)?
        {
            return Ok(header.to_vec());
        }
        self.read(segment, offset, RECORD_HEADER)
    }

    /// Lets go of what [`Segments::record_header`] keeps of a segment.
    pub fn forget_headers(&self, segment: u64) {
        if let Some(Open::Packed(packed)) =
            self.open.lock().unwrap_or_else(PoisonError::into_inner).get(&segment).map(|open| &**open)
        {
            packed.forget_headers();
        }
    }

    /// Header of a segment.
    pub fn header(&self, segment: u64) -> Result<SegmentHeader> {
        let mut bytes = [0; SEGMENT_HEADER];
        match &*self.open(segment)? {
            Open::Packed(packed) => bytes = *packed.segment_header(),
            Open::Plain(_) => self.read_into(segment, 0, &mut bytes)?,
        }
        let header = SegmentHeader::decode(&bytes).map_err(|what| Error::corrupt(&self.path(segment), 0, what))?;
        if header.segment != segment {
            let what = format!("it says it is segment {}: the file was renamed", header.segment);
            return Err(Error::corrupt(&self.path(segment), 0, what));
        }
        Ok(header)
    }
}
