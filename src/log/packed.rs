//! A closed segment, compressed in blocks that can be read one by one.
//!
//! ```text
//!  offset  size  field (integers little-endian)
//!       0     4  magic "CVSZ"
//!       4     2  format (1)
//!       6     2  reserved, 0
//!       8     8  length of the segment, bytes
//!      16     4  bytes of the segment in a block, B (the last one may hold less)
//!      20     4  number of record headers, R
//!      24     4  packed length of the list of record headers
//!      28     4  crc32c of that
//!      32    64  the segment's own header
//!      96   8 n  per block: packed length, crc32c of the packed bytes (n = length / B, rounded up)
//!  96+8 n     4  crc32c of everything before
//!               the list of record headers, packed: R times offset (u64) and header (104 bytes)
//!               the blocks, packed
//! ```
//!
//! Packed = one zstd frame. The list lets an opening run through a journal without unpacking it. Written beside, read
//! back and compared, flushed, renamed; only then is the plain file removed, so that a crash leaves one or both.

use super::blob::sync_dir;
use super::error::{Error, Result};
use super::record::{RECORD_HEADER, RecordHeader, SEGMENT_HEADER, u32_le, u64_le};
use super::segments::{Segments, folder};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

const MAGIC: [u8; 4] = *b"CVSZ";
const FORMAT: u16 = 1;
const HEADER: usize = 96;
/// Bytes of the segment in a block: a compromise between ratio and what a single event costs to read.
const BLOCK: usize = 256 << 10;
/// Longest block that is accepted, bytes.
const MAX_BLOCK: usize = 16 << 20;
/// zstd's fast end: about as good as level 3 on events, and several times faster.
const LEVEL: i32 = 1;
const ENTRY: usize = 8 + RECORD_HEADER;
/// Longest list of record headers that is accepted, bytes.
const MAX_LIST: usize = 1 << 30;

/// Bytes of the list of record headers.
type Headers = Arc<Vec<u8>>;

/// Where the bytes of a packed segment are: a file, or memory (for tests of the parser).
pub(crate) trait Source: std::fmt::Debug + Send + Sync {
    /// All of `bytes` from an offset on.
    fn read(&self, bytes: &mut [u8], at: u64) -> std::io::Result<()>;
    /// Bytes there are.
    fn size(&self) -> std::io::Result<u64>;
}

impl Source for File {
    fn read(&self, bytes: &mut [u8], at: u64) -> std::io::Result<()> {
        self.read_exact_at(bytes, at)
    }

    fn size(&self) -> std::io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl Source for Vec<u8> {
    fn read(&self, bytes: &mut [u8], at: u64) -> std::io::Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.get(at..)?.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn size(&self) -> std::io::Result<u64> {
        Ok(self.len() as u64)
    }
}

/// An open packed segment.
#[derive(Debug)]
pub struct Packed {
    path: PathBuf,
    file: Box<dyn Source>,
    len: u64,
    block: usize,
    segment_header: [u8; SEGMENT_HEADER],
    /// (offset in the file, packed length, crc32c) of each block.
    blocks: Vec<(u64, u32, u32)>,
    /// The same of the list of record headers, and how many there are.
    list: (u64, u32, u32),
    records: usize,
    /// The block read last.
    recent: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
    headers: Mutex<Option<Headers>>,
    whole: Result<()>,
    lenient: bool,
}

impl Packed {
    /// Opens a file; checks its own header.
    ///
    /// # Errors
    /// [`Error::Corrupt`], I/O.
    pub fn open(path: &Path, lenient: bool) -> Result<Packed> {
        Packed::over(path, Box::new(File::open(path).map_err(Error::io("open", path))?), lenient)
    }

