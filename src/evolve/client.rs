//! A client of OpenAI-compatible chat endpoints, over [`crate::http`].
//!
//! The key comes from an environment variable, is sent as a bearer token and appears in no event, error or debug output;
//! where a server sends it back it is blotted out. Refusals that a retry cannot mend (any status but 200, 408, 429 and
//! 5xx) are final; everything else is sent again after a wait ([`super::retry`]). An answer is used whole or not at all:
//! one that the server stopped early (`finish_reason` `length` or `content_filter`) is as good as one that broke off.

use super::retry;
use crate::http::{Answer, Bounds, Http, HttpError};
use crate::world::now_ms;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Longest answer body read, in bytes.
const MAX_BODY: usize = 4 << 20;
/// While it waits, a client looks this often whether the run is to stop.
const STOP_EVERY: Duration = Duration::from_millis(20);
/// Bytes of a request or answer that count as one token where nobody has counted. Tokenizers of today take 3 to 5
/// bytes of English or JSON for one; with fewer bytes the estimate would have to be larger.
const BYTES_PER_TOKEN: u64 = 3;

/// Where and how to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Base URL, e.g. `http://127.0.0.1:8000/v1`.
    pub url: String,
    /// Model name.
    pub model: String,
    /// Name of the variable that holds the key; unset or empty = no key is sent.
    pub key_env: String,
    /// Deadline of one attempt, milliseconds.
    pub timeout_ms: u64,
    /// Attempts after the first.
    pub retries: u32,
    /// Bound of one answer, tokens.
    pub max_tokens: u32,
}

/// A request as it is sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    value: Value,
    /// The body: canonical JSON text (keys sorted, no spaces). It holds no key and no address.
    pub body: String,
    /// BLAKE3 of `body`, hex: what the answer is found by.
    pub digest: String,
}

impl Request {
    /// Tokens that sending it once may cost at most, as far as that can be said before: an estimate of its own length and
    /// the longest answer.
    fn reserve(&self, max_tokens: u32) -> u64 {
        estimated(self.body.len()) + u64::from(max_tokens)
    }
}

fn estimated(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(BYTES_PER_TOKEN)
}

/// What asking came to, answered or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Requests sent.
    pub attempts: u32,
    /// Tokens sent, as the server counts them.
    pub prompt_tokens: u64,
    /// Tokens received, as the server counts them.
    pub completion_tokens: u64,
    /// Tokens of attempts that the server gave no count for but may have worked on, estimated from above.
    pub estimated_tokens: u64,
}

