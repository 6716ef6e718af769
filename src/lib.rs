//! coevolve
pub mod decide;
pub mod env;
pub mod event;
pub mod log;
pub mod project;
pub mod world;
