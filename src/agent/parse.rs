//! Tool-call parsing: from what a policy wrote to calls, errors and the words around them.
//!
//! | format | a call looks like |
//! |---|---|
//! | `hermes` | `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, any number |
//! | `llama` | the whole message is `{"name": "f", "parameters": {"a": 1}}`, several apart by `;` or newline, or a JSON array of them; a leading `<\|python_tag\|>` is skipped |
//! | `bfcl` | `[f(a=1), g(b='x')]` with Python literals |
//! | `python` | the first ```` ```python ```` block, as one call `python(code)` |
//! | `text` | the whole message, as one call `act(text)` |
//!
//! Strict on purpose: what the environment would have to guess is an error that the policy reads. A call
//! with an error is not among the calls. Text in a leading `<think>` section is never a call.

use super::tools;
use crate::env::{ACT, ToolDef};
use crate::event::ToolCall;
use crate::event::json::{Json, JsonFault, canonical_json};

#[path = "parse_bfcl.rs"]
mod bfcl;

/// How the policy writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallFormat {
    /// Hermes and Qwen: JSON in `<tool_call>` tags.
    #[default]
    Hermes,
    /// Llama 3: bare JSON.
    Llama,
    /// BFCL prompting: a bracketed list of Python calls.
    Bfcl,
    /// A fenced Python block.
    Python,
    /// The message itself, for environments that are spoken to in words ([`crate::env::ACT`]).
    Text,
}

impl CallFormat {
    /// Whether a reply holds no calls in a notation of their own, so that results are the user's words to the model, not a
    /// tool's.
    pub fn is_spoken(self) -> bool {
        matches!(self, CallFormat::Python | CallFormat::Text)
    }
}

/// Bounds of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParseLimits {
    /// Longest message looked at, bytes.
    pub text_bytes: usize,
    /// Longest single call (JSON, bracket list or code block), bytes.
    pub call_bytes: usize,
    /// Most calls of one message.
    pub calls: usize,
    /// Most errors reported for one message.
    pub errors: usize,
}

impl Default for ParseLimits {
    fn default() -> Self {
        ParseLimits { text_bytes: 1 << 20, call_bytes: 64 << 10, calls: 32, errors: 32 }
    }
}

/// What is wrong with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallErrorKind {
    /// The block is opened but not closed.
    Unterminated,
    /// The block holds no valid JSON.
    MalformedJson,
    /// Not a list of Python calls with keyword arguments and literal values.
    MalformedCall,
    /// A key or keyword stands twice.
    DuplicateKey,
    /// Nested too deeply.
    TooDeep,
    /// Message or call longer than the limit.
    TooLarge,
    /// More calls than the limit.
    TooManyCalls,
    /// The call is not an object, or its arguments are not.
    NotAnObject,
    /// No `name`, or one that is no string.
    MissingName,
    /// No `arguments`.
    MissingArguments,
    /// No such tool.
    UnknownTool,
    /// A required argument is absent.
    MissingArgument,
    /// An argument the tool does not have.
    UnknownArgument,
    /// An argument of another type, or `null` where the schema has none.
    WrongType,
    /// A value the schema does not list.
    NotInEnum,
    /// A code block beyond the first one.
    ExtraBlock,
}

/// One error, in words for the policy.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct CallError {
    /// Which kind.
    pub kind: CallErrorKind,
    /// What is wrong and what would be right.
    pub message: String,
    /// Valid calls before it, so that answers can be given in the order written.
    #[serde(skip)]
    pub after_calls: usize,
}

/// What was found in a message.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedCalls {
    /// Valid calls in order, arguments in canonical JSON.
    pub calls: Vec<ToolCall>,
    /// What looked like a call and is none.
    pub errors: Vec<CallError>,
    /// The message without calls and failed calls, trimmed.
    pub text: String,
}

/// Finds the calls in `text`. With `tools`, names and arguments are checked against the schemas;
/// with `None`, only the syntax is.
pub fn parse(format: CallFormat, text: &str, tools: Option<&[ToolDef]>, limits: &ParseLimits) -> ParsedCalls {
    let mut out = Collector { parsed: ParsedCalls::default(), tools, limits };
    if text.len() > limits.text_bytes {
        out.error(
            CallErrorKind::TooLarge,
            format!("the message has {} bytes; at most {} are read", text.len(), limits.text_bytes),
        );
        return out.parsed;
    }
    let (thought, said) = split_thought(text);
    out.words(thought);
    match format {
        CallFormat::Hermes => hermes(said, &mut out),
        CallFormat::Llama => llama(said, &mut out),
        CallFormat::Bfcl => bfcl::parse(said, &mut out),
        CallFormat::Python => python(said, &mut out),
        CallFormat::Text => words(said.trim(), &mut out),
    }
    out.parsed.text = out.parsed.text.trim().to_owned();
    out.parsed
}

