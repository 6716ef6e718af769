//! `coevolve check loss`: feeds JSON cases to the code that training runs.
//!
//! One case:
//!
//! ```json
//! {"options": {"loss": "grpo|bnpo|dr_grpo|dapo|gspo|cispo|gpg", "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": null,
//!   "dual_clip": null, "beta": 0.001, "kl": "k1|k2|k3", "scale": "group|batch|none", "max_completion_length": 12,
//!   "correction": null | {"kind": "tis|mis", "level": "token|sequence", "max": 2.0, "min": null},
//!   "overlong": null | {"max": 4096, "cache": 512, "factor": 1.0}, "advantage": "grpo|rloo|gpg",
//!   "advantage_eps": 1e-4, "entropy_coef": 0.0, "dtype": "f64|f32"},
//!  "rollouts": [{"group": 0, "reward": 1.0, "logp": [..], "logp_old": [..], "logp_ref": [..], "logp_sampler": [..],
//!    "entropy": [..], "mask": [1, 0, 1]}],
//!  "micro_batches": [[0, 1], [2]]}
//! ```
//!
//! `logp`, `mask` and one of `reward` (`null` = unscored) and `advantage` (overrides the computed one) are
//! required. Defaults: loss `dapo`; epsilons .2/.28 (gspo 3e-4/4e-4, cispo's upper bound 5); delta,
//! dual_clip, correction, overlong off; beta 1e-3; kl k3; scale `group` (`none` for dr_grpo); advantage `grpo`
//! (`gpg` for gpg); max_completion_length the longest rollout of the case; group 0; logp_old = logp
//! (on-policy); without logp_ref no KL term; entropy_coef 0; f64; one micro-batch. A missing epsilon is the
//! family's default. The length that `overlong` looks at is the number of completion positions. Every key is
//! read or refused; `name`, `id` and `comment` are free for notes anywhere, and a rollout may carry the `step`,
//! `task`, `draw` and `k` of the `signals` check.
//!
//! `kl` in the answer is the mean estimate per trained token; numbers that are not finite are `null`. With an
//! entropy bonus the answer also has `entropy` (mean per trained token) and `dloss_dentropy`.

use super::config::advantage_defaults;
use super::loss::{
    Correction, KlKind, LossConfig, LossError, LossKind, Overlong, Real, TokenBatch, UpdateShape, loss, token_weights,
};
use crate::decide::advantage::{Estimator, Member, Scale, advantages, overlong_penalty};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// A malformed case, with the place of the fault.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct CaseError {
    /// JSON path, e.g. `$[2].rollouts[1].mask`.
    pub place: String,
    /// What is wrong there.
    pub fault: String,
}

fn error(place: impl Into<String>, fault: impl Into<String>) -> CaseError {
    CaseError { place: place.into(), fault: fault.into() }
}

/// Keys that hold a note and are not read.
const NOTES: [&str; 3] = ["name", "id", "comment"];
const CASE: [&str; 3] = ["options", "rollouts", "micro_batches"];
const ROLLOUT: [&str; 13] = [
    "group",
    "reward",
    "advantage",
    "logp",
    "logp_old",
    "logp_ref",
    "logp_sampler",
    "entropy",
    "mask",
    "step",
    "task",
    "draw",
    "k",
];
const OPTIONS: [&str; 15] = [
    "loss",
    "epsilon_low",
    "epsilon_high",
    "delta",
    "dual_clip",
    "beta",
    "kl",
    "scale",
    "max_completion_length",
    "correction",
    "overlong",
    "advantage",
    "advantage_eps",
    "entropy_coef",
    "dtype",
];

/// Refuses the first key that nobody would read: a misspelt one must not pass in silence.
fn only(map: &Map<String, Value>, place: &str, what: &str, known: &[&str]) -> Result<(), CaseError> {
    match map.keys().map(String::as_str).find(|k| !known.contains(k) && !NOTES.contains(k)) {
        None => Ok(()),
        Some(k) => Err(error(format!("{place}.{k}"), format!("is no {what}; known are {}", known.join(", ")))),
    }
}

/// Answers one case or an array of cases; the result has the same form, one document per case in order.
pub fn check_loss(document: &Value) -> Result<Value, CaseError> {
    match document {
        Value::Array(cases) => cases.iter().enumerate().map(|(i, case)| check_case(case, &format!("$[{i}]"))).collect(),
        case => check_case(case, "$"),
    }
}

