//! Which families are for training and which only for tests, and the tasks of every split.
//!
//! The partition is by rule, not by list: a family is reserved if it joins two apps of a held-out pair,
//! nests references three deep, or falls into the reserved share by the hash of its label. Test worlds
//! have their own range of seeds. So nothing that training, playgrounds or exploration can make is a
//! test task, in composition or in values.

use super::compose::{self, Kind, draw_clause, draw_kind, is_fair, plain_action, revalue};
use super::grammar::{Clause, SINKS, Source, app_of};
use super::phrases::say;
use super::solve::execute;
use super::tools::{App, TOOLS};
use super::values::Val;
use super::world::{World, stable_hash};
use crate::event::{Missing, TaskSpec, ToolCall, TurnSpec};
use crate::world::{Draw, draw};

/// Pairs of apps that no training family joins.
pub const HELD_PAIRS: &[(App, App)] =
    &[(App::Mail, App::Trips), (App::Calendar, App::Accounts), (App::Tickets, App::Files), (App::Contacts, App::Trips)];
/// Share of the other composite families that is reserved for test-normal, percent.
const RESERVED_PERCENT: u64 = 18;
/// World seeds from here on belong to the test splits.
const TEST_WORLDS: u64 = 1 << 62;
/// Splits that no seed changes and no training reaches.
const HELD_OUT: [&str; 3] = ["dev", "test-normal", "test-challenge"];
/// Tasks per test split.
const TEST_TASKS: usize = 200;
/// Seed of the test splits; independent of any run's seed.
const TEST_SEED: u64 = 20_260_401;
/// Families in the narrow training split.
pub const NARROW_FAMILIES: usize = 20;
/// Most tools a task shows.
pub const MAX_TOOLS: usize = 8;
/// Most tasks a generated split returns.
const MAX_TASKS: usize = 1_000_000;

/// Whether a world belongs to the test splits.
pub fn is_test_world(seed: u64) -> bool {
    seed >= TEST_WORLDS
}

/// A world seed for training or exploration, from any 64 bits.
pub fn training_world(bits: u64) -> u64 {
    bits % TEST_WORLDS
}

fn clause_labels(family: &str) -> impl Iterator<Item = &str> {
    family.split(" ; ")
}

fn names(label: &str) -> impl Iterator<Item = &str> {
    label.split(|c: char| !(c.is_ascii_lowercase() || c == '_')).filter(|name| !name.is_empty())
}

/// Whether one clause joins two apps of a held-out pair.
pub(super) fn joins_held_pair(label: &str) -> bool {
    // Slot names ("team=") are not references.
    let apps: Vec<App> = label
        .split(['(', ')', ',', '[', ']', '|', '+', ':'])
        .flat_map(|piece| piece.split_once('=').map_or(piece, |(_, source)| source).split('<'))
        .flat_map(names)
        .filter_map(app_of)
        .collect();
    HELD_PAIRS.iter().any(|(a, b)| apps.contains(a) && apps.contains(b))
}

fn is_deep(label: &str) -> bool {
    label.split(['(', ')', ',', '[', ']', '|', '+', ':']).any(|piece| piece.matches('<').count() >= 2)
}

/// Whether one clause says more than a plain action.
fn is_composite(label: &str) -> bool {
    label.starts_with("ask(") || label.contains(['[', '+', '?', '<']) || label.replace("=that", "").contains('=')
}

fn in_reserved_share(label: &str) -> bool {
    is_composite(label) && stable_hash(&format!("desk reserved {label}")) % 100 < RESERVED_PERCENT
}

/// Whether a family (of one clause, or of several joined by ` ; `) may appear in test splits only.
pub fn reserved(family: &str) -> bool {
    clause_labels(family).any(|label| joins_held_pair(label) || is_deep(label) || in_reserved_share(label))
}

