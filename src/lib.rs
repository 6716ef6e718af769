//! coevolve
pub mod config;
pub mod agent;
pub mod decide;
pub mod env;
pub mod event;
pub mod evolve;
pub mod model;
pub mod world;