struct Rollout {
    group: String,
    reward: Option<f64>,
    advantage: Option<f64>,
    logp: Vec<f64>,
    logp_old: Option<Vec<f64>>,
    logp_ref: Option<Vec<f64>>,
    logp_sampler: Option<Vec<f64>>,
    entropy: Option<Vec<f64>>,
    mask: Vec<bool>,
}

fn object<'a>(value: &'a Value, place: &str) -> Result<&'a Map<String, Value>, CaseError> {
    value.as_object().ok_or_else(|| error(place, format!("must be an object, is {}", kind(value))))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A field that may be missing or null.
fn field<T: DeserializeOwned>(map: &Map<String, Value>, place: &str, name: &str) -> Result<Option<T>, CaseError> {
    match map.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => T::deserialize(value).map(Some).map_err(|e| error(format!("{place}.{name}"), e.to_string())),
    }
}

fn numbers(map: &Map<String, Value>, place: &str, name: &str) -> Result<Option<Vec<f64>>, CaseError> {
    let place = format!("{place}.{name}");
    let values = match map.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(values)) => values,
        Some(other) => return Err(error(place, format!("must be an array of numbers, is {}", kind(other)))),
    };
    values
        .iter()
        .enumerate()
        .map(|(i, v)| {
            v.as_f64().ok_or_else(|| error(format!("{place}[{i}]"), format!("must be a finite number, is {}", kind(v))))
        })
        .collect::<Result<Vec<_>, _>>()
        .map(Some)
}

fn mask(map: &Map<String, Value>, place: &str) -> Result<Vec<bool>, CaseError> {
    let place = format!("{place}.mask");
    let Some(Value::Array(values)) = map.get("mask") else {
        return Err(error(place, "is required: an array of 0 and 1, one per position"));
    };
    values
        .iter()
        .enumerate()
        .map(|(i, v)| match (v.as_bool(), v.as_f64()) {
            (Some(b), _) => Ok(b),
            (_, Some(x)) if x == 0.0 || x == 1.0 => Ok(x == 1.0),
            _ => Err(error(format!("{place}[{i}]"), format!("must be 0 or 1, is {v}"))),
        })
        .collect()
}

fn rollout(value: &Value, place: &str) -> Result<Rollout, CaseError> {
    let map = object(value, place)?;
    only(map, place, "field of a rollout", &ROLLOUT)?;
    let logp = numbers(map, place, "logp")?.ok_or_else(|| error(format!("{place}.logp"), "is required"))?;
    let mask = mask(map, place)?;
    let same = |name: &str, len: usize| {
        if len == logp.len() {
            return Ok(());
        }
        Err(error(format!("{place}.{name}"), format!("has {len} values, logp has {}", logp.len())))
    };
    same("mask", mask.len())?;
    let aligned = |name: &str| -> Result<Option<Vec<f64>>, CaseError> {
        let values = numbers(map, place, name)?;
        values.iter().try_for_each(|v| same(name, v.len()))?;
        Ok(values)
    };
    let (logp_old, logp_ref, logp_sampler) = (aligned("logp_old")?, aligned("logp_ref")?, aligned("logp_sampler")?);
    let entropy = aligned("entropy")?;
    let reward = field(map, place, "reward")?;
    let advantage: Option<f64> = field(map, place, "advantage")?;
    if !map.contains_key("reward") && advantage.is_none() {
        return Err(error(place, "needs `reward` (null = unscored) or `advantage`"));
    }
    let group = match map.get("group") {
        None | Some(Value::Null) => "0".to_string(),
        Some(Value::Number(n)) => n.to_string(),
        Some(Value::String(s)) => s.clone(),
        Some(other) => {
            return Err(error(format!("{place}.group"), format!("must be a number or a string, is {}", kind(other))));
        }
    };
    Ok(Rollout { group, reward, advantage, logp, logp_old, logp_ref, logp_sampler, entropy, mask })
}

