//! Whether what events refer to is there: rollouts of a plan, signals of rollouts, drafts of contexts, tasks of drafts.
//!
//! No part of the state: [`State`](super::State) folds what it is given; this says what a log that was put together wrongly
//! lacks. Memory is bounded by tasks, drafts and contexts, and by the rollouts of open steps and of those whose marks
//! the next evolution round may use.

use super::marks::MAX_MARKED_STEPS;
use crate::event::{ContextSpec, Event, RolloutKey};
use std::collections::{BTreeMap, BTreeSet};

/// What later events may refer to.
#[derive(Debug, Default)]
pub struct References {
    tasks: BTreeSet<String>,
    contexts: BTreeSet<String>,
    /// Exploration steps of the round at hand: (context, round, step).
    explored: BTreeSet<(String, u32, u32)>,
    drafts: BTreeSet<String>,
    versions: BTreeSet<u32>,
    /// Of open steps: groups planned, their size, and rollouts finished.
    open: BTreeMap<u32, Open>,
    /// Rollouts that raised a signal, by step.
    marked: BTreeMap<u32, BTreeSet<RolloutKey>>,
}

#[derive(Debug, Default)]
struct Open {
    groups: BTreeSet<(String, u32)>,
    group_size: u32,
    rollouts: BTreeSet<RolloutKey>,
}

impl References {
    /// Takes the next event; the first thing it refers to that is not there, in words.
    pub fn take(&mut self, event: &Event) -> Option<String> {
        let none = |what: &str, id: &dyn std::fmt::Display| {
            Some(format!("{} refers to {what} {id}, which is not there", event.kind().name()))
        };
        let key = |k: &RolloutKey| format!("{}/{}/{}/{}", k.step, k.task, k.draw, k.k);
        match event {
            Event::TaskAdmitted(e) => {
                self.tasks.insert(e.task.id.clone());
                let draft = e.draft.as_ref().filter(|draft| !self.drafts.contains(*draft));
                draft.and_then(|draft| none("draft", draft))
            }
            Event::BatchPlanned(e) => {
                let open = self.open.entry(e.step).or_default();
                open.groups.extend(e.groups.iter().cloned());
                open.group_size = e.group_size;
                let missing = e.groups.iter().find(|(task, _)| !self.tasks.contains(task));
                missing.and_then(|(task, _)| none("task", task))
            }
            Event::BatchRefilled(e) => {
                let planned = self.open.contains_key(&e.step);
                self.open.entry(e.step).or_default().groups.extend(e.groups.iter().cloned());
                let missing = e.groups.iter().find(|(task, _)| !self.tasks.contains(task));
                let plan = if planned { None } else { none("the plan of step", &e.step) };
                plan.or(missing.and_then(|(task, _)| none("task", task)))
            }
            Event::RolloutFinished(e) => {
                let open = self.open.entry(e.key.step).or_default();
                open.rollouts.insert(e.key.clone());
                let planned = e.key.k < open.group_size && open.groups.contains(&(e.key.task.clone(), e.key.draw));
                if planned { None } else { none("the plan of group", &key(&e.key)) }
            }
            Event::SignalRaised(e) => {
                self.marked.entry(e.key.step).or_default().insert(e.key.clone());
                while self.marked.len() > MAX_MARKED_STEPS {
                    self.marked.pop_first();
                }
                if self.finished(&e.key) { None } else { none("rollout", &key(&e.key)) }
            }
            Event::GradientStepTaken(e) => {
                self.versions.insert(e.version_after);
                let missing = e.rollouts.iter().find(|(k, _)| !self.finished(k));
                missing.and_then(|(k, _)| none("rollout", &key(k)))
            }
            Event::PolicyPublished(e) if e.version == 0 => {
                self.versions.insert(0);
                None
            }
            Event::PolicyPublished(e) if !self.versions.contains(&e.version) => none("policy version", &e.version),
            Event::CheckpointSaved(e) if !self.versions.contains(&e.version) => none("policy version", &e.version),
            Event::EvolutionStarted(e) => {
                self.contexts = e.contexts.iter().map(|c| c.id.clone()).collect();
                self.explored.clear();
                let lacks = |c: &ContextSpec| {
                    let task = c.task.as_ref().filter(|task| !self.tasks.contains(*task));
                    let marked = |k: &&RolloutKey| !self.marked.get(&k.step).is_some_and(|of| of.contains(*k));
                    let rollout = c.rollouts.iter().find(marked);
                    task.and_then(|task| none("task", task)).or(rollout.and_then(|k| none("marked rollout", &key(k))))
                };
                e.contexts.iter().find_map(lacks)
            }
            Event::ReflectionWritten(e) => self.context(&e.context).and_then(|c| none("context", &c)),
            Event::ExplorationStepTaken(e) => {
                self.explored.insert((e.context.clone(), e.round, e.step));
                self.context(&e.context).and_then(|c| none("context", &c))
            }
            Event::DraftProposed(e) => {
                self.drafts.insert(e.draft.clone());
                let missing =
                    |(round, step): &&(u32, u32)| !self.explored.contains(&(e.context.clone(), *round, *step));
                let step = e.from_steps.iter().find(missing).map(|(round, step)| format!("{round}/{step}"));
                let context = self.context(&e.context).and_then(|c| none("context", &c));
                context.or(step.and_then(|step| none("exploration step", &step)))
            }
            Event::DraftValidated(e) if !self.drafts.contains(&e.draft) => none("draft", &e.draft),
            Event::DraftRejected(e) if !self.drafts.contains(&e.draft) => none("draft", &e.draft),
            Event::StepFinished(e) => {
                self.open.remove(&e.step);
                None
            }
            _ => None,
        }
    }

