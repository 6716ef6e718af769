//! Procedural queries for BFCL: one sentence per call, in the words of the tool's own description.
//!
//! `Create a new directory in the current directory, with dir name set to "temp". Then move a file or
//! directory from one location to another, with destination set to "temp" and source set to "a.txt".`
//!
//! A value that an earlier result gave and no earlier words did is not spelled out: the sentence says which
//! field of which step it is (`booking id set to the "booking_id" of step 1`), so that the agent has to read
//! that result. [`Narrator::understand`] parses the words with its own grammar and executes the calls in a
//! fresh world to resolve such references; it shares nothing with the writer but the tool descriptions.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};

use super::catalog::{Catalog, Tool, leaves, squeezed, words};
use super::propose::propose;
use crate::env::stdio::{PLAYGROUND, Pool};
use crate::env::{Executed, Narrated, Narrator, Session};
use crate::event::json::canonical_json;
use crate::event::{Missing, TaskSpec, ToolCall};
use crate::world::draw;

/// Calls in one turn at most.
const MAX_CALLS: usize = 10;
/// Length of a query at most, bytes: longer ones are no query a user would write.
const MAX_QUERY_BYTES: usize = 2_000;

/// How a sentence introduces its arguments, says `is`, and closes: (open, is, between, close).
const STYLES: [(&str, &str, &str, &str); 3] =
    [(", with ", " set to ", " and ", ""), (": ", " = ", ", ", ""), (" (", ": ", "; ", ")")];
const FIRST: [&str; 3] = ["", "Please ", "I need you to "];
const NEXT: [&str; 3] = ["Then ", "After that, ", "Next, "];
const LAST: [&str; 2] = ["Finally, ", "Then "];

/// See the module documentation.
#[derive(Debug)]
pub struct BfclNarrator {
    catalog: Catalog,
    pool: Arc<Pool>,
    /// The last proposals: explorers ask for the same ones before every step.
    proposed: Mutex<VecDeque<(Asked, Vec<Vec<ToolCall>>)>>,
}

/// The arguments of [`Narrator::propose`].
type Asked = (String, Vec<String>, Vec<String>, u64, usize);

/// Proposals kept.
const KEPT: usize = 64;

impl BfclNarrator {
    pub(super) fn new(catalog: Catalog, pool: Arc<Pool>) -> BfclNarrator {
        BfclNarrator { catalog, pool, proposed: Mutex::default() }
    }
}

/// The bare initial state of an official entry.
pub(super) fn ground(base: &str, tools: &[String]) -> TaskSpec {
    TaskSpec {
        id: format!("{PLAYGROUND}-{base}"),
        env: "bfcl".into(),
        split: PLAYGROUND.into(),
        family: String::new(),
        base: base.into(),
        tools: tools.to_vec(),
        turns: Vec::new(),
    }
}

impl Narrator for BfclNarrator {
    /// `None` for errors, unknown tools or parameters, missing required arguments, too many calls, and for
    /// entries outside the train numbers.
    fn narrate(&self, base: &str, calls: &[Executed], variant: u64) -> Option<Narrated> {
        if !self.catalog.is_train(base) || calls.is_empty() || calls.len() > MAX_CALLS {
            return None;
        }
        let mut d = draw(variant, "bfcl narrate", &[base]);
        let style = STYLES[d.below(STYLES.len())];
        let mut query = String::new();
        let mut phrases = Vec::new();
        for (i, executed) in calls.iter().enumerate() {
            if executed.is_error {
                return None;
            }
            let tool = self.catalog.tool(base, &executed.call.name)?;
            let arguments: Map<String, Value> = serde_json::from_str(&executed.call.arguments).ok()?;
            if !fits(tool, &arguments) {
                return None;
            }
            let openings: &[&str] = match i {
                0 => &FIRST,
                _ if i + 1 == calls.len() => &LAST,
                _ => &NEXT,
            };
            let opening = openings[d.below(openings.len())];
            let mut sentence = format!("{opening}{}", tool.phrase);
            for (j, (param, value)) in arguments.iter().enumerate() {
                let said = match reference(&calls[..i], value, &query) {
                    Some((step, key)) => format!("the {} of step {}", Value::from(key), step + 1),
                    None => value.to_string(),
                };
                let (open, is, between, _) = style;
                sentence += &format!("{}{}{is}{said}", if j == 0 { open } else { between }, words(param));
            }
            if !arguments.is_empty() {
                sentence += style.3;
            }
            sentence.push('.');
            if !query.is_empty() {
                query.push(' ');
            }
            query += &capitalised(&sentence);
            phrases.push(tool.phrase.clone());
        }
        if query.len() > MAX_QUERY_BYTES {
            return None;
        }
        phrases.dedup();
        Some(Narrated {
            query,
            intent: format!("The user wants to {}.", phrases.join(", then ")),
            answer: None,
            missing: None,
            family: calls.iter().map(|c| c.call.name.as_str()).collect::<Vec<_>>().join(">"),
            solution: calls.iter().map(|c| c.call.clone()).collect(),
        })
    }

