//! The one home of reqwest and tokio: blocking HTTP with a deadline and a bound for every answer.
//!
//! Nothing here retries and nothing interprets a status: who asks knows what may be asked twice. An answer is whole or it
//! is an error: a body that is cut short (a broken connection, fewer bytes than announced) is never handed out.

use std::time::Duration;

/// How long and how much an answer may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// From the first byte sent to the last byte received, milliseconds.
    pub deadline_ms: u64,
    /// Longest body, bytes.
    pub body_bytes: usize,
}

/// A whole answer, whatever its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The header of that name, as sent.
    pub retry_after: Option<String>,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The start of the body, printable, for messages.
    pub fn excerpt(&self) -> String {
        String::from_utf8_lossy(&self.body[..self.body.len().min(1200)]).trim().chars().take(300).collect()
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The client or the request could not be built.
    #[error("the request could not be made: {0}")]
    Setup(String),
    /// Nobody listens, or the name is not known.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The answer was not whole by the deadline.
    #[error("no whole answer within {0} ms")]
    Deadline(u64),
    /// The connection broke, or the answer is no HTTP.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// The body is longer than its bound.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
}

/// A client. Connections are kept open between requests; threads may share it.
#[derive(Debug)]
pub struct Http {
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

impl Http {
    /// A client; one for `local` servers takes no proxy from the environment.
    ///
    /// # Errors
    /// [`HttpError::Setup`].
    pub fn new(local: bool) -> Result<Http, HttpError> {
        // Fails only when a provider is installed already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // A redirect could carry a key to another host.
        let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none());
        let builder = if local { builder.no_proxy() } else { builder };
        let client = builder.build().map_err(|e| HttpError::Setup(causes(&e)))?;
        // Requests run on the threads that ask; this one only watches sockets and clocks for all of them.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(|e| HttpError::Setup(e.to_string()))?;
        Ok(Http { client, runtime })
    }

    /// GET.
    ///
    /// # Errors
    /// [`HttpError`].
    pub fn get(&self, url: &str, bounds: Bounds) -> Result<Answer, HttpError> {
        self.runtime.block_on(answer(self.client.get(url), bounds))
    }

    /// POST of a JSON body, with a bearer token if there is one.
    ///
    /// # Errors
    /// [`HttpError`]; the token is in none of them.
    pub fn post(
        &self,
        url: &str,
        body: &serde_json::Value,
        bearer: Option<&str>,
        bounds: Bounds,
    ) -> Result<Answer, HttpError> {
        let request = self.client.post(url).json(body);
        let request = match bearer {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        self.runtime.block_on(answer(request, bounds))
    }
}

async fn answer(request: reqwest::RequestBuilder, bounds: Bounds) -> Result<Answer, HttpError> {
    let failed = |e: reqwest::Error| {
        if e.is_timeout() {
            HttpError::Deadline(bounds.deadline_ms)
        } else if e.is_builder() {
            HttpError::Setup(causes(&e))
        } else if e.is_connect() {
            HttpError::Connect(causes(&e))
        } else {
            HttpError::Broken(causes(&e))
        }
    };
    let mut response = request.timeout(Duration::from_millis(bounds.deadline_ms)).send().await.map_err(failed)?;
    let status = response.status().as_u16();
    let retry_after = response.headers().get("retry-after").and_then(|v| v.to_str().ok()).map(str::to_owned);
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        if body.len() + chunk.len() > bounds.body_bytes {
            return Err(HttpError::TooLong(bounds.body_bytes));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer { status, retry_after, body })
}

/// An error and what caused it, without the URL (it may hold credentials).
fn causes(error: &reqwest::Error) -> String {
    let mut text = String::new();
    let mut next: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(cause) = next {
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    if text.is_empty() { "no cause is known".into() } else { text.chars().take(300).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Answers one connection after the other with these bytes, each `pause` apart from its request.
    fn serve(answers: Vec<Vec<u8>>, pause: Duration) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/x", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]);
                std::thread::sleep(pause);
                let _ = stream.write_all(&answer);
            }
        });
        url
    }

    fn get(answer: &[u8]) -> Result<Answer, HttpError> {
        let url = serve(vec![answer.to_vec()], Duration::ZERO);
        Http::new(true).unwrap().get(&url, Bounds { deadline_ms: 5000, body_bytes: 8 })
    }

    #[test]
    fn an_answer_is_whole_or_an_error() {
        let whole = get(b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 8\r\n\r\n12345678").unwrap();
        assert_eq!(whole, Answer { status: 429, retry_after: Some("7".into()), body: b"12345678".to_vec() });
        let cut = get(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n1234567");
        assert!(matches!(cut, Err(HttpError::Broken(_))), "{cut:?}");
        let chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
        assert!(matches!(get(chunks), Err(HttpError::Broken(_))), "the last chunk is lacking");
        assert_eq!(get(&[&chunks[..], b"0\r\n\r\n"].concat()).unwrap().body, b"abc");
        assert_eq!(get(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123456789"), Err(HttpError::TooLong(8)));
        assert!(matches!(get(b"garbage\r\n\r\n"), Err(HttpError::Broken(_))));
        assert!(matches!(get(b""), Err(HttpError::Broken(_))));
    }

    #[test]
    fn silence_ends_at_the_deadline_and_nobody_home_is_said() {
        let http = Http::new(true).unwrap();
        let bounds = Bounds { deadline_ms: 100, body_bytes: 8 };
        let url = serve(vec![b"HTTP/1.1 200 OK\r\n\r\n".to_vec()], Duration::from_secs(2));
        assert_eq!(http.get(&url, bounds), Err(HttpError::Deadline(100)));
        let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let url = format!("http://user:secret@{gone}/");
        let error = http.post(&url, &serde_json::Value::Null, Some("key"), bounds).unwrap_err();
        assert!(matches!(error, HttpError::Connect(_)), "{error:?}");
        assert!(!error.to_string().contains("secret") && !error.to_string().contains("key"));
        assert!(matches!(http.get("not a url", bounds), Err(HttpError::Setup(_))));
    }
}
