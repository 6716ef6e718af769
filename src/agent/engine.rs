//! The policy agent: continuous batching over many episodes.
//!
//! Every round collects what all episodes need (prompts and environment tokens as longer items, sampled
//! tokens as items of one), makes one forward pass and samples. Episodes that wait for an environment
//! do not hold up the others. The K episodes of a group have their prompt computed once: its logits give
//! each first token, its cache is forked.
//!
//! Why the result of an episode depends on nothing but its job: the split of its tokens over forward
//! passes is a function of the episode alone (prompt, then reply tokens one by one, then stop token plus
//! environment tokens, each in pieces of `prefill_chunk`), the network is batch-invariant, and the n-th
//! token takes the n-th value of the episode's own stream.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::episode::{Episode, Next};
use super::hands::{Hands, Op, Reply};
use super::sample::Chooser;
use super::{Agent, AgentError, Dialect, EpisodeJob, EpisodeRecord, Limits, PlayStats};
use crate::world::{Draw, Stopwatch};

/// A network with its cache of sequences, owned by one engine on one thread.
pub trait Decode {
    /// Number of logits.
    fn vocab(&self) -> usize;
    /// Opens an empty sequence.
    fn create(&mut self) -> Result<usize, AgentError>;
    /// Opens a sequence that continues `sequence`; the common part is not computed again.
    fn fork(&mut self, sequence: usize) -> Result<usize, AgentError>;
    /// Forgets a sequence.
    fn free(&mut self, sequence: usize);
    /// Appends each item's tokens to its sequence and writes the logits after the last token of each
    /// item to `logits`, row by row (`work.len() * vocab`). A row depends on its own sequence only.
    fn forward(&mut self, work: &[(usize, &[u32])], logits: &mut Vec<f32>) -> Result<(), AgentError>;
    /// Bytes of keys and values held now.
    fn cache_bytes(&self) -> usize {
        0
    }
}

/// Immutable weights from which every engine opens its own cache.
pub trait Policy: Send + Sync {
    /// A fresh cache.
    fn open(&self) -> Box<dyn Decode + '_>;
    /// Longest context the network accepts.
    fn max_context(&self) -> usize;
}

/// Plays episodes by sampling from a policy.
pub struct PolicyAgent {
    name: String,
    policy: Arc<dyn Policy>,
    dialect: Arc<dyn Dialect>,
}

impl PolicyAgent {
    /// An agent on these weights, speaking this dialect.
    pub fn new(name: &str, policy: Arc<dyn Policy>, dialect: Arc<dyn Dialect>) -> PolicyAgent {
        PolicyAgent { name: name.to_string(), policy, dialect }
    }

    /// The weights.
    pub fn policy(&self) -> &Arc<dyn Policy> {
        &self.policy
    }

    /// The dialect.
    pub fn dialect(&self) -> &Arc<dyn Dialect> {
        &self.dialect
    }
}

impl Agent for PolicyAgent {
    fn name(&self) -> &str {
        &self.name
    }

