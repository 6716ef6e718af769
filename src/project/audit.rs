//! The whole ancestry of a task: signal <- rollouts, reflection, exploration, draft, validation,
//! admission, and the gradient steps that trained on it.
//!
//! The state knows the links and the places; contents are fetched from the log by sequence number.

use serde::{Deserialize, Serialize};

use super::drafts::DraftState;
use super::lineage::ContextNode;
use super::state::State;
use crate::decide::history::TaskHistory;
use crate::event::digest::FactKey;
use crate::event::{
    Check, DraftProposed, DraftRejected, EndReason, Event, ExplorationStepTaken, Origin, ReflectionWritten, Reward,
    RolloutKey, SignalKind, TaskSpec,
};

/// Why there is no audit.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AuditError {
    /// Neither D nor the drafts hold it.
    #[error("no task or draft `{asked}`; {hint}")]
    Unknown {
        /// What was asked for.
        asked: String,
        /// What helps.
        hint: String,
    },
    /// The log did not give an event that the state points to.
    #[error("event {seq} ({what}) could not be read: {detail}; `coevolve verify` tells what is damaged")]
    Fetch {
        /// Sequence number.
        seq: u64,
        /// What should be there.
        what: &'static str,
        /// What came instead.
        detail: String,
    },
}

/// The signal that a task came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SignalAudit {
    /// Which signal.
    pub kind: SignalKind,
    /// Task whose weakness it shows.
    pub task: String,
    /// The rollout that the reflection read.
    pub rollout: RolloutKey,
    /// Evidence.
    pub because: serde_json::Value,
    /// Sequence number of `SignalRaised`.
    pub seq: Option<u64>,
}

/// A marked rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutAudit {
    /// Which rollout.
    pub key: RolloutKey,
    /// Policy version that sampled it.
    pub policy_version: u32,
    /// The reward.
    pub reward: Reward,
    /// How it ended.
    pub end: EndReason,
    /// Names of the tools called, in order.
    pub calls: Vec<String>,
    /// Sequence number of `RolloutFinished`.
    pub seq: u64,
}

/// The reflection on the marked rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReflectionAudit {
    /// The reflection.
    #[serde(flatten)]
    pub reflection: ReflectionWritten,
    /// Sequence number.
    pub seq: u64,
}

/// A step of the exploration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplorationAudit {
    /// The step.
    #[serde(flatten)]
    pub step: ExplorationStepTaken,
    /// Whether the draft was abstracted from it.
    pub used: bool,
    /// Sequence number.
    pub seq: u64,
}

/// The draft.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DraftAudit {
    /// The draft.
    #[serde(flatten)]
    pub draft: DraftProposed,
    /// Where it stands.
    pub state: DraftState,
    /// Sequence number of `DraftProposed`.
    pub seq: u64,
}

/// Its validation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ValidationAudit {
    /// Whether it was accepted.
    pub accepted: bool,
    /// The checks in order.
    pub checks: Vec<Check>,
    /// Who judged check (d).
    pub judge: String,
    /// Sequence number of `DraftValidated`.
    pub seq: Option<u64>,
}

/// Its admission to D.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdmissionAudit {
    /// Step after which it joined; 0 = before training.
    pub step: u32,
    /// Sampling weight.
    pub weight: f64,
    /// Draft it came from.
    pub draft: Option<String>,
    /// Sequence number of `TaskAdmitted`.
    pub seq: Option<u64>,
}

/// An update that trained on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GradientStepAudit {
    /// Training step.
    pub step: u32,
    /// Update within the step.
    pub update: u32,
    /// Policy version after it.
    pub version_after: u32,
    /// Rollouts of the task in it.
    pub rollouts: u32,
    /// Sequence number of `GradientStepTaken`.
    pub seq: Option<u64>,
}

/// Everything about one task; the JSON of `coevolve audit --json`. For a synthesised task nothing is null.
/// Tasks of unguided exploration have no signal and no marked rollouts, seeds none of the ancestry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// The task.
    pub task: TaskSpec,
    /// Why it is in D; `None` for a draft that is not.
    pub origin: Option<Origin>,
    /// The signal.
    pub signal: Option<SignalAudit>,
    /// The marked rollouts, hardest first.
    pub rollouts: Vec<RolloutAudit>,
    /// The reflection.
    pub reflection: Option<ReflectionAudit>,
    /// All exploration steps of the context, in order.
    pub exploration: Vec<ExplorationAudit>,
    /// The draft.
    pub draft: Option<DraftAudit>,
    /// The validation.
    pub validation: Option<ValidationAudit>,
    /// The rejection, for a draft that was turned down; left out of the JSON otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejection: Option<DraftRejected>,
    /// The admission.
    pub admission: Option<AdmissionAudit>,
    /// Updates that trained on it, in order.
    pub gradient_steps: Vec<GradientStepAudit>,
    /// Its forgetting history; `None` before its first rollout.
    pub history: Option<TaskHistory>,
    /// Share of its window that was solved.
    pub success_rate: Option<f64>,
}

