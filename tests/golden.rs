//! A whole run of an earlier release, read by today's program.
//!
//! `schema/golden/run` is the journal of a small run that the program once wrote, and what was true of it then. The
//! bytes, the facts digest, the chain digest and the exported stream must stay true for ever. The projection digest
//! stands in a file of its own, because a fold that is changed on purpose changes it: delete `projection.txt` and
//! write it anew.
//!
//! Written by `COEVOLVE_WRITE_GOLDEN=1 cargo test --release --test golden -- --ignored`; existing files are never
//! overwritten.

mod common;

use coevolve::event::digest::Digest;
use coevolve::event::{Event, Kind, codec, frame};
use coevolve::log::{EventStore, Log, MAIN, Options, Reader, Stamped, export, import, verify};
use coevolve::project::State;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What was true of the run when it was written.
#[derive(serde::Serialize, serde::Deserialize, Debug, PartialEq)]
struct Digests {
    /// Events of main.
    events: u64,
    /// See `FactsDigest`.
    facts_digest: String,
    /// BLAKE3 of the last event's frame, which holds that of the one before it.
    chain_digest: String,
    /// BLAKE3 of the exported stream.
    export_digest: String,
}

const SEGMENT: &str = "journal/000000000001.seg";

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("schema/golden/run")
}

fn events(dir: &Path) -> Vec<Stamped> {
    let reader = Reader::open(dir).expect("the run opens");
    reader.read(MAIN, 1).expect("main").map(|e| e.expect("an event")).collect()
}

fn exported(dir: &Path) -> Vec<u8> {
    let mut stream = Vec::new();
    export(dir, &mut stream, &mut |_, _| {}).expect("the run is exported");
    stream
}

fn digests(dir: &Path) -> Digests {
    let (events, reader) = (events(dir), Reader::open(dir).expect("the run opens"));
    Digests {
        events: events.len() as u64,
        facts_digest: reader.facts_digest(MAIN).expect("facts").to_string(),
        chain_digest: reader.digest(MAIN, events.len() as u64).expect("the last event").to_string(),
        export_digest: Digest::of(&exported(dir)).to_string(),
    }
}

fn projection(dir: &Path) -> String {
    let mut state = State::new();
    for e in events(dir) {
        state.apply(e.seq, &e.event, &e.meta);
    }
    assert_eq!(state.anomaly_count, 0, "{:?}", state.anomalies);
    state.digest()
}

/// A copy that may be written to.
fn copy(to: &Path) {
    std::fs::create_dir(to.join("journal")).expect("folder");
    for name in ["HEAD", SEGMENT] {
        std::fs::copy(fixture().join(name), to.join(name)).expect("copy");
    }
}

#[test]
#[ignore = "writes files; see above"]
fn golden_run_write() {
    if std::env::var_os("COEVOLVE_WRITE_GOLDEN").is_none() {
        return;
    }
    let fixture = fixture();
    if !fixture.join(SEGMENT).exists() {
        let tmp = tempfile::tempdir().expect("folder");
        let run = tmp.path().join("run");
        let settings = [
            "run.seed=3",
            "run.steps=4",
            "eval.tasks=2",
            "evolve.every=1",
            "evolve.max_contexts=2",
            "evolve.steps=4",
            "batch.tasks=2",
            "batch.group=2",
            "env.seed_tasks=4",
            "signals.n_min=4",
        ];
        common::train(&run, &settings);
        std::fs::create_dir_all(fixture.join("journal")).expect("folder");
        for name in ["HEAD", SEGMENT] {
            std::fs::copy(run.join(name), fixture.join(name)).expect("copy");
        }
        let text = serde_json::to_string_pretty(&digests(&fixture)).expect("JSON") + "\n";
        std::fs::write(fixture.join("digests.json"), text).expect("write");
    }
    if !fixture.join("projection.txt").exists() {
        std::fs::write(fixture.join("projection.txt"), projection(&fixture) + "\n").expect("write");
    }
}

#[test]
fn a_run_of_an_earlier_release_is_read_to_the_same_digests() {
    let text = std::fs::read_to_string(fixture().join("digests.json")).expect("digests.json");
    let recorded: Digests = serde_json::from_str(&text).expect("JSON");
    assert_eq!(digests(&fixture()), recorded);
    let report = verify(&fixture()).expect("verify");
    assert!(report.is_ok(), "{:?}", report.findings);
    assert_eq!((report.events, &report.facts_digest), (recorded.events, &recorded.facts_digest));
    assert_eq!(report.heads, [(MAIN, recorded.events, recorded.chain_digest)]);
}

