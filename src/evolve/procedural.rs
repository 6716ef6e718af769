//! The default explorer: no LLM. It reads where the marked rollout left the task's own solution, asks the
//! environment's narrator for plans around that pattern, tries them in the real environment and writes a
//! task from each plan that went through.

use super::{Context, ExploreError, Explorer, Intent, called_tools, guidance, task_id};
use crate::decide::admission::{BY_CONSTRUCTION, Belonging};
use crate::env::{Environment, Executed, Narrator, ToolDef};
use crate::event::{
    DraftProposed, ExplorationStepTaken, ReflectionWritten, RolloutFinished, SignalKind, TaskSpec, ToolCall, TurnSpec,
};
use crate::world::draw;
use std::sync::Arc;

/// See the module's documentation.
pub struct Procedural {
    env: Arc<dyn Environment>,
    author: &'static str,
    source: Box<dyn PlanSource>,
}

/// Where the plans of an exploration round come from. A function of its arguments: it is asked again when a
/// round is taken up after a kill, and when drafts are written.
pub trait PlanSource: Send + Sync {
    /// Sequences of calls to try, most interesting first.
    fn plans(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        ground: &TaskSpec,
        round: u32,
    ) -> Result<Vec<Vec<ToolCall>>, ExploreError>;
}

/// Plans asked for per exploration round.
const PLANS: usize = 6;

impl Procedural {
    /// An explorer of `env`, which must have a narrator.
    pub fn new(env: Arc<dyn Environment>) -> Result<Self, ExploreError> {
        Procedural::with_source(env.clone(), "procedural", Box::new(Proposals(env)))
    }

    /// An explorer that takes its plans from elsewhere but reflects and writes drafts the same way.
    pub fn with_source(
        env: Arc<dyn Environment>,
        author: &'static str,
        source: Box<dyn PlanSource>,
    ) -> Result<Self, ExploreError> {
        if env.narrator().is_none() {
            return Err(unsupported(env.name()));
        }
        Ok(Procedural { env, author, source })
    }

    /// The plans of a round that fit into it, whole, in order.
    fn plans(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        ground: &TaskSpec,
        round: u32,
    ) -> Result<Vec<Vec<ToolCall>>, ExploreError> {
        let mut room = context.bounds.steps as usize;
        let mut plans = self.source.plans(context, reflection, ground, round)?;
        plans.retain(|plan| {
            let fits = plan.len() <= room;
            room -= if fits { plan.len() } else { 0 };
            fits
        });
        Ok(plans)
    }

    fn narrator(&self) -> Result<&dyn Narrator, ExploreError> {
        self.env.narrator().ok_or_else(|| unsupported(self.env.name()))
    }
}

/// Plans of the environment's narrator. The signal decides how far from the pattern they lie (the narrator
/// lists near ones first).
struct Proposals(Arc<dyn Environment>);

impl PlanSource for Proposals {
    fn plans(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        ground: &TaskSpec,
        round: u32,
    ) -> Result<Vec<Vec<ToolCall>>, ExploreError> {
        let narrator = self.0.narrator().ok_or_else(|| unsupported(self.0.name()))?;
        let seed = draw(context.seed, "plans", &[&context.spec.id, &round.to_string()]).bits();
        let mut plans = narrator.propose(&ground.base, &reflection.focus_pattern, &ground.tools, seed, PLANS);
        match context.spec.kind {
            // Practise the same first.
            Some(SignalKind::Forgetting) | None => {}
            // One plan of the same, then around it; the second round starts further out.
            Some(SignalKind::Boundary) => {
                let n = plans.len();
                plans.rotate_left((round as usize).min(n.saturating_sub(1)));
            }
            // Far ones first.
            Some(SignalKind::Rare) => plans.reverse(),
        }
        Ok(plans)
    }
}

fn unsupported(env: &str) -> ExploreError {
    ExploreError::Unsupported { explorer: "procedural".into(), what: "a narrator".into(), env: env.into() }
}

