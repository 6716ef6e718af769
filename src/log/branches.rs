//! Branch facts: what the ledger's events say about forks, undone stretches and deletions.
//!
//! Nothing is ever taken out of the journal. A fork shares what its parent had at the fork point; an undo says that a
//! branch goes on from an earlier event and hides what lies between; a deletion hides a branch. The *view* of a branch
//! as of event `seq` is what its history was when that event was the newest: an undo counts for views of later
//! events only, so a fork taken before an undo, or at an undone event, keeps what it saw.

use super::record::MAX_SEQ;
use super::{BranchId, LEDGER, MAIN};
use crate::event::{Event, Kind, codec, frame};
use std::collections::BTreeMap;

/// A branch other than main.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branch {
    /// Name, unique among the branches that are not deleted.
    pub name: String,
    /// Branch it was forked from.
    pub parent: BranchId,
    /// Last seq shared with the parent.
    pub at: u64,
    /// Settings changed from here on, canonical JSON text.
    pub settings: String,
    /// Whether it was deleted: hidden, its number not used again, its events there for its forks.
    pub deleted: bool,
}

/// Events `to + 1..=at` of a branch are hidden in views of events after `at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Undo {
    to: u64,
    at: u64,
}

/// A stretch of one branch's own events: (branch, first seq, last seq).
pub type Span = (BranchId, u64, u64);

/// All branch facts of a run folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Branches {
    forks: BTreeMap<BranchId, Branch>,
    /// Per branch, in the order in which they happened.
    undone: BTreeMap<BranchId, Vec<Undo>>,
}

impl Branches {
    /// Takes an event of the ledger; others than branch facts change nothing. The error says why it cannot be.
    pub fn apply(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::BranchCreated(e) => {
                if self.has(e.branch) || !self.has(e.parent) || e.parent == LEDGER || e.at > MAX_SEQ {
                    return Err(format!(
                        "branch {} forked from {} does not fit the branches known",
                        e.branch, e.parent
                    ));
                }
                let (name, settings) = (e.name.clone(), e.settings.clone());
                self.forks.insert(e.branch, Branch { name, parent: e.parent, at: e.at, settings, deleted: false });
            }
            Event::BranchUndone(e) => {
                let before = self.undone.get(&e.branch).and_then(|all| all.last());
                // `to` = `at` takes an earlier undo back.
                let ordered = e.to <= e.at && e.at <= MAX_SEQ && before.is_none_or(|b| b.at <= e.at);
                if !self.has(e.branch) || e.branch == LEDGER || !ordered {
                    return Err(format!("undoing branch {} from {} to {} does not fit", e.branch, e.at, e.to));
                }
                self.undone.entry(e.branch).or_default().push(Undo { to: e.to, at: e.at });
            }
            Event::BranchDeleted(e) => match self.forks.get_mut(&e.branch) {
                Some(branch) => branch.deleted = true,
                None => return Err(format!("branch {} is deleted but was never created", e.branch)),
            },
            _ => {}
        }
        Ok(())
    }

    /// Takes what a ledger frame says; a frame that does not decode is the error.
    pub fn apply_frame(&mut self, frame: &frame::Frame<'_>) -> Result<(), String> {
        // An earlier program let a long list of what was collected become a payload.
        if frame.blob().is_some() && frame.header.kind == Kind::GarbageCollected as u16 {
            return Ok(());
        }
        let event = codec::decode_facts(frame.header.kind, frame.header.version, frame.facts)
            .map_err(|e| format!("ledger event {}: {e}", frame.header.seq))?;
        self.apply(&event)
    }

    /// Whether events of this branch may exist (main and the ledger always do, deleted branches too).
    pub fn has(&self, branch: BranchId) -> bool {
        branch == MAIN || branch == LEDGER || self.forks.contains_key(&branch)
    }

    /// Whether the branch exists and is not deleted.
    pub fn is_live(&self, branch: BranchId) -> bool {
        self.has(branch) && self.forks.get(&branch).is_none_or(|b| !b.deleted)
    }

    /// Every fork, deleted ones included.
    pub fn forks(&self) -> &BTreeMap<BranchId, Branch> {
        &self.forks
    }

    /// Forks that are not deleted.
    pub fn live(&self) -> BTreeMap<BranchId, Branch> {
        self.forks.iter().filter(|(_, b)| !b.deleted).map(|(id, b)| (*id, b.clone())).collect()
    }

    /// Seq after which a branch without own events goes on.
    pub fn base(&self, branch: BranchId) -> u64 {
        self.forks.get(&branch).map_or(0, |b| b.at)
    }

    /// Last seq of a branch as it stands, `last` being the last ever written: an undo sets it back.
    pub fn head(&self, branch: BranchId, last: u64) -> u64 {
        let undo = self.undone.get(&branch).and_then(|all| all.last());
        undo.filter(|u| u.at == last).map_or(last, |u| u.to)
    }

    /// The stretches that make up a branch's history as of event `seq`, oldest first.
    pub fn view(&self, branch: BranchId, seq: u64) -> Vec<Span> {
        let mut spans = Vec::new();
        let (mut branch, mut last) = (branch, seq);
        loop {
            let first = self.base(branch) + 1;
            for undo in self.undone.get(&branch).into_iter().flatten().rev() {
                if undo.at < last {
                    spans.push((branch, undo.at + 1, last));
                    last = undo.to;
                }
            }
            spans.push((branch, first, last));
            let Some(fork) = self.forks.get(&branch) else { break };
            // A fork taken, or undone to, before the first own event shares less than `at` of the parent.
            last = last.min(fork.at);
            branch = fork.parent;
        }
        spans.reverse();
        spans.retain(|(_, first, last)| first <= last);
        spans
    }
}

