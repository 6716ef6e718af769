//! The HEAD file: how far the journal is durable.
//!
//! Two 64-byte slots, written alternately after each successful flush, so that one is always whole:
//!
//! ```text
//!  offset size field (little-endian)
//!       0    4  magic "CVHD"        4    2  format (1)     6    2  reserved, 0
//!       8    8  counter (the newer slot has the larger)
//!      16    8  segment number
//!      24    8  durable length of that segment, bytes
//!      32    8  number of the next record
//!      40    8  events of all branches before that position (0 = not known)
//!      48   12  reserved, 0        60    4  crc32c of 0..60
//! ```
//!
//! Followers read no further than it says. It is itself not flushed: after a power loss it may lag behind
//! the journal, never run ahead of it.

use super::error::{Error, Result};
use super::record::{u32_le, u64_le};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: [u8; 4] = *b"CVHD";
const SLOT: usize = 64;

/// A position in the journal up to which everything is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watermark {
    /// Segment number.
    pub segment: u64,
    /// Durable length of that segment, bytes.
    pub offset: u64,
    /// Number of the record that will follow.
    pub next_record: u64,
    /// Events of all branches before it; 0 = not known.
    pub events: u64,
}

fn encode(counter: u64, mark: &Watermark) -> [u8; SLOT] {
    let mut b = [0; SLOT];
    b[..4].copy_from_slice(&MAGIC);
    b[4..6].copy_from_slice(&1u16.to_le_bytes());
    b[8..16].copy_from_slice(&counter.to_le_bytes());
    b[16..24].copy_from_slice(&mark.segment.to_le_bytes());
    b[24..32].copy_from_slice(&mark.offset.to_le_bytes());
    b[32..40].copy_from_slice(&mark.next_record.to_le_bytes());
    b[40..48].copy_from_slice(&mark.events.to_le_bytes());
    let crc = crc32c::crc32c(&b[..60]);
    b[60..].copy_from_slice(&crc.to_le_bytes());
    b
}

fn decode(b: &[u8]) -> Option<(u64, Watermark)> {
    if b.len() < SLOT || b[..4] != MAGIC || b[4..6] != 1u16.to_le_bytes() || crc32c::crc32c(&b[..60]) != u32_le(b, 60) {
        return None;
    }
    let mark =
        Watermark { segment: u64_le(b, 16), offset: u64_le(b, 24), next_record: u64_le(b, 32), events: u64_le(b, 40) };
    Some((u64_le(b, 8), mark))
}

/// Path of the HEAD file of a run folder.
pub fn path(dir: &Path) -> PathBuf {
    dir.join("HEAD")
}

fn read_counted(dir: &Path) -> Result<Option<(u64, Watermark)>> {
    let path = path(dir);
    let bytes = match std::fs::read(&path) {
        Ok(b) => b,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("read", &path)(e)),
    };
    Ok(newest(&bytes))
}

/// Counter and watermark of the whole slot with the larger counter.
pub(super) fn newest(bytes: &[u8]) -> Option<(u64, Watermark)> {
    bytes.chunks(SLOT).take(2).filter_map(decode).max_by_key(|(counter, _)| *counter)
}

/// The watermark of a run folder; `None` when HEAD is missing or neither slot is whole.
///
/// # Errors
/// I/O errors other than "not found".
pub fn read(dir: &Path) -> Result<Option<Watermark>> {
    Ok(read_counted(dir)?.map(|(_, mark)| mark))
}

/// Number of slots of the HEAD file that fail their checksum, for `verify`.
pub(crate) fn bad_slots(dir: &Path) -> Result<usize> {
    let path = path(dir);
    match std::fs::read(&path) {
        // A slot never written is zeros.
        Ok(b) => Ok(b.chunks(SLOT).filter(|s| s.iter().any(|x| *x != 0) && decode(s).is_none()).count()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(e) => Err(Error::io("read", &path)(e)),
    }
}

/// The writer's side.
#[derive(Debug)]
pub struct HeadFile {
    path: PathBuf,
    file: File,
    counter: u64,
}

impl HeadFile {
    /// Opens or creates it.
    ///
    /// # Errors
    /// I/O.
    pub fn open(dir: &Path) -> Result<HeadFile> {
        let counter = read_counted(dir)?.map_or(0, |(c, _)| c);
        let path = path(dir);
        let file =
            File::options().create(true).truncate(false).write(true).open(&path).map_err(Error::io("open", &path))?;
        // Nothing that stands behind the slots would ever be written over.
        let slots = 2 * SLOT as u64;
        if file.metadata().map_err(Error::io("stat", &path))?.len() > slots {
            file.set_len(slots).map_err(Error::io("cut", &path))?;
        }
        Ok(HeadFile { path, file, counter })
    }

    /// Publishes a watermark (after the flush that makes it true).
    ///
    /// # Errors
    /// I/O.
    pub fn write(&mut self, mark: &Watermark) -> Result<()> {
        self.counter += 1;
        let slot = (self.counter % 2) * SLOT as u64;
        self.file.write_all_at(&encode(self.counter, mark), slot).map_err(Error::io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_whole_slot_wins() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let mark = |n| Watermark { segment: 1, offset: 100 * n, next_record: n, events: 10 * n };
        let mut head = HeadFile::open(dir.path()).unwrap();
        for n in 1..=3 {
            head.write(&mark(n)).unwrap();
            assert_eq!(read(dir.path()).unwrap(), Some(mark(n)));
        }
        // Reopened, the counter goes on.
        HeadFile::open(dir.path()).unwrap().write(&mark(4)).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(mark(4)));
        // What stands behind the slots goes with the next opening for writing.
        let mut longer = std::fs::read(path(dir.path())).unwrap();
        longer.extend_from_slice(&[9; 300]);
        std::fs::write(path(dir.path()), &longer).unwrap();
        assert!(bad_slots(dir.path()).unwrap() > 0);
        drop(HeadFile::open(dir.path()).unwrap());
        assert_eq!((read(dir.path()).unwrap(), bad_slots(dir.path()).unwrap()), (Some(mark(4)), 0));
        // Counter 4 is even: slot 0. Torn, the older slot answers.
        let mut bytes = std::fs::read(path(dir.path())).unwrap();
        bytes[30] ^= 1;
        std::fs::write(path(dir.path()), &bytes).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(mark(3)));
        assert_eq!(bad_slots(dir.path()).unwrap(), 1);
        std::fs::write(path(dir.path()), b"short").unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
    }
}