/// The turn of the task at which the rollout's calls first leave the solution, the tools wanted there, and
/// the tools called from there on. Calls are compared in order over the whole episode, because questions and
/// early replies shift the rollout's own count of turns.
fn divergence(task: &TaskSpec, rollout: &RolloutFinished) -> (usize, Vec<String>, Vec<String>) {
    let did: Vec<&ToolCall> = rollout.actions.iter().flat_map(|a| &a.calls).collect();
    let mut at = 0;
    for (i, turn) in task.turns.iter().enumerate() {
        let here = did.get(at..).unwrap_or_default();
        let same = here.len() >= turn.solution.len() && here.iter().zip(&turn.solution).all(|(a, b)| *a == b);
        let last = i + 1 == task.turns.len();
        if !same || last {
            let wanted = turn.solution.iter().map(|c| c.name.clone()).collect();
            return (i, wanted, here.iter().map(|c| c.name.clone()).collect());
        }
        at += turn.solution.len();
    }
    (0, Vec::new(), called_tools(&rollout.actions))
}

impl Explorer for Procedural {
    fn author(&self) -> &str {
        self.author
    }

    fn reflect(&self, context: &Context) -> Result<ReflectionWritten, ExploreError> {
        let objectives = vec![guidance(context.spec.kind).to_string()];
        let (Some(task), Some(rollout)) = (&context.task, &context.rollout) else {
            return Ok(ReflectionWritten {
                context: context.spec.id.clone(),
                author: self.author().into(),
                summary: "Unguided exploration: no rollout was read.".into(),
                failure_cause: String::new(),
                instability_pattern: String::new(),
                focus_pattern: Vec::new(),
                exploration_objectives: objectives,
                do_not_repeat: Vec::new(),
            });
        };
        let (turn, wanted, did) = divergence(task, rollout);
        let score = rollout.reward.score();
        let failed = score.is_none_or(|s| s < 0.5);
        let skipped: Vec<&String> = wanted.iter().filter(|w| !did.contains(w)).collect();
        let join = |names: &[String]| if names.is_empty() { "nothing".into() } else { names.join(", ") };
        let failure_cause = match (failed, skipped.is_empty()) {
            (false, _) => String::new(),
            (true, false) => format!(
                "turn {}: never called {}",
                turn + 1,
                skipped.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(", ")
            ),
            (true, true) => format!("turn {}: the right tools with wrong arguments, order or reply", turn + 1),
        };
        Ok(ReflectionWritten {
            context: context.spec.id.clone(),
            author: self.author().into(),
            summary: format!(
                "Rollout {}/{}/{}/{} scored {}; in turn {} it called {}, the task's solution calls {}.",
                rollout.key.step,
                rollout.key.task,
                rollout.key.draw,
                rollout.key.k,
                score.map_or("nothing".into(), |s| format!("{s:.2}")),
                turn + 1,
                join(&did),
                join(&wanted),
            ),
            failure_cause,
            instability_pattern: match context.spec.kind {
                Some(SignalKind::Boundary) => format!(
                    "{} of the group's rollouts were marked: some solve it, some do not",
                    context.spec.rollouts.len()
                ),
                Some(SignalKind::Forgetting) => "solved before within the window, failed now".into(),
                Some(SignalKind::Rare) => format!("rare pattern: {}", join(&called_tools(&rollout.actions))),
                None => String::new(),
            },
            focus_pattern: wanted,
            exploration_objectives: objectives,
            do_not_repeat: if failed { did } else { Vec::new() },
        })
    }

    fn next_action(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playground: &TaskSpec,
        _tools: &[ToolDef],
        round: u32,
        so_far: &[ExplorationStepTaken],
    ) -> Result<Option<Intent>, ExploreError> {
        let plans = self.plans(context, reflection, playground, round)?;
        let mut index = so_far.len();
        for (i, plan) in plans.iter().enumerate() {
            if index < plan.len() {
                let reasoning = format!("plan {} of {}, call {} of {}", i + 1, plans.len(), index + 1, plan.len());
                return Ok(Some(Intent { reasoning, call: plan[index].clone() }));
            }
            index -= plan.len();
        }
        Ok(None)
    }

