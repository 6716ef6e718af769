//! The decoder against transformers and peft, on small random models of every family and rope scaling.
//!
//! `tools/make-parity-fixtures.py` made `tests/fixtures/parity/` and describes what is in it. Logits and
//! log-probs must agree within 1e-4, the gradient of every tensor within 1e-4 of its norm, and greedy
//! continuations exactly: through the trainer (whole and with adapters) and through the decoder. The same for
//! the real SmolLM2 where it is installed, and for 32,768 positions against the formulas in f64.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coevolve::model::load::load_folder;
use coevolve::model::{
    Cache, Decoder, Family, LoadError, LoraConfig, LoraParams, LoraTarget, ModelConfig, Params, RopeScaling, SaveType,
    Sequence, TensorTable, TrainBatch, TrainRow, Trainer, load_adapter, load_model, save_adapter, save_folder,
};
use coevolve::world::draw;
use safetensors::{Dtype, SafeTensors};

const CASES: [&str; 12] = [
    "linear-rope",
    "llama-tied",
    "llama-untied",
    "llama3-rope",
    "moe-mixed",
    "moe-norm",
    "qwen2-tied",
    "qwen2-untied",
    "qwen3-tied",
    "qwen3-untied",
    "yarn-qwen2",
    "yarn-qwen3",
];
/// Tokens before the greedy continuation.
const PROMPT: usize = 8;
const LOGITS: f64 = 1e-4;
const GRADIENT: f64 = 1e-4;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity")
}

/// Tensors of a safetensors file, as f64 (ids too).
fn tensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let bytes = std::fs::read(path).unwrap();
    let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let values = match view.dtype() {
            Dtype::F32 => {
                view.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
            }
            Dtype::I64 => {
                view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect()
            }
            other => panic!("{name} is {other:?}"),
        };
        (name, values)
    };
    SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(read).collect()
}

struct Case {
    name: &'static str,
    folder: PathBuf,
    config: ModelConfig,
    params: Params,
    expected: BTreeMap<String, Vec<f64>>,
    ids: Vec<u32>,
}

impl Case {
    fn open(name: &'static str) -> Case {
        let folder = fixtures().join(name);
        let (config, params) = load_folder(&folder).unwrap();
        let expected = tensors(&folder.join("expected.safetensors"));
        let ids = expected["ids"].iter().map(|x| *x as u32).collect();
        Case { name, folder, config, params, expected, ids }
    }

    fn adapter(&self) -> LoraParams {
        load_adapter(&self.folder.join("adapter"), &self.config).unwrap()
    }

    /// Logits at every position: the first half at once, the rest token by token.
    fn check_logits(&self, lora: Option<&LoraParams>, key: &str) {
        let (want, v) = (&self.expected[key], self.config.vocab_size);
        assert_eq!(want.len(), self.ids.len() * v);
        let decoder = Decoder::new(&self.config, &self.params, lora).unwrap();
        let mut cache = Cache::new(&self.config);
        let seq = cache.create();
        let half = self.ids.len() / 2;
        let mut worst = 0f64;
        for at in half..=self.ids.len() {
            let new = if at == half { &self.ids[..half] } else { &self.ids[at - 1..at] };
            let logits = decoder.forward(&mut cache, &[(seq, new)]).unwrap();
            for (a, b) in logits.iter().zip(&want[(at - 1) * v..at * v]) {
                worst = worst.max((f64::from(*a) - b).abs());
            }
        }
        println!("{} {key}: largest difference of a logit {worst:.1e}", self.name);
        assert!(worst < LOGITS, "{} {key}: {worst}", self.name);
    }

