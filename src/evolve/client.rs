//! The one home of reqwest: a client of OpenAI-compatible chat endpoints.
//!
//! The key comes from an environment variable, is sent as a bearer token and appears in no event, error or
//! debug output. Refusals that a retry cannot mend (4xx but 408 and 429) are final; everything else is tried
//! again with exponential waits, or after the server's own `Retry-After`.

use std::time::Duration;

/// Longest answer body read, in bytes.
const MAX_BODY: usize = 4 << 20;
/// Longest wait between two attempts.
const MAX_WAIT: Duration = Duration::from_secs(30);

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

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The message's text.
    pub text: String,
    /// Tokens sent, as the server counts them; 0 when it does not say.
    pub prompt_tokens: u64,
    /// Tokens received.
    pub completion_tokens: u64,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ClientError {
    /// The client could not be built.
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
}

/// A blocking client; requests run on a runtime of its own.
pub struct ChatClient {
    endpoint: Endpoint,
    http: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

enum Attempt {
    Done(Completion),
    Again(String, Option<Duration>),
}

impl ChatClient {
    /// A client for `endpoint`.
    pub fn new(endpoint: Endpoint) -> Result<Self, ClientError> {
        // Fails only when a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let setup = |e: String| ClientError::Setup(e);
        let http = reqwest::Client::builder()
            .timeout(Duration::from_millis(endpoint.timeout_ms))
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|e| setup(e.to_string()))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| setup(e.to_string()))?;
        Ok(ChatClient { endpoint, http, runtime })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.endpoint.model
    }

    /// Asks once, with retries. `messages` are (role, content).
    pub fn complete(&self, messages: &[(&str, String)], seed: u64) -> Result<Completion, ClientError> {
        let attempts = self.endpoint.retries + 1;
        let mut last = String::new();
        for attempt in 0..attempts {
            match self.runtime.block_on(self.attempt(messages, seed))? {
                Attempt::Done(answer) => return Ok(answer),
                Attempt::Again(why, wait) => {
                    last = why;
                    if attempt + 1 < attempts {
                        let wait = wait.unwrap_or(Duration::from_millis(250 << attempt.min(7))).min(MAX_WAIT);
                        std::thread::sleep(wait);
                    }
                }
            }
        }
        Err(ClientError::Exhausted { url: self.endpoint.url.clone(), attempts, last })
    }

    async fn attempt(&self, messages: &[(&str, String)], seed: u64) -> Result<Attempt, ClientError> {
        let e = &self.endpoint;
        let body = serde_json::json!({
            "model": e.model,
            "messages": messages.iter().map(|(role, content)| serde_json::json!({"role": role, "content": content})).collect::<Vec<_>>(),
            "max_tokens": e.max_tokens,
            "seed": seed >> 33,
        });
        let mut request = self.http.post(format!("{}/chat/completions", e.url.trim_end_matches('/'))).json(&body);
        if let Ok(key) = std::env::var(&e.key_env)
            && !key.is_empty()
        {
            request = request.bearer_auth(key);
        }
        let mut response = match request.send().await {
            Ok(r) => r,
            Err(e) => return Ok(Attempt::Again(describe(&e), None)),
        };
        let status = response.status().as_u16();
        let wait = response
            .headers()
            .get("retry-after")
            .and_then(|v| v.to_str().ok())
            .and_then(|v| v.parse::<u64>().ok())
            .map(Duration::from_secs);
        let mut bytes = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) if bytes.len() + chunk.len() > MAX_BODY => {
                    return Ok(Attempt::Again(format!("the answer is longer than {MAX_BODY} bytes"), None));
                }
                Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
                Ok(None) => break,
                Err(e) => return Ok(Attempt::Again(describe(&e), None)),
            }
        }
        let start: String = String::from_utf8_lossy(&bytes).chars().take(300).collect();
        match status {
            200 => {}
            408 | 429 | 500..=599 => return Ok(Attempt::Again(format!("status {status}: {start}"), wait)),
            _ => {
                let hint = if matches!(status, 401 | 403) {
                    format!(" (the key is read from the environment variable {})", e.key_env)
                } else {
                    String::new()
                };
                return Err(ClientError::Refused { url: e.url.clone(), status, body: start, hint });
            }
        }
        let Ok(value) = serde_json::from_slice::<serde_json::Value>(&bytes) else {
            return Ok(Attempt::Again(format!("not JSON: {start}"), None));
        };
        let Some(text) = value.pointer("/choices/0/message/content").and_then(|v| v.as_str()) else {
            return Ok(Attempt::Again(format!("no choices[0].message.content in {start}"), None));
        };
        let count = |name: &str| value.pointer(&format!("/usage/{name}")).and_then(|v| v.as_u64()).unwrap_or(0);
        Ok(Attempt::Done(Completion {
            text: text.to_string(),
            prompt_tokens: count("prompt_tokens"),
            completion_tokens: count("completion_tokens"),
        }))
    }
}

