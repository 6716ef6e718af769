//! A stand-in policy for tests of the loop: no model, but rollouts that rise and fall like one's.
//!
//! It knows each task's solution and follows it with a probability that depends on the task's family
//! and on a version number; otherwise it errs in one of the ways that models do. Per family:
//!
//! * competence starts anywhere in [0, 0.6) and grows by `gain` per version, so groups are mixed
//!   (boundary) and later solved;
//! * in about one of eight (family, version) pairs competence drops by 0.5 (forgetting);
//! * one of twelve rollouts looks something up first that it did not need (rare patterns).
//!
//! Everything is a function of (seed, version, rollout key): equal runs give equal records. Token ids
//! are bytes; log-probs are drawn from (-1.5, 0], so losses and masks have something to work with.

use std::sync::Arc;

use super::baseline::random_call;
use super::dialect::{ByteDialect, Dialect};
use super::episode::Episode;
use super::hands::Hands;
use super::puppet::{self, Mind, Utterance};
use super::{Agent, AgentError, EpisodeJob, EpisodeRecord, Limits, PlayStats};
use crate::event::{ToolCall, TurnSpec};
use crate::world::{Draw, draw};

/// The stand-in policy; see the module documentation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScriptedAgent {
    /// Policy version that it pretends to be, from 0.
    pub version: u32,
    /// Competence gained per version.
    pub gain: f64,
}

impl ScriptedAgent {
    /// Competence gained per version by default.
    pub const GAIN: f64 = 0.03;

    /// The stand-in at a version.
    pub fn new(version: u32) -> ScriptedAgent {
        ScriptedAgent { version, gain: ScriptedAgent::GAIN }
    }

    /// Probability of following the solution of a task of this family, in [0, 1]. Families of an
    /// environment without labels are told apart by task id.
    pub fn competence(&self, seed: u64, family: &str) -> f64 {
        let start = draw(seed, "scripted family", &[family]).unit() * 0.6;
        let lapse = draw(seed, "scripted lapse", &[family, &self.version.to_string()]).chance(0.125);
        let dip = if lapse && self.version > 0 { 0.5 } else { 0.0 };
        (start + self.gain * f64::from(self.version) - dip).clamp(0.0, 1.0)
    }

    fn mind(&self, job: &EpisodeJob) -> Result<Box<dyn Mind>, AgentError> {
        let family = if job.task.family.is_empty() { &job.task.id } else { &job.task.family };
        let k = &job.key;
        let version = self.version.to_string();
        let mut draw = draw(
            job.seed,
            "scripted",
            &[&version, &k.step.to_string(), &k.task, &k.draw.to_string(), &k.k.to_string()],
        );
        let right = draw.chance(self.competence(job.seed, family));
        let error = if right { None } else { Some(draw.below(4)) };
        let detour = draw.below(12) == 0;
        Ok(Box::new(Script { turns: job.task.turns.clone(), at: 0, asked: false, plan: None, error, detour, draw }))
    }
}

impl Agent for ScriptedAgent {
    fn name(&self) -> &str {
        "scripted"
    }

    fn play(
        &self,
        hands: &mut dyn Hands,
        jobs: &[EpisodeJob],
        limits: &Limits,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<PlayStats, AgentError> {
        let dialect: Arc<dyn Dialect> = Arc::new(ByteDialect);
        puppet::play(&|job| self.mind(job), &dialect, hands, jobs, limits, done)
    }
}

struct Script {
    turns: Vec<TurnSpec>,
    at: usize,
    asked: bool,
    plan: Option<Vec<ToolCall>>,
    /// 0: leaves out the last call, 1: does not ask and does nothing of the turn, 2: gives up halfway,
    /// 3: writes a malformed call and ends.
    error: Option<usize>,
    detour: bool,
    draw: Draw,
}

impl Script {
    /// Whether the mistake, if any, happens in this turn: the last one.
    fn errs_now(&self) -> Option<usize> {
        if self.at + 1 == self.turns.len() { self.error } else { None }
    }

    fn plan(&mut self, turn: &TurnSpec, episode: &Episode) -> Vec<ToolCall> {
        let mut calls = turn.solution.clone();
        match self.errs_now() {
            Some(0) => {
                calls.pop();
            }
            Some(1) => calls.clear(),
            Some(2) => calls.truncate(calls.len() / 2),
            _ => {}
        }
        if std::mem::take(&mut self.detour) {
            // Lookups change nothing, so a detour does not cost the reward.
            let lookups: Vec<_> = episode.tools().iter().filter(|t| is_lookup(&t.name)).collect();
            if let Some(tool) = self.draw.pick(&lookups) {
                calls.insert(0, random_call(tool, &["x".to_string()], &mut self.draw));
            }
        }
        calls.reverse();
        calls
    }
}

fn is_lookup(name: &str) -> bool {
    name.split('_')
        .any(|part| matches!(part, "get" | "find" | "list" | "read" | "search" | "lookup" | "next" | "latest" | "head"))
}

impl Mind for Script {
    fn speak(&mut self, episode: &Episode) -> Utterance {
        let Some(turn) = self.turns.get(self.at).cloned() else { return Utterance::words("Done.") };
        let errs = self.errs_now();
        if let (Some(missing), false, false) = (&turn.missing, self.asked, errs == Some(1)) {
            self.asked = true;
            return Utterance::words(format!("What is the {}?", missing.field));
        }
        if self.plan.is_none() {
            if errs == Some(3) {
                self.error = Some(1);
                return Utterance::words("<tool_call>\n{\"name\": \n</tool_call>");
            }
            self.plan = Some(self.plan(&turn, episode));
        }
        if let Some(call) = self.plan.as_mut().and_then(Vec::pop) {
            return Utterance::calls(vec![call]);
        }
        self.at += 1;
        self.asked = false;
        self.plan = None;
        if errs.is_some() {
            return Utterance::words("Okay.");
        }
        Utterance::words(turn.answer.unwrap_or_else(|| "Done.".to_string()))
    }

    fn logprob(&mut self) -> f32 {
        (-1.5 * self.draw.unit()) as f32
    }
}
