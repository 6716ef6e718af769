//! Environments in worker processes: JSON lines over stdio.
//!
//! One request per line, one reply per line, `rid` echoed. A worker answers `describe`, `list`, `reset`,
//! `step`, `end_turn`, `evaluate`, `state_digest`, `close`; a failure is
//! `{"rid":n,"error":{"kind":"..","message":".."}}`. `tools/workers/bfcl_worker.py` is an example.
//!
//! Invariants:
//! - A session owns one process from its first `reset` until it is dropped; healthy ones go back to the
//!   pool. Two sessions never share a process.
//! - Every operation has a deadline. A worker that misses it, dies, or speaks anything but the protocol is
//!   killed (SIGKILL to its group) and the session starts a fresh one at its next `reset`.
//! - No process outlives the [`Pool`] and its sessions. If we are killed, Linux kills the workers with us; on
//!   other systems a worker sees the end of its stdin and exits. (A process that a worker started itself is the
//!   worker's to take along.)

mod process;

pub use process::Launch;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value, json};

use self::process::Process;
use super::{EnvError, Environment, Figure, Message, Opening, Session, StepReply, ToolDef, ToolResult, TurnReply};
use crate::event::json::canonical_json;
use crate::event::{Reward, TaskSpec, ToolCall, TurnSpec};
use crate::world::draw;

/// Deadlines in milliseconds and other bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// First answer of a new worker (it may have to load data).
    pub start_ms: u64,
    /// `step`, `end_turn`, `state_digest`.
    pub step_ms: u64,
    /// `reset`.
    pub reset_ms: u64,
    /// `evaluate`, `list`.
    pub evaluate_ms: u64,
    /// Worker processes alive at once; one more is refused.
    pub max_workers: usize,
}

impl Bounds {
    /// Workers beside those of episodes, for exploration and validation.
    const SPARE: usize = 4;

    /// These bounds with workers for so many episodes at once.
    pub fn for_sessions(self, sessions: usize) -> Bounds {
        Bounds { max_workers: sessions.saturating_add(Bounds::SPARE), ..self }
    }

    /// Episodes that may be played at once.
    pub fn sessions(&self) -> usize {
        self.max_workers.saturating_sub(Bounds::SPARE).max(1)
    }
}

/// Longest reply line, bytes.
pub const REPLY_BYTES: usize = 8 << 20;
/// Most figures that are counted.
const FIGURES: usize = 32;

impl Default for Bounds {
    fn default() -> Self {
        Bounds { start_ms: 120_000, step_ms: 30_000, reset_ms: 30_000, evaluate_ms: 60_000, max_workers: 20 }
    }
}

/// What a worker says about itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// Environment name.
    pub name: String,
    /// Version of rules and data.
    pub version: String,
    /// Splits the worker lists.
    pub splits: Vec<String>,
    /// The whole reply, for what is special to one environment.
    pub raw: Value,
}

/// Worker processes of one environment, started when needed and kept for the next session.
#[derive(Debug)]
pub struct Pool {
    launch: Launch,
    bounds: Bounds,
    idle: Mutex<Vec<Process>>,
    alive: AtomicUsize,
    /// Figure -> (episodes of which it holds, episodes it applies to).
    figures: Mutex<BTreeMap<String, (u64, u64)>>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Process({})", self.id())
    }
}

impl Pool {
    /// A pool without processes yet.
    pub fn new(launch: Launch, bounds: Bounds) -> Arc<Pool> {
        Arc::new(Pool { launch, bounds, idle: Mutex::default(), alive: AtomicUsize::new(0), figures: Mutex::default() })
    }

    /// The bounds it was made with.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// What workers said beside the scores, over all episodes scored so far.
    pub fn figures(&self) -> Vec<Figure> {
        let figures = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        figures.iter().map(|(name, &(count, of))| Figure { name: name.clone(), count, of }).collect()
    }

