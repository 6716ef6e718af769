//! Tests of the folds on a small hand-made run.

mod audit;
mod fold;
mod model;
mod properties;

use crate::event::*;

/// Key of (step, task, draw 0, k).
pub fn key(step: u32, task: &str, k: u32) -> RolloutKey {
    RolloutKey { step, task: task.into(), draw: 0, k }
}

pub fn task(id: &str) -> TaskSpec {
    let call = |name: &str| ToolCall { name: name.into(), arguments: r#"{"path":"x"}"#.into() };
    TaskSpec {
        id: id.into(),
        env: "desk".into(),
        split: "train".into(),
        family: "files".into(),
        base: "17".into(),
        tools: vec![],
        turns: vec![TurnSpec {
            query: format!("do {id}"),
            solution: vec![call("cd"), call("mv"), call("ls")],
            answer: None,
            missing: None,
        }],
    }
}

pub fn started(run_id: &str) -> Event {
    RunStarted {
        run_id: run_id.into(),
        seed: 7,
        settings: r#"{"signals":{"window":4,"n_min":3,"theta":60,"min_recurrence":1}}"#.into(),
        code_version: "0.1.0".into(),
        policy_digest: "p0".into(),
        environment: "desk 1".into(),
    }
    .into()
}

pub fn admitted(id: &str, origin: Origin, draft: Option<&str>, step: u32) -> Event {
    TaskAdmitted { task: task(id), origin, weight: 1.0, draft: draft.map(str::to_owned), step }.into()
}

pub fn planned(step: u32, tasks: &[&str], group_size: u32) -> Event {
    BatchPlanned {
        step,
        policy_version: step - 1,
        groups: tasks.iter().map(|t| (t.to_string(), 0)).collect(),
        group_size,
        temperature: 0.9,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
    }
    .into()
}

/// A further round; each group is (task, draw).
pub fn refilled(step: u32, round: u32, groups: &[(&str, u32)]) -> Event {
    BatchRefilled { step, round, groups: groups.iter().map(|(t, d)| (t.to_string(), *d)).collect() }.into()
}

pub fn rollout(key: RolloutKey, score: Option<f64>, calls: &[&str]) -> Event {
    let call = |name: &&str| ToolCall { name: name.to_string(), arguments: "{}".into() };
    RolloutFinished {
        policy_version: key.step - 1,
        key,
        ids: vec![1, 2, 3, 4],
        prompt_len: 2,
        sampled: vec![(2, 2)],
        logprobs: vec![-0.5, -0.25],
        sampling_logprobs: Vec::new(),
        actions: vec![Action {
            turn: 0,
            text: "t".into(),
            calls: calls.iter().map(call).collect(),
            results: vec![String::new(); calls.len()],
        }],
        env_steps: calls.len() as u32,
        reward: score.map_or(Reward::Unscored("worker died".into()), Reward::Scored),
        end: if score.is_some() { EndReason::Done } else { EndReason::EnvironmentFailure },
    }
    .into()
}

pub fn signal(key: RolloutKey, kind: SignalKind, because: &str) -> Event {
    SignalRaised { key, kind, because: because.into() }.into()
}

pub fn gradient(step: u32, update: u32, tasks: &[(&str, u32)], loss: f64) -> Event {
    let rollouts = tasks.iter().flat_map(|(t, n)| (0..*n).map(move |k| (key(step, t, k), 1.0))).collect();
    GradientStepTaken {
        step,
        update,
        version_before: step - 1,
        version_after: step,
        rollouts,
        loss,
        policy_loss: loss,
        kl: 0.5,
        entropy: 2.0,
        clip_fraction: 0.25,
        grad_norm: 1.0,
        learning_rate: 1e-6,
        trained_tokens: 10,
        weights_hash: format!("w{step}.{update}"),
    }
    .into()
}

pub fn published(version: u32, step: u32) -> Event {
    PolicyPublished { version, step, weights_hash: format!("w{version}") }.into()
}

pub fn step_finished(step: u32) -> Event {
    StepFinished { step, mean_reward: 0.5, projection_digest: String::new() }.into()
}

/// A whole small run: two seeds, two steps, an evaluation and an evolution round with one admitted and
/// one rejected draft, then a third step that trains on the new task.
///
/// Step 1: a = [1, 0], b = [0, unscored]. Step 2: a = [0, 0], b = [1, 1]. Step 3: n = [1, 0], a = [1, 1].
pub fn small_run() -> Vec<Event> {
    let mut events = vec![
        started("r1"),
        admitted("a", Origin::Seed, None, 0),
        admitted("b", Origin::Seed, None, 0),
        published(0, 0),
        EvaluationFinished {
            step: 0,
            policy_version: 0,
            split: "test-normal".into(),
            results: vec![
                ("x".into(), Reward::Scored(1.0)),
                ("y".into(), Reward::Scored(0.5)),
                ("z".into(), Reward::Unscored("gone".into())),
                ("zz".into(), Reward::Scored(0.0)),
            ],
        }
        .into(),
        planned(1, &["b", "a"], 2),
        rollout(key(1, "b", 1), None, &["rm"]),
        rollout(key(1, "a", 0), Some(1.0), &["cd", "cd", "mv"]),
        rollout(key(1, "b", 0), Some(0.0), &["cd", "mv"]),
        rollout(key(1, "a", 1), Some(0.0), &["ls"]),
        signal(key(1, "a", 0), SignalKind::Boundary, r#"{"scores":[1.0,0.0]}"#),
        signal(key(1, "a", 1), SignalKind::Boundary, r#"{"scores":[1.0,0.0]}"#),
        gradient(1, 0, &[("a", 2)], 0.25),
        gradient(1, 1, &[("a", 2)], 0.75),
        published(1, 1),
        step_finished(1),
        planned(2, &["a", "b"], 2),
        rollout(key(2, "a", 0), Some(0.0), &["cd", "mv"]),
        rollout(key(2, "a", 1), Some(0.0), &[]),
        rollout(key(2, "b", 0), Some(1.0), &["cd", "mv"]),
        rollout(key(2, "b", 1), Some(1.0), &["cd", "mv"]),
    ];
    events.extend([
        signal(key(2, "a", 0), SignalKind::Forgetting, r#"{"score":0.0,"window":[1.0,0.0]}"#),
        signal(key(2, "a", 1), SignalKind::Forgetting, r#"{"score":0.0,"window":[1.0,0.0]}"#),
        signal(key(2, "a", 1), SignalKind::Rare, r#"{"pattern":["(none)"]}"#),
        StepSkipped { step: 2, update: 0, reason: "no trained tokens".into() }.into(),
        EvolutionStarted {
            round: 1,
            step: 2,
            mode: "feedback".into(),
            contexts: vec![ContextSpec {
                id: "c1.0".into(),
                task: Some("a".into()),
                kind: Some(SignalKind::Forgetting),
                rollouts: vec![key(2, "a", 0), key(2, "a", 1)],
            }],
        }
        .into(),
        ReflectionWritten {
            context: "c1.0".into(),
            author: "procedural".into(),
            summary: "moves fail".into(),
            failure_cause: "wrong folder".into(),
            instability_pattern: "cd first".into(),
            focus_pattern: vec!["cd".into(), "mv".into()],
            exploration_objectives: vec!["vary folders".into()],
            do_not_repeat: vec![],
        }
        .into(),
    ]);
    events.extend((0..3).map(|s| explored("c1.0", 0, s)));
    events.extend([
        draft("d1.0.0", "c1.0", "n"),
        draft("d1.0.1", "c1.0", "m"),
        DraftValidated {
            draft: "d1.0.0".into(),
            accepted: true,
            checks: vec![Check { name: "executes".into(), passed: true, detail: "fine".into() }],
            judge: "construction".into(),
        }
        .into(),
        DraftValidated {
            draft: "d1.0.1".into(),
            accepted: false,
            checks: vec![Check { name: "executes".into(), passed: false, detail: "no such file".into() }],
            judge: String::new(),
        }
        .into(),
        DraftRejected { draft: "d1.0.1".into(), reason: "executes".into(), detail: "no such file".into() }.into(),
        admitted("n", Origin::Synthesised, Some("d1.0.0"), 2),
        EvolutionFinished { round: 1, step: 2, drafts: 2, admitted: 1 }.into(),
        step_finished(2),
        planned(3, &["n", "a"], 2),
        rollout(key(3, "a", 0), Some(1.0), &["cd", "mv"]),
        rollout(key(3, "a", 1), Some(1.0), &["cd", "mv"]),
        rollout(key(3, "n", 0), Some(1.0), &["cd", "mv"]),
        rollout(key(3, "n", 1), Some(0.0), &["cd", "mv"]),
        signal(key(3, "n", 0), SignalKind::Boundary, "{}"),
        signal(key(3, "n", 1), SignalKind::Boundary, "{}"),
        gradient(3, 0, &[("n", 2)], 0.5),
        published(3, 3),
        step_finished(3),
        RunFinished { step: 3, weights_hash: "w3".into() }.into(),
    ]);
    events
}

pub fn explored(context: &str, round: u32, step: u32) -> Event {
    ExplorationStepTaken {
        context: context.into(),
        round,
        step,
        base: "17".into(),
        reasoning: "try".into(),
        call: ToolCall { name: "cd".into(), arguments: "{}".into() },
        observation: "ok".into(),
        is_error: false,
    }
    .into()
}

pub fn draft(id: &str, context: &str, task_id: &str) -> Event {
    DraftProposed {
        draft: id.into(),
        context: context.into(),
        author: "procedural".into(),
        task: task(task_id),
        intent: "move a file".into(),
        completion: "the file is there".into(),
        from_steps: vec![(0, 0), (0, 2)],
    }
    .into()
}