fn describe(e: &reqwest::Error) -> String {
    let kind = if e.is_timeout() {
        "timed out"
    } else if e.is_connect() {
        "cannot connect"
    } else {
        "broke off"
    };
    format!("{kind}: {}", e.to_string().chars().take(300).collect::<String>())
}

/// The first balanced JSON object or array in a text that may hold prose and code fences around it.
pub fn first_json(text: &str) -> Option<serde_json::Value> {
    for (start, c) in text.char_indices() {
        if c != '{' && c != '[' {
            continue;
        }
        let mut stream = serde_json::Deserializer::from_str(&text[start..]).into_iter::<serde_json::Value>();
        if let Some(Ok(value)) = stream.next() {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Serves one canned answer per connection on loopback and returns what was asked.
    fn serve(answers: Vec<Vec<u8>>) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let url = format!("http://{}/v1", listener.local_addr().expect("addr"));
        let handle = std::thread::spawn(move || {
            let mut asked = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().expect("accept");
                let mut request = Vec::new();
                let mut buffer = [0u8; 4096];
                loop {
                    let n = stream.read(&mut buffer).expect("read");
                    request.extend_from_slice(&buffer[..n]);
                    let text = String::from_utf8_lossy(&request).to_string();
                    if let Some((head, body)) = text.split_once("\r\n\r\n") {
                        let length = head
                            .lines()
                            .find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_string))
                            .and_then(|v| v.parse::<usize>().ok())
                            .unwrap_or(0);
                        if body.len() >= length {
                            break;
                        }
                    }
                    if n == 0 {
                        break;
                    }
                }
                asked.push(String::from_utf8_lossy(&request).to_string());
                stream.write_all(&answer).expect("write");
            }
            asked
        });
        (url, handle)
    }

    fn http(status: &str, extra: &str, body: &str) -> Vec<u8> {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{extra}\r\n{body}", body.len())
            .into_bytes()
    }

    fn client(url: String, key_env: &str, retries: u32) -> ChatClient {
        ChatClient::new(Endpoint {
            url,
            model: "m".into(),
            key_env: key_env.into(),
            timeout_ms: 2000,
            retries,
            max_tokens: 16,
        })
        .expect("client")
    }

    const GOOD: &str =
        r#"{"choices":[{"message":{"content":"hello"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;

    #[test]
    fn faults_are_retried_and_the_answer_is_counted() {
        let (url, server) = serve(vec![
            http("503 Service Unavailable", "retry-after: 0\r\n", "busy"),
            http("200 OK", "retry-after: 0\r\n", "not json"),
            b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cho".to_vec(),
            http("200 OK", "", GOOD),
        ]);
        let answer = client(url, "COEVOLVE_NO_SUCH_KEY", 3).complete(&[("user", "hi".into())], 1).expect("answer");
        assert_eq!(answer, Completion { text: "hello".into(), prompt_tokens: 3, completion_tokens: 1 });
        let asked = server.join().expect("server");
        assert_eq!(asked.len(), 4);
        assert!(asked[3].contains("/v1/chat/completions") && asked[3].contains("\"hi\""));
        assert!(!asked[3].to_lowercase().contains("authorization"));
    }

    #[test]
    fn refusals_are_final_and_name_the_variable() {
        let (url, server) = serve(vec![http("401 Unauthorized", "", "no")]);
        let error = client(url, "SOME_KEY", 3).complete(&[("user", "hi".into())], 1).expect_err("refused");
        assert!(error.to_string().contains("SOME_KEY"), "{error}");
        assert_eq!(server.join().expect("server").len(), 1);
    }

    #[test]
    fn a_dead_endpoint_is_an_error() {
        let error = client("http://127.0.0.1:9/v1".into(), "K", 1).complete(&[], 1).expect_err("dead");
        assert!(matches!(error, ClientError::Exhausted { attempts: 2, .. }), "{error}");
    }

    #[test]
    fn json_is_found_in_prose() {
        assert_eq!(first_json("Sure! ```json\n{\"a\": [1]}\n``` {\"b\":2}"), Some(serde_json::json!({"a": [1]})));
        assert_eq!(first_json("{broken [1, 2] }"), Some(serde_json::json!([1, 2])));
        assert_eq!(first_json("none"), None);
    }
}