    fn count_figures(&self, reply: &Value) {
        let mut figures = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, value) in reply.get("figures").and_then(Value::as_object).into_iter().flatten().take(FIGURES) {
            if let Some(holds) = value.as_bool()
                && (figures.len() < FIGURES || figures.contains_key(name))
            {
                let (count, of) = figures.entry(name.clone()).or_default();
                *count += u64::from(holds);
                *of += 1;
            }
        }
    }

    /// Processes alive: idle and in sessions.
    pub fn alive(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }

    /// A session; its process is taken at the first `reset`.
    pub fn session(self: &Arc<Pool>) -> WorkerSession {
        WorkerSession { pool: Arc::clone(self), lease: None, episode: String::new() }
    }

    /// One operation outside any episode (`describe`, `list`).
    pub fn ask(self: &Arc<Pool>, op: &str, request: Map<String, Value>) -> Result<Map<String, Value>, EnvError> {
        let mut lease = self.lease()?;
        let answer = lease.ask(op, request, self.bounds.evaluate_ms);
        lease.settle(answer.as_ref().err());
        answer
    }

    /// Asks a worker what it is.
    pub fn describe(self: &Arc<Pool>) -> Result<Description, EnvError> {
        let reply = self.ask("describe", Map::new())?;
        let text = |key: &str| {
            reply.get(key).and_then(Value::as_str).map(str::to_owned).ok_or_else(|| self.lacks("describe", key))
        };
        let splits = reply.get("splits").and_then(Value::as_array).ok_or_else(|| self.lacks("describe", "splits"))?;
        Ok(Description {
            name: text("name")?,
            version: text("version")?,
            splits: splits.iter().filter_map(|s| s.as_str().map(str::to_owned)).collect(),
            raw: Value::Object(reply.clone()),
        })
    }

    /// The tasks of a split with their solutions, in the worker's order. Their `split` is `split`.
    pub fn list(self: &Arc<Pool>, split: &str) -> Result<Vec<TaskSpec>, EnvError> {
        self.list_part(split, Map::new())
    }

    /// The same with more fields in the request, for a worker that can list a part.
    pub fn list_part(
        self: &Arc<Pool>,
        split: &str,
        mut request: Map<String, Value>,
    ) -> Result<Vec<TaskSpec>, EnvError> {
        request.insert("split".into(), split.into());
        let mut reply = self.ask("list", request)?;
        let Some(Value::Array(tasks)) = reply.remove("tasks") else {
            return Err(self.lacks("list", "tasks"));
        };
        tasks
            .into_iter()
            .map(|task| {
                let task: WireTask = serde_json::from_value(task).map_err(|e| self.odd("list", &e))?;
                Ok(task.into_spec(&self.launch.env, split))
            })
            .collect()
    }

    fn lacks(&self, op: &str, field: &str) -> EnvError {
        EnvError::Protocol { env: self.launch.env.clone(), op: op.into(), detail: format!("no field `{field}`") }
    }

    fn odd(&self, op: &str, error: &serde_json::Error) -> EnvError {
        EnvError::Protocol { env: self.launch.env.clone(), op: op.into(), detail: error.to_string() }
    }

    /// An idle process that still lives, or a new one.
    fn lease(self: &Arc<Pool>) -> Result<Lease, EnvError> {
        loop {
            let Some(mut process) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop() else { break };
            if process.alive() {
                return Ok(Lease { pool: Arc::clone(self), process: Some(process), fresh: false });
            }
            // It died while nobody looked (e.g. out of memory): no episode is hurt.
            self.alive.fetch_sub(1, Ordering::SeqCst);
        }
        if self.alive.fetch_add(1, Ordering::SeqCst) >= self.bounds.max_workers {
            self.alive.fetch_sub(1, Ordering::SeqCst);
            return Err(EnvError::Refused {
                env: self.launch.env.clone(),
                op: "start".into(),
                kind: "too_many_workers".into(),
                message: format!("{} worker processes are already alive", self.bounds.max_workers),
            });
        }
        match Process::start(&self.launch) {
            Ok(process) => Ok(Lease { pool: Arc::clone(self), process: Some(process), fresh: true }),
            Err(error) => {
                self.alive.fetch_sub(1, Ordering::SeqCst);
                Err(error)
            }
        }
    }
}

