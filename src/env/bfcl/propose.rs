//! Plans for exploration: sequences of calls near a pattern of tool names, made by trying.
//!
//! A skeleton of tool names comes from the pattern (one name changed, added or appended) or from a routine
//! of a train solution. Each call starts from the arguments of one call in a train solution (values that belong
//! together), some of them replaced by what earlier results of this plan and the world show. It is executed;
//! what fails is drawn again. The whole plan is then run once more from the initial state and compared with itself, so
//! that a plan that is returned runs without error and can be scored.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::catalog::{Catalog, Param, leaves, squeezed};
use super::narrator::ground;
use super::number;
use crate::env::stdio::WorkerSession;
use crate::env::{EnvError, Session};
use crate::event::ToolCall;
use crate::event::json::canonical_json;
use crate::world::{Draw, draw};

/// Weights of plans of 1, 2, ... calls. A plan becomes a turn, and an official turn asks for 1.6 calls on
/// average; drafts get their length from several turns.
const LENGTHS: [f64; 4] = [0.5, 0.25, 0.15, 0.1];
/// Drawn arguments per tool before another tool is tried.
const TRIES: usize = 6;
/// Other tools tried at one place.
const OTHER_TOOLS: usize = 3;
/// Plans drawn for each one wanted.
const DRAWS_PER_PLAN: usize = 4;
/// Probability of an example out of the entry's own solution, where there is one.
const OWN_EXAMPLE: f64 = 0.5;
/// Probability that a value of the world replaces the example's.
const SHOWN_INSTEAD: f64 = 0.6;
/// Probability of leaving out an optional parameter without an example.
const LEFT_OUT: f64 = 0.6;
/// Probability that a tool chosen freely is one that train solutions use.
const USED_TOOL: f64 = 0.8;
/// Values of earlier results considered for one parameter.
const SHOWN_VALUES: usize = 4;
/// Parameters that take names of the current folder, by a part of their name.
const FILE_PARAMS: [&str; 5] = ["file", "folder", "source", "dir", "destination"];
/// Length from which a parameter's name says what it holds.
const SPEAKING_NAME: usize = 5;

/// At most `count` different plans; see the module documentation.
pub(super) fn propose(
    catalog: &Catalog,
    session: &mut WorkerSession,
    base: &str,
    pattern: &[String],
    tools: &[String],
    seed: u64,
    count: usize,
) -> Vec<Vec<ToolCall>> {
    let known: Vec<String> = catalog
        .tools_of(base)
        .map(|(name, _)| name.clone())
        .filter(|name| tools.is_empty() || tools.contains(name))
        .collect();
    let mut plans: Vec<Vec<ToolCall>> = Vec::new();
    if known.is_empty() {
        return plans;
    }
    let mut seen = BTreeSet::new();
    for i in 0..count.saturating_mul(DRAWS_PER_PLAN) {
        if plans.len() == count {
            break;
        }
        let mut attempt = || {
            let mut d = draw(seed, "bfcl propose", &[base, &pattern.join(">"), &i.to_string()]);
            let mut maker = Maker { catalog, session: &mut *session, base, known: &known, seen: Vec::new() };
            let skeleton = maker.skeleton(pattern, &mut d);
            maker.make(&skeleton, &mut d)
        };
        // A worker that failed for a reason of its own (killed, out of memory) must not change the result: the
        // same draw again, with a fresh one. What fails twice is the draw's fault.
        let Ok(Some(plan)) = attempt().or_else(|_| attempt()) else { continue };
        let key = plan.iter().map(|c| format!("{}{}", c.name, c.arguments)).collect::<Vec<_>>().join("\n");
        if seen.insert(key) {
            plans.push(plan);
        }
    }
    // Near the pattern first: by the share of calls whose tool it names, shorter plans first among equals.
    plans.sort_by_cached_key(|plan| {
        let strange = plan.iter().filter(|c| !pattern.contains(&c.name)).count();
        (strange * 60 / plan.len().max(1), plan.len())
    });
    plans
}

