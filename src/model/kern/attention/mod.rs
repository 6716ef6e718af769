//! Causal attention over segments with shared prefixes, and over the pages of a cache.

mod cpu;

pub use cpu::{
    AttnBuffers, AttnState, KEYS, Needed, PagedRun, PagedState, Plan, attend_pages, attention, attention_backward,
};