#[test]
fn a_run_of_an_earlier_release_folds_to_the_same_projections() {
    let recorded = std::fs::read_to_string(fixture().join("projection.txt")).expect("projection.txt");
    assert_eq!(
        projection(&fixture()),
        recorded.trim_end(),
        "if the fold was changed on purpose: see the module's text"
    );
}

/// The frames of a segment of one branch, each with the chain digests before its record and after itself: found by the
/// offsets of `schema/README.md` and no code of the log.
fn frames(segment: &[u8]) -> Vec<(&[u8], Digest, Digest)> {
    let u32_at = |b: &[u8], at: usize| u32::from_le_bytes(b[at..at + 4].try_into().expect("4 bytes")) as usize;
    let (mut out, mut prev) = (Vec::new(), Digest::ZERO);
    let mut rest = &segment[64..];
    while !rest.is_empty() {
        assert_eq!(&rest[..4], b"CVJR");
        let (count, len) = (u32_at(rest, 44), u32_at(rest, 56));
        let whole = &rest[104..104 + len];
        let (mut body, before) = (whole, prev);
        for _ in 0..count {
            assert_eq!(&body[..4], b"CVEF");
            let (frame, more) = body.split_at(72 + u32_at(body, 24) + u32_at(body, 28));
            body = more;
            prev = Digest(*blake3::hash(&whole[..len - body.len()]).as_bytes());
            out.push((frame, before, prev));
        }
        assert!(body.is_empty());
        rest = &rest[104 + len..];
    }
    out
}

#[test]
fn every_event_of_an_earlier_release_is_written_to_the_same_bytes() {
    let segment = std::fs::read(fixture().join(SEGMENT)).expect("segment");
    let frames = frames(&segment);
    let (events, reader) = (events(&fixture()), Reader::open(&fixture()).expect("the run opens"));
    assert_eq!(frames.len(), events.len());
    let (mut same, mut kinds) = (0, BTreeSet::new());
    for ((old, prev, digest), e) in frames.into_iter().zip(&events) {
        let encoded = codec::encode(&e.event, &e.meta).expect("encode");
        kinds.insert(encoded.kind);
        // An event of a kind that has a newer version since is read, and not written like this any more.
        if old[8..10] == encoded.version.to_le_bytes() && old[64..66] == codec::META_VERSION.to_le_bytes() {
            let header = frame::Header {
                kind: encoded.kind as u16,
                version: encoded.version,
                flags: 0,
                branch: MAIN,
                seq: e.seq,
                prev,
                meta_version: codec::META_VERSION,
            };
            let mut new = Vec::new();
            frame::write(&mut new, &header, &encoded.facts, &encoded.meta).expect("frame");
            assert!(new == old, "event {} ({:?}) is written to other bytes", e.seq, encoded.kind);
            same += 1;
        }
        assert_eq!(reader.digest(MAIN, e.seq).expect("a digest"), digest, "event {}", e.seq);
    }
    assert!(same > 0);
    let wanted = [Kind::RolloutFinished, Kind::SignalRaised, Kind::GradientStepTaken, Kind::DraftValidated];
    assert!(wanted.iter().all(|k| kinds.contains(k)) && kinds.len() > 15, "the fixture shows too little: {kinds:?}");
    assert!(matches!(events.last().map(|e| &e.event), Some(Event::RunFinished(_))));
}

#[test]
fn a_run_of_an_earlier_release_can_be_moved_and_written_on() {
    let tmp = tempfile::tempdir().expect("folder");
    let moved = tmp.path().join("moved");
    import(&mut exported(&fixture()).as_slice(), &moved, &mut |_| {}).expect("import");
    let segment = |dir: &Path| std::fs::read(dir.join(SEGMENT)).expect("segment");
    assert!(segment(&moved) == segment(&fixture()), "the imported journal has other bytes");
    copy(tmp.path());
    let before = events(tmp.path());
    let log = Log::open(tmp.path(), Options { sled: false, ..Options::default() }).expect("the log opens");
    assert!(log.notes().is_empty(), "{:?}", log.notes());
    let more = before.last().expect("events").clone();
    let seq = log.append(more.event, more.meta).expect("append").wait().expect("durable").seq;
    assert_eq!(seq, before.len() as u64 + 1);
    drop(log);
    assert_eq!(events(tmp.path())[..before.len()], before);
}

#[test]
fn the_fixture_holds_nothing_else() {
    let names: BTreeSet<String> = common::files(&fixture())
        .iter()
        .map(|p| p.strip_prefix(fixture()).expect("below").display().to_string())
        .collect();
    let wanted = ["HEAD", "digests.json", SEGMENT, "projection.txt"].map(String::from);
    assert_eq!(names, BTreeSet::from(wanted));
}
