//! Parity with TRL, verl and PyTorch on the numbers that they computed (`tools/make-loss-fixtures.py`).
//!
//! Every case goes through `check_loss`, the function behind `coevolve check loss`, which runs the training
//! code; in f64 (agreement to the last digits) and in f32 (as trained).
//!
//! # Where conventions differ, and how the cases map them
//!
//! TRL 1.16.0:
//! * `gspo` is TRL's `loss_type="grpo"` with `importance_sampling_level="sequence"`. Other loss types at sequence
//!   level, `luspo`, `sapo`, `vespo`, `off_policy_mask_threshold`, `top_entropy_quantile` and adaptive entropy are
//!   not built here.
//! * Normaliser: TRL divides each micro-batch's loss by the accumulation steps (grpo, bnpo, dr_grpo) or by the
//!   trained tokens of the generation batch (dapo, cispo). The fixture is one generation batch of two
//!   micro-batches of four rollouts, one process: TRL's sum over micro-batches is then the loss of the update.
//!   With several updates per generation batch TRL divides dapo by the *average* tokens of an update, coevolve by
//!   the tokens of that update.
//! * `use_bias_correction_kl` (TRL's default since 1.x: k3 times the ratio) is off: coevolve's KL is plain k3.
//! * TRL's entropy bonus is a token mean per micro-batch for every loss type; coevolve's has the weights of the
//!   loss. They agree for bnpo always, for dapo and cispo with one micro-batch.
//! * TRL's `vllm_importance_sampling_mode`: `token_truncate` = tis/token, `token_mask` = mis/token,
//!   `sequence_truncate` = tis/sequence, `sequence_mask` = mis/sequence; `clip_max`, `clip_min` = max, min.
//! * TRL does not clamp log-ratios; no case is near +-20.
//!
//! verl 0.9.1:
//! * `token-mean` = dapo, cispo, gpg; `seq-mean-token-mean` = grpo, gspo; `seq-mean-token-sum-norm` = dr_grpo with
//!   max_completion_length = the padded width. verl leaves fully masked sequences out of the mean, TRL and
//!   coevolve count them: the cases have none. verl adds 1e-8 to token counts, hence 1e-8 of tolerance.
//!   `seq-mean-token-sum` and `token-sum` are not built.
//! * verl always has a dual clip (`clip_ratio_c`, default 3); coevolve's check has it off by default.
//! * verl's cispo clips the ratio from below too; the cases set that bound to 0. `clip_ratio_high` there is
//!   relative to 1, coevolve's `epsilon_high` is the bound itself.
//! * verl's k3 (`low_var_kl`) clamps the *value* at 10 as well, with gradient 0 above (d > 2.6 or so, d < -11);
//!   coevolve, like TRL, does not.
//! * `rollout_is_threshold` "C" = tis, "low_high" (IcePop) = mis. verl's gspo with token-level weights gives each
//!   token its own weight in the gradient, TRL and coevolve the mean of the sequence: the loss agrees, the
//!   gradient is compared for sequence-level weights only.
//! * Advantages: verl's eps is 1e-6; its gpg alpha counts non-zero *rewards*, coevolve's the samples in groups with
//!   signal; a group of one keeps its reward in verl and gets 0 here.

use coevolve::learner::adamw::{AdamW, AdamWConfig, clip_scale, grad_norm};
use coevolve::learner::check_loss::check_loss;
use coevolve::learner::{LearnerConfig, schedule::Schedule};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

