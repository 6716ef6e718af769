//! What a user can want: references, sinks, clauses and their family labels.
//!
//! A *reference* names a value by where it is looked up ("the boss of anna"); references nest. A *sink*
//! is an effect tool with slots. A *clause* is one user intent: a question, one action, two actions, or
//! a conditional. The *family* of a clause is its composition without the values.

use super::tools::{App, C, D, G, N, P, T, X, Y, tool};
use super::values::{Ty, Val};

/// A kind of reference: which calls look it up and which field answers.
#[derive(Debug, PartialEq, Eq)]
pub struct RefDef {
    /// Name in family labels.
    pub name: &'static str,
    /// Type of the value.
    pub out: Ty,
    /// Type of the key.
    pub key: Ty,
    /// Lookup tool; its only argument is the key.
    pub find: &'static str,
    /// Reading tool called with the id that `find` returned, where the field needs one.
    pub read: Option<&'static str>,
    /// Field of the last result.
    pub field: &'static str,
    /// Phrases; `{k}` or `{k|noun}` is the key.
    pub phrases: &'static [&'static str],
}

macro_rules! refs {
    ($($name:literal $key:ident -> $out:ident, $find:literal $(+ $read:literal)?, $field:literal, [$($phrase:literal),*];)*) => {
        /// Every reference, in a fixed order.
        pub const REFS: &[RefDef] = &[$(RefDef {
            name: $name, key: Ty::$key, out: Ty::$out, find: $find, read: [$(Some($read),)? None][0], field: $field,
            phrases: &[$($phrase),*],
        }),*];
    };
}

refs! {
    "boss" Person -> Person, "contacts_get", "boss", ["the boss of {k}", "the manager of {k}"];
    "phone" Person -> Number, "contacts_get", "phone", ["the phone of {k}", "the extension of {k}"];
    "home" Person -> City, "contacts_get", "city", ["the home of {k}", "where {k} lives"];
    "team" Person -> Team, "contacts_get", "team", ["the team of {k}", "the group of {k}"];
    "head" Team -> Person, "contacts_head", "head", ["the head of {k}", "whoever leads {k}"];
    "mail_topic" Person -> Topic, "mail_find", "topic", ["the subject of the mail from {k}", "what {k} wrote about"];
    "mail_figure" Person -> Number, "mail_find" + "mail_read", "figure", ["the figure in the mail from {k}", "the figure {k} wrote"];
    "mail_day" Person -> Day, "mail_find" + "mail_read", "day", ["the day in the mail from {k}", "the day {k} wrote"];
    "meeting_day" Topic -> Day, "calendar_find", "day", ["the day of the {k|meeting}", "the date of the {k|meeting}"];
    "guest" Topic -> Person, "calendar_find", "guest", ["the guest of the {k|meeting}", "whoever attends the {k|meeting}"];
    "room" Topic -> Number, "calendar_find", "room", ["the room of the {k|meeting}", "the place of the {k|meeting}"];
    "next" Person -> Topic, "calendar_next", "title", ["the next topic of {k}", "what {k} meets about"];
    "ticket_owner" Topic -> Person, "tickets_find", "owner", ["the owner of the {k|ticket}", "whoever handles the {k|ticket}"];
    "due" Topic -> Day, "tickets_find", "due", ["the deadline of the {k|ticket}", "the due date of the {k|ticket}"];
    "rank" Topic -> Priority, "tickets_find", "priority", ["the priority of the {k|ticket}", "the urgency of the {k|ticket}"];
    "ticket_latest" Person -> Topic, "tickets_latest", "topic", ["the latest task of {k}", "what {k} works on"];
    "balance" Person -> Number, "accounts_get", "balance", ["the balance of {k}", "the savings of {k}"];
    "limit" Person -> Number, "accounts_get", "limit", ["the limit of {k}", "the ceiling of {k}"];
    "funds" Team -> Number, "accounts_funds", "funds", ["the funds of {k}", "the money of {k}"];
    "file_owner" Topic -> Person, "files_find", "owner", ["the keeper of the {k|file}", "whoever keeps the {k|file}"];
    "file_date" Topic -> Day, "files_find", "date", ["the date of the {k|file}", "the day of the {k|file}"];
    "total" Topic -> Number, "files_find" + "files_read", "total", ["the total in the {k|file}", "the sum in the {k|file}"];
    "reviewer" Topic -> Person, "files_find" + "files_read", "reviewer", ["the reviewer in the {k|file}", "whoever signed the {k|file}"];
    "file_latest" Person -> Topic, "files_latest", "title", ["the latest work of {k}", "what {k} filed"];
    "destination" Person -> City, "trips_find", "city", ["the destination of {k}", "where {k} travels"];
    "departure" Person -> Day, "trips_find", "day", ["the departure of {k}", "the takeoff of {k}"];
    "fare" Person -> Number, "trips_find", "fare", ["the fare of {k}", "the price {k} travels for"];
}