/// Where the events are that the state points to. Errors say why there is none.
pub trait Lookup {
    /// An event by sequence number.
    fn event(&mut self, seq: u64) -> Result<Event, String>;

    /// The fact with a key among the events `first..=last`, with its sequence number.
    fn fact(&mut self, first: u64, last: u64, key: &FactKey) -> Result<Option<(u64, Event)>, String>;
}

fn unexpected(seq: u64, what: &'static str, event: &Event) -> AuditError {
    AuditError::Fetch { seq, what, detail: format!("found {}", event.kind().name()) }
}

macro_rules! fetch_as {
    ($log:expr, $seq:expr, $kind:ident) => {{
        let (seq, what) = ($seq, stringify!($kind));
        match $log.event(seq).map_err(|detail| AuditError::Fetch { seq, what, detail })? {
            Event::$kind(e) => e,
            other => return Err(unexpected(seq, what, &other)),
        }
    }};
}

/// The fact of a step with a key; `None` where the log does not hold it.
fn find(
    state: &State,
    step: u32,
    key: &FactKey,
    what: &'static str,
    log: &mut dyn Lookup,
) -> Result<Option<(u64, Event)>, AuditError> {
    let Some((first, last)) = state.stretch(step) else { return Ok(None) };
    log.fact(first, last, key).map_err(|detail| AuditError::Fetch { seq: first, what, detail })
}

/// The audit of a task of D or of a draft. `asked` is the id of a task or draft, or the beginning of
/// exactly one.
pub fn audit(state: &State, asked: &str, log: &mut dyn Lookup) -> Result<Audit, AuditError> {
    let (task_id, draft_id) = resolve(state, asked)?;
    let entry = task_id.as_ref().and_then(|id| state.tasks.tasks.get(id));
    let draft = draft_id.as_deref().map(|id| draft_audit(state, id, log)).transpose()?.flatten();
    let task = match (entry, &draft) {
        (Some(entry), _) => entry.task.clone(),
        (None, Some(draft)) => draft.draft.task.clone(),
        (None, None) => {
            return Err(AuditError::Unknown { asked: asked.into(), hint: "its events are missing".into() });
        }
    };
    let mut audit = Audit {
        origin: entry.map(|e| e.origin),
        signal: None,
        rollouts: Vec::new(),
        reflection: None,
        exploration: Vec::new(),
        validation: None,
        rejection: None,
        admission: entry.map(|e| AdmissionAudit {
            step: e.admitted_step,
            weight: e.weight,
            draft: e.draft.clone(),
            seq: state.places.tasks.get(&task.id).copied(),
        }),
        gradient_steps: gradient_steps(state, &task.id),
        history: state.history.get(&task.id).cloned(),
        success_rate: state.signals.success_rate(&task.id),
        task,
        draft: None,
    };
    if let (Some(id), Some(draft)) = (draft_id, draft) {
        let known = state.drafts.drafts.get(&id);
        let places = state.places.drafts.get(&id).cloned().unwrap_or_default();
        audit.validation = known.filter(|_| places.validated.is_some()).map(|d| ValidationAudit {
            accepted: d.checks.iter().all(|c| c.passed) && d.state != DraftState::Proposed,
            checks: d.checks.clone(),
            judge: d.judge.clone(),
            seq: places.validated,
        });
        if let (Some(seq), Some(validation)) = (places.validated, &mut audit.validation) {
            // The event itself has the last word.
            validation.accepted = fetch_as!(log, seq, DraftValidated).accepted;
        }
        if let Some(seq) = places.rejected {
            audit.rejection = Some(fetch_as!(log, seq, DraftRejected));
        }
        if let Some(context) = state.lineage.contexts.get(&draft.draft.context) {
            ancestry(state, &draft.draft, context, &mut audit, log)?;
        }
        audit.draft = Some(draft);
    }
    Ok(audit)
}