    fn finished(&self, key: &RolloutKey) -> bool {
        self.open.get(&key.step).is_some_and(|open| open.rollouts.contains(key))
    }

    /// The context's id when it is unknown.
    fn context(&self, id: &str) -> Option<String> {
        (!self.contexts.contains(id)).then(|| id.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{BatchRefilled, Kind, RolloutFinished, samples};

    /// A small run in order, made of the samples' events, each fitted to the others.
    fn run() -> Vec<Event> {
        let key = RolloutKey { step: 1, task: "t".into(), draw: 0, k: 1 };
        let mut events = Vec::new();
        for event in samples::all() {
            events.push(match event {
                // Stands behind the plan: see below.
                Event::BatchRefilled(_) => continue,
                Event::TaskAdmitted(mut e) => {
                    (e.task.id, e.draft) = ("t".into(), None);
                    e.into()
                }
                Event::BatchPlanned(mut e) => {
                    (e.step, e.groups, e.group_size) = (1, vec![("t".into(), 0)], 2);
                    e.into()
                }
                Event::RolloutFinished(mut e) => {
                    e.key = key.clone();
                    e.into()
                }
                Event::SignalRaised(mut e) => {
                    e.key = key.clone();
                    e.into()
                }
                Event::GradientStepTaken(mut e) => {
                    (e.version_after, e.rollouts) = (1, vec![(key.clone(), 1.0)]);
                    e.into()
                }
                Event::PolicyPublished(mut e) => {
                    e.version = 1;
                    e.into()
                }
                Event::CheckpointSaved(mut e) => {
                    e.version = 1;
                    e.into()
                }
                Event::EvolutionStarted(mut e) => {
                    e.contexts.truncate(1);
                    let context = &mut e.contexts[0];
                    (context.id, context.task, context.rollouts) = ("c".into(), Some("t".into()), vec![key.clone()]);
                    e.into()
                }
                Event::ReflectionWritten(mut e) => {
                    e.context = "c".into();
                    e.into()
                }
                Event::ExplorationStepTaken(mut e) => {
                    (e.context, e.round, e.step) = ("c".into(), 0, 2);
                    e.into()
                }
                Event::DraftProposed(mut e) => {
                    (e.draft, e.context, e.from_steps) = ("d".into(), "c".into(), vec![(0, 2)]);
                    e.into()
                }
                Event::DraftValidated(mut e) => {
                    e.draft = "d".into();
                    e.into()
                }
                Event::DraftRejected(mut e) => {
                    e.draft = "d".into();
                    e.into()
                }
                other => other,
            });
        }
        events
    }

    fn found(events: &[Event]) -> Vec<String> {
        let mut references = References::default();
        events.iter().filter_map(|event| references.take(event)).collect()
    }

    #[test]
    fn a_run_in_order_lacks_nothing_and_each_missing_event_is_named() {
        let events = run();
        assert_eq!(found(&events), Vec::<String>::new());
        let named = |kind: &str| {
            let rest: Vec<Event> = events.iter().filter(|e| e.kind().name() != kind).cloned().collect();
            found(&rest)
        };
        for (lost, wanted) in [
            ("task_admitted", "task t"),
            ("batch_planned", "the plan of group 1/t/0/1"),
            ("rollout_finished", "rollout 1/t/0/1"),
            ("signal_raised", "marked rollout 1/t/0/1"),
            ("gradient_step_taken", "policy version 1"),
            ("evolution_started", "context c"),
            ("exploration_step_taken", "exploration step 0/2"),
            ("draft_proposed", "draft d"),
        ] {
            let found = named(lost);
            assert!(found.iter().any(|what| what.contains(&format!("refers to {wanted},"))), "{lost}: {found:?}");
        }
        // A further round: its rollouts are planned, it needs the step's plan, and its tasks.
        let refill: Event = BatchRefilled { step: 1, round: 1, groups: vec![("t".into(), 1)] }.into();
        let more = |e: &Event| match e {
            Event::RolloutFinished(e) => {
                let key = RolloutKey { draw: 1, ..e.key.clone() };
                [Some(RolloutFinished { key, ..e.clone() }.into()), None]
            }
            Event::BatchPlanned(_) => [None, Some(refill.clone())],
            _ => [None, None],
        };
        let mut refilled: Vec<Event> = Vec::new();
        for event in &events {
            let [before, after] = more(event);
            refilled.extend(before.into_iter().chain([event.clone()]).chain(after));
        }
        assert_eq!(found(&refilled), Vec::<String>::new());
        let without = |kind: Kind| refilled.iter().filter(|e| e.kind() != kind).cloned().collect::<Vec<_>>();
        let says =
            |found: Vec<String>, what: &str| assert!(found.iter().any(|f| f.contains(what)), "{what}: {found:?}");
        says(found(&without(Kind::BatchRefilled)), "refers to the plan of group 1/t/1/1,");
        says(found(&without(Kind::BatchPlanned)), "batch_refilled refers to the plan of step 1,");
        says(found(&without(Kind::TaskAdmitted)), "batch_refilled refers to task t,");
        // Nobody refers to these.
        for lost in ["reflection_written", "draft_validated", "policy_published", "run_started"] {
            assert_eq!(named(lost), Vec::<String>::new(), "{lost}");
        }
    }
}
