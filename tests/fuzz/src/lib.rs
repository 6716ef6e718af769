//! What every parser must do with any bytes: give a named error, or something that is consistent. Nothing panics,
//! nothing hangs.
//!
//! One function a parser. The fuzz targets call them, and so does `tests/mutations.rs`, which needs no nightly compiler.

use coevolve::agent::check_calls::check_tool_calls;
use coevolve::agent::check_template::check_template;
use coevolve::agent::parse::{CallFormat, ParseLimits, parse};
use coevolve::agent::tools::from_openai;
use coevolve::config::{Layer, load};
use coevolve::decide::check_signals::check_signals;
use coevolve::event::json::{Json, canonical_json};
use coevolve::event::{Kind, codec, frame};
use coevolve::evolve::shape::values;
use coevolve::learner::check_loss::check_loss;
use coevolve::log::{Options, import, parsers, verify};
use serde_json::Value;
use std::path::PathBuf;

/// What became of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// A named error.
    Refused,
    /// Something valid.
    Accepted,
}
use Outcome::{Accepted, Refused};

fn of<T, E>(result: Result<T, E>) -> Outcome {
    if result.is_ok() { Accepted } else { Refused }
}

/// The payload of a kind: refused, or an event that is written and read again to the same bytes.
pub fn facts(code: u16, version: u16, bytes: &[u8]) -> Outcome {
    let event = match codec::decode_facts(code, version, bytes) {
        Ok(event) => event,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return Refused;
        }
    };
    assert_eq!(event.kind() as u16, code);
    // Not compared as events: a NaN differs from itself.
    let written = codec::facts_bytes(&event).expect("an event that was read can be written");
    let again = codec::decode_facts(code, codec::newest_version(event.kind()), &written).expect("and read again");
    assert!(codec::facts_bytes(&again).expect("and written again") == written, "not the same bytes: {event:?}");
    Accepted
}

/// The meta section, as [`facts`].
pub fn meta(version: u16, bytes: &[u8]) -> Outcome {
    let Ok(meta) = codec::decode_meta(version, bytes) else { return Refused };
    let event = coevolve::event::StepSkipped { step: 0, update: 0, reason: String::new() }.into();
    let written = codec::encode(&event, &meta).expect("meta that was read can be written").meta;
    assert_eq!(codec::decode_meta(codec::META_VERSION, &written).expect("and read again"), meta);
    Accepted
}

/// Payloads: two bytes choose kind and version, the rest is the payload.
pub fn payload(bytes: &[u8]) -> Outcome {
    let [kind, version, rest @ ..] = bytes else { return Refused };
    let code = u16::from(*kind) % (Kind::ALL.len() as u16 + 2);
    // Mostly the version that exists.
    match (code, u16::from(version.saturating_sub(250).max(1))) {
        (0, version) => meta(version, rest),
        (code, version) => facts(code, version, rest),
    }
}

fn whole_frame(read: &frame::Frame) {
    let mut again = Vec::new();
    frame::write(&mut again, &read.header, read.facts, read.meta).expect("a frame");
    assert!(again == read.bytes, "a frame that is written to other bytes: {:?}", read.header);
    if read.blob().is_none() {
        facts(read.header.kind, read.header.version, read.facts);
    }
    meta(read.header.meta_version, read.meta);
}

/// A frame: refused, or one that is written to the same bytes, with what is inside it.
pub fn frame(bytes: &[u8]) -> Outcome {
    match (frame::frame_len(bytes), frame::read(bytes)) {
        (len, Ok(read)) => {
            assert_eq!(len, Ok(read.bytes.len()));
            whole_frame(&read);
            Accepted
        }
        (_, Err(error)) => {
            assert!(!error.to_string().is_empty());
            Refused
        }
    }
}

/// [`frame`] with lengths that fit and a checksum that is right, so that what lies behind these is reached.
pub fn mended_frame(bytes: &[u8]) -> Outcome {
    frame(&mend_frame(bytes.to_vec()))
}

