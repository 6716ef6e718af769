use proptest::prelude::*;
use serde_json::{Value, json};

use crate::decide::check_signals::{check_signals, check_signals_text};

fn kinds(answer: &Value) -> Vec<(u64, String)> {
    let list = answer["signals"].as_array().unwrap();
    list.iter().map(|s| (s["index"].as_u64().unwrap(), s["kind"].as_str().unwrap().to_owned())).collect()
}

fn owned(expected: &[(u64, &str)]) -> Vec<(u64, String)> {
    expected.iter().map(|(i, k)| (*i, k.to_string())).collect()
}

#[test]
fn index_is_the_place_in_the_list_and_order_is_canonical() {
    let case = json!({"rollouts": [
        {"step": 2, "task": "t", "draw": 0, "k": 1, "score": 1, "calls": ["cd"]},
        {"step": 2, "task": "t", "draw": 0, "k": 0, "score": 0.0, "calls": ["cd"]},
        {"step": 1, "task": "t", "draw": 0, "k": 0, "score": 1.0, "calls": ["cd", "mv"]},
        {"step": 1, "task": "s", "draw": 0, "k": 0, "score": null, "calls": []},
    ]});
    let answer = check_signals(&case).unwrap();
    assert_eq!(kinds(&answer), owned(&[(1, "forgetting"), (1, "boundary"), (0, "boundary")]));
    // t: group means 1 (step 1, learnt), 0.5 (step 2, still solved); window 1, 0, 1.
    let t = &answer["forgetting"]["t"];
    assert_eq!((&t["learnt_at"], &t["forgotten_at"], &t["times_forgotten"]), (&json!(1), &json!([]), &json!(0)));
    assert_eq!(t["success_rate"], json!(2.0 / 3.0));
    let s = &answer["forgetting"]["s"];
    assert_eq!((&s["learnt_at"], &s["success_rate"]), (&Value::Null, &Value::Null));
}

#[test]
fn forgetting_history_in_the_answer() {
    let case = json!({"config": {"window": 2}, "rollouts": [
        {"step": 1, "task": "t", "score": 1.0, "calls": []},
        {"step": 3, "task": "t", "score": 0.0, "calls": []},
        {"step": 5, "task": "t", "score": 1.0, "calls": []},
        {"step": 8, "task": "t", "score": 0.0, "calls": []},
    ]});
    let answer = check_signals(&case).unwrap();
    assert_eq!(kinds(&answer), owned(&[(1, "forgetting"), (3, "forgetting")]));
    assert_eq!(
        answer["forgetting"]["t"],
        json!({"learnt_at": 1, "forgotten_at": [3, 8], "times_forgotten": 2, "relearnt_at": [5], "success_rate": 0.5})
    );
}

#[test]
fn config_reaches_the_signals() {
    let rollouts: Vec<Value> = ["a", "a", "a", "b", "b"]
        .iter()
        .enumerate()
        .map(|(k, c)| json!({"step": 1, "task": "t", "k": k, "score": 1.0, "calls": [c, c, "z"]}))
        .collect();
    let run = |config: Value| kinds(&check_signals(&json!({"config": config, "rollouts": rollouts})).unwrap());
    assert_eq!(run(json!({})), owned(&[]));
    // At N = 5 the second b has 2/5 = 40 %; the first b is a single one.
    assert_eq!(run(json!({"n_min": 4, "theta": 41})), owned(&[(4, "rare")]));
    assert_eq!(run(json!({"n_min": 4, "theta": 41, "min_recurrence": 1})), owned(&[(3, "rare"), (4, "rare")]));
    assert_eq!(run(json!({"n_min": 4, "theta": 40})), owned(&[]));
    assert_eq!(run(json!({"n_min": 4, "theta": 41, "rare": false})), owned(&[]));
}

#[test]
fn without_k_the_list_order_counts() {
    let case = json!({"config": {"include_group": true}, "rollouts": [
        {"step": 1, "task": "t", "score": 1.0},
        {"step": 1, "task": "t", "score": 0.0},
    ]});
    let answer = check_signals(&case).unwrap();
    assert_eq!(kinds(&answer), owned(&[(0, "boundary"), (1, "forgetting"), (1, "boundary")]));
}

