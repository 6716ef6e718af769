//! The answer to an append, given when it is durable.

use super::Stamped;
use super::error::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

#[derive(Debug)]
struct Cell<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
}

#[derive(Debug)]
struct State<T> {
    value: Option<Result<T>>,
    /// Whether anybody waits. Most tickets are dropped unread, and waking nobody costs a system call an event.
    waiting: bool,
}

/// The writer's end; dropped unanswered it says that the log is closed.
#[derive(Debug)]
pub(crate) struct Slot<T>(Arc<Cell<T>>);

/// The caller's end.
#[derive(Debug)]
pub(crate) struct Waiter<T>(Arc<Cell<T>>);

pub(crate) fn slot<T>() -> (Slot<T>, Waiter<T>) {
    let cell = Arc::new(Cell { state: Mutex::new(State { value: None, waiting: false }), ready: Condvar::new() });
    (Slot(cell.clone()), Waiter(cell))
}

impl<T> Slot<T> {
    pub(crate) fn answer(self, value: Result<T>) {
        self.set(value);
    }

    fn set(&self, value: Result<T>) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.value.is_some() {
            return;
        }
        state.value = Some(value);
        let waiting = state.waiting;
        drop(state);
        if waiting {
            self.0.ready.notify_all();
        }
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        self.set(Err(Error::Closed));
    }
}

impl<T: Clone> Waiter<T> {
    pub(crate) fn wait(&self) -> Result<T> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(answer) = &state.value {
                return answer.clone();
            }
            state.waiting = true;
            state = self.0.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The promise of an append: waits for its durability.
#[derive(Debug)]
pub struct Ticket(pub(crate) Waiter<Arc<Stamped>>);

impl Ticket {
    /// Waits until the event is durable (or known not to become so).
    ///
    /// # Errors
    /// [`Error::Failed`] when the flush failed: the event may or may not be found after reopening.
    /// [`Error::Closed`] when the writer thread ended first.
    pub fn wait(&self) -> Result<Arc<Stamped>> {
        self.0.wait()
    }
}
