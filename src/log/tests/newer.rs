//! A log that a newer program wrote.

use super::*;
use crate::event::codec::{self, META_VERSION};
use crate::event::{Kind, frame};
use crate::log::journal::Journal;
use crate::log::record::RecordHeader;

/// Appends an event with a version that its kind does not have here; its bytes are those of a valid payload.
fn append_newer(dir: &Path, version: u16) {
    let (mut journal, index, _) = Journal::open(dir, 1 << 20, Default::default()).unwrap();
    let last = index.last_seq(MAIN).unwrap();
    let prev = Reader::open(dir).unwrap().digest(MAIN, last).unwrap();
    let encoded = codec::encode(&large(1, 10), &samples::meta()).unwrap();
    let header = frame::Header {
        kind: encoded.kind as u16,
        version,
        flags: 0,
        branch: MAIN,
        seq: last + 1,
        prev,
        meta_version: META_VERSION,
    };
    let mut body = Vec::new();
    frame::write(&mut body, &header, &encoded.facts, &encoded.meta).unwrap();
    let header = RecordHeader {
        journal: [0; 16],
        epoch: 0,
        number: 0,
        branch: MAIN,
        count: 1,
        first_seq: last + 1,
        body_len: 0,
        body_crc: 0,
        prev,
        place: 0,
    };
    journal.append(header, &body).unwrap();
}

#[test]
fn an_event_of_a_newer_version_is_named_and_what_stands_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 3, without_sled());
    append_newer(dir.path(), 2);
    let got: Vec<_> = Reader::open(dir.path()).unwrap().read(MAIN, 1).unwrap().collect();
    // The four before it share no record with it.
    assert!(got[..4].iter().all(Result::is_ok) && got.len() == 5, "{got:?}");
    let wanted = codec::Error::UnknownVersion { kind: Kind::FailureNoted, version: 2, newest: 1 };
    match &got[4] {
        Err(Error::Codec { branch: MAIN, seq: 5, source }) => assert_eq!(*source, wanted),
        other => panic!("{other:?}"),
    }
    // That is no damage of the bytes, and `verify` says what to do about it.
    let report = verify(dir.path()).unwrap();
    assert_eq!(report.first_bad_event(), Some((MAIN, 5)));
    assert_eq!((report.findings.len(), report.findings[0].remedy), (1, "use the coevolve that wrote it"));
    assert_eq!(report.findings[0].what, wanted.to_string());
}