/// Every single-clause family up to nesting of two, with its kind. Large: for analysis and tests.
pub fn all_families() -> Vec<(Kind, String)> {
    use super::grammar::{Action, Condition, REFS};
    use super::values::Ty;
    let key = |r: usize| Val::at(REFS[r].key, 0);
    let chains = |types: &[Ty], depth: usize| -> Vec<Source> {
        let one = compose::refs_of(types);
        if depth == 1 {
            return one.into_iter().map(|r| Source::Chain(vec![r], key(r))).collect();
        }
        one.into_iter()
            .flat_map(|r| {
                compose::refs_of(&[REFS[r].key])
                    .into_iter()
                    .map(move |i| Source::Chain(vec![r, i], Val::at(REFS[i].key, 0)))
            })
            .collect()
    };
    let plain = |sink: usize| Action {
        sink,
        slots: SINKS[sink].slots.iter().map(|(_, t)| Source::Lit(Val::at(t[0], 0))).collect(),
    };
    let mut out = Vec::new();
    let mut singles: Vec<Action> = Vec::new();
    for (sink, def) in SINKS.iter().enumerate() {
        let base = plain(sink);
        out.push((Kind::Plain, Clause::Do(base.clone()).family()));
        singles.push(base.clone());
        for (place, (_, types)) in def.slots.iter().enumerate() {
            let with = |source: Source| {
                let mut action = base.clone();
                action.slots[place] = source;
                action
            };
            if compose::askable(types) {
                out.push((Kind::Missing, Clause::Do(with(Source::Missing(Val::at(types[0], 0)))).family()));
            }
            for source in chains(types, 1) {
                let action = with(source);
                out.push((Kind::Lookup, Clause::Do(action.clone()).family()));
                for (second, (_, types)) in def.slots.iter().enumerate().skip(place + 1) {
                    for source in chains(types, 1) {
                        let mut two = action.clone();
                        two.slots[second] = source;
                        out.push((Kind::Two, Clause::Do(two).family()));
                    }
                }
                singles.push(action);
            }
            out.extend(chains(types, 2).into_iter().map(|source| (Kind::Nested, Clause::Do(with(source)).family())));
        }
    }
    for a in &singles {
        for sink in (0..SINKS.len()).filter(|s| *s != a.sink) {
            out.push((Kind::Both, Clause::Both(a.clone(), plain(sink)).family()));
        }
    }
    for r in compose::refs_of(&[Ty::Number]) {
        for over in [true, false] {
            for a in 0..SINKS.len() {
                for b in (0..SINKS.len()).filter(|b| *b != a) {
                    let c = Condition { refs: vec![r], key: key(r), over, threshold: Val::at(Ty::Number, 40) };
                    out.push((Kind::If, Clause::If(c, plain(a), plain(b)).family()));
                }
            }
        }
    }
    for (kind, depth) in [(Kind::Ask, 1), (Kind::AskNested, 2)] {
        out.extend(chains(&Ty::ALL, depth).into_iter().filter_map(|s| match s {
            Source::Chain(refs, key) => Some((kind, Clause::Ask(refs, key).family())),
            _ => None,
        }));
    }
    out
}

/// The tools a task shows: those it needs and distractors, at most [`MAX_TOOLS`], in drawn order.
pub fn with_distractors(needed: &[&str], draw: &mut Draw) -> Vec<String> {
    let mut tools: Vec<String> = needed.iter().map(|t| (*t).to_owned()).collect();
    tools.sort_unstable();
    tools.dedup();
    let mut others: Vec<&str> = TOOLS.iter().map(|t| t.name).filter(|t| !needed.contains(t)).collect();
    draw.shuffle(&mut others);
    let free = MAX_TOOLS.saturating_sub(tools.len());
    tools.extend(others.into_iter().take(free).map(str::to_owned));
    draw.shuffle(&mut tools);
    tools
}

/// The id of a task: a digest of what it is.
pub fn task_id(task: &TaskSpec) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("coevolve desk task id v1");
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(&task.base);
    for turn in &task.turns {
        add(&turn.query);
        for call in &turn.solution {
            add(&call.name);
            add(&call.arguments);
        }
        add(turn.answer.as_deref().unwrap_or(""));
    }
    format!("desk-{}", &hasher.finalize().to_hex()[..12])
}

/// A task as clauses: what the generator makes before it is written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// World seed.
    pub base: u64,
    /// One clause per turn.
    pub clauses: Vec<Clause>,
}

