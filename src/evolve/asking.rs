//! One question to an LLM: answered from what is recorded where that is possible, else by the endpoint; recorded; checked;
//! asked again where the answer cannot be used.
//!
//! An answer is used only once it is durable, so a killed run asks nothing twice but what was under way. Tokens are
//! counted before they are spent: no request goes out that may pass the budget.

use super::ExploreError;
use super::client::{ChatClient, ClientError, Endpoint, Request, Usage};
use super::shape::Role;
use crate::event::LlmAsked;
use crate::world::Stopwatch;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Characters of an unusable answer that its author is shown again.
const MAX_SHOWN: usize = 4000;

/// A recorded answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The message.
    pub answer: String,
    /// What it cost; `attempts` is 0.
    pub usage: Usage,
}

/// Answers of another run, which stand for the network's.
#[derive(Debug)]
pub struct Recording {
    /// Its folder.
    pub folder: PathBuf,
    /// By digest of the request.
    pub answers: BTreeMap<String, Told>,
}

/// Makes an event durable; the second argument is what the work took, microseconds.
pub type Keep = Box<dyn Fn(LlmAsked, u64) -> Result<(), String> + Send + Sync>;

/// Tokens that a run has spent, shared by all who ask for it.
#[derive(Debug, Default)]
pub struct Purse {
    spent: AtomicU64,
    /// Held from the look into the purse to the payment, where there is a budget: two may not spend the same tokens.
    turn: Mutex<()>,
}

impl Purse {
    /// A purse out of which so many tokens are gone.
    pub fn new(spent: u64) -> Purse {
        Purse { spent: AtomicU64::new(spent), turn: Mutex::new(()) }
    }

    /// Tokens spent so far.
    pub fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }
}

/// What a run lends to whoever asks.
pub struct Book {
    /// Answers the run's own log holds, by digest of the request.
    pub own: BTreeMap<String, Told>,
    /// Another run's, when the endpoint is not to be asked.
    pub recording: Option<Arc<Recording>>,
    /// Tokens of the whole run.
    pub purse: Arc<Purse>,
    /// Where new answers are recorded.
    pub keep: Keep,
}

/// How often is asked, and for how much.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// Askings after the first, for answers that cannot be used.
    pub reasks: u32,
    /// Tokens the whole run may spend; 0 = no bound.
    pub budget_tokens: u64,
    /// Price of a million tokens sent, in any currency.
    pub price_prompt: f64,
    /// Price of a million tokens received.
    pub price_completion: f64,
}

impl Terms {
    /// Cost of the tokens that the server counted, in millionths of the prices' currency.
    fn cost_micros(&self, usage: &Usage) -> u64 {
        let (sent, received) = (usage.prompt_tokens as f64, usage.completion_tokens as f64);
        (sent * self.price_prompt + received * self.price_completion).round() as u64
    }
}

/// Asks. See the module's documentation.
pub struct Asker {
    client: ChatClient,
    terms: Terms,
    book: Book,
}

impl Asker {
    /// Whoever asks `endpoint` until `stop` is set.
    ///
    /// # Errors
    /// [`ExploreError::Endpoint`] when there can be no client.
    pub fn new(endpoint: Endpoint, terms: Terms, book: Book, stop: Arc<AtomicBool>) -> Result<Self, ExploreError> {
        let client = ChatClient::new(endpoint, stop).map_err(|e| ExploreError::Endpoint(e.to_string()))?;
        Ok(Asker { client, terms, book })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        self.client.model()
    }

    /// Asks for an answer of the role's shape; `about` is the context or draft it is for.
    ///
    /// # Errors
    /// [`ExploreError`]: the endpoint, the budget, the recording, or answers that cannot be used.
    pub fn ask(&self, role: Role, about: &str, system: &str, user: &Value, seed: u64) -> Result<Value, ExploreError> {
        let mut messages = vec![("system", system.to_string()), ("user", user.to_string())];
        let mut last = String::new();
        for _ in 0..=self.terms.reasks {
            let text = self.answer(role, about, &self.client.request(&messages, seed))?;
            match role.read(&text) {
                Ok(value) => return Ok(value),
                Err(fault) => {
                    messages.push(("assistant", text.chars().take(MAX_SHOWN).collect()));
                    messages.push((
                        "user",
                        format!(
                            "That answer cannot be used: {fault}. Answer again, with the JSON described at first and nothing else."
                        ),
                    ));
                    last = fault;
                }
            }
        }
        Err(ExploreError::Unusable { role: role.name(), asked: self.terms.reasks + 1, fault: last })
    }

    fn answer(&self, role: Role, about: &str, request: &Request) -> Result<String, ExploreError> {
        if let Some(kept) = self.book.own.get(&request.digest) {
            return Ok(kept.answer.clone());
        }
        let watch = Stopwatch::start();
        let budget = self.terms.budget_tokens;
        let purse = &self.book.purse;
        let _turn = (budget > 0).then(|| purse.turn.lock().unwrap_or_else(PoisonError::into_inner));
        let spent = purse.spent();
        let allowance = (budget > 0).then(|| budget.saturating_sub(spent));
        let (outcome, usage) = match &self.book.recording {
            None => self.client.ask(request, allowance),
            // The budget cuts a replayed run where it cut the recorded one.
            Some(recording) => match (self.client.fits(request, allowance), recording.answers.get(&request.digest)) {
                (Err(error), _) => (Err(error), Usage::default()),
                (Ok(()), Some(kept)) => (Ok(kept.answer.clone()), kept.usage),
                (Ok(()), None) => {
                    let (folder, request) = (recording.folder.clone(), request.digest.clone());
                    return Err(ExploreError::NotRecorded { folder, role: role.name(), about: about.into(), request });
                }
            },
        };
        purse.spent.fetch_add(usage.tokens(), Ordering::Relaxed);
        if outcome.is_ok() || usage.attempts > 0 {
            let asked = LlmAsked {
                request: request.digest.clone(),
                role: role.name().into(),
                about: about.into(),
                model: self.model().into(),
                body: request.body.clone(),
                answer: outcome.as_ref().ok().cloned(),
                failure: outcome.as_ref().err().map(ToString::to_string).unwrap_or_default(),
                attempts: usage.attempts,
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                estimated_tokens: usage.estimated_tokens,
                cost_micros: if usage.attempts > 0 { self.terms.cost_micros(&usage) } else { 0 },
            };
            (self.book.keep)(asked, watch.micros()).map_err(ExploreError::Unrecorded)?;
        }
        outcome.map_err(|error| match error {
            ClientError::Stopped => ExploreError::Stopped,
            ClientError::Budget { needed, left } => {
                ExploreError::Budget { spent: budget.saturating_sub(left), needed, budget }
            }
            other => ExploreError::Endpoint(other.to_string()),
        })
    }
}

#[cfg(test)]
#[path = "asking_tests.rs"]
mod tests;
