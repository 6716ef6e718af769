//! coevolve
pub mod env;
pub mod event;
pub mod world;
