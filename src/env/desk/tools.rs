//! The tools of the office: seven apps, their arguments and what a call does.
//!
//! Arguments are listed in alphabetical order: canonical JSON sorts keys, so prompts, signatures and
//! calls all show the same order.

use serde_json::{Map, Value, json};

use super::values::Ty;
use crate::env::ToolDef;

/// An application of the office.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum App {
    /// People: boss, phone, city, team.
    Contacts,
    /// Mails, at most one per sender.
    Mail,
    /// Meetings by title.
    Calendar,
    /// Tickets by topic.
    Tickets,
    /// Accounts of people and funds of teams.
    Accounts,
    /// Files by title.
    Files,
    /// Trips, at most one per person.
    Trips,
}

impl App {
    /// All apps.
    pub const ALL: [App; 7] =
        [App::Contacts, App::Mail, App::Calendar, App::Tickets, App::Accounts, App::Files, App::Trips];

    /// What one entity of this app is called.
    pub fn noun(self) -> &'static str {
        match self {
            App::Contacts => "contact",
            App::Mail => "mail",
            App::Calendar => "meeting",
            App::Tickets => "ticket",
            App::Accounts => "account",
            App::Files => "file",
            App::Trips => "trip",
        }
    }

    /// Type of the key of entities that have an id.
    pub fn key(self) -> Ty {
        match self {
            App::Calendar | App::Tickets | App::Files => Ty::Topic,
            App::Contacts | App::Mail | App::Accounts | App::Trips => Ty::Person,
        }
    }
}

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Looks an entity up by its key (the only argument); `true` = the result starts with the id.
    Get(bool, &'static [(&'static str, Ty)]),
    /// Reads an entity by id.
    Read(&'static [(&'static str, Ty)]),
    /// Overwrites this field; the entity is named by `id` or by the argument in `Tool::by`.
    Set(&'static str),
    /// Removes the entity with this id.
    Remove,
    /// Blocks the entity named by `Tool::by`.
    Block,
    /// Is recorded in the effect log.
    Record,
}

/// One tool.
#[derive(Debug, PartialEq, Eq)]
pub struct Tool {
    /// Name, `app_verb`.
    pub name: &'static str,
    /// Its app.
    pub app: App,
    /// What it does.
    pub op: Op,
    /// Arguments in alphabetical order with the types they take.
    pub args: &'static [(&'static str, &'static [Ty])],
    /// The argument that names the entity (`id` or a key); empty for [`Op::Record`] of something new.
    pub by: &'static str,
    /// One sentence for the schema.
    pub about: &'static str,
}

/// A person.
pub const P: &[Ty] = &[Ty::Person];
/// A topic.
pub const T: &[Ty] = &[Ty::Topic];
/// A day.
pub const D: &[Ty] = &[Ty::Day];
/// A number.
pub const N: &[Ty] = &[Ty::Number];
/// A city.
pub const C: &[Ty] = &[Ty::City];
/// A team.
pub const G: &[Ty] = &[Ty::Team];
/// A priority.
pub const Y: &[Ty] = &[Ty::Priority];
/// A text: one value of any of these types.
pub const X: &[Ty] = &[Ty::Number, Ty::Day, Ty::City, Ty::Topic, Ty::Person];

macro_rules! tools {
    ($($name:literal $app:ident $op:expr, $by:literal, [$($arg:literal $ty:ident),*], $about:literal;)*) => {
        /// Every tool, in a fixed order.
        pub const TOOLS: &[Tool] = &[$(Tool {
            name: $name, app: App::$app, op: $op, by: $by, args: &[$(($arg, $ty)),*], about: $about,
        }),*];
    };
}