    /// The same over bytes that are there; `path` is for messages.
    pub(crate) fn over(path: &Path, file: Box<dyn Source>, lenient: bool) -> Result<Packed> {
        let bad = |what: &str| Error::corrupt(path, 0, what.to_string());
        let on_disk = file.size().map_err(Error::io("stat", path))?;
        let mut head = vec![0; HEADER];
        let read = |bytes: &mut [u8], at: u64| {
            file.read(bytes, at).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => bad("the file ends inside its header"),
                _ => Error::io("read", path)(e),
            })
        };
        read(&mut head, 0)?;
        if head[..4] != MAGIC {
            return Err(bad("not a packed segment: magic is not \"CVSZ\""));
        }
        if head[4..6] != FORMAT.to_le_bytes() {
            return Err(bad("its format is newer than this program, or damaged"));
        }
        let (len, block) = (u64_le(&head, 8), u32_le(&head, 16) as usize);
        if block == 0 || block > MAX_BLOCK || len.div_ceil(block as u64).saturating_mul(8) > on_disk {
            return Err(bad("its header makes no sense"));
        }
        let count = len.div_ceil(block as u64) as usize;
        head.resize(HEADER + 8 * count + 4, 0);
        read(&mut head[HEADER..], HEADER as u64)?;
        let end = HEADER + 8 * count;
        if crc32c::crc32c(&head[..end]) != u32_le(&head, end) {
            return Err(bad("its header fails its checksum"));
        }
        let records = u32_le(&head, 20) as usize;
        // Each record has a header of that length in the segment.
        if records as u64 > len / RECORD_HEADER as u64 || records > MAX_LIST / ENTRY {
            return Err(bad("its header makes no sense"));
        }
        let list = (end as u64 + 4, u32_le(&head, 24), u32_le(&head, 28));
        let mut at = list.0 + u64::from(list.1);
        let mut blocks = Vec::with_capacity(count);
        for entry in head[HEADER..end].chunks_exact(8) {
            blocks.push((at, u32_le(entry, 0), u32_le(entry, 4)));
            at += u64::from(u32_le(entry, 0));
        }
        // A survey reads what is there of one that is cut, and asks for this by itself.
        let whole = if at == on_disk { Ok(()) } else { Err(bad(&format!("it has {on_disk} bytes, not {at}"))) };
        if !lenient {
            whole.clone()?;
        }
        let mut segment_header = [0; SEGMENT_HEADER];
        segment_header.copy_from_slice(&head[32..HEADER]);
        Ok(Packed {
            path: path.to_path_buf(),
            file,
            len,
            block,
            segment_header,
            blocks,
            list,
            records,
            recent: Mutex::new(None),
            headers: Mutex::new(None),
            whole,
            lenient,
        })
    }

    /// Length of the segment, bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The segment's own first bytes.
    pub fn segment_header(&self) -> &[u8; SEGMENT_HEADER] {
        &self.segment_header
    }

    fn unpack(&self, (at, packed, crc): (u64, u32, u32), len: usize) -> Result<Vec<u8>> {
        let bad = |what: String| Error::corrupt(&self.path, at, what);
        let on_disk = self.file.size().map_err(Error::io("stat", &self.path))?;
        if at.saturating_add(u64::from(packed)) > on_disk {
            return Err(bad("the file ends inside a block".into()));
        }
        let mut bytes = vec![0; packed as usize];
        self.file.read(&mut bytes, at).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => bad("the file ends inside a block".into()),
            _ => Error::io("read", &self.path)(e),
        })?;
        if crc32c::crc32c(&bytes) != crc {
            return Err(bad("a block fails its checksum".into()));
        }
        let out = zstd::bulk::decompress(&bytes, len).map_err(|e| bad(format!("a block does not unpack: {e}")))?;
        if out.len() != len {
            return Err(bad(format!("a block holds {} of {len} bytes", out.len())));
        }
        Ok(out)
    }

    fn block(&self, number: usize) -> Result<Arc<Vec<u8>>> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, bytes)) = &*recent
            && *at == number
        {
            return Ok(bytes.clone());
        }
        let len = (self.len - (number * self.block) as u64).min(self.block as u64) as usize;
        let bytes = match self.unpack(self.blocks[number], len) {
            Err(Error::Corrupt { .. }) if self.lenient => vec![0; len],
            other => other?,
        };
        let bytes = Arc::new(bytes);
        *recent = Some((number, bytes.clone()));
        Ok(bytes)
    }

    /// Fills `out` from an offset of the segment on; all of it must lie in the segment.
    ///
    /// # Errors
    /// [`Error::Corrupt`], I/O.
    pub fn read_into(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let (number, within) = ((at / self.block as u64) as usize, (at % self.block as u64) as usize);
            let block = self.block(number)?;
            let n = (block.len() - within).min(out.len() - done);
            out[done..done + n].copy_from_slice(&block[within..within + n]);
            done += n;
        }
        Ok(())
    }

    /// Header of the record at an offset, from the list; `None` when the list has none there.
    ///
    /// # Errors
    /// [`Error::Corrupt`], I/O.
    pub fn record_header(&self, offset: u64) -> Result<Option<[u8; RECORD_HEADER]>> {
        let list = {
            let mut headers = self.headers.lock().unwrap_or_else(PoisonError::into_inner);
            match &*headers {
                Some(list) => list.clone(),
                None => {
                    let list = Arc::new(self.unpack(self.list, self.records * ENTRY)?);
                    headers.insert(list).clone()
                }
            }
        };
        let (mut low, mut high) = (0, self.records);
        while low < high {
            let middle = (low + high) / 2;
            let entry = &list[middle * ENTRY..(middle + 1) * ENTRY];
            match u64_le(entry, 0).cmp(&offset) {
                std::cmp::Ordering::Equal => {
                    let mut header = [0; RECORD_HEADER];
                    header.copy_from_slice(&entry[8..]);
                    return Ok(Some(header));
                }
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Ok(None)
    }

    /// Whether the file has the length that its header says, and a whole list of record headers.
    ///
    /// # Errors
    /// [`Error::Corrupt`], I/O.
    pub fn check(&self) -> Result<()> {
        self.whole.clone()?;
        self.record_header(0).map(|_| ())
    }

    /// Lets go of the list of record headers.
    pub fn forget_headers(&self) {
        *self.headers.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether the list of record headers is what the blocks hold; the error text says what is not.
    ///
    /// # Errors
    /// [`Error::Corrupt`], I/O.
    pub fn check_list(&self) -> Result<()> {
        let list = self.unpack(self.list, self.records * ENTRY)?;
        let mut header = [0; RECORD_HEADER];
        for entry in list.chunks_exact(ENTRY) {
            let at = u64_le(entry, 0);
            let inside = at.saturating_add(RECORD_HEADER as u64) <= self.len;
            if !inside || self.read_into(at, &mut header).is_err() || header[..] != entry[8..] {
                let what = format!("its list of records differs from its records at byte {at}");
                return Err(Error::corrupt(&self.path, self.list.0, what));
            }
        }
        Ok(())
    }
}

/// Packs a closed segment and removes the plain file; returns the bytes before and after. Nobody may write to it.
///
/// # Errors
/// [`Error::Corrupt`] when the segment is not whole records from end to end; I/O. The plain file stays then.
pub fn pack(dir: &Path, segment: u64) -> Result<(u64, u64)> {
    let segments = Segments::plain(dir);
    let (plain, target) = (segments.plain_path(segment), segments.packed_path(segment));
    let temporary = target.with_extension("segz.tmp");
    let source = File::open(&plain).map_err(Error::io("open", &plain))?;
    let len = source.metadata().map_err(Error::io("stat", &plain))?.len();
    let compress = |bytes: &[u8]| zstd::bulk::compress(bytes, LEVEL).map_err(Error::io("compress", &plain));

    let mut list = Vec::new();
    let mut at = SEGMENT_HEADER as u64;
    while at < len {
        let bytes = segments.read(segment, at, RECORD_HEADER)?;
        let header = RecordHeader::decode(&bytes).map_err(|what| Error::corrupt(&plain, at, what))?;
        list.extend_from_slice(&at.to_le_bytes());
        list.extend_from_slice(&bytes);
        at += header.record_len();
    }
    if at != len {
        return Err(Error::corrupt(&plain, len, "the last record is cut short".to_string()));
    }
    let records = (list.len() / ENTRY) as u32;
    let list = compress(&list)?;

    let count = len.div_ceil(BLOCK as u64) as usize;
    let mut head = vec![0; HEADER + 8 * count + 4];
    head[..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&FORMAT.to_le_bytes());
    head[8..16].copy_from_slice(&len.to_le_bytes());
    head[16..20].copy_from_slice(&(BLOCK as u32).to_le_bytes());
    head[20..24].copy_from_slice(&records.to_le_bytes());
    head[24..28].copy_from_slice(&(list.len() as u32).to_le_bytes());
    head[28..32].copy_from_slice(&crc32c::crc32c(&list).to_le_bytes());
    segments.read_into(segment, 0, &mut head[32..HEADER])?;

    let out = File::create(&temporary).map_err(Error::io("create", &temporary))?;
    let write = |bytes: &[u8], at: u64| out.write_all_at(bytes, at).map_err(Error::io("write", &temporary));
    let mut place = head.len() as u64;
    write(&list, place)?;
    place += list.len() as u64;
    let mut block = Vec::new();
    for number in 0..count {
        let from = (number * BLOCK) as u64;
        block.resize((len - from).min(BLOCK as u64) as usize, 0);
        segments.read_into(segment, from, &mut block)?;
        let packed = compress(&block)?;
        write(&packed, place)?;
        place += packed.len() as u64;
        let entry = HEADER + 8 * number;
        head[entry..entry + 4].copy_from_slice(&(packed.len() as u32).to_le_bytes());
        head[entry + 4..entry + 8].copy_from_slice(&crc32c::crc32c(&packed).to_le_bytes());
    }
    let end = head.len() - 4;
    let crc = crc32c::crc32c(&head[..end]);
    head[end..].copy_from_slice(&crc.to_le_bytes());
    write(&head, 0)?;
    out.sync_all().map_err(Error::io("flush", &temporary))?;
    same(&segments, segment, &Packed::open(&temporary, false)?)?;
    std::fs::rename(&temporary, &target).map_err(Error::io("rename to", &target))?;
    sync_dir(&folder(dir))?;
    std::fs::remove_file(&plain).map_err(Error::io("remove", &plain))?;
    sync_dir(&folder(dir))?;
    Ok((len, place))
}

/// Whether a packed segment gives back what the plain one holds.
fn same(segments: &Segments, segment: u64, packed: &Packed) -> Result<()> {
    packed.check_list()?;
    let (mut ours, mut theirs) = (vec![0; BLOCK], vec![0; BLOCK]);
    let mut at = 0;
    while at < packed.len() {
        let n = (packed.len() - at).min(BLOCK as u64) as usize;
        segments.read_into(segment, at, &mut ours[..n])?;
        packed.read_into(at, &mut theirs[..n])?;
        if ours[..n] != theirs[..n] {
            return Err(Error::corrupt(&packed.path, at, "it does not unpack to the segment".to_string()));
        }
        at += n as u64;
    }
    Ok(())
}

/// Writes the plain file of a packed segment back and removes the packed one.
///
/// # Errors
/// [`Error::Corrupt`], I/O; the packed file stays then.
pub fn unpack(dir: &Path, segment: u64) -> Result<()> {
    let segments = Segments::new(dir);
    let (plain, source) = (segments.plain_path(segment), segments.packed_path(segment));
    let packed = Packed::open(&source, false)?;
    let temporary = plain.with_extension("seg.tmp");
    let out = File::create(&temporary).map_err(Error::io("create", &temporary))?;
    let (mut at, mut bytes) = (0, vec![0; BLOCK]);
    while at < packed.len() {
        let n = (packed.len() - at).min(BLOCK as u64) as usize;
        packed.read_into(at, &mut bytes[..n])?;
        out.write_all_at(&bytes[..n], at).map_err(Error::io("write", &temporary))?;
        at += n as u64;
    }
    out.sync_all().map_err(Error::io("flush", &temporary))?;
    std::fs::rename(&temporary, &plain).map_err(Error::io("rename to", &plain))?;
    sync_dir(&folder(dir))?;
    // Until it is gone it is what counts, so nothing is appended to the plain one before.
    std::fs::remove_file(&source).map_err(Error::io("remove", &source))?;
    sync_dir(&folder(dir))
}
