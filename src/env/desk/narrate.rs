//! From executed calls to a user's turn: data flow decides what was looked up and what was said.

use super::compose::{draw_threshold, is_fair, plain_action};
use super::grammar::{Action, Clause, Condition, REFS, SINKS, Source};
use super::phrases::{intent, say};
use super::solve::execute;
use super::splits::{is_test_world, reserved};
use super::tools::{App, Tool, tool};
use super::values::{Ty, Val};
use super::world::{World, parse_arguments};
use crate::env::{Executed, Narrated};
use crate::event::{Missing, ToolCall};
use crate::world::draw;

/// Most calls that are taken for one intent.
const MAX_CALLS: usize = 12;

/// Something an earlier call returned.
struct Known {
    val: Val,
    refs: Vec<usize>,
    key: Val,
    calls: Vec<usize>,
}

/// An id an earlier call returned, and how its entity was named.
struct Entity {
    app: App,
    id: Val,
    find: &'static str,
    named: Source,
    calls: Vec<usize>,
}

#[derive(Default)]
struct Flow {
    known: Vec<Known>,
    entities: Vec<Entity>,
    actions: Vec<(Action, Vec<usize>)>,
}

impl Flow {
    /// Where a value comes from: the latest result that holds it, or the user. `own` are the calls that
    /// found the entity acted on: that a ticket's own owner equals a value is chance, not flow.
    fn source(&self, val: Val, own: &[usize]) -> (Source, Vec<usize>) {
        match self.known.iter().rev().find(|k| k.val == val && k.calls != own) {
            Some(k) => (Source::Chain(k.refs.clone(), k.key), k.calls.clone()),
            None => (Source::Lit(val), Vec::new()),
        }
    }

    fn learn(&mut self, find: &str, read: Option<&str>, named: &Source, fields: &[(String, Val)], calls: &[usize]) {
        let (inner, key) = match named {
            Source::Lit(key) => (Vec::new(), *key),
            Source::Chain(refs, key) => (refs.clone(), *key),
            Source::Missing(_) | Source::That(_) => return,
        };
        for (index, def) in REFS.iter().enumerate().filter(|(_, d)| d.find == find && d.read == read) {
            if let Some((_, val)) = fields.iter().find(|(name, _)| name == def.field) {
                let refs = std::iter::once(index).chain(inner.iter().copied()).collect();
                self.known.push(Known { val: *val, refs, key, calls: calls.to_vec() });
            }
        }
    }

