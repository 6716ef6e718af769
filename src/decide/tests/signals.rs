use proptest::prelude::*;
use serde_json::json;

use super::{attempt, group, key};
use crate::decide::signals::{Attempt, Raised, SignalState, SignalsConfig, pattern};
use crate::event::SignalKind::{self, Boundary, Forgetting, Rare};

fn only(kind: SignalKind) -> SignalsConfig {
    SignalsConfig {
        forgetting: kind == Forgetting,
        boundary: kind == Boundary,
        rare: kind == Rare,
        ..SignalsConfig::default()
    }
}

fn ks(raised: &[Raised]) -> Vec<(u32, u32)> {
    raised.iter().map(|r| (r.key.step, r.key.k)).collect()
}

#[test]
fn defaults_are_the_documented_ones() {
    let c = SignalsConfig::default();
    assert_eq!(
        (c.window, c.include_group, c.theta, c.n_min, c.min_recurrence, c.pattern_length),
        (16, false, 5.0, 200, 2, 4)
    );
    assert!(c.forgetting && c.boundary && c.rare);
}

#[test]
fn pattern_collapses_then_cuts() {
    assert_eq!(pattern(&["a", "a", "b", "b", "a"], 4), ["a", "b", "a"]);
    // Collapsing first: five names in a row of a are one place of four.
    assert_eq!(pattern(&["a", "a", "a", "a", "a", "b", "c", "d", "e"], 4), ["a", "b", "c", "d"]);
    assert_eq!(pattern(&["a", "b"], 1), ["a"]);
    assert_eq!(pattern::<&str>(&[], 4), ["(none)"]);
}

#[test]
fn forgetting_looks_at_earlier_groups_only() {
    let mut state = SignalState::default();
    let config = only(Forgetting);
    // Solved and failed side by side in the first group: no history yet, nothing is forgotten.
    assert_eq!(state.fold(&config, &group(1, "t", &[1.0, 0.0, 0.0])), []);
    // Next group: both failures are marked, the success is not. Window: the three scores before.
    let raised = state.fold(&config, &group(4, "t", &[0.0, 1.0, 0.4]));
    assert_eq!(ks(&raised), [(4, 0), (4, 2)]);
    assert_eq!(raised[0].because, json!({"score": 0.0, "window": [1.0, 0.0, 0.0], "last_solved_step": 1}));
    assert_eq!(raised[1].because["window"], json!([1.0, 0.0, 0.0]));
    assert!((raised[0].group_mean - 1.4 / 3.0).abs() < 1e-15);
}

#[test]
fn forgetting_threshold_is_half_on_both_sides() {
    let mut state = SignalState::default();
    let config = only(Forgetting);
    state.fold(&config, &group(1, "t", &[0.5]));
    // 0.5 solved before; 0.5 now is no failure; 0.49 is.
    assert_eq!(ks(&state.fold(&config, &group(2, "t", &[0.5, 0.49]))), [(2, 1)]);
    let mut state = SignalState::default();
    state.fold(&config, &group(1, "t", &[0.49]));
    assert_eq!(state.fold(&config, &group(2, "t", &[0.0])), []);
}

#[test]
fn forgetting_with_include_group_counts_earlier_siblings() {
    let mut state = SignalState::default();
    let config = SignalsConfig { include_group: true, ..only(Forgetting) };
    // k 0 fails before any success; k 2 fails after k 1 succeeded.
    let raised = state.fold(&config, &group(1, "t", &[0.0, 1.0, 0.0]));
    assert_eq!(ks(&raised), [(1, 2)]);
    assert_eq!(raised[0].because["window"], json!([0.0, 1.0]));
}

#[test]
fn window_slides_over_attempts() {
    let config = SignalsConfig { window: 3, ..only(Forgetting) };
    let mut state = SignalState::default();
    state.fold(&config, &group(1, "t", &[1.0]));
    state.fold(&config, &group(2, "t", &[0.0, 0.0]));
    // Window [1, 0, 0] still holds the success ...
    let mut still = state.clone();
    assert_eq!(ks(&still.fold(&config, &group(3, "t", &[0.0]))), [(3, 0)]);
    // ... and after one more failure it does not.
    state.fold(&config, &group(3, "t", &[0.0]));
    assert_eq!(state.fold(&config, &group(4, "t", &[0.0])), []);
    assert_eq!(
        state.windows["t"].iter().map(|p| (p.step, p.score)).collect::<Vec<_>>(),
        [(2, 0.0), (3, 0.0), (4, 0.0)]
    );
}

