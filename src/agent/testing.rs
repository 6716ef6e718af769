//! A small environment, a deterministic network and unreliable hands for the tests of this room.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::dialect::{ByteDialect, written};
use super::engine::{Decode, Policy};
use super::hands::{Hands, Op, Reply};
use super::{AgentError, EpisodeJob, EpisodeRecord, Sampling};
use crate::env::*;
use crate::event::{Missing, Reward, RolloutKey, TaskSpec, ToolCall, TurnSpec};
use crate::world::{Draw, draw};

pub fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { name: name.into(), arguments: arguments.into() }
}

pub fn tool(name: &str) -> ToolDef {
    ToolDef {
        name: name.into(),
        description: format!("{name} something"),
        parameters: serde_json::json!({"type":"object","required":["a"],
            "properties":{"a":{"type":"integer"},"b":{"type":"string","enum":["x","y"]}}}),
    }
}

/// Two turns: `put 3` with a question about `day` first, then answer `seven`.
pub fn task(id: &str) -> TaskSpec {
    let turn = |query: &str, answer: Option<&str>, missing: Option<Missing>, a: u32| TurnSpec {
        query: query.into(),
        solution: vec![call("get", &format!("{{\"a\":{a}}}")), call("put", &format!("{{\"a\":{a}}}"))],
        answer: answer.map(str::to_string),
        missing,
    };
    let missing = Missing { field: "day".into(), reply: "monday".into() };
    TaskSpec {
        id: id.into(),
        env: "toy".into(),
        split: "train".into(),
        family: format!("family {id}"),
        base: String::new(),
        tools: Vec::new(),
        turns: vec![turn("put three", None, Some(missing), 3), turn("say it", Some("seven"), None, 4)],
    }
}

pub fn job(id: &str, k: u32, group: usize) -> EpisodeJob {
    EpisodeJob {
        task: task(id),
        key: RolloutKey { step: 1, task: id.into(), draw: 0, k },
        group,
        sampling: Sampling::at(1.0),
        seed: 11,
        label: "train".into(),
    }
}

/// What a toy does wrong: fails the n-th operation (reset = 0) of the episode with this label.
#[derive(Clone, Default)]
pub struct Toy {
    pub fail: Option<(String, usize)>,
    pub result: String,
    pub step_limit: u32,
    pub release: bool,
    pub score: Option<f64>,
    /// Partial credit: a quarter each for asking, both puts and the answer.
    pub graded: bool,
}

pub fn toy() -> Toy {
    Toy { fail: None, result: "{\"ok\":1}".into(), step_limit: 30, release: false, score: None, graded: false }
}

impl Environment for Toy {
    fn name(&self) -> &str {
        "toy"
    }
    fn version(&self) -> String {
        "1".into()
    }
    fn splits(&self) -> Vec<String> {
        vec!["train".into()]
    }
    fn tasks(&self, _: &str, _: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        Ok((0..limit).map(|i| task(&format!("t{i}"))).collect())
    }
    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(ToySession { toy: self.clone(), ..ToySession::default() }))
    }
    fn playground(&self, _: Option<&TaskSpec>, _: u64) -> Result<TaskSpec, EnvError> {
        Ok(task("p"))
    }
}

#[derive(Default)]
struct ToySession {
    toy: Toy,
    task: Option<TaskSpec>,
    episode: String,
    ops: usize,
    turn: usize,
    asked: bool,
    puts: Vec<String>,
    answers: Vec<String>,
}

impl ToySession {
    fn op(&mut self, name: &str) -> Result<(), EnvError> {
        self.ops += 1;
        match &self.toy.fail {
            Some((episode, n)) if *episode == self.episode && *n + 1 == self.ops => {
                Err(EnvError::Deadline { env: "toy".into(), op: name.into(), after_ms: 5 })
            }
            _ => Ok(()),
        }
    }
    fn spec(&self) -> TaskSpec {
        self.task.clone().unwrap()
    }
}

