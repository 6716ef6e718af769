//! One event of every kind with known values, for tests and golden bytes.

use super::*;

/// The rollout that the samples speak about.
pub fn rollout_key(step: u32, k: u32) -> RolloutKey {
    RolloutKey { step, task: "t-4f1c".into(), draw: 1, k }
}

/// A task with everything in it.
pub fn task() -> TaskSpec {
    TaskSpec {
        id: "t-4f1c".into(),
        env: "desk".into(),
        split: "train".into(),
        family: "mail+tickets/forward".into(),
        base: "18446744073709551615".into(),
        tools: vec!["mail_send".into(), "ticket_get".into()],
        turns: vec![
            TurnSpec {
                query: "Wer schickt \u{201e}Größe\u{201c}? 猫".into(),
                solution: vec![ToolCall { name: "ticket_get".into(), arguments: r#"{"id":17}"#.into() }],
                answer: Some("17".into()),
                missing: None,
            },
            TurnSpec {
                query: String::new(),
                solution: vec![],
                answer: None,
                missing: Some(Missing { field: "day".into(), reply: "On Tuesday.".into() }),
            },
        ],
    }
}

/// Meta of the samples.
pub fn meta() -> Meta {
    Meta { time_ms: 1_790_000_000_123, duration_us: 456_789, llm_prompt_tokens: 1_001, llm_completion_tokens: 77 }
}

/// One event of every kind, in the order of the codes.
pub fn all() -> Vec<Event> {
    let call = ToolCall { name: "ticket_get".into(), arguments: r#"{"id":17}"#.into() };
    vec![
        RunStarted {
            run_id: "00112233445566778899aabbccddeeff".into(),
            seed: 0xfedc_ba98_7654_3210,
            settings: r#"{"run.steps":12}"#.into(),
            code_version: "0.1.0".into(),
            policy_digest: "ab".repeat(32),
            environment: "desk 1".into(),
        }
        .into(),
        TaskAdmitted {
            task: task(),
            origin: Origin::Synthesised,
            weight: 1.25,
            draft: Some("d1.0.2".into()),
            step: 10,
        }
        .into(),
        BatchPlanned {
            step: 3,
            policy_version: 2,
            groups: vec![("t-4f1c".into(), 0), ("t-4f1c".into(), 1)],
            group_size: 8,
            temperature: 0.9,
            top_p: 0.75,
            top_k: 40,
            min_p: 0.0625,
        }
        .into(),
        RolloutFinished {
            key: rollout_key(3, 5),
            policy_version: 2,
            ids: vec![1, 2, 3, 151_645, u32::MAX],
            prompt_len: 2,
            sampled: vec![(2, 2)],
            logprobs: vec![-0.125, -13.5],
            sampling_logprobs: vec![-0.0625, -12.25],
            actions: vec![Action {
                turn: 0,
                text: "<tool_call>".into(),
                calls: vec![call.clone()],
                results: vec![r#"{"error":"no ticket 17"}"#.into()],
            }],
            env_steps: 1,
            reward: Reward::Unscored("worker died".into()),
            end: EndReason::EnvironmentFailure,
        }
        .into(),
        SignalRaised { key: rollout_key(3, 5), kind: SignalKind::Rare, because: r#"{"count":2,"total":210}"#.into() }
            .into(),
        GradientStepTaken {
            step: 3,
            update: 1,
            version_before: 4,
            version_after: 5,
            rollouts: vec![(rollout_key(3, 0), 0.865_875), (rollout_key(3, 1), -0.865_875)],
            loss: 0.6,
            policy_loss: 0.599,
            kl: 1e-3,
            entropy: 1.5,
            clip_fraction: 0.0625,
            grad_norm: 2.5,
            learning_rate: 1e-6,
            trained_tokens: 12_345,
            weights_hash: "cd".repeat(32),
        }
        .into(),
        StepSkipped { step: 4, update: 0, reason: "no trained tokens".into() }.into(),
        PolicyPublished { version: 5, step: 3, weights_hash: "cd".repeat(32) }.into(),
        CheckpointSaved {
            step: 3,
            version: 5,
            path: "checkpoints/5".into(),
            weights_hash: "cd".repeat(32),
            optimizer_hash: "ef".repeat(32),
        }
        .into(),
        EvaluationFinished {
            step: 10,
            policy_version: 9,
            split: "test-normal".into(),
            results: vec![("n-1".into(), Reward::Scored(1.0)), ("n-2".into(), Reward::Unscored("deadline".into()))],
        }
        .into(),
        EvolutionStarted {
            round: 1,
            step: 10,
            mode: "feedback".into(),
            contexts: vec![
                ContextSpec {
                    id: "c1.0".into(),
                    task: Some("t-4f1c".into()),
                    kind: Some(SignalKind::Boundary),
                    rollouts: vec![rollout_key(3, 5)],
                },
                ContextSpec { id: "c1.1".into(), task: None, kind: None, rollouts: vec![] },
            ],
        }
        .into(),
        ReflectionWritten {
            context: "c1.0".into(),
            author: "procedural".into(),
            summary: "The ticket does not exist.".into(),
            failure_cause: "wrong id".into(),
            instability_pattern: "searches before it reads in the good attempts".into(),
            focus_pattern: vec!["ticket_get".into()],
            exploration_objectives: vec!["vary the id".into(), "search first".into()],
            do_not_repeat: vec!["guess ids".into()],
        }
        .into(),
        ExplorationStepTaken {
            context: "c1.0".into(),
            round: 1,
            step: 7,
            base: "42".into(),
            reasoning: "look for one that exists".into(),
            call: call.clone(),
            observation: "no ticket 17".into(),
            is_error: true,
        }
        .into(),
        DraftProposed {
            draft: "d1.0.2".into(),
            context: "c1.0".into(),
            author: "procedural".into(),
            task: task(),
            intent: "Find who sent the ticket.".into(),
            completion: "The answer names the sender.".into(),
            from_steps: vec![(0, 1), (1, 7)],
        }
        .into(),
        DraftValidated {
            draft: "d1.0.2".into(),
            accepted: false,
            checks: vec![
                Check { name: "executes".into(), passed: true, detail: "3 calls, twice".into() },
                Check { name: "novel".into(), passed: false, detail: "like t-4f1b".into() },
            ],
            judge: "construction".into(),
        }
        .into(),
        DraftRejected { draft: "d1.0.2".into(), reason: "novel".into(), detail: "like t-4f1b".into() }.into(),
        EvolutionFinished { round: 1, step: 10, drafts: 12, admitted: 7 }.into(),
        StepFinished { step: 3, mean_reward: 0.4375, projection_digest: "12".repeat(32) }.into(),
        RunFinished { step: 12, weights_hash: "34".repeat(32) }.into(),
        RunResumed { step: 7, code_version: "0.1.0".into() }.into(),
        FailureNoted { stage: "environment".into(), message: "worker 2 died; restarted".into() }.into(),
        BranchCreated {
            name: "hotter".into(),
            branch: 1,
            parent: 0,
            at: 4_294_967_296,
            settings: r#"{"batch.temperature":1.0}"#.into(),
        }
        .into(),
        BranchUndone { branch: 1, to: 4_294_967_297, at: 4_294_967_311, reason: "the reward was wrong".into() }.into(),
        BranchDeleted { branch: 1, reason: String::new() }.into(),
        GarbageCollected {
            removed: vec![RemovedFile { path: "checkpoints/12".into(), bytes: 1 << 33, reason: "superseded".into() }],
        }
        .into(),
        BatchRefilled { step: 3, round: 2, groups: vec![("t-4f1c".into(), 2), ("t-5a00".into(), 0)] }.into(),
        LlmAsked {
            request: "56".repeat(32),
            role: "judge".into(),
            about: "d1.0.2".into(),
            model: "explorer-1".into(),
            body: r#"{"max_tokens":1024,"messages":[],"model":"explorer-1","seed":5}"#.into(),
            answer: Some(r#"{"belongs": true, "reason": "it does"}"#.into()),
            failure: String::new(),
            attempts: 2,
            prompt_tokens: 4_294_967_299,
            completion_tokens: 33,
            estimated_tokens: 1_046,
            cost_micros: 4_294_967_300,
        }
        .into(),
    ]
}

/// What the golden bytes of an older version must have become: the event in today's struct, by hand.
pub fn upcast(kind: Kind, version: u16) -> Event {
    let newest = all().into_iter().find(|e| e.kind() == kind).expect("a sample of every kind");
    match (newest, version) {
        (Event::BatchPlanned(e), 1) => BatchPlanned { top_p: 1.0, top_k: 0, min_p: 0.0, ..e }.into(),
        (Event::RolloutFinished(e), 1) => RolloutFinished { sampling_logprobs: Vec::new(), ..e }.into(),
        _ => {
            panic!("{kind:?} version {version} is older than the newest one: write here what its golden bytes are now")
        }
    }
}
