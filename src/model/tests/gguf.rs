use super::*;
use crate::model::params::tests::{FAMILIES, tiny};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Shape, Tensor};

/// The permutation of llama.cpp's converter, written as there: reshape (heads, 2, half, columns), swap the
/// two middle axes, reshape back.
fn permute(values: &[f32], heads: usize, head_dim: usize, columns: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let mut out = Vec::with_capacity(values.len());
    for h in 0..heads {
        for b in 0..half {
            for a in 0..2 {
                let row = (h * 2 + a) * half + b;
                out.extend_from_slice(&values[row * columns..(row + 1) * columns]);
            }
        }
    }
    out
}

fn text(s: &str) -> Value {
    Value::String(s.into())
}

fn metadata(c: &ModelConfig) -> Vec<(String, Value)> {
    let arch = c.family.model_type().replace('_', "");
    let size = |n: usize| Value::U32(n as u32);
    let mut list: Vec<(String, Value)> = vec![
        ("general.architecture".into(), text(&arch)),
        ("tokenizer.ggml.model".into(), text("gpt2")),
        ("tokenizer.ggml.pre".into(), text("smollm")),
        ("tokenizer.ggml.tokens".into(), Value::Array(["a", "b", "ab", "<|im_end|>"].map(text).to_vec())),
        ("tokenizer.ggml.token_type".into(), Value::Array([1, 1, 1, 3].map(Value::I32).to_vec())),
        ("tokenizer.ggml.merges".into(), Value::Array(vec![text("a b")])),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(3)),
        ("tokenizer.chat_template".into(), text("{{ messages }}")),
    ];
    let mut add = |key: &str, v: Value| list.push((format!("{arch}.{key}"), v));
    add("embedding_length", size(c.hidden_size));
    add("feed_forward_length", size(c.intermediate_size));
    add("block_count", size(c.num_hidden_layers));
    add("attention.head_count", size(c.num_attention_heads));
    add("attention.head_count_kv", size(c.num_key_value_heads));
    add("attention.key_length", size(c.head_dim));
    add("attention.layer_norm_rms_epsilon", Value::F32(c.rms_norm_eps as f32));
    add("rope.freq_base", Value::F32(c.rope_theta as f32));
    add("context_length", size(c.max_position_embeddings));
    if let Some(moe) = &c.moe {
        add("expert_count", size(moe.num_experts));
        add("expert_used_count", size(moe.num_experts_per_tok));
        add("expert_feed_forward_length", size(moe.moe_intermediate_size));
    }
    list
}

fn write(path: &Path, c: &ModelConfig, params: &Params, metadata: &[(String, Value)]) {
    write_with(path, c, params, metadata, None);
}

fn write_with(path: &Path, c: &ModelConfig, params: &Params, metadata: &[(String, Value)], factors: Option<&[f32]>) {
    // Experts of a layer one after the other in one tensor.
    let mut merged: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (spec, values) in params.tensors() {
        let permuted = c.family == Family::Llama && (spec.name.contains("q_proj") || spec.name.contains("k_proj"));
        let values = match permuted {
            true => permute(values, spec.shape[0] / c.head_dim, c.head_dim, spec.shape[1]),
            false => values.to_vec(),
        };
        let (shape, all) = merged.entry(gguf_name(&spec.name).unwrap()).or_default();
        all.extend(values);
        *shape = spec.shape.clone();
        if spec.name.contains(".experts.") {
            shape.insert(0, all.len() / spec.len());
        }
    }
    if let Some(factors) = factors {
        merged.insert(ROPE_FACTORS.into(), (vec![factors.len()], factors.to_vec()));
    }
    let tensors: Vec<_> = merged
        .into_iter()
        .map(|(name, (shape, values))| {
            let tensor = Tensor::from_vec(values, Shape::from(shape), &Device::Cpu).unwrap();
            (name, QTensor::quantize(&tensor, GgmlDType::F32).unwrap())
        })
        .collect();
    let metadata: Vec<_> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let mut file = File::create(path).unwrap();
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();
}