/// A process checked out of the pool. Dropped as it is, the process is killed; [`Lease::settle`] first
/// decides that it may return.
#[derive(Debug)]
struct Lease {
    pool: Arc<Pool>,
    process: Option<Process>,
    fresh: bool,
}

impl Lease {
    /// One operation. The process is out of the lease meanwhile, so that a panic cannot return it.
    fn ask(&mut self, op: &str, request: Map<String, Value>, deadline_ms: u64) -> Result<Map<String, Value>, EnvError> {
        let Some(process) = self.process.as_mut() else {
            return Err(EnvError::Died {
                env: self.pool.launch.env.clone(),
                op: op.into(),
                detail: "the worker was killed after an earlier error; reset first".into(),
            });
        };
        let deadline_ms = if self.fresh { deadline_ms.max(self.pool.bounds.start_ms) } else { deadline_ms };
        let answer = process.ask(op, request, deadline_ms);
        self.fresh = false;
        if answer.as_ref().is_err_and(fatal) {
            self.discard();
        }
        answer
    }

    fn discard(&mut self) {
        if self.process.take().is_some() {
            self.pool.alive.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Gives a healthy process back to the pool.
    fn settle(&mut self, error: Option<&EnvError>) {
        if error.is_some_and(fatal) {
            return self.discard();
        }
        if let Some(process) = self.process.take() {
            self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.discard();
    }
}

/// Errors after which a worker cannot be trusted any more.
fn fatal(error: &EnvError) -> bool {
    matches!(error, EnvError::Deadline { .. } | EnvError::Died { .. } | EnvError::Protocol { .. })
}

/// One episode in a worker process.
#[derive(Debug)]
pub struct WorkerSession {
    pool: Arc<Pool>,
    lease: Option<Lease>,
    episode: String,
}

impl WorkerSession {
    fn ask(
        &mut self,
        op: &str,
        mut request: Map<String, Value>,
        deadline_ms: u64,
    ) -> Result<Map<String, Value>, EnvError> {
        request.insert("episode".into(), self.episode.clone().into());
        match self.lease.as_mut() {
            Some(lease) => lease.ask(op, request, deadline_ms),
            None => Err(EnvError::Refused {
                env: self.pool.launch.env.clone(),
                op: op.into(),
                kind: "no_episode".into(),
                message: "reset first".into(),
            }),
        }
    }

    fn read<T: serde::de::DeserializeOwned>(&mut self, op: &str, reply: Map<String, Value>) -> Result<T, EnvError> {
        serde_json::from_value(Value::Object(reply)).map_err(|e| self.broken(op, e.to_string()))
    }

    /// The answer was well-formed but not what the protocol says: the worker cannot be trusted any more.
    fn broken(&mut self, op: &str, detail: String) -> EnvError {
        if let Some(lease) = self.lease.as_mut() {
            lease.discard();
        }
        EnvError::Protocol { env: self.pool.launch.env.clone(), op: op.into(), detail }
    }

    /// Operating-system id of its worker process, for diagnostics.
    pub fn worker_id(&self) -> Option<u32> {
        Some(self.lease.as_ref()?.process.as_ref()?.id())
    }

    /// The worker's whole judgement (checks, error type), for reports; [`Session::evaluate`] is the score.
    /// `reference` replaces the task's own solution: calls per turn.
    pub fn evaluate_detailed(&mut self, reference: Option<&[Vec<ToolCall>]>) -> Result<Value, EnvError> {
        let mut request = Map::new();
        if let Some(turns) = reference {
            let turns: Vec<Value> = turns.iter().map(|calls| wire_calls(calls)).collect();
            request.insert("reference".into(), turns.into());
        }
        let deadline_ms = self.pool.bounds.evaluate_ms;
        Ok(Value::Object(self.ask("evaluate", request, deadline_ms)?))
    }
}

impl Drop for WorkerSession {
    fn drop(&mut self) {
        // While unwinding a request may be half way: its late answer must not reach the next session.
        if let Some(mut lease) = self.lease.take()
            && !std::thread::panicking()
        {
            lease.settle(None);
        }
    }
}

impl Session for WorkerSession {
    fn reset(&mut self, task: &TaskSpec, episode: &str, seed: u64) -> Result<Opening, EnvError> {
        self.episode = episode.to_owned();
        let task = serde_json::to_value(task).map_err(|e| self.pool.odd("reset", &e))?;
        let request = object(json!({ "task": task, "seed": seed }));
        let deadline_ms = self.pool.bounds.reset_ms;
        // A process that died or was killed is replaced here and only here.
        if self.lease.as_mut().and_then(|l| l.process.as_mut()).is_none_or(|p| !p.alive()) {
            self.lease = None;
            self.lease = Some(self.pool.lease()?);
        }
        let used = self.lease.as_ref().is_some_and(|l| !l.fresh);
        let mut answer = self.ask("reset", request.clone(), deadline_ms);
        if used && matches!(answer, Err(EnvError::Died { .. } | EnvError::Protocol { .. })) {
            // An earlier episode left the process in a bad way (e.g. a second answer still in the pipe).
            // Nothing of this episode has happened yet, so a fresh one may try again.
            self.lease = None;
            self.lease = Some(self.pool.lease()?);
            answer = self.ask("reset", request, deadline_ms);
        }
        let reply = answer?;
        #[derive(serde::Deserialize)]
        struct Wire {
            messages: Vec<Message>,
            tools: Vec<ToolDef>,
            turns: u32,
            step_limit: u32,
        }
        let wire: Wire = self.read("reset", reply)?;
        Ok(Opening { messages: wire.messages, tools: wire.tools, turns: wire.turns, step_limit: wire.step_limit })
    }

    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        let deadline_ms = self.pool.bounds.step_ms;
        let reply = self.ask("step", object(json!({ "calls": wire_calls(calls) })), deadline_ms)?;
        #[derive(serde::Deserialize)]
        struct Wire {
            results: Vec<ToolResult>,
            done: bool,
        }
        let wire: Wire = self.read("step", reply)?;
        if wire.results.len() != calls.len() {
            let detail = format!("{} results for {} calls", wire.results.len(), calls.len());
            return Err(self.broken("step", detail));
        }
        Ok(StepReply { results: wire.results, done: wire.done })
    }

    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        let deadline_ms = self.pool.bounds.step_ms;
        let reply = self.ask("end_turn", object(json!({ "say": say })), deadline_ms)?;
        #[derive(serde::Deserialize)]
        struct Wire {
            messages: Vec<Message>,
            released: Vec<ToolDef>,
            done: bool,
        }
        let wire: Wire = self.read("end_turn", reply)?;
        Ok(TurnReply { messages: wire.messages, released: wire.released, done: wire.done })
    }

    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        let reply = self.evaluate_detailed(None)?;
        if let Some(reason) = reply.get("unscored").and_then(Value::as_str) {
            return Ok(Reward::Unscored(reason.to_owned()));
        }
        match reply.get("score").and_then(Value::as_f64) {
            Some(score) if (0.0..=1.0).contains(&score) => {
                self.pool.count_figures(&reply);
                Ok(Reward::Scored(score))
            }
            _ => Err(self.broken("evaluate", "neither `unscored` nor a `score` in [0, 1]".into())),
        }
    }

    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        let deadline_ms = self.pool.bounds.step_ms;
        let reply = self.ask("state_digest", Map::new(), deadline_ms)?;
        match reply.get("digest") {
            None | Some(Value::Null) => Ok(None),
            Some(digest) => match digest.as_str().map(blake3::Hash::from_hex) {
                Some(Ok(hash)) => Ok(Some(*hash.as_bytes())),
                _ => Err(self.broken("state_digest", "a digest is 64 hex digits".into())),
            },
        }
    }
}

