//! `show`: one thing in full.

use super::history::History;
use super::log::key;
use super::output::{Failure, json, line, reward, word};
use clap::Args;
use coevolve::event::{Event, RolloutFinished, RolloutKey};
use std::path::PathBuf;

/// Show an event, a rollout or a task.
#[derive(Args, Debug)]
#[command(
    after_help = "IDs:\n  4711                 the event with that number\n  12/desk-0123/0/3     the rollout of step 12, task desk-0123, draw 0, k 3\n  syn-0123456789ab     the task\n  d2.5.0               the draft"
)]
pub struct Show {
    /// Run folder.
    dir: PathBuf,
    /// What to show.
    id: String,
    /// Branch.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Show {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let history = History::open(&self.dir, &self.branch)?;
        let seq = match self.id.parse::<u64>() {
            Ok(_) => history.position(&self.id)?,
            Err(_) => {
                let state = history.state(None)?;
                let places = &state.places;
                let draft = places.drafts.get(&self.id).and_then(|d| d.proposed);
                let rollout = rollout_key(&self.id).map(|key| history.rollout(&state, key)).transpose()?.flatten();
                rollout.or(places.tasks.get(&self.id).copied()).or(draft).ok_or_else(|| {
                    Failure::usage(format!("nothing in this run is called `{}`; see `coevolve show --help`", self.id))
                })?
            }
        };
        let stamped = history.reader.event(history.branch, seq)?;
        let digest = history.reader.digest(history.branch, seq)?;
        if self.json {
            return json(
                &serde_json::json!({"seq": stamped.seq, "branch": stamped.branch, "digest": digest.to_string(), "meta": stamped.meta, "event": stamped.event}),
            );
        }
        line(format!("event {} of branch {}, digest {}", stamped.seq, stamped.branch, digest))?;
        match &stamped.event {
            Event::RolloutFinished(r) => {
                rollout(r)?;
                let state = history.state(None)?;
                let mut trained = false;
                for ((step, update), seq) in state.places.updates.range((r.key.step, 0), (r.key.step, u32::MAX)) {
                    let Event::GradientStepTaken(g) = history.reader.event(history.branch, *seq)?.event else {
                        continue;
                    };
                    if let Some((_, advantage)) = g.rollouts.iter().find(|(k, _)| *k == r.key) {
                        trained = true;
                        line(format!(
                            "trained in gradient step {step}/{update} (event {seq}) with advantage {advantage:+.4}: version {} -> {}, weights {}",
                            g.version_before, g.version_after, g.weights_hash
                        ))?;
                    }
                }
                if trained {
                    Ok(())
                } else {
                    line("no gradient step trained on it (its advantage is zero, or the step is not learnt yet)")
                }
            }
            event => line(serde_json::to_string_pretty(event)?),
        }
    }
}

/// Reads `step/task/draw/k`.
fn rollout_key(text: &str) -> Option<RolloutKey> {
    let (step, rest) = text.split_once('/')?;
    let (rest, k) = rest.rsplit_once('/')?;
    let (task, draw) = rest.rsplit_once('/')?;
    Some(RolloutKey { step: step.parse().ok()?, task: task.into(), draw: draw.parse().ok()?, k: k.parse().ok()? })
}

fn rollout(r: &RolloutFinished) -> Result<(), Failure> {
    let sampled: u32 = r.sampled.iter().map(|(_, n)| n).sum();
    line(format!(
        "rollout {}  policy version {}  {}  {}\n{} tokens: {} prompt, {} sampled, {} from the environment; mean log-prob {:.4}; {} environment steps",
        key(&r.key),
        r.policy_version,
        reward(&r.reward),
        word(r.end),
        r.ids.len(),
        r.prompt_len,
        sampled,
        r.ids.len() as u32 - r.prompt_len - sampled,
        r.logprobs.iter().map(|l| f64::from(*l)).sum::<f64>() / r.logprobs.len().max(1) as f64,
        r.env_steps
    ))?;
    for action in &r.actions {
        line(format!("turn {}: {}", action.turn + 1, action.text.trim()))?;
        for result in &action.results {
            line(format!("    -> {result}"))?;
        }
    }
    Ok(())
}