fn fixture(name: &str) -> Value {
    let path = format!("{}/tests/fixtures/losses/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn array(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("no array: {value}"))
}

fn floats(value: &Value) -> Vec<f64> {
    array(value).iter().map(|x| x.as_f64().unwrap_or_else(|| panic!("no number: {x}"))).collect()
}

fn nested(value: &Value) -> Vec<f64> {
    array(value).iter().flat_map(floats).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Options of a fixture plus ours.
fn options(given: &Value, more: Value) -> Value {
    let mut all: Map<String, Value> = given.as_object().expect("options").clone();
    all.extend(more.as_object().expect("options").clone());
    Value::Object(all)
}

/// The fixture's rollouts with an advantage or a reward each.
fn rollouts(fixture: &Value, field: &str, values: &[Value]) -> Vec<Value> {
    let groups = fixture.get("groups").map(array);
    let with = |(i, (rollout, value)): (usize, (&Value, &Value))| {
        let mut rollout = rollout.clone();
        rollout[field] = value.clone();
        rollout["group"] = groups.map_or(json!(0), |g| g[i].clone());
        rollout
    };
    array(&fixture["rollouts"]).iter().zip(values).enumerate().map(with).collect()
}

fn answer(case: Value) -> Value {
    check_loss(&case).unwrap_or_else(|e| panic!("{e}: {case}"))
}

struct Difference {
    loss: f64,
    cosine: f64,
    norm: f64,
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn difference(ours: &Value, theirs: &Value) -> Difference {
    let (a, b) = (nested(&ours["dloss_dlogp"]), nested(&theirs["dlogp"]));
    assert_eq!(a.len(), b.len());
    let (na, nb) = (norm(&a), norm(&b));
    let dot: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
    Difference {
        loss: (number(&ours["loss"]) - number(&theirs["loss"])).abs(),
        cosine: if na == 0.0 && nb == 0.0 { 1.0 } else { dot / (na * nb) },
        norm: if nb == 0.0 { na } else { (na - nb).abs() / nb },
    }
}

/// (dtype, largest loss difference, largest 1 - cosine, largest relative difference of norms).
const BOUNDS: [(&str, f64, f64, f64); 2] = [("f64", 1e-13, 1e-13, 1e-12), ("f32", 1e-6, 1e-6, 1e-5)];

#[test]
fn every_loss_and_option_agrees_with_trl() {
    let trl = fixture("trl");
    let (mut seen, mut silent) = (BTreeSet::new(), 0);
    for case in array(&trl["cases"]) {
        let from_rewards = rollouts(&trl, "reward", array(&trl["rewards"]));
        for (dtype, loss, cosine, norm) in BOUNDS {
            // The default of dr_grpo does not scale; TRL's scale_rewards is "group" whatever the loss type.
            let more = json!({"dtype": dtype, "scale": "group", "max_completion_length": trl["max_completion_length"]});
            let ours = answer(json!({
                "options": options(&case["options"], more),
                "rollouts": from_rewards,
                "micro_batches": trl["micro_batches"],
            }));
            let d = difference(&ours, case);
            let what = &case["options"];
            assert!(d.loss < loss, "{dtype} {what}: loss differs by {}", d.loss);
            assert!(1.0 - d.cosine < cosine, "{dtype} {what}: cosine {}", d.cosine);
            assert!(d.norm < norm, "{dtype} {what}: gradient norm differs by {}", d.norm);
        }
        seen.insert(case["options"].to_string());
        silent += usize::from(nested(&case["dlogp"]).iter().all(|g| *g == 0.0));
    }
    // Every combination was there. Few of them clip or mask everything away.
    assert_eq!(seen.len(), 4 * 4 * 9 * 2 + 3 * 9 * 2 + 2 * 9 * 2);
    assert!(silent < 5, "{silent}");
}

/// The comparison above means nothing unless each option moves TRL's own numbers by far more than the tolerance.
#[test]
fn every_option_moves_the_numbers_of_trl() {
    let trl = fixture("trl");
    let cases = array(&trl["cases"]);
    let (mut compared, mut still) = (0, 0);
    for case in cases {
        for option in ["beta", "correction", "delta"] {
            let set = &case["options"][option];
            if set.is_null() || *set == json!(0.0) {
                continue;
            }
            // The same case with the option off.
            let mut off = case["options"].clone();
            match option {
                "beta" => off[option] = json!(0.0),
                "delta" => off[option] = Value::Null,
                _ => drop(off.as_object_mut().expect("options").remove(option)),
            }
            let twin = cases.iter().find(|c| c["options"] == off).expect("the twin is in the fixture");
            let moved = (number(&twin["loss"]) - number(&case["loss"])).abs();
            // A delta above 1 + epsilon_high acts on few tokens; its gradient must differ all the same.
            let (a, b) = (nested(&twin["dlogp"]), nested(&case["dlogp"]));
            let turned = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            compared += 1;
            still += usize::from(moved < 1e-5 && turned < 1e-3);
        }
    }
    // A mask may happen to leave nothing that delta could act on.
    assert!(compared > 400 && still * 100 < compared, "{still} of {compared} options changed nothing");
}

#[test]
fn advantages_agree_with_trl() {
    let trl = fixture("trl");
    for case in array(&trl["advantages"]) {
        let rewards = array(&case["rewards"]);
        let ours = answer(json!({
            "options": {"scale": case["scale"], "loss": "dapo"},
            "rollouts": rollouts(&trl, "reward", rewards),
        }));
        for (a, b) in floats(&ours["advantages"]).iter().zip(floats(&case["advantages"])) {
            assert!((a - b).abs() < 1e-11, "{case}: {a} {b}");
        }
    }
    assert_eq!(array(&trl["advantages"]).len(), 12);
}

#[test]
fn the_entropy_bonus_agrees_with_trl() {
    let trl = fixture("trl");
    let case = &trl["entropy"];
    for (dtype, loss, cosine, norm) in BOUNDS {
        let ours = answer(json!({
            "options": options(&case["options"], json!({"dtype": dtype})),
            "rollouts": rollouts(&trl, "reward", array(&trl["rewards"])),
            "micro_batches": trl["micro_batches"],
        }));
        let d = difference(&ours, case);
        assert!(d.loss < loss && 1.0 - d.cosine < cosine && d.norm < norm, "{dtype} {}", d.loss);
        let (a, b) = (nested(&ours["dloss_dentropy"]), nested(&case["dentropy"]));
        assert!(a.len() == b.len() && b.iter().any(|x| *x < 0.0));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-8), "{dtype}");
    }
}

#[test]
fn losses_agree_with_verl_in_f64() {
    let verl = fixture("verl");
    let advantages = array(&verl["advantages_given"]);
    let mut seen = BTreeSet::new();
    for case in array(&verl["cases"]) {
        let what = &case["options"];
        let more = json!({"dtype": "f64", "max_completion_length": verl["max_completion_length"]});
        let ours = answer(json!({
            "options": options(what, more),
            "rollouts": rollouts(&verl, "advantage", advantages),
        }));
        let d = difference(&ours, case);
        // verl divides by tokens + 1e-8 in seq-mean-token-mean.
        let exact = case["verl"]["loss_agg_mode"] != json!("seq-mean-token-mean");
        let tolerance = if exact { 1e-13 } else { 1e-8 };
        assert!(d.loss < tolerance, "{case}: loss differs by {}", d.loss);
        let policy = (number(&ours["policy_loss"]) - number(&case["policy_loss"])).abs();
        assert!(policy < tolerance, "{case}: policy loss differs by {policy}");
        let own_weights = what["loss"] == json!("gspo") && what["correction"]["level"] == json!("token");
        if !own_weights {
            assert!(1.0 - d.cosine < 1e-12 && d.norm < 2e-8, "{case}: {} {}", d.cosine, d.norm);
        }
        seen.insert(format!("{what}{}", case["verl"]));
    }
    assert_eq!(seen.len(), (2 * 5 + 5 + 1 + 2 * 5 + 5 + 2 * 5) * 5);
}

#[test]
fn kl_estimates_agree_with_verl() {
    for case in array(&fixture("verl")["estimates"]) {
        let kind = case["kl"].as_str().expect("name");
        let ours = if kind == "low_var_kl" { "k3" } else { kind };
        let (values, slopes) = (floats(&case["value"]), floats(&case["slope"]));
        for ((d, value), slope) in floats(&case["d"]).into_iter().zip(values).zip(slopes) {
            let out = answer(json!({
                "options": {"kl": ours, "beta": 1.0},
                "rollouts": [{"advantage": 0.0, "logp": [0.0], "logp_ref": [d], "mask": [1]}],
            }));
            let (got, gradient) = (number(&out["loss"]), number(&out["dloss_dlogp"][0][0]));
            if ours == "k3" && value == 10.0 {
                // verl holds the value at 10; the estimator itself goes on.
                let held = d.clamp(-20.0, 20.0);
                assert!((got / (held.exp() - held - 1.0) - 1.0).abs() < 1e-14, "{d}: {got}");
                assert_eq!(slope, 0.0);
                continue;
            }
            assert!((got - value).abs() < 1e-12 && (gradient - slope).abs() < 1e-12, "{kind} {d}: {got} {gradient}");
        }
    }
}

#[test]
fn advantages_agree_with_verl() {
    for case in array(&fixture("verl")["advantages"]) {
        let name = case["advantage"].as_str().expect("name");
        let (rewards, groups) = (floats(&case["rewards"]), array(&case["groups"]));
        let estimator = if name == "dr_grpo" { "grpo" } else { name };
        let scale = if name == "dr_grpo" { "none" } else { "group" };
        let rows: Vec<Value> = rewards
            .iter()
            .zip(groups)
            .map(|(r, g)| json!({"reward": r, "group": g, "logp": [-1.0], "mask": [1]}))
            .collect();
        let ours = answer(json!({
            "options": {"advantage": estimator, "scale": scale, "advantage_eps": 1e-6},
            "rollouts": rows,
        }));
        // verl's alpha: rollouts / rollouts with a reward that is not 0. Ours: / rollouts of groups with signal.
        let with_reward = rewards.iter().filter(|r| **r != 0.0).count() as f64;
        let flat = if rewards[4..].iter().all(|r| *r == rewards[4]) { 3 } else { 0 };
        let alpha = if name == "gpg" { (rewards.len() - flat) as f64 / with_reward } else { 1.0 };
        for (a, b) in floats(&ours["advantages"]).iter().zip(floats(&case["advantages"])) {
            assert!((alpha * a - b).abs() < 1e-14 * (1.0 + b.abs()), "{case}: {a} {b}");
        }
    }
}

#[test]
fn trajectories_agree_with_pytorch_and_transformers() {
    let fixture = fixture("optimizer");
    let peak = number(&fixture["learning_rate"]);
    let gradients: Vec<Vec<f32>> =
        array(&fixture["gradients"]).iter().map(|g| floats(g).iter().map(|x| *x as f32).collect()).collect();
    let (mut clipped, mut schedules) = (0, BTreeSet::new());
    for case in array(&fixture["cases"]) {
        let schedule: Schedule = serde_json::from_value(case["schedule"].clone()).expect("a schedule");
        let config = LearnerConfig {
            learning_rate: peak,
            schedule,
            warmup_updates: case["warmup_updates"].as_u64().expect("count"),
            total_updates: case["total_updates"].as_u64().expect("count"),
            min_learning_rate_ratio: number(&case["min_learning_rate_ratio"]),
            ..LearnerConfig::default()
        };
        let constants = AdamWConfig {
            beta1: number(&fixture["beta1"]),
            beta2: number(&fixture["beta2"]),
            eps: number(&fixture["eps"]),
            weight_decay: number(&case["weight_decay"]),
        };
        let theirs = floats(&case["transformers_rates"]);
        let mut weights: Vec<f32> = floats(&fixture["start"]).iter().map(|x| *x as f32).collect();
        let mut state = AdamW::new(weights.len());
        let bound = number(&case["grad_clip"]);
        let (rates, norms) = (floats(&case["rates"]), floats(&case["norms"]));
        for (u, gradient) in gradients.iter().enumerate() {
            let rate = config.learning_rate_at(state.step_count());
            assert!((rate - rates[u]).abs() < 1e-15, "{case}: update {u}: {rate} {}", rates[u]);
            // From the peak on, the very rate of transformers; before, one update ahead of it.
            let ahead = usize::from((u as u64) < config.warmup_updates);
            assert!((rate - theirs[u + ahead]).abs() < 1e-15);
            let norm = grad_norm(gradient);
            assert!((norm / norms[u] - 1.0).abs() < 1e-12);
            let scale = clip_scale(norm, bound);
            clipped += usize::from(scale < 1.0);
            state.update(&mut weights, gradient, scale, rate, &constants).expect("lengths agree");
            for (got, want) in weights.iter().zip(floats(&case["path"][u])) {
                assert!((f64::from(*got) / want - 1.0).abs() < 1e-6, "{case}: update {u}: {got} {want}");
            }
        }
        schedules.insert(format!("{} {}", case["transformers"], case["warmup_updates"]));
    }
    assert!(clipped > 32 && schedules.len() == 8, "{clipped} {schedules:?}");
}
