//! `tasks`: the training set D.

use super::history::History;
use super::output::{Failure, cut, json, line, percent, table};
use clap::Args;
use coevolve::project::TaskRow;
use std::path::PathBuf;

/// List the training set.
#[derive(Args, Debug)]
pub struct Tasks {
    /// Run folder.
    dir: PathBuf,
    /// As it was after this event (number or step:N).
    #[arg(long, value_name = "EVENT")]
    at: Option<String>,
    /// Only tasks of this origin: seed, explored, synthesised.
    #[arg(long)]
    origin: Option<String>,
    /// Print ids only.
    #[arg(long)]
    ids: bool,
    /// Branch.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Tasks {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if let Some(origin) = &self.origin
            && !["seed", "explored", "synthesised"].contains(&origin.as_str())
        {
            return Err(Failure::usage(format!("--origin {origin}: write seed, explored or synthesised")));
        }
        let state = History::open(&self.dir, &self.branch)?.state(self.at.as_deref())?;
        let word = |row: &TaskRow| {
            serde_json::to_value(row.origin).ok().and_then(|v| v.as_str().map(str::to_string)).unwrap_or_default()
        };
        let rows: Vec<TaskRow> =
            state.task_rows().into_iter().filter(|r| self.origin.as_ref().is_none_or(|o| *o == word(r))).collect();
        if self.json {
            return json(&serde_json::json!({ "tasks": rows }));
        }
        if self.ids {
            return rows.iter().try_for_each(|r| line(&r.id));
        }
        let mut out = vec![
            ["id", "origin", "admitted at", "weight", "attempts", "success", "forgotten", "query"]
                .map(String::from)
                .to_vec(),
        ];
        for r in &rows {
            out.push(vec![
                r.id.clone(),
                word(r),
                r.admitted_at.to_string(),
                format!("{}", r.weight),
                r.attempts.to_string(),
                percent(r.success_rate),
                r.forgotten.to_string(),
                cut(&r.query, 70),
            ]);
        }
        line(table(&out))
    }
}
