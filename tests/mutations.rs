//! Damaged and made-up bytes through every parser, without a fuzzer: 50,000 by default, more with
//! `COEVOLVE_MUTATIONS=1000000 cargo test --release --workspace --test mutations -- --nocapture`.
//!
//! What is changed and no more is refused by its checksum. What is changed and given the right checksum is a named
//! error, or an event that is written and read to the same bytes. `COEVOLVE_MUTATION=N` runs mutation N alone. The
//! starting points are the golden files and the golden run.

mod common;
#[allow(dead_code, reason = "a target of the fuzzer each; not all are called here")]
#[path = "fuzz/src/lib.rs"]
mod targets;

use coevolve::event::digest::Digest;
use coevolve::event::{FailureNoted, Kind, Meta, frame};
use coevolve::log::{EventStore, Log, Options, export, parsers, snapshot};
use coevolve::world::{Draw, draw};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use targets::Outcome;

const SEED: u64 = 20_260_731;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// How many mutations: all below this number, or one.
fn numbers(share: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    match number("COEVOLVE_MUTATION") {
        Some(one) => vec![one],
        None => (0..number("COEVOLVE_MUTATIONS").unwrap_or(50_000) / share).collect(),
    }
}

/// Valid bytes of every format.
struct Seeds {
    /// Of every kind, and of the golden run.
    frames: Vec<Vec<u8>>,
    records: Vec<Vec<u8>>,
    segment: Vec<u8>,
    head: Vec<u8>,
    stream: Vec<u8>,
    snapshot: Vec<u8>,
    packed: Vec<u8>,
    /// All frames and records above.
    known: BTreeSet<Digest>,
}

fn header(kind: u16, seq: u64, flags: u16) -> frame::Header {
    frame::Header { kind, version: 1, flags, branch: 0, seq, prev: Digest::ZERO, meta_version: 1 }
}

fn framed(header: &frame::Header, facts: &[u8], meta: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    frame::write(&mut out, header, facts, meta).expect("frame");
    out
}

fn snapshot_bytes() -> Vec<u8> {
    let tmp = tempfile::tempdir().expect("folder");
    let digest = Digest::of(b"event");
    snapshot::write(tmp.path(), 0, 7, &digest, &Digest::of(b"fold"), b"the body of a snapshot").expect("snapshot");
    std::fs::read(tmp.path().join("snapshots/0-7.snap")).expect("snapshot")
}

/// The golden run's segment, packed.
fn packed_bytes() -> Vec<u8> {
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path();
    std::fs::create_dir(dir.join("journal")).expect("folder");
    for file in ["HEAD", "journal/000000000001.seg"] {
        std::fs::write(dir.join(file), read(&format!("schema/golden/run/{file}"))).expect("copy");
    }
    // It is closed by the event behind it.
    let options = Options { segment_bytes: 1, sled: false, ..Options::default() };
    let log = Log::open(dir, options).expect("log");
    let event = FailureNoted { stage: "test".into(), message: String::new() };
    log.append(event.into(), Meta::default()).expect("append").wait().expect("durable");
    assert_eq!(log.pack().expect("pack").0, 1);
    std::fs::read(dir.join("journal/000000000001.segz")).expect("packed")
}

fn seeds() -> Seeds {
    let meta = read("schema/golden/000-meta-v1.bin");
    let mut frames: Vec<Vec<u8>> = Vec::new();
    for kind in Kind::ALL {
        let facts = read(&format!("schema/golden/{:03}-{}-v1.bin", *kind as u16, kind.name()));
        frames.push(framed(&header(*kind as u16, 1, 0), &facts, &meta));
    }
    let reference = frame::blob_ref(Digest::of(b"payload"), 70_000);
    frames.push(framed(&header(4, 9, frame::FLAG_BLOB), &reference, &meta));
    let segment = read("schema/golden/run/journal/000000000001.seg");
    let (_, whole, rest) = parsers::segment(&segment).expect("segment");
    assert_eq!(rest, None);
    let (mut records, mut at) = (Vec::new(), 64);
    for record in &whole {
        records.push(segment[at..at + record.len].to_vec());
        at += record.len;
        frames.extend(record.frames.iter().map(|f| f.bytes.to_vec()));
    }
    let mut stream = Vec::new();
    export(&root().join("schema/golden/run"), &mut stream, &mut |_, _| {}).expect("export");
    let known = frames.iter().chain(&records).map(|b| Digest::of(b)).collect();
    let (head, snapshot) = (read("schema/golden/run/HEAD"), snapshot_bytes());
    let packed = packed_bytes();
    assert_eq!(parsers::packed(&packed).expect("packed"), segment);
    Seeds { frames, records, segment, head, stream, snapshot, packed, known }
}