#[test]
fn own_group_stays_out_even_when_it_fills_the_window() {
    // K = 4 > W = 2: every member is compared with the two scores before the group.
    let config = SignalsConfig { window: 2, ..only(Forgetting) };
    let mut state = SignalState::default();
    state.fold(&config, &group(1, "t", &[0.0, 1.0]));
    assert_eq!(ks(&state.fold(&config, &group(2, "t", &[0.0, 0.0, 0.0, 0.0]))), [(2, 0), (2, 1), (2, 2), (2, 3)]);
}

#[test]
fn another_draw_of_the_step_is_history() {
    let config = only(Forgetting);
    let mut first = attempt(1, "t", 0, Some(1.0), &[]);
    let mut second = attempt(1, "t", 0, Some(0.0), &[]);
    second.key.draw = 1;
    let raised = SignalState::default().fold(&config, &[second.clone(), first.clone()]);
    assert_eq!(raised.iter().map(|r| r.key.clone()).collect::<Vec<_>>(), [key(1, "t", 1, 0)]);
    // Draw 0 fails first, then draw 1 succeeds: nothing.
    std::mem::swap(&mut first.score, &mut second.score);
    assert_eq!(SignalState::default().fold(&config, &[first, second]), []);
}

#[test]
fn tasks_do_not_share_windows() {
    let config = only(Forgetting);
    let mut state = SignalState::default();
    state.fold(&config, &group(1, "a", &[1.0]));
    assert_eq!(state.fold(&config, &group(2, "b", &[0.0])), []);
}

#[test]
fn boundary_needs_both_sides_and_marks_all_scored() {
    let config = only(Boundary);
    let mut state = SignalState::default();
    assert_eq!(state.fold(&config, &group(1, "a", &[1.0, 1.0, 1.0])), []);
    assert_eq!(state.fold(&config, &group(1, "b", &[0.0, 0.2])), []);
    // Exactly 0.5 is on neither side ...
    assert_eq!(state.fold(&config, &group(1, "c", &[0.5, 1.0])), []);
    assert_eq!(state.fold(&config, &group(1, "d", &[0.5, 0.0])), []);
    // ... but is marked when the group has both.
    let raised = state.fold(&config, &group(2, "e", &[0.5, 0.0, 0.75]));
    assert_eq!(ks(&raised), [(2, 0), (2, 1), (2, 2)]);
    assert_eq!(raised[0].because["scores"], json!([0.5, 0.0, 0.75]));
    assert_eq!((&raised[0].because["above"], &raised[0].because["below"]), (&json!(1), &json!(1)));
}

#[test]
fn boundary_is_per_group_not_per_task() {
    let config = only(Boundary);
    let mut list = group(1, "t", &[1.0, 1.0]);
    for mut other in group(1, "t", &[0.0, 0.0]) {
        other.key.draw = 1;
        list.push(other);
    }
    assert_eq!(SignalState::default().fold(&config, &list), []);
}

#[test]
fn unscored_rollouts_leave_no_trace() {
    let config = SignalsConfig { n_min: 0, min_recurrence: 1, theta: 100.0, ..SignalsConfig::default() };
    let mut state = SignalState::default();
    let unscored = [attempt(1, "t", 0, None, &["x"]), attempt(1, "t", 1, Some(f64::NAN), &["x"])];
    assert_eq!(state.fold(&config, &unscored), []);
    assert_eq!(state, SignalState::default());
    // In a mixed group the unscored member is not marked.
    let mixed = [attempt(2, "t", 0, Some(1.0), &[]), attempt(2, "t", 1, None, &[]), attempt(2, "t", 2, Some(0.0), &[])];
    assert_eq!(ks(&state.fold(&only(Boundary), &mixed)), [(2, 0), (2, 2)]);
}

#[test]
fn rare_counts_itself_first() {
    // theta 30 %, n_min 4, recurrence 2. Sequence of patterns: x a a x a a a
    let config = SignalsConfig { theta: 30.0, n_min: 4, ..only(Rare) };
    let calls = ["x", "a", "a", "x", "a", "a", "x"];
    let list: Vec<Attempt> =
        calls.iter().enumerate().map(|(k, c)| attempt(1, "t", k as u32, Some(0.0), &[c])).collect();
    let mut state = SignalState::default();
    // N = 4: x 2/4 = 50 %. N = 7: x 3/7 = 43 %. Nothing is below 30 %.
    assert_eq!(state.fold(&config, &list), []);
    assert_eq!((state.counted, state.patterns.get(&["x"]), state.patterns.get(&["a"])), (7, 3, 4));
    // y: 1/8 = 12.5 % but seen once; again: 2/9 = 22.2 % and seen twice; again 3/10 = 30 % is not below.
    let ys: Vec<Attempt> = (0..3).map(|k| attempt(2, "t", k, Some(0.0), &["y"])).collect();
    let raised = state.fold(&config, &ys);
    assert_eq!(ks(&raised), [(2, 1)]);
    assert_eq!(raised[0].because["count"], json!(2));
    assert_eq!(raised[0].because["total"], json!(9));
    assert_eq!(raised[0].because["pattern"], json!(["y"]));
}