/// (task of D, draft) of what was asked for.
fn resolve(state: &State, asked: &str) -> Result<(Option<String>, Option<String>), AuditError> {
    let of_task = |id: &str| {
        let entry = state.tasks.tasks.get(id);
        (entry.map(|_| id.to_owned()), entry.and_then(|e| e.draft.clone()))
    };
    let of_draft = |id: &str| {
        let task = state.drafts.drafts.get(id).map(|d| d.task.clone());
        (task.filter(|t| state.tasks.tasks.get(t).is_some_and(|e| e.draft.as_deref() == Some(id))), Some(id.to_owned()))
    };
    if state.tasks.tasks.contains_key(asked) {
        return Ok(of_task(asked));
    }
    if state.drafts.drafts.contains_key(asked) {
        return Ok(of_draft(asked));
    }
    let begins = |id: &&String| !asked.is_empty() && id.starts_with(asked);
    let tasks: Vec<&String> = state.tasks.tasks.keys().filter(begins).collect();
    let drafts: Vec<&String> = state.drafts.drafts.keys().filter(begins).collect();
    // A rejected draft may also be asked for by the id its task would have had.
    let by_task = || state.drafts.drafts.iter().find(|(_, d)| d.task == asked).map(|(id, _)| id);
    match (tasks.as_slice(), drafts.as_slice()) {
        ([task], []) => Ok(of_task(task)),
        ([], [draft]) => Ok(of_draft(draft)),
        ([], []) => match by_task() {
            Some(draft) => Ok(of_draft(draft)),
            None => Err(AuditError::Unknown { asked: asked.into(), hint: "`coevolve tasks` lists the tasks".into() }),
        },
        _ => {
            let some: Vec<&str> = tasks.iter().chain(&drafts).take(5).map(|id| id.as_str()).collect();
            let hint = format!("several begin like this: {}", some.join(", "));
            Err(AuditError::Unknown { asked: asked.into(), hint })
        }
    }
}

fn draft_audit(state: &State, id: &str, log: &mut dyn Lookup) -> Result<Option<DraftAudit>, AuditError> {
    let place = state.places.drafts.get(id).and_then(|p| p.proposed);
    let (Some(seq), Some(known)) = (place, state.drafts.drafts.get(id)) else { return Ok(None) };
    Ok(Some(DraftAudit { draft: fetch_as!(log, seq, DraftProposed), state: known.state, seq }))
}

fn gradient_steps(state: &State, task: &str) -> Vec<GradientStepAudit> {
    let trained = state.lineage.trained.get(task).map_or(&[][..], Vec::as_slice);
    let step = |t: &super::lineage::TrainedBy| GradientStepAudit {
        step: t.step,
        update: t.update,
        version_after: t.version_after,
        rollouts: t.rollouts,
        seq: state.places.updates.get(&(t.step, t.update)).copied(),
    };
    trained.iter().map(step).collect()
}

fn ancestry(
    state: &State,
    draft: &DraftProposed,
    context: &ContextNode,
    audit: &mut Audit,
    log: &mut dyn Lookup,
) -> Result<(), AuditError> {
    if let (Some(kind), Some(first)) = (context.kind, context.rollouts.first()) {
        let key = FactKey::Signal(first.clone(), kind);
        let (seq, because) = match find(state, first.step, &key, "SignalRaised", log)? {
            Some((seq, Event::SignalRaised(signal))) => {
                let text = signal.because;
                (Some(seq), serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text)))
            }
            Some((seq, other)) => return Err(unexpected(seq, "SignalRaised", &other)),
            None => (None, serde_json::Value::Null),
        };
        let task = context.task.clone().unwrap_or_else(|| first.task.clone());
        audit.signal = Some(SignalAudit { kind, task, rollout: first.clone(), because, seq });
    }
    for key in &context.rollouts {
        let found = find(state, key.step, &FactKey::Rollout(key.clone()), "RolloutFinished", log)?;
        let (seq, rollout) = match found {
            Some((seq, Event::RolloutFinished(rollout))) => (seq, rollout),
            Some((seq, other)) => return Err(unexpected(seq, "RolloutFinished", &other)),
            None => continue,
        };
        audit.rollouts.push(RolloutAudit {
            calls: rollout.actions.iter().flat_map(|a| a.calls.iter().map(|c| c.name.clone())).collect(),
            key: rollout.key,
            policy_version: rollout.policy_version,
            reward: rollout.reward,
            end: rollout.end,
            seq,
        });
    }
    let Some(places) = state.places.contexts.get(&draft.context) else { return Ok(()) };
    if let Some(seq) = places.reflection {
        audit.reflection = Some(ReflectionAudit { reflection: fetch_as!(log, seq, ReflectionWritten), seq });
    }
    for (at, seq) in &places.exploration {
        audit.exploration.push(ExplorationAudit {
            step: fetch_as!(log, *seq, ExplorationStepTaken),
            used: draft.from_steps.contains(at),
            seq: *seq,
        });
    }
    Ok(())
}
