//! The state of one office: values by hash of (seed, app, key, field), changes as overrides, a log of
//! effects. Nothing is stored until it is changed, so a world costs nothing to open.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::tools::{App, Op, Tool, tool};
use super::values::{Ty, Val};
use crate::env::ToolResult;
use crate::event::ToolCall;

/// Longest argument text that is looked at, bytes.
pub const MAX_ARGUMENT_BYTES: usize = 4096;

/// Ids are a bijection of keys modulo this prime (numbers 10 to 98).
const ID_PRIME: u64 = 89;

/// A recorded effect: tool, entity, other arguments.
type Effect = (&'static str, Option<Val>, Vec<(&'static str, Val)>);

/// The state of an office.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    seed: u64,
    overrides: BTreeMap<(App, Val, &'static str), Val>,
    removed: BTreeSet<(App, Val)>,
    log: Vec<Effect>,
}

/// What a call returned.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The result as the agent reads it.
    pub result: ToolResult,
    /// Fields of a successful lookup, in order, with `id` first where there is one.
    pub fields: Vec<(&'static str, Val)>,
}

fn mix(mut x: u64) -> u64 {
    // splitmix64's finaliser: every input bit reaches every output bit.
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A stable 64-bit hash of a text, for partitions that must never change.
pub fn stable_hash(text: &str) -> u64 {
    let fnv = text.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    mix(fnv)
}

fn error(message: String) -> Outcome {
    let content = serde_json::json!({ "error": message }).to_string().replacen("\":\"", "\": \"", 1);
    Outcome { result: ToolResult { content, is_error: true }, fields: Vec::new() }
}

fn done() -> Outcome {
    Outcome { result: ToolResult { content: "{\"ok\": true}".to_owned(), is_error: false }, fields: Vec::new() }
}

impl World {
    /// The untouched office of this seed.
    pub fn new(seed: u64) -> World {
        World { seed, overrides: BTreeMap::new(), removed: BTreeSet::new(), log: Vec::new() }
    }

    /// The value of a field as it stands.
    pub fn value(&self, app: App, key: Val, field: &'static str, ty: Ty) -> Val {
        if let Some(val) = self.overrides.get(&(app, key, field)) {
            return *val;
        }
        let place = ((app as u64) << 32) | ((key.ty as u64) << 16) | key.index();
        let val =
            Val::at(ty, mix(mix(self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(place)) ^ stable_hash(field)));
        // Nobody is their own boss.
        if val == key { Val::at(ty, val.index() + 1) } else { val }
    }

    fn line(&self, app: App) -> (u64, u64) {
        let h = mix(self.seed ^ mix(0x1d_0000 + app as u64));
        (1 + h % (ID_PRIME - 1), (h >> 32) % ID_PRIME)
    }

    /// The id of an entity: unique within its app.
    pub fn id(&self, app: App, key: Val) -> Val {
        let (a, b) = self.line(app);
        Val::at(Ty::Number, (a * key.index() + b) % ID_PRIME)
    }

    /// The entity with this id, if there is one.
    pub fn by_id(&self, app: App, id: Val) -> Option<Val> {
        let ty = app.key();
        (0..ty.pool().len() as u64).map(|ix| Val::at(ty, ix)).find(|key| self.id(app, *key) == id)
    }

    /// Runs one call. Whatever is wrong with it is an error result that says what to do.
    pub fn call(&mut self, call: &ToolCall) -> Outcome {
        let Some(tool) = tool(&call.name) else {
            return error(format!("unknown tool {}", clip(&call.name)));
        };
        match parse_arguments(tool, &call.arguments) {
            Ok(args) => self.apply(tool, &args),
            Err(message) => error(message),
        }
    }

    fn apply(&mut self, tool: &'static Tool, args: &[(&'static str, Val)]) -> Outcome {
        let named = args.iter().find(|(name, _)| *name == tool.by).map(|(_, val)| *val);
        let key = match (tool.by, named) {
            ("id", Some(id)) => match self.by_id(tool.app, id) {
                Some(key) if !self.removed.contains(&(tool.app, key)) => Some(key),
                _ => return error(format!("no {} {}", tool.app.noun(), id.word())),
            },
            (_, key) => key,
        };
        let others = || args.iter().filter(|(name, _)| *name != tool.by).copied();
        match (tool.op, key) {
            (Op::Get(has_id, fields), Some(key)) => {
                if has_id && self.removed.contains(&(tool.app, key)) {
                    return error(format!("no {} {}", tool.app.noun(), key.word()));
                }
                self.show(tool.app, key, has_id, fields)
            }
            (Op::Read(fields), Some(key)) => self.show(tool.app, key, false, fields),
            (Op::Set(field), Some(key)) => {
                if let Some((_, val)) = others().next() {
                    self.overrides.insert((tool.app, key, field), val);
                }
                done()
            }
            (Op::Remove, Some(key)) => {
                self.removed.insert((tool.app, key));
                done()
            }
            (Op::Block, Some(key)) => {
                if !self.removed.insert((tool.app, key)) {
                    return error(format!("{} is frozen", key.word()));
                }
                done()
            }
            (Op::Record, key) => {
                if let Some(key) = key.filter(|key| self.removed.contains(&(tool.app, *key))) {
                    return error(format!("{} is frozen", key.word()));
                }
                self.log.push((tool.name, key, others().collect()));
                done()
            }
            (_, None) => error(format!("{} is missing", tool.by)),
        }
    }

    fn show(&self, app: App, key: Val, has_id: bool, fields: &'static [(&'static str, Ty)]) -> Outcome {
        let mut out = Vec::with_capacity(fields.len() + 1);
        if has_id {
            out.push(("id", self.id(app, key)));
        }
        out.extend(fields.iter().map(|(name, ty)| (*name, self.value(app, key, name, *ty))));
        let mut content = String::with_capacity(64);
        for (i, (name, val)) in out.iter().enumerate() {
            content.push_str(if i == 0 { "{\"" } else { "\", \"" });
            content.push_str(name);
            content.push_str("\": \"");
            content.push_str(val.word());
        }
        content.push_str("\"}");
        Outcome { result: ToolResult { content, is_error: false }, fields: out }
    }

    /// Whether nothing was changed.
    pub fn is_untouched(&self) -> bool {
        self.overrides.is_empty() && self.removed.is_empty() && self.log.is_empty()
    }

    /// Digest of all changes; the order of effects in the log does not matter.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("coevolve desk state v1");
        hasher.update(&self.seed.to_le_bytes());
        let mut lines: Vec<String> = self
            .overrides
            .iter()
            .map(|((app, key, field), val)| format!("={app:?} {} {field} {}", key.word(), val.word()))
            .collect();
        lines.extend(self.removed.iter().map(|(app, key)| format!("-{app:?} {}", key.word())));
        lines.extend(self.log.iter().map(|(tool, key, args)| {
            let args: Vec<String> = args.iter().map(|(name, val)| format!("{name}={}", val.word())).collect();
            format!("+{tool} {} {}", key.map_or("", Val::word), args.join(" "))
        }));
        lines.sort_unstable();
        for line in lines {
            hasher.update(&(line.len() as u64).to_le_bytes());
            hasher.update(line.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }
}