struct Maker<'a> {
    catalog: &'a Catalog,
    session: &'a mut WorkerSession,
    base: &'a str,
    known: &'a [String],
    /// Values in results so far, newest last.
    seen: Vec<(String, Value)>,
}

impl Maker<'_> {
    /// Tool names to try, as many as [`LENGTHS`] has weights at most.
    fn skeleton(&self, pattern: &[String], d: &mut Draw) -> Vec<String> {
        let mut names: Vec<String> = pattern.iter().filter(|p| self.known.contains(p)).cloned().collect();
        if names.is_empty() {
            let classes = self.catalog.classes_of(self.base).unwrap_or_default();
            let alike: Vec<&Vec<ToolCall>> = self
                .catalog
                .routines
                .iter()
                .filter(|(c, _)| c.iter().any(|c| classes.contains(c)))
                .map(|(_, calls)| calls)
                .collect();
            if let Some(calls) = d.pick(&alike) {
                let own: Vec<&ToolCall> = calls.iter().filter(|c| self.known.contains(&c.name)).collect();
                let start = d.below(own.len().max(1));
                names = own.iter().skip(start).take(LENGTHS.len()).map(|c| c.name.clone()).collect();
            }
        } else {
            let other = self.any_tool(d);
            let at = d.below(names.len());
            match d.below(3) {
                0 => names[at] = other,
                1 => names.insert(at, other),
                _ => names.push(other),
            }
        }
        let wanted = 1 + d.weighted(&LENGTHS).unwrap_or(0);
        while names.len() < wanted {
            names.push(self.any_tool(d));
        }
        // A long pattern is entered anywhere.
        let start = d.below(names.len() - wanted + 1);
        names.drain(..start);
        names.truncate(wanted);
        names
    }

    fn any_tool(&self, d: &mut Draw) -> String {
        let used: Vec<&String> = self.known.iter().filter(|t| self.catalog.calls.contains_key(*t)).collect();
        let tool = if d.chance(USED_TOOL) { d.pick(&used).copied() } else { None };
        tool.or_else(|| d.pick(self.known)).cloned().unwrap_or_default()
    }

    /// `Ok(None)` when the draw leads to no plan.
    fn make(&mut self, skeleton: &[String], d: &mut Draw) -> Result<Option<Vec<ToolCall>>, EnvError> {
        let task = ground(self.base, &[]);
        self.session.reset(&task, "propose", 0)?;
        let mut plan: Vec<ToolCall> = Vec::new();
        for name in skeleton {
            let mut candidates = vec![name.clone()];
            candidates.extend((0..OTHER_TOOLS).map(|_| self.any_tool(d)));
            'place: for name in candidates {
                for _ in 0..TRIES {
                    let Some(call) = self.draw_call(&name, d)?.filter(|call| !plan.contains(call)) else { continue };
                    if let Some(content) = self.run(&call)? {
                        self.seen.extend(leaves(&content));
                        plan.push(call);
                        break 'place;
                    }
                }
            }
        }
        if plan.is_empty() {
            return Ok(None);
        }
        // Failed tries may have moved hidden state (random ids): only what runs from the start counts.
        self.session.reset(&task, "propose", 0)?;
        let reply = self.session.step(&plan)?;
        if reply.results.iter().any(|r| r.is_error) {
            return Ok(None);
        }
        // The checker must be able to compare the end state with itself (a folder inside itself it cannot).
        let own = std::slice::from_ref(&plan);
        let judged = self.session.evaluate_detailed(Some(own))?;
        Ok((judged.get("passed") == Some(&Value::Bool(true))).then_some(plan))
    }

    /// The result; `Ok(None)` for an error result.
    fn run(&mut self, call: &ToolCall) -> Result<Option<String>, EnvError> {
        let result = self.session.step(std::slice::from_ref(call))?.results.pop();
        Ok(result.filter(|r| !r.is_error).map(|r| r.content))
    }

    /// A call with drawn values; `None` if a required parameter has no candidate or the values make no sense.
    fn draw_call(&mut self, name: &str, d: &mut Draw) -> Result<Option<ToolCall>, EnvError> {
        let Some(tool) = self.catalog.tool(self.base, name) else { return Ok(None) };
        // Names in the current folder are what most file calls need; looking changes nothing.
        let listing = if tool.class == "GorillaFileSystem" && !tool.params.is_empty() {
            let look = ToolCall { name: "ls".into(), arguments: r#"{"a":true}"#.into() };
            let shown = self.run(&look)?.unwrap_or_default();
            leaves(&shown).into_iter().map(|(_, v)| v).collect()
        } else {
            Vec::new()
        };
        // Values that belong together: one train solution's arguments as they are, the entry's own preferred.
        let examples = self.catalog.calls.get(name).map(Vec::as_slice).unwrap_or_default();
        let own: Vec<_> = examples.iter().filter(|(n, _)| Some(*n) == number(self.base)).collect();
        let example = if d.chance(OWN_EXAMPLE) { d.pick(&own).copied() } else { None }.or_else(|| d.pick(examples));
        let mut arguments = Map::new();
        for param in &tool.params {
            let shown = self.shown(param, &listing);
            let value = match example.and_then(|(_, arguments)| arguments.get(&param.name)) {
                Some(_) if d.chance(SHOWN_INSTEAD) && !shown.is_empty() => d.pick(&shown).copied().cloned(),
                Some(value) => Some(value.clone()),
                None if !param.required && (example.is_some() || d.chance(LEFT_OUT)) => continue,
                None if !shown.is_empty() => d.pick(&shown).copied().cloned(),
                None => self.invented(name, param, d),
            };
            match value {
                Some(value) => {
                    arguments.insert(param.name.clone(), value);
                }
                None if param.required => return Ok(None),
                None => {}
            }
        }
        // From a place to itself, a file compared with itself: nobody asks for that.
        let texts: Vec<&str> = arguments.values().filter_map(Value::as_str).collect();
        let repeated = texts.iter().enumerate().any(|(i, text)| texts[..i].contains(text));
        Ok((!repeated)
            .then(|| ToolCall { name: name.to_owned(), arguments: canonical_json(&Value::Object(arguments)) }))
    }

    /// What this plan has brought to light for a parameter: values under its name or under its end (`id` may
    /// fill `ticket_id`), newest first, and names in the current folder.
    fn shown<'v>(&'v self, param: &Param, listing: &'v [Value]) -> Vec<&'v Value> {
        let wanted = squeezed(&param.name);
        let named = self.seen.iter().rev().filter(|(key, _)| {
            let key = squeezed(key);
            key.len() >= 2 && wanted.ends_with(&key)
        });
        let mut shown: Vec<&Value> =
            named.map(|(_, value)| value).filter(|v| param.takes(v)).take(SHOWN_VALUES).collect();
        if FILE_PARAMS.iter().any(|part| wanted.contains(part)) {
            shown.extend(listing.iter().filter(|v| param.takes(v)));
        }
        shown
    }

    /// A value for a parameter that no example covers.
    fn invented(&self, tool: &str, param: &Param, d: &mut Draw) -> Option<Value> {
        let used = self.catalog.values.get(&(tool.to_owned(), param.name.clone()));
        if let Some(value) = used.and_then(|values| d.pick(values)) {
            return Some(value.clone());
        }
        match param.kind.as_str() {
            "boolean" => Some(d.chance(0.5).into()),
            "integer" => Some((1 + d.below(5)).into()),
            "number" => Some((1.0 + d.below(50) as f64).into()),
            // Words like `mode` mean something else in every tool.
            _ if param.name.len() < SPEAKING_NAME => None,
            _ => {
                let same_name = self.catalog.values.iter().filter(|((_, name), _)| *name == param.name);
                let found: Vec<&Value> = same_name.flat_map(|(_, v)| v).filter(|v| param.takes(v)).collect();
                d.pick(&found).map(|v| (*v).clone())
            }
        }
    }
}
