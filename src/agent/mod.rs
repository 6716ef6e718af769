//! How the policy talks: chat templates, tool descriptions, tool-call parsing.

pub mod check_calls;
pub mod check_template;
pub mod parse;
mod pyvalue;
pub mod template;
pub mod tools;
