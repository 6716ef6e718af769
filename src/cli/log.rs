//! `log`: the events of a run.

use super::history::History;
use super::output::{Failure, cut, json, line, reward, word};
use clap::Args;
use coevolve::event::{Event, Kind};
use coevolve::log::Stamped;
use std::path::PathBuf;
use std::time::Duration;

/// List events.
#[derive(Args, Debug)]
pub struct Log {
    /// Run folder; may belong to a running run.
    dir: PathBuf,
    /// Branch.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Only this kind, e.g. task_admitted; may be repeated.
    #[arg(long)]
    kind: Vec<String>,
    /// From this event on (number or step:N).
    #[arg(long, value_name = "EVENT")]
    from: Option<String>,
    /// Up to this event.
    #[arg(long, value_name = "EVENT")]
    to: Option<String>,
    /// Go on as events become durable, until the run is finished.
    #[arg(long)]
    follow: bool,
    /// One JSON document a line: seq, branch, time_ms, duration_us, llm_*_tokens, event.
    #[arg(long)]
    json: bool,
}

impl Log {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let kinds: Vec<Kind> = self
            .kind
            .iter()
            .map(|k| {
                Kind::from_name(k).ok_or_else(|| {
                    let all: Vec<&str> = Kind::ALL.iter().map(|k| k.name()).collect();
                    Failure::usage(format!("there is no kind `{k}`; kinds are {}", all.join(", ")))
                })
            })
            .collect::<Result<_, _>>()?;
        let history = History::open(&self.dir, &self.branch)?;
        let mut next = self.from.as_deref().map(|f| history.position(f)).transpose()?.unwrap_or(1);
        let to = self.to.as_deref().map(|t| history.position(t)).transpose()?;
        let mut finished = false;
        loop {
            for stamped in history.events(next)? {
                let stamped = stamped?;
                next = stamped.seq + 1;
                finished |= stamped.event.kind() == Kind::RunFinished;
                if to.is_some_and(|to| stamped.seq > to) {
                    return Ok(());
                }
                if kinds.is_empty() || kinds.contains(&stamped.event.kind()) {
                    self.print(&stamped)?;
                }
            }
            if !self.follow || finished || to.is_some_and(|to| next > to) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
            history.reader.refresh()?;
        }
    }

    fn print(&self, s: &Stamped) -> Result<(), Failure> {
        if self.json {
            return json(&serde_json::json!({
                "seq": s.seq, "branch": s.branch, "time_ms": s.meta.time_ms, "duration_us": s.meta.duration_us,
                "llm_prompt_tokens": s.meta.llm_prompt_tokens, "llm_completion_tokens": s.meta.llm_completion_tokens,
                "event": s.event,
            }));
        }
        line(format!("{:>8}  {:<22} {}", s.seq, s.event.kind().name(), brief(&s.event)))
    }
}

/// One line about an event.
pub fn brief(event: &Event) -> String {
    let text = match event {
        Event::RunStarted(e) => format!("seed {} {} policy {}", e.seed, e.environment, cut(&e.policy_digest, 15)),
        Event::TaskAdmitted(e) => {
            format!("{} {} {}", e.task.id, word(e.origin), e.task.turns.first().map_or("", |t| &t.query))
        }
        Event::BatchPlanned(e) => {
            format!("step {} {} groups x {} version {}", e.step, e.groups.len(), e.group_size, e.policy_version)
        }
        Event::BatchRefilled(e) => format!("step {} round {} {} groups", e.step, e.round, e.groups.len()),
        Event::RolloutFinished(e) => {
            format!("{} {} {} tokens {}", key(&e.key), reward(&e.reward), e.ids.len(), word(e.end))
        }
        Event::SignalRaised(e) => format!("{} {} {}", word(e.kind), key(&e.key), e.because),
        Event::GradientStepTaken(e) => format!(
            "step {} update {} loss {:.4} kl {:.4} |g| {:.3} {} rollouts",
            e.step,
            e.update,
            e.loss,
            e.kl,
            e.grad_norm,
            e.rollouts.len()
        ),
        Event::StepSkipped(e) => format!("step {} update {}: {}", e.step, e.update, e.reason),
        Event::PolicyPublished(e) => format!("version {} step {} {}", e.version, e.step, cut(&e.weights_hash, 15)),
        Event::CheckpointSaved(e) => format!("version {} {}", e.version, e.path),
        Event::EvaluationFinished(e) => {
            let solved = e.results.iter().filter(|(_, r)| r.score().is_some_and(|s| s >= 0.5)).count();
            format!("step {} {} {solved}/{}", e.step, e.split, e.results.len())
        }
        Event::EvolutionStarted(e) => format!("round {} {} {} contexts", e.round, e.mode, e.contexts.len()),
        Event::ReflectionWritten(e) => format!("{} {}", e.context, e.summary),
        Event::ExplorationStepTaken(e) => {
            format!("{} {}.{} {}{} -> {}", e.context, e.round, e.step, e.call.name, e.call.arguments, e.observation)
        }
        Event::DraftProposed(e) => {
            format!("{} {}", e.draft, e.task.turns.iter().map(|t| t.query.as_str()).collect::<Vec<_>>().join(" / "))
        }
        Event::DraftValidated(e) => format!("{} {}", e.draft, if e.accepted { "accepted" } else { "not accepted" }),
        Event::DraftRejected(e) => format!("{} {}: {}", e.draft, e.reason, e.detail),
        Event::EvolutionFinished(e) => format!("round {} {} drafts, {} admitted", e.round, e.drafts, e.admitted),
        Event::StepFinished(e) => format!("step {} mean reward {:.3}", e.step, e.mean_reward),
        Event::RunFinished(e) => format!("step {} {}", e.step, e.weights_hash),
        Event::RunResumed(e) => format!("step {}", e.step),
        Event::LlmAsked(e) => {
            format!("{} {} {}", e.role, e.about, e.answer.as_ref().unwrap_or(&e.failure))
        }
        Event::FailureNoted(e) => format!("{}: {}", e.stage, e.message),
        Event::BranchCreated(e) => format!("{} from {} at {}", e.name, e.parent, e.at),
        Event::BranchUndone(e) => format!("{} goes on from {} (was at {}) {}", e.branch, e.to, e.at, e.reason),
        Event::BranchDeleted(e) => format!("{} {}", e.branch, e.reason),
        Event::GarbageCollected(e) => format!("{} removed", e.removed.len()),
    };
    cut(&text, 160)
}

/// A rollout's coordinates as one word.
pub fn key(k: &coevolve::event::RolloutKey) -> String {
    format!("{}/{}/{}/{}", k.step, k.task, k.draw, k.k)
}
