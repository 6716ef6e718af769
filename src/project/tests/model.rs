//! The fold against a model that is slow and plain: owned events in lists and maps, everything counted anew from what was
//! taken, on streams of events that need not make sense.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::fold::logged;
use super::*;
use crate::decide::curriculum::{Candidate, epoch};
use crate::decide::signals::{Attempt, SignalState, SignalsConfig};
use crate::event::digest::{FactKey, fact_key};
use crate::project::{State, as_of};

const TASKS: [&str; 4] = ["a", "b", "\u{1f600}", ""];
const TOOLS: [&str; 3] = ["cd", "mv", "a longer name of a tool"];

/// What the model knows: events in the order in which they were taken.
#[derive(Default)]
struct Model {
    taken: Vec<(u64, Event)>,
    seen: BTreeSet<FactKey>,
    finished: BTreeMap<u32, (u64, u64)>,
    first: BTreeMap<u32, u64>,
    /// Steps in the order in which they were closed.
    closed: Vec<u32>,
    anomalies: u64,
    raised: BTreeMap<u32, Vec<(RolloutKey, SignalKind, Value)>>,
    signals: SignalState,
    marks: BTreeMap<u32, Vec<(RolloutKey, SignalKind)>>,
    epoch: u64,
    base: BTreeMap<String, u64>,
}

impl Model {
    fn rollouts(&self, step: u32) -> BTreeMap<RolloutKey, RolloutFinished> {
        let of_step = self.taken.iter().filter_map(|(_, e)| match e {
            Event::RolloutFinished(r) if r.key.step == step => Some((r.key.clone(), r.clone())),
            _ => None,
        });
        of_step.collect()
    }

    fn step_of(event: &Event) -> Option<u32> {
        match event {
            Event::BatchPlanned(e) => Some(e.step),
            Event::BatchRefilled(e) => Some(e.step),
            Event::RolloutFinished(e) => Some(e.key.step),
            Event::SignalRaised(e) => Some(e.key.step),
            Event::GradientStepTaken(e) => Some(e.step),
            Event::StepSkipped(e) => Some(e.step),
            _ => None,
        }
    }

    fn apply(&mut self, seq: u64, event: &Event, config: &SignalsConfig) {
        let step = Model::step_of(event);
        let late = step.is_some_and(|s| self.finished.contains_key(&s));
        let closed = matches!(event, Event::RolloutFinished(r) if self.closed.contains(&r.key.step));
        let published = matches!(event, Event::PolicyPublished(_));
        // A further round that does not follow is not taken, and may come again.
        let follows = !matches!(event, Event::BatchRefilled(e) if !self.follows(e));
        let again = fact_key(event).is_some_and(|key| {
            !published && !late && !closed && if follows { !self.seen.insert(key) } else { self.seen.contains(&key) }
        });
        if late || closed || again {
            self.anomalies += 1;
            return;
        }
        let through = match event {
            Event::BatchPlanned(e) => e.step.checked_sub(1),
            Event::BatchRefilled(e) => e.step.checked_sub(1),
            Event::SignalRaised(_) | Event::GradientStepTaken(_) | Event::StepSkipped(_) => step,
            Event::PolicyPublished(e) => Some(e.step),
            Event::EvolutionStarted(e) => Some(e.step),
            Event::StepFinished(e) => Some(e.step),
            _ => None,
        };
        let mut open: Vec<u32> = self.first.keys().copied().filter(|s| through.is_some_and(|t| *s <= t)).collect();
        open.retain(|s| !self.closed.contains(s) && !self.finished.contains_key(s));
        for step in open {
            let planned = self.taken.iter().any(|(_, e)| matches!(e, Event::BatchPlanned(p) if p.step == step));
            let rollouts = self.rollouts(step);
            if planned || !rollouts.is_empty() {
                let attempts: Vec<Attempt> = rollouts.values().map(Attempt::of).collect();
                let raised = self.signals.fold(config, &attempts);
                if !raised.is_empty() {
                    self.marks.insert(step, raised.iter().map(|r| (r.key.clone(), r.kind)).collect());
                }
                self.raised.insert(step, raised.into_iter().map(|r| (r.key, r.kind, r.because)).collect());
                self.closed.push(step);
            }
        }
        let published_step = match event {
            Event::PolicyPublished(e) if e.step > 0 && !self.finished.contains_key(&e.step) => Some(e.step),
            _ => None,
        };
        if let Some(step) = step.or(published_step) {
            self.first.entry(step).or_insert(seq);
        }
        if !follows {
            self.anomalies += 1;
            return;
        }
        self.taken.push((seq, event.clone()));
        match event {
            Event::SignalRaised(e) => {
                let follows = |r: &(RolloutKey, SignalKind, Value)| r.0 == e.key && r.1 == e.kind;
                let known = self.raised.get(&e.key.step).is_some_and(|of| of.iter().any(follows));
                self.anomalies += u64::from(!known);
            }
            Event::StepFinished(e) => {
                let first = self.first.get(&e.step).copied().unwrap_or(seq);
                self.finished.insert(e.step, (first, seq));
            }
            Event::EvolutionStarted(e) => self.marks.retain(|step, _| *step > e.step),
            Event::TaskAdmitted(e) => {
                self.base.insert(e.task.id.clone(), self.epoch);
            }
            Event::BatchPlanned(_) | Event::BatchRefilled(_) => self.epoch = epoch(&self.candidates()),
            _ => {}
        }
    }

