//! `audit`: the ancestry of a task.

use super::history::History;
use super::output::{Failure, json, line};
use clap::Args;
use coevolve::project::{AuditError, audit, audit_tree};
use std::path::PathBuf;

/// Where a task came from, and what trained on it.
#[derive(Args, Debug)]
pub struct Audit {
    /// Run folder.
    dir: PathBuf,
    /// Task or draft id (`coevolve tasks DIR` lists them).
    task: String,
    /// Branch.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Audit {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let mut history = History::open(&self.dir, &self.branch)?;
        let state = history.state(None)?;
        let audit = audit(&state, &self.task, &mut history).map_err(|e| match e {
            AuditError::Unknown { .. } => Failure::usage(e),
            AuditError::Fetch { .. } => Failure::failed(e),
        })?;
        if self.json { json(&audit) } else { line(audit_tree::render(&audit)) }
    }
}
