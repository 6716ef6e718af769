//! The client against a server on loopback that misbehaves in one way after the other.

use super::*;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Mutex;

/// What the server does with one connection.
#[derive(Clone)]
pub(in crate::evolve) enum Turn {
    /// Sends these bytes and closes.
    Send(Vec<u8>),
    /// Says nothing until the client is gone.
    Silence,
}

/// Takes one turn per connection on loopback, then refuses further ones; `asked` tells what was sent.
pub(in crate::evolve) fn serve(turns: Vec<Turn>) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let handle = std::thread::spawn(move || {
        let mut asked = Vec::new();
        for turn in turns {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0u8; 4096];
            loop {
                let n = stream.read(&mut buffer).unwrap();
                request.extend_from_slice(&buffer[..n]);
                let text = String::from_utf8_lossy(&request).to_string();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let head = head.to_ascii_lowercase();
                    let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")).unwrap_or("0");
                    if body.len() >= length.parse::<usize>().unwrap() {
                        break;
                    }
                }
                assert_ne!(n, 0, "the request broke off");
            }
            asked.push(String::from_utf8_lossy(&request).to_string());
            match turn {
                Turn::Send(bytes) => drop(stream.write_all(&bytes)),
                Turn::Silence => while matches!(stream.read(&mut buffer), Ok(1..)) {},
            }
        }
        asked
    });
    (url, handle)
}

pub(in crate::evolve) fn http(status: &str, extra: &str, body: &str) -> Turn {
    let length = body.len();
    Turn::Send(
        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{extra}\r\n{body}").into_bytes(),
    )
}

pub(in crate::evolve) fn completion(text: &str, finish: Option<&str>, usage: Option<(u64, u64)>) -> Turn {
    let mut body = json!({"choices": [{"message": {"content": text}, "finish_reason": finish}]});
    if let Some((prompt, completion)) = usage {
        body["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": completion});
    }
    http("200 OK", "", &body.to_string())
}

fn good() -> Turn {
    completion("hello", Some("stop"), Some((3, 1)))
}

const MAX_TOKENS: u32 = 16;

/// A client that does not wait but writes down how long it would have.
fn client(url: String, key_env: &str, retries: u32) -> (ChatClient, Arc<Mutex<Vec<Duration>>>) {
    let endpoint = Endpoint {
        url,
        model: "m".into(),
        key_env: key_env.into(),
        timeout_ms: 10_000,
        retries,
        max_tokens: MAX_TOKENS,
    };
    let mut client = ChatClient::new(endpoint, Arc::new(AtomicBool::new(false))).unwrap();
    let waits = Arc::new(Mutex::new(Vec::new()));
    let noted = waits.clone();
    client.pause = Box::new(move |wait, _| noted.lock().unwrap().push(wait));
    (client, waits)
}

const NO_KEY: &str = "COEVOLVE_NO_SUCH_KEY";