    /// Log-probs of the scored positions and the gradient of every tensor, through the trainer.
    fn check_gradients(&self, lora: Option<&LoraParams>, table: &TensorTable, prefix: &str) {
        let v = self.config.vocab_size;
        let positions = self.expected["positions"].iter().map(|p| *p as usize);
        let targets: Vec<(u32, u32)> = positions.map(|p| (p as u32, self.ids[p + 1])).collect();
        let mut batch = TrainBatch::default();
        batch.push_group(&[Sequence { ids: &self.ids, targets: &targets }]);
        let mut trainer = Trainer::new(&self.config, 2).unwrap();
        let forward = trainer.forward(&self.params, lora, &batch, 1.0).unwrap();
        assert_eq!(forward.logp.len(), targets.len());
        let logits = &self.expected[&format!("{prefix}logits")];
        for (logp, (p, token)) in forward.logp.iter().zip(&targets) {
            let row = &logits[*p as usize * v..(*p as usize + 1) * v];
            let want = row[*token as usize] - row.iter().map(|x| x.exp()).sum::<f64>().ln();
            assert!((f64::from(*logp) - want).abs() < LOGITS, "{}: {logp} {want}", self.name);
        }
        // The loss is -sum(weights * logp).
        let dlogp: Vec<f32> = self.expected["weights"].iter().map(|w| -w as f32).collect();
        let mut grad = vec![0.0; table.total()];
        trainer.backward(forward.generation, &self.params, lora, &dlogp, None, &mut grad).unwrap();
        let mut worst = 0f64;
        for spec in table.tensors() {
            let want = &self.expected[&format!("{prefix}grad.{}", spec.name)];
            let ours = &grad[spec.range()];
            assert_eq!(want.len(), ours.len(), "{}", spec.name);
            let norm = want.iter().map(|x| x * x).sum::<f64>().sqrt();
            let error = ours.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 0.0, "{} {} has no gradient", self.name, spec.name);
            worst = worst.max(error / norm);
            assert!(error / norm < GRADIENT, "{} {}: {:.1e}", self.name, spec.name, error / norm);
        }
        println!("{} {prefix}: largest relative error of a tensor's gradient {worst:.1e}", self.name);
        let stored = self.expected.keys().filter(|k| k.starts_with(&format!("{prefix}grad."))).count();
        assert_eq!(stored, table.tensors().len(), "{}: as many tensors as in Python", self.name);
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for name in CASES {
        Case::open(name).check_logits(None, "logits");
    }
}

#[test]
fn gradients_of_every_tensor_are_those_of_transformers() {
    for name in CASES {
        let case = Case::open(name);
        case.check_gradients(None, case.params.layout().table(), "");
    }
}

#[test]
fn adapters_of_peft_give_its_logits_and_gradients() {
    for name in CASES {
        let case = Case::open(name);
        let lora = case.adapter();
        case.check_logits(Some(&lora), "lora.logits");
        case.check_gradients(Some(&lora), lora.layout().table(), "lora.");
    }
}

#[test]
fn greedy_continuations_are_equal() {
    for name in CASES {
        let case = Case::open(name);
        let decoder = Decoder::new(&case.config, &case.params, None).unwrap();
        let n = case.expected["greedy"].len();
        let found = greedy(&case.config, &decoder, &case.ids[..PROMPT], n);
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        assert_eq!(found, case.expected["greedy"], "{name}");
    }
}

#[test]
fn the_cases_cover_families_ties_storage_and_scaling() {
    let entries = std::fs::read_dir(fixtures()).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir());
    let mut folders: Vec<_> = entries.map(|p| p.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    folders.sort();
    assert_eq!(folders, CASES);
    let cases = CASES.map(Case::open);
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Qwen3Moe] {
        for tied in [true, false] {
            assert!(cases.iter().any(|c| c.config.family == family && c.config.tie_word_embeddings == tied));
        }
    }
    let scaled = |f: &dyn Fn(&RopeScaling) -> bool| cases.iter().any(|c| f(&c.config.rope_scaling));
    assert!(scaled(&|s| matches!(s, RopeScaling::Linear { .. })));
    assert!(scaled(&|s| matches!(s, RopeScaling::Llama3 { .. })));
    assert!(scaled(&|s| matches!(s, RopeScaling::Yarn { attention_factor: None, truncate: true, .. })));
    assert!(scaled(&|s| matches!(s, RopeScaling::Yarn { attention_factor: Some(_), truncate: false, .. })));
    for (sharded, dtype) in [(true, Dtype::BF16), (true, Dtype::F16), (false, Dtype::F32), (false, Dtype::F16)] {
        let stored_so = |c: &Case| {
            let whole = c.folder.join("model.safetensors");
            let file = if sharded { c.folder.join("model-00001-of-00003.safetensors") } else { whole };
            let file = if file.exists() { file } else { c.folder.join("model-00001-of-00004.safetensors") };
            std::fs::read(file).is_ok_and(|bytes| {
                SafeTensors::deserialize(&bytes).unwrap().tensors().iter().all(|(_, t)| t.dtype() == dtype)
            })
        };
        assert!(cases.iter().any(stored_so), "{sharded} {dtype:?}");
    }
}

