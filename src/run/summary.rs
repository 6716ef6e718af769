//! What a run came to: the last line of `train --json`, and the page a person reads.

use super::{RunError, Seconds};
use crate::agent::PlayStats;
use crate::event::Origin;
use crate::pipeline::LatencyRow;
use crate::project::{LlmTotals, State};
use std::collections::BTreeMap;
use std::path::Path;

/// Summary of a run, finished or not.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Summary {
    /// The run folder.
    pub run: String,
    /// Training steps done.
    pub steps: u32,
    /// Whether the last step is done.
    pub finished: bool,
    /// Master seed.
    pub seed: u64,
    /// Success on the first evaluation split before training, in [0, 1].
    pub held_out_before: Option<f64>,
    /// And after the last evaluation.
    pub held_out_after: Option<f64>,
    /// Success on the second split before training.
    pub challenge_before: Option<f64>,
    /// And after.
    pub challenge_after: Option<f64>,
    /// Signals raised, by kind.
    pub signals: BTreeMap<String, u64>,
    /// Drafts proposed.
    pub drafts: u64,
    /// Drafts that passed validation.
    pub validated: u64,
    /// Tasks admitted from drafts.
    pub admitted: u64,
    /// Drafts turned down, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Tasks in D by origin.
    pub tasks: BTreeMap<String, u64>,
    /// Seconds on the critical path of this process, by stage; zero when only a summary is printed.
    pub seconds: Seconds,
    /// What sampling for training cost in this process, not counting evaluation.
    pub sampling: PlayStats,
    /// Latencies of the stages in this process.
    pub latencies: Vec<LatencyRow>,
    /// Durable events.
    pub events: u64,
    /// Facts digest, hex.
    pub facts_digest: String,
    /// BLAKE3 of the trainable weights, hex.
    pub weights_hash: Option<String>,
    /// Failures noted: environments that did not answer, contexts and drafts that were given up.
    pub failures: u64,
    /// What asking external LLMs came to in the whole run; zero without them.
    pub llm: LlmTotals,
    /// Contradictions the fold has seen; a correct run has none.
    pub anomalies: u64,
}

impl Summary {
    /// Adds what this process measured.
    pub fn measured(&mut self, seconds: Seconds, sampling: PlayStats, latencies: Vec<LatencyRow>) {
        self.seconds = seconds;
        self.sampling = sampling;
        self.latencies = latencies;
    }
}

/// Name of a snake-case enum as printed.
fn word(value: impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_string)).unwrap_or_default()
}

/// The summary of a state.
pub fn summarise(dir: &Path, state: &State, facts_digest: String, events: u64) -> Result<Summary, RunError> {
    let info = state.run.as_ref().ok_or_else(|| RunError::NothingToResume { dir: dir.to_path_buf() })?;
    let settings = crate::config::from_recorded(&info.settings, dir)?;
    let split = |i: usize| settings.eval.splits.get(i).cloned().unwrap_or_default();
    let success = |split: &str, last: bool| -> Option<f64> {
        let mut of_split = state.metrics.evaluations.iter().filter_map(|(step, e)| Some((step, e.get(split)?)));
        let found = if last { of_split.next_back() } else { of_split.next() };
        found.and_then(|(_, e)| e.success)
    };
    let mut signals: BTreeMap<String, u64> = BTreeMap::new();
    for step in state.metrics.steps.values() {
        for (kind, n) in step.signals.iter() {
            *signals.entry(word(kind)).or_default() += u64::from(n);
        }
    }
    let mut rejected: BTreeMap<String, u64> = BTreeMap::new();
    let (mut drafts, mut admitted) = (0u64, 0u64);
    for round in state.metrics.rounds.values() {
        drafts += u64::from(round.drafts);
        admitted += u64::from(round.admitted);
        for (reason, n) in &round.rejected {
            *rejected.entry(reason.clone()).or_default() += u64::from(*n);
        }
    }
    let passed = |d: &&crate::project::Draft| !d.checks.is_empty() && d.checks.iter().all(|c| c.passed);
    let validated = state.drafts.drafts.values().filter(passed).count() as u64;
    Ok(Summary {
        run: dir.display().to_string(),
        steps: state.recorded.finished_step,
        finished: state.recorded.run_finished,
        seed: info.seed,
        held_out_before: success(&split(0), false),
        held_out_after: success(&split(0), true),
        challenge_before: success(&split(1), false),
        challenge_after: success(&split(1), true),
        signals,
        drafts,
        validated,
        admitted,
        rejected,
        tasks: [Origin::Seed, Origin::Explored, Origin::Synthesised]
            .into_iter()
            .map(|o| (word(o), state.tasks.by_origin().get(&o).copied().unwrap_or(0)))
            .collect(),
        seconds: Seconds::default(),
        sampling: PlayStats::default(),
        latencies: Vec::new(),
        events,
        facts_digest,
        weights_hash: state.ledger.current().map(|(_, v)| v.weights_hash.to_string()),
        failures: state.times.failures,
        llm: state.times.llm,
        anomalies: state.anomaly_count,
    })
}
