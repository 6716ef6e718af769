//! The committer: makes groups durable one after the other, then publishes and acknowledges them.
//!
//! After the first failure everything that waits and everything later is refused.

use super::error::{Error, Result};
use super::journal::Journal;
use super::record::RecordHeader;
use super::tail::Tail;
use super::writer::{Group, Shared};
use super::{LEDGER, Reader, Stamped};
use std::sync::Arc;

pub(crate) struct Committer {
    journal: Journal,
    reader: Reader,
    tail: Arc<Tail>,
    shared: Arc<Shared>,
}

/// Closes queue and publication however the thread ends, so that nobody waits for a dead committer.
struct CloseOnExit(Arc<Tail>, Arc<Shared>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        self.0.close(Error::Closed);
        self.1.fail(&Error::Closed);
    }
}

impl Committer {
    pub(crate) fn new(journal: Journal, reader: Reader, tail: Arc<Tail>, shared: Arc<Shared>) -> Committer {
        Committer { journal, reader, tail, shared }
    }

    pub(crate) fn run(&mut self) {
        let _close = CloseOnExit(self.tail.clone(), self.shared.clone());
        let mut used = (None, Vec::new());
        while let Some(mut group) = self.shared.next(std::mem::take(&mut used)) {
            match self.write(&mut group) {
                Ok(()) => used = self.acknowledge(group),
                Err(error) => {
                    let error = Error::Failed { reason: error.to_string() };
                    self.tail.close(error.clone());
                    self.shared.fail(&error);
                    group.promise.answer(Err(error));
                }
            }
        }
    }

    fn write(&mut self, group: &mut Group) -> Result<()> {
        let header = RecordHeader {
            journal: [0; 16],
            epoch: 0,
            number: 0,
            branch: group.branch,
            count: group.events.len() as u32,
            first_seq: group.events.first().map_or(0, |(e, _)| e.seq),
            body_len: 0,
            body_crc: group.crc,
            prev: group.prev,
        };
        let (segment, offset, header) = self.journal.append_record(header, &mut group.record)?;
        let fits = self.reader.with_index(|index| {
            index.journal.get_or_insert(header.journal);
            index.push(segment, offset, header)?;
            for (stamped, _) in group.events.iter().filter(|_| group.branch == LEDGER) {
                index.apply(&stamped.event)?;
            }
            Ok::<(), String>(())
        });
        match fits {
            Some(Err(what)) => Err(Error::Failed { reason: what }),
            _ => Ok(()),
        }
    }

    /// Returns the memory of its record, and the events that nobody will ask for.
    fn acknowledge(&self, group: Group) -> (Option<Vec<u8>>, Vec<Arc<Stamped>>) {
        let Group { events, record, promise, .. } = group;
        let stamped = events.iter().map(|(event, _)| event.clone()).collect();
        let gone = self.tail.publish(events);
        promise.answer(Ok(stamped));
        (Some(record), gone)
    }
}
