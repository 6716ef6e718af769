//! Export and import.

use super::salvage::{family, histories};
use super::*;
use crate::log::{export, import};

fn exported(dir: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut told = (0, 0);
    let done = export(dir, &mut bytes, &mut |done, of| told = (done, of)).unwrap();
    assert_eq!(told, (done.events, done.events));
    assert_eq!(done.bytes, bytes.len() as u64);
    bytes
}

#[test]
fn a_run_goes_through_a_stream_with_branches_and_payloads() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    family(&run, Options::default());
    let bytes = exported(&run);
    let copy = dir.path().join("copy");
    let done = import(&mut bytes.as_slice(), &copy, &mut |_| {}).unwrap();
    assert_eq!((done.events, done.records, done.blobs, done.bytes), (24, 24, 1, bytes.len() as u64));
    assert_eq!(histories(&copy), histories(&run));
    let digest = |dir: &Path| Reader::open(dir).unwrap().facts_digest(MAIN).unwrap();
    assert_eq!(digest(&copy), digest(&run));
    // The copy is a run like any other, and exports to the same bytes.
    assert_eq!(exported(&copy), bytes);
    let log = Log::open(&copy, Options::default()).unwrap();
    assert_eq!(log.append(event(70), samples::meta()).unwrap().wait().unwrap().seq, log.head());
    drop(log);
    assert!(verify(&copy).unwrap().is_ok());
    // Nothing is overwritten.
    assert!(matches!(import(&mut bytes.as_slice(), &run, &mut |_| {}), Err(Error::Exists { .. })));
}

#[test]
fn whatever_byte_is_changed_or_missing_nothing_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    family(&run, without_sled());
    let bytes = exported(&run);
    let refused = |bytes: &[u8], what: &str| {
        let out = dir.path().join("out");
        let error = import(&mut &bytes[..], &out, &mut |_| {}).expect_err(what);
        assert!(matches!(error, Error::Stream { .. }), "{what}: {error}");
        assert!(!out.exists(), "{what}");
    };
    for at in (0..bytes.len()).step_by(29) {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        refused(&bad, &format!("byte {at}"));
    }
    for keep in (0..bytes.len()).step_by(101) {
        refused(&bytes[..keep], &format!("cut at {keep}"));
    }
    refused(b"something else altogether, long enough for a header", "no export");
}

#[test]
fn an_export_of_a_run_that_is_written_is_a_prefix_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let log =
        Log::create(&run, started(), samples::meta(), Options { segment_bytes: 20_000, ..without_sled() }).unwrap();
    let copies: Vec<_> = (0..6)
        .map(|i| {
            (0..300).for_each(|n| drop(log.append(event(n), samples::meta()).unwrap()));
            let copy = dir.path().join(format!("copy-{i}"));
            import(&mut exported(&run).as_slice(), &copy, &mut |_| {}).unwrap();
            copy
        })
        .collect();
    log.barrier().unwrap();
    let whole = read_all(&run, MAIN);
    for copy in copies {
        let events = read_all(&copy, MAIN);
        assert!(!events.is_empty() && whole.starts_with(&events));
    }
}

#[test]
fn a_damaged_run_is_not_exported() {
    let dir = tempfile::tempdir().unwrap();
    family(dir.path(), without_sled());
    let path = segment(dir.path(), 1);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = export(dir.path(), &mut Vec::new(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}
