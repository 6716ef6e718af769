//! Chat templates: from messages to the text that the policy reads, and what to append turn by turn.
//!
//! A template is Jinja2 source out of the model folder, rendered as transformers renders it
//! (`trim_blocks`, `lstrip_blocks`, Python's `tojson`, `raise_exception`, `strftime_now`). Two things are
//! ours:
//!
//! *Appending.* A rollout never re-reads what the policy wrote. [`ChatTemplate::continuation`] gives the
//! text between the sampled completion and the next one, and says whether the template would have
//! rendered the whole conversation the same way. Templates that rewrite earlier turns (dropping
//! `<think>` sections, trimming) do not; the caller then goes on appending or splits the rollout.
//!
//! *Trust.* What users and tools say is data. If it holds the text of a control token (`<|im_end|>`), a
//! rendered text would hold that token. [`crate::model::marked::Rendered::cuts`] marks where the tokenizer has to cut such text
//! so that it stays ordinary text ([`crate::model::tokenizer::Tokenizer::encode_rendered`]).

use super::parse::CallFormat;
use super::template_python;
use super::tools::{self, ToolStyle};
use super::write::call_example;
use crate::env::{Message, Role, ToolDef};
use crate::event::ToolCall;
use crate::event::json::Json;
pub use crate::model::marked::{Rendered, Specials};
use crate::model::marked::{SLOT, defuse};
use minijinja::{Environment, Error, ErrorKind, Value};

/// Largest template source accepted, bytes (the longest in use are about 20 KB).
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// What can go wrong with a template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Not a template that we can compile.
    #[error("the chat template does not compile: {detail}")]
    Syntax {
        /// What, and in which line.
        detail: String,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {message}")]
    Refused {
        /// In the template's words.
        message: String,
    },
    /// Rendering failed.
    #[error("the chat template fails: {detail}")]
    Failed {
        /// What, and in which line.
        detail: String,
    },
    /// The template does not show the assistant's words, so nothing can be appended to them.
    #[error("the chat template does not render the assistant's message; a rollout cannot go on with it")]
    NotAppendable,
}

/// A message as templates see it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// The words; of an assistant usually everything that was sampled, calls included.
    pub content: String,
    /// Calls handed to the template apart from the words (few-shot examples).
    pub tool_calls: Vec<ToolCall>,
    /// Tool name of a result.
    pub name: Option<String>,
}

impl ChatMessage {
    /// A message of plain words.
    pub fn new(role: Role, content: impl Into<String>) -> ChatMessage {
        ChatMessage { role, content: content.into(), tool_calls: Vec::new(), name: None }
    }

    /// A tool's result.
    pub fn result(tool: &str, content: impl Into<String>) -> ChatMessage {
        ChatMessage { name: Some(tool.to_owned()), ..ChatMessage::new(Role::Tool, content) }
    }
}

impl From<&Message> for ChatMessage {
    fn from(m: &Message) -> ChatMessage {
        ChatMessage::new(m.role, m.content.clone())
    }
}

/// What follows a completion.
#[derive(Debug, Clone, PartialEq)]
pub struct Continuation {
    /// Text to append behind the sampled tokens: the end of the assistant's turn (unless it was
    /// sampled), the new messages, the next generation prompt.
    pub append: Rendered,
    /// `None` if prompt + completion + append is exactly what the template renders for the whole
    /// conversation; otherwise the template's own rendering, which rewrites earlier text.
    pub rewritten: Option<Rendered>,
}

/// A compiled chat template. Shared by all threads.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    specials: Specials,
    variables: Vec<(String, Json)>,
    shows_tools: bool,
}

const NAME: &str = "chat";
const REFUSAL: &str = "coevolve-refusal:";