    /// The plan of a step and its further rounds: groups of each.
    fn rounds(&self, step: u32) -> (Option<usize>, Vec<usize>) {
        let plan = self.taken.iter().find_map(|(_, e)| match e {
            Event::BatchPlanned(p) if p.step == step => Some(p.groups.len()),
            _ => None,
        });
        let more = self.taken.iter().filter_map(|(_, e)| match e {
            Event::BatchRefilled(r) if r.step == step => Some(r.groups.len()),
            _ => None,
        });
        (plan, more.collect())
    }

    fn follows(&self, e: &BatchRefilled) -> bool {
        let (plan, more) = self.rounds(e.step);
        plan.is_some() && e.round == more.len() as u32 + 1 && !self.closed.contains(&e.step)
    }

    fn candidates(&self) -> Vec<Candidate> {
        let mut out: Vec<Candidate> = Vec::new();
        for (_, event) in &self.taken {
            match event {
                Event::TaskAdmitted(e) => out.push(Candidate {
                    id: e.task.id.clone(),
                    weight: e.weight,
                    planned: 0,
                    base_epoch: self.base[&e.task.id],
                    admitted_step: e.step,
                }),
                Event::BatchPlanned(BatchPlanned { groups, .. })
                | Event::BatchRefilled(BatchRefilled { groups, .. }) => {
                    for task in out.iter_mut() {
                        task.planned += groups.iter().filter(|(id, _)| *id == task.id).count() as u64;
                    }
                }
                _ => {}
            }
        }
        out.sort_by(|a, b| a.id.cmp(&b.id));
        out
    }