/// Changes bytes in one to four ways. `fields` are the offsets of 32-bit lengths and counts.
fn mutate(draw: &mut Draw, bytes: &[u8], others: &[Vec<u8>], fields: &[usize]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..1 + draw.below(4) {
        if out.is_empty() {
            break;
        }
        let at = draw.below(out.len());
        let len = 1 + draw.below((out.len() - at).min(64));
        match draw.below(11) {
            0 | 1 => out[at] ^= 1 << draw.below(8),
            2 => out[at] = [0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'['][draw.below(8)],
            3 => out.truncate(at),
            4 => drop(out.drain(..at)),
            5 => drop(out.drain(at..at + len)),
            6 => {
                let piece = out[at..at + len].to_vec();
                out.splice(at..at, piece);
            }
            7 => {
                // The end of another.
                let other = &others[draw.below(others.len())];
                let from = draw.below(other.len() + 1);
                out.truncate(at);
                out.extend_from_slice(&other[from..]);
            }
            8 => {
                let other = &others[draw.below(others.len())];
                let from = draw.below(other.len());
                let piece = other[from..(from + len).min(other.len())].to_vec();
                let end = (at + piece.len()).min(out.len());
                out[at..end].copy_from_slice(&piece[..end - at]);
            }
            9 => out[at..at + len].fill(0),
            _ => {
                let at = if fields.is_empty() { at } else { fields[draw.below(fields.len())] };
                if let Some(field) = out.get_mut(at..at + 4) {
                    let old = u32::from_le_bytes([field[0], field[1], field[2], field[3]]);
                    let new = [
                        0,
                        1,
                        old.wrapping_add(1),
                        old.wrapping_sub(1),
                        old.wrapping_mul(2),
                        i32::MAX as u32,
                        u32::MAX,
                        draw.bits() as u32,
                    ];
                    field.copy_from_slice(&new[draw.below(new.len())].to_le_bytes());
                }
            }
        }
    }
    out
}

/// Offsets of lengths and counts in a frame (kind, version, flags, both lengths) and in a record.
const FRAME_FIELDS: &[usize] = &[6, 8, 10, 24, 28, 64];
const RECORD_FIELDS: &[usize] = &[32, 40, 44, 48, 52, 56, 104 + 24, 104 + 28];

/// A whole record one of whose events has these facts instead.
fn relinked(record: &[u8], change: usize, facts: &[u8]) -> Vec<u8> {
    let old = parsers::record(record).expect("a seed");
    let mut body = Vec::new();
    for (i, f) in old.frames.iter().enumerate() {
        let facts = if i == change { facts } else { f.facts };
        frame::write(&mut body, &f.header, facts, f.meta).expect("frame");
    }
    targets::mend_record([&record[..104], &body].concat())
}

type Counts = BTreeMap<(&'static str, &'static str), u64>;