/// Any worker that speaks the protocol, as an environment.
#[derive(Debug)]
pub struct StdioEnv {
    pool: Arc<Pool>,
    description: Description,
}

impl StdioEnv {
    /// Starts one worker and asks what it is.
    pub fn open(launch: Launch, bounds: Bounds) -> Result<StdioEnv, EnvError> {
        let pool = Pool::new(launch, bounds);
        let description = pool.describe()?;
        Ok(StdioEnv { pool, description })
    }

    /// Its worker processes.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// What the worker said about itself.
    pub fn description(&self) -> &Description {
        &self.description
    }
}

impl Environment for StdioEnv {
    fn name(&self) -> &str {
        &self.description.name
    }

    fn version(&self) -> String {
        self.description.version.clone()
    }

    fn splits(&self) -> Vec<String> {
        self.description.splits.clone()
    }

    fn tasks(&self, split: &str, _seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        if !self.description.splits.iter().any(|s| s == split) {
            return Err(EnvError::Unknown {
                env: self.name().into(),
                what: format!("split `{split}`"),
                known: self.description.splits.join(", "),
            });
        }
        let mut tasks = self.pool.list(split)?;
        tasks.truncate(limit);
        Ok(tasks)
    }

    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(self.pool.session()))
    }

    fn max_sessions(&self) -> Option<usize> {
        Some(self.pool.bounds.sessions())
    }

    fn figures(&self) -> Vec<Figure> {
        self.pool.figures()
    }

    /// The initial state of a task of the first split.
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        if let Some(near) = near {
            return Ok(bare(near.clone()));
        }
        let split = self.description.splits.first().map(String::as_str).unwrap_or_default();
        let tasks = self.tasks(split, seed, usize::MAX)?;
        match draw(seed, "playground", &[]).pick(&tasks) {
            Some(task) => Ok(bare(task.clone())),
            None => Err(EnvError::Unknown {
                env: self.name().into(),
                what: format!("any task of split `{split}`"),
                known: "none".into(),
            }),
        }
    }
}

