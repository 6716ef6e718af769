//! Plans to try: the explorer's hands.
//!
//! Without a pattern, plans are drawn from the training families. With a pattern (the tools of a
//! trajectory) they stay close: the same parts with new values first, then one part changed.

use super::compose::{draw_chain, draw_threshold, is_fair, plain_action};
use super::grammar::{Clause, Condition, REFS, SINKS, Source, app_of};
use super::solve::execute;
use super::splits::{is_test_world, reserved, training_clause};
use super::values::{Ty, Val};
use super::world::World;
use crate::event::ToolCall;
use crate::world::{Draw, draw};

/// Most plans in one answer.
const MAX_PLANS: usize = 1024;

/// What a pattern is made of.
struct Near {
    sinks: Vec<usize>,
    refs: Vec<usize>,
}

impl Near {
    fn new(pattern: &[String], tools: &[String]) -> Near {
        let has = |name: &str| pattern.iter().any(|p| p == name);
        let mut sinks: Vec<usize> = (0..SINKS.len()).filter(|s| has(SINKS[*s].tool)).collect();
        if sinks.is_empty() {
            // The pattern was cut before its action: any visible action on what it found.
            let visible = |name: &str| tools.is_empty() || tools.iter().any(|t| t == name);
            sinks = (0..SINKS.len()).filter(|s| visible(SINKS[*s].tool) && SINKS[*s].find.is_some_and(has)).collect();
        }
        let refs = (0..REFS.len()).filter(|r| has(REFS[*r].find) && REFS[*r].read.is_none_or(has)).collect();
        Near { sinks, refs }
    }

    /// A chain of one reference of the pattern that fits `types`, nested below if asked.
    fn chain(&self, types: &[Ty], nested: bool, d: &mut Draw) -> Option<Source> {
        let fit: Vec<usize> = self.refs.iter().copied().filter(|r| types.contains(&REFS[*r].out)).collect();
        let r = *d.pick(&fit)?;
        if !nested {
            return Some(Source::Chain(vec![r], Val::draw(REFS[r].key, d)));
        }
        let Source::Chain(mut refs, key) = draw_chain(&[REFS[r].key], 1, d)? else { return None };
        refs.insert(0, r);
        Some(Source::Chain(refs, key))
    }

    /// A sink in the app of one of the pattern's sinks.
    fn sibling(&self, d: &mut Draw) -> Option<usize> {
        let app = |s: usize| app_of(SINKS[s].tool);
        let one = *d.pick(&self.sinks)?;
        let near: Vec<usize> = (0..SINKS.len()).filter(|s| *s != one && app(*s) == app(one)).collect();
        d.pick(&near).copied()
    }

    fn clause(&self, distance: usize, d: &mut Draw) -> Option<Clause> {
        if self.sinks.is_empty() || d.chance(0.1) {
            let nested = distance > 0 && d.chance(0.5);
            let Source::Chain(refs, key) = self.chain(&Ty::ALL, nested, d)? else { return None };
            return Some(Clause::Ask(refs, key));
        }
        // Which part to change: 0 none, 1 reference, 2 sink, 3 nest, 4 condition, 5 second action,
        // 6 sink within the app: the same reference into the same app is where a weakness would recur.
        let change = if distance == 0 { 0 } else { 1 + d.below(6) };
        let sink = match change {
            2 => d.below(SINKS.len()),
            6 => self.sibling(d)?,
            _ => *d.pick(&self.sinks)?,
        };
        let mut action = plain_action(sink, d);
        let types: Vec<&'static [Ty]> = action.def().slots.iter().map(|(_, t)| *t).collect();
        let mut places: Vec<usize> = (0..types.len()).collect();
        d.shuffle(&mut places);
        let found = places.iter().find_map(|p| {
            let source = if change == 1 { draw_chain(types[*p], 1, d) } else { self.chain(types[*p], change == 3, d) };
            source.map(|s| (*p, s))
        });
        if change == 4 {
            let Source::Chain(refs, key) =
                self.chain(&[Ty::Number], false, d).or_else(|| draw_chain(&[Ty::Number], 1, d))?
            else {
                return None;
            };
            let condition = Condition { refs, key, over: d.chance(0.5), threshold: draw_threshold(d) };
            return Some(Clause::If(condition, action, plain_action(d.below(SINKS.len()), d)));
        }
        if let Some((place, source)) = found {
            action.slots[place] = source;
        }
        if change == 5 {
            let other = if self.sinks.len() > 1 { *d.pick(&self.sinks)? } else { d.below(SINKS.len()) };
            return Some(Clause::Both(action, plain_action(other, d)));
        }
        Some(Clause::Do(action))
    }
}

/// See [`crate::env::Narrator::propose`]. Never proposes in a test world or from a reserved family.
pub fn propose(base: &str, pattern: &[String], tools: &[String], seed: u64, count: usize) -> Vec<Vec<ToolCall>> {
    let Ok(base_seed) = base.parse::<u64>() else { return Vec::new() };
    if is_test_world(base_seed) {
        return Vec::new();
    }
    let count = count.min(MAX_PLANS);
    let world = World::new(base_seed);
    let mut d = draw(seed, "desk propose", &[base, &pattern.join(" ")]);
    let near = Near::new(pattern, tools);
    let guided = !near.sinks.is_empty() || !near.refs.is_empty();
    let mut out: Vec<Vec<ToolCall>> = Vec::with_capacity(count);
    for _ in 0..count * 60 {
        if out.len() >= count {
            break;
        }
        // A third keeps all parts, the rest changes one.
        let clause = if guided { near.clause(out.len() % 3, &mut d) } else { training_clause(&mut d) };
        let Some(clause) = clause.filter(|c| !reserved(&c.family()) && is_fair(c, &world)) else { continue };
        let needed = clause.tools();
        if !tools.is_empty() && needed.iter().any(|t| !tools.iter().any(|s| s == t)) {
            continue;
        }
        let plan = execute(&clause, &mut world.clone()).calls();
        if !out.contains(&plan) {
            out.push(plan);
        }
    }
    out
}
