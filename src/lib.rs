//! coevolve
pub mod env;
pub mod event;
pub mod log;
pub mod world;
