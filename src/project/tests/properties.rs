use proptest::prelude::*;

use super::fold::{fold, logged};
use super::*;
use crate::project::{State, as_of};

/// A run of some steps with random scores, its signals derived by the fold itself, and its rollouts of
/// each step in the order that `shuffle` gives.
fn run(steps: &[Vec<(usize, usize)>], shuffle: &[Vec<usize>], noise: bool) -> Vec<(u64, Event, Meta)> {
    let names = ["a", "b", "c"];
    let mut state = State::new();
    let mut out: Vec<(u64, Event, Meta)> = Vec::new();
    let mut seq = 0;
    let mut push = |state: &mut State, event: Event| {
        if noise {
            seq += 1;
            let resumed: Event = RunResumed { step: 0, code_version: "x".into() }.into();
            let meta = Meta { time_ms: seq * 10, ..Meta::default() };
            state.apply(seq, &resumed, &meta);
            out.push((seq, resumed, meta));
        }
        seq += 1;
        state.apply(seq, &event, &Meta::default());
        out.push((seq, event, Meta::default()));
    };
    push(&mut state, started(if noise { "noisy" } else { "quiet" }));
    for name in names {
        push(&mut state, admitted(name, Origin::Seed, None, 0));
    }
    for (i, scores) in steps.iter().enumerate() {
        let step = i as u32 + 1;
        push(&mut state, planned(step, &names, 3));
        let mut rollouts: Vec<Event> = scores
            .iter()
            .enumerate()
            .map(|(n, (score, calls))| {
                let score = [Some(0.0), Some(0.5), Some(1.0), None, Some(0.1)][*score];
                rollout(key(step, names[n / 3], n as u32 % 3), score, &["x", "y", "z"][..*calls])
            })
            .collect();
        let order = &shuffle[i];
        rollouts = order.iter().map(|n| rollouts[*n].clone()).collect();
        for event in rollouts {
            push(&mut state, event);
        }
        for raised in state.due_signals(step) {
            push(&mut state, signal(raised.key, raised.kind, &raised.because.to_string()));
        }
        push(&mut state, gradient(step, 0, &[("a", 3)], 0.125));
        push(&mut state, published(step, step));
        push(&mut state, step_finished(step));
    }
    assert_eq!(state.anomaly_count, 0, "{:?}", state.anomalies);
    out
}

fn scores() -> impl Strategy<Value = Vec<Vec<(usize, usize)>>> {
    proptest::collection::vec(proptest::collection::vec((0usize..5, 0usize..4), 9), 3)
}

fn orders() -> impl Strategy<Value = Vec<Vec<usize>>> {
    proptest::collection::vec(Just((0..9usize).collect::<Vec<_>>()).prop_shuffle(), 3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn order_of_rollouts_times_and_non_facts_do_not_matter(scores in scores(), a in orders(), b in orders()) {
        let (first, second) = (run(&scores, &a, false), run(&scores, &b, true));
        let digest = |events: &[(u64, Event, Meta)]| as_of(events, u64::MAX).digest();
        prop_assert_eq!(digest(&first), digest(&second));
        // Right before every StepFinished too, which is the digest that runs record.
        let before = |events: &[(u64, Event, Meta)]| -> Vec<String> {
            events.iter().filter(|e| e.1.kind() == Kind::StepFinished).map(|e| as_of(events, e.0 - 1).digest()).collect()
        };
        let (x, y) = (before(&first), before(&second));
        prop_assert_eq!(x.len(), 3);
        prop_assert_eq!(x, y);
    }

    #[test]
    fn prefix_then_rest_is_all_also_through_a_snapshot(scores in scores(), order in orders(), cut in 0usize..60) {
        let events = run(&scores, &order, false);
        let cut = cut.min(events.len());
        let all = as_of(&events, u64::MAX);
        let prefix = as_of(&events[..cut], u64::MAX);
        let snapshot = serde_json::to_string(&prefix).unwrap();
        let mut resumed: State = serde_json::from_str(&snapshot).unwrap();
        prop_assert_eq!(&resumed, &prefix);
        prop_assert_eq!(resumed.digest(), prefix.digest());
        for event in &events[cut..] {
            resumed.apply_logged(event);
        }
        prop_assert_eq!(&resumed, &all);
        prop_assert_eq!(resumed.digest(), all.digest());
    }

    /// Any events in any order: no panic, and the snapshot reads back.
    #[test]
    fn nonsense_is_folded_too(picks in proptest::collection::vec(0usize..50, 0..60)) {
        let events = small_run();
        let mixed: Vec<Event> = picks.iter().filter_map(|i| events.get(*i).cloned()).collect();
        let state = fold(&mixed);
        let back: State = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
        prop_assert_eq!(back, state);
    }

    /// Contexts of a round are worked on in parallel: their events may interleave.
    #[test]
    fn interleaved_contexts_give_one_state(order in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle()) {
        let context = |id: &str| ContextSpec { id: id.into(), task: None, kind: None, rollouts: vec![] };
        let begin: Vec<Event> = vec![
            started("r"),
            EvolutionStarted { round: 0, step: 0, mode: "random".into(), contexts: vec![context("c0.0"), context("c0.1")] }
                .into(),
        ];
        // One lane per context keeps its own order; the lanes interleave.
        let lane = |id: &str, d: &str, t: &str| -> Vec<Event> {
            vec![explored(id, 0, 0), explored(id, 0, 1), draft(d, id, t), admitted(t, Origin::Explored, Some(d), 0)]
        };
        let lanes = [lane("c0.0", "d0.0.0", "p"), lane("c0.1", "d0.1.0", "q")];
        let mut at = [0, 0];
        let mut mixed = begin.clone();
        for i in order {
            let l = i % 2;
            mixed.push(lanes[l][at[l]].clone());
            at[l] += 1;
        }
        let straight: Vec<Event> = begin.into_iter().chain(lanes.into_iter().flatten()).collect();
        prop_assert_eq!(fold(&mixed).digest(), fold(&straight).digest());
        prop_assert_eq!(logged(&mixed).len(), 10);
    }
}
