//! The fixed frame around every event, outside rkyv.
//!
//! ```text
//!  offset size  field (integers little-endian)
//!       0    4  magic "CVEF"
//!       4    2  frame format version (1)
//!       6    2  kind (Kind code)
//!       8    2  kind version (which frozen struct)
//!      10    2  flags: bit 0 = the facts section is a blob reference; others 0
//!      12    4  branch (0 = main, 4294967295 = the folder's own ledger)
//!      16    8  seq, from 1 within the branch's history
//!      24    4  facts_len, bytes
//!      28    4  meta_len, bytes
//!      32   32  chain digest before the record that holds it (zeros before the first)
//!      64    2  meta version
//!      66    2  reserved, 0
//!      68    4  crc32c of bytes 0..68 and 72..end
//!      72    facts_len  facts: rkyv archive of the frozen struct, or a blob reference
//!   72 + f   meta_len   meta: rkyv archive of Meta
//! ```
//!
//! A blob reference is 40 bytes: BLAKE3 of the facts (32), their length (u64). The chain digest of an event is BLAKE3 of
//! the frames of its record up to and including its own: it vouches for everything before, and a whole record is hashed
//! at once, which is four times faster than one event after the other.

use super::digest::Digest;

/// Bytes before the facts.
pub const HEADER_LEN: usize = 72;
/// First four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"CVEF";
/// The frame layout above.
pub const FORMAT: u16 = 1;
/// Flag: the facts section is a blob reference.
pub const FLAG_BLOB: u16 = 1;
/// Length of a blob reference, bytes.
pub const BLOB_REF_LEN: usize = 40;
/// No section is longer than this, bytes; larger facts go to a blob long before.
pub const MAX_SECTION_LEN: usize = 16 << 20;

/// Why bytes are not a frame.
#[derive(thiserror::Error, Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Fewer bytes than the frame needs.
    #[error("frame needs {need} bytes, {have} are left")]
    Short {
        /// Bytes the frame needs.
        need: usize,
        /// Bytes there are.
        have: usize,
    },
    /// Not a frame.
    #[error("frame magic is {found:02x?}, not \"CVEF\"")]
    Magic {
        /// The four bytes.
        found: [u8; 4],
    },
    /// A newer layout.
    #[error("frame format {found} is not known here (newest: {FORMAT}): use the coevolve that wrote it")]
    Format {
        /// The version found.
        found: u16,
    },
    /// A section length beyond the limit.
    #[error("frame section of {len} bytes is over the limit of {MAX_SECTION_LEN}")]
    TooLarge {
        /// The length.
        len: usize,
    },
    /// Checksum mismatch.
    #[error("frame crc32c is {found:08x}, computed {computed:08x}")]
    Checksum {
        /// In the frame.
        found: u32,
        /// Over the bytes.
        computed: u32,
    },
    /// Valid checksum but flags that mean nothing here.
    #[error("frame flags {flags:#06x} are not known here: use the coevolve that wrote it")]
    Flags {
        /// The flags.
        flags: u16,
    },
    /// Valid checksum but a blob reference of the wrong size.
    #[error("blob reference has {len} bytes, not {BLOB_REF_LEN}")]
    BlobRef {
        /// The length.
        len: usize,
    },
}

/// What the frame says about its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Kind code.
    pub kind: u16,
    /// Which frozen struct of the kind.
    pub version: u16,
    /// [`FLAG_BLOB`] or 0.
    pub flags: u16,
    /// Branch that holds the event.
    pub branch: u32,
    /// Sequence number within the branch's history, from 1.
    pub seq: u64,
    /// Chain digest before the record that holds it.
    pub prev: Digest,
    /// Version of the meta section.
    pub meta_version: u16,
}

/// A frame inside a byte slice, checksum verified.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// The fixed fields.
    pub header: Header,
    /// Facts section.
    pub facts: &'a [u8],
    /// Meta section.
    pub meta: &'a [u8],
    /// The whole frame.
    pub bytes: &'a [u8],
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Appends a frame to `out`.
///
/// # Errors
/// [`Error::TooLarge`] for a section beyond [`MAX_SECTION_LEN`]; `out` is unchanged then.
pub fn write(out: &mut Vec<u8>, header: &Header, facts: &[u8], meta: &[u8]) -> Result<(), Error> {
    for len in [facts.len(), meta.len()] {
        if len > MAX_SECTION_LEN {
            return Err(Error::TooLarge { len });
        }
    }
    let start = out.len();
    out.reserve(HEADER_LEN + facts.len() + meta.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&header.kind.to_le_bytes());
    out.extend_from_slice(&header.version.to_le_bytes());
    out.extend_from_slice(&header.flags.to_le_bytes());
    out.extend_from_slice(&header.branch.to_le_bytes());
    out.extend_from_slice(&header.seq.to_le_bytes());
    out.extend_from_slice(&(facts.len() as u32).to_le_bytes());
    out.extend_from_slice(&(meta.len() as u32).to_le_bytes());
    out.extend_from_slice(&header.prev.0);
    out.extend_from_slice(&header.meta_version.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    let crc = crc32c::crc32c(&out[start..]);
    let crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, facts), meta);
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(facts);
    out.extend_from_slice(meta);
    Ok(())
}