/// A leading `<think>` section (all of the text when it is not closed) and the rest.
fn split_thought(text: &str) -> (&str, &str) {
    const CLOSE: &str = "</think>";
    if !text.trim_start().starts_with("<think>") {
        return ("", text);
    }
    match text.find(CLOSE) {
        Some(at) => text.split_at(at + CLOSE.len()),
        None => (text, ""),
    }
}

struct Collector<'a> {
    parsed: ParsedCalls,
    tools: Option<&'a [ToolDef]>,
    limits: &'a ParseLimits,
}

impl Collector<'_> {
    fn words(&mut self, text: &str) {
        self.parsed.text.push_str(text);
    }

    fn error(&mut self, kind: CallErrorKind, message: impl Into<String>) {
        if self.parsed.errors.len() < self.limits.errors {
            let after_calls = self.parsed.calls.len();
            self.parsed.errors.push(CallError { kind, message: message.into(), after_calls });
        }
    }

    fn json_fault(&mut self, fault: &JsonFault) {
        let kind = match fault {
            JsonFault::Malformed { .. } => CallErrorKind::MalformedJson,
            JsonFault::DuplicateKey { .. } => CallErrorKind::DuplicateKey,
            JsonFault::TooDeep { .. } => CallErrorKind::TooDeep,
        };
        self.error(
            kind,
            format!("the call is {}{fault}", if kind == CallErrorKind::MalformedJson { "" } else { "refused: " }),
        );
    }

    /// A call object as JSON formats write it; `keys` are the accepted names of the arguments.
    fn object(&mut self, call: &Json, keys: &[&str]) {
        let Json::Object(_) = call else {
            return self.error(CallErrorKind::NotAnObject, format!("a call must be an object, not {}", call.kind()));
        };
        let Some(name) = call.get("name").and_then(Json::as_str).filter(|n| !n.is_empty()) else {
            return self.error(CallErrorKind::MissingName, "the call has no `name` (a string)");
        };
        match keys.iter().find_map(|k| call.get(k)) {
            Some(Json::Object(arguments)) => self.call(name, arguments),
            Some(other) => self.error(
                CallErrorKind::NotAnObject,
                format!("{name}: `{}` must be an object, not {}", keys[0], other.kind()),
            ),
            None => self.error(CallErrorKind::MissingArguments, format!("{name}: the call has no `{}`", keys[0])),
        }
    }

    /// A syntactically valid call: checked against the tools, then kept.
    fn call(&mut self, name: &str, arguments: &[(String, Json)]) {
        if self.parsed.calls.len() >= self.limits.calls {
            // Said once: the rest of a runaway message has nothing new to say.
            if !self.parsed.errors.iter().any(|e| e.kind == CallErrorKind::TooManyCalls) {
                self.error(
                    CallErrorKind::TooManyCalls,
                    format!("more than {} calls in one message; the rest is ignored", self.limits.calls),
                );
            }
            return;
        }
        if let Some(tools) = self.tools {
            let Some(tool) = tools.iter().find(|t| t.name == name) else {
                return self.error(CallErrorKind::UnknownTool, format!("there is no tool `{}`", shorten(name)));
            };
            if let Some(fault) = tools::check_arguments(&tool.parameters, arguments) {
                use tools::ArgumentFault::{Missing, NotInEnum, Unknown, WrongType};
                let kind = match fault {
                    Missing(_) => CallErrorKind::MissingArgument,
                    Unknown(_) => CallErrorKind::UnknownArgument,
                    WrongType(..) => CallErrorKind::WrongType,
                    NotInEnum(..) => CallErrorKind::NotInEnum,
                };
                return self.error(kind, format!("{name}: {fault}; usage: {}", tools::signature(tool)));
            }
        }
        let arguments = Json::Object(arguments.to_vec()).to_value();
        self.parsed.calls.push(ToolCall { name: name.to_owned(), arguments: canonical_json(&arguments) });
    }

    fn fits(&mut self, bytes: usize) -> bool {
        if bytes <= self.limits.call_bytes {
            return true;
        }
        self.error(
            CallErrorKind::TooLarge,
            format!("the call has {bytes} bytes; at most {} are read", self.limits.call_bytes),
        );
        false
    }
}

