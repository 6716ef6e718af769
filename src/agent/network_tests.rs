//! The engine on the real decoder with small random weights.

use super::*;
use crate::agent::testing::{LateHands, Toy, job, play, play_with, toy};
use crate::agent::*;
use crate::env::{Opening, ToolDef};
use crate::event::ToolCall;
use crate::model::{ModelConfig, Params};

/// Bytes, with one id of sixteen ending a reply, so that random weights write short messages.
struct Terse;

impl Dialect for Terse {
    fn opening(&self, opening: &Opening) -> Result<Vec<u32>, DialectError> {
        ByteDialect.opening(opening)
    }
    fn append(&self, opening: &Opening, history: &[Line], new: &[Line]) -> Result<Vec<u32>, DialectError> {
        ByteDialect.append(opening, history, new)
    }
    fn utter(&self, text: &str, calls: &[ToolCall]) -> Result<Vec<u32>, DialectError> {
        ByteDialect.utter(text, calls)
    }
    fn parse(&self, text: &str, _: &[ToolDef]) -> Parsed {
        // Half of the messages are calls.
        let name = if text.len() % 4 < 2 { "put" } else { "get" };
        let call = ToolCall { name: name.into(), arguments: "{\"a\":3}".into() };
        let calls = if text.len().is_multiple_of(2) { vec![call] } else { vec![] };
        Parsed { calls, errors: vec![], text: text.into() }
    }
    fn decode(&self, ids: &[u32]) -> String {
        ids.iter().map(|id| char::from(b'a' + (id % 26) as u8)).collect()
    }
    fn is_stop(&self, id: u32) -> bool {
        id % 16 == 5
    }
    fn stop(&self) -> u32 {
        5
    }
}

fn agent(family: &str) -> PolicyAgent {
    let json = serde_json::json!({"model_type": family, "architectures": [match family {
            "llama" => "LlamaForCausalLM", "qwen2" => "Qwen2ForCausalLM", _ => "Qwen3ForCausalLM"}],
        "vocab_size": ByteDialect::VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 400, "tie_word_embeddings": true,
        "hidden_act": "silu"});
    let config = ModelConfig::from_json(&json.to_string()).unwrap();
    let params = Params::random(&config, 3, 0.6);
    let decoder = Decoder::new(&config, &params, None).unwrap();
    PolicyAgent::new(family, Arc::new(ModelPolicy(Arc::new(decoder))), Arc::new(Terse))
}

fn jobs() -> Vec<EpisodeJob> {
    (0..32)
        .map(|i| EpisodeJob { sampling: Sampling::at(0.9), ..job(&format!("t{}", i / 8), i % 8, i as usize / 8) })
        .collect()
}

#[test]
fn alone_or_in_any_company_the_same_bits() {
    for family in ["llama", "qwen2", "qwen3"] {
        let agent = agent(family);
        let jobs = jobs();
        let toy = Toy { result: "r".repeat(11), graded: true, ..toy() };
        let limits = Limits { turn_tokens: 60, turns: 4, env_steps: 4, ..Limits::default() };
        let (all, stats) = play(&agent, &toy, &jobs, &limits);
        assert!(stats.shared_tokens > 0);
        // 64 tokens of 2 layers, 2 heads (padded to 16), keys and values a page: all episodes at once, prompts shared.
        let page = 64 * 2 * 2 * 16 * 2 * 4;
        let longest: u64 = all.iter().map(|r| (r.ids.len() as u64).div_ceil(64)).sum();
        assert!(stats.cache_bytes >= 32 * page && stats.cache_bytes <= (longest + 4) * page, "{}", stats.cache_bytes);
        assert!(all.iter().any(|r| r.sampled.len() > 2), "several messages");
        assert!(all.iter().any(|r| r.end == EndReason::Done));
        let distinct: std::collections::BTreeSet<_> = all.iter().map(|r| r.ids.clone()).collect();
        assert!(distinct.len() > 24, "the draws tell episodes apart: {}", distinct.len());
        for (i, job) in jobs.iter().enumerate().step_by(5) {
            assert_eq!(play(&agent, &toy, std::slice::from_ref(job), &limits).0[0], all[i], "{family} alone {i}");
        }
        for concurrent in [2, 7, 32] {
            let limits = Limits { concurrent, ..limits };
            let mut hands = LateHands::new(InlineHands::new(Arc::new(toy.clone())), concurrent as u64);
            assert_eq!(play_with(&agent, &mut hands, &jobs, &limits).0, all, "{family} {concurrent}");
        }
        // Nothing shared: every episode computes its own prompt.
        let apart: Vec<_> = jobs.iter().cloned().enumerate().map(|(group, j)| EpisodeJob { group, ..j }).collect();
        assert_eq!(play(&agent, &toy, &apart, &limits).0, all, "{family} apart");
        // Prompts in pieces.
        let pieces = Limits { prefill_chunk: 5, forward_tokens: 12, ..limits };
        assert_eq!(play(&agent, &toy, &jobs, &pieces).0, all, "{family} pieces");
    }
}

#[test]
fn recorded_logprobs_are_those_of_the_recorded_tokens() {
    // Independent of engine and chooser: feed the recorded ids to the decoder one by one and take the
    // log-softmax at the sampling temperature in f64.
    let agent = agent("qwen3");
    let limits = Limits { turn_tokens: 60, turns: 3, env_steps: 3, ..Limits::default() };
    let jobs = &jobs()[..4];
    let policy = agent.policy().clone();
    for record in play(&agent, &toy(), jobs, &limits).0 {
        let mut net = policy.open();
        let sequence = net.create().unwrap();
        let mask = record.mask();
        let mut logits = Vec::new();
        let mut n = 0;
        for (at, id) in record.ids.iter().enumerate() {
            if mask[at] == 1 {
                let scaled: Vec<f64> = logits.iter().map(|l: &f32| f64::from(*l) / f64::from(0.9f32)).collect();
                let max = scaled.iter().copied().fold(f64::MIN, f64::max);
                let norm = max + scaled.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
                let expected = scaled[*id as usize] - norm;
                assert!((f64::from(record.logprobs[n]) - expected).abs() < 1e-5, "{n}");
                n += 1;
            }
            net.forward(&[(sequence, &[*id])], &mut logits).unwrap();
        }
        assert_eq!(n, record.logprobs.len());
        net.free(sequence);
    }
}
