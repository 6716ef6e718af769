//! Offline analysis of coevolve runs: reads run folders, never writes to them.

pub mod chart;
pub mod dynamics;
pub mod dynamics_text;
