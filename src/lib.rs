//! coevolve
pub mod agent;
pub mod env;
pub mod event;
pub mod world;
