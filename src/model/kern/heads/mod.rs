//! From rows of `[q | k | v]` to heads and back.

mod cpu;

pub use cpu::{Heads, MAX_HEAD, QkNorm, RopeTable, split_heads, split_heads_backward};
