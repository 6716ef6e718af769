//! What sampling costs: choosing tokens from logits, and whole plays on a small random model.
//!
//! `cargo bench --bench sampling`

use std::hint::black_box;
use std::sync::Arc;

use coevolve::agent::sample::{Chooser, Sampling};
use coevolve::agent::template::ChatTemplate;
use coevolve::agent::{
    Agent, ByteDialect, ChatDialect, ChatOptions, Dialect, EpisodeJob, InlineHands, Limits, Line, ModelPolicy,
    PlayStats, PolicyAgent,
};
use coevolve::env::desk;
use coevolve::env::{EnvError, Environment, Message, Opening, Role, Session, StepReply, ToolResult, TurnReply};
use coevolve::event::{Reward, RolloutKey, TaskSpec, ToolCall};
use coevolve::model::tokenizer::{Tokenizer, TokenizerNotes};
use coevolve::model::{Decoder, ModelConfig, Params};
use coevolve::world::draw;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Answers at once; three user turns, a prompt of 200 tokens.
struct Prompter;

impl Environment for Prompter {
    fn name(&self) -> &str {
        "prompter"
    }
    fn version(&self) -> String {
        "1".into()
    }
    fn splits(&self) -> Vec<String> {
        Vec::new()
    }
    fn tasks(&self, _: &str, _: u64, _: usize) -> Result<Vec<TaskSpec>, EnvError> {
        Ok(Vec::new())
    }
    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(Prompting { turns: 0 }))
    }
    fn playground(&self, _: Option<&TaskSpec>, _: u64) -> Result<TaskSpec, EnvError> {
        Ok(task("p"))
    }
}

struct Prompting {
    turns: u32,
}

impl Session for Prompting {
    fn reset(&mut self, task: &TaskSpec, _: &str, _: u64) -> Result<Opening, EnvError> {
        self.turns = 0;
        let content = task.id.repeat(196 / task.id.len());
        let messages = vec![Message { role: Role::User, content }];
        Ok(Opening { messages, tools: Vec::new(), turns: 3, step_limit: 30 })
    }
    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        let result = ToolResult { content: "{\"ok\":1}".into(), is_error: false };
        Ok(StepReply { results: vec![result; calls.len()], done: false })
    }
    fn end_turn(&mut self, _: &str) -> Result<TurnReply, EnvError> {
        self.turns += 1;
        let messages = vec![Message { role: Role::User, content: "and then the next thing".into() }];
        Ok(TurnReply { messages, released: Vec::new(), done: self.turns == 3 })
    }
    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        Ok(Reward::Scored(0.0))
    }
    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        Ok(None)
    }
}

fn task(id: &str) -> TaskSpec {
    TaskSpec {
        id: id.into(),
        env: "prompter".into(),
        split: String::new(),
        family: String::new(),
        base: String::new(),
        tools: Vec::new(),
        turns: Vec::new(),
    }
}

/// The shape of the embedded policy.
fn agent() -> PolicyAgent {
    let json = r#"{"model_type":"qwen3","vocab_size":1200,"hidden_size":192,"intermediate_size":512,
        "num_hidden_layers":4,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":32,
        "rms_norm_eps":1e-6,"rope_theta":10000.0,"max_position_embeddings":2048,
        "tie_word_embeddings":true,"hidden_act":"silu"}"#;
    let config = ModelConfig::from_json(json).expect("invariant: the configuration above is valid");
    let params = Params::random(&config, 1, 0.02);
    let decoder = Decoder::new(&config, &params, None).expect("invariant: the parameters are of this configuration");
    PolicyAgent::new("random", Arc::new(ModelPolicy(Arc::new(decoder))), Arc::new(ByteDialect))
}

fn play(agent: &PolicyAgent, jobs: &[EpisodeJob], concurrent: usize) -> PlayStats {
    let limits = Limits { turn_tokens: 48, concurrent, ..Limits::default() };
    let mut hands = InlineHands::new(Arc::new(Prompter));
    agent
        .play(&mut hands, jobs, &limits, &mut |_, record| {
            black_box(record);
        })
        .expect("invariant: the environment above never fails")
}