/// What we save has the names, types, shapes and bytes that transformers wrote, and a configuration that says
/// the same.
#[test]
fn a_saved_model_is_the_one_that_transformers_wrote() {
    for name in CASES {
        let case = Case::open(name);
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("saved");
        save_folder(&folder, &case.config, &case.params, None, SaveType::Bf16).unwrap();
        let (config, params) = load_folder(&folder).unwrap();
        assert_eq!(config, case.config, "{name}");
        let theirs: Vec<Vec<u8>> = std::fs::read_dir(&case.folder)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors") && !p.ends_with("expected.safetensors"))
            .map(|p| std::fs::read(p).unwrap())
            .collect();
        let ours = std::fs::read(folder.join("model.safetensors")).unwrap();
        let ours = SafeTensors::deserialize(&ours).unwrap();
        let mut seen = 0;
        for bytes in &theirs {
            for (tensor, view) in SafeTensors::deserialize(bytes).unwrap().tensors() {
                let mine = ours.tensor(&tensor).unwrap();
                assert_eq!(mine.shape(), view.shape(), "{name} {tensor}");
                // The values of these cases are bf16 ones; the other cases round here.
                assert!(view.dtype() != Dtype::BF16 || mine.data() == view.data(), "{name} {tensor}");
                seen += 1;
            }
        }
        assert_eq!(seen, ours.len(), "{name}");
        save_folder(&folder, &case.config, &case.params, None, SaveType::F32).unwrap();
        assert_eq!(load_folder(&folder).unwrap().1, case.params, "{name}");
        let bf16 = |x: &f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        assert!(params.data().iter().all(|x| bf16(x) == *x));
    }
}

/// Configurations that we write: the committed text is what is written today, and transformers read it and
/// computed the same logits. `COEVOLVE_BLESS=1` writes them anew; then run the script.
#[test]
fn ours_are_configurations_that_transformers_reads() {
    for name in CASES {
        let case = Case::open(name);
        let (path, written) = (case.folder.join("ours.json"), format!("{:#}\n", case.config.to_json()));
        if std::env::var_os("COEVOLVE_BLESS").is_some() {
            std::fs::write(&path, written).unwrap();
            continue;
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), written, "{name}");
    }
}

/// Adapters that we write: the committed bytes are what is written today, and peft read them and computed
/// these logits. `COEVOLVE_BLESS=1` writes them anew; then run the script.
#[test]
fn ours_are_adapters_that_peft_reads() {
    for (name, targets) in [("qwen3-tied", &LoraTarget::ALL[..]), ("moe-norm", &LoraTarget::ATTENTION)] {
        let case = Case::open(name);
        let lora = LoraConfig { rank: 5, alpha: 7.5, targets: targets.to_vec() };
        let mut params = LoraParams::new(&case.config, &lora, 11).unwrap();
        // B away from zero, exactly the same on every machine.
        params.data_mut().iter_mut().enumerate().for_each(|(i, x)| *x += ((i * 37 % 101) as f32 - 50.0) / 256.0);
        let committed = case.folder.join("ours");
        if std::env::var_os("COEVOLVE_BLESS").is_some() {
            save_adapter(&committed, &params, name).unwrap();
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let written = dir.path().join("ours");
        save_adapter(&written, &params, name).unwrap();
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let (a, b) = (std::fs::read(written.join(file)).unwrap(), std::fs::read(committed.join(file)).unwrap());
            assert!(a == b, "{name}: {file} is not what is committed");
        }
        let back = load_adapter(&committed, &case.config).unwrap();
        assert_eq!(back, params);
        case.check_logits(Some(&back), "ours.logits");
    }
}

