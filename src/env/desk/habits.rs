//! Bad habits for the pretrained policy, concentrated on few components.
//!
//! A *component* is a pair of parts that can meet in a clause: a reference and the app it feeds, two
//! nested references, a left-out type and an app, a condition's reference, two apps in one clause. About
//! a third of the components are weak: there the demonstrator lapses most of the time. Elsewhere it
//! rarely does. So weaknesses are rare under uniform exploration, and mending one component mends every
//! family that shares it.

use super::grammar::{Clause, REFS, Source};
use super::solve::{Lapse, Step, execute, execute_with};
use super::splits::Plan;
use super::tools::tool;
use super::values::Ty;
use super::world::{World, stable_hash};
use crate::env::Role;
use crate::event::{TaskSpec, ToolCall};
use crate::world::Draw;

/// Share of components that are weak, percent. Raised from 25 after a policy pretrained with that (and habits
/// at 0.8) solved 59 % of 100 test-normal tasks: the start should lie between 20 and 45 %.
const WEAK_PERCENT: u64 = 32;

/// Which components are weak. Chosen, before any policy was trained and with [`WEAK_PERCENT`] at its first
/// value, among 60 so that every lapse occurs and the weak share was alike in training and test-normal clauses.
const SALT: u64 = 37;

/// One message of a demonstration.
#[derive(Debug, Clone, PartialEq)]
pub struct Spoken {
    /// Who speaks. Assistant messages are what is trained.
    pub role: Role,
    /// The words; empty where there are calls.
    pub content: String,
    /// Tool calls of an assistant message.
    pub calls: Vec<ToolCall>,
}

/// The components of a clause, each with the lapse it is prone to.
pub fn components(clause: &Clause) -> Vec<(String, Lapse)> {
    let mut out = Vec::new();
    let mut chain = |refs: &[usize], into: &str| {
        let Some(outer) = refs.first().map(|r| &REFS[*r]) else { return };
        let name = format!("{}>{into}", outer.name);
        let by_id =
            outer.out == Ty::Number && (outer.read.is_some() || tool(outer.find).is_some_and(|t| t.fields().len() > 1));
        let lapse = if by_id && stable_hash(&name).is_multiple_of(2) { Lapse::IdAsValue } else { Lapse::Skip };
        out.push((name, lapse));
        for pair in refs.windows(2) {
            let inner = tool(REFS[pair[1]].find).map_or("", |t| t.app.noun());
            out.push((format!("{}<{inner}", REFS[pair[0]].name), Lapse::StopEarly));
        }
    };
    if let Clause::Ask(refs, _) = clause {
        chain(refs, "answer");
    }
    if let Clause::If(c, ..) = clause {
        chain(&c.refs, "condition");
    }
    for action in clause.actions() {
        let app = tool(action.def().tool).map_or("", |t| t.app.noun());
        for source in &action.slots {
            if let Source::Chain(refs, _) = source {
                chain(refs, app);
            }
        }
    }
    if let Clause::If(c, ..) = clause
        && let Some(r) = c.refs.first()
    {
        out.push((format!("if {} {}", REFS[*r].name, c.over), Lapse::WrongBranch));
    }
    for action in clause.actions() {
        let app = tool(action.def().tool).map_or("", |t| t.app.noun());
        if let Some((field, _)) = action.missing() {
            out.push((format!("?{field}@{app}"), Lapse::Guess));
        }
    }
    if let Clause::Both(a, b) = clause {
        let noun = |a: &super::grammar::Action| tool(a.def().tool).map_or("", |t| t.app.noun());
        out.push((format!("{}+{}", noun(a), noun(b)), Lapse::Forget));
    }
    out
}

/// How often the demonstrator lapses on a component: 0 to 0.1, or 0.6 to 0.95 on weak ones.
pub fn rate(component: &str) -> f64 {
    let h = stable_hash(&format!("desk habit {SALT} {component}"));
    let u = ((h >> 16) % 1000) as f64 / 1000.0;
    if h % 100 < WEAK_PERCENT { 0.6 + 0.35 * u } else { 0.1 * u }
}

/// How likely a clause is demonstrated without a lapse at this scale of habits.
pub fn clean_probability(clause: &Clause, habit_scale: f64) -> f64 {
    components(clause).iter().map(|(name, _)| 1.0 - (rate(name) * habit_scale).clamp(0.0, 1.0)).product()
}

/// The whole conversation of a plan as the demonstrator leads it: user, assistant and tool messages with
/// the results that its calls really have. `task` is the plan written down ([`Plan::task`]);
/// `habit_scale` 0 = faultless, 1 = rates as they are.
pub fn demonstration(plan: &Plan, task: &TaskSpec, draw: &mut Draw, habit_scale: f64) -> Vec<Spoken> {
    let say = |role: Role, content: &str| Spoken { role, content: content.to_owned(), calls: Vec::new() };
    let mut world = World::new(plan.base);
    let mut out = Vec::new();
    for (clause, turn) in plan.clauses.iter().zip(&task.turns) {
        out.push(say(Role::User, &turn.query));
        let lapse = components(clause)
            .into_iter()
            .filter(|(name, _)| draw.chance((rate(name) * habit_scale).clamp(0.0, 1.0)))
            .map(|(_, lapse)| lapse)
            .next();
        let trace = match lapse {
            Some(lapse) => execute_with(clause, &mut world, lapse, draw),
            None => execute(clause, &mut world),
        };
        for step in trace.steps {
            match step {
                Step::Call(call, result) => {
                    out.push(Spoken { role: Role::Assistant, content: String::new(), calls: vec![call] });
                    out.push(say(Role::Tool, &result.content));
                }
                Step::Ask(word, val) => {
                    out.push(say(Role::Assistant, &format!("which {word}?")));
                    out.push(say(Role::User, val.word()));
                }
                Step::Say(text) => out.push(say(Role::Assistant, &text)),
            }
        }
    }
    out
}

/// Whether a clause has a weak component.
pub fn is_weak(clause: &Clause) -> bool {
    components(clause).iter().any(|(name, _)| rate(name) > 0.5)
}