/// The branch whose own event `seq` is in a view.
pub fn owner(view: &[Span], seq: u64) -> Option<BranchId> {
    view.iter().find(|(_, first, last)| (*first..=*last).contains(&seq)).map(|(branch, ..)| *branch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{BranchCreated, BranchDeleted, BranchUndone};

    fn fork(branch: BranchId, parent: BranchId, at: u64) -> Event {
        BranchCreated { name: format!("b{branch}"), branch, parent, at, settings: String::new() }.into()
    }

    fn undo(branch: BranchId, to: u64, at: u64) -> Event {
        BranchUndone { branch, to, at, reason: String::new() }.into()
    }

    #[test]
    fn views_worked_out_by_hand() {
        let mut b = Branches::default();
        // main 1..=10; a forked at 8; main undone to 5, goes on 11..=14; b forked at 7 (undone), c at 12;
        // main undone twice in a row to 12, then 3; goes on with 15.
        for event in [fork(1, MAIN, 8), undo(MAIN, 5, 10), fork(2, MAIN, 7), fork(3, MAIN, 12)] {
            b.apply(&event).unwrap();
        }
        assert_eq!(b.head(MAIN, 10), 5);
        assert_eq!(b.view(MAIN, 5), [(MAIN, 1, 5)]);
        assert_eq!(b.view(MAIN, 14), [(MAIN, 1, 5), (MAIN, 11, 14)]);
        assert_eq!(b.view(MAIN, 9), [(MAIN, 1, 9)]);
        assert_eq!(b.view(1, 10), [(MAIN, 1, 8), (1, 9, 10)]);
        assert_eq!(b.view(2, 8), [(MAIN, 1, 7), (2, 8, 8)]);
        assert_eq!(b.view(3, 13), [(MAIN, 1, 5), (MAIN, 11, 12), (3, 13, 13)]);
        b.apply(&undo(MAIN, 12, 14)).unwrap();
        assert_eq!(b.head(MAIN, 14), 12);
        b.apply(&undo(MAIN, 3, 14)).unwrap();
        assert_eq!(b.head(MAIN, 14), 3);
        assert_eq!(b.view(MAIN, 15), [(MAIN, 1, 3), (MAIN, 15, 15)]);
        assert_eq!(b.view(3, 13), [(MAIN, 1, 5), (MAIN, 11, 12), (3, 13, 13)]);
        // A fork undone into what it shares.
        b.apply(&undo(3, 11, 13)).unwrap();
        assert_eq!(b.head(3, 13), 11);
        assert_eq!(b.view(3, 14), [(MAIN, 1, 5), (MAIN, 11, 11), (3, 14, 14)]);
        assert_eq!(owner(&b.view(3, 14), 11), Some(MAIN));
        assert_eq!(owner(&b.view(3, 14), 13), None);
    }

    #[test]
    fn facts_that_do_not_fit_are_refused() {
        let mut b = Branches::default();
        b.apply(&fork(1, MAIN, 8)).unwrap();
        b.apply(&undo(1, 5, 9)).unwrap();
        for bad in [fork(1, MAIN, 3), fork(2, 9, 1), fork(2, LEDGER, 1), undo(1, 5, 5), undo(1, 2, 8), undo(4, 1, 2)] {
            assert!(b.apply(&bad).is_err(), "{bad:?}");
        }
        b.apply(&BranchDeleted { branch: 1, reason: String::new() }.into()).unwrap();
        assert!(b.has(1) && !b.is_live(1) && b.live().is_empty());
        assert!(b.apply(&BranchDeleted { branch: MAIN, reason: String::new() }.into()).is_err());
    }
}
