use serde_json::json;

use super::fold::{fold, logged};
use super::*;
use crate::event::digest::{FactKey, fact_key};
use crate::project::audit::{AuditError, audit};
use crate::project::audit_tree::render;
use crate::project::{Audit, Lookup, State};

fn run() -> (State, Vec<(u64, Event, Meta)>) {
    let events = small_run();
    (fold(&events), logged(&events))
}

/// A log of which `event` gives an event as it should be, or not.
struct Log<F>(F);

impl<F: FnMut(u64) -> Result<Event, String>> Lookup for Log<F> {
    fn event(&mut self, seq: u64) -> Result<Event, String> {
        self.0(seq)
    }

    fn fact(&mut self, first: u64, last: u64, key: &FactKey) -> Result<Option<(u64, Event)>, String> {
        for seq in first..=last {
            let event = self.0(seq)?;
            if fact_key(&event).as_ref() == Some(key) {
                return Ok(Some((seq, event)));
            }
        }
        Ok(None)
    }
}

fn of(asked: &str) -> Result<Audit, AuditError> {
    let (state, log) = run();
    let event = |seq| log.iter().find(|e| e.0 == seq).map(|e| e.1.clone()).ok_or_else(|| "gone".to_owned());
    audit(&state, asked, &mut Log(event))
}

#[test]
fn a_synthesised_task_has_its_whole_ancestry() {
    let audit = of("n").unwrap();
    let value = serde_json::to_value(&audit).unwrap();
    for part in ["task", "signal", "reflection", "draft", "validation", "admission"] {
        assert!(value[part].is_object(), "{part}: {}", value[part]);
    }
    assert_eq!(value["origin"], json!("synthesised"));
    assert_eq!(value["signal"]["kind"], json!("forgetting"));
    assert_eq!(value["signal"]["task"], json!("a"));
    assert_eq!(value["signal"]["because"]["window"], json!([1.0, 0.0]));
    let rollouts: Vec<_> = audit.rollouts.iter().map(|r| (r.key.clone(), r.calls.join(" "))).collect();
    assert_eq!(rollouts, [(key(2, "a", 0), "cd mv".to_owned()), (key(2, "a", 1), String::new())]);
    assert_eq!(value["reflection"]["summary"], json!("moves fail"));
    assert_eq!(audit.exploration.iter().map(|e| e.used).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(value["draft"]["draft"], json!("d1.0.0"));
    assert_eq!((&value["draft"]["state"], &value["validation"]["accepted"]), (&json!("admitted"), &json!(true)));
    assert_eq!(value["admission"]["step"], json!(2));
    let steps: Vec<_> = audit.gradient_steps.iter().map(|g| (g.step, g.update, g.version_after, g.rollouts)).collect();
    assert_eq!(steps, [(3, 0, 3, 2)]);
    assert!(value.get("rejection").is_none());
    // Every sequence number points to the event it claims.
    let log = run().1;
    let kind = |seq: u64| log[seq as usize - 1].1.kind();
    assert_eq!(kind(audit.signal.as_ref().unwrap().seq.unwrap()), Kind::SignalRaised);
    assert_eq!(kind(audit.admission.as_ref().unwrap().seq.unwrap()), Kind::TaskAdmitted);
    assert_eq!(kind(audit.gradient_steps[0].seq.unwrap()), Kind::GradientStepTaken);
    assert_eq!(kind(audit.rollouts[1].seq), Kind::RolloutFinished);
    let back: Audit = serde_json::from_value(value).unwrap();
    assert_eq!(back, audit);
}

#[test]
fn seeds_have_no_ancestry_but_descent() {
    let audit = of("a").unwrap();
    assert_eq!(audit.origin, Some(Origin::Seed));
    assert!(audit.signal.is_none() && audit.draft.is_none() && audit.exploration.is_empty());
    assert_eq!(audit.gradient_steps.len(), 2);
    assert_eq!(audit.history.unwrap().forgotten_at, [2]);
}

#[test]
fn drafts_can_be_audited_by_draft_or_task_id_or_prefix() {
    let rejected = of("d1.0.1").unwrap();
    assert_eq!((rejected.origin, rejected.admission.is_none()), (None, true));
    assert_eq!(rejected.rejection.as_ref().unwrap().reason, "executes");
    assert!(!rejected.validation.as_ref().unwrap().accepted);
    assert_eq!(of("m").unwrap(), rejected);
    assert_eq!(of("d1.0.0").unwrap(), of("n").unwrap());
    assert!(matches!(of("d1.0"), Err(AuditError::Unknown { hint, .. }) if hint.contains("d1.0.0, d1.0.1")));
    assert!(matches!(of("zzz"), Err(AuditError::Unknown { .. })));
    assert!(matches!(of(""), Err(AuditError::Unknown { .. })));
}

#[test]
fn a_log_that_does_not_answer_is_named() {
    let (state, log) = run();
    let gone = audit(&state, "n", &mut Log(|_| Err("gone".into())));
    assert!(matches!(gone, Err(AuditError::Fetch { detail, .. }) if detail == "gone"));
    let wrong = audit(&state, "n", &mut Log(|_| Ok(log[0].1.clone())));
    assert!(matches!(wrong, Err(AuditError::Fetch { detail, .. }) if detail == "found run_started"));
}

#[test]
fn the_tree_shows_the_chain_in_order() {
    let tree = render(&of("n").unwrap());
    let mut at = 0;
    for part in [
        "n: task synthesised from a signal",
        "turn 1: do n",
        "signal forgetting on a",
        "because {\"score\":0.0,\"window\":[1.0,0.0]}",
        "rollout step 2 a draw 0 k 0",
        "reflection by procedural",
        "failure cause: wrong folder",
        "exploration: 3 steps, 2 (*) became the draft",
        "draft d1.0.0 by procedural",
        "validation: accepted, judge construction",
        "executes passed: fine",
        "admission after step 2, weight 1",
        "trained on in 1 gradient steps",
        "step 3 update 0: 2 rollouts -> policy 3",
        "2 attempts, learnt at step 3, forgotten 0 times, 50 % solved lately",
    ] {
        let found = tree[at..].find(part).unwrap_or_else(|| panic!("`{part}` after byte {at} of\n{tree}"));
        at += found + part.len();
    }
    assert!(render(&of("m").unwrap()).contains("rejected: executes: no such file"));
}

#[test]
fn texts_from_outside_cannot_steer_a_terminal_or_break_lines() {
    let mut audit = of("n").unwrap();
    audit.reflection.as_mut().unwrap().reflection.summary = format!("\u{1b}[2Jgone\nnew line {}", "x".repeat(500));
    let tree = render(&audit);
    assert!(!tree.contains('\u{1b}'));
    assert!(tree.lines().all(|l| l.chars().count() < 140));
    assert_eq!(tree.lines().count(), render(&of("n").unwrap()).lines().count());
}
