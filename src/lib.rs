//! coevolve
pub mod agent;
pub mod env;
pub mod event;
pub mod model;
pub mod world;
