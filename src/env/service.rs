//! Any `env_service` (AgentEvolver's HTTP protocol) as an environment: WebShop, ALFWorld, AppWorld or BFCL behind such a
//! server, or one's own.
//!
//! Six POSTs with one body, `{env_type, task_id, instance_id, messages, params}`, each answered by `{success, data}`:
//! `get_env_profile` lists task ids, `create` opens an instance, `step` sends one assistant message (`messages` holds it) and
//! returns one, `evaluate` scores, `release` closes. The agent acts in words: [`ACT`] carries a message as it was written
//! (`policy.calls = text`), `python` a fenced block.
//!
//! What the protocol lacks, and what follows from it: no seed (episodes repeat only if the server makes them so), no
//! idempotency (a `step` is never sent twice; `create` is tried again under another id, what only reads as it is), no
//! versions. A server that fails, answers late or says something else ends the episode unscored: a reward is
//! never made up. The server scores its own tasks; for a task of ours (`is_open_query`) it cannot, so that is unscored here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::stdio::bare;
use super::{
    ACT, EnvError, Environment, Message, NEEDS_JUDGE, Opening, Role, Session, StepReply, ToolDef, ToolResult, TurnReply,
};
use crate::event::{Reward, TaskSpec, ToolCall, TurnSpec};
use crate::http::{Answer, Bounds, Http, HttpError};
use crate::world::{draw, now_ms};

/// Longest answer, bytes.
const ANSWER_BYTES: usize = 8 << 20;
/// Attempts of an operation that may be repeated, when the connection fails.
const ATTEMPTS: u32 = 3;
/// Deadline of `release`, which nobody waits for longer.
const RELEASE_MS: u64 = 2000;
/// Calls of this tool are sent as a fenced block.
const PYTHON: &str = "python";

/// Where the server is and what is asked of it.
#[derive(Debug, Clone, PartialEq)]
pub struct ServiceOptions {
    /// Base URL, e.g. `http://127.0.0.1:8080`.
    pub url: String,
    /// The server's name of the environment, e.g. `webshop`.
    pub env_type: String,
    /// Splits to name in messages; the protocol cannot list them.
    pub splits: Vec<String>,
    /// Steps an episode may take.
    pub step_limit: u32,
    /// Whether `evaluate` is asked for the share (`sparse: false`) instead of all or nothing.
    pub partial: bool,
    /// Deadline of one request, milliseconds.
    pub deadline_ms: u64,
    /// Instances open at once; `None` = as many as are played.
    pub sessions: Option<usize>,
}

/// The environment. Clones of its connection are shared by all sessions.
#[derive(Debug)]
pub struct ServiceEnv {
    link: Arc<Link>,
}

#[derive(Debug)]
struct Link {
    http: Http,
    options: ServiceOptions,
    /// Makes instance ids of this process its own: those of a killed one live on at the server.
    process: String,
    next: AtomicU64,
}

impl ServiceEnv {
    /// Asks the server whether it is there.
    ///
    /// # Errors
    /// [`EnvError::Unreachable`] names the address.
    pub fn open(options: ServiceOptions) -> Result<ServiceEnv, EnvError> {
        let options = ServiceOptions { url: options.url.trim_end_matches('/').to_owned(), ..options };
        let unreachable = |detail: String| EnvError::Unreachable {
            env: options.env_type.clone(),
            op: "healthz".into(),
            detail: format!("{detail} (is an env_service running at {}? see env.url)", options.url),
        };
        let http = Http::new(true).map_err(|e| unreachable(e.to_string()))?;
        let bounds = Bounds { deadline_ms: options.deadline_ms, body_bytes: ANSWER_BYTES };
        match http.get(&format!("{}/healthz", options.url), bounds) {
            Ok(Answer { status: 200, .. }) => {}
            Ok(other) => return Err(unreachable(format!("status {}: {}", other.status, other.excerpt()))),
            Err(e) => return Err(unreachable(e.to_string())),
        }
        let process = format!("coevolve-{:x}-{:x}", std::process::id(), now_ms());
        Ok(ServiceEnv { link: Arc::new(Link { http, options, process, next: AtomicU64::new(0) }) })
    }
}