    /// Executes in a fresh world where the words refer to results. `None` when a sentence is not understood
    /// in full or a reference leads nowhere.
    fn understand(
        &self,
        base: &str,
        query: &str,
        missing: Option<&Missing>,
    ) -> Option<(Vec<ToolCall>, Option<String>)> {
        if missing.is_some() {
            return None; // never left out by this narrator
        }
        let parsed = parse(&self.catalog, base, query)?;
        let refers = parsed.iter().any(|c| c.arguments.iter().any(|(_, v)| matches!(v, Said::Of { .. })));
        let mut session = None;
        if refers {
            let mut fresh = self.pool.session();
            fresh.reset(&ground(base, &[]), "understand", 0).ok()?;
            session = Some(fresh);
        }
        let mut results: Vec<String> = Vec::new();
        let mut calls = Vec::new();
        for spoken in parsed {
            let mut arguments = Map::new();
            for (param, said) in spoken.arguments {
                let value = match said {
                    Said::Value(value) => value,
                    Said::Of { key, step } => {
                        let result = results.get(step.checked_sub(1)?)?;
                        leaves(result).into_iter().find(|(k, _)| *k == key)?.1
                    }
                };
                arguments.insert(param, value);
            }
            let call = ToolCall { name: spoken.tool, arguments: canonical_json(&Value::Object(arguments)) };
            if let Some(session) = session.as_mut() {
                results.push(session.step(std::slice::from_ref(&call)).ok()?.results.pop()?.content);
            }
            calls.push(call);
        }
        Some((calls, None))
    }

    /// Plans of 1 to 4 calls that run without error from the entry's initial state: each call is tried in a
    /// worker while the plan is made. Empty for entries outside the train numbers or when no worker answers.
    fn propose(&self, base: &str, pattern: &[String], tools: &[String], seed: u64, count: usize) -> Vec<Vec<ToolCall>> {
        if !self.catalog.is_train(base) {
            return Vec::new();
        }
        let asked: Asked = (base.to_owned(), pattern.to_vec(), tools.to_vec(), seed, count);
        let kept = || self.proposed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plans)) = kept().iter().find(|(known, _)| *known == asked) {
            return plans.clone();
        }
        let plans = propose(&self.catalog, &mut self.pool.session(), base, pattern, tools, seed, count);
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((asked, plans.clone()));
        plans
    }
}

/// All parameters known, all required ones there.
fn fits(tool: &Tool, arguments: &Map<String, Value>) -> bool {
    arguments.keys().all(|k| tool.params.iter().any(|p| p.name == *k))
        && tool.params.iter().all(|p| !p.required || arguments.contains_key(&p.name))
}