    fn play(
        &self,
        hands: &mut dyn Hands,
        jobs: &[EpisodeJob],
        limits: &Limits,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<PlayStats, AgentError> {
        let watch = Stopwatch::start();
        for job in jobs {
            check(job)?;
        }
        let mut limits = *limits;
        limits.context_tokens = limits.context_tokens.min(self.policy.max_context());
        let mut engine = Engine {
            net: self.policy.open(),
            dialect: &self.dialect,
            hands,
            jobs,
            limits,
            slots: BTreeMap::new(),
            prompts: BTreeMap::new(),
            members: BTreeMap::new(),
            chooser: Chooser::default(),
            logits: Vec::new(),
            stats: PlayStats::default(),
        };
        for job in jobs {
            *engine.members.entry(job.group).or_insert(0) += 1;
        }
        let result = engine.run(done);
        let mut stats = engine.stats;
        stats.total_us = watch.micros();
        result.map(|()| stats)
    }
}

fn check(job: &EpisodeJob) -> Result<(), AgentError> {
    match job.sampling.fault() {
        Some(what) => Err(AgentError::Job { episode: job.episode(), what }),
        None => Ok(()),
    }
}

/// An episode in flight.
struct Slot {
    episode: Episode,
    draw: Draw,
    /// Its sequence, once it has been forked from the prompt.
    sequence: Option<usize>,
    /// Tokens of the episode that are in its sequence.
    cached: usize,
    /// Whether a token is to be sampled (else the environment works).
    sampling: bool,
}

/// A prompt that several episodes share.
struct Prompt {
    ids: Vec<u32>,
    sequence: usize,
    cached: usize,
    /// Logits after the last prompt token, once computed.
    logits: Option<Vec<f32>>,
    /// Slots that wait for them.
    waiting: Vec<usize>,
}

/// Who a forward pass works for.
enum Item {
    Prompt(usize, usize),
    Slot(usize),
}

struct Engine<'a> {
    net: Box<dyn Decode + 'a>,
    dialect: &'a Arc<dyn Dialect>,
    hands: &'a mut dyn Hands,
    jobs: &'a [EpisodeJob],
    limits: Limits,
    slots: BTreeMap<usize, Slot>,
    /// Prompts per group; one each unless an environment opens equal tasks differently.
    prompts: BTreeMap<usize, Vec<Prompt>>,
    /// Jobs per group whose opening has not come yet.
    members: BTreeMap<usize, usize>,
    chooser: Chooser,
    logits: Vec<f32>,
    stats: PlayStats,
}