impl Plan {
    /// Writes the task down.
    pub fn task(&self, split: &str, draw: &mut Draw) -> TaskSpec {
        let mut world = World::new(self.base);
        let mut needed: Vec<&str> = Vec::new();
        let mut turns = Vec::with_capacity(self.clauses.len());
        for clause in &self.clauses {
            needed.extend(clause.tools());
            let trace = execute(clause, &mut world);
            turns.push(TurnSpec {
                query: say(clause, draw.bits()),
                solution: trace.calls(),
                answer: trace.answer.map(|v| v.word().to_owned()),
                missing: clause
                    .missing()
                    .map(|(field, val)| Missing { field: field.to_owned(), reply: val.word().to_owned() }),
            });
        }
        let family: Vec<String> = self.clauses.iter().map(Clause::family).collect();
        let mut task = TaskSpec {
            id: String::new(),
            env: "desk".to_owned(),
            split: split.to_owned(),
            family: family.join(" ; "),
            base: self.base.to_string(),
            tools: with_distractors(&needed, draw),
            turns,
        };
        task.id = task_id(&task);
        task
    }
}

/// Draws a plan of `turns` clauses; `next` proposes a clause for a turn. `None` when no fair plan with
/// at most [`MAX_TOOLS`] tools was found in a bounded number of tries.
fn draw_plan(
    base: u64,
    turns: usize,
    draw: &mut Draw,
    mut next: impl FnMut(&mut Draw) -> Option<Clause>,
) -> Option<Plan> {
    let mut world = World::new(base);
    let mut clauses: Vec<Clause> = Vec::with_capacity(turns);
    let mut known: Vec<Val> = Vec::new();
    for turn in 0..turns {
        let back = turn > 0 && draw.chance(0.15);
        let clause = (0..200).find_map(|_| {
            let clause = match (back, known.is_empty()) {
                (true, false) => refer_back(&known, draw),
                _ => next(draw),
            }?;
            let mut tools: Vec<&str> = clauses.iter().chain([&clause]).flat_map(Clause::tools).collect();
            tools.sort_unstable();
            tools.dedup();
            (tools.len() <= MAX_TOOLS && is_fair(&clause, &world)).then_some(clause)
        })?;
        known = execute(&clause, &mut world).looked_up;
        clauses.push(clause);
    }
    Some(Plan { base, clauses })
}

/// A plain action one value of which is what the previous turn looked up.
fn refer_back(known: &[Val], draw: &mut Draw) -> Option<Clause> {
    // With two looked-up values of one type "that person" would be ambiguous.
    let val = *draw.pick(known)?;
    if known.iter().filter(|v| v.ty == val.ty).count() > 1 {
        return None;
    }
    let sinks: Vec<(usize, usize)> = (0..SINKS.len())
        .flat_map(|s| SINKS[s].slots.iter().enumerate().map(move |(p, (_, types))| (s, p, types)))
        .filter(|(_, _, types)| types.contains(&val.ty))
        .map(|(s, p, _)| (s, p))
        .collect();
    let (sink, place) = *draw.pick(&sinks)?;
    let mut action = plain_action(sink, draw);
    action.slots[place] = Source::That(val);
    Some(Clause::Do(action))
}

fn draw_turns(draw: &mut Draw) -> usize {
    1 + draw.weighted(&[0.5, 0.35, 0.15]).unwrap_or(0)
}

/// One clause of the training families.
pub fn training_clause(draw: &mut Draw) -> Option<Clause> {
    (0..200).find_map(|_| draw_clause(draw_kind(draw), draw).filter(|c| !reserved(&c.family())))
}

/// The families of the narrow split of this seed, as clauses whose values do not matter.
pub fn narrow_families(seed: u64) -> Vec<Clause> {
    let mut d = draw(seed, "desk narrow families", &[]);
    let mut out: Vec<Clause> = Vec::with_capacity(NARROW_FAMILIES);
    let mut tries = 0;
    while out.len() < NARROW_FAMILIES && tries < 10_000 {
        tries += 1;
        if let Some(clause) = training_clause(&mut d).filter(|c| out.iter().all(|o| o.family() != c.family())) {
            out.push(clause);
        }
    }
    out
}

