//! coevolve
pub mod agent;
pub mod config;
pub mod decide;
pub mod env;
pub mod event;
pub mod evolve;
pub mod learner;
pub mod log;
pub mod model;
pub mod pipeline;
pub mod project;
pub mod run;
pub mod log;
pub mod project;
pub mod world;