impl ChatTemplate {
    /// Compiles Jinja2 `source`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] when it is too long or does not compile.
    pub fn new(source: &str, specials: Specials) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            let detail = format!("{} bytes, at most {MAX_TEMPLATE_BYTES} are accepted", source.len());
            return Err(TemplateError::Syntax { detail });
        }
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(template_python::formatter);
        env.add_filter("tojson", |v: &Value, kw: minijinja::value::Kwargs| template_python::tojson(v, kw));
        env.add_filter("string", |v: &Value| template_python::show(v));
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSAL}{message}")))
        });
        env.add_function("strftime_now", |format: String| strftime_fixed(&format));
        env.add_template_owned(NAME, without_generation_tags(source))
            .map_err(|e| TemplateError::Syntax { detail: describe(&e) })?;
        let mut template = ChatTemplate { env, specials, variables: Vec::new(), shows_tools: false };
        template.shows_tools = template.probe_tools();
        Ok(template)
    }

    /// Sets a template variable for every rendering, e.g. `enable_thinking` = `false`.
    pub fn with_variable(mut self, name: &str, value: Json) -> ChatTemplate {
        self.variables.retain(|(n, _)| n != name);
        self.variables.push((name.to_owned(), value));
        self
    }

    /// Texts shared with the tokenizer.
    pub fn specials(&self) -> &Specials {
        &self.specials
    }

    /// Whether the template has a tools section of its own.
    pub fn shows_tools(&self) -> bool {
        self.shows_tools
    }

    fn probe_tools(&self) -> bool {
        let name = "probe_tool_c1";
        let parameters = serde_json::json!({"type": "object", "properties": {}});
        let probe = ToolDef { name: name.into(), description: "Probe.".into(), parameters };
        let messages = [ChatMessage::new(Role::System, "s"), ChatMessage::new(Role::User, "u")];
        self.marked(&messages, &[probe], true).is_ok_and(|text| text.contains(name))
    }

    /// Renders JSON messages and tools as they are, as `apply_chat_template` does. `tools` may be
    /// `Json::Null`.
    ///
    /// # Errors
    /// [`TemplateError::Refused`] in the template's words, [`TemplateError::Failed`] for anything else.
    pub fn render_json(
        &self,
        messages: &Json,
        tools: &Json,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let template = self.env.get_template(NAME).map_err(|e| TemplateError::Failed { detail: describe(&e) })?;
        let mut context = std::collections::BTreeMap::new();
        let text = |t: &Option<String>| t.as_deref().map(Value::from);
        if let Some(bos) = text(&self.specials.bos) {
            context.insert("bos_token", bos);
        }
        if let Some(eos) = text(&self.specials.eos) {
            context.insert("eos_token", eos);
        }
        for (name, value) in &self.variables {
            context.insert(name, template_python::from_json(value));
        }
        context.insert("messages", template_python::from_json(messages));
        context.insert("tools", template_python::from_json(tools));
        context.insert("documents", Value::from(()));
        context.insert("add_generation_prompt", Value::from(add_generation_prompt));
        template.render(Value::from(context)).map_err(|e| failure(&e))
    }

    /// Renders a conversation. Users' and tools' words are untrusted, see [`Rendered::cuts`]. No
    /// `tools`: no tools section.
    ///
    /// # Errors
    /// As [`ChatTemplate::render_json`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        tools: &[ToolDef],
        add_generation_prompt: bool,
    ) -> Result<Rendered, TemplateError> {
        Ok(Rendered::from_marked(&self.marked(messages, tools, add_generation_prompt)?))
    }

    fn marked(
        &self,
        messages: &[ChatMessage],
        tools: &[ToolDef],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let messages = Json::Array(messages.iter().map(|m| message_json(m, &self.specials.control)).collect());
        let tools = match tools {
            [] => Json::Null,
            some => Json::Array(some.iter().map(tools::to_openai).collect()),
        };
        self.render_json(&messages, &tools, add_generation_prompt)
    }

    /// A JSON message with the content of users and tools marked for cutting.
    pub(super) fn defused(&self, message: &Json) -> Json {
        let Json::Object(entries) = message else { return message.clone() };
        let trusted = !matches!(message.get("role").and_then(Json::as_str), Some("user" | "tool"));
        let entry = |(key, value): &(String, Json)| match value {
            Json::String(text) if !trusted && key == "content" => {
                (key.clone(), Json::String(defuse(text, &self.specials.control)))
            }
            _ => (key.clone(), value.clone()),
        };
        Json::Object(entries.iter().map(entry).collect())
    }

    /// What to append after the policy, asked with `conversation`, wrote `sampled` (decoded, without its
    /// stop token) and `new` messages came. `stopped`: a stop token was sampled, so the template's own
    /// end-of-turn text is left out.
    ///
    /// # Errors
    /// [`TemplateError::NotAppendable`], or as [`ChatTemplate::render_json`].
    pub fn continuation(
        &self,
        conversation: &[ChatMessage],
        tools: &[ToolDef],
        sampled: &str,
        stopped: bool,
        new: &[ChatMessage],
    ) -> Result<Continuation, TemplateError> {
        let before = self.marked(conversation, tools, true)?;
        let render_with = |words: &str| {
            let mut all = conversation.to_vec();
            all.push(ChatMessage::new(Role::Assistant, words));
            all.extend_from_slice(new);
            self.marked(&all, tools, true)
        };
        // The surroundings of a completion are rendered with a placeholder: whatever the policy wrote
        // can't change them.
        let around = render_with(&SLOT.to_string())?;
        let slot = around.rfind(SLOT).ok_or(TemplateError::NotAppendable)?;
        let append = &around[slot + SLOT.len_utf8()..];
        let whole = render_with(sampled)?;
        let exact = whole.strip_prefix(&before).and_then(|r| r.strip_prefix(sampled)) == Some(append);
        let ended = match stopped {
            true => self.specials.stops.iter().find_map(|s| append.strip_prefix(s.as_str())),
            false => None,
        };
        Ok(Continuation {
            append: Rendered::from_marked(ended.unwrap_or(append)),
            rewritten: (!exact).then(|| Rendered::from_marked(&whole)),
        })
    }

    /// Messages and template tools for an opening: in `Full` style the template's own section is used if
    /// it has one; otherwise the tools are described at the end of the system message.
    pub fn opening<'a>(
        &self,
        messages: &[Message],
        tools: &'a [ToolDef],
        style: ToolStyle,
        calls: CallFormat,
    ) -> (Vec<ChatMessage>, &'a [ToolDef]) {
        let mut messages: Vec<ChatMessage> = messages.iter().map(ChatMessage::from).collect();
        // An environment that is spoken to in words says itself how.
        if tools.is_empty() || calls == CallFormat::Text {
            return (messages, &[]);
        }
        // A template's own tools section asks for Hermes calls or whatever its model was trained on.
        if style == ToolStyle::Full && self.shows_tools && calls == CallFormat::Hermes {
            return (messages, tools);
        }
        let section = tools_section(tools, style, calls);
        match messages.first_mut().filter(|m| m.role == Role::System) {
            Some(system) if system.content.is_empty() => system.content = section,
            Some(system) => system.content = format!("{}\n\n{section}", system.content),
            None => messages.insert(0, ChatMessage::new(Role::System, section)),
        }
        (messages, &[])
    }
}