impl Session for ToySession {
    fn reset(&mut self, task: &TaskSpec, episode: &str, _: u64) -> Result<Opening, EnvError> {
        let toy = self.toy.clone();
        *self = ToySession { toy, task: Some(task.clone()), episode: episode.into(), ..ToySession::default() };
        self.op("reset")?;
        Ok(Opening {
            messages: vec![
                Message { role: Role::System, content: "Office.".into() },
                Message { role: Role::User, content: task.turns[0].query.clone() },
            ],
            tools: vec![tool("get"), tool("put")],
            turns: 2,
            step_limit: self.toy.step_limit,
        })
    }
    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        self.op("step")?;
        let results = calls
            .iter()
            .map(|c| {
                if c.name == "put" {
                    self.puts.push(c.arguments.clone());
                }
                ToolResult { content: self.toy.result.clone(), is_error: false }
            })
            .collect();
        Ok(StepReply { results, done: false })
    }
    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        self.op("end_turn")?;
        let user = |text: &str| vec![Message { role: Role::User, content: text.into() }];
        let spec = self.spec();
        let turn = &spec.turns[self.turn];
        if let (Some(missing), false) = (&turn.missing, self.asked)
            && say.contains(&missing.field)
        {
            self.asked = true;
            return Ok(TurnReply { messages: user(&missing.reply), released: vec![], done: false });
        }
        self.answers.push(say.into());
        self.turn += 1;
        let done = self.turn == spec.turns.len();
        let released = if self.toy.release && !done { vec![tool("late")] } else { vec![] };
        let messages = if done { vec![] } else { user(&spec.turns[self.turn].query) };
        Ok(TurnReply { messages, released, done })
    }
    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        self.op("evaluate")?;
        let right =
            self.asked && self.puts == ["{\"a\":3}", "{\"a\":4}"] && self.answers.last().is_some_and(|a| a == "seven");
        if self.toy.graded {
            let has = |a: &str| self.puts.iter().any(|p| p == a);
            let parts =
                [self.asked, has("{\"a\":3}"), has("{\"a\":4}"), self.answers.last().is_some_and(|a| a == "seven")];
            return Ok(Reward::Scored(parts.iter().filter(|p| **p).count() as f64 / 4.0));
        }
        Ok(Reward::Scored(self.toy.score.unwrap_or(f64::from(u8::from(right)))))
    }
    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        Ok(None)
    }
}

/// Logits are noise from a hash of the whole sequence plus a strong pull towards canned replies, so that
/// episodes contain questions, calls, broken calls and answers.
pub struct FakePolicy {
    pub salt: u64,
    pub max_context: usize,
}

impl Policy for FakePolicy {
    fn open(&self) -> Box<dyn Decode + '_> {
        let canned = vec![
            written(&[call("put", "{\"a\":3}")]),
            written(&[call("get", "{\"a\":4}"), call("put", "{\"a\":4}")]),
            b"What is the day?".to_vec(),
            b"seven".to_vec(),
            b"<tool_call>{</tool_call>".to_vec(),
        ];
        Box::new(FakeNet { salt: self.salt, canned, sequences: BTreeMap::new(), next: 0 })
    }
    fn max_context(&self) -> usize {
        self.max_context
    }
}

struct FakeNet {
    salt: u64,
    canned: Vec<Vec<u8>>,
    sequences: BTreeMap<usize, Vec<u32>>,
    next: usize,
}

impl Drop for FakeNet {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.sequences.is_empty(), "{} sequences were never freed", self.sequences.len());
        }
    }
}

impl FakeNet {
    fn add(&mut self, ids: Vec<u32>) -> usize {
        self.next += 1;
        self.sequences.insert(self.next, ids);
        self.next
    }

