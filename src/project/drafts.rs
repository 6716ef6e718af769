//! Drafts: proposed tasks and what became of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::view::Archived;
use crate::event::{ArchivedDraftProposed, ArchivedDraftRejected, ArchivedDraftValidated, Check};

/// Where a draft stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftState {
    /// Not yet validated.
    Proposed,
    /// Validated and accepted, not yet in D (held for review, or the admission comes next).
    Accepted,
    /// Turned down.
    Rejected,
    /// In D.
    Admitted,
}

/// A draft. Its task is in the log ([`Places`](super::Places)) and, once admitted, in D.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Draft {
    /// Context it came from.
    pub context: String,
    /// Who wrote it.
    pub author: String,
    /// Id its task has or would have.
    pub task: String,
    /// What the user wants.
    pub intent: String,
    /// Exploration steps it was abstracted from: (round, step).
    pub from_steps: Vec<(u32, u32)>,
    /// Where it stands.
    pub state: DraftState,
    /// Checks of its validation, in order; empty before.
    pub checks: Vec<Check>,
    /// Who judged check (d).
    pub judge: String,
    /// Reason and detail of a rejection.
    pub rejection: Option<(String, String)>,
}

/// All drafts by id.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Drafts {
    /// The drafts.
    pub drafts: BTreeMap<String, Draft>,
}

impl Drafts {
    /// A draft was proposed.
    pub fn propose(&mut self, event: &ArchivedDraftProposed) {
        self.drafts.entry(event.draft.as_str().to_owned()).or_insert_with(|| Draft {
            context: event.context.as_str().to_owned(),
            author: event.author.as_str().to_owned(),
            task: event.task.id.as_str().to_owned(),
            intent: event.intent.as_str().to_owned(),
            from_steps: event.from_steps.iter().map(|at| (at.0.to_native(), at.1.to_native())).collect(),
            state: DraftState::Proposed,
            checks: Vec::new(),
            judge: String::new(),
            rejection: None,
        });
    }

    /// A draft was validated. An accepted one waits for its admission; of one that was not, the rejection
    /// follows as its own event.
    pub fn validate(&mut self, event: &ArchivedDraftValidated) {
        if let Some(draft) = self.drafts.get_mut(event.draft.as_str()) {
            draft.checks = event.checks.iter().map(Archived::native).collect();
            draft.judge = event.judge.as_str().to_owned();
            if draft.state == DraftState::Proposed && event.accepted {
                draft.state = DraftState::Accepted;
            }
        }
    }

    /// A draft was turned down.
    pub fn reject(&mut self, event: &ArchivedDraftRejected) {
        if let Some(draft) = self.drafts.get_mut(event.draft.as_str()) {
            draft.state = DraftState::Rejected;
            draft.rejection = Some((event.reason.as_str().to_owned(), event.detail.as_str().to_owned()));
        }
    }

    /// A draft's task joined D.
    pub fn admit(&mut self, draft: &str) {
        if let Some(draft) = self.drafts.get_mut(draft) {
            draft.state = DraftState::Admitted;
        }
    }

    /// How many drafts stand where.
    pub fn by_state(&self) -> BTreeMap<DraftState, u64> {
        let mut counts = BTreeMap::new();
        for draft in self.drafts.values() {
            *counts.entry(draft.state).or_insert(0) += 1;
        }
        counts
    }

    /// How many drafts were rejected for which reason.
    pub fn rejected_by_reason(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for (reason, _) in self.drafts.values().filter_map(|d| d.rejection.as_ref()) {
            *counts.entry(reason.clone()).or_insert(0) += 1;
        }
        counts
    }

    /// Accepted drafts that are not in D: what `coevolve review` shows.
    pub fn held(&self) -> Vec<&str> {
        self.drafts.iter().filter(|(_, d)| d.state == DraftState::Accepted).map(|(id, _)| id.as_str()).collect()
    }
}