/// The part of the system message that describes tools and how to call them.
pub fn tools_section(tools: &[ToolDef], style: ToolStyle, calls: CallFormat) -> String {
    let lines = tools::describe(tools, style);
    match style {
        // The wording of the Hermes/Qwen templates, which instruct models know.
        ToolStyle::Full if calls == CallFormat::Hermes => format!(
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with \
             function signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\nFor each function \
             call, return a json object with function name and arguments within <tool_call></tool_call> XML \
             tags:\n<tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
        ),
        // Short: a small model's context is small too.
        _ => format!("Tools:\n{lines}\nCall: {}", call_example(calls)),
    }
}

/// What a message says when tools become available in the middle of an episode. The system message
/// can't be rewritten, so this goes in front of the user's words.
pub fn announce_tools(tools: &[ToolDef], style: ToolStyle) -> String {
    format!("New tools:\n{}", tools::describe(tools, style))
}

/// `json.dumps(value, ensure_ascii=False)` as Python prints it.
pub fn python_json(json: &Json) -> String {
    // Json has no value that JSON lacks, so the fallback is never taken.
    template_python::dumps(&template_python::from_json(json)).unwrap_or_else(|_| json.to_value().to_string())
}

fn message_json(m: &ChatMessage, control: &[String]) -> Json {
    let text = |s: &str| Json::String(s.to_owned());
    let (role, trusted) = match m.role {
        Role::System => ("system", true),
        Role::User => ("user", false),
        Role::Assistant => ("assistant", true),
        Role::Tool => ("tool", false),
    };
    let content = if trusted { m.content.clone() } else { defuse(&m.content, control) };
    let mut entries = vec![("role".to_owned(), text(role)), ("content".to_owned(), Json::String(content))];
    if let Some(name) = &m.name {
        entries.push(("name".to_owned(), text(name)));
    }
    if !m.tool_calls.is_empty() {
        let call = |c: &ToolCall| {
            let arguments = Json::parse(&c.arguments).unwrap_or_else(|_| text(&c.arguments));
            let function = vec![("name".to_owned(), text(&c.name)), ("arguments".to_owned(), arguments)];
            Json::Object(vec![("type".to_owned(), text("function")), ("function".to_owned(), Json::Object(function))])
        };
        entries.push(("tool_calls".to_owned(), Json::Array(m.tool_calls.iter().map(call).collect())));
    }
    Json::Object(entries)
}

/// Transformers' `{% generation %}` blocks only mark spans for its own masks: rendered as plain blocks.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}") else { break };
        let inner = &rest[open + 2..open + close];
        let word = inner.trim_matches(['-', '+']).trim();
        let plain = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..open + 2]);
        match plain {
            Some(plain) => out.push_str(&inner.replace(word, plain)),
            None => out.push_str(inner),
        }
        out.push_str("%}");
        rest = &rest[open + close + 2..];
    }
    out + rest
}

/// Templates that print today's date get one fixed day (the default that Llama 3's own template falls
/// back to): a prompt is a fact of a run and must not depend on when it is resumed.
fn strftime_fixed(format: &str) -> String {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str("2024"),
            Some('y') => out.push_str("24"),
            Some('m') => out.push_str("07"),
            Some('d' | 'e') => out.push_str("26"),
            Some('b') => out.push_str("Jul"),
            Some('B') => out.push_str("July"),
            Some('a') => out.push_str("Fri"),
            Some('A') => out.push_str("Friday"),
            Some('j') => out.push_str("208"),
            Some('H' | 'M' | 'S') => out.push_str("00"),
            Some('%') => out.push('%'),
            Some(other) => {
                out.push('%');
                out.push(other);
            }
            None => out.push('%'),
        }
    }
    out
}

fn describe(e: &Error) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

fn failure(e: &Error) -> TemplateError {
    let refusal = |e: &Error| e.detail().and_then(|d| d.strip_prefix(REFUSAL)).map(str::to_owned);
    let mut current: Option<&(dyn std::error::Error + 'static)> = Some(e);
    while let Some(inner) = current {
        if let Some(message) = inner.downcast_ref::<Error>().and_then(refusal) {
            return TemplateError::Refused { message };
        }
        current = inner.source();
    }
    TemplateError::Failed { detail: describe(e) }
}

#[cfg(test)]
#[path = "tests/template.rs"]
mod tests;