/// The earliest step and key whose result gives `value`, unless the words so far give it already. Only what
/// a user cannot be expected to know: identifiers and figures of some length.
fn reference(before: &[Executed], value: &Value, said: &str) -> Option<(usize, String)> {
    let spelled = value.to_string();
    let long = value.as_str().map_or(spelled.len(), str::len) >= 4;
    if !long || !(value.is_string() || value.is_number()) || said.contains(&spelled) {
        return None;
    }
    before.iter().enumerate().find_map(|(i, executed)| {
        // It must be the *first* value under its key: that is what the words will mean.
        let found = leaves(&executed.result);
        let (key, _) = found.iter().find(|(_, v)| v == value)?;
        let first = found.iter().find(|(k, _)| k == key)?;
        (first.1 == *value && !key.is_empty()).then(|| (i, key.clone()))
    })
}

fn capitalised(sentence: &str) -> String {
    let mut chars = sentence.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

/// An argument as said.
#[derive(Debug, PartialEq)]
enum Said {
    Value(Value),
    /// The first value under `key` in the result of call number `step`, from 1.
    Of {
        key: String,
        step: usize,
    },
}

/// A call as said.
#[derive(Debug, PartialEq)]
struct Spoken {
    tool: String,
    arguments: Vec<(String, Said)>,
}

/// Reads a whole query; `None` if any part of it is not understood.
fn parse(catalog: &Catalog, base: &str, query: &str) -> Option<Vec<Spoken>> {
    let mut rest = query.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        if calls.len() == MAX_CALLS {
            return None;
        }
        let (call, after) = parse_sentence(catalog, base, rest)?;
        calls.push(call);
        rest = after.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

fn parse_sentence<'a>(catalog: &Catalog, base: &str, text: &'a str) -> Option<(Spoken, &'a str)> {
    const POLITE: [&str; 7] = ["please ", "i need you to ", "then ", "after that, ", "next, ", "finally, ", "and "];
    let mut text = text;
    while let Some(after) = POLITE.iter().find_map(|p| strip_prefix_ci(text, p)) {
        text = after;
    }
    // The longest phrase that is followed by a boundary: one phrase may begin another.
    let (name, tool, mut rest) = catalog
        .tools_of(base)
        .filter_map(|(name, tool)| {
            let rest = strip_prefix_ci(text, &tool.phrase)?;
            rest.starts_with(['.', ',', ':', ' ']).then_some((name, tool, rest))
        })
        .max_by_key(|(_, tool, _)| tool.phrase.len())?;
    let mut arguments = Vec::new();
    for open in [", with ", ": ", " ("] {
        if let Some(mut list) = rest.strip_prefix(open) {
            loop {
                let ((param, said), after) = parse_argument(tool, list)?;
                if arguments.iter().any(|(p, _)| *p == param) {
                    return None;
                }
                arguments.push((param, said));
                match [" and ", ", ", "; "].iter().find_map(|b| after.strip_prefix(*b)) {
                    Some(more) => list = more,
                    None => {
                        rest = after.strip_prefix(')').unwrap_or(after);
                        break;
                    }
                }
            }
            break;
        }
    }
    let complete = tool.params.iter().all(|p| !p.required || arguments.iter().any(|(n, _)| *n == p.name));
    let rest = rest.strip_prefix('.').filter(|r| r.is_empty() || r.starts_with(' '))?;
    complete.then(|| (Spoken { tool: name.clone(), arguments }, rest))
}

fn parse_argument<'a>(tool: &Tool, text: &'a str) -> Option<((String, Said), &'a str)> {
    let (at, is) = [" set to ", " = ", ": "].iter().filter_map(|is| Some((text.find(is)?, *is))).min()?;
    let spoken = squeezed(&text[..at]);
    let param = tool.params.iter().find(|p| squeezed(&p.name) == spoken)?.name.clone();
    let text = &text[at + is.len()..];
    if let Some(after) = text.strip_prefix("the ") {
        let (key, after) = json_prefix(after)?;
        let after = after.strip_prefix(" of step ")?;
        let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let step = after[..digits].parse().ok()?;
        return Some(((param, Said::Of { key: key.as_str()?.to_owned(), step }), &after[digits..]));
    }
    let (value, after) = json_prefix(text)?;
    Some(((param, Said::Value(value)), after))
}