/// At most 40 characters of a text that may be anything.
fn clip(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Reads the arguments of a call; the error says what is wrong and what the tool takes.
pub fn parse_arguments(tool: &'static Tool, text: &str) -> Result<Vec<(&'static str, Val)>, String> {
    let wanted = || tool.args.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    if text.len() > MAX_ARGUMENT_BYTES {
        return Err(format!("arguments are too long; {} takes {}", tool.name, wanted()));
    }
    // serde_json refuses nesting deeper than 128 levels by itself.
    let Ok(Value::Object(map)) = serde_json::from_str::<Value>(text) else {
        return Err(format!("arguments are not a JSON object; {} takes {}", tool.name, wanted()));
    };
    if let Some(name) = map.keys().find(|name| !tool.args.iter().any(|(arg, _)| arg == name)) {
        return Err(format!("unknown argument {}; {} takes {}", clip(name), tool.name, wanted()));
    }
    let mut out = Vec::with_capacity(tool.args.len());
    for (name, types) in tool.args {
        let word = match map.get(*name) {
            None | Some(Value::Null) => return Err(format!("{name} is missing; {} takes {}", tool.name, wanted())),
            Some(Value::String(word)) => word.trim().to_lowercase(),
            Some(Value::Number(number)) => number.to_string(),
            Some(_) => return Err(format!("{name} is not a string")),
        };
        match Val::parse(&word) {
            Some(val) if types.contains(&val.ty) => out.push((*name, val)),
            _ => {
                let kind = if types.len() == 1 { types[0].noun() } else { "value" };
                return Err(format!("{name}: {} is no {kind}", clip(&word)));
            }
        }
    }
    Ok(out)
}

/// A call with canonical arguments.
pub fn make_call(tool: &'static str, args: &[(&'static str, Val)]) -> ToolCall {
    let mut sorted = args.to_vec();
    sorted.sort_by_key(|(name, _)| *name);
    let body: Vec<String> = sorted.iter().map(|(name, val)| format!("\"{name}\":\"{}\"", val.word())).collect();
    ToolCall { name: tool.to_owned(), arguments: format!("{{{}}}", body.join(",")) }
}