impl Engine<'_> {
    fn run(&mut self, done: &mut dyn FnMut(usize, EpisodeRecord)) -> Result<(), AgentError> {
        let mut queue: VecDeque<usize> = (0..self.jobs.len()).collect();
        loop {
            while self.slots.len() < self.limits.concurrent.max(1) {
                let Some(index) = queue.pop_front() else { break };
                self.admit(index)?;
            }
            if self.slots.is_empty() {
                return Ok(());
            }
            let busy = self.slots.values().any(|s| s.sampling);
            let watch = Stopwatch::start();
            let replies = self.hands.wait(!busy)?;
            if !busy {
                self.stats.wait_us += watch.micros();
                if replies.is_empty() {
                    return Err(AgentError::Hands("no reply came although episodes wait for one".to_string()));
                }
            }
            for (index, reply) in replies {
                self.answered(index, reply, done)?;
            }
            self.forward(done)?;
        }
    }

    fn admit(&mut self, index: usize) -> Result<(), AgentError> {
        let job = self.jobs[index].clone();
        let draw = job.draw("sample");
        let mut episode = Episode::new(job, self.limits, self.dialect.clone());
        let op = episode.start();
        self.slots.insert(index, Slot { episode, draw, sequence: None, cached: 0, sampling: false });
        self.hands.submit(index, op)
    }

    fn answered(
        &mut self,
        index: usize,
        reply: Reply,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<(), AgentError> {
        let Some(slot) = self.slots.get_mut(&index) else {
            return Err(AgentError::Hands(format!("a reply came for slot {index}, which has no episode")));
        };
        let opened = slot.episode.opening().is_none();
        let next = slot.episode.reply(reply)?;
        let sampling = next == Next::Token;
        slot.sampling = sampling;
        if sampling && !opened {
            self.stats.kept_tokens += slot.cached as u64;
        }
        let group = slot.episode.job().group;
        if opened {
            if let Some(left) = self.members.get_mut(&group) {
                *left = left.saturating_sub(1);
            }
            if sampling {
                return self.join_prompt(group, index, done);
            }
        }
        self.follow(index, next, done)?;
        if opened {
            self.release_prompts(group);
        }
        Ok(())
    }

    /// Puts a freshly opened episode behind its group's prompt.
    fn join_prompt(
        &mut self,
        group: usize,
        index: usize,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<(), AgentError> {
        let Some(slot) = self.slots.get(&index) else { return Ok(()) };
        let prompts = self.prompts.entry(group).or_default();
        match prompts.iter_mut().position(|p| p.ids == slot.episode.ids()) {
            Some(at) => {
                self.stats.shared_tokens += prompts[at].ids.len() as u64;
                prompts[at].waiting.push(index);
                if prompts[at].logits.is_some() {
                    self.serve_prompt(group, at, done)?;
                }
            }
            None => {
                let ids = slot.episode.ids().to_vec();
                let sequence = self.net.create()?;
                prompts.push(Prompt { ids, sequence, cached: 0, logits: None, waiting: vec![index] });
            }
        }
        self.release_prompts(group);
        Ok(())
    }

    /// Forks the prompt for everyone who waits for it and samples their first tokens.
    fn serve_prompt(
        &mut self,
        group: usize,
        at: usize,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<(), AgentError> {
        let Some(prompt) = self.prompts.get_mut(&group).and_then(|p| p.get_mut(at)) else { return Ok(()) };
        let waiting = std::mem::take(&mut prompt.waiting);
        let Some(logits) = prompt.logits.take() else { return Ok(()) };
        let (sequence, len) = (prompt.sequence, prompt.ids.len());
        for index in waiting {
            if let Some(slot) = self.slots.get_mut(&index) {
                slot.sequence = Some(self.net.fork(sequence)?);
                slot.cached = len;
            }
            self.choose(index, &logits, done)?;
        }
        if let Some(prompt) = self.prompts.get_mut(&group).and_then(|p| p.get_mut(at)) {
            prompt.logits = Some(logits);
        }
        Ok(())
    }

    /// Frees a group's prompts once nobody can come for them any more.
    fn release_prompts(&mut self, group: usize) {
        if self.members.get(&group).is_some_and(|left| *left > 0) {
            return;
        }
        let Some(prompts) = self.prompts.get(&group) else { return };
        if prompts.iter().all(|p| p.waiting.is_empty()) {
            for prompt in self.prompts.remove(&group).unwrap_or_default() {
                self.net.free(prompt.sequence);
            }
        }
    }

    /// One forward pass over everything that needs tokens, then sampling.
    fn forward(&mut self, done: &mut dyn FnMut(usize, EpisodeRecord)) -> Result<(), AgentError> {
        let chunk = self.limits.prefill_chunk.max(1);
        let mut items = Vec::new();
        let mut work: Vec<(usize, &[u32])> = Vec::new();
        // Single tokens always come along; longer items as far as the budget goes, the rest next time.
        let budget = self.limits.forward_tokens.max(chunk);
        let mut used = 0;
        let mut fits = |n: usize| {
            let fits = n == 1 || used + n <= budget;
            used += if fits && n > 1 { n } else { 0 };
            fits
        };
        for (group, prompts) in &self.prompts {
            for (at, prompt) in prompts.iter().enumerate() {
                if prompt.logits.is_none() {
                    let end = prompt.ids.len().min(prompt.cached + chunk);
                    if !fits(end - prompt.cached) {
                        continue;
                    }
                    items.push((Item::Prompt(*group, at), end - prompt.cached, end == prompt.ids.len()));
                    work.push((prompt.sequence, &prompt.ids[prompt.cached..end]));
                }
            }
        }
        for (index, slot) in &self.slots {
            if let (true, Some(sequence)) = (slot.sampling, slot.sequence) {
                let ids = slot.episode.ids();
                let end = ids.len().min(slot.cached + chunk);
                if !fits(end - slot.cached) {
                    continue;
                }
                items.push((Item::Slot(*index), end - slot.cached, end == ids.len()));
                work.push((sequence, &ids[slot.cached..end]));
            }
        }
        if work.is_empty() {
            return Ok(());
        }
        let watch = Stopwatch::start();
        let mut logits = std::mem::take(&mut self.logits);
        self.net.forward(&work, &mut logits)?;
        let micros = watch.micros();
        let vocab = self.net.vocab();
        if logits.len() != work.len() * vocab {
            return Err(AgentError::Model(format!("{} logits for {} items of {vocab}", logits.len(), work.len())));
        }
        drop(work);
        self.stats.forwards += 1;
        self.stats.model_us += micros;
        self.stats.cache_bytes = self.stats.cache_bytes.max(self.net.cache_bytes() as u64);
        let tokens: usize = items.iter().map(|(_, n, _)| n).sum();
        let watch = Stopwatch::start();
        for (row, (item, n, complete)) in items.into_iter().enumerate() {
            let share = micros * n as u64 / tokens.max(1) as u64;
            let logits = &logits[row * vocab..(row + 1) * vocab];
            match item {
                Item::Prompt(group, at) => {
                    self.stats.prefill_tokens += n as u64;
                    let Some(prompt) = self.prompts.get_mut(&group).and_then(|p| p.get_mut(at)) else { continue };
                    prompt.cached += n;
                    if let Some(slot) = prompt.waiting.first().and_then(|first| self.slots.get_mut(first)) {
                        slot.episode.charge(share);
                    }
                    if complete {
                        prompt.logits = Some(logits.to_vec());
                        self.serve_prompt(group, at, done)?;
                    }
                }
                Item::Slot(index) => {
                    let Some(slot) = self.slots.get_mut(&index) else { continue };
                    slot.cached += n;
                    slot.episode.charge(share);
                    // One token of an item is the sampled one that had not been fed yet.
                    self.stats.prefill_tokens += n as u64 - 1;
                    if complete {
                        self.choose(index, logits, done)?;
                    }
                }
            }
        }
        let groups: Vec<usize> = self.prompts.keys().copied().collect();
        for group in groups {
            self.release_prompts(group);
        }
        self.stats.choose_us += watch.micros();
        self.logits = logits;
        Ok(())
    }

    /// Samples an episode's next token.
    fn choose(
        &mut self,
        index: usize,
        logits: &[f32],
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<(), AgentError> {
        let Some(slot) = self.slots.get_mut(&index) else { return Ok(()) };
        let sampling = slot.episode.job().sampling;
        let unit = if sampling.temperature > 0.0 { slot.draw.unit() } else { 0.0 };
        let choice = self.chooser.choose(logits, &sampling, unit).map_err(|_| AgentError::NonFinite {
            episode: slot.episode.job().episode(),
            position: slot.episode.ids().len(),
        })?;
        self.stats.sampled_tokens += 1;
        let before = slot.episode.ids().len();
        let next = slot.episode.sampled(choice.id, choice.logprob, choice.sampling_logprob)?;
        // A call that never reaches the environment is answered at once: a turn, too.
        if next == Next::Token && slot.episode.ids().len() > before + 1 {
            self.stats.kept_tokens += slot.cached as u64;
        }
        self.follow(index, next, done)
    }

    /// Does what an episode needs next.
    fn follow(
        &mut self,
        index: usize,
        next: Next,
        done: &mut dyn FnMut(usize, EpisodeRecord),
    ) -> Result<(), AgentError> {
        match next {
            Next::Token => {
                if let Some(slot) = self.slots.get_mut(&index) {
                    slot.sampling = true;
                }
                Ok(())
            }
            Next::Op(op) => {
                if let Some(slot) = self.slots.get_mut(&index) {
                    slot.sampling = false;
                }
                self.hands.submit(index, op)
            }
            Next::Finished => {
                self.hands.submit(index, Op::Close)?;
                if let Some(slot) = self.slots.remove(&index) {
                    if let Some(sequence) = slot.sequence {
                        self.net.free(sequence);
                    }
                    self.stats.episodes += 1;
                    done(index, slot.episode.into_record());
                }
                Ok(())
            }
        }
    }
}