impl Link {
    fn name(&self) -> String {
        self.options.env_type.clone()
    }

    /// An id that no instance had before.
    fn instance(&self) -> String {
        format!("{}-{}", self.process, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The `data` of one operation's answer. `body` makes the body of each attempt.
    fn ask(
        &self,
        op: &str,
        attempts: u32,
        deadline_ms: u64,
        body: &mut dyn FnMut() -> Value,
    ) -> Result<Value, EnvError> {
        let url = format!("{}/{op}", self.options.url);
        let bounds = Bounds { deadline_ms, body_bytes: ANSWER_BYTES };
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.http.post(&url, &body(), None, bounds) {
                Ok(answer) => return self.data(op, &answer),
                Err(HttpError::Connect(_) | HttpError::Broken(_)) if attempt < attempts => {
                    std::thread::sleep(Duration::from_millis(200 << attempt));
                }
                Err(error) => {
                    return Err(EnvError::Unreachable { env: self.name(), op: op.into(), detail: error.to_string() });
                }
            }
        }
    }

    fn data(&self, op: &str, answer: &Answer) -> Result<Value, EnvError> {
        let value = serde_json::from_slice::<Value>(&answer.body);
        if answer.status != 200 {
            // FastAPI puts the reason into `detail`; for a 500 that is a traceback, whose last line says most.
            let detail = value.ok().and_then(|v| v.get("detail").and_then(Value::as_str).map(str::to_owned));
            let detail = detail.unwrap_or_else(|| answer.excerpt());
            let last = detail.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default();
            return Err(self.refused(op, &format!("status {}", answer.status), last));
        }
        let Ok(Value::Object(mut reply)) = value else {
            return Err(self.odd(op, format!("no JSON object: {}", answer.excerpt())));
        };
        let data = reply.remove("data").or_else(|| reply.remove("task_ids"));
        match (reply.get("success"), data) {
            (Some(Value::Bool(false)), data) => {
                let said = data.map(|d| d.to_string()).unwrap_or_default();
                Err(self.refused(op, "unsuccessful", &said))
            }
            (_, Some(data)) => Ok(data),
            (_, None) => Err(self.odd(op, format!("no `data`: {}", answer.excerpt()))),
        }
    }

    fn refused(&self, op: &str, kind: &str, message: &str) -> EnvError {
        let message = message.chars().take(300).collect();
        EnvError::Refused { env: self.name(), op: op.into(), kind: kind.into(), message }
    }

    fn odd(&self, op: &str, detail: String) -> EnvError {
        EnvError::Protocol { env: self.name(), op: op.into(), detail }
    }

    fn body(&self, task: Option<&str>, instance: Option<&str>, messages: &Value, params: &Value) -> Value {
        json!({
            "env_type": self.options.env_type, "task_id": task, "instance_id": instance,
            "messages": messages, "params": params,
        })
    }

    /// The messages of a `state`: a list, or one alone.
    fn messages(&self, op: &str, data: &Value) -> Result<Vec<Message>, EnvError> {
        let state = match data.get("state") {
            Some(Value::Array(list)) => list.as_slice(),
            Some(one @ Value::Object(_)) => std::slice::from_ref(one),
            _ => return Err(self.odd(op, "`state` is neither a message nor a list of them".into())),
        };
        let message = |m: &Value| -> Option<Message> {
            let role = match m.get("role").and_then(Value::as_str) {
                Some("system") => Role::System,
                Some("assistant") => Role::Assistant,
                Some("tool") => Role::Tool,
                _ => Role::User,
            };
            Some(Message { role, content: m.get("content")?.as_str()?.to_owned() })
        };
        let messages: Option<Vec<Message>> = state.iter().map(message).collect();
        messages.ok_or_else(|| self.odd(op, "a message has no text `content`".into()))
    }
}

impl Environment for ServiceEnv {
    fn name(&self) -> &str {
        &self.link.options.env_type
    }

    /// The protocol has no versions: what the server runs is for its operator to pin.
    fn version(&self) -> String {
        let scoring = if self.link.options.partial { "dense" } else { "sparse" };
        format!("env_service {}, score: {scoring}", self.link.options.env_type)
    }

