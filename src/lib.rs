//! coevolve
pub mod config;
pub mod env;
pub mod event;
pub mod world;
