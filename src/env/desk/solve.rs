//! Executing a clause in a world, as it should be done or with one lapse.

use super::grammar::{Action, Clause, Condition, REFS, Source, ask_word};
use super::tools::tool;
use super::values::{Ty, Val};
use super::world::{Outcome, World, make_call};
use crate::env::{Executed, ToolResult};
use crate::event::ToolCall;
use crate::world::Draw;

/// A way of doing it wrong; see `habits`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lapse {
    /// Takes some value instead of looking it up.
    Skip,
    /// Uses an entity's id where a value of the entity is wanted.
    IdAsValue,
    /// Looks up the inner reference only.
    StopEarly,
    /// Takes some value instead of asking for the missing one.
    Guess,
    /// Leaves out the second action.
    Forget,
    /// Acts without looking at the condition's value, on the other branch.
    WrongBranch,
}

/// One thing an agent does.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// A call and what it returned.
    Call(ToolCall, ToolResult),
    /// Asks for a field; the user answers with the value.
    Ask(&'static str, Val),
    /// Ends the turn with these words.
    Say(String),
}

/// A clause as it was executed.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// What was done, in order; ends with [`Step::Say`].
    pub steps: Vec<Step>,
    /// The answer, for questions.
    pub answer: Option<Val>,
    /// Values that were looked up, in order (the ends of chains).
    pub looked_up: Vec<Val>,
    /// Whether some call failed or a value could not be had.
    pub failed: bool,
}

impl Trace {
    /// The calls alone.
    pub fn calls(&self) -> Vec<ToolCall> {
        self.executed().into_iter().map(|e| e.call).collect()
    }

    /// The calls with their results.
    pub fn executed(&self) -> Vec<Executed> {
        self.steps
            .iter()
            .filter_map(|step| match step {
                Step::Call(call, result) => {
                    Some(Executed { call: call.clone(), result: result.content.clone(), is_error: result.is_error })
                }
                _ => None,
            })
            .collect()
    }
}

struct Agent<'a> {
    world: &'a mut World,
    trace: Trace,
    lapse: Option<(Lapse, &'a mut Draw)>,
}

/// Does what the clause asks for in this world.
pub fn execute(clause: &Clause, world: &mut World) -> Trace {
    run(clause, world, None)
}

/// Does it with one lapse; the draw supplies guessed values.
pub fn execute_with(clause: &Clause, world: &mut World, lapse: Lapse, draw: &mut Draw) -> Trace {
    run(clause, world, Some((lapse, draw)))
}

fn run(clause: &Clause, world: &mut World, lapse: Option<(Lapse, &mut Draw)>) -> Trace {
    let trace = Trace { steps: Vec::new(), answer: None, looked_up: Vec::new(), failed: false };
    let mut agent = Agent { world, trace, lapse };
    match clause {
        Clause::Ask(refs, key) => agent.trace.answer = agent.chain(refs, *key),
        Clause::Do(action) => agent.act(action),
        Clause::Both(first, second) => {
            agent.act(first);
            if !agent.has(Lapse::Forget) {
                agent.act(second);
            }
        }
        Clause::If(condition, then, otherwise) => {
            if agent.holds(condition) {
                agent.act(then)
            } else {
                agent.act(otherwise)
            }
        }
    }
    let words = agent.trace.answer.map_or("done", Val::word);
    agent.trace.steps.push(Step::Say(words.to_owned()));
    agent.trace
}

impl Agent<'_> {
    fn has(&self, lapse: Lapse) -> bool {
        self.lapse.as_ref().is_some_and(|(l, _)| *l == lapse)
    }

    fn guess(&mut self, ty: Ty) -> Option<Val> {
        self.lapse.as_mut().map(|(_, draw)| Val::draw(ty, draw))
    }

    fn call(&mut self, tool: &'static str, args: &[(&'static str, Val)]) -> Vec<(&'static str, Val)> {
        let call = make_call(tool, args);
        let Outcome { result, fields } = self.world.call(&call);
        self.trace.failed |= result.is_error;
        self.trace.steps.push(Step::Call(call, result));
        fields
    }

    /// Looks a chain up, innermost first; `None` when a lookup failed.
    fn chain(&mut self, refs: &[usize], key: Val) -> Option<Val> {
        let out = REFS[*refs.first()?].out;
        if self.has(Lapse::Skip) {
            return self.guess(out);
        }
        let stop = usize::from(self.has(Lapse::StopEarly) && refs.len() > 1);
        let mut val = key;
        for r in refs[stop..].iter().rev() {
            let def = &REFS[*r];
            let by = tool(def.find)?.by;
            let mut fields = self.call(def.find, &[(by, val)]);
            if let Some(read) = def.read {
                let id = field(&fields, "id")?;
                if self.has(Lapse::IdAsValue) && def.out == Ty::Number {
                    val = id;
                    continue;
                }
                fields = self.call(read, &[("id", id)]);
            } else if self.has(Lapse::IdAsValue) && def.out == Ty::Number {
                // Takes another number of the same result.
                if let Some((_, other)) = fields.iter().find(|(name, v)| *name != def.field && v.ty == Ty::Number) {
                    val = *other;
                    continue;
                }
            }
            val = field(&fields, def.field)?;
        }
        if val.ty != out {
            val = self.guess(out)?;
        }
        self.trace.looked_up.push(val);
        Some(val)
    }

    fn holds(&mut self, condition: &Condition) -> bool {
        let Some(val) = self.chain(&condition.refs, condition.key) else {
            self.trace.failed = true;
            return false;
        };
        let holds = condition.holds(val);
        if self.has(Lapse::WrongBranch) { !holds } else { holds }
    }

    fn act(&mut self, action: &Action) {
        let def = action.def();
        let mut vals = Vec::with_capacity(def.slots.len());
        for ((name, _), source) in def.slots.iter().zip(&action.slots) {
            let val = match source {
                Source::Lit(val) | Source::That(val) => Some(*val),
                Source::Chain(refs, key) => self.chain(refs, *key),
                Source::Missing(val) if self.has(Lapse::Guess) => self.guess(val.ty),
                Source::Missing(val) => {
                    self.trace.steps.push(Step::Ask(ask_word(name), *val));
                    Some(*val)
                }
            };
            let Some(val) = val else {
                self.trace.failed = true;
                return;
            };
            vals.push((*name, val));
        }
        if let Some(find) = def.find {
            let fields = self.call(find, &vals[..1]);
            let Some(id) = field(&fields, "id") else {
                self.trace.failed = true;
                return;
            };
            vals[0] = ("id", id);
        }
        self.call(def.tool, &vals);
    }
}

impl Condition {
    /// Whether it holds for this looked-up value.
    pub fn holds(&self, val: Val) -> bool {
        if self.over { val.index() > self.threshold.index() } else { val.index() < self.threshold.index() }
    }
}

fn field(fields: &[(&'static str, Val)], name: &str) -> Option<Val> {
    fields.iter().find(|(n, _)| *n == name).map(|(_, v)| *v)
}