fn choosing(c: &mut Criterion) {
    let mut group = c.benchmark_group("choose");
    for vocab in [1_200, 49_152] {
        let mut noise = draw(1, "bench", &[]);
        let logits: Vec<f32> = (0..vocab).map(|_| (noise.unit() * 20.0) as f32).collect();
        group.throughput(Throughput::Elements(vocab));
        let full = Sampling::at(0.9);
        for (name, sampling) in [
            ("greedy", Sampling::at(0.0)),
            ("full", full),
            ("nucleus", Sampling { top_p: 0.95, ..full }),
            ("top-k", Sampling { top_k: 20, ..full }),
            ("min-p", Sampling { min_p: 0.05, ..full }),
        ] {
            let mut chooser = Chooser::default();
            group.bench_function(BenchmarkId::new(name, vocab), |b| {
                b.iter(|| chooser.choose(black_box(&logits), &sampling, noise.unit()));
            });
        }
    }
    group.finish();
}

fn playing(c: &mut Criterion) {
    let agent = agent();
    let jobs: Vec<EpisodeJob> = (0..64u32)
        .map(|i| {
            let id = format!("t{}", i / 8);
            let key = RolloutKey { step: 1, task: id.clone(), draw: 0, k: i % 8 };
            let group = i as usize / 8;
            EpisodeJob { task: task(&id), key, group, sampling: Sampling::at(0.9), seed: 1, label: "bench".into() }
        })
        .collect();
    let stats = play(&agent, &jobs, 64);
    let mut group = c.benchmark_group("play 64 episodes");
    group.sample_size(10).throughput(Throughput::Elements(stats.sampled_tokens));
    for concurrent in [1, 8, 32, 64] {
        group.bench_function(BenchmarkId::new("concurrent", concurrent), |b| {
            b.iter(|| play(&agent, &jobs, concurrent));
        });
    }
    group.finish();
    eprintln!("one play: {stats:?}");
}

/// What templates and tokenizer cost per message, in the embedded policy's dialect.
fn speaking(c: &mut Criterion) {
    let notes = TokenizerNotes { eos: Some("<|im_end|>".into()), ..TokenizerNotes::default() };
    let tokenizer = Tokenizer::from_bytes(desk::tokenizer_json().as_bytes(), notes)
        .expect("invariant: the embedded tokenizer is valid");
    let template = ChatTemplate::new(desk::chat_template(), tokenizer.specials().clone())
        .expect("invariant: the embedded template is valid");
    let dialect = ChatDialect::new(template, tokenizer, ChatOptions::default())
        .expect("invariant: the embedded template goes on after a reply");
    let tasks = desk::Desk::default().tasks("train", 1, 64).expect("invariant: desk makes tasks");
    let mut session = desk::Desk::default().open().expect("invariant: desk opens");
    let openings: Vec<Opening> =
        tasks.iter().map(|t| session.reset(t, "bench", 0).expect("invariant: desk knows its tasks")).collect();
    let history = [Line::Assistant { text: "ok".into(), calls: Vec::new() }];
    let new = [Line::Tool { name: "tickets_find".into(), content: "{\"id\": \"n4\", \"owner\": \"anna\"}".into() }];
    let mut group = c.benchmark_group("dialect");
    let mut n = 0;
    group.bench_function("opening", |b| {
        b.iter(|| {
            n += 1;
            dialect.opening(&openings[n % openings.len()])
        });
    });
    group.bench_function("append", |b| b.iter(|| dialect.append(&openings[0], black_box(&history), black_box(&new))));
    let ids = dialect.append(&openings[0], &history, &new).expect("invariant: it did so in the benchmark");
    group.bench_function("decode and parse", |b| {
        b.iter(|| dialect.parse(&dialect.decode(black_box(&ids)), &openings[0].tools));
    });
    group.finish();
}

criterion_group!(benches, choosing, speaking, playing);
criterion_main!(benches);