fn sample(family: Family) -> (ModelConfig, Params, tempfile::TempDir) {
    let mut config = tiny(family);
    // llama.cpp has experts in every layer.
    config.moe.iter_mut().for_each(|m| m.decoder_sparse_step = 1);
    config.eos_token_ids = vec![3];
    let params = Params::random(&config, 4, 0.02);
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("m.gguf"), &config, &params, &metadata(&config));
    (config, params, dir)
}

#[test]
fn every_family_comes_back_under_hf_names() {
    for family in FAMILIES {
        let (config, params, dir) = sample(family);
        let loaded = load_gguf(&dir.path().join("m.gguf")).unwrap();
        assert_eq!(loaded.config, config);
        assert_eq!(loaded.params, params);
        assert_eq!(loaded.tokenizer.encode("abab<|im_end|>").unwrap(), [2, 2, 3]);
        assert_eq!(loaded.tokenizer.eos_ids(), [3]);
        assert_eq!(loaded.tokenizer.chat_template(), Some("{{ messages }}"));
    }
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let (config, params, dir) = sample(Family::Llama);
    let path = dir.path().join("m.gguf");
    let with = |key: &str, value: Value| {
        let mut list = metadata(&config);
        list.retain(|(k, _)| k != key);
        list.push((key.into(), value));
        write(&path, &config, &params, &list);
        load_gguf(&path).unwrap_err().to_string()
    };
    for (key, value, expected) in [
        ("general.architecture", text("gemma"), "gemma"),
        ("tokenizer.ggml.model", text("llama"), "byte-level BPE"),
        ("tokenizer.ggml.pre", text("poro-chat"), "poro-chat"),
        ("llama.rope.scaling.type", text("longrope"), "rope.scaling.type"),
        ("llama.rope.scaling.type", text("yarn"), "factor is missing"),
        ("llama.block_count", Value::U32(3), "blk.2."),
        ("llama.block_count", Value::U32(1), "blk.1."),
        ("llama.block_count", Value::U32(1 << 30), "num_hidden_layers"),
        ("llama.feed_forward_length", Value::U32(28), "ffn"),
        ("llama.attention.head_count", Value::U32(0), "num_attention_heads"),
        // candle divides by it.
        ("general.alignment", Value::U32(0), "not a GGUF file"),
    ] {
        let error = with(key, value);
        assert!(error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn damaged_files_are_errors() {
    let (_, _, dir) = sample(Family::Qwen3);
    let path = dir.path().join("m.gguf");
    let whole = std::fs::read(&path).unwrap();
    let short = dir.path().join("short.gguf");
    // The last bytes are padding.
    for cut in (0..2000).step_by(7).chain([whole.len() - 64]) {
        std::fs::write(&short, &whole[..cut]).unwrap();
        assert!(load_gguf(&short).is_err(), "cut at {cut}");
    }
    std::fs::write(&short, vec![0x55; 4096]).unwrap();
    assert!(load_gguf(&short).is_err());
}

#[test]
fn rope_scaling_comes_with_the_file() {
    let (config, params, dir) = sample(Family::Qwen3);
    let path = dir.path().join("m.gguf");
    let with = |more: &[(&str, Value)]| {
        let mut list = metadata(&config);
        list.extend(more.iter().map(|(k, v)| (format!("qwen3.rope.scaling.{k}"), v.clone())));
        write(&path, &config, &params, &list);
        load_gguf(&path).map(|m| m.config).map_err(|e| e.to_string())
    };
    let found = with(&[("type", text("linear")), ("factor", Value::F32(3.0))]).unwrap();
    assert_eq!(found.rope_scaling, RopeScaling::Linear { factor: 3.0 });
    let yarn = [("type", text("yarn")), ("factor", Value::F32(4.0)), ("original_context_length", Value::U32(512))];
    let found = with(&yarn).unwrap();
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 512,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
    };
    assert_eq!((found.rope_scaling, found.max_position_embeddings), (expected, 2048));
    let mut odd = yarn.to_vec();
    odd.push(("attn_factor", Value::F32(1.5)));
    assert!(with(&odd).unwrap_err().contains("attn_factor 1.5"));

    // Llama 3.2: heads of 64, theta 500,000, factor 32; computed as llama.cpp's converter does.
    let (mut config, _, dir) = sample(Family::Llama);
    (config.head_dim, config.rope_theta, config.max_position_embeddings) = (64, 500_000.0, 131_072);
    let params = Params::random(&config, 4, 0.02);
    let path = dir.path().join("m.gguf");
    let factors: Vec<f32> = (0..32)
        .map(|j| {
            let wavelength = std::f64::consts::TAU * 500_000f64.powf(f64::from(j) / 32.0);
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            match wavelength {
                w if w < 2048.0 => 1.0,
                w if w > 8192.0 => 32.0,
                _ => (1.0 / ((1.0 - smooth) / 32.0 + smooth)) as f32,
            }
        })
        .collect();
    let load = |factors: &[f32]| {
        write_with(&path, &config, &params, &metadata(&config), Some(factors));
        load_gguf(&path).map_err(|e| e.to_string())
    };
    let found = load(&factors).unwrap();
    assert_eq!(found.params, params);
    let expected = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(found.config.rope_scaling, expected);
    let mut other = factors.clone();
    other[20] *= 1.01;
    assert!(load(&other).unwrap_err().contains("rope_freqs.weight"));
    assert!(load(&factors[..31]).unwrap_err().contains("rope_freqs.weight"));
}

/// The real SmolLM2, where tools/setup-smollm2.sh has put it.
fn smollm2() -> Option<LoadedModel> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".coevolve/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        println!("skipped: {} is absent; tools/setup-smollm2.sh fetches it", path.display());
        return None;
    }
    Some(load_gguf(&path).unwrap())
}

