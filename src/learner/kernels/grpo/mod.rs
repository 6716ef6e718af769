//! grpo
