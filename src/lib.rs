//! coevolve
pub mod decide;
pub mod env;
pub mod event;
pub mod learner;
pub mod model;
pub mod world;
