//! How a user says a clause.

use super::grammar::{Action, Clause, REFS, Source};
use super::values::Val;

/// Ways of asking; `{v}` is the reference.
pub const QUESTIONS: &[&str] = &["tell me {v}", "find out {v}", "look up {v}"];
/// Ways of joining two actions.
pub const JOINS: &[&str] = &["{a} and {b}", "{a}, then {b}"];
/// Conditionals: `{c}` reference, `{n}` threshold; `CMP` stands for `over` or `under`.
pub const CONDITIONALS: &[&str] = &["if {c} is CMP {n}, {a}, otherwise {b}", "when {c} is CMP {n}, {a}, else {b}"];

/// A part of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Words and spaces as they stand.
    Text(&'a str),
    /// A slot, with the noun that the entity goes by if it has one.
    Slot(&'a str, Option<&'a str>),
}

/// Splits a template into its parts.
pub fn parts(template: &str) -> Vec<Part<'_>> {
    let mut out = Vec::new();
    let mut rest = template;
    while let Some(open) = rest.find('{') {
        if open > 0 {
            out.push(Part::Text(&rest[..open]));
        }
        let close = rest[open..].find('}').map_or(rest.len(), |c| open + c);
        let inner = &rest[open + 1..close];
        out.push(match inner.split_once('|') {
            Some((name, noun)) => Part::Slot(name, Some(noun)),
            None => Part::Slot(inner, None),
        });
        rest = rest.get(close + 1..).unwrap_or("");
    }
    if !rest.is_empty() {
        out.push(Part::Text(rest));
    }
    out
}

/// Chooses among phrasings: a cursor over the digits of a variant number.
#[derive(Debug, Clone)]
pub struct Choice(u64);

impl Choice {
    /// From a variant number; equal numbers choose equally.
    pub fn new(variant: u64) -> Choice {
        Choice(variant)
    }

    fn of<'a>(&mut self, phrases: &'a [&'a str]) -> &'a str {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        phrases[((self.0 >> 33) % phrases.len() as u64) as usize]
    }
}

fn fill(template: &str, mut slot: impl FnMut(&str, Option<&str>) -> String) -> String {
    parts(template)
        .into_iter()
        .map(|part| match part {
            Part::Text(text) => text.to_owned(),
            Part::Slot(name, noun) => slot(name, noun),
        })
        .collect()
}

fn chain(refs: &[usize], key: Val, choice: &mut Choice) -> String {
    let Some((outer, inner)) = refs.split_first() else {
        return key.word().to_owned();
    };
    let phrase = choice.of(REFS[*outer].phrases);
    fill(phrase, |_, noun| {
        let key = if inner.is_empty() { Source::Lit(key) } else { Source::Chain(inner.to_vec(), key) };
        source(&key, noun, choice)
    })
}

fn source(source: &Source, noun: Option<&str>, choice: &mut Choice) -> String {
    let plain = match source {
        Source::Lit(val) => {
            return match noun {
                Some(noun) => format!("{} {noun}", val.word()),
                None => val.word().to_owned(),
            };
        }
        Source::Chain(refs, key) => chain(refs, *key, choice),
        Source::Missing(val) => val.ty.placeholder().to_owned(),
        Source::That(val) => format!("that {}", val.ty.noun()),
    };
    match noun {
        Some(noun) => format!("{noun} about {plain}"),
        None => plain,
    }
}

fn action(action: &Action, choice: &mut Choice) -> String {
    let def = action.def();
    fill(choice.of(def.phrases), |name, noun| {
        let at = def.slots.iter().position(|(slot, _)| *slot == name);
        at.and_then(|at| action.slots.get(at)).map_or_else(String::new, |s| source(s, noun, choice))
    })
}

/// The query of a clause; `variant` chooses among phrasings.
pub fn say(clause: &Clause, variant: u64) -> String {
    let mut choice = Choice::new(variant);
    match clause {
        Clause::Ask(refs, key) => {
            let phrase = choice.of(QUESTIONS);
            fill(phrase, |_, _| chain(refs, *key, &mut choice))
        }
        Clause::Do(a) => action(a, &mut choice),
        Clause::Both(a, b) => {
            let phrase = choice.of(JOINS);
            fill(phrase, |name, _| action(if name == "a" { a } else { b }, &mut choice))
        }
        Clause::If(c, a, b) => {
            let phrase = choice.of(CONDITIONALS).replace("CMP", if c.over { "over" } else { "under" });
            fill(&phrase, |name, _| match name {
                "c" => chain(&c.refs, c.key, &mut choice),
                "n" => c.threshold.word().to_owned(),
                "a" => action(a, &mut choice),
                _ => action(b, &mut choice),
            })
        }
    }
}

/// What the user wants, in one sentence.
pub fn intent(clause: &Clause) -> String {
    match clause {
        Clause::Ask(..) => format!("The user wants to know a value: {}.", say(clause, 0)),
        _ => format!("The user wants the office changed: {}.", say(clause, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::grammar::SINKS;
    use super::*;

    #[test]
    fn templates_split_into_parts() {
        assert_eq!(
            parts("give {a} the {b|file}, now"),
            [
                Part::Text("give "),
                Part::Slot("a", None),
                Part::Text(" the "),
                Part::Slot("b", Some("file")),
                Part::Text(", now")
            ]
        );
        assert_eq!(parts(""), []);
        assert_eq!(parts("{x"), [Part::Slot("x", None)]);
    }

    #[test]
    fn phrases_name_every_slot_and_no_value() {
        for sink in SINKS {
            for phrase in sink.phrases {
                let mut named: Vec<&str> = parts(phrase)
                    .iter()
                    .filter_map(|p| if let Part::Slot(name, _) = p { Some(*name) } else { None })
                    .collect();
                let mut slots: Vec<&str> = sink.slots.iter().map(|(name, _)| *name).collect();
                named.sort_unstable();
                slots.sort_unstable();
                assert_eq!(named, slots, "{phrase}");
            }
        }
        // A value word in a phrase would be mistaken for something the user said.
        for phrase in SINKS.iter().flat_map(|s| s.phrases).chain(REFS.iter().flat_map(|r| r.phrases)) {
            for part in parts(phrase) {
                if let Part::Text(text) = part {
                    assert!(text.split_whitespace().all(|w| Val::parse(w).is_none()), "{phrase}");
                }
            }
        }
    }
}