fn check_case(case: &Value, place: &str) -> Result<Value, CaseError> {
    let map = object(case, place)?;
    only(map, place, "field of a case", &CASE)?;
    let list = match map.get("rollouts") {
        Some(Value::Array(list)) => list,
        _ => return Err(error(format!("{place}.rollouts"), "is required: an array of rollouts")),
    };
    let rollouts: Vec<Rollout> = list
        .iter()
        .enumerate()
        .map(|(i, r)| rollout(r, &format!("{place}.rollouts[{i}]")))
        .collect::<Result<_, _>>()?;

    let options_place = format!("{place}.options");
    let nothing = Map::new();
    let options = match map.get("options") {
        None | Some(Value::Null) => &nothing,
        Some(value) => object(value, &options_place)?,
    };
    only(options, &options_place, "option", &OPTIONS)?;
    let longest = rollouts.iter().map(|r| r.logp.len()).max().unwrap_or(1).max(1);
    let config = loss_config(options, &options_place, u32::try_from(longest).unwrap_or(u32::MAX))?;
    let advantages = case_advantages(options, &options_place, config.kind, &rollouts)?;

    let micro_batches: Vec<Vec<usize>> = match field(map, place, "micro_batches")? {
        Some(split) => split,
        None => vec![(0..rollouts.len()).collect()],
    };
    let trained: Vec<usize> = rollouts.iter().map(|r| r.mask.iter().filter(|m| **m).count()).collect();
    let split_place = || format!("{place}.micro_batches");
    let weights = token_weights(&config, &UpdateShape { trained: &trained, micro_batches: &micro_batches })
        .map_err(|e| error(split_place(), e.to_string()))?;
    if let Some(sequence) = (0..rollouts.len()).find(|s| !micro_batches.iter().flatten().any(|x| x == s)) {
        let fault = LossError::Split { sequence, fault: "is missing" };
        return Err(error(split_place(), fault.to_string()));
    }

    if config.correction.is_some()
        && let Some(i) = rollouts.iter().position(|r| r.logp_sampler.is_none())
    {
        let fault = LossError::Missing { option: "correction", field: "logp_sampler" };
        return Err(error(format!("{place}.rollouts[{i}].logp_sampler"), fault.to_string()));
    }
    if config.entropy_coef != 0.0
        && let Some(i) = rollouts.iter().position(|r| r.entropy.is_none())
    {
        let fault = LossError::Missing { option: "entropy_coef", field: "entropy" };
        return Err(error(format!("{place}.rollouts[{i}].entropy"), fault.to_string()));
    }
    match field::<String>(options, &options_place, "dtype")?.as_deref() {
        None | Some("f64") => answer::<f64>(&config, &rollouts, &advantages, &micro_batches, &weights),
        Some("f32") => answer::<f32>(&config, &rollouts, &advantages, &micro_batches, &weights),
        Some(other) => {
            return Err(error(format!("{options_place}.dtype"), format!("must be f64 or f32, is {other}")));
        }
    }
    .map_err(|e| error(options_place, e.to_string()))
}

fn loss_config(options: &Map<String, Value>, place: &str, longest: u32) -> Result<LossConfig, CaseError> {
    let kind: LossKind = field(options, place, "loss")?.unwrap_or_default();
    let mut config = LossConfig::new(kind);
    if let Some(x) = field(options, place, "epsilon_low")? {
        config.epsilon_low = x;
    }
    if let Some(x) = field(options, place, "epsilon_high")? {
        config.epsilon_high = x;
    }
    if let Some(x) = field(options, place, "beta")? {
        config.beta = x;
    }
    config.delta = field(options, place, "delta")?;
    config.dual_clip = field(options, place, "dual_clip")?;
    config.kl = field::<KlKind>(options, place, "kl")?.unwrap_or_default();
    config.correction = field::<Correction>(options, place, "correction")?;
    config.max_completion_length = field(options, place, "max_completion_length")?.unwrap_or(longest);
    config.entropy_coef = field(options, place, "entropy_coef")?.unwrap_or(0.0);
    config.validate().map_err(|e| match &e {
        LossError::Setting { field, .. } => error(format!("{place}.{field}"), e.to_string()),
        other => error(place, other.to_string()),
    })?;
    Ok(config)
}

