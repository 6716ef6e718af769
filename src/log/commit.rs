//! The committer: makes the groups that wait durable with one flush, then publishes and acknowledges them in order.
//!
//! After the first failure everything that waits and everything later is refused.

use super::error::{Error, Result};
use super::journal::Journal;
use super::record::RecordHeader;
use super::tail::Tail;
use super::writer::{Done, Group, Shared};
use super::{LEDGER, Reader};
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
        let mut done = Done::default();
        while let Some(mut groups) = self.shared.next(std::mem::take(&mut done)) {
            match self.write(&mut groups) {
                Ok(()) => groups.into_iter().for_each(|group| self.acknowledge(group, &mut done)),
                Err(error) => {
                    let error = Error::Failed { reason: error.to_string() };
                    self.tail.close(error.clone());
                    self.shared.fail(&error);
                    groups.into_iter().for_each(|group| group.promise.answer(Err(error.clone())));
                }
            }
        }
    }

    /// Makes groups durable with one flush, and readable.
    fn write(&mut self, groups: &mut [Group]) -> Result<()> {
        let mut written = Vec::with_capacity(groups.len());
        for group in groups.iter_mut() {
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
                place: 0,
            };
            written.push(self.journal.append_unflushed(header, &mut group.record)?);
        }
        self.journal.flush()?;
        let fits = self.reader.with_index(|index| {
            for (group, (segment, offset, header)) in groups.iter().zip(written) {
                index.journal.get_or_insert(header.journal);
                index.push(segment, offset, header)?;
                for (stamped, _) in group.events.iter().filter(|_| group.branch == LEDGER) {
                    index.apply(&stamped.event)?;
                }
            }
            Ok::<(), String>(())
        });
        match fits {
            Some(Err(what)) => Err(Error::Failed { reason: what }),
            _ => Ok(()),
        }
    }

    fn acknowledge(&self, group: Group, done: &mut Done) {
        let Group { events, record, promise, .. } = group;
        let stamped = events.iter().map(|(event, _)| event.clone()).collect();
        done.gone.extend(self.tail.publish(events));
        promise.answer(Ok(stamped));
        done.records.push(record);
    }
}