/// One plan over all training families; ends because most draws are fair.
pub fn wide_plan(draw: &mut Draw, turns: Option<usize>) -> Plan {
    loop {
        let base = training_world(draw.bits());
        let turns = turns.unwrap_or_else(|| draw_turns(draw));
        if let Some(plan) = draw_plan(base, turns, draw, training_clause) {
            return plan;
        }
    }
}

fn narrow_plan(families: &[Clause], draw: &mut Draw) -> Plan {
    loop {
        let base = training_world(draw.bits());
        let turns = draw_turns(draw);
        let next = |d: &mut Draw| d.pick(families).cloned().map(|c| revalue(&c, d));
        if let Some(plan) = draw_plan(base, turns, draw, next) {
            return plan;
        }
    }
}

/// A clause of test-normal: known parts, reserved composition.
fn normal_clause(draw: &mut Draw) -> Option<Clause> {
    (0..2000).find_map(|_| {
        draw_clause(draw_kind(draw), draw).filter(|c| {
            let label = c.family();
            in_reserved_share(&label) && !joins_held_pair(&label) && !is_deep(&label)
        })
    })
}

/// A clause of test-challenge: a held-out pair of apps or three references deep.
fn challenge_clause(draw: &mut Draw) -> Option<Clause> {
    (0..2000).find_map(|_| {
        let clause = if draw.chance(0.2) {
            let Source::Chain(refs, key) = compose::draw_chain(&super::values::Ty::ALL, 3, draw)? else { return None };
            Clause::Ask(refs, key)
        } else {
            let kind = if draw.chance(0.5) { Kind::Nested } else { draw_kind(draw) };
            draw_clause(kind, draw)?
        };
        let label = clause.family();
        (joins_held_pair(&label) || is_deep(&label)).then_some(clause)
    })
}

fn test_plan(split: &str, index: usize) -> Plan {
    let mut d = draw(TEST_SEED, "desk test", &[split, &index.to_string()]);
    loop {
        let base = TEST_WORLDS + d.bits() % TEST_WORLDS;
        let plan = if split == "test-challenge" {
            let turns = 1 + d.weighted(&[0.3, 0.5, 0.2]).unwrap_or(0);
            draw_plan(base, turns, &mut d, challenge_clause)
        } else {
            let turns = draw_turns(&mut d);
            draw_plan(base, turns, &mut d, normal_clause)
        };
        if let Some(plan) = plan {
            return plan;
        }
    }
}

/// The plans of a split; `None` for an unknown split.
pub fn plans(split: &str, seed: u64, limit: usize) -> Option<Vec<Plan>> {
    let generated = limit.min(MAX_TASKS);
    match split {
        "train" => {
            let families = narrow_families(seed);
            Some(
                (0..generated)
                    .map(|i| narrow_plan(&families, &mut draw(seed, "desk train", &[&i.to_string()])))
                    .collect(),
            )
        }
        "train-wide" => Some(
            (0..generated).map(|i| wide_plan(&mut draw(seed, "desk train-wide", &[&i.to_string()]), None)).collect(),
        ),
        _ if HELD_OUT.contains(&split) => Some((0..limit.min(TEST_TASKS)).map(|i| test_plan(split, i)).collect()),
        _ => None,
    }
}

/// The tasks of a split; `None` for an unknown split.
pub fn tasks(split: &str, seed: u64, limit: usize) -> Option<Vec<TaskSpec>> {
    let tools_seed = if HELD_OUT.contains(&split) { TEST_SEED } else { seed };
    Some(
        plans(split, seed, limit)?
            .iter()
            .enumerate()
            .map(|(i, plan)| plan.task(split, &mut draw(tools_seed, "desk task", &[split, &i.to_string()])))
            .collect(),
    )
}

/// The tools that a task's solution calls, in order of first use.
pub fn solution_tools(task: &TaskSpec) -> Vec<&str> {
    let mut out: Vec<&str> = Vec::new();
    for call in task.turns.iter().flat_map(|t: &TurnSpec| &t.solution) {
        let call: &ToolCall = call;
        if !out.contains(&call.name.as_str()) {
            out.push(&call.name);
        }
    }
    out
}
