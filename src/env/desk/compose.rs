//! Drawing clauses: families first, values second.

use super::grammar::{Action, Clause, Condition, REFS, SINKS, Source};
use super::solve::execute;
use super::tools::{App, tool};
use super::values::{Ty, Val};
use super::world::World;
use crate::world::Draw;

/// Kinds of clauses, for weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// One action, all values said.
    Plain,
    /// One action with one looked-up value.
    Lookup,
    /// One action with one value looked up through two references.
    Nested,
    /// One action with a value left out.
    Missing,
    /// One action with two looked-up values.
    Two,
    /// A conditional.
    If,
    /// Two actions.
    Both,
    /// A question.
    Ask,
    /// A question through two references.
    AskNested,
}

/// Kinds and their share of a training distribution.
pub const MIX: &[(Kind, f64)] = &[
    (Kind::Plain, 0.06),
    (Kind::Lookup, 0.30),
    (Kind::Nested, 0.14),
    (Kind::Missing, 0.14),
    (Kind::Two, 0.06),
    (Kind::If, 0.12),
    (Kind::Both, 0.08),
    (Kind::Ask, 0.05),
    (Kind::AskNested, 0.05),
];

/// A kind drawn from [`MIX`].
pub fn draw_kind(draw: &mut Draw) -> Kind {
    let weights: Vec<f64> = MIX.iter().map(|(_, w)| *w).collect();
    MIX[draw.weighted(&weights).unwrap_or(0)].0
}

/// References whose value has one of these types.
pub fn refs_of(types: &[Ty]) -> Vec<usize> {
    (0..REFS.len()).filter(|r| types.contains(&REFS[*r].out)).collect()
}

/// A chain of `depth` references ending in one of `types`; `None` when there is none.
pub fn draw_chain(types: &[Ty], depth: usize, draw: &mut Draw) -> Option<Source> {
    let mut refs = Vec::with_capacity(depth);
    let mut types = types.to_vec();
    for _ in 0..depth {
        let r = *draw.pick(&refs_of(&types))?;
        refs.push(r);
        types = vec![REFS[r].key];
    }
    let key = Val::draw(types[0], draw);
    Some(Source::Chain(refs, key))
}

/// An action of this sink with all values said.
pub fn plain_action(sink: usize, draw: &mut Draw) -> Action {
    let slots = SINKS[sink].slots.iter().map(|(_, types)| Source::Lit(Val::draw(types[0], draw))).collect();
    Action { sink, slots }
}

/// Whether a value of this slot may be left out.
pub fn askable(types: &[Ty]) -> bool {
    !matches!(types[0], Ty::Topic | Ty::Team)
}

fn draw_action(chains: usize, depth: usize, draw: &mut Draw) -> Option<Action> {
    let mut action = plain_action(draw.below(SINKS.len()), draw);
    let mut places: Vec<usize> = (0..action.slots.len()).collect();
    draw.shuffle(&mut places);
    for place in places.into_iter().take(chains) {
        action.slots[place] = draw_chain(action.def().slots[place].1, depth, draw)?;
    }
    let got = action.slots.iter().filter(|s| matches!(s, Source::Chain(..))).count();
    (got == chains).then_some(action)
}

/// A threshold: 30, 40, 50, 60 or 70.
pub fn draw_threshold(draw: &mut Draw) -> Val {
    // Number values start at 10.
    Val::at(Ty::Number, 20 + 10 * draw.below(5) as u64)
}