/// The length of the frame that starts here, from its header alone (nothing but magic, format and
/// limits is checked).
///
/// # Errors
/// [`Error::Short`], [`Error::Magic`], [`Error::Format`], [`Error::TooLarge`].
pub fn frame_len(bytes: &[u8]) -> Result<usize, Error> {
    if bytes.len() < HEADER_LEN {
        return Err(Error::Short { need: HEADER_LEN, have: bytes.len() });
    }
    if bytes[..4] != MAGIC {
        return Err(Error::Magic { found: [bytes[0], bytes[1], bytes[2], bytes[3]] });
    }
    let format = u16_at(bytes, 4);
    if format != FORMAT {
        return Err(Error::Format { found: format });
    }
    let (facts, meta) = (u32_at(bytes, 24) as usize, u32_at(bytes, 28) as usize);
    for len in [facts, meta] {
        if len > MAX_SECTION_LEN {
            return Err(Error::TooLarge { len });
        }
    }
    Ok(HEADER_LEN + facts + meta)
}

/// Reads the frame at the start of `bytes`; what follows it is ignored.
///
/// # Errors
/// Every [`Error`]; never panics, whatever the bytes.
pub fn read(bytes: &[u8]) -> Result<Frame<'_>, Error> {
    let bytes = whole(bytes)?;
    let found = u32_at(bytes, 68);
    let computed = crc32c::crc32c_append(crc32c::crc32c(&bytes[..68]), &bytes[HEADER_LEN..]);
    if found != computed {
        return Err(Error::Checksum { found, computed });
    }
    parts(bytes)
}

/// As [`read`], for bytes that a checksum around them vouches for already: that of the frame is not computed.
///
/// # Errors
/// Every [`Error`] but [`Error::Checksum`].
pub fn read_vouched(bytes: &[u8]) -> Result<Frame<'_>, Error> {
    parts(whole(bytes)?)
}

/// The bytes of the frame that starts here.
fn whole(bytes: &[u8]) -> Result<&[u8], Error> {
    let need = frame_len(bytes)?;
    bytes.get(..need).ok_or(Error::Short { need, have: bytes.len() })
}

fn parts(bytes: &[u8]) -> Result<Frame<'_>, Error> {
    let flags = u16_at(bytes, 10);
    if flags & !FLAG_BLOB != 0 || u16_at(bytes, 66) != 0 {
        return Err(Error::Flags { flags });
    }
    let facts_len = u32_at(bytes, 24) as usize;
    if flags & FLAG_BLOB != 0 && facts_len != BLOB_REF_LEN {
        return Err(Error::BlobRef { len: facts_len });
    }
    let mut prev = [0; 32];
    prev.copy_from_slice(&bytes[32..64]);
    let mut seq = [0; 8];
    seq.copy_from_slice(&bytes[16..24]);
    let header = Header {
        kind: u16_at(bytes, 6),
        version: u16_at(bytes, 8),
        flags,
        branch: u32_at(bytes, 12),
        seq: u64::from_le_bytes(seq),
        prev: Digest(prev),
        meta_version: u16_at(bytes, 64),
    };
    let (facts, meta) = bytes[HEADER_LEN..].split_at(facts_len);
    Ok(Frame { header, facts, meta, bytes })
}

impl Frame<'_> {
    /// The blob that holds the facts (digest, length in bytes), if they are not inline.
    pub fn blob(&self) -> Option<(Digest, u64)> {
        if self.header.flags & FLAG_BLOB == 0 {
            return None;
        }
        let digest: [u8; 32] = self.facts.get(..32)?.try_into().ok()?;
        let len: [u8; 8] = self.facts.get(32..40)?.try_into().ok()?;
        Some((Digest(digest), u64::from_le_bytes(len)))
    }
}

/// The facts section of a frame whose facts live in a blob.
pub fn blob_ref(digest: Digest, len: u64) -> [u8; BLOB_REF_LEN] {
    let mut out = [0; BLOB_REF_LEN];
    out[..32].copy_from_slice(&digest.0);
    out[32..].copy_from_slice(&len.to_le_bytes());
    out
}
