//! How a conversation becomes token ids, and a sampled reply becomes words and tool calls.

use crate::env::{Opening, Role, ToolDef};
use crate::event::ToolCall;

/// One entry of an episode's conversation after the opening.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    /// What the agent wrote, as sampled (decoded, without the stop token), and the calls in it.
    Assistant {
        /// Decoded text.
        text: String,
        /// Parsed calls.
        calls: Vec<ToolCall>,
    },
    /// Result of one call, already cut to the limits. Untrusted text.
    Tool {
        /// Name of the tool; empty when the message was not a valid call.
        name: String,
        /// What the agent reads.
        content: String,
    },
    /// Words of the user. Untrusted text.
    User(String),
    /// Instructions that arrive later.
    System(String),
    /// Tools that become available now.
    Released(Vec<ToolDef>),
}

/// Something that looked like a call and is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fault {
    /// In words for the agent.
    pub message: String,
    /// Valid calls before it, so that answers can be given in the order written.
    pub after_calls: usize,
}

/// What was found in a reply.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Parsed {
    /// Valid calls in order, arguments canonical.
    pub calls: Vec<ToolCall>,
    /// What looked like a call and is none, in order.
    pub errors: Vec<Fault>,
    /// The words around the calls.
    pub text: String,
}

/// The chat template or tokenizer refused something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {detail}")]
pub struct DialectError {
    /// What was attempted, e.g. `rendering the opening`.
    pub what: String,
    /// Why it failed and what to do.
    pub detail: String,
}

/// A model's way of writing conversations. Earlier ids never change: turns only append.
pub trait Dialect: Send + Sync {
    /// Ids of the prompt up to where the agent's first reply begins.
    fn opening(&self, opening: &Opening) -> Result<Vec<u32>, DialectError>;

    /// Ids to append after a reply that ended with a stop token (which is already in the context): what
    /// the template puts behind it, the `new` lines, and the start of the next reply. `history` is
    /// every line before `new`.
    fn append(&self, opening: &Opening, history: &[Line], new: &[Line]) -> Result<Vec<u32>, DialectError>;

    /// Ids that an agent without a model "samples" to say this, without the stop token.
    fn utter(&self, text: &str, calls: &[ToolCall]) -> Result<Vec<u32>, DialectError>;

    /// Finds calls in a decoded reply. `tools` are those available now.
    fn parse(&self, text: &str, tools: &[ToolDef]) -> Parsed;

    /// Text of sampled ids.
    fn decode(&self, ids: &[u32]) -> String;

    /// Whether this id ends a reply.
    fn is_stop(&self, id: u32) -> bool;

    /// The id that usually ends a reply.
    fn stop(&self) -> u32;
}

/// What `calls` look like in [`ByteDialect`].
#[cfg(test)]
pub(super) fn written(calls: &[ToolCall]) -> Vec<u8> {
    hermes("", calls, canonical).expect("valid arguments").into_bytes()
}

/// Bytes as tokens and Hermes-style calls: the dialect of agents that have no model, and of tests.
///
/// Ids 0..=255 are bytes, 256 ends a message, 257..=260 open a system, user, assistant or tool message.
/// Tool descriptions are not part of the prompt: nobody reads it.
#[derive(Debug, Clone, Copy, Default)]
pub struct ByteDialect;

impl ByteDialect {
    /// Number of ids.
    pub const VOCAB: usize = 261;
    /// Ends a message.
    pub const END: u32 = 256;
    const SYSTEM: u32 = 257;
    const USER: u32 = 258;
    const ASSISTANT: u32 = 259;
    const TOOL: u32 = 260;

    fn message(ids: &mut Vec<u32>, marker: u32, text: &str) {
        ids.push(marker);
        ids.extend(text.bytes().map(u32::from));
        ids.push(ByteDialect::END);
    }
}

impl Dialect for ByteDialect {
    fn opening(&self, opening: &Opening) -> Result<Vec<u32>, DialectError> {
        let mut ids = Vec::new();
        for message in &opening.messages {
            let marker = match message.role {
                Role::System => ByteDialect::SYSTEM,
                Role::User => ByteDialect::USER,
                Role::Assistant => ByteDialect::ASSISTANT,
                Role::Tool => ByteDialect::TOOL,
            };
            ByteDialect::message(&mut ids, marker, &message.content);
        }
        ids.push(ByteDialect::ASSISTANT);
        Ok(ids)
    }