/// What a row of the table expects of the outcome.
enum Wanted {
    /// The second attempt's answer.
    Answer,
    /// [`ClientError::Exhausted`], whose last failure says this.
    Exhausted(&'static str),
    /// [`ClientError::Refused`] with this status, after one request.
    Refused(u16),
}

#[test]
fn every_fault_is_met_with_so_many_requests_such_waits_and_that_outcome() {
    use Wanted::{Answer, Exhausted, Refused};
    let ms = Duration::from_millis;
    let (own, longest) = (vec![ms(250)], vec![ms(30_000)]);
    // What an attempt that may have cost something counts for: a third of the body's bytes, rounded up, and the longest answer.
    let (probe, _) = client("http://x".into(), NO_KEY, 0);
    let request = probe.request(&[("user", "hi".into())], 1 << 33);
    assert_eq!(request.body, r#"{"max_tokens":16,"messages":[{"content":"hi","role":"user"}],"model":"m","seed":1}"#);
    let prompt = (request.body.len() as u64).div_ceil(3);
    let whole = prompt + u64::from(MAX_TOKENS);

    let busy = |extra: &str| http("429 Too Many Requests", extra, "slow down");
    let cut = |bytes: &[u8]| Turn::Send(bytes.to_vec());
    let too_long = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{}", MAX_BODY + 1, " ".repeat(MAX_BODY + 1));
    let body = |text: &str| http("200 OK", "", text);
    let table: Vec<(&str, Turn, u64, Vec<Duration>, Wanted)> = vec![
        ("busy, come back in 2 s", busy("retry-after: 2\r\n"), 0, vec![ms(2_000)], Answer),
        ("busy, come back at once", busy("retry-after: 0\r\n"), 0, vec![ms(0)], Answer),
        (
            "busy until a date far off",
            busy("retry-after: Fri, 31 Dec 9999 23:59:59 GMT\r\n"),
            0,
            longest.clone(),
            Answer,
        ),
        ("busy until a date long past", busy("retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n"), 0, own.clone(), Answer),
        ("busy for longer than there is time", busy("retry-after: 99999999999999999999\r\n"), 0, longest, Answer),
        ("busy for less than no time", busy("retry-after: -7\r\n"), 0, own.clone(), Answer),
        ("busy, in prose", busy("retry-after: in a while\r\n"), 0, own.clone(), Answer),
        ("busy, no word of when", busy(""), 0, own.clone(), Answer),
        ("request timed out there", http("408 Request Timeout", "", ""), 0, own.clone(), Answer),
        ("internal error", http("500 Internal Server Error", "", "oops"), 0, own.clone(), Answer),
        ("gateway", http("502 Bad Gateway", "", "<html>"), 0, own.clone(), Answer),
        ("unavailable", http("503 Service Unavailable", "retry-after: 1\r\n", ""), 0, vec![ms(1_000)], Answer),
        ("silence", Turn::Silence, whole, own.clone(), Exhausted("no whole answer within 1000 ms")),
        ("closed without a word", cut(b""), whole, own.clone(), Exhausted("broke off")),
        ("cut in the head", cut(b"HTTP/1.1 200 OK\r\nconte"), whole, own.clone(), Exhausted("broke off")),
        (
            "cut in the body",
            cut(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cho"),
            whole,
            own.clone(),
            Exhausted("broke off"),
        ),
        (
            "cut between chunks",
            cut(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"cho\r\n"),
            whole,
            own.clone(),
            Exhausted("broke off"),
        ),
        ("no HTTP", cut(b"220 mail.example ESMTP\r\n\r\n"), whole, own.clone(), Exhausted("broke off")),
        ("endless", cut(too_long.as_bytes()), whole, own.clone(), Exhausted("longer than 4194304 bytes")),
        ("no JSON", body("<html>gateway</html>"), whole, own.clone(), Exhausted("not JSON: <html>gateway")),
        ("half of the JSON", body("{\"choices\": [{"), whole, own.clone(), Exhausted("not JSON")),
        ("other JSON", body("{\"object\": \"error\"}"), whole, own.clone(), Exhausted("no choices[0].message.content")),
        ("no choice", body("{\"choices\": []}"), whole, own.clone(), Exhausted("no choices[0].message.content")),
        (
            "a content of another type",
            body("{\"choices\": [{\"message\": {\"content\": [1]}}]}"),
            whole,
            own.clone(),
            Exhausted("no choices[0].message.content"),
        ),
        (
            "counts of another type",
            body("{\"choices\": [], \"usage\": {\"prompt_tokens\": \"5\", \"completion_tokens\": -1}}"),
            whole,
            own.clone(),
            Exhausted("no choices[0].message.content"),
        ),
        (
            "stopped at its length",
            completion("hel", Some("length"), Some((5, 16))),
            21,
            own.clone(),
            Exhausted("length"),
        ),
        (
            "stopped by a filter",
            completion("h", Some("content_filter"), Some((5, 1))),
            6,
            own.clone(),
            Exhausted("content_filter"),
        ),
        ("wrong key", http("401 Unauthorized", "", "no"), 0, vec![], Refused(401)),
        ("bad request", http("400 Bad Request", "retry-after: 1\r\n", "no"), 0, vec![], Refused(400)),
        ("no such model", http("404 Not Found", "", "no"), 0, vec![], Refused(404)),
        ("elsewhere", http("302 Found", "location: http://127.0.0.1:9/\r\n", ""), 0, vec![], Refused(302)),
        ("nothing to say", http("204 No Content", "", ""), 0, vec![], Refused(204)),
    ];
    for (what, fault, cost, waits, wanted) in table {
        // Once, then a good answer: it is used, whatever came before it, unless the fault is final.
        let is_final = matches!(wanted, Refused(_));
        let turns = if is_final { vec![fault.clone()] } else { vec![fault.clone(), good()] };
        let (url, server) = serve(turns);
        let (mut asking, noted) = client(url, NO_KEY, 1);
        let silence = matches!(fault, Turn::Silence);
        asking.endpoint.timeout_ms = if silence { 1_000 } else { 10_000 };
        let (answer, usage) = asking.ask(&request, None);
        let asked = server.join().unwrap();
        assert_eq!(*noted.lock().unwrap(), waits, "{what}");
        assert!(asked.iter().all(|text| text.starts_with("POST /v1/chat/completions ")), "{what}");
        assert!(asked.iter().all(|text| text.ends_with(&format!("\r\n\r\n{}", request.body))), "{what}");
        if let Refused(status) = wanted {
            assert!(
                matches!(&answer, Err(ClientError::Refused { status: s, .. }) if *s == status),
                "{what}: {answer:?}"
            );
            assert_eq!((asked.len(), usage.attempts, usage.tokens()), (1, 1, 0), "{what}");
            continue;
        }
        assert_eq!(answer.as_deref(), Ok("hello"), "{what}");
        assert_eq!((asked.len(), usage.attempts, usage.tokens()), (2, 2, cost + 4), "{what}: {usage:?}");
        // Every time: all attempts are made and no more, and the error tells the last fault.
        let (url, server) = serve(vec![fault; 2]);
        let (mut asking, noted) = client(url, NO_KEY, 1);
        asking.endpoint.timeout_ms = if silence { 1_000 } else { 10_000 };
        let (answer, usage) = asking.ask(&request, None);
        assert_eq!((server.join().unwrap().len(), usage.attempts, usage.tokens()), (2, 2, 2 * cost), "{what}");
        assert_eq!(noted.lock().unwrap().len(), 1, "{what}");
        let Err(ClientError::Exhausted { attempts: 2, last, .. }) = answer else { panic!("{what}: {answer:?}") };
        if let Exhausted(says) = wanted {
            assert!(last.contains(says), "{what}: {last}");
        }
    }
}

#[test]
fn what_the_server_does_not_count_is_estimated_from_above() {
    let (url, server) = serve(vec![completion("hello", None, None)]);
    let (asking, _) = client(url, NO_KEY, 0);
    let request = asking.request(&[("user", "hi".into())], 1);
    let (answer, usage) = asking.ask(&request, None);
    assert_eq!(answer.as_deref(), Ok("hello"));
    let prompt = (request.body.len() as u64).div_ceil(3);
    assert_eq!(usage, Usage { attempts: 1, estimated_tokens: prompt + 2, ..Usage::default() });
    drop(server.join());
}

#[test]
fn no_attempt_is_made_that_may_cost_more_than_is_left() {
    let (asking, _) = client("http://127.0.0.1:9/v1".into(), NO_KEY, 3);
    let request = asking.request(&[("user", "hi".into())], 1);
    let needed = (request.body.len() as u64).div_ceil(3) + u64::from(MAX_TOKENS);
    let (answer, usage) = asking.ask(&request, Some(needed - 1));
    assert_eq!(answer, Err(ClientError::Budget { needed, left: needed - 1 }));
    assert_eq!(usage, Usage::default());
    // The second attempt does not fit once the first has cost something: one connection is all there is.
    let (url, server) = serve(vec![http("200 OK", "", "garbage")]);
    let (asking, _) = client(url, NO_KEY, 3);
    let (answer, usage) = asking.ask(&request, Some(2 * needed - 1));
    assert_eq!(answer, Err(ClientError::Budget { needed, left: needed - 1 }));
    assert_eq!((usage.attempts, usage.tokens(), server.join().unwrap().len()), (1, needed, 1));
}

#[test]
fn a_dead_endpoint_is_an_error_without_the_secrets_of_its_url() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (asking, noted) = client(format!("http://user:secret@{gone}/v1?token=secret"), NO_KEY, 2);
    let (answer, usage) = asking.ask(&asking.request(&[], 1), None);
    let error = answer.unwrap_err();
    assert!(matches!(error, ClientError::Exhausted { attempts: 3, .. }), "{error}");
    assert_eq!((usage.attempts, usage.tokens()), (3, 0));
    assert_eq!(*noted.lock().unwrap(), [Duration::from_millis(250), Duration::from_millis(500)]);
    assert!(error.to_string().contains(&format!("http://{gone}/v1: ")), "{error}");
    assert!(error.to_string().contains("cannot connect") && !error.to_string().contains("secret"), "{error}");
}

#[test]
fn a_key_is_sent_and_blotted_out_where_it_comes_back() {
    // A variable that is there in every process; nothing is changed in the environment.
    let key = std::env::var("PATH").unwrap();
    let echo = format!("you sent {key}");
    let (url, server) = serve(vec![http("503 Busy", "", &echo), completion(&echo, None, None)]);
    let (asking, _) = client(url, "PATH", 1);
    let request = asking.request(&[], 1);
    assert_eq!(asking.ask(&request, None).0.as_deref(), Ok("you sent [key]"));
    for asked in server.join().unwrap() {
        assert!(asked.contains(&format!("Bearer {key}")), "{asked}");
    }
    let (url, server) = serve(vec![http("401 Unauthorized", "", &key)]);
    let (asking, _) = client(url, "PATH", 3);
    let error = asking.ask(&request, None).0.unwrap_err().to_string();
    assert!(error.contains("[key]") && error.contains("variable PATH") && !error.contains(&key), "{error}");
    drop(server.join());
    assert!(!request.body.contains(&key));
    let (url, server) = serve(vec![good()]);
    assert!(client(url, NO_KEY, 0).0.ask(&request, None).0.is_ok());
    assert!(!server.join().unwrap()[0].to_lowercase().contains("authorization"));
}

#[test]
fn a_run_that_is_to_stop_waits_for_nothing() {
    let (url, server) = serve(vec![http("503 Busy", "retry-after: 30\r\n", "")]);
    let (mut asking, _) = client(url, NO_KEY, 3);
    asking.pause = Box::new(pause);
    let stop = asking.stop.clone();
    let watch = crate::world::Stopwatch::start();
    std::thread::spawn(move || {
        drop(server.join());
        stop.store(true, Ordering::SeqCst);
    });
    let (answer, usage) = asking.ask(&asking.request(&[], 1), None);
    assert_eq!((answer, usage.attempts), (Err(ClientError::Stopped), 1));
    assert!(watch.micros() < 10_000_000, "{} us", watch.micros());
}

#[test]
fn local_is_local() {
    for url in ["http://127.0.0.1:8000/v1", "http://localhost", "http://user@localhost:1/x", "http://[::1]:80"] {
        assert!(is_local(url), "{url}");
    }
    for url in ["https://api.example.com/v1", "http://localhost.example.com", "http://example.com/127.0.0.1", "x"] {
        assert!(!is_local(url), "{url}");
    }
}
