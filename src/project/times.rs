//! What work took, from [`Meta`]: not facts, never part of a digest.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::series::Series;
use crate::event::view::{EventRef, View};
use crate::event::{ArchivedLlmAsked, Kind, Meta};

/// Work of one kind of event.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KindTime {
    /// Events.
    pub events: u64,
    /// Sum of their durations, microseconds. Work that ran in parallel counts in full.
    pub duration_us: u64,
    /// Tokens sent to external LLMs.
    pub llm_prompt_tokens: u64,
    /// Tokens received from external LLMs.
    pub llm_completion_tokens: u64,
}

/// What asking external LLMs came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LlmTotals {
    /// Questions, attempts at the same one counted once.
    pub asked: u64,
    /// Those that were answered.
    pub answered: u64,
    /// Tokens sent, as the servers count them.
    pub prompt_tokens: u64,
    /// Tokens received, as the servers count them.
    pub completion_tokens: u64,
    /// Tokens that nobody has counted, estimated from above.
    pub estimated_tokens: u64,
    /// Cost of the counted tokens, millionths of the prices' currency.
    pub cost_micros: u64,
}

impl LlmTotals {
    /// Tokens that count against `evolve.llm_budget_tokens`.
    pub fn tokens(&self) -> u64 {
        self.prompt_tokens.saturating_add(self.completion_tokens).saturating_add(self.estimated_tokens)
    }

    fn add(&mut self, e: &ArchivedLlmAsked) {
        let plus = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        plus(&mut self.asked, 1);
        plus(&mut self.answered, u64::from(e.answer.is_some()));
        plus(&mut self.prompt_tokens, e.prompt_tokens.to_native());
        plus(&mut self.completion_tokens, e.completion_tokens.to_native());
        plus(&mut self.estimated_tokens, e.estimated_tokens.to_native());
        plus(&mut self.cost_micros, e.cost_micros.to_native());
    }
}

/// Durations and cost.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTimes {
    /// By event kind.
    pub kinds: BTreeMap<Kind, KindTime>,
    /// Per evolution round its duration, microseconds, as its last event says.
    pub rounds_us: BTreeMap<u32, u64>,
    /// Per training step its duration, microseconds, as `StepFinished` says.
    pub steps_us: Series<u32, u64>,
    /// Wall clock of the first event, ms since the Unix epoch; 0 = not known.
    pub first_ms: u64,
    /// Wall clock of the latest event, ms since the Unix epoch.
    pub last_ms: u64,
    /// How often a later process took the run up again.
    pub resumes: u64,
    /// Failures that were survived.
    pub failures: u64,
    /// External LLMs.
    pub llm: LlmTotals,
}

impl StageTimes {
    /// Takes an event's meta.
    pub fn apply(&mut self, view: &View<'_>, meta: &Meta) {
        let kind = self.kinds.entry(view.kind()).or_default();
        kind.events += 1;
        kind.duration_us = kind.duration_us.saturating_add(meta.duration_us);
        kind.llm_prompt_tokens = kind.llm_prompt_tokens.saturating_add(meta.llm_prompt_tokens);
        kind.llm_completion_tokens = kind.llm_completion_tokens.saturating_add(meta.llm_completion_tokens);
        if meta.time_ms > 0 {
            if self.first_ms == 0 {
                self.first_ms = meta.time_ms;
            }
            self.last_ms = self.last_ms.max(meta.time_ms);
        }
        match view.event() {
            EventRef::EvolutionFinished(e) => {
                self.rounds_us.insert(e.round.to_native(), meta.duration_us);
            }
            EventRef::StepFinished(e) => {
                self.steps_us.insert(e.step.to_native(), meta.duration_us);
            }
            EventRef::RunResumed(_) => self.resumes += 1,
            EventRef::FailureNoted(_) => self.failures += 1,
            EventRef::LlmAsked(e) => self.llm.add(e),
            _ => {}
        }
    }
}