    fn append(&self, _opening: &Opening, _history: &[Line], new: &[Line]) -> Result<Vec<u32>, DialectError> {
        let mut ids = Vec::new();
        for line in new {
            match line {
                Line::Assistant { text, .. } => ByteDialect::message(&mut ids, ByteDialect::ASSISTANT, text),
                Line::Tool { content, .. } => ByteDialect::message(&mut ids, ByteDialect::TOOL, content),
                Line::User(text) => ByteDialect::message(&mut ids, ByteDialect::USER, text),
                Line::System(text) => ByteDialect::message(&mut ids, ByteDialect::SYSTEM, text),
                Line::Released(tools) => {
                    let names: Vec<&str> = tools.iter().map(|t| t.name.as_str()).collect();
                    ByteDialect::message(&mut ids, ByteDialect::SYSTEM, &names.join(" "));
                }
            }
        }
        ids.push(ByteDialect::ASSISTANT);
        Ok(ids)
    }

    fn utter(&self, text: &str, calls: &[ToolCall]) -> Result<Vec<u32>, DialectError> {
        Ok(hermes(text, calls, canonical)?.bytes().map(u32::from).collect())
    }

    fn parse(&self, text: &str, _tools: &[ToolDef]) -> Parsed {
        parse_hermes(text)
    }

    fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn is_stop(&self, id: u32) -> bool {
        id == ByteDialect::END
    }

    fn stop(&self) -> u32 {
        ByteDialect::END
    }
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Text followed by one `<tool_call>` block per call, as Hermes and Qwen models write them; `show` writes
/// the arguments out of their canonical text, or says what is wrong with them.
pub fn hermes(
    text: &str,
    calls: &[ToolCall],
    show: impl Fn(&str) -> Result<String, String>,
) -> Result<String, DialectError> {
    let mut out = text.to_string();
    for call in calls {
        if !out.is_empty() {
            out.push('\n');
        }
        let name = serde_json::Value::from(call.name.as_str());
        let arguments = show(&call.arguments).map_err(|detail| DialectError {
            what: format!("writing a call of `{}`", call.name),
            detail: format!("its arguments are not JSON: {detail}"),
        })?;
        out.push_str(&format!("{OPEN}\n{{\"name\": {name}, \"arguments\": {arguments}}}\n{CLOSE}"));
    }
    Ok(out)
}

/// Canonical JSON stays as it is.
fn canonical(arguments: &str) -> Result<String, String> {
    serde_json::from_str::<serde_json::Value>(arguments).map(|v| v.to_string()).map_err(|e| e.to_string())
}

/// A plain reader of what [`hermes`] writes; models go through the full parser.
fn parse_hermes(text: &str) -> Parsed {
    #[derive(serde::Deserialize)]
    struct Call {
        name: String,
        #[serde(default)]
        arguments: serde_json::Map<String, serde_json::Value>,
    }
    let mut parsed = Parsed::default();
    let fault = |parsed: &mut Parsed, message: String| {
        parsed.errors.push(Fault { message, after_calls: parsed.calls.len() });
    };
    let mut rest = text;
    while let Some(at) = rest.find(OPEN) {
        parsed.text.push_str(&rest[..at]);
        let body = &rest[at + OPEN.len()..];
        let (inner, after) = match body.find(CLOSE) {
            Some(end) => (&body[..end], &body[end + CLOSE.len()..]),
            None => {
                fault(&mut parsed, format!("the call is not closed by {CLOSE}"));
                rest = "";
                break;
            }
        };
        match serde_json::from_str::<Call>(inner.trim()) {
            // serde_json's map is sorted by key here, so this text is canonical.
            Ok(call) => parsed
                .calls
                .push(ToolCall { name: call.name, arguments: serde_json::Value::Object(call.arguments).to_string() }),
            Err(e) => fault(&mut parsed, format!("the call is not valid JSON: {e}")),
        }
        rest = after;
    }
    parsed.text.push_str(rest);
    parsed.text = parsed.text.trim().to_string();
    parsed
}