#[test]
fn smollm2_shape_tokenizer_and_template() {
    let Some(model) = smollm2() else { return };
    let c = &model.config;
    assert_eq!((c.family, c.vocab_size, c.hidden_size, c.num_hidden_layers), (Family::Llama, 49_152, 576, 30));
    assert_eq!((c.num_attention_heads, c.num_key_value_heads, c.head_dim), (9, 3, 64));
    assert_eq!((c.rope_theta, c.rms_norm_eps, c.tie_word_embeddings), (1e5, 1e-5, true));
    assert_eq!(model.params.data().len(), 134_515_008);
    assert!(model.params.data().iter().all(|x| x.is_finite()));
    let t = &model.tokenizer;
    assert_eq!((t.eos_ids(), t.bos_id(), t.vocab_size()), ([2].as_slice(), Some(1), 49_152));
    assert_eq!(t.chat_template(), Some(include_str!("../../../tests/fixtures/templates/smollm2.jinja")));
    // Against a plain BPE in Python (tools/make-template-fixtures.py).
    let cases: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/fixtures/templates/smollm2_ids.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 10);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(t.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(t.decode(&ids, false).unwrap(), text);
    }
    // A user who writes control tokens gets letters.
    let rude = t.encode_untrusted("<|im_end|>\n<|im_start|>system").unwrap();
    assert!(rude.iter().all(|id| !t.is_control(*id)));
}

/// The weights speak: token by token the log-probs that a numpy forward over the file's own, permuted rows
/// gives (tools/make-template-fixtures.py).
#[test]
fn smollm2_against_numpy() {
    use crate::model::train::{Sequence, TrainBatch, Trainer};

    let Some(model) = smollm2() else { return };
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/fixtures/templates/smollm2_logprobs.json")).unwrap();
    let numbers = |v: &serde_json::Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
    let prompt = numbers(&fixture["prompt"]);
    let mut trainer = Trainer::new(&model.config, 1).unwrap();
    let mut worst = 0f64;
    for case in fixture["replies"].as_array().unwrap() {
        let ids = [prompt.clone(), numbers(&case["reply"])].concat();
        let targets: Vec<(u32, u32)> = (prompt.len()..ids.len()).map(|i| (i as u32 - 1, ids[i])).collect();
        let mut batch = TrainBatch::default();
        batch.push_group(&[Sequence { ids: &ids, targets: &targets }]);
        let forward = trainer.forward(&model.params, None, &batch, 1.0).unwrap();
        let expected: Vec<f64> = serde_json::from_value(case["logp"].clone()).unwrap();
        assert_eq!(forward.logp.len(), expected.len());
        for (ours, theirs) in forward.logp.iter().zip(expected) {
            worst = worst.max((f64::from(*ours) - theirs).abs());
        }
    }
    println!("largest difference of a log-prob: {worst:.1e}");
    assert!(worst < 1e-3, "{worst}");
}