/// What a policy invented is shown back to it only in part.
fn shorten(name: &str) -> String {
    match name.char_indices().nth(64) {
        Some((at, _)) => format!("{}...", &name[..at]),
        None => name.to_owned(),
    }
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

fn hermes(text: &str, out: &mut Collector) {
    let mut rest = text;
    while let Some(at) = rest.find(OPEN) {
        out.words(&rest[..at]);
        let body = &rest[at + OPEN.len()..];
        // The JSON itself says where it ends, so a string argument may hold the tags.
        if let Ok((call, length)) = Json::parse_prefix(body)
            && let Some(after) = body[length..].trim_start().strip_prefix(CLOSE)
        {
            if out.fits(length) {
                out.object(&call, &["arguments"]);
            }
            rest = after;
            continue;
        }
        // The search stops at the next opening tag: linear however many there are.
        let next = body.find(OPEN);
        match body[..next.unwrap_or(body.len())].find(CLOSE) {
            Some(end) => {
                let inner = &body[..end];
                if out.fits(inner.len()) {
                    match Json::parse(inner) {
                        Err(fault) => out.json_fault(&fault),
                        // A bare word or number: whole, but no call.
                        Ok(call) => out.object(&call, &["arguments"]),
                    }
                }
                rest = &body[end + CLOSE.len()..];
            }
            None => {
                out.error(CallErrorKind::Unterminated, format!("the call is not closed by {CLOSE}"));
                rest = next.map_or("", |n| &body[n..]);
            }
        }
    }
    out.words(rest);
}

fn llama(text: &str, out: &mut Collector) {
    const TAG: &str = "<|python_tag|>";
    let (words, body) = match text.find(TAG) {
        Some(at) => (&text[..at], &text[at + TAG.len()..]),
        None => ("", text),
    };
    let mut rest = body.trim();
    if !rest.starts_with('{') && !rest.starts_with("[{") {
        out.words(text);
        return;
    }
    out.words(words);
    if !out.fits(rest.len()) {
        return;
    }
    while rest.starts_with(['{', '[']) {
        match Json::parse_prefix(rest) {
            Ok((value, length)) => {
                match &value {
                    Json::Array(items) => items.iter().for_each(|i| out.object(i, &["parameters", "arguments"])),
                    one => out.object(one, &["parameters", "arguments"]),
                }
                rest = rest[length..].trim_start().trim_start_matches(';').trim_start();
            }
            Err(fault) => {
                // serde_json says EOF where the text stops inside a value.
                match &fault {
                    JsonFault::Malformed { detail } if detail.starts_with("EOF") => {
                        out.error(CallErrorKind::Unterminated, "the call ends in the middle of its JSON");
                    }
                    other => out.json_fault(other),
                }
                return;
            }
        }
    }
    out.words(rest);
}

fn python(text: &str, out: &mut Collector) {
    const FENCE: &str = "```";
    let mut rest = text;
    let mut found = false;
    while let Some(at) = opening_fence(rest) {
        let body = &rest[at..];
        let Some(line_end) = body.find('\n') else { break };
        out.words(&rest[..at]);
        let code = &body[line_end + 1..];
        let Some(end) = closing_fence(code) else {
            out.error(CallErrorKind::Unterminated, "the code block is not closed by ```");
            return;
        };
        let block = &code[..end];
        if found {
            out.error(CallErrorKind::ExtraBlock, "only the first code block of a message is executed");
        } else if out.fits(block.len()) {
            let code = block.strip_suffix('\n').unwrap_or(block);
            let arguments = serde_json::json!({"code": code});
            out.parsed.calls.push(ToolCall { name: "python".into(), arguments: canonical_json(&arguments) });
        }
        found = true;
        rest = &code[end + FENCE.len()..];
    }
    out.words(rest);
}

fn words(text: &str, out: &mut Collector) {
    if !text.is_empty() && out.fits(text.len()) {
        out.call(ACT, &[("text".into(), Json::String(text.into()))]);
    }
}

/// Start of the next line that opens a Python block.
fn opening_fence(text: &str) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = text[from..].find("```") {
        let at = from + at;
        let tag = text[at + 3..].lines().next().unwrap_or_default().trim().to_ascii_lowercase();
        if matches!(tag.as_str(), "python" | "py" | "python3") {
            return Some(at);
        }
        from = at + 3;
    }
    None
}

/// Offset of the fence that closes a block: at the start of a line.
fn closing_fence(code: &str) -> Option<usize> {
    if code.starts_with("```") {
        return Some(0);
    }
    code.find("\n```").map(|at| at + 1)
}

#[cfg(test)]
#[path = "tests/parse.rs"]
mod tests;
