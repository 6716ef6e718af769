//! Values of the office: every value is one word from a small typed pool.
//!
//! Pools are disjoint, so a word alone tells its type. The tokenizer holds each word as one bare token.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::world::Draw;

/// People.
const PERSONS: &[&str] = &[
    "anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo", "ida", "jonas", "karin", "leo", "mia", "nils",
    "olga", "paul", "rosa", "sven", "tara", "ulf", "vera", "willi", "xenia", "yuri", "zoe", "adam", "bella", "chris",
    "dora", "erik", "fiona", "georg", "hanna", "ivan", "julia", "kurt", "lena", "max", "nora", "otto", "petra", "ralf",
    "sara", "tom", "ute", "viktor", "wanda", "alex",
];
/// Titles of files and meetings, topics of tickets and mails.
const TOPICS: &[&str] = &[
    "budget",
    "lunch",
    "audit",
    "launch",
    "review",
    "travel",
    "payroll",
    "hiring",
    "server",
    "backup",
    "license",
    "invoice",
    "design",
    "survey",
    "training",
    "merger",
    "forecast",
    "roadmap",
    "pricing",
    "security",
    "garden",
    "printer",
    "network",
    "contract",
    "branding",
    "shipping",
    "warehouse",
    "customer",
    "database",
    "firewall",
    "website",
    "catalog",
    "festival",
    "museum",
    "bridge",
    "tunnel",
    "harbor",
    "airport",
    "station",
    "market",
    "kitchen",
    "laundry",
    "library",
    "theater",
    "stadium",
    "factory",
];
/// Days of the month.
const DAYS: &[&str] = &[
    "d1", "d2", "d3", "d4", "d5", "d6", "d7", "d8", "d9", "d10", "d11", "d12", "d13", "d14", "d15", "d16", "d17",
    "d18", "d19", "d20", "d21", "d22", "d23", "d24", "d25", "d26", "d27", "d28", "d29", "d30", "d31",
];
/// Amounts, ids, rooms, phones.
const NUMBERS: &[&str] = &[
    "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "20", "21", "22", "23", "24", "25", "26", "27", "28",
    "29", "30", "31", "32", "33", "34", "35", "36", "37", "38", "39", "40", "41", "42", "43", "44", "45", "46", "47",
    "48", "49", "50", "51", "52", "53", "54", "55", "56", "57", "58", "59", "60", "61", "62", "63", "64", "65", "66",
    "67", "68", "69", "70", "71", "72", "73", "74", "75", "76", "77", "78", "79", "80", "81", "82", "83", "84", "85",
    "86", "87", "88", "89", "90", "91", "92", "93", "94", "95", "96", "97", "98", "99",
];
/// Cities.
const CITIES: &[&str] = &[
    "berlin", "paris", "london", "madrid", "rome", "vienna", "prague", "oslo", "dublin", "lisbon", "athens", "zurich",
    "milan", "turin", "porto", "basel",
];
/// Teams.
const TEAMS: &[&str] = &["sales", "legal", "finance", "support", "research", "media", "quality", "logistics"];
/// Priorities, lowest first.
const PRIORITIES: &[&str] = &["low", "normal", "high", "urgent"];

/// Type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ty {
    /// A person's name.
    Person,
    /// A topic or title.
    Topic,
    /// A day, `d1` to `d31`.
    Day,
    /// A number, `10` to `99`.
    Number,
    /// A city.
    City,
    /// A team.
    Team,
    /// A priority.
    Priority,
}

impl Ty {
    /// All types.
    pub const ALL: [Ty; 7] = [Ty::Person, Ty::Topic, Ty::Day, Ty::Number, Ty::City, Ty::Team, Ty::Priority];

    /// The words of this type.
    pub fn pool(self) -> &'static [&'static str] {
        match self {
            Ty::Person => PERSONS,
            Ty::Topic => TOPICS,
            Ty::Day => DAYS,
            Ty::Number => NUMBERS,
            Ty::City => CITIES,
            Ty::Team => TEAMS,
            Ty::Priority => PRIORITIES,
        }
    }

    /// The noun for one value of this type, as in `that person`.
    pub fn noun(self) -> &'static str {
        match self {
            Ty::Person => "person",
            Ty::Topic => "topic",
            Ty::Day => "day",
            Ty::Number => "number",
            Ty::City => "city",
            Ty::Team => "team",
            Ty::Priority => "priority",
        }
    }

    /// What stands in a query for a value that is left out.
    pub fn placeholder(self) -> &'static str {
        match self {
            Ty::Person => "someone",
            Ty::Topic => "something",
            Ty::Day => "some day",
            Ty::Number => "some number",
            Ty::City => "some city",
            Ty::Team => "some team",
            Ty::Priority => "some priority",
        }
    }
}

/// One value: a word of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Val {
    /// Its type.
    pub ty: Ty,
    /// Index into [`Ty::pool`]; always in range.
    ix: u8,
}

impl Val {
    /// The value at `ix` modulo the size of the pool.
    pub fn at(ty: Ty, ix: u64) -> Val {
        Val { ty, ix: (ix % ty.pool().len() as u64) as u8 }
    }

    /// Index in the pool.
    pub fn index(self) -> u64 {
        u64::from(self.ix)
    }

    /// The word.
    pub fn word(self) -> &'static str {
        self.ty.pool()[usize::from(self.ix)]
    }

    /// The value with this exact word, of any type.
    pub fn parse(word: &str) -> Option<Val> {
        static WORDS: OnceLock<BTreeMap<&'static str, Val>> = OnceLock::new();
        WORDS
            .get_or_init(|| {
                Ty::ALL
                    .iter()
                    .flat_map(|ty| ty.pool().iter().enumerate().map(|(i, w)| (*w, Val { ty: *ty, ix: i as u8 })))
                    .collect()
            })
            .get(word)
            .copied()
    }

    /// A value of type `ty` drawn uniformly.
    pub fn draw(ty: Ty, draw: &mut Draw) -> Val {
        Val::at(ty, draw.below(ty.pool().len()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_disjoint_and_words_find_their_value() {
        let mut seen = std::collections::BTreeSet::new();
        for ty in Ty::ALL {
            for (i, word) in ty.pool().iter().enumerate() {
                assert!(seen.insert(*word), "{word} is in two pools");
                let val = Val::parse(word).expect("every word parses");
                assert_eq!((val.ty, val.index(), val.word()), (ty, i as u64, *word));
            }
        }
        assert_eq!(Val::parse("nobody"), None);
    }
}
