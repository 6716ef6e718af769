//! Asking against recorded answers, budgets and a server on loopback.

use super::*;
use crate::evolve::client::tests::{Turn, completion, http, serve};
use serde_json::json;
use std::sync::Mutex;

const TERMS: Terms = Terms { reasks: 2, budget_tokens: 0, price_prompt: 2.5, price_completion: 10.0 };
const MAX_TOKENS: u32 = 16;
const GOOD: &str = r#"{"belongs": true, "reason": "it does"}"#;
/// Nobody listens there.
const DEAD: &str = "http://127.0.0.1:9/v1";

type Kepts = Arc<Mutex<Vec<LlmAsked>>>;

fn asker(url: &str, terms: Terms, change: impl FnOnce(&mut Book)) -> (Asker, Kepts) {
    let endpoint = Endpoint {
        url: url.into(),
        model: "m".into(),
        key_env: "COEVOLVE_NO_SUCH_KEY".into(),
        timeout_ms: 10_000,
        retries: 0,
        max_tokens: MAX_TOKENS,
    };
    let kept = Kepts::default();
    let to = kept.clone();
    let keep: Keep = Box::new(move |asked, _| {
        to.lock().unwrap().push(asked);
        Ok(())
    });
    let mut book = Book { own: BTreeMap::new(), recording: None, purse: Arc::default(), keep };
    change(&mut book);
    (Asker::new(endpoint, terms, book, Arc::new(AtomicBool::new(false))).unwrap(), kept)
}

fn judge(asker: &Asker) -> Result<Value, ExploreError> {
    asker.ask(Role::Judge, "d1.0", "You judge.", &json!({"turns": []}), 7 << 33)
}

fn says(text: &str) -> Turn {
    completion(text, Some("stop"), Some((3, 1)))
}

