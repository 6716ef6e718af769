//! The dialect of real models: their chat template, their tokenizer, a tool-call parser.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use super::dialect::{Dialect, DialectError, Fault, Line, Parsed};
use super::parse::{self, CallFormat, ParseLimits};
use super::template::{ChatMessage, ChatTemplate, announce_tools};
use super::tools::ToolStyle;
use super::write::write_calls;
use crate::decide::similarity::tokens;
use crate::env::{Opening, Role, ToolDef};
use crate::event::ToolCall;
use crate::model::tokenizer::Tokenizer;

/// How tools are shown and calls are read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatOptions {
    /// How tools are described in the prompt.
    pub tools: ToolStyle,
    /// How the model writes calls.
    pub calls: CallFormat,
    /// Whether calls that do not fit the schemas are refused by the parser; otherwise the environment
    /// answers them.
    pub check_schemas: bool,
    /// System message where the environment gives none; otherwise it is put in front of it.
    pub instructions: Option<String>,
    /// Worked examples to choose from, best first.
    pub examples: Vec<Example>,
    /// How many of them are shown, between the system message and the first user message.
    pub few_shot: usize,
}

/// A worked example: what a user asked, the calls and their results, the answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Example {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Names of the tools it calls.
    pub tools: Vec<String>,
}

/// Openings whose ids are kept: the K episodes of a group ask for the same one at about the same time.
const KEPT_OPENINGS: usize = 16;

/// A model's own way of writing conversations.
pub struct ChatDialect {
    template: ChatTemplate,
    tokenizer: Tokenizer,
    options: ChatOptions,
    limits: ParseLimits,
    /// What follows a reply depends on nothing before it, so it is rendered behind a short stand-in.
    local: bool,
    openings: Mutex<VecDeque<(Opening, Vec<u32>)>>,
}

impl ChatDialect {
    /// A dialect; probes the template.
    ///
    /// # Errors
    /// [`DialectError`] when the tokenizer names no token that ends a reply, or the template cannot go on
    /// after one.
    pub fn new(
        template: ChatTemplate,
        tokenizer: Tokenizer,
        options: ChatOptions,
    ) -> Result<ChatDialect, DialectError> {
        if tokenizer.eos_ids().is_empty() {
            return Err(DialectError {
                what: "reading the tokenizer".to_string(),
                detail: "no token ends a reply; name it as eos_token in tokenizer_config.json or as \
                         eos_token_id in generation_config.json"
                    .to_string(),
            });
        }
        let mut dialect = ChatDialect {
            template,
            tokenizer,
            options,
            limits: ParseLimits::default(),
            local: false,
            openings: Mutex::new(VecDeque::new()),
        };
        dialect.local = dialect.probe()?;
        Ok(dialect)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Messages and template tools of an opening, instructions and examples included.
    pub fn messages<'a>(&self, opening: &'a Opening) -> (Vec<ChatMessage>, &'a [ToolDef]) {
        let mut messages = opening.messages.clone();
        if let Some(instructions) = &self.options.instructions {
            match messages.first_mut().filter(|m| m.role == Role::System) {
                Some(system) => system.content = format!("{instructions}\n\n{}", system.content),
                None => {
                    let system = crate::env::Message { role: Role::System, content: instructions.clone() };
                    messages.insert(0, system);
                }
            }
        }
        let (mut messages, tools) =
            self.template.opening(&messages, &opening.tools, self.options.tools, self.options.calls);
        let at = messages.iter().take_while(|m| m.role == Role::System).count();
        messages.splice(at..at, self.examples(opening).flat_map(|e| e.messages.iter().cloned()));
        (messages, tools)
    }

    /// The examples for an episode, the best one last, where a small model looks most: those that call
    /// nothing else than the episode's tools, and of them those whose question is most like the user's
    /// (Jaccard similarity of the words, a word weighing more the fewer examples have it).
    fn examples(&self, opening: &Opening) -> impl Iterator<Item = &Example> {
        let asked = |m: &[ChatMessage]| {
            let question = m.iter().find(|m| m.role == Role::User);
            tokens(question.map_or("", |m| &m.content)).into_iter().collect::<BTreeSet<_>>()
        };
        let questions: Vec<BTreeSet<String>> = self.options.examples.iter().map(|e| asked(&e.messages)).collect();
        let query = asked(&opening.messages.iter().map(ChatMessage::from).collect::<Vec<_>>());
        let weight = |words: &mut dyn Iterator<Item = &String>| -> f64 {
            let rarity =
                |w| (1 + questions.len()) as f64 / (1 + questions.iter().filter(|q| q.contains(w)).count()) as f64;
            words.map(|w| rarity(w).ln()).sum()
        };
        let mut ranked: Vec<(usize, f64, &Example)> = Vec::new();
        for (example, question) in self.options.examples.iter().zip(&questions) {
            let foreign = example.tools.iter().filter(|t| !opening.tools.iter().any(|d| d.name == **t)).count();
            let all = weight(&mut query.union(question));
            let likeness = if all > 0.0 { weight(&mut query.intersection(question)) / all } else { 0.0 };
            ranked.push((foreign, likeness, example));
        }
        // Stable: equals stay in the order given.
        ranked.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
        ranked.truncate(self.options.few_shot);
        ranked.into_iter().rev().map(|(_, _, example)| example)
    }