/// A task's initial state alone, marked so that the worker plays no official turns.
pub fn bare(task: TaskSpec) -> TaskSpec {
    TaskSpec { id: format!("playground-{}", task.base), split: PLAYGROUND.into(), turns: Vec::new(), ..task }
}

/// [`TaskSpec::split`] of an initial state without turns.
pub const PLAYGROUND: &str = "playground";

/// A task as `list` sends it.
#[derive(serde::Deserialize)]
struct WireTask {
    id: String,
    #[serde(default)]
    base: Option<String>,
    #[serde(default)]
    family: String,
    #[serde(default)]
    tools: Vec<String>,
    #[serde(default)]
    turns: Vec<WireTurn>,
}

#[derive(serde::Deserialize)]
struct WireTurn {
    query: String,
    #[serde(default)]
    solution: Vec<WireCall>,
    #[serde(default)]
    answer: Option<String>,
}

#[derive(serde::Deserialize)]
struct WireCall {
    name: String,
    arguments: Value,
}

impl WireTask {
    fn into_spec(self, env: &str, split: &str) -> TaskSpec {
        let turns = self.turns.into_iter().map(|t| TurnSpec {
            query: t.query,
            solution: t
                .solution
                .into_iter()
                .map(|c| ToolCall { name: c.name, arguments: canonical_json(&c.arguments) })
                .collect(),
            answer: t.answer,
            missing: None,
        });
        TaskSpec {
            base: self.base.unwrap_or_else(|| self.id.clone()),
            id: self.id,
            env: env.into(),
            split: split.into(),
            family: self.family,
            tools: self.tools,
            turns: turns.collect(),
        }
    }
}

/// Calls as the worker reads them. Arguments that are no JSON go as their text: the worker answers with an
/// error result, which is the agent's to read.
fn wire_calls(calls: &[ToolCall]) -> Value {
    calls
        .iter()
        .map(|c| {
            let arguments =
                serde_json::from_str::<Value>(&c.arguments).unwrap_or_else(|_| Value::String(c.arguments.clone()));
            json!({ "name": c.name, "arguments": arguments })
        })
        .collect()
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
