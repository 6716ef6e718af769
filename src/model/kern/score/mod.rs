//! From logits to log-probabilities and entropies of chosen tokens, and back.

mod cpu;

pub use cpu::{Scored, score, score_backward};
