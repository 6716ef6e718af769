//! The thread that keeps the sled copy filled behind the journal.
//!
//! It opens sled in the background, compares its position with the journal, catches up, and then follows.
//! A copy that belongs to another run, is ahead, has a hole at its end or makes sled fail is moved aside and
//! rebuilt beside, then renamed.

use super::error::{Error, Result};
use super::record::JournalId;
use super::sled_store::{Filling, SledStore};
use super::tail::Tail;
use super::{BranchId, Reader};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Records stored between two notes of the position.
const BATCH_RECORDS: usize = 32;
/// Events stored between two flushes of the copy.
const FLUSH_EVENTS: u64 = 16_384;
/// How often the thread looks whether it should end.
const IDLE_WAIT: Duration = Duration::from_millis(100);

/// How the sled copy is doing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SledStatus {
    /// Events of the journal it holds.
    pub events: u64,
    /// Whether it was rebuilt from the journal since it was opened, and why.
    pub rebuilt: Option<String>,
    /// Why it is not kept, if it is not: the journal goes on without it.
    pub failed: Option<String>,
    /// Why closed segments are no longer compressed, if so.
    pub unpacked: Option<String>,
}

/// The running thread.
#[derive(Debug)]
pub(crate) struct Filler {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    status: Arc<Mutex<SledStatus>>,
}

impl Filler {
    pub(crate) fn start(reader: Reader, tail: Arc<Tail>, compress: bool) -> Result<Filler> {
        let stop = Arc::new(AtomicBool::new(false));
        let status = Arc::new(Mutex::new(SledStatus::default()));
        let (stopped, shared) = (stop.clone(), status.clone());
        let thread = std::thread::Builder::new()
            .name("log-sled".into())
            .spawn(move || {
                let note = |f: &dyn Fn(&mut SledStatus)| f(&mut shared.lock().unwrap_or_else(PoisonError::into_inner));
                let mut outcome = fill(&reader, &tail, &stopped, &note, compress);
                if let Err(error) = &outcome {
                    // Once: a damaged copy is replaced. A second failure has another cause.
                    let why = error.to_string();
                    outcome = rebuild(&reader, compress).and_then(|()| {
                        note(&|s| s.rebuilt = Some(why.clone()));
                        fill(&reader, &tail, &stopped, &note, compress)
                    });
                }
                if let Err(error) = outcome {
                    note(&|s| s.failed = Some(error.to_string()));
                }
            })
            .map_err(Error::io("start the sled thread of", Path::new("the log")))?;
        Ok(Filler { thread: Some(thread), stop, status })
    }

    pub(crate) fn status(&self) -> SledStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Catches up with everything durable and ends.
    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Changes the status that others see.
type Note<'a> = dyn Fn(&dyn Fn(&mut SledStatus)) + 'a;

fn fill(reader: &Reader, tail: &Tail, stop: &AtomicBool, note: &Note<'_>, mut compress: bool) -> Result<()> {
    let path = SledStore::path(reader.dir());
    // The first event decides which run this is.
    while reader.events() == 0 {
        if tail.wait_beyond(0, IDLE_WAIT).1 && reader.events() == 0 {
            return Ok(());
        }
    }
    let journal = reader.journal_id().ok_or(Error::Closed)?;
    let fresh = !path.exists();
    let store = SledStore::open(&path)?;
    let mut at = check_position(reader, &store, &journal)?;
    if fresh && reader.events() > 1 {
        note(&|s| s.rebuilt = Some("there was no sled copy".into()));
    }
    let mut flushed = at;
    loop {
        // Read before the work: whatever was durable when the stop came is stored.
        let stopping = stop.load(Ordering::Acquire);
        while at < reader.events() {
            at = copy(reader, &store, &journal, at, compress)?;
            note(&|s| s.events = at);
            if at - flushed >= FLUSH_EVENTS {
                store.flush()?;
                flushed = at;
            }
        }
        if stopping {
            return store.flush();
        }
        // One segment at a time, behind everything that is waited for. That it fails (a full disk) changes nothing.
        if compress && at == reader.events() {
            match reader.pack_next() {
                Ok(Some(_)) => continue,
                Ok(None) => {}
                Err(error) => {
                    note(&|s| s.unpacked = Some(error.to_string()));
                    compress = false;
                }
            }
        }
        tail.wait_beyond(at, IDLE_WAIT);
        if tail.wait_beyond(at, Duration::ZERO).1 {
            // A closed log publishes nothing more; wait for the stop without spinning.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn copy(reader: &Reader, store: &SledStore, journal: &JournalId, from: u64, compress: bool) -> Result<u64> {
    let mut filling = Filling::new(store, compress);
    let at = reader
        .frames_from(from, BATCH_RECORDS, |frame| filling.put(frame.header.branch, frame.header.seq, frame.bytes))?;
    filling.flush()?;
    store.set_position(journal, at)?;
    Ok(at)
}

/// The ordinal up to which the copy is filled, after a cheap check that its ends agree with the journal.
fn check_position(reader: &Reader, store: &SledStore, journal: &JournalId) -> Result<u64> {
    let bad = |what: String| Error::Sled { path: store.folder().to_path_buf(), what };
    if !store.is_current()? {
        return Err(bad("its layout is another than this program's".into()));
    }
    let Some((id, at)) = store.position()? else {
        if !store.branch_ids()?.is_empty() {
            return Err(bad("it holds events but not how many".into()));
        }
        return Ok(0);
    };
    if id != *journal {
        return Err(bad("it belongs to another run".into()));
    }
    if at > reader.events() {
        return Err(bad(format!("it holds {at} events, the journal {}", reader.events())));
    }
    let mut lasts: BTreeMap<BranchId, u64> = BTreeMap::new();
    for record in reader.records().iter().take_while(|r| r.ordinal < at) {
        let held = u64::from(record.header.count).min(at - record.ordinal);
        lasts.insert(record.header.branch, record.header.first_seq + held - 1);
    }
    for (branch, seq) in lasts {
        let frame = store.get(branch, seq)?;
        let ours = reader.raw(branch, seq)?;
        if frame != ours {
            return Err(bad(format!("event {branch}:{seq} is missing or differs from the journal")));
        }
    }
    Ok(at)
}

/// Builds a new copy from the journal beside the old one and puts it in its place. The old one moves to
/// `quarantine/`: it may hold what the journal has lost.
pub(crate) fn rebuild(reader: &Reader, compress: bool) -> Result<()> {
    let path = SledStore::path(reader.dir());
    let beside = path.with_extension("sled.new");
    match std::fs::remove_dir_all(&beside) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &beside)(e)),
        _ => {}
    }
    let journal = reader.journal_id().ok_or(Error::Closed)?;
    {
        let store = SledStore::open(&beside)?;
        let mut at = 0;
        while at < reader.events() {
            at = copy(reader, &store, &journal, at, compress)?;
        }
        store.flush()?;
    }
    if path.exists() {
        let quarantine = reader.dir().join("quarantine");
        std::fs::create_dir_all(&quarantine).map_err(Error::io("create folder", &quarantine))?;
        let free = (1..).map(|n| quarantine.join(format!("sled-{n}"))).find(|p| !p.exists());
        let Some(old) = free else { return Err(Error::Closed) };
        std::fs::rename(&path, &old).map_err(Error::io("rename", &path))?;
    }
    std::fs::rename(&beside, &path).map_err(Error::io("rename", &beside))?;
    super::blob::sync_dir(reader.dir())
}