/// A kind of action.
#[derive(Debug, PartialEq, Eq)]
pub struct SinkDef {
    /// The effect tool; also the name in family labels.
    pub tool: &'static str,
    /// The tool that finds the entity's id by the value of the first slot.
    pub find: Option<&'static str>,
    /// Slots: argument name and accepted types (the first one for literals). With `find` the first slot is its argument.
    pub slots: &'static [(&'static str, &'static [Ty])],
    /// Phrases; `{slot}` or `{slot|noun}`.
    pub phrases: &'static [&'static str],
}

macro_rules! sinks {
    ($($tool:literal $(by $find:literal)?, [$($slot:literal $ty:ident),*], [$($phrase:literal),*];)*) => {
        /// Every sink, in a fixed order.
        pub const SINKS: &[SinkDef] = &[$(SinkDef {
            tool: $tool, find: [$(Some($find),)? None][0], slots: &[$(($slot, $ty)),*], phrases: &[$($phrase),*],
        }),*];
    };
}

sinks! {
    "contacts_phone", ["name" P, "number" N], ["set the phone of {name} to {number}", "store {number} as phone of {name}"];
    "contacts_boss", ["name" P, "boss" P], ["make {boss} the boss of {name}", "set the manager of {name} to {boss}"];
    "contacts_city", ["name" P, "city" C], ["set the home of {name} to {city}", "relocate {name} to {city}"];
    "contacts_team", ["name" P, "team" G], ["put {name} into {team}", "set the team of {name} to {team}"];
    "mail_send", ["to" P, "text" X], ["send {text} to {to}", "mail {to} with {text}", "let {to} know {text}"];
    "mail_reply" by "mail_find", ["from" P, "text" X], ["reply {text} to the mail from {from}", "answer the mail from {from} with {text}"];
    "mail_forward" by "mail_find", ["from" P, "to" P], ["forward the mail from {from} to {to}", "pass the mail from {from} on to {to}"];
    "mail_flag" by "mail_find", ["from" P, "priority" Y], ["flag the mail from {from} as {priority}", "mark the mail from {from} as {priority}"];
    "mail_delete" by "mail_find", ["from" P], ["delete the mail from {from}", "trash the mail from {from}"];
    "calendar_add", ["title" T, "day" D, "guest" P], ["add a new {title|meeting} on {day} with {guest}", "schedule a new {title|meeting} with {guest} for {day}"];
    "calendar_move" by "calendar_find", ["title" T, "day" D], ["move the {title|meeting} to {day}", "shift the {title|meeting} to {day}"];
    "calendar_invite" by "calendar_find", ["title" T, "guest" P], ["invite {guest} to the {title|meeting}", "add {guest} to the {title|meeting}"];
    "calendar_room" by "calendar_find", ["title" T, "room" N], ["book {room} as room for the {title|meeting}", "set the room of the {title|meeting} to {room}"];
    "calendar_cancel" by "calendar_find", ["title" T], ["cancel the {title|meeting}", "call off the {title|meeting}"];
    "tickets_new", ["topic" T, "owner" P], ["open a new {topic|ticket} for {owner}", "create a new {topic|ticket} owned by {owner}"];
    "tickets_assign" by "tickets_find", ["topic" T, "owner" P], ["assign the {topic|ticket} to {owner}", "give {owner} the job of the {topic|ticket}"];
    "tickets_due" by "tickets_find", ["topic" T, "day" D], ["set the deadline of the {topic|ticket} to {day}", "make the {topic|ticket} due on {day}"];
    "tickets_rank" by "tickets_find", ["topic" T, "priority" Y], ["set the priority of the {topic|ticket} to {priority}", "rank the {topic|ticket} as {priority}"];
    "tickets_close" by "tickets_find", ["topic" T], ["close the {topic|ticket}", "resolve the {topic|ticket}"];
    "accounts_pay", ["owner" P, "amount" N], ["pay {amount} to {owner}", "transfer {amount} to {owner}"];
    "accounts_charge", ["owner" P, "amount" N], ["charge {owner} with {amount}", "bill {owner} for {amount}"];
    "accounts_limit", ["owner" P, "amount" N], ["set the limit of {owner} to {amount}", "make {amount} the limit of {owner}"];
    "accounts_freeze", ["owner" P], ["freeze the account of {owner}", "lock the account of {owner}"];
    "accounts_grant", ["team" G, "amount" N], ["grant {amount} to {team}", "fund {team} with {amount}"];
    "files_new", ["title" T, "text" X], ["write {text} into a new {title|file}", "save {text} as a new {title|file}"];
    "files_share" by "files_find", ["title" T, "with" P], ["share the {title|file} with {with}", "give {with} access to the {title|file}"];
    "files_give" by "files_find", ["title" T, "owner" P], ["make {owner} the keeper of the {title|file}", "hand the {title|file} over to {owner}"];
    "files_delete" by "files_find", ["title" T], ["delete the {title|file}", "erase the {title|file}"];
    "trips_book", ["name" P, "city" C, "day" D], ["book a trip to {city} for {name} on {day}", "plan a trip of {name} to {city} for {day}"];
    "trips_move" by "trips_find", ["name" P, "day" D], ["move the trip of {name} to {day}", "shift the trip of {name} to {day}"];
    "trips_cancel" by "trips_find", ["name" P], ["cancel the trip of {name}", "call off the trip of {name}"];
}

