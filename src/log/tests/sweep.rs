//! Reading for a fold: what it gives out, and what it does not let through.

use super::*;
use crate::event::digest::FactKey;
use crate::event::frame;

/// Records of a few events, over several segments, with a payload in a blob file.
fn several_records(dir: &Path) -> Log {
    let options = Options { group_events: 4, segment_bytes: 4096, ..without_sled() };
    let log = Log::create(dir, started(), samples::meta(), options).unwrap();
    for i in 0..40 {
        log.append(if i == 21 { large(3, 200_000) } else { event(i) }, samples::meta()).unwrap();
        if i % 3 == 0 {
            log.barrier().unwrap();
        }
    }
    log.barrier().unwrap();
    log
}

fn swept(reader: &Reader, branch: BranchId, from: u64, upto: u64) -> Result<Vec<(u64, Event, Meta)>> {
    let mut out = Vec::new();
    reader.sweep(branch, from, upto, |s| {
        out.push((s.seq, s.view.native(), s.meta));
        Ok::<_, Error>(())
    })?;
    Ok(out)
}

#[test]
fn a_sweep_gives_what_reading_gives_of_every_stretch_and_branch() {
    let dir = tempfile::tempdir().unwrap();
    let log = several_records(dir.path());
    let fork = log.create_branch("fork", MAIN, 17, "{}", samples::meta()).unwrap();
    drop(log);
    let log = Log::open(dir.path(), Options { branch: fork, ..without_sled() }).unwrap();
    for i in 100..110 {
        log.append(event(i), samples::meta()).unwrap();
    }
    log.barrier().unwrap();
    drop(log);
    let reader = Reader::open(dir.path()).unwrap();
    assert!(reader.records().len() > 8 && reader.records().last().unwrap().segment > 1);
    for branch in [MAIN, fork] {
        let read = reader.read(branch, 1).unwrap().map(|s| s.unwrap());
        let read: Vec<_> = read.map(|s| (s.seq, s.event, s.meta)).collect();
        let head = read.len() as u64;
        assert_eq!(head, if branch == MAIN { 41 } else { 27 });
        for from in 1..=head + 1 {
            for upto in [from - 1, from, from + 2, from + 9, head, u64::MAX] {
                let wanted: Vec<_> = read.iter().filter(|e| (from..=upto).contains(&e.0)).cloned().collect();
                assert_eq!(swept(&reader, branch, from, upto).unwrap(), wanted, "{branch}: {from}..={upto}");
            }
        }
    }
    assert!(matches!(swept(&reader, 77, 1, 9), Err(Error::NoBranch { .. })));
}

#[test]
fn one_fact_is_found_in_the_stretch_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    drop(several_records(dir.path()));
    let reader = Reader::open(dir.path()).unwrap();
    let key = FactKey::StepSkipped { step: 30, update: 60 };
    assert_eq!(reader.fact(MAIN, 1, 41, &key).unwrap(), Some((32, event(30))));
    assert_eq!(reader.fact(MAIN, 32, 32, &key).unwrap(), Some((32, event(30))));
    assert_eq!(reader.fact(MAIN, 1, 31, &key).unwrap(), None);
    assert_eq!(reader.fact(MAIN, 1, 41, &FactKey::StepSkipped { step: 30, update: 61 }).unwrap(), None);
}

#[test]
fn the_first_error_of_the_caller_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 9, without_sled());
    let mut seen = 0;
    let ended = Reader::open(dir.path()).unwrap().sweep(MAIN, 1, u64::MAX, |s| {
        seen = s.seq;
        if s.seq == 4 { Err(Error::Closed) } else { Ok(()) }
    });
    assert!(matches!(ended, Err(Error::Closed)));
    assert_eq!(seen, 4);
}

#[test]
fn no_flipped_byte_of_a_record_gets_through() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 6, without_sled());
    let (path, reader) = (segment(dir.path(), 1), Reader::open(dir.path()).unwrap());
    let records = reader.records();
    let good = std::fs::read(&path).unwrap();
    for record in &records {
        let body = record.offset as usize + super::record::RECORD_HEADER;
        for at in (body..body + record.header.body_len as usize).step_by(3) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, &bad).unwrap();
            assert!(matches!(swept(&reader, MAIN, 1, u64::MAX), Err(Error::Corrupt { .. })), "byte {at}");
        }
    }
    std::fs::write(&path, &good[..good.len() - 5]).unwrap();
    assert!(matches!(swept(&reader, MAIN, 1, u64::MAX), Err(Error::Corrupt { .. })));
    std::fs::write(&path, &good).unwrap();
    assert_eq!(swept(&reader, MAIN, 1, u64::MAX).unwrap().len(), 7);
}

/// A record with checksums that hold, but another event before it than the one that is there.
#[test]
fn a_record_that_does_not_link_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    drop(several_records(dir.path()));
    let record = Reader::open(dir.path()).unwrap().records()[1];
    let path = segment(dir.path(), record.segment);
    let good = std::fs::read(&path).unwrap();
    let body_at = record.offset as usize + super::record::RECORD_HEADER;
    let forged = |of_header: bool, of_frame: bool| {
        let (mut bytes, mut header) = (good.clone(), record.header);
        let body = &mut bytes[body_at..body_at + header.body_len as usize];
        if of_frame {
            body[32..64].fill(9);
            let len = frame::frame_len(body).unwrap();
            let crc = crc32c::crc32c_append(crc32c::crc32c(&body[..68]), &body[frame::HEADER_LEN..len]);
            body[68..72].copy_from_slice(&crc.to_le_bytes());
        }
        header.body_crc = crc32c::crc32c(body);
        if of_header {
            header.prev = Digest([9; 32]);
        }
        bytes[record.offset as usize..body_at].copy_from_slice(&header.encode());
        std::fs::write(&path, bytes).unwrap();
        swept(&Reader::open(dir.path()).unwrap(), MAIN, 1, u64::MAX)
    };
    for (of_header, of_frame) in [(true, true), (true, false), (false, true)] {
        let error = forged(of_header, of_frame).unwrap_err().to_string();
        assert!(error.contains("does not link to the event before it"), "{error}");
    }
    assert_eq!(forged(false, false).unwrap().len(), 41);
}