#[test]
fn rare_waits_for_n_min() {
    let config = SignalsConfig { theta: 50.0, n_min: 6, ..only(Rare) };
    let mut state = SignalState::default();
    let step = |s, calls: &[&str]| -> Vec<Attempt> {
        calls.iter().enumerate().map(|(k, c)| attempt(s, "t", k as u32, Some(1.0), &[c])).collect()
    };
    // y twice among five: 40 %, but N = 5 < 6.
    assert_eq!(state.fold(&config, &step(1, &["a", "a", "a", "y", "y"])), []);
    // The sixth is an a: N = 6, 4/6 is not rare. The seventh, y: 3/7 = 42.9 % is.
    assert_eq!(ks(&state.fold(&config, &step(2, &["a", "y"]))), [(2, 1)]);
}

#[test]
fn rare_at_the_default_settings() {
    // 198 rollouts of one pattern, then two of another: at N = 200 the second has 2/200 = 1 % < 5 %.
    let config = SignalsConfig::default();
    let mut state = SignalState::default();
    let common: Vec<Attempt> = (0..198).map(|k| attempt(1, "t", k, Some(1.0), &["a"])).collect();
    assert_eq!(state.fold(&config, &common), []);
    let raised = state.fold(&config, &[attempt(2, "t", 0, Some(1.0), &["b"]), attempt(2, "t", 1, Some(1.0), &["b"])]);
    assert_eq!(raised.iter().map(|r| (r.key.k, r.kind)).collect::<Vec<_>>(), [(1, Rare)]);
    // Exactly 5 % is not rare: 10 of 200.
    let mut state = SignalState::default();
    let list: Vec<Attempt> =
        (0..200).map(|k| attempt(1, "t", k, Some(1.0), if k < 190 { &["a"] } else { &["b"] })).collect();
    assert_eq!(state.fold(&config, &list), []);
}

#[test]
fn all_kinds_of_one_rollout_are_kept_in_order() {
    let config = SignalsConfig { n_min: 1, theta: 100.0, min_recurrence: 1, ..SignalsConfig::default() };
    let mut state = SignalState::default();
    state.fold(&config, &[attempt(1, "t", 0, Some(1.0), &["a"])]);
    let raised = state.fold(&config, &[attempt(2, "t", 0, Some(0.0), &["b"]), attempt(2, "t", 1, Some(1.0), &["c"])]);
    let got: Vec<_> = raised.iter().map(|r| (r.key.k, r.kind)).collect();
    assert_eq!(got, [(0, Forgetting), (0, Boundary), (0, Rare), (1, Boundary), (1, Rare)]);
}

#[test]
fn switched_off_kinds_still_remember() {
    let off = SignalsConfig { forgetting: false, boundary: false, rare: false, ..SignalsConfig::default() };
    let (mut a, mut b) = (SignalState::default(), SignalState::default());
    let list = group(1, "t", &[1.0, 0.0]);
    assert_eq!(a.fold(&off, &list), []);
    b.fold(&SignalsConfig::default(), &list);
    assert_eq!(a, b);
}

#[test]
fn success_rate_is_over_the_window() {
    let config = SignalsConfig { window: 4, ..SignalsConfig::default() };
    let mut state = SignalState::default();
    assert_eq!(state.success_rate("t"), None);
    state.fold(&config, &group(1, "t", &[1.0, 1.0, 1.0, 0.5, 0.0, 0.4]));
    // The last four: 1, 0.5, 0, 0.4.
    assert_eq!(state.success_rate("t"), Some(0.5));
}