/// One mutation; what it was and what became of it.
fn one(n: u64, seeds: &Seeds) -> (&'static str, Outcome) {
    let mut draw = draw(SEED, "mutation", &[&n.to_string()]);
    let frame = |draw: &mut Draw| seeds.frames[draw.below(seeds.frames.len())].clone();
    let record = |draw: &mut Draw| seeds.records[draw.below(seeds.records.len())].clone();
    // Those that touch files are slow and rare.
    match n {
        n if n % 1_000 == 17 => {
            let segment = mutate(&mut draw, &seeds.segment, &seeds.records, &[24, 32, 64 + 44, 64 + 56]);
            let head = if draw.chance(0.3) {
                mutate(&mut draw, &seeds.head, &seeds.frames, &[16, 24, 32])
            } else {
                seeds.head.clone()
            };
            return ("folder", targets::folder(&segment, &head));
        }
        n if n % 1_000 == 18 => {
            let stream = mutate(&mut draw, &seeds.stream, &seeds.records, &[29, 33]);
            let outcome = targets::stream(&stream);
            assert!(outcome == Outcome::Refused || stream.starts_with(&seeds.stream), "a changed stream was taken in");
            return ("stream", outcome);
        }
        n if n % 50 == 19 => {
            let changed = mutate(&mut draw, &seeds.snapshot, &seeds.frames, &[8, 112]);
            let outcome = targets::snapshot(&changed);
            assert!(outcome == Outcome::Refused || changed == seeds.snapshot, "a changed snapshot was read");
            return ("snapshot", outcome);
        }
        n if n % 50 == 21 => {
            let changed = mutate(&mut draw, &seeds.packed, &seeds.frames, &[8, 16, 20, 24, 96, 104]);
            let outcome = targets::packed(&changed);
            // With the checksums as they are nothing that was changed is read.
            let read = parsers::packed(&changed).ok();
            assert!(read.is_none_or(|read| read == seeds.segment), "a changed packed segment was read");
            return ("packed segment", outcome);
        }
        n if n % 50 == 20 => {
            let changed = mutate(&mut draw, &seeds.head, &seeds.frames, &[8, 16, 24]);
            let slots = [&seeds.head[..64], &seeds.head[64..]].map(parsers::head);
            let read = parsers::head(&changed);
            assert!(read.is_none() || slots.contains(&read), "a watermark that was never written: {read:?}");
            return ("HEAD", targets::head(&changed));
        }
        _ => {}
    }
    match n % 5 {
        0 => {
            let bytes = frame(&mut draw);
            let changed = mutate(&mut draw, &bytes, &seeds.frames, FRAME_FIELDS);
            let known = frame::read(&changed).is_ok_and(|f| seeds.known.contains(&Digest::of(f.bytes)));
            let outcome = targets::frame(&changed);
            assert!(outcome == Outcome::Refused || known, "a changed frame was read");
            ("frame", outcome)
        }
        1 => {
            let bytes = frame(&mut draw);
            ("frame, checksum mended", targets::mended_frame(&mutate(&mut draw, &bytes, &seeds.frames, FRAME_FIELDS)))
        }
        2 => {
            let bytes = record(&mut draw);
            let changed = mutate(&mut draw, &bytes, &seeds.records, RECORD_FIELDS);
            let known = parsers::record(&changed).is_ok_and(|r| seeds.known.contains(&Digest::of(&changed[..r.len])));
            let outcome = targets::record(&changed);
            assert!(outcome == Outcome::Refused || known, "a changed record was read");
            ("record", outcome)
        }
        3 => {
            // Header fields mostly: in the body the frames' own checksums see every change.
            let bytes = record(&mut draw);
            let cut = if draw.chance(0.8) { 104 } else { bytes.len() };
            let mut changed = mutate(&mut draw, &bytes[..cut], &seeds.records, RECORD_FIELDS);
            changed.extend_from_slice(&bytes[cut..]);
            ("record, checksums mended", targets::mended_record(&changed))
        }
        _ => {
            let bytes = record(&mut draw);
            let old = parsers::record(&bytes).expect("a seed");
            let which = draw.below(old.frames.len());
            let facts = mutate(&mut draw, old.frames[which].facts, &seeds.frames, &[]);
            // The record is whole: what counts is what becomes of the event in it.
            assert_eq!(targets::record(&relinked(&bytes, which, &facts)), Outcome::Accepted);
            ("record, events relinked", targets::facts(old.frames[which].header.kind, 1, &facts))
        }
    }
}