    /// Figures of a step as JSON, the ones that follow from rollouts, signals and updates.
    fn figures(&self, step: u32) -> Value {
        let of_closed = if self.closed.contains(&step) { self.rollouts(step) } else { BTreeMap::new() };
        let rollouts: Vec<&RolloutFinished> = of_closed.values().collect();
        let scores: Vec<f64> = rollouts.iter().filter_map(|r| r.reward.score()).collect();
        let mut ends: BTreeMap<String, u32> = BTreeMap::new();
        for r in &rollouts {
            *ends.entry(serde_json::to_value(r.end).unwrap().as_str().unwrap().to_owned()).or_default() += 1;
        }
        let groups: BTreeSet<(&str, u32)> = rollouts.iter().map(|r| (r.key.task.as_str(), r.key.draw)).collect();
        let mixed = groups.iter().filter(|(task, draw)| {
            let of = || rollouts.iter().filter(|r| r.key.task == *task && r.key.draw == *draw);
            let any = |test: &dyn Fn(f64) -> bool| of().any(|r| r.reward.score().is_some_and(test));
            any(&|s| s > 0.5) && any(&|s| s < 0.5)
        });
        let teach = groups.iter().filter(|(task, draw)| {
            let of = rollouts.iter().filter(|r| r.key.task == *task && r.key.draw == *draw);
            let scores: Vec<f64> = of.filter_map(|r| r.reward.score()).collect();
            scores.iter().any(|s| scores.iter().any(|t| s - t > 1e-9))
        });
        let (plan, more) = self.rounds(step);
        let planned = plan.unwrap_or(0) + more.iter().sum::<usize>();
        let left_out = if self.closed.contains(&step) { planned.saturating_sub(teach.count()) } else { 0 };
        let mut signals: BTreeMap<String, u32> = BTreeMap::new();
        let (mut updates, mut skipped) = (Vec::new(), 0);
        for (_, event) in &self.taken {
            match event {
                Event::SignalRaised(e) if e.key.step == step => {
                    *signals.entry(serde_json::to_value(e.kind).unwrap().as_str().unwrap().to_owned()).or_default() +=
                        1;
                }
                Event::GradientStepTaken(e) if e.step == step => updates.push(e.loss),
                Event::StepSkipped(e) if e.step == step => skipped += 1,
                _ => {}
            }
        }
        let n = scores.len() as f64;
        let some = |n: usize| (n > 0).then_some(n);
        let share = |count: usize| (n > 0.0).then(|| count as f64 / n);
        json!({
            "groups": planned,
            "refill_rounds": some(more.len()),
            "left_out": some(if more.is_empty() { 0 } else { left_out }),
            "rollouts": rollouts.len(),
            "scored": scores.len(),
            "mean_reward": (n > 0.0).then(|| scores.iter().sum::<f64>() / n),
            "pass_rate": share(scores.iter().filter(|s| **s == 1.0).count()),
            "solve_rate": share(scores.iter().filter(|s| **s >= 0.5).count()),
            "mixed_groups": mixed.count(),
            "env_steps": rollouts.iter().map(|r| u64::from(r.env_steps)).sum::<u64>(),
            "sampled_tokens": rollouts.iter().flat_map(|r| &r.sampled).map(|(_, n)| u64::from(*n)).sum::<u64>(),
            "ends": ends,
            "signals": signals,
            "updates": updates.len(),
            "skipped": skipped,
            "finished": self.finished.contains_key(&step),
        })
    }

    fn trained(&self, task: &str) -> Vec<(u32, u32, u32)> {
        let of = |(_, event): &(u64, Event)| match event {
            Event::GradientStepTaken(e) => {
                let n = e.rollouts.iter().filter(|(key, _)| key.task == task).count() as u32;
                (n > 0).then_some((e.step, e.update, n))
            }
            _ => None,
        };
        self.taken.iter().filter_map(of).collect()
    }
}

fn rollout_key() -> impl Strategy<Value = RolloutKey> {
    (1u32..4, 0usize..4, 0u32..2, 0u32..3).prop_map(|(step, task, draw, k)| RolloutKey {
        step,
        task: TASKS[task].into(),
        draw,
        k,
    })
}

fn any_rollout() -> impl Strategy<Value = Event> {
    let calls = proptest::collection::vec(0usize..3, 0..4);
    (rollout_key(), 0usize..5, calls).prop_map(|(key, score, calls)| {
        let score = [Some(0.0), Some(0.25), Some(0.5), Some(1.0), None][score];
        let calls: Vec<&str> = calls.into_iter().map(|c| TOOLS[c]).collect();
        rollout(key, score, &calls)
    })
}