#[test]
fn settings_nested_dotted_and_refused() {
    let nested = json!({"run": {"seed": 3}, "signals": {"theta": 10, "forgetting": {"include_group": true}, "rare": {"enabled": false}}});
    let dotted = json!({"run.seed": 3, "signals.theta": 10.0, "signals.include_group": true, "signals.rare": false});
    let expected = SignalsConfig { theta: 10.0, include_group: true, rare: false, ..SignalsConfig::default() };
    assert_eq!(SignalsConfig::from_settings(&nested), Ok(expected.clone()));
    assert_eq!(SignalsConfig::from_settings(&dotted), Ok(expected));
    for (bad, key) in [
        (json!({"signals": {"windows": 3}}), "signals.windows"),
        (json!({"signals": {"window": 0}}), "signals.window"),
        (json!({"signals": {"window": -1}}), "signals.window"),
        (json!({"signals": {"theta": 101}}), "signals.theta"),
        (json!({"signals": {"rare": "no"}}), "signals.rare"),
    ] {
        assert_eq!(SignalsConfig::from_settings(&bad).map_err(|e| e.key), Err(key.to_owned()), "{bad}");
    }
}

/// The definition again, written the slow way: every rollout looks at the whole past.
fn reference(config: &SignalsConfig, all: &[Attempt]) -> Vec<(crate::event::RolloutKey, SignalKind)> {
    let mut sorted: Vec<&Attempt> = all.iter().filter(|a| a.score.is_some()).collect();
    sorted.sort_by(|a, b| a.key.cmp(&b.key));
    let id = |a: &Attempt| (a.key.step, a.key.task.clone(), a.key.draw);
    let pat = |a: &Attempt| {
        let mut names = a.calls.clone();
        names.dedup();
        names.truncate(config.pattern_length);
        names.join("\n")
    };
    let mut out = Vec::new();
    for (i, a) in sorted.iter().enumerate() {
        let score = a.score.unwrap();
        let past: Vec<f64> = sorted[..i]
            .iter()
            .filter(|p| p.key.task == a.key.task && (config.include_group || id(p) != id(a)))
            .map(|p| p.score.unwrap())
            .collect();
        let window = &past[past.len().saturating_sub(config.window)..];
        if score < 0.5 && window.iter().any(|s| *s >= 0.5) {
            out.push((a.key.clone(), Forgetting));
        }
        let siblings: Vec<f64> = sorted.iter().filter(|s| id(s) == id(a)).map(|s| s.score.unwrap()).collect();
        if siblings.iter().any(|s| *s > 0.5) && siblings.iter().any(|s| *s < 0.5) {
            out.push((a.key.clone(), Boundary));
        }
        let count = sorted[..=i].iter().filter(|p| pat(p) == pat(a)).count() as u64;
        let n = i as u64 + 1;
        if n >= config.n_min && count >= config.min_recurrence && (count as f64 / n as f64) < config.theta / 100.0 {
            out.push((a.key.clone(), Rare));
        }
    }
    out
}

fn attempts() -> impl Strategy<Value = Vec<Attempt>> {
    let one = (1u32..6, 0usize..3, 0u32..2, 0u32..4, 0usize..6, proptest::collection::vec(0usize..3, 0..6));
    proptest::collection::btree_map((1u32..6, 0usize..3, 0u32..2, 0u32..4), one, 0..60).prop_map(|map| {
        map.into_iter()
            .map(|((step, task, draw, k), (_, _, _, _, score, calls))| Attempt {
                key: key(step, ["a", "b", "c"][task], draw, k),
                score: [Some(0.0), Some(0.5), Some(1.0), None, Some(0.25), Some(0.75)][score],
                calls: calls.iter().map(|c| ["x", "y", "z"][*c].to_owned()).collect(),
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn folding_equals_the_definition(
        list in attempts().prop_shuffle(),
        window in 1usize..6,
        include_group: bool,
        theta in 0u32..60,
        n_min in 0u64..20,
        min_recurrence in 1u64..4,
        pattern_length in 1usize..4,
    ) {
        let config = SignalsConfig {
            window, include_group, theta: f64::from(theta), n_min, min_recurrence, pattern_length,
            ..SignalsConfig::default()
        };
        let expected = reference(&config, &list);
        let at_once = SignalState::default().fold(&config, &list);
        let got: Vec<_> = at_once.iter().map(|r| (r.key.clone(), r.kind)).collect();
        prop_assert_eq!(&got, &expected);
        // Step by step, and through JSON in between, gives the same.
        let mut state = SignalState::default();
        let mut stepwise = Vec::new();
        for step in 1..6 {
            let of_step: Vec<Attempt> = list.iter().filter(|a| a.key.step == step).cloned().collect();
            stepwise.extend(state.fold(&config, &of_step));
            state = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
        }
        prop_assert_eq!(stepwise, at_once);
    }
}