tools! {
    "contacts_get" Contacts Op::Get(false, &[("boss", Ty::Person), ("phone", Ty::Number), ("city", Ty::City), ("team", Ty::Team)]), "name", ["name" P], "Boss, phone, city and team of a person.";
    "contacts_head" Contacts Op::Get(false, &[("head", Ty::Person)]), "team", ["team" G], "The head of a team.";
    "contacts_phone" Contacts Op::Set("phone"), "name", ["name" P, "number" N], "Sets a person's phone number.";
    "contacts_boss" Contacts Op::Set("boss"), "name", ["boss" P, "name" P], "Sets a person's boss.";
    "contacts_city" Contacts Op::Set("city"), "name", ["city" C, "name" P], "Sets the city a person lives in.";
    "contacts_team" Contacts Op::Set("team"), "name", ["name" P, "team" G], "Puts a person into a team.";
    "mail_find" Mail Op::Get(true, &[("topic", Ty::Topic)]), "from", ["from" P], "Finds the mail of a sender.";
    "mail_read" Mail Op::Read(&[("figure", Ty::Number), ("day", Ty::Day)]), "id", ["id" N], "Reads a mail.";
    "mail_send" Mail Op::Record, "", ["text" X, "to" P], "Sends a mail.";
    "mail_reply" Mail Op::Record, "id", ["id" N, "text" X], "Replies to a mail.";
    "mail_forward" Mail Op::Record, "id", ["id" N, "to" P], "Forwards a mail.";
    "mail_flag" Mail Op::Set("flag"), "id", ["id" N, "priority" Y], "Flags a mail with a priority.";
    "mail_delete" Mail Op::Remove, "id", ["id" N], "Deletes a mail.";
    "calendar_find" Calendar Op::Get(true, &[("day", Ty::Day), ("guest", Ty::Person), ("room", Ty::Number)]), "title", ["title" T], "Finds a meeting by its title.";
    "calendar_next" Calendar Op::Get(false, &[("title", Ty::Topic)]), "guest", ["guest" P], "Title of a person's next meeting.";
    "calendar_add" Calendar Op::Record, "", ["day" D, "guest" P, "title" T], "Adds a meeting.";
    "calendar_move" Calendar Op::Set("day"), "id", ["day" D, "id" N], "Moves a meeting to another day.";
    "calendar_invite" Calendar Op::Record, "id", ["guest" P, "id" N], "Invites a person to a meeting.";
    "calendar_room" Calendar Op::Set("room"), "id", ["id" N, "room" N], "Books a room for a meeting.";
    "calendar_cancel" Calendar Op::Remove, "id", ["id" N], "Cancels a meeting.";
    "tickets_find" Tickets Op::Get(true, &[("owner", Ty::Person), ("due", Ty::Day), ("priority", Ty::Priority)]), "topic", ["topic" T], "Finds a ticket by its topic.";
    "tickets_latest" Tickets Op::Get(false, &[("topic", Ty::Topic)]), "owner", ["owner" P], "Topic of a person's latest ticket.";
    "tickets_new" Tickets Op::Record, "", ["owner" P, "topic" T], "Opens a ticket.";
    "tickets_assign" Tickets Op::Set("owner"), "id", ["id" N, "owner" P], "Assigns a ticket to a person.";
    "tickets_due" Tickets Op::Set("due"), "id", ["day" D, "id" N], "Sets the deadline of a ticket.";
    "tickets_rank" Tickets Op::Set("priority"), "id", ["id" N, "priority" Y], "Sets the priority of a ticket.";
    "tickets_close" Tickets Op::Remove, "id", ["id" N], "Closes a ticket.";
    "accounts_get" Accounts Op::Get(false, &[("balance", Ty::Number), ("limit", Ty::Number)]), "owner", ["owner" P], "Balance and limit of a person's account.";
    "accounts_funds" Accounts Op::Get(false, &[("funds", Ty::Number)]), "team", ["team" G], "Funds of a team.";
    "accounts_pay" Accounts Op::Record, "owner", ["amount" N, "owner" P], "Pays an amount into an account.";
    "accounts_charge" Accounts Op::Record, "owner", ["amount" N, "owner" P], "Charges an amount to an account.";
    "accounts_limit" Accounts Op::Set("limit"), "owner", ["amount" N, "owner" P], "Sets the limit of an account.";
    "accounts_freeze" Accounts Op::Block, "owner", ["owner" P], "Freezes an account.";
    "accounts_grant" Accounts Op::Record, "", ["amount" N, "team" G], "Grants an amount to a team.";
    "files_find" Files Op::Get(true, &[("owner", Ty::Person), ("date", Ty::Day)]), "title", ["title" T], "Finds a file by its title.";
    "files_read" Files Op::Read(&[("total", Ty::Number), ("reviewer", Ty::Person)]), "id", ["id" N], "Reads a file.";
    "files_latest" Files Op::Get(false, &[("title", Ty::Topic)]), "owner", ["owner" P], "Title of a person's latest file.";
    "files_new" Files Op::Record, "", ["text" X, "title" T], "Creates a file.";
    "files_share" Files Op::Record, "id", ["id" N, "with" P], "Shares a file with a person.";
    "files_give" Files Op::Set("owner"), "id", ["id" N, "owner" P], "Gives a file to another owner.";
    "files_delete" Files Op::Remove, "id", ["id" N], "Deletes a file.";
    "trips_find" Trips Op::Get(true, &[("city", Ty::City), ("day", Ty::Day), ("fare", Ty::Number)]), "name", ["name" P], "Finds the trip of a person.";
    "trips_book" Trips Op::Record, "", ["city" C, "day" D, "name" P], "Books a trip.";
    "trips_move" Trips Op::Set("day"), "id", ["day" D, "id" N], "Moves a trip to another day.";
    "trips_cancel" Trips Op::Remove, "id", ["id" N], "Cancels a trip.";
}

