//! Settings of a log, with their defaults, and the fault plan of tests.

use super::{BranchId, MAIN};
use std::io;

/// Settings of a log opened for writing.
#[derive(Debug, Clone)]
pub struct Options {
    /// Branch that [`super::EventStore::append`] writes to. Default main.
    pub branch: BranchId,
    /// A group commit holds at most this many events. Default 256, minimum 1.
    pub group_events: usize,
    /// A group commit is closed once it holds this many bytes. Default 1 MiB, at most 32 MiB.
    pub group_bytes: usize,
    /// How long a group commit waits for more events, microseconds; a barrier ends the wait. Default 200.
    pub group_wait_us: u64,
    /// Events waiting to be committed; `append` blocks beyond. Default 1024, minimum 1.
    pub queue_events: usize,
    /// A segment that reached this length is closed, bytes. Default 64 MiB.
    pub segment_bytes: u64,
    /// Facts longer than this go to a blob file, bytes. Default 64 KiB, at most 1 MiB.
    pub blob_bytes: usize,
    /// Published events kept in memory for subscribers. Default 4096.
    pub ring_events: usize,
    /// And their approximate bytes. Default 16 MiB.
    pub ring_bytes: usize,
    /// Whether the sled copy is kept. Default true.
    pub sled: bool,
    /// Whether closed segments and the groups of the sled copy are compressed, in the background. Default true.
    pub compress: bool,
    /// Copies of every blob file, 1 or 2. Default 1.
    pub blob_copies: u32,
    /// Fault plan, for tests.
    #[doc(hidden)]
    pub faults: Faults,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            branch: MAIN,
            group_events: 256,
            group_bytes: 1 << 20,
            group_wait_us: 200,
            queue_events: 1024,
            segment_bytes: 64 << 20,
            blob_bytes: 64 << 10,
            ring_events: 4096,
            ring_bytes: 16 << 20,
            sled: true,
            compress: true,
            blob_copies: 1,
            faults: Faults::default(),
        }
    }
}

/// What goes wrong, and when. Counts include the first event's own commit.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The n-th flush (from 1) and all later ones fail.
    pub fail_sync: Option<u64>,
    /// The n-th write (from 1) stops after so many bytes and fails.
    pub torn_write: Option<(u64, usize)>,
    syncs: u64,
    writes: u64,
}

impl Faults {
    /// The plan with its counters at zero.
    pub fn plan(fail_sync: Option<u64>, torn_write: Option<(u64, usize)>) -> Faults {
        Faults { fail_sync, torn_write, ..Faults::default() }
    }

    /// Counts a flush.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        self.syncs += 1;
        match self.fail_sync {
            Some(n) if self.syncs >= n => Err(io::Error::other("flush failed by the fault plan")),
            _ => Ok(()),
        }
    }

    /// Counts a write of `len` bytes; how many of them may be written.
    pub(crate) fn torn(&mut self, len: usize) -> usize {
        self.writes += 1;
        match self.torn_write {
            Some((n, keep)) if self.writes == n => keep.min(len.saturating_sub(1)),
            _ => len,
        }
    }
}