    fn splits(&self) -> Vec<String> {
        self.link.options.splits.clone()
    }

    /// Official tasks: their words are the server's and come with each episode.
    fn tasks(&self, split: &str, _seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        let link = &self.link;
        let none = json!({});
        let mut body = || link.body(None, None, &none, &json!({ "split": split }));
        let data = link.ask("get_env_profile", ATTEMPTS, link.options.deadline_ms, &mut body)?;
        let id = |v: &Value| match v {
            Value::String(s) => Some(s.clone()),
            Value::Number(n) => Some(n.to_string()),
            _ => None,
        };
        let ids: Option<Vec<String>> = data.as_array().and_then(|list| list.iter().map(id).collect());
        let Some(ids) = ids else {
            return Err(link.odd("get_env_profile", "the task ids are no list of strings or numbers".into()));
        };
        if ids.is_empty() {
            let known = format!("what the server calls splits; asked for were {}", link.options.splits.join(", "));
            return Err(EnvError::Unknown { env: link.name(), what: format!("any task of split `{split}`"), known });
        }
        let mut seen = std::collections::BTreeSet::new();
        let fresh = ids.into_iter().filter(|id| seen.insert(id.clone())).take(limit);
        Ok(fresh
            .map(|id| TaskSpec {
                base: id.clone(),
                id,
                env: link.name(),
                split: split.into(),
                family: link.name(),
                tools: vec![ACT.into()],
                turns: vec![TurnSpec { query: String::new(), solution: Vec::new(), answer: None, missing: None }],
            })
            .collect())
    }

    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(ServiceSession { link: Arc::clone(&self.link), instance: None, own: false, over: false }))
    }

    fn max_sessions(&self) -> Option<usize> {
        self.link.options.sessions
    }

    /// The initial state of `near`, or of a task of the first split.
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        if let Some(near) = near {
            return Ok(bare(near.clone()));
        }
        let split = self.link.options.splits.first().cloned().unwrap_or_else(|| "train".into());
        let tasks = self.tasks(&split, seed, usize::MAX)?;
        match draw(seed, "playground", &[]).pick(&tasks) {
            Some(task) => Ok(bare(task.clone())),
            None => Err(EnvError::Unknown { env: self.link.name(), what: split, known: "no task".into() }),
        }
    }
}

/// One instance at the server.
#[derive(Debug)]
struct ServiceSession {
    link: Arc<Link>,
    instance: Option<String>,
    /// The task's words are ours, so the server's evaluation is of something else.
    own: bool,
    over: bool,
}

impl ServiceSession {
    fn ask(&self, op: &str, attempts: u32, messages: &Value, params: &Value) -> Result<Value, EnvError> {
        let Some(instance) = &self.instance else {
            return Err(self.link.refused(op, "no_episode", "reset first"));
        };
        let mut body = || self.link.body(None, Some(instance), messages, params);
        self.link.ask(op, attempts, self.link.options.deadline_ms, &mut body)
    }

    /// Sends one assistant message; its answer and whether the episode is over.
    fn say(&mut self, content: &str) -> Result<Vec<Message>, EnvError> {
        let data = self.ask("step", 1, &json!({ "role": "assistant", "content": content }), &json!({}))?;
        self.over = match data.get("is_terminated") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(over)) => *over,
            Some(other) => return Err(self.link.odd("step", format!("`is_terminated` is {other}"))),
        };
        self.link.messages("step", &data)
    }

    fn release(&mut self) {
        let Some(instance) = self.instance.take() else { return };
        let none = json!({});
        let mut body = || self.link.body(None, Some(&instance), &none, &none);
        // The server forgets idle instances by itself; one that cannot be released hurts nobody here.
        let _ = self.link.ask("release", 1, RELEASE_MS.min(self.link.options.deadline_ms), &mut body);
    }
}

impl Drop for ServiceSession {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.release();
        }
    }
}

