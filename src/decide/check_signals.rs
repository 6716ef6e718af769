//! `coevolve check signals`: feeds JSON cases to the code that training runs use.
//!
//! A case is an object `{"config": {..}, "rollouts": [{"step", "task", "draw", "k", "score", "calls"}]}`;
//! a document is one case or an array of cases, and the answer has the same form. `config` and its keys,
//! `draw` (0), `k` (0) and `calls` (none) may be left out; `score` is a number in [0, 1] or `null` for
//! unscored. Rollouts may come in any order; where `k` is left out the order in the list stands for it.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::history::ForgettingHistory;
use super::signals::{Attempt, SignalState, SignalsConfig, Tried};
use crate::event::RolloutKey;

/// A case that cannot be used; says where and why.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct CaseError {
    /// Place in the document as a path, e.g. `[2].rollouts[5].score`; `case` = the document itself.
    pub place: String,
    /// What is wrong and what is expected.
    pub fault: String,
}

fn fault(place: &str, what: impl Into<String>) -> CaseError {
    let place = if place.is_empty() { "case" } else { place.strip_prefix('.').unwrap_or(place) };
    CaseError { place: place.to_owned(), fault: what.into() }
}

/// Parses a document and answers it. JSON that cannot be parsed is an error with line and column.
pub fn check_signals_text(text: &str) -> Result<Value, CaseError> {
    let document = serde_json::from_str(text).map_err(|e| CaseError {
        place: format!("line {}, column {}", e.line(), e.column()),
        fault: format!("not JSON: {e}"),
    })?;
    check_signals(&document)
}

/// Answers one case (an object) or several (an array): the raised signals and the forgetting histories.
pub fn check_signals(document: &Value) -> Result<Value, CaseError> {
    match document {
        Value::Array(cases) => {
            let answers: Result<Vec<Value>, CaseError> =
                cases.iter().enumerate().map(|(i, case)| answer(&format!("[{i}]"), case)).collect();
            Ok(Value::Array(answers?))
        }
        case => answer("", case),
    }
}

fn answer(place: &str, case: &Value) -> Result<Value, CaseError> {
    let case = object(place, case)?;
    let config = config(&format!("{place}.config"), case.get("config"))?;
    let list_place = format!("{place}.rollouts");
    let list = case
        .get("rollouts")
        .ok_or_else(|| fault(place, "`rollouts` is missing: a list of rollouts"))?
        .as_array()
        .ok_or_else(|| fault(&list_place, "expected a list of rollouts"))?;
    let mut seen: BTreeMap<RolloutKey, usize> = BTreeMap::new();
    let mut rollouts: Vec<(Attempt, usize)> = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let place = format!("{list_place}[{index}]");
        let (attempt, explicit_k) = rollout(&place, value)?;
        if explicit_k && let Some(other) = seen.insert(attempt.key.clone(), index) {
            return Err(fault(&place, format!("same step, task, draw and k as rollouts[{other}]")));
        }
        rollouts.push((attempt, index));
    }
    rollouts.sort_by(|a, b| (&a.0.key, a.1).cmp(&(&b.0.key, b.1)));
    Ok(evaluate(&config, rollouts))
}

/// Renumbers k by canonical place, so that every rollout has its own key, and maps back to indices.
fn evaluate(config: &SignalsConfig, sorted: Vec<(Attempt, usize)>) -> Value {
    let mut index_of: BTreeMap<RolloutKey, usize> = BTreeMap::new();
    let mut attempts: Vec<Attempt> = Vec::with_capacity(sorted.len());
    for (mut attempt, index) in sorted {
        attempt.key.k = match attempts.last() {
            Some(last) if last.same_group(&&attempt) => last.key.k + 1,
            _ => 0,
        };
        index_of.insert(attempt.key.clone(), index);
        attempts.push(attempt);
    }
    let mut state = SignalState::default();
    let mut history = ForgettingHistory::default();
    let raised = state.fold(config, &attempts);
    history.fold(&attempts);
    let signals: Vec<Value> = raised
        .into_iter()
        .map(|r| json!({ "index": index_of.get(&r.key), "kind": r.kind, "because": r.because }))
        .collect();
    let forgetting: Map<String, Value> = history
        .tasks
        .iter()
        .map(|(id, h)| {
            let entry = json!({
                "learnt_at": h.learnt_at,
                "forgotten_at": h.forgotten_at,
                "times_forgotten": h.forgotten_at.len(),
                "relearnt_at": h.relearnt_at,
                "success_rate": state.success_rate(id),
            });
            (id.clone(), entry)
        })
        .collect();
    json!({ "signals": signals, "forgetting": forgetting })
}

fn object<'a>(place: &str, value: &'a Value) -> Result<&'a Map<String, Value>, CaseError> {
    value.as_object().ok_or_else(|| fault(place, format!("expected an object, found {}", name_of(value))))
}

fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn config(place: &str, value: Option<&Value>) -> Result<SignalsConfig, CaseError> {
    let Some(value) = value.filter(|v| !v.is_null()) else { return Ok(SignalsConfig::default()) };
    let mut config = SignalsConfig::default();
    for (key, value) in object(place, value)? {
        let at = |e: super::signals::SignalsConfigError| {
            fault(&format!("{place}.{key}"), format!("{} is not usable: {}", e.value, e.remedy))
        };
        config.apply_settings(&json!({ "signals": { key: value } })).map_err(at)?;
    }
    Ok(config)
}

fn rollout(place: &str, value: &Value) -> Result<(Attempt, bool), CaseError> {
    const KNOWN: [&str; 6] = ["step", "task", "draw", "k", "score", "calls"];
    let map = object(place, value)?;
    if let Some(key) = map.keys().find(|k| !KNOWN.contains(&k.as_str())) {
        return Err(fault(&format!("{place}.{key}"), format!("unknown key; known: {}", KNOWN.join(", "))));
    }
    let number = |key: &str, required: bool| -> Result<u32, CaseError> {
        match map.get(key) {
            None if !required => Ok(0),
            None => Err(fault(place, format!("`{key}` is missing: a whole number, 0 or more"))),
            Some(v) => v
                .as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| fault(&format!("{place}.{key}"), format!("{v} is no whole number in 0..2^32"))),
        }
    };
    let task = match map.get("task") {
        None => return Err(fault(place, "`task` is missing: a task id")),
        Some(Value::String(id)) => id.clone(),
        Some(v) => return Err(fault(&format!("{place}.task"), format!("expected a string, found {}", name_of(v)))),
    };
    let score = match map.get("score") {
        None => return Err(fault(place, "`score` is missing: a number in [0, 1], or null for unscored")),
        Some(Value::Null) => None,
        Some(v) => match v.as_f64() {
            Some(s) if (0.0..=1.0).contains(&s) => Some(s),
            _ => return Err(fault(&format!("{place}.score"), format!("{v} is no number in [0, 1] and not null"))),
        },
    };
    let calls_place = format!("{place}.calls");
    let calls = match map.get("calls") {
        None => Vec::new(),
        Some(Value::Array(names)) => names
            .iter()
            .enumerate()
            .map(|(i, n)| match n {
                Value::String(name) => Ok(name.clone()),
                v => Err(fault(&format!("{calls_place}[{i}]"), format!("expected a tool name, found {}", name_of(v)))),
            })
            .collect::<Result<_, _>>()?,
        Some(v) => return Err(fault(&calls_place, format!("expected a list of tool names, found {}", name_of(v)))),
    };
    let key = RolloutKey { step: number("step", true)?, task, draw: number("draw", false)?, k: number("k", false)? };
    Ok((Attempt { key, score, calls }, map.contains_key("k")))
}
