//! Pure decisions: which rollouts show a weakness, what to train on next, what may join D.
//!
//! Nothing in this room reads a clock, a file or a log; every function is a table of given and then.
//! The room knows events and [`crate::world::draw`] only, so that projections can use it.

pub mod advantage;

pub mod admission;
pub mod check_signals;
pub mod contexts;
pub mod curriculum;
pub mod history;
pub mod pairs;
pub mod refill;
pub mod signals;
pub mod similarity;

#[cfg(test)]
mod tests;