/// Where the value of a slot comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Said in the query.
    Lit(Val),
    /// Looked up: indices into [`REFS`], outermost first, and the innermost key.
    Chain(Vec<usize>, Val),
    /// Left out; the user says it when asked.
    Missing(Val),
    /// The value of this type that the previous turn looked up ("that person").
    That(Val),
}

/// One action: a sink and the sources of its slots, in the order of [`SinkDef::slots`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// Index into [`SINKS`].
    pub sink: usize,
    /// One source per slot.
    pub slots: Vec<Source>,
}

/// A condition on a looked-up number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The reference, of type number.
    pub refs: Vec<usize>,
    /// Its innermost key.
    pub key: Val,
    /// `true`: over, `false`: under the threshold; strictly.
    pub over: bool,
    /// The threshold.
    pub threshold: Val,
}

/// One user intent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Clause {
    /// A question: the answer is the value.
    Ask(Vec<usize>, Val),
    /// One action.
    Do(Action),
    /// Two actions.
    Both(Action, Action),
    /// The first action if the condition holds, the second otherwise.
    If(Condition, Action, Action),
}

fn chain_label(refs: &[usize]) -> String {
    refs.iter().map(|r| REFS[*r].name).collect::<Vec<_>>().join("<")
}

impl Action {
    /// The sink's definition.
    pub fn def(&self) -> &'static SinkDef {
        &SINKS[self.sink]
    }

    /// Label of the composition, e.g. `tickets_assign(owner=boss<guest)`.
    pub fn label(&self) -> String {
        let parts: Vec<String> = self
            .def()
            .slots
            .iter()
            .zip(&self.slots)
            .filter_map(|((name, _), source)| match source {
                Source::Lit(_) => None,
                Source::Chain(refs, _) => Some(format!("{name}={}", chain_label(refs))),
                Source::Missing(_) => Some(format!("{name}=?")),
                Source::That(_) => Some(format!("{name}=that")),
            })
            .collect();
        format!("{}({})", self.def().tool, parts.join(","))
    }

    /// The left-out slot, if any: (argument name, value).
    pub fn missing(&self) -> Option<(&'static str, Val)> {
        self.def().slots.iter().zip(&self.slots).find_map(|((name, _), source)| match source {
            Source::Missing(val) => Some((*name, *val)),
            _ => None,
        })
    }
}

impl Clause {
    /// Label of the composition: equal for clauses that differ in values or wording only.
    pub fn family(&self) -> String {
        match self {
            Clause::Ask(refs, _) => format!("ask({})", chain_label(refs)),
            Clause::Do(action) => action.label(),
            Clause::Both(a, b) => format!("{}+{}", a.label(), b.label()),
            Clause::If(c, a, b) => {
                let cmp = if c.over { "over" } else { "under" };
                format!("if[{cmp}:{}]{}|{}", chain_label(&c.refs), a.label(), b.label())
            }
        }
    }