impl Usage {
    /// Tokens that count against a budget.
    pub fn tokens(&self) -> u64 {
        self.prompt_tokens + self.completion_tokens + self.estimated_tokens
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum ClientError {
    /// The client or the request could not be built.
    #[error("HTTP client: {0}")]
    Setup(String),
    /// The server refused for good.
    #[error("{url} answered {status}: {body}{hint}")]
    Refused {
        /// Endpoint.
        url: String,
        /// HTTP status.
        status: u16,
        /// Start of the body.
        body: String,
        /// What to do.
        hint: String,
    },
    /// All attempts failed.
    #[error("{url}: no usable answer after {attempts} attempts; last: {last}")]
    Exhausted {
        /// Endpoint.
        url: String,
        /// Attempts made.
        attempts: u32,
        /// The last failure.
        last: String,
    },
    /// One more attempt could cost more tokens than are left.
    #[error("a request of up to {needed} tokens does not fit into the {left} that are left")]
    Budget {
        /// Tokens the attempt may cost.
        needed: u64,
        /// Tokens left.
        left: u64,
    },
    /// The run is to stop.
    #[error("stopped")]
    Stopped,
}

enum Attempt {
    Done(String),
    Again { why: String, retry_after: Option<String> },
}

/// Waits, or until the flag is set.
type Pause = Box<dyn Fn(Duration, &AtomicBool) + Send + Sync>;

/// A blocking client.
pub struct ChatClient {
    endpoint: Endpoint,
    http: Http,
    stop: Arc<AtomicBool>,
    pause: Pause,
}

impl ChatClient {
    /// A client for `endpoint` that gives up as soon as `stop` is set.
    ///
    /// # Errors
    /// [`ClientError::Setup`].
    pub fn new(endpoint: Endpoint, stop: Arc<AtomicBool>) -> Result<Self, ClientError> {
        let http = Http::new(is_local(&endpoint.url)).map_err(|e| ClientError::Setup(e.to_string()))?;
        Ok(ChatClient { endpoint, http, stop, pause: Box::new(pause) })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.endpoint.model
    }

    /// The request of a conversation of (role, content).
    pub fn request(&self, messages: &[(&str, String)], seed: u64) -> Request {
        let value = json!({
            "model": self.endpoint.model,
            "messages": messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect::<Vec<_>>(),
            "max_tokens": self.endpoint.max_tokens,
            // Half of the servers read it as a signed 32-bit number.
            "seed": seed >> 33,
        });
        let body = value.to_string();
        let digest = blake3::hash(body.as_bytes()).to_hex().to_string();
        Request { value, body, digest }
    }

    /// Sends a request, again where that may help. No attempt is made that could cost more than what is left of `allowance`
    /// tokens.
    ///
    /// # Errors
    /// [`ClientError`]. What was used up stands beside it either way.
    pub fn ask(&self, request: &Request, allowance: Option<u64>) -> (Result<String, ClientError>, Usage) {
        let mut usage = Usage::default();
        let answer = self.try_all(request, allowance, &mut usage);
        (answer, usage)
    }

    /// Whether sending a request once may fit into what is left.
    ///
    /// # Errors
    /// [`ClientError::Budget`].
    pub fn fits(&self, request: &Request, left: Option<u64>) -> Result<(), ClientError> {
        let needed = request.reserve(self.endpoint.max_tokens);
        match left.filter(|left| needed > *left) {
            Some(left) => Err(ClientError::Budget { needed, left }),
            None => Ok(()),
        }
    }

    fn try_all(&self, request: &Request, allowance: Option<u64>, usage: &mut Usage) -> Result<String, ClientError> {
        let attempts = self.endpoint.retries.saturating_add(1);
        for attempt in 0.. {
            if self.stop.load(Ordering::SeqCst) {
                return Err(ClientError::Stopped);
            }
            self.fits(request, allowance.map(|all| all.saturating_sub(usage.tokens())))?;
            usage.attempts += 1;
            match self.attempt(request, usage)? {
                Attempt::Done(answer) => return Ok(answer),
                Attempt::Again { why, .. } if usage.attempts >= attempts => {
                    return Err(ClientError::Exhausted { url: self.shown_url(), attempts, last: why });
                }
                Attempt::Again { retry_after, .. } => {
                    (self.pause)(retry::wait(attempt, retry_after.as_deref(), now_ms()), &self.stop);
                }
            }
        }
        Err(ClientError::Stopped)
    }

    fn attempt(&self, request: &Request, usage: &mut Usage) -> Result<Attempt, ClientError> {
        let key = std::env::var(&self.endpoint.key_env).ok().filter(|key| !key.is_empty());
        let clean = |text: String| match &key {
            Some(key) => text.replace(key.as_str(), "[key]"),
            None => text,
        };
        let bounds = Bounds { deadline_ms: self.endpoint.timeout_ms, body_bytes: MAX_BODY };
        let url = format!("{}/chat/completions", self.endpoint.url.trim_end_matches('/'));
        let answer = match self.http.post(&url, &request.value, key.as_deref(), bounds) {
            Ok(answer) => answer,
            Err(HttpError::Setup(why)) => return Err(ClientError::Setup(why)),
            Err(error) => {
                // Whoever took the request may have worked on it.
                if !matches!(error, HttpError::Connect(_)) {
                    usage.estimated_tokens += request.reserve(self.endpoint.max_tokens);
                }
                return Ok(Attempt::Again { why: clean(error.to_string()), retry_after: None });
            }
        };
        // Blotted out before it is cut: a part of a key is too much, too.
        let start = || -> String {
            clean(String::from_utf8_lossy(&answer.body).into_owned()).trim().chars().take(300).collect()
        };
        match answer.status {
            200 => {}
            status @ (408 | 429 | 500..=599) => {
                let why = format!("status {status}: {}", start());
                return Ok(Attempt::Again { why, retry_after: answer.retry_after.clone() });
            }
            status => {
                let hint = match status {
                    401 | 403 => {
                        format!(" (the key is read from the environment variable {})", self.endpoint.key_env)
                    }
                    _ => String::new(),
                };
                return Err(ClientError::Refused { url: self.shown_url(), status, body: start(), hint });
            }
        }
        Ok(match content(&answer, request, self.endpoint.max_tokens, usage) {
            Ok(text) => Attempt::Done(clean(text)),
            Err(why) => Attempt::Again { why: format!("{why}: {}", start()), retry_after: None },
        })
    }

    /// The endpoint without what may be secret in its URL: a name and password before the host, and a query.
    fn shown_url(&self) -> String {
        let url = self.endpoint.url.split(['?', '#']).next().unwrap_or_default();
        let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
        let (host, path) = rest.split_once('/').map_or((rest, String::new()), |(h, p)| (h, format!("/{p}")));
        format!("{scheme}://{}{path}", host.rsplit('@').next().unwrap_or_default())
    }
}

/// The message of an answer with status 200, or why it cannot be used; counts what it cost.
fn content(answer: &Answer, request: &Request, max_tokens: u32, usage: &mut Usage) -> Result<String, &'static str> {
    let value = serde_json::from_slice::<Value>(&answer.body).unwrap_or_default();
    let text = value.pointer("/choices/0/message/content").and_then(Value::as_str);
    let count = |name: &str| value.pointer(&format!("/usage/{name}")).and_then(Value::as_u64);
    match (count("prompt_tokens"), count("completion_tokens"), text) {
        (Some(prompt), Some(completion), _) => {
            usage.prompt_tokens += prompt;
            usage.completion_tokens += completion;
        }
        (_, _, Some(text)) => {
            usage.estimated_tokens += estimated(request.body.len()) + estimated(text.len()).min(u64::from(max_tokens));
        }
        _ => usage.estimated_tokens += request.reserve(max_tokens),
    }
    if value.is_null() {
        return Err("not JSON");
    }
    match value.pointer("/choices/0/finish_reason").and_then(Value::as_str) {
        Some("length") => return Err("the answer was cut at its longest length (finish_reason length)"),
        Some("content_filter") => return Err("the answer was cut by a filter (finish_reason content_filter)"),
        _ => {}
    }
    text.map(str::to_owned).ok_or("no choices[0].message.content")
}

/// Whether a URL leads to this machine.
fn is_local(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default().rsplit('@').next().unwrap_or_default();
    let named = |name: &str| host == name || host.strip_prefix(name).is_some_and(|port| port.starts_with(':'));
    named("localhost") || named("[::1]") || host.starts_with("127.")
}

fn pause(wait: Duration, stop: &AtomicBool) {
    let mut left = wait;
    while !left.is_zero() && !stop.load(Ordering::SeqCst) {
        let part = left.min(STOP_EVERY);
        std::thread::sleep(part);
        left -= part;
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
pub(super) mod tests;
