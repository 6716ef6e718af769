//! The answer to an append, given when it is durable.

use super::Stamped;
use super::error::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// What became of a group of events: they share one flush, and one answer.
#[derive(Debug)]
pub(crate) struct Outcome {
    answer: Mutex<Option<Result<Vec<Arc<Stamped>>>>>,
    ready: Condvar,
}

/// The writer's end; dropped unanswered it says that the log is closed.
#[derive(Debug)]
pub(crate) struct Promise(Arc<Outcome>);

impl Default for Promise {
    fn default() -> Promise {
        Promise(Arc::new(Outcome { answer: Mutex::new(None), ready: Condvar::new() }))
    }
}

impl Promise {
    /// A ticket for the group's event at this place.
    pub(crate) fn ticket(&self, place: usize) -> Ticket {
        Ticket { outcome: self.0.clone(), place }
    }

    /// The group's events, durable, in order; or why they are not.
    pub(crate) fn answer(self, answer: Result<Vec<Arc<Stamped>>>) {
        self.set(answer);
    }

    fn set(&self, answer: Result<Vec<Arc<Stamped>>>) {
        let mut given = self.0.answer.lock().unwrap_or_else(PoisonError::into_inner);
        given.get_or_insert(answer);
        drop(given);
        self.0.ready.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.set(Err(Error::Closed));
    }
}

/// The promise of an append: waits for its durability. Keeps the events of its group commit in memory until it is dropped.
#[derive(Debug, Clone)]
pub struct Ticket {
    outcome: Arc<Outcome>,
    place: usize,
}

impl Ticket {
    /// A ticket that is answered already.
    pub(crate) fn answered(answer: Result<Arc<Stamped>>) -> Ticket {
        let promise = Promise::default();
        let ticket = promise.ticket(0);
        promise.answer(answer.map(|stamped| vec![stamped]));
        ticket
    }

    /// Waits until the event is durable (or known not to become so).
    ///
    /// # Errors
    /// [`Error::Failed`] when the flush failed: the event may or may not be found after reopening.
    /// [`Error::Closed`] when the log's committing thread ended first.
    pub fn wait(&self) -> Result<Arc<Stamped>> {
        let answer = self.outcome.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = self.outcome.ready.wait_while(answer, |a| a.is_none()).unwrap_or_else(PoisonError::into_inner);
        match &*answer {
            Some(Ok(events)) => events.get(self.place).cloned().ok_or(Error::Closed),
            Some(Err(error)) => Err(error.clone()),
            None => Err(Error::Closed),
        }
    }
}