/// One clause of a kind, values included; `None` when the draw has no such composition.
pub fn draw_clause(kind: Kind, draw: &mut Draw) -> Option<Clause> {
    Some(match kind {
        Kind::Plain => Clause::Do(draw_action(0, 0, draw)?),
        Kind::Lookup => Clause::Do(draw_action(1, 1, draw)?),
        Kind::Nested => Clause::Do(draw_action(1, 2, draw)?),
        Kind::Two => Clause::Do(draw_action(2, 1, draw)?),
        Kind::Missing => {
            let mut action = plain_action(draw.below(SINKS.len()), draw);
            let places: Vec<usize> = (0..action.slots.len()).filter(|p| askable(action.def().slots[*p].1)).collect();
            let place = *draw.pick(&places)?;
            let Source::Lit(val) = action.slots[place] else { return None };
            action.slots[place] = Source::Missing(val);
            Clause::Do(action)
        }
        Kind::If => {
            let Source::Chain(refs, key) = draw_chain(&[Ty::Number], 1, draw)? else { return None };
            let condition = Condition { refs, key, over: draw.chance(0.5), threshold: draw_threshold(draw) };
            Clause::If(condition, draw_action(0, 0, draw)?, draw_action(0, 0, draw)?)
        }
        Kind::Both => {
            let chains = usize::from(draw.chance(0.5));
            Clause::Both(draw_action(chains, 1, draw)?, draw_action(0, 0, draw)?)
        }
        Kind::Ask | Kind::AskNested => {
            let depth = if kind == Kind::Ask { 1 } else { 2 };
            let Source::Chain(refs, key) = draw_chain(&Ty::ALL, depth, draw)? else { return None };
            Clause::Ask(refs, key)
        }
    })
}

/// The same composition with new values (`That` keeps its value).
pub fn revalue(clause: &Clause, draw: &mut Draw) -> Clause {
    fn action(a: &Action, draw: &mut Draw) -> Action {
        let slots = a
            .slots
            .iter()
            .map(|s| match s {
                Source::Lit(v) => Source::Lit(Val::draw(v.ty, draw)),
                Source::Chain(refs, key) => Source::Chain(refs.clone(), Val::draw(key.ty, draw)),
                Source::Missing(v) => Source::Missing(Val::draw(v.ty, draw)),
                Source::That(v) => Source::That(*v),
            })
            .collect();
        Action { sink: a.sink, slots }
    }
    match clause {
        Clause::Ask(refs, key) => Clause::Ask(refs.clone(), Val::draw(key.ty, draw)),
        Clause::Do(a) => Clause::Do(action(a, draw)),
        Clause::Both(a, b) => Clause::Both(action(a, draw), action(b, draw)),
        Clause::If(c, a, b) => {
            let condition = Condition {
                refs: c.refs.clone(),
                key: Val::draw(c.key.ty, draw),
                over: c.over,
                threshold: draw_threshold(draw),
            };
            Clause::If(condition, action(a, draw), action(b, draw))
        }
    }
}

/// Whether a clause with these values is a fair task in this world: it runs, its outcome depends on
/// what was looked up, and no looked-up or left-out value stands in the query.
pub fn is_fair(clause: &Clause, world: &World) -> bool {
    let mut after = world.clone();
    let trace = execute(clause, &mut after);
    if trace.failed || (trace.answer.is_none() && after.digest() == world.digest()) {
        return false;
    }
    let said = clause.said();
    for (i, val) in said.iter().enumerate() {
        if said[..i].contains(val) {
            return false;
        }
    }
    if trace.looked_up.iter().any(|val| said.contains(val)) || clause.missing().is_some_and(|(_, v)| said.contains(&v))
    {
        return false;
    }
    match clause {
        // The condition decides something: the other branch ends elsewhere, and the value is no edge case.
        Clause::If(condition, a, b) => {
            let mut then = world.clone();
            let mut otherwise = world.clone();
            execute(&Clause::Do(a.clone()), &mut then);
            execute(&Clause::Do(b.clone()), &mut otherwise);
            a.sink != b.sink
                && then.digest() != otherwise.digest()
                && trace.looked_up.first().is_some_and(|v| v.index() != condition.threshold.index())
        }
        // Neither action undoes or hides the other.
        Clause::Both(a, b) => {
            let mut one = world.clone();
            execute(&Clause::Do(a.clone()), &mut one);
            a.sink != b.sink && one.digest() != after.digest()
        }
        _ => true,
    }
}

/// The apps a clause touches, sorted.
pub fn apps(clause: &Clause) -> Vec<App> {
    let mut out: Vec<App> = clause.tools().iter().filter_map(|t| tool(t)).map(|t| t.app).collect();
    out.sort_unstable();
    out.dedup();
    out
}