/// The tool with this name.
pub fn tool(name: &str) -> Option<&'static Tool> {
    TOOLS.iter().find(|t| t.name == name)
}

impl Tool {
    /// Whether a call changes the world.
    pub fn is_effect(&self) -> bool {
        !matches!(self.op, Op::Get(..) | Op::Read(_))
    }

    /// The result fields of a lookup, without the id.
    pub fn fields(&self) -> &'static [(&'static str, Ty)] {
        match self.op {
            Op::Get(_, fields) | Op::Read(fields) => fields,
            Op::Set(_) | Op::Remove | Op::Block | Op::Record => &[],
        }
    }

    /// The schema shown to an agent.
    pub fn def(&self) -> ToolDef {
        let mut properties = Map::new();
        for (name, types) in self.args {
            let schema = match types {
                [Ty::Day] => {
                    json!({"type": "string", "pattern": "^d([1-9]|[12][0-9]|3[01])$", "description": "day of the month"})
                }
                [Ty::Number] => json!({"type": "string", "pattern": "^[1-9][0-9]$", "description": "number, 10 to 99"}),
                [ty @ (Ty::City | Ty::Team | Ty::Priority)] => json!({"type": "string", "enum": ty.pool()}),
                [ty] => json!({"type": "string", "description": ty.noun()}),
                _ => json!({"type": "string", "description": "one value"}),
            };
            properties.insert((*name).to_owned(), schema);
        }
        let required: Vec<Value> = self.args.iter().map(|(name, _)| json!(name)).collect();
        ToolDef {
            name: self.name.to_owned(),
            description: self.about.to_owned(),
            parameters: json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_many_well_formed_and_sorted() {
        assert!(TOOLS.len() >= 40, "{}", TOOLS.len());
        let apps: std::collections::BTreeSet<App> = TOOLS.iter().map(|t| t.app).collect();
        assert_eq!(apps.len(), 7);
        let names: std::collections::BTreeSet<&str> = TOOLS.iter().map(|t| t.name).collect();
        assert_eq!(names.len(), TOOLS.len());
        for t in TOOLS {
            assert!(t.args.windows(2).all(|w| w[0].0 < w[1].0), "{} arguments are not sorted", t.name);
            assert!(t.by.is_empty() || t.args.iter().any(|(a, _)| *a == t.by), "{}", t.name);
            if let Op::Set(field) = t.op {
                let value = t.args.iter().find(|(a, _)| *a != t.by).expect("a value to set");
                assert_eq!(value.1.len(), 1, "{field} has one type");
            }
            let def = t.def();
            assert_eq!(def.parameters["type"], "object");
            assert_eq!(def.parameters["required"].as_array().map(Vec::len), Some(t.args.len()));
        }
        assert_eq!(
            tool("mail_send").map(|t| t.def().parameters["properties"]["to"]["description"].clone()),
            Some(json!("person"))
        );
    }
}
