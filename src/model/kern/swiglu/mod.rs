//! SwiGLU: the activation between the two products of an MLP.
//!
//! ```text
//! sigma = 1 / (1 + e^-g)      act = g sigma u
//!
//! du = dact g sigma           dg = dact u (sigma + g sigma (1 - sigma))
//! ```
//!
//! Gate g and up u stand in one row `[gate f | up f]`, as one product gives them; `act` is `[rows][f]`. Kept for the
//! backward: those rows. `act` is made again in the backward (the gradient of the next weight reads it), in the memory
//! of its gradient.
//!
//! Shazeer, arXiv:2002.05202. Measured figures stand in `benches/model.rs`, as part of train and decode.

mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use cpu::{swiglu, swiglu_backward};
