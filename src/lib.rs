//! coevolve
pub mod decide;
pub mod env;
pub mod event;
pub mod project;
pub mod log;
pub mod world;