    fn abstract_drafts(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playgrounds: &[TaskSpec],
        steps: &[ExplorationStepTaken],
    ) -> Result<Vec<DraftProposed>, ExploreError> {
        let narrator = self.narrator()?;
        let mut drafts = Vec::new();
        for (round, ground) in (0u32..).zip(playgrounds) {
            let mine: Vec<&ExplorationStepTaken> = steps.iter().filter(|s| s.round == round).collect();
            let mut at = 0;
            let mut turns: Vec<Part> = Vec::new();
            for plan in self.plans(context, reflection, ground, round)? {
                let Some(done) = mine.get(at..at + plan.len()) else { break };
                at += plan.len();
                let executed: Vec<Executed> = done
                    .iter()
                    .map(|s| Executed { call: s.call.clone(), result: s.observation.clone(), is_error: s.is_error })
                    .collect();
                let variant =
                    draw(context.seed, "phrase", &[&context.spec.id, &round.to_string(), &at.to_string()]).bits();
                let Some(told) = narrator.narrate(&ground.base, &executed, variant) else { continue };
                let turn =
                    TurnSpec { query: told.query, solution: told.solution, answer: told.answer, missing: told.missing };
                turns.push((turn, told.intent, told.family, done.iter().map(|s| (s.round, s.step)).collect()));
            }
            // Turns are taken in order until the draft is long enough; the rest begins the next draft.
            let mut pending: Vec<Part> = Vec::new();
            for turn in turns {
                pending.push(turn);
                let calls: usize = pending.iter().map(|(t, ..)| t.solution.len()).sum();
                if calls >= context.bounds.min_solution as usize {
                    drafts.push(draft(context, self.author(), ground, std::mem::take(&mut pending), drafts.len()));
                }
            }
        }
        // Both rounds get a hearing before one of them gets two.
        let firsts: Vec<DraftProposed> = {
            let mut seen = std::collections::BTreeSet::new();
            let (mut first, mut rest) = (Vec::new(), Vec::new());
            for d in drafts {
                let round = d.from_steps.first().map_or(0, |s| s.0);
                if seen.insert(round) { first.push(d) } else { rest.push(d) }
            }
            first.extend(rest);
            first
        };
        Ok(renumber(context, firsts))
    }

    /// By construction with a tested round trip: the query alone, read by an independent parser, asks for
    /// exactly these calls.
    fn judge(&self, draft: &DraftProposed, _executed: &[Vec<Executed>]) -> Result<Belonging, ExploreError> {
        let narrator = self.narrator()?;
        let verdict = |confirmed, detail| Belonging {
            judge: BY_CONSTRUCTION.into(),
            author: draft.author.clone(),
            confirmed,
            detail,
        };
        for (i, turn) in draft.task.turns.iter().enumerate() {
            match narrator.understand(&draft.task.base, &turn.query, turn.missing.as_ref()) {
                None => return Ok(verdict(false, format!("turn {}: the query cannot be read back", i + 1))),
                Some((calls, answer)) if calls != turn.solution || answer != turn.answer => {
                    let names: Vec<String> = calls.iter().map(|c| format!("{}{}", c.name, c.arguments)).collect();
                    return Ok(verdict(false, format!("turn {}: the query asks for {}", i + 1, names.join(", "))));
                }
                Some(_) => {}
            }
        }
        Ok(verdict(true, "every query reads back to its solution".into()))
    }
}

/// A narrated turn, its intent, its family, and the exploration steps it came from.
type Part = (TurnSpec, String, String, Vec<(u32, u32)>);

fn draft(context: &Context, author: &str, ground: &TaskSpec, parts: Vec<Part>, n: usize) -> DraftProposed {
    let mut task = TaskSpec {
        id: String::new(),
        env: ground.env.clone(),
        split: "synthesised".into(),
        family: parts.iter().map(|p| p.2.as_str()).collect::<Vec<_>>().join(" + "),
        base: ground.base.clone(),
        tools: ground.tools.clone(),
        turns: parts.iter().map(|p| p.0.clone()).collect(),
    };
    task.id = task_id("syn", &task);
    let answers = task.turns.iter().any(|t| t.answer.is_some());
    DraftProposed {
        draft: format!("d{}.{n}", context.spec.id.trim_start_matches('c')),
        context: context.spec.id.clone(),
        author: author.into(),
        intent: parts.iter().map(|p| p.1.as_str()).collect::<Vec<_>>().join("; then "),
        completion: if answers {
            "the end state equals the solution's and the required answers are given".into()
        } else {
            "the end state equals the solution's".into()
        },
        from_steps: parts.into_iter().flat_map(|p| p.3).collect(),
        task,
    }
}

fn renumber(context: &Context, mut drafts: Vec<DraftProposed>) -> Vec<DraftProposed> {
    for (n, d) in drafts.iter_mut().enumerate() {
        d.draft = format!("d{}.{n}", context.spec.id.trim_start_matches('c'));
    }
    drafts
}