fn case_advantages(
    options: &Map<String, Value>,
    place: &str,
    kind: LossKind,
    rollouts: &[Rollout],
) -> Result<Vec<f64>, CaseError> {
    let overlong: Option<Overlong> = field(options, place, "overlong")?;
    let estimator: Option<Estimator> = field(options, place, "advantage")?;
    let scale: Option<Scale> = field(options, place, "scale")?;
    let eps = field(options, place, "advantage_eps")?.unwrap_or(1e-4);
    let labels: BTreeSet<&str> = rollouts.iter().map(|r| r.group.as_str()).collect();
    let number: BTreeMap<&str, u64> = labels.into_iter().zip(0..).collect();
    let members: Vec<Member> = rollouts
        .iter()
        .map(|r| {
            let penalty = overlong.map_or(0.0, |o| overlong_penalty(r.logp.len(), o.max, o.cache, o.factor));
            Member { group: number[r.group.as_str()], reward: r.reward.map(|x| x + penalty) }
        })
        .collect();
    let computed = advantages(&members, &advantage_defaults(kind, estimator, scale, eps));
    Ok(rollouts.iter().zip(computed).map(|(r, a)| r.advantage.unwrap_or(a)).collect())
}

/// Runs the micro-batches one after the other, as training does.
fn answer<F: Real>(
    config: &LossConfig,
    rollouts: &[Rollout],
    advantages: &[f64],
    micro_batches: &[Vec<usize>],
    weights: &[f64],
) -> Result<Value, LossError> {
    let mut total = super::loss::Summary::default();
    let mut gradients = vec![Vec::new(); rollouts.len()];
    let mut entropy_gradients = vec![Vec::new(); rollouts.len()];
    let bonus = config.entropy_coef != 0.0;
    for members in micro_batches {
        let flat = |get: &dyn Fn(&Rollout) -> &[f64]| -> Vec<F> {
            members.iter().flat_map(|i| get(&rollouts[*i]).iter().map(|x| F::of(*x))).collect()
        };
        let logp = flat(&|r| &r.logp);
        let old = flat(&|r| r.logp_old.as_ref().unwrap_or(&r.logp));
        let sampler = flat(&|r| r.logp_sampler.as_ref().unwrap_or(&r.logp));
        let entropy = flat(&|r| r.entropy.as_ref().unwrap_or(&r.logp));
        let mut offsets = vec![0];
        let mut mask = Vec::new();
        for i in members {
            mask.extend_from_slice(&rollouts[*i].mask);
            offsets.push(mask.len());
        }
        // A reference that only some rollouts have counts for those: the others are runs of their own.
        let reference = flat(&|r| r.logp_ref.as_ref().unwrap_or(&r.logp));
        let mut from = 0;
        while from < members.len() {
            let has = |i: usize| rollouts[members[i]].logp_ref.is_some();
            let to = (from..members.len()).find(|i| has(*i) != has(from)).unwrap_or(members.len());
            let tokens = offsets[from]..offsets[to];
            let local: Vec<usize> = offsets[from..=to].iter().map(|o| o - tokens.start).collect();
            let local_advantages: Vec<F> = members[from..to].iter().map(|i| F::of(advantages[*i])).collect();
            let local_weights: Vec<f64> = members[from..to].iter().map(|i| weights[*i]).collect();
            let output = loss(
                config,
                &TokenBatch {
                    logp: &logp[tokens.clone()],
                    logp_old: Some(&old[tokens.clone()]),
                    logp_ref: has(from).then_some(&reference[tokens.clone()]),
                    logp_sampler: config.correction.is_some().then_some(&sampler[tokens.clone()]),
                    entropy: bonus.then_some(&entropy[tokens.clone()]),
                    mask: &mask[tokens],
                    offsets: &local,
                    advantages: &local_advantages,
                    weights: &local_weights,
                },
            )?;
            total.add(&output.summary);
            for (i, bounds) in members[from..to].iter().zip(local.windows(2)) {
                let of = |g: &[F]| g[bounds[0]..bounds[1]].iter().map(|g| g.get()).collect();
                gradients[*i] = of(&output.dlogp);
                if bonus {
                    entropy_gradients[*i] = of(&output.dentropy);
                }
            }
            from = to;
        }
    }
    let mut document = json!({
        "advantages": advantages,
        "loss": total.loss,
        "policy_loss": total.policy_loss,
        "kl": total.kl(),
        "dloss_dlogp": gradients,
        "clip_fraction": total.clip_fraction(),
        "trained_tokens": total.trained_tokens,
        "skipped": total.skip().map(|reason| reason.to_string()),
    });
    if bonus {
        document["entropy"] = json!(total.entropy());
        document["dloss_dentropy"] = json!(entropy_gradients);
    }
    Ok(document)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(value: &Value, want: f64) -> bool {
        value.as_f64().is_some_and(|x| (x - want).abs() < 1e-12)
    }

    #[test]
    fn golden_document() {
        // Group rewards 1, 0: std sqrt(1/2); lengths 2 and 1 of which 2 and 1 are trained.
        let out = check_loss(&json!({
            "options": {"loss": "dapo", "beta": 0.0},
            "rollouts": [
                {"group": 0, "reward": 1.0, "logp": [-1.0, -2.0], "mask": [1, 1]},
                {"group": 0, "reward": 0.0, "logp": [-1.0, -5.0], "logp_old": [-1.0, -7.0], "mask": [true, false]},
            ],
        }))
        .unwrap();
        let a = 0.5 / (0.5f64.sqrt() + 1e-4);
        assert!(close(&out["advantages"][0], a) && close(&out["advantages"][1], -a));
        assert!(close(&out["loss"], (-2.0 * a + a) / 3.0), "{out}");
        assert_eq!(out["policy_loss"], out["loss"]);
        assert!(close(&out["dloss_dlogp"][0][1], -a / 3.0) && close(&out["dloss_dlogp"][1][0], a / 3.0));
        assert_eq!(out["dloss_dlogp"][1][1], json!(0.0));
        assert_eq!((&out["trained_tokens"], &out["skipped"]), (&json!(3), &Value::Null));
        assert_eq!((&out["kl"], &out["clip_fraction"]), (&json!(0.0), &json!(0.0)));
    }

    #[test]
    fn arrays_options_and_overrides() {
        let rollout = |a: f64| json!({"advantage": a, "logp": [-1.0], "logp_old": [-1.0 - 1.5f64.ln()], "logp_ref": [-0.9], "mask": [1]});
        let cases = json!([
            {"options": {"beta": 0.0}, "rollouts": [rollout(1.0)]},
            {"options": {"beta": 0.0}, "rollouts": [rollout(-1.0)]},
            {"options": {"beta": 1.0, "kl": "k3", "loss": "gpg"}, "rollouts": [rollout(2.0)]},
            {"options": {"beta": 1.0}, "rollouts": [rollout(0.0)]},
            {"options": {"loss": "cispo", "beta": 0.0}, "rollouts": [rollout(1.0)]},
            {"options": {"dtype": "f32", "beta": 0.0}, "rollouts": [rollout(1.0)]},
        ]);
        let out = check_loss(&cases).unwrap();
        assert!(close(&out[0]["loss"], -1.28) && out[0]["clip_fraction"] == json!(1.0));
        assert!(close(&out[1]["loss"], 1.5) && close(&out[1]["dloss_dlogp"][0][0], 1.5));
        assert!(close(&out[2]["loss"], 2.0) && close(&out[2]["dloss_dlogp"][0][0], -2.0));
        assert!(close(&out[3]["loss"], 0.1f64.exp() - 1.1) && close(&out[3]["kl"], 0.1f64.exp() - 1.1));
        assert!(close(&out[4]["loss"], 1.5) && close(&out[4]["dloss_dlogp"][0][0], -1.5));
        assert!((out[5]["loss"].as_f64().unwrap() + 1.28).abs() < 1e-6);
    }

    #[test]
    fn unscored_and_skipped() {
        let out = check_loss(&json!({"rollouts": [
            {"reward": null, "logp": [-1.0], "mask": [0]},
            {"reward": 1.0, "logp": [-1.0], "mask": [0]},
        ]}))
        .unwrap();
        assert_eq!((&out["skipped"], &out["loss"]), (&json!("no trained tokens"), &json!(0.0)));
        assert_eq!(out["advantages"], json!([0.0, 0.0]));
        assert_eq!(check_loss(&json!({"rollouts": []})).unwrap()["skipped"], json!("no trained tokens"));
    }

    #[test]
    fn notes_and_signal_keys_are_free_and_the_entropy_bonus_is_answered() {
        let row = |h: f64| {
            json!({"id": 7, "step": 1, "task": "t", "draw": 0, "k": 3, "advantage": 0.0,
            "logp": [-1.0, -2.0], "entropy": [h, 9.0], "mask": [1, 0]})
        };
        let case = json!({"name": "bonus", "options": {"entropy_coef": 0.5, "comment": "?"}, "rollouts": [row(0.25), row(0.75)]});
        let out = check_loss(&case).unwrap();
        // Two trained tokens of weight 1/2: -0.5 * (0.25 + 0.75) / 2.
        assert!(close(&out["loss"], -0.25) && close(&out["entropy"], 0.5), "{out}");
        assert_eq!(out["dloss_dentropy"], json!([[-0.25, 0.0], [-0.25, 0.0]]));
        let plain = check_loss(&json!({"rollouts": [row(0.25)]})).unwrap();
        assert!(plain.get("entropy").is_none() && plain.get("dloss_dentropy").is_none());
    }

    #[test]
    fn faults_say_where() {
        let ok = json!({"reward": 1.0, "logp": [-1.0, -2.0], "mask": [1, 1]});
        let with = |field: &str, value: Value| {
            let mut r = ok.clone();
            r[field] = value;
            json!({"rollouts": [ok.clone(), r]})
        };
        let option = |field: &str, value: Value| json!({"options": {field: value}, "rollouts": [ok.clone()]});
        for (case, place) in [
            (json!(3), "$"),
            (json!({}), "$.rollouts"),
            (json!([{"rollouts": [ok.clone()]}, {"rollouts": [7]}]), "$[1].rollouts[0]"),
            (json!({"rollouts": [{"reward": 1.0, "mask": [1]}]}), "$.rollouts[0].logp"),
            (json!({"rollouts": [{"reward": 1.0, "logp": [-1.0]}]}), "$.rollouts[0].mask"),
            (json!({"rollouts": [{"logp": [-1.0], "mask": [1]}]}), "$.rollouts[0]"),
            (with("mask", json!([1])), "$.rollouts[1].mask"),
            (with("mask", json!([1, 2])), "$.rollouts[1].mask[1]"),
            (with("logp", json!([-1.0, null])), "$.rollouts[1].logp[1]"),
            (with("logp_old", json!([-1.0])), "$.rollouts[1].logp_old"),
            (with("logp_ref", json!("x")), "$.rollouts[1].logp_ref"),
            (with("reward", json!("high")), "$.rollouts[1].reward"),
            (with("group", json!([1])), "$.rollouts[1].group"),
            (option("loss", json!("ppo")), "$.options.loss"),
            (option("dual_clip", json!(0.5)), "$.options.dual_clip"),
            (option("epsilon", json!(0.2)), "$.options.epsilon"),
            (option("correction", json!({"kind": "tis"})), "$.rollouts[0].logp_sampler"),
            (option("correction", json!({"kind": "tos"})), "$.options.correction"),
            (option("max_completion_length", json!(0)), "$.options.max_completion_length"),
            (option("dtype", json!("f16")), "$.options.dtype"),
            (option("entropy_coef", json!(0.1)), "$.rollouts[0].entropy"),
            (with("logp_reff", json!([-1.0, -1.0])), "$.rollouts[1].logp_reff"),
            (with("entropy", json!([-1.0])), "$.rollouts[1].entropy"),
            (json!({"rollouts": [ok.clone()], "micro_batch": [[0]]}), "$.micro_batch"),
            (json!({"rollouts": [ok.clone()], "micro_batches": [[0], [0]]}), "$.micro_batches"),
            (json!({"rollouts": [ok.clone(), ok.clone()], "micro_batches": [[0]]}), "$.micro_batches"),
            (json!({"rollouts": [ok.clone()], "micro_batches": [["a"]]}), "$.micro_batches"),
        ] {
            match check_loss(&case) {
                Err(e) => assert_eq!(e.place, place, "{case}: {e}"),
                Ok(out) => panic!("{case} was accepted: {out}"),
            }
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z_]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            let key = prop::sample::select(vec![
                "options",
                "rollouts",
                "logp",
                "mask",
                "reward",
                "loss",
                "group",
                "micro_batches",
                "beta",
                "advantage",
            ]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map(key.prop_map(String::from), inner, 0..5)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_document_panics(document in any_json()) {
            let _ = check_loss(&document);
        }
    }
}