/// Gives bytes the magic, lengths and checksum of a frame.
pub fn mend_frame(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() < frame::HEADER_LEN {
        return bytes;
    }
    let sections = (bytes.len() - frame::HEADER_LEN) as u32;
    let facts = u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]).min(sections);
    bytes[..4].copy_from_slice(&frame::MAGIC);
    bytes[4..6].copy_from_slice(&frame::FORMAT.to_le_bytes());
    bytes[24..28].copy_from_slice(&facts.to_le_bytes());
    bytes[28..32].copy_from_slice(&(sections - facts).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..68]), &bytes[72..]);
    bytes[68..72].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn whole_record(record: &parsers::Record) {
    assert!(!record.frames.is_empty());
    for (i, read) in record.frames.iter().enumerate() {
        assert_eq!((read.header.branch, read.header.seq), (record.branch, record.first_seq + i as u64));
        assert_eq!(read.header.prev, record.frames[0].header.prev);
        whole_frame(read);
    }
    // 104 bytes of header and nothing between the frames.
    assert_eq!(record.len, 104 + record.frames.iter().map(|f| f.bytes.len()).sum::<usize>());
}

/// A record: refused, or linked frames that fill it.
pub fn record(bytes: &[u8]) -> Outcome {
    let read = parsers::record(bytes);
    if let Ok(record) = &read {
        whole_record(record);
    }
    of(read)
}

/// [`record`] with lengths that fit and checksums that are right.
pub fn mended_record(bytes: &[u8]) -> Outcome {
    record(&mend_record(bytes.to_vec()))
}

/// Gives bytes the length and checksums of a record.
pub fn mend_record(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() < 104 {
        return bytes;
    }
    let body_len = (bytes.len() - 104) as u32;
    let body_crc = crc32c::crc32c(&bytes[104..]);
    bytes[..6].copy_from_slice(b"CVJR\x01\x00");
    bytes[56..60].copy_from_slice(&body_len.to_le_bytes());
    bytes[60..64].copy_from_slice(&body_crc.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..100]);
    bytes[100..104].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// A segment: refused, or whole records up to the first that is not.
pub fn segment(bytes: &[u8]) -> Outcome {
    let read = parsers::segment(bytes);
    if let Ok((_, records, _)) = &read {
        records.iter().for_each(whole_record);
    }
    of(read)
}

/// HEAD.
pub fn head(bytes: &[u8]) -> Outcome {
    if parsers::head(bytes).is_some() { Accepted } else { Refused }
}

/// A packed segment with its checksums mended where they can be: refused, or a segment of the length it says.
pub fn packed(bytes: &[u8]) -> Outcome {
    of(parsers::packed(bytes)).max(of(parsers::packed(&mend_packed(bytes.to_vec()))))
}

/// The header's checksum, and those of the list and of the blocks, put right.
pub fn mend_packed(mut bytes: Vec<u8>) -> Vec<u8> {
    let number = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes")) as usize;
    if bytes.len() < 96 {
        return bytes;
    }
    let len = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
    let blocks = len.div_ceil((number(&bytes, 16) as u64).max(1)) as usize;
    let end = blocks.saturating_mul(8).saturating_add(96);
    if end.saturating_add(4) > bytes.len() {
        return bytes;
    }
    // Where each length stands, and its checksum.
    let mut at = end + 4;
    for (length, checksum) in std::iter::once((24, 28)).chain((0..blocks).map(|i| (96 + 8 * i, 100 + 8 * i))) {
        let to = at.saturating_add(number(&bytes, length)).min(bytes.len());
        let crc = crc32c::crc32c(&bytes[at.min(to)..to]);
        bytes[checksum..checksum + 4].copy_from_slice(&crc.to_le_bytes());
        at = to;
    }
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..end + 4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// A snapshot file: refused, or the body that its header vouches for.
pub fn snapshot(bytes: &[u8]) -> Outcome {
    let read = parsers::snapshot(bytes);
    if let Ok((_, body)) = &read {
        assert!(bytes.ends_with(body) && bytes.len() == 124 + body.len());
    }
    of(read)
}

/// A folder of the test's own; its name is free again when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("coevolve-fuzz-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Folder(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An exported run: refused with nothing left, or a run folder that is whole.
pub fn stream(bytes: &[u8]) -> Outcome {
    let folder = Folder::new();
    let taken = import(&mut &bytes[..], &folder.0, &mut |_| {});
    match &taken {
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert!(!folder.0.exists(), "a refused import left a folder");
        }
        Ok(done) => {
            let report = verify(&folder.0).expect("an imported run is verified");
            assert!(report.is_ok() && report.events == done.events, "{report:?}");
        }
    }
    of(taken)
}

