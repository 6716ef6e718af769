//! Reading a query back into a clause, without knowing how it was written.
//!
//! A backtracking matcher over words. It returns a clause only if every reading of the whole query is
//! the same clause.

use super::grammar::{Action, Clause, Condition, REFS, SINKS, SinkDef, Source};
use super::phrases::{CONDITIONALS, JOINS, Part, QUESTIONS, parts};
use super::values::{Ty, Val};

/// Longest query that is read, words.
const MAX_WORDS: usize = 80;
/// Deepest nesting of references.
const MAX_DEPTH: usize = 4;

struct Reader<'a> {
    words: Vec<&'a str>,
    missing: Option<Val>,
}

type Found<T> = Vec<(T, usize)>;

fn words(text: &str) -> Vec<&str> {
    let mut out = Vec::new();
    for word in text.split_whitespace() {
        let bare = word.trim_end_matches([',', '?']);
        if !bare.is_empty() {
            out.push(bare);
        }
        if bare.len() < word.len() {
            out.push(&word[bare.len()..]);
        }
    }
    out
}

/// The clause that a query says; `missing` is what the user would answer for a left-out value.
pub fn read(query: &str, missing: Option<Val>) -> Option<Clause> {
    let reader = Reader { words: words(query), missing };
    if reader.words.is_empty() || reader.words.len() > MAX_WORDS {
        return None;
    }
    let mut readings = reader.clauses();
    let first = readings.pop()?;
    readings.iter().all(|other| *other == first).then_some(first)
}

impl<'a> Reader<'a> {
    fn text(&self, at: usize, text: &str) -> Option<usize> {
        let wanted = words(text);
        let found = self.words.get(at..at + wanted.len())?;
        (found == wanted).then_some(at + wanted.len())
    }

    fn clauses(&self) -> Vec<Clause> {
        let end = self.words.len();
        let mut out: Vec<Clause> = Vec::new();
        let mut add = |found: Found<Clause>| out.extend(found.into_iter().filter(|(_, at)| *at == end).map(|(c, _)| c));
        for question in QUESTIONS {
            add(self.question(question));
        }
        add(self.action(0).into_iter().map(|(a, at)| (Clause::Do(a), at)).collect());
        for join in JOINS {
            add(self.join(join));
        }
        for conditional in CONDITIONALS {
            for over in [true, false] {
                add(self.conditional(&conditional.replace("CMP", if over { "over" } else { "under" }), over));
            }
        }
        out
    }

    fn question(&self, template: &str) -> Found<Clause> {
        let mut states = vec![(None, 0)];
        for part in parts(template) {
            states = match part {
                Part::Text(text) => {
                    states.into_iter().filter_map(|(s, at)| self.text(at, text).map(|at| (s, at))).collect()
                }
                Part::Slot(..) => states
                    .into_iter()
                    .flat_map(|(_, at)| self.chain(at, &Ty::ALL, 0).into_iter().map(|(c, at)| (Some(c), at)))
                    .collect(),
            };
        }
        states.into_iter().filter_map(|(chain, at)| chain.map(|(refs, key)| (Clause::Ask(refs, key), at))).collect()
    }

    fn join(&self, template: &str) -> Found<Clause> {
        let mut states: Found<Vec<Action>> = vec![(Vec::new(), 0)];
        for part in parts(template) {
            states = self.advance(states, part);
        }
        states.into_iter().filter_map(|(mut acts, at)| Some((Clause::Both(acts.remove(0), acts.pop()?), at))).collect()
    }

    fn advance(&self, states: Found<Vec<Action>>, part: Part<'_>) -> Found<Vec<Action>> {
        let mut next = Vec::new();
        for (acts, at) in states {
            match part {
                Part::Text(text) => next.extend(self.text(at, text).map(|at| (acts, at))),
                Part::Slot(..) => next.extend(self.action(at).into_iter().map(|(a, at)| {
                    let mut acts = acts.clone();
                    acts.push(a);
                    (acts, at)
                })),
            }
        }
        next
    }

    fn conditional(&self, template: &str, over: bool) -> Found<Clause> {
        let all = parts(template);
        // "if " {c} " is over " {n} ", " {a} ", otherwise " {b}
        let [Part::Text(head), _, Part::Text(is), _, tail @ ..] = all.as_slice() else {
            return Vec::new();
        };
        let mut out = Vec::new();
        let Some(at) = self.text(0, head) else { return out };
        for ((refs, key), at) in self.chain(at, &[Ty::Number], 0) {
            let Some(at) = self.text(at, is) else { continue };
            let Some(threshold) = self.literal(at, &[Ty::Number]) else { continue };
            let mut states: Found<Vec<Action>> = vec![(Vec::new(), at + 1)];
            for part in tail {
                states = self.advance(states, *part);
            }
            for (mut acts, at) in states {
                let condition = Condition { refs: refs.clone(), key, over, threshold };
                let (Some(b), Some(a)) = (acts.pop(), acts.pop()) else { continue };
                out.push((Clause::If(condition, a, b), at));
            }
        }
        out
    }

