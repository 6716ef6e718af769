//! An environment whose tasks a judge scores where it cannot: synthesised tasks of AppWorld and of an `env_service`.
//!
//! The environment says so itself: its `evaluate` is unscored for a reason that ends in [`NEEDS_JUDGE`]. Then the judge
//! reads the episode, and its yes or no is the reward. A judge that cannot be asked leaves the episode unscored; one is
//! never asked about an episode in which the agent neither did nor said anything, which is a failure.

use std::sync::Arc;

use super::ExploreError;
use crate::env::{
    EnvError, Environment, Figure, Message, NEEDS_JUDGE, Narrator, Opening, Role, Session, StepReply, TurnReply,
};
use crate::event::{Reward, TaskSpec, ToolCall};

/// Longest text of one observation that a judge reads, characters: its start and its end.
const OBSERVATION_CHARS: usize = 4000;
/// Most entries of an episode that a judge reads: the first and the last.
const ENTRIES: usize = 80;

/// One thing that happened in an episode.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Happened {
    /// The user, or the environment in the user's place, said.
    User(String),
    /// The agent said.
    Agent(String),
    /// The agent acted.
    Call {
        /// What it called.
        call: ToolCall,
        /// What it read.
        result: String,
    },
    /// So many entries are left out here.
    LeftOut(usize),
}

/// What a judge reads.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Transcript {
    /// Label of the episode.
    pub episode: String,
    /// What the user asked for, turn by turn.
    pub asked: Vec<String>,
    /// What happened, in order.
    pub happened: Vec<Happened>,
}

impl Transcript {
    /// Whether the agent did or said anything.
    fn is_idle(&self) -> bool {
        self.happened.iter().all(|h| match h {
            Happened::Agent(words) => words.trim().is_empty(),
            Happened::Call { .. } => false,
            Happened::User(_) | Happened::LeftOut(_) => true,
        })
    }

    /// Without what lies in the middle of a long one.
    fn shortened(&self) -> Transcript {
        let n = self.happened.len();
        if n <= ENTRIES {
            return self.clone();
        }
        let (head, tail) = (&self.happened[..ENTRIES / 2], &self.happened[n - ENTRIES / 2..]);
        let left_out = [Happened::LeftOut(n - head.len() - tail.len())];
        Transcript { happened: [head, &left_out, tail].concat(), ..self.clone() }
    }
}

/// Start and end of a long text.
fn shortened(text: &str) -> String {
    let n = text.chars().count();
    if n <= OBSERVATION_CHARS {
        return text.to_owned();
    }
    let half = OBSERVATION_CHARS / 2;
    let (head, tail): (String, String) = (text.chars().take(half).collect(), text.chars().skip(n - half).collect());
    format!("{head}\n[{} characters]\n{tail}", n - 2 * half)
}

/// Who scores what the environment cannot.
pub trait Judge: Send + Sync {
    /// Recorded as the judge.
    fn name(&self) -> &str;
    /// Whether the agent did what was asked, and why.
    ///
    /// # Errors
    /// When it cannot be asked or gives no usable answer.
    fn score(&self, transcript: &Transcript) -> Result<(bool, String), ExploreError>;
}

/// See the module's documentation.
pub struct Judged {
    env: Arc<dyn Environment>,
    judge: Arc<dyn Judge>,
}

impl Judged {
    /// `env`, with `judge` for what it cannot score.
    pub fn new(env: Arc<dyn Environment>, judge: Arc<dyn Judge>) -> Judged {
        Judged { env, judge }
    }
}

impl Environment for Judged {
    fn name(&self) -> &str {
        self.env.name()
    }

    /// The judge is part of what a reward means.
    fn version(&self) -> String {
        format!("{}, judge: {}", self.env.version(), self.judge.name())
    }

    fn splits(&self) -> Vec<String> {
        self.env.splits()
    }

    fn tasks(&self, split: &str, seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        self.env.tasks(split, seed, limit)
    }

    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        let transcript = Transcript::default();
        Ok(Box::new(JudgedSession { session: self.env.open()?, judge: Arc::clone(&self.judge), transcript }))
    }

    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        self.env.playground(near, seed)
    }

    fn max_sessions(&self) -> Option<usize> {
        self.env.max_sessions()
    }

    fn narrator(&self) -> Option<&dyn Narrator> {
        self.env.narrator()
    }

    fn figures(&self) -> Vec<Figure> {
        self.env.figures()
    }
}