/// The most likely tokens that follow `prompt`, one at a time.
fn greedy(config: &ModelConfig, decoder: &Decoder, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut cache = Cache::new(config);
    let seq = cache.create();
    let mut all = prompt.to_vec();
    for _ in 0..n {
        let new = all[cache.len(seq).unwrap()..].to_vec();
        let logits = decoder.forward(&mut cache, &[(seq, &new)]).unwrap();
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        all.push(best.0 as u32);
    }
    all.split_off(prompt.len())
}

#[test]
fn smollm2_speaks_as_in_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(".coevolve/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        println!("skipped: {} is absent; tools/setup-smollm2.sh fetches it", path.display());
        return;
    }
    let model = load_model(&path).unwrap();
    let decoder = Decoder::new(&model.config, &model.params, None).unwrap();
    let mut trainer = Trainer::new(&model.config, 2).unwrap();
    let text = std::fs::read_to_string(fixtures().join("smollm2.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut worst = 0f64;
    for case in cases.as_array().unwrap() {
        let numbers = |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
        let (prompt, expected) = (numbers("ids"), numbers("greedy"));
        assert_eq!(expected.len(), 32);
        assert_eq!(model.tokenizer.encode(case["text"].as_str().unwrap()).unwrap(), prompt);
        assert_eq!(greedy(&model.config, &decoder, &prompt, 32), expected);
        let ids = [prompt, expected].concat();
        let targets: Vec<(u32, u32)> = (1..ids.len()).map(|i| (i as u32 - 1, ids[i])).collect();
        let mut batch = TrainBatch::default();
        batch.push_group(&[Sequence { ids: &ids, targets: &targets }]);
        let forward = trainer.forward(&model.params, None, &batch, 1.0).unwrap();
        let logp: Vec<f64> = serde_json::from_value(case["logp"].clone()).unwrap();
        assert_eq!(forward.logp.len(), logp.len());
        worst = forward.logp.iter().zip(&logp).fold(worst, |w, (a, b)| w.max((f64::from(*a) - b).abs()));
    }
    println!("SmolLM2: largest difference of a log-prob {worst:.1e}");
    assert!(worst < LOGITS, "{worst}");
}

/// Experts that no token of a batch chose get a gradient of exactly zero; those that were chosen do not.
#[test]
fn idle_experts_get_no_gradient() {
    let case = Case::open("moe-norm");
    let rows = vec![TrainRow { ids: case.ids[..2].to_vec(), prefix: None, targets: vec![(1, 5)] }];
    let mut trainer = Trainer::new(&case.config, 1).unwrap();
    let forward = trainer.forward(&case.params, None, &TrainBatch { prefixes: vec![], rows }, 1.0).unwrap();
    let mut grad = vec![0.0; case.params.layout().total()];
    trainer.backward(forward.generation, &case.params, None, &[-1.0], None, &mut grad).unwrap();
    let moe = case.config.moe.as_ref().unwrap();
    // The second token alone reaches the loss in the last layer; both may in the first.
    for (layer, most) in [(0, 2 * moe.num_experts_per_tok), (1, moe.num_experts_per_tok)] {
        let table = case.params.layout().table();
        let moved = |expert: usize| {
            let parts = ["gate_proj", "up_proj", "down_proj"].map(|part| {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                grad[table.get(&name).unwrap().range()].iter().any(|g| *g != 0.0)
            });
            assert!(parts.iter().all(|p| *p == parts[0]), "{parts:?}");
            parts[0]
        };
        let busy = (0..moe.num_experts).filter(|e| moved(*e)).count();
        assert!((moe.num_experts_per_tok..=most).contains(&busy) && busy < moe.num_experts, "layer {layer}: {busy}");
    }
}

/// Wrong and missing tensors of a mixture are named, and sizes out of a made-up configuration are compared with
/// the files before anything is allocated by them.
#[test]
fn a_damaged_mixture_is_named() {
    let case = Case::open("moe-norm");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    save_folder(&folder, &case.config, &case.params, None, SaveType::F32).unwrap();
    let with = |key: &str, value: serde_json::Value| {
        let mut json = case.config.to_json();
        json[key] = value;
        std::fs::write(folder.join("config.json"), json.to_string()).unwrap();
        load_folder(&folder).unwrap_err()
    };
    match with("num_experts", 7.into()) {
        // The router's shape differs too; it is found first.
        LoadError::Shape { name, found, expected, .. } => {
            assert_eq!(name, "model.layers.0.mlp.gate.weight");
            assert_eq!((found, expected), (vec![6, 24], vec![7, 24]));
        }
        other => panic!("{other:?}"),
    }
    match with("mlp_only_layers", serde_json::json!([1])) {
        LoadError::Missing { count, names, .. } => {
            assert_eq!(count, 3);
            assert!(names.contains("model.layers.1.mlp.gate_proj.weight"), "{names}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(with("moe_intermediate_size", (1u64 << 31).into()), LoadError::Shape { .. }));
    for (key, value) in [("num_experts", 1u64 << 30), ("num_experts_per_tok", 7), ("moe_intermediate_size", 0)] {
        assert!(matches!(with(key, value.into()), LoadError::Model { .. }), "{key}");
    }
    // Experts fused into one tensor, as some exports have them.
    std::fs::write(folder.join("config.json"), case.config.to_json().to_string()).unwrap();
    let file = folder.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let fused = SafeTensors::deserialize(&bytes).unwrap();
    let kept = fused.tensors().into_iter().filter(|(n, _)| !n.contains(".experts."));
    let zeros = vec![0u8; 6 * 24 * 24 * 4];
    let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![6, 24, 24], &zeros).unwrap();
    let name = "model.layers.0.mlp.experts.gate_up_proj".to_owned();
    let written = safetensors::serialize(kept.chain([(name.clone(), view)]), None).unwrap();
    std::fs::write(&file, written).unwrap();
    match load_folder(&folder).unwrap_err() {
        LoadError::Missing { count, names, .. } => {
            assert_eq!(count, 2 * 6 * 3);
            assert!(names.starts_with("model.layers.0.mlp.experts.0.gate_proj.weight"), "{names}");
        }
        other => panic!("{other:?}"),
    }
}

/// One layer of a Llama in f64, for the last position only: keys and values of all tokens, one query.
/// The rotation is stretched `factor` times from 8,192 positions.
fn last_log_prob(config: &ModelConfig, params: &Params, ids: &[u32], target: u32, factor: f64) -> f64 {
    let tensor = |name: &str| -> Vec<f64> { params.tensor(name).unwrap().iter().map(|x| f64::from(*x)).collect() };
    let layer = |name: &str| tensor(&format!("model.layers.0.{name}.weight"));
    let product = |w: &[f64], x: &[f64]| -> Vec<f64> {
        w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(w).map(|(v, w)| v / (mean + config.rms_norm_eps).sqrt() * w).collect()
    };
    let (d, half) = (config.hidden_size, config.head_dim / 2);
    // YaRN with theta 10,000, heads of 16 values, written out anew.
    let bound = |turns: f64| 16.0 * (8192.0 / (turns * std::f64::consts::TAU)).ln() / (2.0 * 10_000f64.ln());
    let (low, high) = (bound(32.0).floor(), bound(1.0).ceil());
    let scale = 0.1 * factor.ln() + 1.0;
    let rotate = |x: &[f64], position: usize| -> Vec<f64> {
        let mut out = vec![0.0; 2 * half];
        for j in 0..half {
            let plain = 10_000f64.powf(-(j as f64) / half as f64);
            let ramp = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let angle = position as f64 * (plain * (1.0 - ramp) + plain / factor * ramp);
            let (a, b) = (x[j], x[half + j]);
            out[j] = scale * (a * angle.cos() - b * angle.sin());
            out[half + j] = scale * (b * angle.cos() + a * angle.sin());
        }
        out
    };
    let embed = tensor("model.embed_tokens.weight");
    let row = |id: u32| embed[id as usize * d..(id as usize + 1) * d].to_vec();
    let (wk, wv, first) = (layer("self_attn.k_proj"), layer("self_attn.v_proj"), layer("input_layernorm"));
    let last = ids.len() - 1;
    let mut x = row(ids[last]);
    let q = rotate(&product(&layer("self_attn.q_proj"), &norm(&x, &first)), last);
    let (mut sum, mut o) = (0.0, vec![0.0; config.head_dim]);
    for (position, id) in ids.iter().enumerate() {
        let h = norm(&row(*id), &first);
        let k = rotate(&product(&wk, &h), position);
        let score: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>() / (config.head_dim as f64).sqrt();
        sum += score.exp();
        o.iter_mut().zip(product(&wv, &h)).for_each(|(o, v)| *o += score.exp() * v);
    }
    o.iter_mut().for_each(|o| *o /= sum);
    x.iter_mut().zip(product(&layer("self_attn.o_proj"), &o)).for_each(|(x, o)| *x += o);
    let h = norm(&x, &layer("post_attention_layernorm"));
    let up = product(&layer("mlp.up_proj"), &h);
    let act: Vec<f64> =
        product(&layer("mlp.gate_proj"), &h).iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    x.iter_mut().zip(product(&layer("mlp.down_proj"), &act)).for_each(|(x, o)| *x += o);
    let logits = product(&embed, &norm(&x, &tensor("model.norm.weight")));
    logits[target as usize] - logits.iter().map(|l| l.exp()).sum::<f64>().ln()
}

#[test]
fn a_context_of_32_k_is_exact_to_the_last_position() {
    let text = r#"{"model_type":"llama","vocab_size":48,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":1,
        "num_attention_heads":1,"head_dim":16,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":true,
        "max_position_embeddings":8192,
        "rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":8192}}"#;
    let config = ModelConfig::from_json(text).unwrap();
    assert_eq!(config.max_position_embeddings, 32_768);
    let params = Params::random(&config, 3, 0.4);
    let mut d = draw(4, "long context", &[]);
    let ids: Vec<u32> = (0..32_768).map(|_| d.below(48) as u32).collect();
    let want = last_log_prob(&config, &params, &ids, 7, 4.0);
    // Another rotation would show.
    assert!((want - last_log_prob(&config, &params, &ids, 7, 3.9)).abs() > 1e-3);

    let rows = vec![TrainRow { ids: ids.clone(), prefix: None, targets: vec![(32_767, 7)] }];
    let mut trainer = Trainer::new(&config, 2).unwrap();
    let batch = TrainBatch { prefixes: vec![], rows };
    let trained = f64::from(trainer.forward(&params, None, &batch, 1.0).unwrap().logp[0]);
    assert!((trained - want).abs() < 1e-4, "{trained} {want}");

    let decoder = Decoder::new(&config, &params, None).unwrap();
    let mut cache = Cache::new(&config);
    let seq = cache.create();
    let logits = decoder.forward(&mut cache, &[(seq, &ids)]).unwrap();
    let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let decoded = f64::from(logits[7]) - sum.ln();
    assert!((decoded - want).abs() < 1e-4, "{decoded} {want}");
    // One more token has no position.
    assert!(decoder.forward(&mut cache, &[(seq, &[1])]).is_err());
}
