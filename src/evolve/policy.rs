//! The policy explorer: the trained model itself goes back into the environment.
//!
//! It plays the weak task again in a fresh initial state, sampling; what it did, turn by turn, are the plans.
//! They are then executed, narrated and validated like anyone's. Without a task (unguided exploration) there
//! is nothing to play and the context yields no plans.

use super::procedural::{PlanSource, Procedural};
use super::{Context, ExploreError, Explorer, Intent};
use crate::agent::{Agent, EpisodeJob, InlineHands, Limits, Sampling};
use crate::decide::admission::Belonging;
use crate::env::{Environment, Executed, ToolDef};
use crate::event::{DraftProposed, ExplorationStepTaken, ReflectionWritten, RolloutKey, TaskSpec, ToolCall};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// See the module's documentation.
pub struct PolicyExplorer(Procedural);

impl PolicyExplorer {
    /// An explorer that acts with `agent`.
    pub fn new(env: Arc<dyn Environment>, agent: Arc<dyn Agent>, limits: Limits) -> Result<Self, ExploreError> {
        let source = Plays { env: env.clone(), agent, limits, played: Mutex::default() };
        Ok(PolicyExplorer(Procedural::with_source(env, "policy", Box::new(source))?))
    }
}

/// Calls by turn.
type Plans = Vec<Vec<ToolCall>>;

/// Plans from playing.
struct Plays {
    env: Arc<dyn Environment>,
    agent: Arc<dyn Agent>,
    limits: Limits,
    /// What was played, by context and round: playing is a function of them, this only saves time.
    played: Mutex<BTreeMap<(String, u32), Plans>>,
}

impl PlanSource for Plays {
    fn plans(
        &self,
        context: &Context,
        _reflection: &ReflectionWritten,
        ground: &TaskSpec,
        round: u32,
    ) -> Result<Vec<Vec<ToolCall>>, ExploreError> {
        let Some(task) = &context.task else { return Ok(Vec::new()) };
        let at = (context.spec.id.clone(), round);
        let mut played = self.played.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(plans) = played.get(&at) {
            return Ok(plans.clone());
        }
        let job = EpisodeJob {
            task: TaskSpec { base: ground.base.clone(), ..task.clone() },
            key: RolloutKey { step: 0, task: format!("{}/{}", context.spec.id, task.id), draw: round, k: 0 },
            group: 0,
            sampling: Sampling::at(1.0),
            seed: context.seed,
            label: "explore".into(),
        };
        let mut turns: BTreeMap<u32, Vec<ToolCall>> = BTreeMap::new();
        let mut hands = InlineHands::new(self.env.clone());
        self.agent
            .play(&mut hands, &[job], &self.limits, &mut |_, record| {
                for action in record.actions {
                    turns.entry(action.turn).or_default().extend(action.calls);
                }
            })
            .map_err(|e| ExploreError::Policy { context: context.spec.id.clone(), message: e.to_string() })?;
        let plans: Plans = turns.into_values().filter(|calls| !calls.is_empty()).collect();
        played.insert(at, plans.clone());
        Ok(plans)
    }
}

impl Explorer for PolicyExplorer {
    fn author(&self) -> &str {
        self.0.author()
    }

    fn reflect(&self, context: &Context) -> Result<ReflectionWritten, ExploreError> {
        self.0.reflect(context)
    }

    fn next_action(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playground: &TaskSpec,
        tools: &[ToolDef],
        round: u32,
        so_far: &[ExplorationStepTaken],
    ) -> Result<Option<Intent>, ExploreError> {
        self.0.next_action(context, reflection, playground, tools, round, so_far)
    }

    fn abstract_drafts(
        &self,
        context: &Context,
        reflection: &ReflectionWritten,
        playgrounds: &[TaskSpec],
        steps: &[ExplorationStepTaken],
    ) -> Result<Vec<DraftProposed>, ExploreError> {
        self.0.abstract_drafts(context, reflection, playgrounds, steps)
    }

    fn judge(&self, draft: &DraftProposed, executed: &[Vec<Executed>]) -> Result<Belonging, ExploreError> {
        self.0.judge(draft, executed)
    }
}
