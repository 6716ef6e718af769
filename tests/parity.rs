//! The decoder against transformers and peft, on small random models of every family and rope scaling.
//!
//! `tools/make-parity-fixtures.py` made `tests/fixtures/parity/` and describes what is in it. Logits and
//! log-probs must agree within 1e-4, the gradient of every tensor within 1e-4 of its norm, and greedy
//! continuations exactly: through the trainer (whole and with adapters) and through the decoder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coevolve::model::load::load_folder;
use coevolve::model::{
    Cache, Decoder, Family, LoraConfig, LoraParams, LoraTarget, ModelConfig, Params, RopeScaling, SaveType, Sequence,
    TensorTable, TrainBatch, Trainer, load_adapter, save_adapter, save_folder,
};
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
        let mut cache = Cache::new(&case.config);
        let seq = cache.create();
        let mut next = case.ids[..PROMPT].to_vec();
        let mut found = Vec::new();
        for _ in &case.expected["greedy"] {
            let logits = decoder.forward(&mut cache, &[(seq, &next)]).unwrap();
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
            next = vec![best.0 as u32];
            found.push(best.0 as f64);
        }
        assert_eq!(found, case.expected["greedy"], "{name}");
    }
}

#[test]
fn the_cases_cover_families_ties_storage_and_scaling() {
    let mut folders: Vec<_> =
        std::fs::read_dir(fixtures()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    folders.sort();
    folders.retain(|f| f != "smollm2.json");
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
