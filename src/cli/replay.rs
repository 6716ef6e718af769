//! `replay`: fold again, compare every recorded digest.

use super::history::History;
use super::output::{Failure, json, line};
use clap::Args;
use coevolve::event::digest::FactsDigest;
use coevolve::event::view::EventRef;
use coevolve::log::{Error as LogError, Swept};
use coevolve::project::State;
use std::path::PathBuf;

/// Fold the log again.
#[derive(Args, Debug)]
pub struct Replay {
    /// Run folder.
    dir: PathBuf,
    /// Stop after this event (number or step:N).
    #[arg(long, value_name = "EVENT")]
    to: Option<String>,
    /// Branch.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Outcome {
    events: u64,
    facts: u64,
    digests_compared: u32,
    mismatches: Vec<String>,
    anomalies: u64,
    facts_digest: String,
    projection_digest: String,
    ok: bool,
}

impl Replay {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let history = History::open(&self.dir, &self.branch)?;
        let to = self.to.as_deref().map(|t| history.position(t)).transpose()?;
        let mut state = State::new();
        let mut facts = FactsDigest::new();
        let (mut events, mut compared, mut mismatches) = (0, 0, Vec::new());
        let to = to.map_or_else(|| history.reader.head(history.branch), Ok)?;
        history.reader.sweep(history.branch, 1, to, |Swept { seq, view, meta }| {
            if let EventRef::StepFinished(e) = view.event() {
                compared += 1;
                let digest = state.digest();
                if digest != e.projection_digest.as_str() {
                    let (step, recorded) = (e.step.to_native(), e.projection_digest.as_str());
                    mismatches.push(format!("event {seq} (step {step}): recorded {recorded}, folded {digest}"));
                }
            }
            state.apply_view(seq, &view, &meta);
            events += 1;
            facts.add_view(&view).map_err(LogError::from)
        })?;
        let outcome = Outcome {
            events,
            facts: facts.facts(),
            digests_compared: compared,
            anomalies: state.anomaly_count,
            facts_digest: facts.value().to_string(),
            projection_digest: state.digest(),
            ok: mismatches.is_empty() && state.anomaly_count == 0,
            mismatches,
        };
        if self.json {
            json(&outcome)?;
        } else {
            for m in &outcome.mismatches {
                line(m)?;
            }
            for a in &state.anomalies {
                line(format!("anomaly: {a}"))?;
            }
            line(format!(
                "{} events folded, {} of {} recorded digests equal\nfacts digest      {}\nprojection digest {}",
                outcome.events,
                outcome.digests_compared - outcome.mismatches.len() as u32,
                outcome.digests_compared,
                outcome.facts_digest,
                outcome.projection_digest
            ))?;
        }
        // A prefix that folds is not the run.
        history.reader.complete()?;
        if outcome.ok {
            Ok(())
        } else {
            Err(Failure::failed("the log does not fold to what was recorded; `coevolve verify` looks for damage"))
        }
    }
}