#[test]
fn what_cannot_be_used_is_asked_for_again_with_the_fault_named() {
    let bad = ["I am sorry.", r#"Well: {"belongs": "yes", "reason": ""}"#];
    let (url, server) = serve(vec![says(bad[0]), says(bad[1]), says(&format!("So:\n```json\n{GOOD}\n```"))]);
    let (asking, kept) = asker(&url, TERMS, |_| ());
    assert_eq!(judge(&asking).unwrap()["belongs"], true);
    let bodies: Vec<Value> = server
        .join()
        .unwrap()
        .iter()
        .map(|text| serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap())
        .collect();
    let contents = |i: usize| -> Vec<String> {
        let all = bodies[i]["messages"].as_array().unwrap();
        all.iter().map(|m| m["content"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(contents(0), ["You judge.", r#"{"turns":[]}"#]);
    assert_eq!(contents(1)[..3], ["You judge.", r#"{"turns":[]}"#, bad[0]]);
    assert!(contents(1)[3].contains("it holds no whole JSON"), "{:?}", contents(1));
    assert_eq!(contents(2)[..4], contents(1)[..]);
    assert!(contents(2)[5].contains(r#""belongs" is a string, not true or false"#), "{:?}", contents(2));
    // Every answer is kept, the unusable ones, too, each with what it cost: 3 x 2.5 + 10, rounded.
    let kept = kept.lock().unwrap();
    assert_eq!(kept.len(), 3);
    for (asked, body) in kept.iter().zip(&bodies) {
        assert_eq!(asked.request, blake3::hash(body.to_string().as_bytes()).to_hex().to_string());
        assert_eq!((asked.role.as_str(), asked.about.as_str(), asked.model.as_str()), ("judge", "d1.0", "m"));
        assert_eq!((asked.attempts, asked.prompt_tokens, asked.completion_tokens, asked.cost_micros), (1, 3, 1, 18));
        assert_eq!(serde_json::from_str::<Value>(&asked.body).unwrap(), *body);
    }
    let answers: Vec<&str> = kept.iter().map(|a| a.answer.as_deref().unwrap()).collect();
    assert_eq!(answers[..2], bad);

    let (url, server) = serve(vec![says(bad[0]), says(bad[1])]);
    let (asking, kept) = asker(&url, Terms { reasks: 1, ..TERMS }, |_| ());
    let error = judge(&asking).unwrap_err();
    assert!(matches!(error, ExploreError::Unusable { role: "judge", asked: 2, .. }), "{error}");
    assert!(error.to_string().contains(r#""belongs" is a string"#), "{error}");
    assert_eq!((server.join().unwrap().len(), kept.lock().unwrap().len()), (2, 2));
}

#[test]
fn what_is_recorded_is_not_asked() {
    let (url, server) = serve(vec![says("no"), says(GOOD)]);
    let (asking, kept) = asker(&url, TERMS, |_| ());
    let wanted = judge(&asking).unwrap();
    drop(server.join());
    let recorded = kept.lock().unwrap().clone();
    let answers = |n: usize| -> BTreeMap<String, Told> {
        let one = |a: &LlmAsked| {
            let usage =
                Usage { prompt_tokens: a.prompt_tokens, completion_tokens: a.completion_tokens, ..Usage::default() };
            (a.request.clone(), Told { answer: a.answer.clone().unwrap(), usage })
        };
        recorded[..n].iter().map(one).collect()
    };
    // By the run itself: the same answers, nothing sent, nothing recorded twice, nothing spent.
    let (asking, kept) = asker(DEAD, TERMS, |book| book.own = answers(2));
    assert_eq!(judge(&asking).unwrap(), wanted);
    assert_eq!((kept.lock().unwrap().len(), asking.book.purse.spent()), (0, 0));
    // By another run: recorded here, too, as not asked for; it counts for the budget, so that this ends where that did.
    let replay = |n| Recording { folder: "some/run".into(), answers: answers(n) };
    let (asking, kept) = asker(DEAD, TERMS, |book| book.recording = Some(Arc::new(replay(2))));
    assert_eq!(judge(&asking).unwrap(), wanted);
    let copies: Vec<LlmAsked> =
        recorded.iter().map(|a| LlmAsked { attempts: 0, cost_micros: 0, ..a.clone() }).collect();
    assert_eq!((&*kept.lock().unwrap(), asking.book.purse.spent()), (&copies, 8));
    // What neither holds is an error that names the run and the request.
    let (asking, kept) = asker(DEAD, TERMS, |book| book.recording = Some(Arc::new(replay(1))));
    let error = judge(&asking).unwrap_err();
    let ExploreError::NotRecorded { request, role: "judge", .. } = &error else { panic!("{error}") };
    assert_eq!(*request, recorded[1].request);
    assert!(error.to_string().contains("some/run") && error.to_string().contains(request.as_str()), "{error}");
    assert_eq!(kept.lock().unwrap().len(), 1);
}

#[test]
fn no_request_goes_out_that_may_pass_the_budget() {
    let (url, server) = serve(vec![says(GOOD)]);
    let (asking, kept) = asker(&url, TERMS, |_| ());
    judge(&asking).unwrap();
    drop(server.join());
    let asked = kept.lock().unwrap()[0].clone();
    let needed = (asked.body.len() as u64).div_ceil(3) + u64::from(MAX_TOKENS);
    let within = |budget_tokens| Terms { budget_tokens, ..TERMS };
    // What was spent before counts, to the token.
    let (asking, kept) = asker(DEAD, within(1000 + needed - 1), |book| book.purse = Arc::new(Purse::new(1000)));
    let error = judge(&asking).unwrap_err();
    let ExploreError::Budget { spent: 1000, needed: n, budget } = error else { panic!("{error}") };
    assert_eq!((n, budget, kept.lock().unwrap().len()), (needed, 1000 + needed - 1, 0));
    let (url, server) = serve(vec![says(GOOD)]);
    let (asking, _) = asker(&url, within(1000 + needed), |book| book.purse = Arc::new(Purse::new(1000)));
    judge(&asking).unwrap();
    drop(server.join());
    // Now 4 more are spent.
    assert!(matches!(judge(&asking), Err(ExploreError::Budget { spent: 1004, .. })));
    // A recorded answer costs what it cost: a replayed run stops where the recorded one did.
    let kept =
        Told { answer: GOOD.into(), usage: Usage { prompt_tokens: 3, completion_tokens: 1, ..Usage::default() } };
    let answers = BTreeMap::from([(asked.request.clone(), kept)]);
    let recording = Arc::new(Recording { folder: "r".into(), answers });
    let (asking, _) = asker(DEAD, within(needed + 3), |book| book.recording = Some(recording));
    judge(&asking).unwrap();
    assert!(matches!(judge(&asking), Err(ExploreError::Budget { spent: 4, .. })));
}

#[test]
fn what_was_spent_for_nothing_is_recorded_and_a_log_that_fails_is_an_error() {
    let (url, server) = serve(vec![http("200 OK", "", "<html>")]);
    let (asking, kept) = asker(&url, TERMS, |_| ());
    let error = judge(&asking).unwrap_err();
    assert!(matches!(&error, ExploreError::Endpoint(why) if why.contains("not JSON")), "{error}");
    drop(server.join());
    let kept = kept.lock().unwrap().remove(0);
    assert_eq!((kept.answer, kept.attempts, kept.cost_micros), (None, 1, 0));
    assert!(kept.failure.contains("not JSON"), "{}", kept.failure);
    assert_eq!(kept.estimated_tokens, (kept.body.len() as u64).div_ceil(3) + u64::from(MAX_TOKENS));
    assert_eq!(asking.book.purse.spent(), kept.estimated_tokens);

    let (url, server) = serve(vec![says(GOOD)]);
    let (asking, _) = asker(&url, TERMS, |book| book.keep = Box::new(|_, _| Err("disk full".into())));
    assert!(matches!(judge(&asking), Err(ExploreError::Unrecorded(why)) if why == "disk full"));
    drop(server.join());
}
