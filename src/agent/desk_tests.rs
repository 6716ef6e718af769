//! Agents in the embedded office.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::template::ChatTemplate;
use super::testing::{LateHands, facts};
use super::*;
use crate::env::Environment;
use crate::env::desk::{self, Desk};
use crate::model::tokenizer::{Tokenizer, TokenizerNotes};

fn jobs(split: &str, tasks: usize, size: u32) -> Vec<EpisodeJob> {
    let tasks = Desk::default().tasks(split, 1, tasks).unwrap();
    let mut jobs = Vec::new();
    for (group, task) in tasks.into_iter().enumerate() {
        for k in 0..size {
            let key = RolloutKey { step: 1, task: task.id.clone(), draw: 0, k };
            let task = task.clone();
            jobs.push(EpisodeJob { task, key, group, sampling: Sampling::at(1.0), seed: 4, label: split.into() });
        }
    }
    jobs
}

fn play(agent: &dyn Agent, jobs: &[EpisodeJob]) -> Vec<EpisodeRecord> {
    let mut hands = LateHands::new(InlineHands::new(Arc::new(Desk::default())), 1);
    let mut records = BTreeMap::new();
    agent
        .play(&mut hands, jobs, &Limits::default(), &mut |i, r| assert!(records.insert(i, facts(r)).is_none()))
        .unwrap();
    records.into_values().collect()
}

fn dialect() -> ChatDialect {
    let notes = TokenizerNotes {
        eos: Some("<|im_end|>".into()),
        chat_template: Some(desk::chat_template().into()),
        ..TokenizerNotes::default()
    };
    let tokenizer = Tokenizer::from_bytes(desk::tokenizer_json().as_bytes(), notes).unwrap();
    let template = ChatTemplate::new(desk::chat_template(), tokenizer.specials().clone()).unwrap();
    ChatDialect::new(template, tokenizer, ChatOptions::default()).unwrap()
}

#[test]
fn the_reference_solves_every_task_in_bytes_and_in_the_models_own_tokens() {
    let dialect = Arc::new(dialect());
    for split in ["train", "test-normal", "test-challenge"] {
        let jobs = jobs(split, 60, 1);
        let bytes = play(&ReferenceAgent::new(), &jobs);
        let tokens = play(&ReferenceAgent::new().speaking(dialect.clone()), &jobs);
        assert_eq!(bytes.len(), jobs.len());
        for (b, t) in bytes.iter().zip(&tokens) {
            assert_eq!((&b.reward, b.end), (&Reward::Scored(1.0), EndReason::Done), "{split} {:?}", b.actions);
            assert_eq!((&t.reward, t.end), (&Reward::Scored(1.0), EndReason::Done), "{split} {:?}", t.actions);
            let calls = |r: &EpisodeRecord| r.actions.iter().flat_map(|a| a.calls.clone()).collect::<Vec<_>>();
            assert_eq!(calls(b), calls(t));
            assert!(t.prompt_len <= 400, "{} prompt tokens", t.prompt_len);
        }
    }
}

#[test]
fn agents_that_do_not_understand_score_nothing() {
    let jobs = jobs("test-normal", 60, 1);
    for agent in [&NoopAgent as &dyn Agent, &EchoAgent, &RandomAgent] {
        for record in play(agent, &jobs) {
            assert_eq!(record.reward, Reward::Scored(0.0), "{}: {:?}", agent.name(), record.actions);
        }
    }
}

#[test]
fn the_scripted_agent_succeeds_exactly_where_it_means_to() {
    let jobs = jobs("train", 40, 8);
    let agent = ScriptedAgent::new(3);
    let records = play(&agent, &jobs);
    // Per family the share of successes follows the documented competence.
    let mut families: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for (job, record) in jobs.iter().zip(&records) {
        let entry = families.entry(&job.task.family).or_default();
        entry.0 += record.reward.score().unwrap();
        entry.1 += 1.0;
    }
    for (family, (solved, played)) in families {
        let p = agent.competence(4, family);
        // Four standard deviations of a binomial.
        let slack = 4.0 * (p * (1.0 - p) / played).sqrt() + 1e-9;
        assert!((solved / played - p).abs() <= slack, "{family}: {solved} of {played}, competence {p}");
    }
    assert_eq!(play(&agent, &jobs), records);
}