    fn add(
        &mut self,
        at: usize,
        tool: &'static Tool,
        args: &[(&'static str, Val)],
        fields: &[(String, Val)],
    ) -> Option<()> {
        let arg = |name: &str| args.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        let entity = match arg("id") {
            Some(id) => {
                let e = self.entities.iter().rev().find(|e| e.app == tool.app && e.id == id)?;
                Some((e.find, e.named.clone(), e.calls.clone()))
            }
            None => None,
        };
        if tool.is_effect() {
            let sink = SINKS.iter().position(|s| s.tool == tool.name)?;
            let def = &SINKS[sink];
            let mut slots = Vec::with_capacity(def.slots.len());
            let mut calls = vec![at];
            for (i, (name, _)) in def.slots.iter().enumerate() {
                let (source, from) = match (&entity, i, def.find) {
                    (Some((find, named, from)), 0, Some(wanted)) if *find == wanted => (named.clone(), from.clone()),
                    _ => self.source(arg(name)?, entity.as_ref().map_or(&[][..], |(_, _, own)| own)),
                };
                slots.push(source);
                calls.extend(from);
            }
            self.actions.push((Action { sink, slots }, calls));
            return Some(());
        }
        if let Some((find, named, mut calls)) = entity {
            calls.push(at);
            self.learn(find, Some(tool.name), &named, fields, &calls);
            return Some(());
        }
        let (named, mut calls) = self.source(arg(tool.by)?, &[]);
        calls.push(at);
        if let Some((_, id)) = fields.iter().find(|(name, _)| name == "id") {
            self.entities.push(Entity {
                app: tool.app,
                id: *id,
                find: tool.name,
                named: named.clone(),
                calls: calls.clone(),
            });
        }
        self.learn(tool.name, None, &named, fields, &calls);
        Some(())
    }
}

fn result_fields(result: &str) -> Vec<(String, Val)> {
    let Ok(serde_json::Value::Object(map)) = serde_json::from_str::<serde_json::Value>(result) else {
        return Vec::new();
    };
    map.into_iter().filter_map(|(name, value)| Some((name, Val::parse(value.as_str()?)?))).collect()
}

fn sorted(mut calls: Vec<ToolCall>) -> Vec<(String, String)> {
    calls.sort_by(|a, b| (&a.name, &a.arguments).cmp(&(&b.name, &b.arguments)));
    calls.into_iter().map(|c| (c.name, c.arguments)).collect()
}

/// The clause that these calls carry out, if they are one intent.
pub fn abstracted(base: &str, calls: &[Executed], variant: u64) -> Option<Clause> {
    if calls.is_empty() || calls.len() > MAX_CALLS || calls.iter().any(|c| c.is_error) {
        return None;
    }
    let mut flow = Flow::default();
    for (at, executed) in calls.iter().enumerate() {
        let tool = tool(&executed.call.name)?;
        let args = parse_arguments(tool, &executed.call.arguments).ok()?;
        flow.add(at, tool, &args, &result_fields(&executed.result))?;
    }
    let unused = |used: &[usize]| (0..calls.len()).filter(|i| !used.contains(i)).collect::<Vec<_>>();
    let mut d = draw(variant, "desk narrate", &[base]);
    match flow.actions.as_slice() {
        [] => {
            let whole: Vec<&Known> = flow.known.iter().filter(|k| unused(&k.calls).is_empty()).collect();
            let chosen = d.pick(&whole)?;
            Some(Clause::Ask(chosen.refs.clone(), chosen.key))
        }
        [(action, used)] => {
            let left = unused(used);
            if left.is_empty() {
                return Some(Clause::Do(leave_out(action, &mut d)));
            }
            // Lookups that feed nothing: the action may depend on what they found.
            let seen: Vec<&Known> = flow
                .known
                .iter()
                .filter(|k| k.val.ty == Ty::Number && left.iter().all(|i| k.calls.contains(i)))
                .filter(|k| k.calls.iter().all(|i| left.contains(i)))
                .collect();
            let reason = d.pick(&seen)?;
            conditional(reason, action, base, &mut d)
        }
        [(first, used), (second, also)] => {
            let used: Vec<usize> = used.iter().chain(also).copied().collect();
            unused(&used).is_empty().then(|| Clause::Both(first.clone(), second.clone()))
        }
        _ => None,
    }
}

/// Leaves a value out of a plain action, in half of the variants.
fn leave_out(action: &Action, d: &mut crate::world::Draw) -> Action {
    let mut action = action.clone();
    let plain = action.slots.iter().all(|s| matches!(s, Source::Lit(_)));
    if plain && d.chance(0.5) {
        let types = action.def().slots;
        let places: Vec<usize> = (0..types.len()).filter(|p| super::compose::askable(types[*p].1)).collect();
        if let Some(place) = d.pick(&places)
            && let Source::Lit(val) = action.slots[*place]
            && val.ty == types[*place].1[0]
        {
            action.slots[*place] = Source::Missing(val);
        }
    }
    action
}

fn conditional(reason: &Known, action: &Action, base: &str, d: &mut crate::world::Draw) -> Option<Clause> {
    let seed = base.parse().ok()?;
    (0..40).find_map(|_| {
        let condition =
            Condition { refs: reason.refs.clone(), key: reason.key, over: d.chance(0.5), threshold: draw_threshold(d) };
        let other = plain_action(d.below(SINKS.len()), d);
        let clause = if condition.holds(reason.val) {
            Clause::If(condition, action.clone(), other)
        } else {
            Clause::If(condition, other, action.clone())
        };
        (!reserved(&clause.family()) && is_fair(&clause, &World::new(seed))).then_some(clause)
    })
}

/// See [`crate::env::Narrator::narrate`]. Refuses test worlds and reserved families.
pub fn narrate(base: &str, calls: &[Executed], variant: u64) -> Option<Narrated> {
    let seed: u64 = base.parse().ok()?;
    if is_test_world(seed) {
        return None;
    }
    let clause = abstracted(base, calls, variant)?;
    let family = clause.family();
    let mut world = World::new(seed);
    if reserved(&family) || !is_fair(&clause, &world) {
        return None;
    }
    let trace = execute(&clause, &mut world);
    // The clause must stand for exactly these calls.
    if sorted(trace.calls()) != sorted(calls.iter().map(|e| e.call.clone()).collect()) {
        return None;
    }
    Some(Narrated {
        query: say(&clause, variant),
        intent: intent(&clause),
        answer: trace.answer.map(|v| v.word().to_owned()),
        missing: clause.missing().map(|(field, val)| Missing { field: field.to_owned(), reply: val.word().to_owned() }),
        family,
        solution: trace.calls(),
    })
}

/// See [`crate::env::Narrator::understand`].
pub fn understand(base: &str, query: &str, missing: Option<&Missing>) -> Option<(Vec<ToolCall>, Option<String>)> {
    let seed: u64 = base.parse().ok()?;
    let left_out = match missing {
        Some(m) => Some(Val::parse(&m.reply)?),
        None => None,
    };
    let clause = super::parse::read(query, left_out)?;
    // The query must leave out just that field.
    if clause.missing().map(|(field, _)| field) != missing.map(|m| m.field.as_str()) {
        return None;
    }
    let trace = execute(&clause, &mut World::new(seed));
    (!trace.failed).then(|| (trace.calls(), trace.answer.map(|v| v.word().to_owned())))
}