    /// Whether what follows a reply is the same behind every kind of conversation.
    fn probe(&self) -> Result<bool, DialectError> {
        let user = |text: &str| ChatMessage::new(Role::User, text);
        let tool = |text: &str| ChatMessage::result("probe", text);
        let before = [
            vec![user(SHORT)],
            vec![ChatMessage::new(Role::System, "s"), user("u")],
            vec![user("u"), ChatMessage::new(Role::Assistant, "a"), user("v")],
            vec![user("u"), ChatMessage::new(Role::Assistant, "a"), tool("t"), tool("w")],
        ];
        for new in [vec![tool("x")], vec![tool("x"), tool("y")], vec![user("x")], vec![tool("x"), user("y")]] {
            let mut first = None;
            for conversation in &before {
                for sampled in ["r", "<think>\nq\n</think>\n\nr"] {
                    let append = self.template.continuation(conversation, &[], sampled, true, &new);
                    let append = append.map_err(|e| failed("probing the chat template", e))?.append;
                    if *first.get_or_insert_with(|| append.clone()) != append {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    fn line(&self, line: &Line) -> ChatMessage {
        match line {
            Line::Assistant { text, .. } => ChatMessage::new(Role::Assistant, text.clone()),
            Line::Tool { content, .. } if self.options.calls.is_spoken() => {
                ChatMessage::new(Role::User, content.clone())
            }
            Line::Tool { name, content } if name.is_empty() => ChatMessage::new(Role::Tool, content.clone()),
            Line::Tool { name, content } => ChatMessage::result(name, content.clone()),
            Line::User(text) => ChatMessage::new(Role::User, text.clone()),
            Line::System(text) => ChatMessage::new(Role::System, text.clone()),
            Line::Released(tools) => ChatMessage::new(Role::User, announce_tools(tools, self.options.tools)),
        }
    }

    /// Lines as messages; tools that are announced right before the user speaks join the user's message, as do results that
    /// are the user's words: templates want user and assistant in turns.
    fn lines(&self, lines: &[Line]) -> Vec<ChatMessage> {
        let mut messages: Vec<ChatMessage> = Vec::with_capacity(lines.len());
        let mut announced = false;
        let spoken = self.options.calls.is_spoken();
        for line in lines {
            let message = self.line(line);
            match messages.last_mut() {
                Some(last) if (announced || spoken) && last.role == Role::User && message.role == Role::User => {
                    last.content = format!("{}\n\n{}", last.content, message.content);
                }
                _ => messages.push(message),
            }
            announced = matches!(line, Line::Released(_));
        }
        messages
    }
}

/// Stands in for the conversation before a reply.
const SHORT: &str = "u";

fn failed(what: &str, error: impl std::fmt::Display) -> DialectError {
    DialectError { what: what.to_string(), detail: error.to_string() }
}

impl Dialect for ChatDialect {
    fn opening(&self, opening: &Opening) -> Result<Vec<u32>, DialectError> {
        let known =
            |kept: &VecDeque<(Opening, Vec<u32>)>| kept.iter().find(|(o, _)| o == opening).map(|(_, ids)| ids.clone());
        if let Some(ids) = known(&self.openings.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(ids);
        }
        let (messages, tools) = self.messages(opening);
        let rendered = self.template.render(&messages, tools, true).map_err(|e| failed("rendering the opening", e))?;
        let ids = self.tokenizer.encode_rendered(&rendered).map_err(|e| failed("encoding the opening", e))?;
        let mut kept = self.openings.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back((opening.clone(), ids.clone()));
        if kept.len() > KEPT_OPENINGS {
            kept.pop_front();
        }
        Ok(ids)
    }

    fn append(&self, opening: &Opening, history: &[Line], new: &[Line]) -> Result<Vec<u32>, DialectError> {
        const WHAT: &str = "rendering what follows a reply";
        let Some((Line::Assistant { text, .. }, before)) = history.split_last() else {
            return Err(failed(WHAT, "there is no reply to follow"));
        };
        let new = self.lines(new);
        let continuation = if self.local {
            let short = [ChatMessage::new(Role::User, SHORT)];
            self.template.continuation(&short, &[], "", true, &new)
        } else {
            let (mut conversation, tools) = self.messages(opening);
            conversation.extend(self.lines(before));
            self.template.continuation(&conversation, tools, text, true, &new)
        };
        let append = continuation.map_err(|e| failed(WHAT, e))?.append;
        self.tokenizer.encode_rendered(&append).map_err(|e| failed("encoding what follows a reply", e))
    }

    fn utter(&self, text: &str, calls: &[ToolCall]) -> Result<Vec<u32>, DialectError> {
        let written = write_calls(self.options.calls, text, calls)?;
        self.tokenizer.encode(&written).map_err(|e| failed("encoding a reply", e))
    }

    fn parse(&self, text: &str, tools: &[ToolDef]) -> Parsed {
        let tools = self.options.check_schemas.then_some(tools);
        let parsed = parse::parse(self.options.calls, text, tools, &self.limits);
        let fault = |e: parse::CallError| Fault { message: e.message, after_calls: e.after_calls };
        Parsed { calls: parsed.calls, errors: parsed.errors.into_iter().map(fault).collect(), text: parsed.text }
    }

    fn decode(&self, ids: &[u32]) -> String {
        // Ids beyond the tokenizer (a model may have more rows) have no text.
        self.tokenizer.decode(ids, false).unwrap_or_default()
    }

    fn is_stop(&self, id: u32) -> bool {
        self.tokenizer.eos_ids().contains(&id)
    }

    fn stop(&self) -> u32 {
        self.tokenizer.eos_ids().first().copied().unwrap_or_default()
    }
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