/// Runs them all; a panic says which one it was.
fn all(name: &str, numbers: Vec<u64>, one: impl Fn(u64) -> (&'static str, Outcome)) -> Counts {
    let begin = std::time::Instant::now();
    let mut counts = Counts::new();
    let done = numbers.len();
    for n in numbers {
        match catch_unwind(AssertUnwindSafe(|| one(n))) {
            Ok((what, Outcome::Refused)) => *counts.entry((what, "refused")).or_default() += 1,
            Ok((what, Outcome::Accepted)) => *counts.entry((what, "accepted")).or_default() += 1,
            Err(panic) => {
                eprintln!("{name}: mutation {n}; run it alone with COEVOLVE_MUTATION={n}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{name}: {done} in {:.1} s", begin.elapsed().as_secs_f64());
    for ((what, outcome), n) in &counts {
        println!("  {what}: {outcome} {n}");
    }
    counts
}

#[test]
fn mutated_bytes_are_refused_or_consistent() {
    common::not_hanging(|| {
        let seeds = seeds();
        let counts = all("bytes", numbers(1), |n| one(n, &seeds));
        // It is of no use when nothing gets behind the checksums.
        if counts.values().sum::<u64>() >= 50_000 {
            for what in ["frame, checksum mended", "record, checksums mended", "record, events relinked"] {
                assert!(counts.get(&(what, "accepted")).is_some_and(|n| *n > 100), "{counts:?}");
                assert!(counts.get(&(what, "refused")).is_some_and(|n| *n > 100), "{counts:?}");
            }
        }
    });
}

/// A name, what is done with the bytes, and bytes to start from.
type Target = (&'static str, fn(&[u8]) -> Outcome, Vec<Vec<u8>>);

/// Texts that the text parsers accept. A first byte chooses among formats.
fn texts() -> Vec<Target> {
    let chosen = |cases: &[(u8, &str)]| -> Vec<Vec<u8>> {
        cases.iter().map(|(choice, text)| [&[*choice], text.as_bytes()].concat()).collect()
    };
    let presets = ["desk", "desk-smoke", "bfcl-smollm2", "paper-bfcl"];
    let settings = presets.iter().map(|p| read(&format!("src/config/presets/{p}.toml"))).collect();
    let calls = chosen(&[
        (
            0,
            "Hi <tool_call>\n{\"name\": \"mail_send\", \"arguments\": {\"to\": \"a\\u00e9\", \"n\": -3, \"tags\": [\"x\"]}}\n</tool_call> <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
        ),
        (
            4,
            "<think>a</think><tool_call>{\"name\": \"g\", \"arguments\": {\"deep\": {\"er\": [[1.5e3, null, true]]}}}</tool_call>",
        ),
        (
            1,
            "<|python_tag|>{\"name\": \"mail_send\", \"parameters\": {\"to\": \"a\"}}; {\"name\": \"f\", \"parameters\": {}}",
        ),
        (5, "{\"name\": \"f\", \"parameters\": {\"x\": 1e40}}"),
        (2, "[mail_send(to='a\\'b', n=3, urgent=True, tags=['x', \"y\"], more={'k': [1, 2.5, None]}), f()]"),
        (6, "[a.b(x=-1, y=1e5, z=[1, 2]), c(d={'e': {'f': []}})]"),
        (3, "```python\nmail_send(to=\"a\", n=+3)\nprint(f(x=[1, 2], y={\"a\": 'b'}))\n```\nsaid"),
        (7, "```py\na.b(c='''long\ntext''', d=r'\\x', e=0x1F, f=1_000)\n```"),
        (12, "<think>where?</think> go north; <tool_call>{}</tool_call>"),
    ]);
    let chat = [
        "Sure! ```json\n{\"a\": [1, {\"b\": \"c\\ud83d\\ude00\"}], \"n\": -1.5e-7, \"t\": true}\n``` {\"b\":2}",
        "{broken [1, 2] }",
        "[[[[[[[[[[[[[[[[[[[[[{\"a\":{\"a\":{\"a\":{}}}}]]]]]]]]]]]]]]]]]]]]]",
        "{\"tasks\": [{\"query\": \"q\", \"score\": 18446744073709551616}]}",
    ];
    let checks = chosen(&[
        (
            0,
            r#"{"options":{"loss":"dapo","epsilon_low":0.2,"delta":null,"dual_clip":3,"beta":0.001,"kl":"k3","scale":"group","max_completion_length":12,"correction":{"kind":"tis","level":"token","max":2.0,"min":null},"overlong":{"max":4096,"cache":512,"factor":1.0}},"rollouts":[{"group":0,"reward":1.0,"logp":[-1,-2.5],"logp_old":[-1,-2],"logp_ref":[-1.5,-2],"logp_sampler":[-1,-2],"mask":[1,0]},{"group":0,"reward":null,"logp":[-1],"logp_ref":[-1],"logp_sampler":[-1],"mask":[1]},{"group":1,"advantage":0.5,"logp":[-2],"logp_ref":[-2],"logp_sampler":[-2.5],"mask":[1]}],"micro_batches":[[0,1],[2]]}"#,
        ),
        (
            0,
            r#"[{"options":{"loss":"gspo","dtype":"f32","advantage":"rloo"},"rollouts":[{"group":"a","reward":0,"logp":[-0.1],"logp_sampler":[-0.2],"mask":[1]},{"group":"a","reward":1,"logp":[-0.1],"mask":[1]}]}]"#,
        ),
        (
            1,
            r#"{"config":{"window":16,"include_group":false,"theta":5,"n_min":2,"min_recurrence":2,"pattern_length":4},"rollouts":[{"step":1,"task":"t1","draw":0,"k":0,"score":1.0,"calls":["cd","mv"]},{"step":2,"task":"t1","score":null},{"step":4294967295,"task":"t1","draw":4294967295,"k":4294967295,"score":0,"calls":["cd"]}]}"#,
        ),
        (
            2,
            r#"{"format":"hermes","text":"<tool_call>{\"name\":\"f\",\"arguments\":{\"b\":1,\"a\":2}}</tool_call>","tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"}}}}}]}"#,
        ),
        (
            3,
            r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"},{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"a":1}}}]},{"role":"tool","content":"r","name":"f"}],"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"add_generation_prompt":true,"enable_thinking":false}"#,
        ),
    ]);
    vec![
        ("settings", targets::settings, settings),
        ("tool calls", targets::tool_calls, calls),
        ("chat JSON", targets::chat_json, chat.iter().map(|t| t.as_bytes().to_vec()).collect()),
        ("check", targets::check, checks),
    ]
}

#[test]
fn every_text_to_start_from_is_accepted() {
    for (what, target, seeds) in texts() {
        let refused = seeds.iter().filter(|seed| target(seed) == Outcome::Refused);
        let refused: Vec<_> = refused.map(|seed| String::from_utf8_lossy(seed)).collect();
        assert!(refused.is_empty(), "{what}: {refused:#?}");
    }
}

#[test]
fn mutated_texts_are_refused_or_read() {
    common::not_hanging(|| {
        let texts = texts();
        all("texts", numbers(4), |n| {
            let mut draw = draw(SEED, "mutated text", &[&n.to_string()]);
            let (what, target, seeds) = &texts[(n % texts.len() as u64) as usize];
            let bytes = &seeds[draw.below(seeds.len())];
            (*what, target(&mutate(&mut draw, bytes, seeds, &[])))
        });
    });
}

/// Writes the seeds as a corpus for the fuzz targets: `COEVOLVE_CORPUS=tests/fuzz/corpus cargo test --release --test
/// mutations -- --ignored`.
#[test]
#[ignore = "writes files; see tests/fuzz/README.md"]
fn corpus_write() {
    let Some(to) = std::env::var_os("COEVOLVE_CORPUS") else { return };
    let write = |target: &str, all: &[Vec<u8>]| {
        let folder = Path::new(&to).join(target);
        std::fs::create_dir_all(&folder).expect("folder");
        for bytes in all {
            std::fs::write(folder.join(&Digest::of(bytes).to_string()[..16]), bytes).expect("write");
        }
    };
    let seeds = seeds();
    let payloads: Vec<Vec<u8>> = seeds
        .frames
        .iter()
        .map(|bytes| {
            let read = frame::read(bytes).expect("a seed");
            [&[read.header.kind as u8, 1], read.facts].concat()
        })
        .collect();
    write("payload", &payloads);
    write("frame", &seeds.frames);
    write("mended_frame", &seeds.frames);
    write("record", &seeds.records);
    write("mended_record", &seeds.records);
    write("segment", &[seeds.segment]);
    write("stream", &[seeds.stream]);
    write("snapshot", &[seeds.snapshot]);
    write("packed", &[seeds.packed]);
    write("head", &[seeds.head]);
    for (what, _, texts) in texts() {
        write(&what.to_lowercase().replace(' ', "_"), &texts);
    }
}