/// What a call says to the server, or why it cannot.
fn spoken(call: &ToolCall) -> Result<String, String> {
    let arguments = serde_json::from_str::<Value>(&call.arguments).unwrap_or(Value::Null);
    let text = |key: &str| {
        arguments.get(key).and_then(Value::as_str).ok_or_else(|| format!("{}: `{key}` must be a text", call.name))
    };
    match call.name.as_str() {
        ACT => text("text").map(str::to_owned),
        PYTHON => text("code").map(|code| format!("```python\n{code}\n```")),
        other => Err(format!("there is no tool `{}`; use `{ACT}`", other.chars().take(64).collect::<String>())),
    }
}

impl Session for ServiceSession {
    fn reset(&mut self, task: &TaskSpec, _episode: &str, _seed: u64) -> Result<Opening, EnvError> {
        self.release();
        let query = task.turns.first().map(|t| t.query.as_str()).filter(|q| !q.is_empty());
        (self.own, self.over) = (query.is_some(), false);
        let params = if self.own { json!({ "is_open_query": true }) } else { json!({}) };
        let link = Arc::clone(&self.link);
        let mut instance = String::new();
        let none = json!({});
        let mut body = || {
            instance = link.instance();
            link.body(Some(&task.base), Some(&instance), &none, &params)
        };
        let data = link.ask("create", ATTEMPTS, link.options.deadline_ms, &mut body)?;
        let named = data.pointer("/info/instance_id").and_then(Value::as_str).filter(|id| !id.is_empty());
        self.instance = Some(named.map_or(instance, str::to_owned));
        let mut messages = link.messages("create", &data)?;
        if let Some(query) = query {
            match messages.iter_mut().rev().find(|m| m.role == Role::User) {
                Some(user) => query.clone_into(&mut user.content),
                None => messages.push(Message { role: Role::User, content: query.into() }),
            }
        }
        // An explorer reads tools, not messages: it learns here how this environment wants to be spoken to.
        let rules: Vec<&str> = messages.iter().filter(|m| m.role == Role::System).map(|m| m.content.as_str()).collect();
        let act = ToolDef {
            name: ACT.into(),
            description: format!("Sends one message to the environment, as its rules want it: {}", rules.join("\n")),
            parameters: json!({
                "type": "object", "required": ["text"],
                "properties": { "text": { "type": "string", "description": "The whole message." } },
            }),
        };
        Ok(Opening { messages, tools: vec![act], turns: 1, step_limit: link.options.step_limit })
    }

    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        let mut results = Vec::with_capacity(calls.len());
        for call in calls {
            let refused = if self.over { Err("the episode is over".to_owned()) } else { spoken(call) };
            results.push(match refused {
                Err(content) => ToolResult { content, is_error: true },
                Ok(content) => {
                    let said: Vec<String> = self.say(&content)?.into_iter().map(|m| m.content).collect();
                    ToolResult { content: said.join("\n"), is_error: false }
                }
            });
        }
        Ok(StepReply { results, done: self.over })
    }

    /// Words without a call are a message, too: what they mean is the server's to say.
    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        if self.over {
            return Ok(TurnReply { messages: Vec::new(), released: Vec::new(), done: true });
        }
        let mut messages = self.say(say)?;
        for message in &mut messages {
            message.role = Role::User;
        }
        Ok(TurnReply { messages, released: Vec::new(), done: self.over })
    }

    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        if self.own {
            let why = format!("{} has no evaluation for this task; {NEEDS_JUDGE}", self.link.options.env_type);
            return Ok(Reward::Unscored(why));
        }
        let sparse = !self.link.options.partial;
        let data = self.ask("evaluate", ATTEMPTS, &json!({}), &json!({ "sparse": sparse }))?;
        let score = match &data {
            Value::Bool(passed) => Some(f64::from(u8::from(*passed))),
            other => other.as_f64(),
        };
        Ok(match score {
            Some(score) if (0.0..=1.0).contains(&score) => Reward::Scored(score),
            _ => {
                let said: String = data.to_string().chars().take(100).collect();
                Reward::Unscored(format!(
                    "{} evaluated to {said}, which is no score in [0, 1]",
                    self.link.options.env_type
                ))
            }
        })
    }

    /// The protocol shows no state.
    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        Ok(None)
    }
}
