//! Pure decisions: no I/O, no clock, no threads.

pub mod advantage;