/// The JSON value that `text` begins with, and what follows.
fn json_prefix(text: &str) -> Option<(Value, &str)> {
    // A number is cut by hand: `3.` would be read as a broken fraction where the sentence ends.
    if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "+-.".contains(c))).unwrap_or(text.len());
        let number = text[..end].trim_end_matches('.');
        return Some((serde_json::from_str(number).ok()?, &text[number.len()..]));
    }
    // Words end at the first character that is no letter, which a JSON reader may refuse to stop at.
    for (word, value) in [("true", Value::Bool(true)), ("false", Value::Bool(false)), ("null", Value::Null)] {
        if let Some(after) = text.strip_prefix(word) {
            return Some((value, after));
        }
    }
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = stream.next()?.ok()?;
    Some((value, &text[stream.byte_offset()..]))
}

fn strip_prefix_ci<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let head = text.get(..prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then(|| &text[prefix.len()..])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn catalog() -> Catalog {
        let tool = |name: &str, description: &str, properties: Value, required: Value| {
            json!({"name": name, "description": description,
                "parameters": {"type": "object", "properties": properties, "required": required}})
        };
        let description = json!({"classes": [{"name": "Files", "tools": [
            tool("mkdir", "Create a new directory.", json!({"dir_name": {"type": "string"}}), json!(["dir_name"])),
            tool("mkdir2", "Create a new directory twice.", json!({"dir_name": {"type": "string"}}), json!(["dir_name"])),
            tool("pwd", "Returns the path.", json!({}), json!([])),
            tool("tail", "Show the end.", json!({"file_name": {"type": "string"}, "lines": {"type": "integer"}}),
                json!(["file_name"])),
            tool("mean", "Average them.", json!({"numbers": {"type": "array"}, "x1": {"type": "number"}}), json!([])),
        ]}, {"name": "Other", "tools": [tool("far", "Go far away.", json!({}), json!([]))]}]});
        let task = TaskSpec {
            id: "multi_turn_base_3".into(),
            env: "bfcl".into(),
            split: "base".into(),
            family: "Files".into(),
            base: "multi_turn_base_3".into(),
            tools: vec![],
            turns: vec![],
        };
        Catalog::new(&description, &[task], &BTreeSet::from([3]))
    }

    fn narrator() -> BfclNarrator {
        let launch = crate::env::stdio::Launch {
            env: "none".into(),
            program: "/no/such/program".into(),
            args: vec![],
            vars: vec![],
            reply_bytes: 1,
        };
        BfclNarrator::new(catalog(), Pool::new(launch, Default::default()))
    }

    fn executed(name: &str, arguments: Value, result: Value) -> Executed {
        let call = ToolCall { name: name.into(), arguments: canonical_json(&arguments) };
        Executed { call, result: result.to_string(), is_error: false }
    }

    const BASE: &str = "multi_turn_base_3";

    #[test]
    fn a_query_written_by_hand_is_understood() {
        let query = "please create a new directory, with dir name set to \"a. Then\". Next, return the path. \
                     I need you to show the end (lines: 5; file name: \"b\"). Average them: x 1 = 2.5, numbers = [1, 2].";
        let (calls, answer) = narrator().understand(BASE, query, None).expect("understood");
        let expected = [
            ("mkdir", r#"{"dir_name":"a. Then"}"#),
            ("pwd", "{}"),
            ("tail", r#"{"file_name":"b","lines":5}"#),
            ("mean", r#"{"numbers":[1,2],"x1":2.5}"#),
        ];
        assert_eq!(calls, expected.map(|(n, a)| ToolCall { name: n.into(), arguments: a.into() }));
        assert_eq!(answer, None);
    }

    #[test]
    fn what_is_not_said_is_not_guessed() {
        let n = narrator();
        for query in [
            "",
            "Create a new directory.",                            // required value missing
            "Create a new directory, with dir name set to temp.", // no JSON
            "Create a new directory, with folder set to \"x\".",  // unknown parameter
            "Create a new directory, with dir name set to \"x\" and more.", // trailing words
            "Return the path. And do something nice.",            // a sentence of its own
            "Go far away.",                                       // another API
            "Return the path",                                    // unfinished
            "Show the end: file name = \"a\", file name = \"b\".", // said twice
        ] {
            assert_eq!(n.understand(BASE, query, None), None, "{query}");
        }
        // A phrase that begins another one.
        let (calls, _) =
            n.understand(BASE, "Create a new directory twice: dir name = \"x\".", None).expect("understood");
        assert_eq!(calls[0].name, "mkdir2");
    }

    #[test]
    fn values_from_results_are_referred_to() {
        let calls = [
            executed("pwd", json!({}), json!({"path": "/tmp/secret", "count": 3})),
            executed("mkdir", json!({"dir_name": "/tmp/secret"}), json!(null)),
            executed("mkdir", json!({"dir_name": "/tmp/secret"}), json!(null)),
        ];
        let told = narrator().narrate(BASE, &calls, 0).expect("narrated");
        assert!(!told.query.contains("/tmp/secret"), "{}", told.query);
        assert_eq!(told.query.matches("the \"path\" of step 1").count(), 2, "{}", told.query);
        assert_eq!(told.family, "pwd>mkdir>mkdir");
        // Without a worker the words cannot be resolved: not understood, and no panic.
        assert_eq!(narrator().understand(BASE, &told.query, None), None);
    }

    #[test]
    fn errors_strangers_and_test_entries_are_not_narrated() {
        let good = executed("mkdir", json!({"dir_name": "x"}), json!(null));
        let n = narrator();
        assert!(n.narrate(BASE, std::slice::from_ref(&good), 0).is_some());
        assert!(n.narrate("multi_turn_base_4", std::slice::from_ref(&good), 0).is_none(), "not a train entry");
        assert!(n.narrate(BASE, &[], 0).is_none());
        assert!(n.narrate(BASE, &[Executed { is_error: true, ..good.clone() }], 0).is_none());
        assert!(n.narrate(BASE, &[executed("far", json!({}), json!(null))], 0).is_none(), "not this entry's API");
        assert!(n.narrate(BASE, &[executed("mkdir", json!({}), json!(null))], 0).is_none());
        assert!(n.narrate(BASE, &[executed("pwd", json!({"x": 1}), json!(null))], 0).is_none());
    }

    fn call() -> impl Strategy<Value = Executed> {
        let text = prop_oneof![".{0,20}", Just("\" and lines set to 3. Then ".to_owned()), Just("x.".to_owned())];
        let number = prop_oneof![any::<i64>().prop_map(Value::from), (-1e9f64..1e9).prop_map(Value::from)];
        prop_oneof![
            text.clone().prop_map(|t| executed("mkdir", json!({"dir_name": t}), json!({}))),
            Just(executed("pwd", json!({}), json!({}))),
            (text, proptest::option::of(any::<i64>())).prop_map(|(t, n)| {
                let mut arguments = json!({"file_name": t});
                if let Some(n) = n {
                    arguments["lines"] = n.into();
                }
                executed("tail", arguments, json!({}))
            }),
            (prop::collection::vec(number.clone(), 0..4), number).prop_map(|(list, x)| executed(
                "mean",
                json!({"numbers": list, "x1": x}),
                json!({})
            )),
        ]
    }

    proptest! {
        #[test]
        fn what_is_narrated_is_understood(calls in prop::collection::vec(call(), 1..6), variant in any::<u64>()) {
            let n = narrator();
            let told = n.narrate(BASE, &calls, variant).expect("narrated");
            let (back, _) = n.understand(BASE, &told.query, None).expect("understood");
            prop_assert_eq!(back, told.solution);
        }

        #[test]
        fn any_text_is_survived(query in ".{0,80}", tail in "(, with| \\(|: )?.{0,30}") {
            let n = narrator();
            n.understand(BASE, &query, None);
            n.understand(BASE, &format!("Create a new directory{tail}"), None);
        }
    }
}