    fn logits(&self, ids: &[u32]) -> Vec<f32> {
        let mut hash = self.salt ^ 0xcbf2_9ce4_8422_2325;
        for id in ids {
            hash = (hash ^ u64::from(*id)).wrapping_mul(0x0100_0000_01b3);
        }
        let mut noise = draw(hash, "fake", &[]);
        let mut logits: Vec<f32> = (0..ByteDialect::VOCAB).map(|_| noise.unit() as f32 * 2.0).collect();
        let start = ids.iter().rposition(|&id| id == 259).map_or(0, |at| at + 1);
        let reply: Vec<u8> = ids[start..].iter().map(|&id| id as u8).collect();
        let mut known = false;
        for canned in self.canned.iter().filter(|c| c.starts_with(&reply)) {
            known = true;
            let next = canned.get(reply.len()).map_or(ByteDialect::END, |b| u32::from(*b));
            logits[next as usize] = 13.0;
        }
        if !known {
            logits[ByteDialect::END as usize] += 9.0;
        }
        logits
    }
}

impl Decode for FakeNet {
    fn vocab(&self) -> usize {
        ByteDialect::VOCAB
    }
    fn create(&mut self) -> Result<usize, AgentError> {
        Ok(self.add(Vec::new()))
    }
    fn fork(&mut self, sequence: usize) -> Result<usize, AgentError> {
        let ids = self.sequences[&sequence].clone();
        Ok(self.add(ids))
    }
    fn free(&mut self, sequence: usize) {
        self.sequences.remove(&sequence).unwrap();
    }
    fn forward(&mut self, work: &[(usize, &[u32])], logits: &mut Vec<f32>) -> Result<(), AgentError> {
        logits.clear();
        for (sequence, ids) in work {
            assert!(!ids.is_empty());
            self.sequences.get_mut(sequence).unwrap().extend_from_slice(ids);
            logits.extend(self.logits(&self.sequences[sequence]));
        }
        Ok(())
    }
}

/// Hands that withhold replies and give them in another order, as slow environments do.
pub struct LateHands<H> {
    pub inner: H,
    pub draw: Draw,
    pub held: VecDeque<(usize, Reply)>,
}

impl<H: Hands> LateHands<H> {
    pub fn new(inner: H, seed: u64) -> LateHands<H> {
        LateHands { inner, draw: draw(seed, "late", &[]), held: VecDeque::new() }
    }
}

impl<H: Hands> Hands for LateHands<H> {
    fn submit(&mut self, slot: usize, op: Op) -> Result<(), AgentError> {
        self.inner.submit(slot, op)
    }
    fn wait(&mut self, block: bool) -> Result<Vec<(usize, Reply)>, AgentError> {
        self.held.extend(self.inner.wait(block)?);
        self.draw.shuffle(self.held.make_contiguous());
        let n = self.draw.below(self.held.len() + 1).max(usize::from(block)).min(self.held.len());
        Ok(self.held.drain(..n).collect())
    }
}

/// A record without its durations.
pub fn facts(mut record: EpisodeRecord) -> EpisodeRecord {
    record.sampling_us = 0;
    record.environment_us = 0;
    record
}

/// Plays jobs and returns the records in job order, durations removed.
pub fn play(
    agent: &dyn super::Agent,
    toy: &Toy,
    jobs: &[EpisodeJob],
    limits: &super::Limits,
) -> (Vec<EpisodeRecord>, super::PlayStats) {
    let mut hands = super::InlineHands::new(Arc::new(toy.clone()));
    play_with(agent, &mut hands, jobs, limits)
}

pub fn play_with(
    agent: &dyn super::Agent,
    hands: &mut dyn Hands,
    jobs: &[EpisodeJob],
    limits: &super::Limits,
) -> (Vec<EpisodeRecord>, super::PlayStats) {
    let mut records: Vec<Option<EpisodeRecord>> = vec![None; jobs.len()];
    let stats = agent
        .play(hands, jobs, limits, &mut |i, r| assert!(records[i].replace(facts(r)).is_none(), "{i} finished twice"))
        .unwrap();
    (records.into_iter().map(Option::unwrap).collect(), stats)
}