    fn action(&self, at: usize) -> Found<Action> {
        let mut out = Vec::new();
        for (sink, def) in SINKS.iter().enumerate() {
            for phrase in def.phrases {
                out.extend(self.sink(at, def, phrase).into_iter().map(|(slots, at)| (Action { sink, slots }, at)));
            }
        }
        out
    }

    fn sink(&self, at: usize, def: &SinkDef, phrase: &str) -> Found<Vec<Source>> {
        let mut states: Found<Vec<Option<Source>>> = vec![(vec![None; def.slots.len()], at)];
        for part in parts(phrase) {
            let mut next = Vec::new();
            for (slots, at) in states {
                match part {
                    Part::Text(text) => next.extend(self.text(at, text).map(|at| (slots, at))),
                    Part::Slot(name, noun) => {
                        let Some(place) = def.slots.iter().position(|(slot, _)| *slot == name) else { continue };
                        for (source, at) in self.source(at, def.slots[place].1, noun, 0) {
                            let mut slots = slots.clone();
                            slots[place] = Some(source);
                            next.push((slots, at));
                        }
                    }
                }
            }
            states = next;
        }
        states
            .into_iter()
            .filter_map(|(slots, at)| Some((slots.into_iter().collect::<Option<Vec<_>>>()?, at)))
            .collect()
    }

    fn literal(&self, at: usize, types: &[Ty]) -> Option<Val> {
        self.words.get(at).and_then(|word| Val::parse(word)).filter(|val| types.contains(&val.ty))
    }

    fn source(&self, at: usize, types: &[Ty], noun: Option<&str>, depth: usize) -> Found<Source> {
        if let Some(noun) = noun {
            let mut out = Vec::new();
            if let Some(val) = self.literal(at, types) {
                out.extend(self.text(at + 1, noun).map(|at| (Source::Lit(val), at)));
            }
            if let Some(at) = self.text(at, noun).and_then(|at| self.text(at, "about")) {
                // Only what is not a plain value is said this way round.
                out.extend(
                    self.source(at, types, None, depth).into_iter().filter(|(s, _)| !matches!(s, Source::Lit(_))),
                );
            }
            return out;
        }
        let mut out: Found<Source> = Vec::new();
        if let Some(val) = self.literal(at, types) {
            out.push((Source::Lit(val), at + 1));
        }
        if let Some(val) = self.missing.filter(|val| types.contains(&val.ty)) {
            out.extend(self.text(at, val.ty.placeholder()).map(|at| (Source::Missing(val), at)));
        }
        out.extend(self.chain(at, types, depth).into_iter().map(|((refs, key), at)| (Source::Chain(refs, key), at)));
        out
    }

    fn chain(&self, at: usize, types: &[Ty], depth: usize) -> Found<(Vec<usize>, Val)> {
        let mut out = Vec::new();
        if depth >= MAX_DEPTH {
            return out;
        }
        for (index, def) in REFS.iter().enumerate().filter(|(_, def)| types.contains(&def.out)) {
            for phrase in def.phrases {
                let mut states: Found<Option<(Vec<usize>, Val)>> = vec![(None, at)];
                for part in parts(phrase) {
                    let mut next = Vec::new();
                    for (inner, at) in states {
                        match part {
                            Part::Text(text) => next.extend(self.text(at, text).map(|at| (inner, at))),
                            Part::Slot(_, noun) => {
                                next.extend(self.source(at, &[def.key], noun, depth + 1).into_iter().filter_map(
                                    |(source, at)| match source {
                                        Source::Lit(val) => Some((Some((Vec::new(), val)), at)),
                                        Source::Chain(refs, key) => Some((Some((refs, key)), at)),
                                        Source::Missing(_) | Source::That(_) => None,
                                    },
                                ));
                            }
                        }
                    }
                    states = next;
                }
                out.extend(states.into_iter().filter_map(|(inner, at)| {
                    let (mut refs, key) = inner?;
                    refs.insert(0, index);
                    Some(((refs, key), at))
                }));
            }
        }
        out
    }
}
