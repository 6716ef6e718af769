//! The event store: an append-only journal that is the only truth of a run.
//!
//! # A run folder
//! ```text
//! DIR/LOCK                 advisory lock of the one writer (names its holder)
//! DIR/HEAD                 how far the journal is durable (followers read no further)
//! DIR/journal/*.seg        segments of checksummed records, one record per group commit (*.segz: compressed)
//! DIR/blobs/ab/abcdef..    payloads over 64 KiB, named by their BLAKE3
//! DIR/events.sled/         the same frames in sled, filled behind the acknowledgement
//! DIR/snapshots/*.snap     folds as of an event: caches, see [`snapshot`]
//! DIR/quarantine/          torn tails that a crash left (never acknowledged)
//! ```
//!
//! # What an acknowledgement means
//! [`Ticket::wait`] and [`EventStore::barrier`] return, and [`Subscription`] gives an event out, only after the record
//! that holds it was written and an `fdatasync` begun after that returned (and the folder was flushed when the segment
//! was created). Such an event survives a kill at any moment, and a power loss as far as the file system and the device
//! keep what they promise. A commit is written once `group_events` events or `group_bytes` bytes wait, or the oldest has
//! waited `group_wait_us`, or a barrier asks; then it waits for one `pwrite` and one `fdatasync`, never for sled, HEAD,
//! compression or a snapshot. Commits that wait at the same time share the `fdatasync`. Events are serialised, framed
//! and hashed in the threads that append them, and the next commits gather while one is flushed (at most `queue_events`
//! events). After a failed flush nothing more is acknowledged: the kernel may have dropped the pages, so a later success
//! would prove nothing. On reopening, whole records above the watermark are copied to a fresh,
//! flushed segment; they may contain events whose acknowledgement the caller never saw.
//!
//! # When something breaks
//! [`verify`] reads every byte and says what is damaged; [`repair`] mends the journal from the sled copy and the sled
//! copy from the journal; [`salvage`] copies what neither can mend around; [`Reader::complete`] tells a reader that
//! less is there than was acknowledged. `tests/power.rs` replays power losses after every call the log makes, and
//! lets every call fail. [`export`] and [`import`] move a run as one stream.
//!
//! # Branches
//! Sequence numbers count a branch's *history* from 1: a branch forked at event 40 of its parent has 41 as its first
//! own event and shares 1..=40. Branch facts (forks, undone stretches, deletions) stand on the [`LEDGER`], which is no
//! branch of training: nothing is taken out of the journal, and no branch changes for another's sake.

mod blob;
mod branches;
mod clone;
mod collect;
mod commit;
mod error;
mod filler;
mod head;
mod index;
mod journal;
mod lock;
mod making;
mod memory;
mod options;
mod packed;
#[doc(hidden)]
pub mod parsers;
mod reader;
mod rebuild;
mod record;
mod repair;
mod salvage;
mod segments;
mod sled_store;
pub mod snapshot;
mod store;
mod stream;
mod survey;
mod sweep;
mod tail;
#[cfg(test)]
mod tests;
mod ticket;
mod verify;
mod writer;

pub use branches::{Branch, Span};
pub use clone::{fork_folder, link};
pub use collect::Collect;
pub use error::{Error, Result};
pub use filler::SledStatus;
pub use lock::refuse_foreign;
pub use memory::MemoryLog;
pub use options::{Faults, Options};
pub use reader::{Events, Reader};
pub use repair::{Repair, repair};
pub use salvage::{Salvage, SalvagedBranch, salvage};
pub use store::Log;
pub(crate) use store::holds_events;
pub use stream::{Streamed, export, import};
pub use sweep::Swept;
pub use tail::Subscription;
pub use ticket::Ticket;
pub use verify::{Finding, Report, SledCheck, Space, verify};

use crate::event::{Event, Meta};

/// Number of a branch in keys and headers.
pub type BranchId = u32;
/// An event by the branch that owns it and its seq there.
pub type EventAt = (BranchId, u64);
/// The branch every run starts with.
pub const MAIN: BranchId = 0;
/// Holds the folder's own events ([`crate::event::BranchCreated`]); never trained on, never forked.
pub const LEDGER: BranchId = u32::MAX;

/// A durable event.
#[derive(Debug, Clone, PartialEq)]
pub struct Stamped {
    /// Position in its branch's history, from 1.
    pub seq: u64,
    /// Branch that holds it (an ancestor, for shared events).
    pub branch: BranchId,
    /// What happened.
    pub event: Event,
    /// Observations about it.
    pub meta: Meta,
}

/// Iterator over durable events.
pub type EventIter = Box<dyn Iterator<Item = Result<Stamped>> + Send>;

/// What the loop needs of a log; [`Log`] on disk, [`MemoryLog`] in tests.
pub trait EventStore: Send + Sync {
    /// Queues an event for the branch this handle writes to. Returns at once unless the bounded queue
    /// is full or the payload needs a blob file.
    ///
    /// # Errors
    /// When the event cannot be serialised or the log is closed. A failed flush is reported by the ticket.
    fn append(&self, event: Event, meta: Meta) -> Result<Ticket>;

    /// Waits until everything appended so far is durable; returns the branch's last seq.
    ///
    /// # Errors
    /// [`Error::Failed`] after a failed flush, [`Error::Closed`].
    fn barrier(&self) -> Result<u64>;

    /// Branch that [`EventStore::append`] writes to.
    fn branch(&self) -> BranchId;

    /// Last durable seq of that branch; 0 when empty.
    fn head(&self) -> u64;

    /// Durable events of a branch's history (ancestors included) with seq >= `from`, up to its present head.
    ///
    /// # Errors
    /// [`Error::NoBranch`].
    fn read(&self, branch: BranchId, from: u64) -> Result<EventIter>;

    /// Events (of all branches) that become durable from now on, in order. A subscriber that falls behind
    /// reads from the store: it never blocks the writer and never holds more than a bounded number of events.
    fn published(&self) -> Subscription;
}