fn any_event() -> impl Strategy<Value = Event> {
    let kinds = [SignalKind::Forgetting, SignalKind::Boundary, SignalKind::Rare];
    prop_oneof![
        20 => any_rollout(),
        4 => (rollout_key(), 0usize..3).prop_map(move |(key, kind)| signal(key, kinds[kind], "{}")),
        3 => (1u32..4, proptest::collection::vec(0usize..4, 0..4)).prop_map(|(step, tasks)| {
            planned(step, &tasks.into_iter().map(|t| TASKS[t]).collect::<Vec<_>>(), 2)
        }),
        3 => (1u32..4, 0u32..4, proptest::collection::vec((0usize..4, 0u32..3), 0..3)).prop_map(|(step, round, of)| {
            refilled(step, round, &of.into_iter().map(|(t, draw)| (TASKS[t], draw)).collect::<Vec<_>>())
        }),
        2 => (1u32..4, 0u32..2, proptest::collection::vec((0usize..4, 1u32..3), 0..3)).prop_map(|(step, update, of)| {
            gradient(step, update, &of.into_iter().map(|(t, n)| (TASKS[t], n)).collect::<Vec<_>>(), 0.5)
        }),
        1 => (1u32..4, 0u32..2).prop_map(|(step, update)| StepSkipped { step, update, reason: "r".into() }.into()),
        1 => (1u32..4).prop_map(|step| published(step, step)),
        1 => (1u32..4).prop_map(step_finished),
        1 => (0usize..4, 0usize..3).prop_map(|(task, weight)| {
            let event = admitted(TASKS[task], Origin::Seed, None, 0);
            let Event::TaskAdmitted(e) = event else { unreachable!() };
            TaskAdmitted { weight: [1.0, 0.5, 0.0][weight], ..e }.into()
        }),
        1 => (0u32..2, 0u32..4).prop_map(|(round, step)| {
            EvolutionStarted { round, step, mode: "feedback".into(), contexts: vec![] }.into()
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_fold_is_the_model(events in proptest::collection::vec(any_event(), 0..90)) {
        let events: Vec<Event> = std::iter::once(started("r")).chain(events).collect();
        let (mut model, mut state) = (Model::default(), State::new());
        let config = as_of(logged(&events[..1]), 1).signals_config;
        for (seq, event, meta) in logged(&events) {
            model.apply(seq, &event, &config);
            state.apply(seq, &event, &meta);
        }
        prop_assert_eq!(state.anomaly_count, model.anomalies, "{:?}", state.anomalies);
        prop_assert_eq!(&state.signals, &model.signals);
        let marks: Vec<_> = state.marked().into_iter().map(|m| (m.key, m.kind)).collect();
        prop_assert_eq!(marks, model.marks.values().flatten().cloned().collect::<Vec<_>>());
        let candidates = state.tasks.candidates();
        prop_assert_eq!(&candidates, &model.candidates());
        prop_assert_eq!(state.tasks.epoch, model.epoch);
        for step in 1..4 {
            let figures = serde_json::to_value(state.metrics.steps.get(&step).cloned().unwrap_or_default()).unwrap();
            for (name, expected) in model.figures(step).as_object().unwrap() {
                prop_assert_eq!(&figures[name], expected, "{} of step {}", name, step);
            }
            let stretch = match (model.finished.get(&step), model.first.get(&step)) {
                (Some(ends), _) => Some(*ends),
                (None, Some(first)) => Some((*first, events.len() as u64)),
                (None, None) => None,
            };
            prop_assert_eq!(state.stretch(step), stretch, "step {}", step);
            if let Some(open) = state.recorded.steps.get(&step) {
                prop_assert_eq!(open.rounds() as usize, model.rounds(step).1.len());
                let rollouts: Vec<_> = model.rollouts(step).into_values().collect();
                prop_assert_eq!(&open.rollouts.native().unwrap(), &rollouts);
                prop_assert_eq!(&state.recorded.rollouts(step).unwrap(), &rollouts);
                prop_assert!(rollouts.iter().all(|r| open.rollouts.contains(&r.key)));
                prop_assert_eq!(open.closed, model.closed.contains(&step));
                let raised: Vec<_> = open.raised().into_iter().map(|r| (r.key, r.kind, r.because)).collect();
                prop_assert_eq!(raised, model.raised.get(&step).cloned().unwrap_or_default());
            }
        }
        for task in TASKS {
            let trained: Vec<_> = state.lineage.trained.get(task).into_iter().flatten().collect();
            let trained: Vec<_> = trained.into_iter().map(|t| (t.step, t.update, t.rollouts)).collect();
            prop_assert_eq!(trained, model.trained(task), "{}", task);
        }
        // A snapshot of it is it, wherever it is taken.
        let text = serde_json::to_string(&state).unwrap();
        let mut back: State = serde_json::from_str(&text).unwrap();
        prop_assert!(back == state);
        prop_assert_eq!(back.digest(), state.digest());
        for (i, event) in [planned(4, &["a", "b"], 2), admitted("c", Origin::Explored, None, 4), planned(5, &["c"], 2), step_finished(4)]
            .into_iter()
            .enumerate()
        {
            let seq = events.len() as u64 + 1 + i as u64;
            back.apply(seq, &event, &Meta::default());
            state.apply(seq, &event, &Meta::default());
        }
        prop_assert!(back == state);
        prop_assert_eq!(back.digest(), state.digest());
    }
}