#[test]
fn several_cases() {
    let case = json!({"rollouts": []});
    let answer = check_signals(&json!([case, case])).unwrap();
    assert_eq!(answer, json!([{"signals": [], "forgetting": {}}, {"signals": [], "forgetting": {}}]));
    assert_eq!(check_signals(&json!([])).unwrap(), json!([]));
}

#[test]
fn faults_name_their_place() {
    let ok = json!({"step": 1, "task": "t", "k": 0, "score": 1.0, "calls": []});
    let with = |key: &str, value: Value| {
        let mut r = ok.clone();
        r[key] = value;
        json!({"rollouts": [ok, r]})
    };
    let without = |key: &str| {
        let mut r = ok.clone();
        r.as_object_mut().unwrap().remove(key);
        json!({"rollouts": [r]})
    };
    let cases = [
        (json!(3), "case"),
        (json!({}), "case"),
        (json!({"rollouts": {}}), "rollouts"),
        (json!({"rollouts": [7]}), "rollouts[0]"),
        (json!([{"rollouts": []}, {"rollouts": [{}]}]), "[1].rollouts[0]"),
        (with("score", json!("high")), "rollouts[1].score"),
        (with("score", json!(1.5)), "rollouts[1].score"),
        (with("score", json!(-0.1)), "rollouts[1].score"),
        (with("step", json!(-1)), "rollouts[1].step"),
        (with("step", json!(1.5)), "rollouts[1].step"),
        (with("k", json!(4294967296u64)), "rollouts[1].k"),
        (with("task", json!(1)), "rollouts[1].task"),
        (with("calls", json!("cd")), "rollouts[1].calls"),
        (with("calls", json!(["cd", null])), "rollouts[1].calls[1]"),
        (with("call", json!([])), "rollouts[1].call"),
        (json!({"rollouts": [ok, ok]}), "rollouts[1]"),
        (without("score"), "rollouts[0]"),
        (without("task"), "rollouts[0]"),
        (without("step"), "rollouts[0]"),
        (json!({"config": 3, "rollouts": []}), "config"),
        (json!({"config": {"windows": 3}, "rollouts": []}), "config.windows"),
        (json!({"config": {"window": 0}, "rollouts": []}), "config.window"),
        (json!({"config": {"theta": "5"}, "rollouts": []}), "config.theta"),
        (json!([{"config": {"n_min": -1}, "rollouts": []}]), "[0].config.n_min"),
    ];
    for (case, place) in cases {
        assert_eq!(check_signals(&case).map_err(|e| e.place), Err(place.to_owned()), "{case}");
    }
    let e = check_signals_text("{\n  \"rollouts\": [,]\n}").unwrap_err();
    assert_eq!(e.place, "line 2, column 16");
}

proptest! {
    #[test]
    fn any_text_is_answered_or_refused(text in "[\\[\\]{}:,\"a-z0-9. -]{0,80}") {
        // Must not panic; whatever parses as an object without rollouts is refused.
        if let Ok(answer) = check_signals_text(&text) {
            prop_assert!(answer.is_array(), "{}", answer);
        }
    }

    #[test]
    fn order_of_the_list_only_renames_indices(
        order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle(),
        scores in proptest::collection::vec(0usize..4, 12),
    ) {
        let make = |i: usize| json!({
            "step": 1 + i / 6, "task": (["a", "b"][i / 3 % 2]), "k": i % 3,
            "score": ([json!(0.0), json!(0.5), json!(1.0), Value::Null][scores[i]]), "calls": [],
        });
        let sorted = check_signals(&json!({"rollouts": (0..12).map(make).collect::<Vec<_>>()})).unwrap();
        let mixed = check_signals(&json!({"rollouts": order.iter().map(|i| make(*i)).collect::<Vec<_>>()})).unwrap();
        let renamed: Vec<(u64, String)> =
            kinds(&mixed).into_iter().map(|(i, k)| (order[i as usize] as u64, k)).collect();
        prop_assert_eq!(renamed, kinds(&sorted));
        prop_assert_eq!(&mixed["forgetting"], &sorted["forgetting"]);
    }
}