    /// Its actions, in order.
    pub fn actions(&self) -> Vec<&Action> {
        match self {
            Clause::Ask(..) => vec![],
            Clause::Do(a) => vec![a],
            Clause::Both(a, b) | Clause::If(_, a, b) => vec![a, b],
        }
    }

    /// Its chains of references, in order of appearance.
    pub fn chains(&self) -> Vec<(&[usize], Val)> {
        let mut out: Vec<(&[usize], Val)> = match self {
            Clause::Ask(refs, key) => vec![(refs, *key)],
            Clause::If(c, ..) => vec![(&c.refs, c.key)],
            _ => vec![],
        };
        for action in self.actions() {
            for source in &action.slots {
                if let Source::Chain(refs, key) = source {
                    out.push((refs, *key));
                }
            }
        }
        out
    }

    /// The left-out value, if any: (argument name, value).
    pub fn missing(&self) -> Option<(&'static str, Val)> {
        self.actions().into_iter().find_map(Action::missing)
    }

    /// Values that the query says in so many words.
    pub fn said(&self) -> Vec<Val> {
        let mut out: Vec<Val> = self.chains().iter().map(|(_, key)| *key).collect();
        if let Clause::If(c, ..) = self {
            out.push(c.threshold);
        }
        for action in self.actions() {
            out.extend(action.slots.iter().filter_map(|s| if let Source::Lit(v) = s { Some(*v) } else { None }));
        }
        out
    }

    /// Every tool that a solution may call, whatever the branch.
    pub fn tools(&self) -> Vec<&'static str> {
        let mut out = Vec::new();
        for (refs, _) in self.chains() {
            for r in refs {
                out.push(REFS[*r].find);
                out.extend(REFS[*r].read);
            }
        }
        for action in self.actions() {
            out.extend(action.def().find);
            out.push(action.def().tool);
        }
        out.sort_unstable();
        out.dedup();
        out
    }
}

/// The app of a sink or reference name as it stands in family labels.
pub fn app_of(name: &str) -> Option<App> {
    let of_tool = |t: &str| tool(t).map(|t| t.app);
    SINKS
        .iter()
        .find(|s| s.tool == name)
        .and_then(|s| of_tool(s.tool))
        .or_else(|| REFS.iter().find(|r| r.name == name).and_then(|r| of_tool(r.find)))
}

/// Which argument names of which words an agent may use to ask for a slot, besides the name itself.
pub fn ask_words(field: &str, ty: Option<Ty>) -> Vec<&'static str> {
    let mut words: Vec<&'static str> = match field {
        "to" => vec!["recipient"],
        "from" => vec!["sender"],
        _ => vec![],
    };
    words.extend_from_slice(match ty {
        Some(Ty::Person) => &["who", "whom", "whose", "person"],
        Some(Ty::Day) => &["day", "when", "date"],
        Some(Ty::Number) => &["number", "amount", "much", "many"],
        Some(Ty::City) => &["city", "where"],
        Some(Ty::Team) => &["team"],
        Some(Ty::Topic) => &["topic", "title", "subject"],
        Some(Ty::Priority) => &["priority", "urgent"],
        None => &[],
    });
    words
}

/// The one word that demonstrations use to ask for a slot.
pub fn ask_word(field: &'static str) -> &'static str {
    match field {
        "to" => "recipient",
        "from" => "sender",
        "with" => "person",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_the_tools() {
        for r in REFS {
            let find = tool(r.find).expect("lookup exists");
            assert_eq!(find.args, &[(find.by, &[r.key][..])], "{}", r.name);
            let last = r.read.map_or(find, |read| tool(read).expect("reader exists"));
            assert!(last.fields().contains(&(r.field, r.out)), "{}", r.name);
            assert!(r.phrases.len() >= 2);
        }
        for s in SINKS {
            let effect = tool(s.tool).expect("effect exists");
            assert!(effect.is_effect());
            let (rest, id) = match s.find {
                Some(find) => {
                    let find = tool(find).expect("finder exists");
                    assert_eq!(find.args, &[(s.slots[0].0, s.slots[0].1)]);
                    (&s.slots[1..], 1)
                }
                None => (s.slots, 0),
            };
            assert_eq!(effect.args.len(), rest.len() + id, "{}", s.tool);
            for slot in rest {
                assert!(effect.args.contains(slot), "{} {}", s.tool, slot.0);
            }
        }
        // Every effect tool is a sink.
        let effects = super::super::tools::TOOLS.iter().filter(|t| t.is_effect()).count();
        assert_eq!(effects, SINKS.len());
    }
}
