//! Publication: what became durable, in order, to whoever folds it.
//!
//! The last few thousand events are kept in memory; a subscriber that falls further behind reads the
//! gap from the store, so a slow one costs disk reads, never memory or a blocked writer.

use super::Stamped;
use super::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Records read at once for a subscriber that fell behind.
const CATCH_UP_RECORDS: usize = 16;

/// Where events older than the ring come from.
pub(crate) trait Backlog: Send + Sync + std::fmt::Debug {
    /// Some events in publication order from an ordinal on; at least one if it is durable.
    fn events_from(&self, ordinal: u64) -> Result<Vec<Arc<Stamped>>>;
}

impl Backlog for super::Reader {
    fn events_from(&self, ordinal: u64) -> Result<Vec<Arc<Stamped>>> {
        Ok(self.journal_order(ordinal, CATCH_UP_RECORDS)?.into_iter().map(Arc::new).collect())
    }
}

#[derive(Debug)]
struct State {
    ring: VecDeque<(Arc<Stamped>, usize)>,
    ring_bytes: usize,
    /// Ordinal after the newest published event.
    next: u64,
    closed: Option<Error>,
}

/// Shared between the writer and all subscribers.
#[derive(Debug)]
pub(crate) struct Tail {
    state: Mutex<State>,
    changed: Condvar,
    max_events: usize,
    max_bytes: usize,
}

impl Tail {
    pub(crate) fn new(next: u64, max_events: usize, max_bytes: usize) -> Tail {
        let state = State { ring: VecDeque::new(), ring_bytes: 0, next, closed: None };
        Tail { state: Mutex::new(state), changed: Condvar::new(), max_events, max_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ordinal after the newest published event.
    pub(crate) fn next(&self) -> u64 {
        self.lock().next
    }

    /// Publishes durable events with their approximate size in bytes; returns those that fall out of the ring.
    pub(crate) fn publish(&self, events: impl IntoIterator<Item = (Arc<Stamped>, usize)>) -> Vec<Arc<Stamped>> {
        let mut gone = Vec::new();
        let mut state = self.lock();
        for (event, bytes) in events {
            state.ring_bytes += bytes;
            state.ring.push_back((event, bytes));
            state.next += 1;
        }
        while state.ring.len() > self.max_events || (state.ring_bytes > self.max_bytes && state.ring.len() > 1) {
            let Some((event, bytes)) = state.ring.pop_front() else { break };
            state.ring_bytes -= bytes;
            gone.push(event);
        }
        drop(state);
        self.changed.notify_all();
        gone
    }

    /// No more events will come.
    pub(crate) fn close(&self, why: Error) {
        self.lock().closed.get_or_insert(why);
        self.changed.notify_all();
    }

    /// Waits until an event with this ordinal or a later one is published, or the log closes.
    pub(crate) fn wait_beyond(&self, ordinal: u64, timeout: Duration) -> (u64, bool) {
        let state = self.lock();
        let idle = |s: &mut State| s.next <= ordinal && s.closed.is_none();
        let (state, _) = self.changed.wait_timeout_while(state, timeout, idle).unwrap_or_else(PoisonError::into_inner);
        (state.next, state.closed.is_some())
    }
}

/// Durable events in publication order; see [`super::EventStore::published`].
#[derive(Debug)]
pub struct Subscription {
    tail: Arc<Tail>,
    backlog: Arc<dyn Backlog>,
    next: u64,
    ready: VecDeque<Arc<Stamped>>,
}

impl Subscription {
    pub(crate) fn new(tail: Arc<Tail>, backlog: Arc<dyn Backlog>, next: u64) -> Subscription {
        Subscription { tail, backlog, next, ready: VecDeque::new() }
    }

    /// The next event if one is durable already.
    ///
    /// # Errors
    /// The reason why the log stopped, once everything durable was given out; damage or I/O when a late
    /// subscriber reads from disk.
    pub fn try_recv(&mut self) -> Result<Option<Arc<Stamped>>> {
        if let Some(event) = self.ready.pop_front() {
            self.next += 1;
            return Ok(Some(event));
        }
        {
            let state = self.tail.lock();
            if self.next >= state.next {
                return match &state.closed {
                    Some(why) => Err(why.clone()),
                    None => Ok(None),
                };
            }
            let oldest = state.next - state.ring.len() as u64;
            if self.next >= oldest {
                let event = state.ring.get((self.next - oldest) as usize).map(|(e, _)| e.clone());
                self.next += 1;
                return Ok(event);
            }
        }
        self.ready = self.backlog.events_from(self.next)?.into();
        let event = self.ready.pop_front();
        self.next += u64::from(event.is_some());
        Ok(event)
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// As [`Subscription::try_recv`]; [`Error::Closed`] after the log was closed.
    pub fn recv(&mut self) -> Result<Arc<Stamped>> {
        loop {
            if let Some(event) = self.recv_timeout(Duration::from_secs(3600))? {
                return Ok(event);
            }
        }
    }

    /// Waits for the next event at most this long.
    ///
    /// # Errors
    /// As [`Subscription::recv`].
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Arc<Stamped>>> {
        if let Some(event) = self.try_recv()? {
            return Ok(Some(event));
        }
        self.tail.wait_beyond(self.next, timeout);
        self.try_recv()
    }

    /// Everything that is durable now and was not given out yet.
    ///
    /// # Errors
    /// As [`Subscription::try_recv`], but a stopped log only counts when nothing is left.
    pub fn drain(&mut self) -> Result<Vec<Arc<Stamped>>> {
        let mut out = Vec::new();
        loop {
            match self.try_recv() {
                Ok(Some(event)) => out.push(event),
                Ok(None) => return Ok(out),
                Err(_) if !out.is_empty() => return Ok(out),
                Err(e) => return Err(e),
            }
        }
    }
}