/// A run folder with these bytes as its only segment: it is verified, read, repaired and opened. None of them panics,
/// and what is read before the first error was recorded.
pub fn folder(bytes: &[u8], head: &[u8]) -> Outcome {
    let folder = Folder::new();
    let dir = &folder.0;
    std::fs::create_dir_all(dir.join("journal")).expect("folder");
    std::fs::write(dir.join("journal/000000000001.seg"), bytes).expect("write");
    std::fs::write(dir.join("HEAD"), head).expect("write");
    let report = verify(dir);
    if let Ok(reader) = coevolve::log::Reader::open(dir) {
        for branch in [0, 1, u32::MAX] {
            if let Ok(events) = reader.read(branch, 1) {
                events.for_each(drop);
            }
        }
        let _ = reader.complete();
    }
    let opened = coevolve::log::Log::open(dir, Options { sled: false, ..Options::default() });
    drop(opened);
    of(report.map_err(drop).and_then(|r| if r.is_ok() { Ok(()) } else { Err(()) }))
}

/// Settings as a TOML file.
pub fn settings(bytes: &[u8]) -> Outcome {
    let folder = Folder::new();
    std::fs::create_dir_all(&folder.0).expect("folder");
    let path = folder.0.join("settings.toml");
    std::fs::write(&path, bytes).expect("write");
    let loaded = load(&[Layer::File(path)]);
    if let Err(error) = &loaded {
        assert!(!error.to_string().is_empty());
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = load(&[Layer::Set(text.to_string())]);
    }
    of(loaded)
}

const TOOLS: &str = r#"[{"type":"function","function":{"name":"mail_send","parameters":{"type":"object","properties":{
"to":{"type":"string"},"n":{"type":"integer"},"x":{"type":"number"},"urgent":{"type":"boolean"},
"day":{"type":"string","enum":["mon","tue"]},"tags":{"type":"array","items":{"type":"string"}},
"more":{"type":"object"}},"required":["to"]}}}]"#;

/// Tool calls: the first byte chooses format and whether there are tools, the rest is a model's text.
pub fn tool_calls(bytes: &[u8]) -> Outcome {
    let [choice, rest @ ..] = bytes else { return Refused };
    let text = String::from_utf8_lossy(rest);
    let format = match choice % 4 {
        _ if choice & 8 != 0 => CallFormat::Text,
        0 => CallFormat::Hermes,
        1 => CallFormat::Llama,
        2 => CallFormat::Bfcl,
        _ => CallFormat::Python,
    };
    let tools = (choice & 4 == 0).then(|| from_openai(&Json::parse(TOOLS).expect("JSON")).expect("tools"));
    let parsed = parse(format, &text, tools.as_deref(), &ParseLimits::default());
    for call in &parsed.calls {
        let arguments: Value = serde_json::from_str(&call.arguments).expect("arguments are JSON");
        assert!(arguments.is_object(), "{call:?}");
        assert_eq!(canonical_json(&arguments), call.arguments, "arguments are canonical");
    }
    if parsed.calls.is_empty() { Refused } else { Accepted }
}

/// JSON in a chat answer, and JSON whose order counts.
pub fn chat_json(bytes: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(bytes);
    if let Ok((value, len)) = Json::parse_prefix(&text) {
        assert_eq!(Json::parse(&text[..len]), Ok(value));
    }
    let Some(value) = values(&text).into_iter().next() else { return Refused };
    assert!(value.is_object() || value.is_array());
    let written = canonical_json(&value);
    let again: Value = serde_json::from_str(&written).expect("canonical JSON is JSON");
    assert_eq!(canonical_json(&again), written);
    Accepted
}

/// The cases of `coevolve check`: the first byte chooses which check, the rest is its document.
pub fn check(bytes: &[u8]) -> Outcome {
    let [choice, rest @ ..] = bytes else { return Refused };
    let text = String::from_utf8_lossy(rest);
    match choice % 4 {
        0 => of(serde_json::from_str(&text).map_err(drop).and_then(|case| check_loss(&case).map_err(drop))),
        1 => of(serde_json::from_str(&text).map_err(drop).and_then(|case| check_signals(&case).map_err(drop))),
        2 => of(Json::parse(&text).map_err(drop).and_then(|case| check_tool_calls(&case).map_err(drop))),
        _ => {
            let Ok(Json::Object(mut entries)) = Json::parse(&text) else { return Refused };
            // A template is a program: one that runs long does what it says. So the template is a given one.
            entries.retain(|(key, _)| key != "template" && key != "tokenizer");
            entries.push(("template".into(), Json::String(TEMPLATE.into())));
            of(check_template(&Json::Object(entries)))
        }
    }
}

const TEMPLATE: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