struct JudgedSession {
    session: Box<dyn Session>,
    judge: Arc<dyn Judge>,
    transcript: Transcript,
}

impl JudgedSession {
    fn hear(&mut self, messages: &[Message]) {
        let said = messages.iter().filter(|m| m.role != Role::System);
        self.transcript.happened.extend(said.map(|m| Happened::User(shortened(&m.content))));
    }
}

impl Session for JudgedSession {
    fn reset(&mut self, task: &TaskSpec, episode: &str, seed: u64) -> Result<Opening, EnvError> {
        let opening = self.session.reset(task, episode, seed)?;
        let asked = task.turns.iter().map(|t| t.query.clone()).collect();
        self.transcript = Transcript { episode: episode.into(), asked, happened: Vec::new() };
        self.hear(&opening.messages);
        Ok(opening)
    }

    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        let reply = self.session.step(calls)?;
        let pairs = calls.iter().zip(&reply.results);
        self.transcript
            .happened
            .extend(pairs.map(|(call, r)| Happened::Call { call: call.clone(), result: shortened(&r.content) }));
        Ok(reply)
    }

    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        let reply = self.session.end_turn(say)?;
        self.transcript.happened.push(Happened::Agent(shortened(say)));
        self.hear(&reply.messages);
        Ok(reply)
    }

    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        let reward = self.session.evaluate()?;
        match &reward {
            Reward::Unscored(reason) if reason.ends_with(NEEDS_JUDGE) => {}
            _ => return Ok(reward),
        }
        if self.transcript.is_idle() {
            return Ok(Reward::Scored(0.0));
        }
        Ok(match self.judge.score(&self.transcript.shortened()) {
            Ok((success, _)) => Reward::Scored(f64::from(u8::from(success))),
            Err(error) => Reward::Unscored(format!("the judge {}: {error}", self.judge.name())),
        })
    }

    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        self.session.state_digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{ToolDef, ToolResult};
    use crate::event::TurnSpec;
    use std::sync::Mutex;

    /// A stand-in: an environment that scores official tasks 0.25 and needs a judge for others.
    struct Stub;

    impl Environment for Stub {
        fn name(&self) -> &str {
            "stub"
        }
        fn version(&self) -> String {
            "1".into()
        }
        fn splits(&self) -> Vec<String> {
            vec!["train".into()]
        }
        fn tasks(&self, _: &str, _: u64, _: usize) -> Result<Vec<TaskSpec>, EnvError> {
            Ok(vec![task("official")])
        }
        fn open(&self) -> Result<Box<dyn Session>, EnvError> {
            Ok(Box::new(StubSession(true)))
        }
        fn playground(&self, _: Option<&TaskSpec>, _: u64) -> Result<TaskSpec, EnvError> {
            Ok(task("official"))
        }
    }

    struct StubSession(bool);

    impl Session for StubSession {
        fn reset(&mut self, task: &TaskSpec, _: &str, _: u64) -> Result<Opening, EnvError> {
            self.0 = task.id == "official";
            let message = |role, content: &str| Message { role, content: content.into() };
            let messages = vec![message(Role::System, "rules"), message(Role::User, &task.turns[0].query)];
            Ok(Opening { messages, tools: Vec::<ToolDef>::new(), turns: 1, step_limit: 9 })
        }
        fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
            let results = calls.iter().map(|c| ToolResult { content: c.arguments.clone(), is_error: false }).collect();
            Ok(StepReply { results, done: false })
        }
        fn end_turn(&mut self, _: &str) -> Result<TurnReply, EnvError> {
            let messages = vec![Message { role: Role::User, content: "and?".into() }];
            Ok(TurnReply { messages, released: Vec::new(), done: false })
        }
        fn evaluate(&mut self) -> Result<Reward, EnvError> {
            Ok(if self.0 { Reward::Scored(0.25) } else { Reward::Unscored(format!("new; {NEEDS_JUDGE}")) })
        }
        fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
            Ok(Some([7; 32]))
        }
    }

    /// A stand-in for an LLM: says yes where something was called, fails where it reads "fail"; keeps what it read.
    #[derive(Default)]
    struct StubJudge(Mutex<Vec<Transcript>>);

    impl Judge for StubJudge {
        fn name(&self) -> &str {
            "stub-judge"
        }
        fn score(&self, transcript: &Transcript) -> Result<(bool, String), ExploreError> {
            self.0.lock().unwrap().push(transcript.clone());
            if transcript.asked[0] == "fail" {
                return Err(ExploreError::Endpoint("no answer".into()));
            }
            Ok((transcript.happened.iter().any(|h| matches!(h, Happened::Call { .. })), "seen".into()))
        }
    }

    fn task(id: &str) -> TaskSpec {
        TaskSpec {
            id: id.into(),
            env: "stub".into(),
            split: "train".into(),
            family: String::new(),
            base: "official".into(),
            tools: Vec::new(),
            turns: vec![TurnSpec { query: id.into(), solution: Vec::new(), answer: None, missing: None }],
        }
    }

    fn call(text: &str) -> ToolCall {
        ToolCall { name: "f".into(), arguments: text.into() }
    }

    #[test]
    fn the_environment_scores_what_it_can_and_the_judge_the_rest() {
        let judge = Arc::new(StubJudge::default());
        let env = Judged::new(Arc::new(Stub), judge.clone());
        assert_eq!(env.version(), "1, judge: stub-judge");
        let mut session = env.open().unwrap();
        session.reset(&task("official"), "e1", 0).unwrap();
        session.step(&[call("{}")]).unwrap();
        assert_eq!(session.evaluate().unwrap(), Reward::Scored(0.25));
        session.reset(&task("ours"), "e2", 0).unwrap();
        session.end_turn(" ").unwrap();
        assert_eq!(session.evaluate().unwrap(), Reward::Scored(0.0), "idle");
        assert!(judge.0.lock().unwrap().is_empty(), "nobody was asked so far");
        session.end_turn("hello").unwrap();
        assert_eq!(session.evaluate().unwrap(), Reward::Scored(0.0));
        session.step(&[call("{\"a\":1}")]).unwrap();
        assert_eq!(session.evaluate().unwrap(), Reward::Scored(1.0));
        let read = judge.0.lock().unwrap().pop().unwrap();
        assert_eq!((read.episode.as_str(), read.asked), ("e2", vec!["ours".to_string()]));
        let user = |text: &str| Happened::User(text.into());
        let agent = |text: &str| Happened::Agent(text.into());
        let called = Happened::Call { call: call("{\"a\":1}"), result: "{\"a\":1}".into() };
        assert_eq!(read.happened, [user("ours"), agent(" "), user("and?"), agent("hello"), user("and?"), called]);

        session.reset(&task("fail"), "e3", 0).unwrap();
        session.step(&[call("{}")]).unwrap();
        let Reward::Unscored(why) = session.evaluate().unwrap() else { panic!("a made-up score") };
        assert!(why.contains("stub-judge") && why.contains("no answer"), "{why}");
        assert!(!why.ends_with(NEEDS_JUDGE));
    }

    #[test]
    fn a_judge_reads_the_start_and_the_end_of_what_is_long() {
        let judge = Arc::new(StubJudge::default());
        let env = Judged::new(Arc::new(Stub), judge.clone());
        let mut session = env.open().unwrap();
        session.reset(&task("ours"), "e", 0).unwrap();
        let long = format!("\"a{}z\"", "é".repeat(5000));
        session.step(&[call(&long)]).unwrap();
        for i in 0..100 {
            session.step(&[call(&i.to_string())]).unwrap();
        }
        session.evaluate().unwrap();
        let read = judge.0.lock().unwrap().pop().unwrap();
        assert_eq!(read.happened.len(), ENTRIES + 1);
        // 102 entries: the user's, the long one and a hundred short ones.
        assert_eq!(read.happened[ENTRIES / 2], Happened::LeftOut(22));
        let Happened::Call { result, .. } = &read.happened[1] else { panic!("the long call") };
        assert!(result.starts_with("\"aé") && result.ends_with("éz\"") && result.contains("[1004 characters]"));
        assert_eq!(read.happened[ENTRIES], Happened::Call { call: call("99"), result: "99".into() });
    }
}
