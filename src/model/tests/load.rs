use super::*;
use crate::model::config::Family;
use crate::model::params::tests::{FAMILIES, tiny};
use crate::model::save::{SaveType, save_adapter, save_folder};
use crate::model::tokenizer;
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::json;

/// Weights with values that bf16 and f16 can't hold, big and tiny ones among them.
fn model_of(family: Family) -> (ModelConfig, Params) {
    let config = tiny(family);
    let mut params = Params::random(&config, 3, 0.02);
    params.data_mut()[0] = 1.0e30;
    params.data_mut()[1] = -1.0e-30;
    (config, params)
}

#[test]
fn f32_folders_come_back_bit_for_bit() {
    for family in FAMILIES {
        let (config, params) = model_of(family);
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("m");
        save_folder(&folder, &config, &params, None, SaveType::F32).unwrap();
        let (config2, params2) = load_folder(&folder).unwrap();
        assert_eq!(config2, config);
        assert_eq!(weights_hash(params2.data()), weights_hash(params.data()));
        assert!(params2.data().iter().zip(params.data()).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn bf16_is_rounded_to_nearest_even_and_others_can_read_the_file() {
    let (config, params) = model_of(Family::Qwen3);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    save_folder(&folder, &config, &params, None, SaveType::Bf16).unwrap();
    let (_, back) = load_folder(&folder).unwrap();
    for (x, y) in params.data().iter().zip(back.data()) {
        // By hand: add half of the last kept place, ties to even, and cut.
        let bits = x.to_bits();
        let expected = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) & 0xffff_0000;
        assert_eq!(y.to_bits(), expected);
    }
    // The safetensors crate's own reader sees the same names, shapes and bytes.
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), params.tensors().count());
    let q = file.tensor("model.layers.1.self_attn.q_proj.weight").unwrap();
    assert_eq!((q.dtype(), q.shape()), (Dtype::BF16, [24, 20].as_slice()));
    let written = back.tensor("model.layers.1.self_attn.q_proj.weight").unwrap();
    assert_eq!(q.data()[..2], half::bf16::from_f32(written[0]).to_le_bytes());
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["m"], "no temporary folder is left");
}

/// Tensors of a model as the safetensors crate writes them; `change` edits (name, shape, dtype, bytes).
type Raw = (String, Vec<usize>, Dtype, Vec<u8>);

fn raw(params: &Params) -> Vec<Raw> {
    let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect();
    params.tensors().map(|(s, v)| (s.name.clone(), s.shape.clone(), Dtype::F32, bytes(v))).collect()
}

fn write(path: &Path, tensors: &[Raw]) {
    let views = tensors.iter().map(|(n, s, d, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn folder_with(config: &ModelConfig, tensors: &[Raw]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_json().to_string()).unwrap();
    write(&dir.path().join("model.safetensors"), tensors);
    dir
}

#[test]
fn f16_and_ignored_tensors() {
    let (config, mut params) = model_of(Family::Llama);
    params.data_mut()[0] = 0.5;
    let mut tensors = raw(&params);
    for t in &mut tensors {
        let halves = t.3.chunks_exact(4).map(|b| half::f16::from_f32(f32::from_le_bytes(b.try_into().unwrap())));
        (t.2, t.3) = (Dtype::F16, halves.flat_map(|h| h.to_le_bytes()).collect());
    }
    tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![3], Dtype::F32, vec![0; 12]));
    tensors.push(("lm_head.weight".into(), vec![37, 20], Dtype::F16, vec![0; 37 * 40]));
    let dir = folder_with(&config, &tensors);
    let (_, back) = load_folder(dir.path()).unwrap();
    for (x, y) in params.data().iter().zip(back.data()) {
        // Half precision: 11 significant bits, or steps of 2^-24 below 2^-14.
        assert!((x - y).abs() <= (x.abs() / 2048.0).max(3.0e-8), "{x} {y}");
    }
    assert_eq!(back.data()[0], 0.5);
}

#[test]
fn shards() {
    let (config, params) = model_of(Family::Qwen2);
    let tensors = raw(&params);
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("config.json"), config.to_json().to_string()).unwrap();
    let (a, b) = tensors.split_at(7);
    write(&at("model-00001-of-00002.safetensors"), a);
    write(&at("model-00002-of-00002.safetensors"), b);
    let index = |second: &str| {
        let name = |i: usize| if i < 7 { "model-00001-of-00002.safetensors" } else { second };
        let map: serde_json::Map<_, _> =
            tensors.iter().enumerate().map(|(i, t)| (t.0.clone(), json!(name(i)))).collect();
        std::fs::write(at("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    };
    index("model-00002-of-00002.safetensors");
    assert_eq!(load_folder(dir.path()).unwrap().1, params);
    // An index can't point out of its folder.
    index("../x.safetensors");
    assert!(matches!(load_folder(dir.path()), Err(LoadError::Malformed { .. })));
    index("gone.safetensors");
    assert!(matches!(load_folder(dir.path()), Err(LoadError::Io { .. })));
    // One shard twice under two names: a tensor would be ambiguous.
    std::fs::copy(at("model-00001-of-00002.safetensors"), at("twin.safetensors")).unwrap();
    index("twin.safetensors");
    assert!(matches!(load_folder(dir.path()), Err(LoadError::Malformed { .. })));
}

#[test]
fn wrong_tensors_are_named() {
    let (config, params) = model_of(Family::Qwen3);
    let load = |change: &dyn Fn(&mut Vec<Raw>)| {
        let mut tensors = raw(&params);
        change(&mut tensors);
        load_folder(folder_with(&config, &tensors).path()).unwrap_err()
    };
    match load(&|t| t.retain(|x| !x.0.contains("k_norm"))) {
        LoadError::Missing { count, names, .. } => {
            assert_eq!(count, 2);
            assert!(names.contains("model.layers.0.self_attn.k_norm.weight"), "{names}");
        }
        other => panic!("{other:?}"),
    }
    match load(&|t| t.push(("model.layers.0.self_attn.q_proj.bias".into(), vec![24], Dtype::F32, vec![0; 96]))) {
        LoadError::Extra { count, names, .. } => {
            assert_eq!((count, names.as_str()), (1, "model.layers.0.self_attn.q_proj.bias"));
        }
        other => panic!("{other:?}"),
    }
    match load(&|t| t[0].1.swap(0, 1)) {
        LoadError::Shape { name, found, expected, .. } => {
            assert_eq!((name.as_str(), found, expected), ("model.embed_tokens.weight", vec![20, 37], vec![37, 20]));
        }
        other => panic!("{other:?}"),
    }
    match load(&|t| (t[0].2, t[0].3) = (Dtype::F64, vec![0; 37 * 20 * 8])) {
        LoadError::Type { name, found, .. } => {
            assert_eq!((name.as_str(), found.as_str()), ("model.embed_tokens.weight", "F64"))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn made_up_sizes_are_refused_before_memory_is_taken() {
    let (config, params) = model_of(Family::Llama);
    let dir = folder_with(&config, &raw(&params));
    let with = |key: &str, value: u64| {
        let mut text = config.to_json();
        text[key] = json!(value);
        std::fs::write(dir.path().join("config.json"), text.to_string()).unwrap();
        load_folder(dir.path()).unwrap_err()
    };
    assert!(matches!(with("num_hidden_layers", 1 << 30), LoadError::Model { .. }));
    // 2^31 x 20 values would be 160 GiB; the shape in the file says otherwise first.
    assert!(matches!(with("vocab_size", 1 << 31), LoadError::Shape { .. }));
}

#[test]
fn empty_folders_and_missing_files() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(load_folder(dir.path()), Err(LoadError::Io { .. })));
    std::fs::write(dir.path().join("config.json"), tiny(Family::Llama).to_json().to_string()).unwrap();
    let error = load_folder(dir.path()).unwrap_err().to_string();
    assert!(error.contains("neither model.safetensors nor model.safetensors.index.json"), "{error}");
    assert!(matches!(load_model(&dir.path().join("x")), Err(LoadError::Io { .. })));
}

#[test]
fn whole_models_have_a_digest_over_everything() {
    let (mut config, _) = model_of(Family::Llama);
    config.vocab_size = 261;
    let params = Params::random(&config, 5, 0.02);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    let tokenizer = tokenizer::tests::tiny();
    save_folder(&folder, &config, &params, Some(&tokenizer), SaveType::F32).unwrap();
    let first = load_model(&folder).unwrap();
    assert_eq!(first.tokenizer.eos_ids(), [259]);
    assert_eq!(first.digest(), load_model(&folder).unwrap().digest());
    let mut other = first.clone();
    other.params.data_mut()[100] += 1.0;
    assert_ne!(first.digest(), other.digest());
    // The same files as bytes inside the program.
    let names =
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];
    let bytes = names.map(|n| std::fs::read(folder.join(n)).unwrap());
    let memory: Vec<(&str, &[u8])> = names.into_iter().zip(bytes.iter().map(Vec::as_slice)).collect();
    assert_eq!(load_files(&ModelFiles::Memory(&memory)).unwrap().digest(), first.digest());
    assert!(matches!(load_files(&ModelFiles::Memory(&memory[1..])), Err(LoadError::Io { .. })));
    // Saving replaces what was there, stale leftovers of a kill included.
    std::fs::create_dir(dir.path().join(".m.tmp")).unwrap();
    std::fs::write(folder.join("stale"), "x").unwrap();
    save_folder(&folder, &other.config, &other.params, Some(&tokenizer), SaveType::F32).unwrap();
    assert_eq!(load_model(&folder).unwrap().digest(), other.digest());
    assert!(
        !folder.join("stale").exists() && !dir.path().join(".m.tmp").exists() && !dir.path().join(".m.old").exists()
    );
    // A tokenizer with more ids than the model has embeddings does not belong to it.
    config.vocab_size = 200;
    let small = Params::random(&config, 5, 0.02);
    save_folder(&folder, &config, &small, Some(&tokenizer), SaveType::F32).unwrap();
    assert!(matches!(load_model(&folder), Err(LoadError::Tokenizer(TokenizerError::Vocabulary { .. }))));
}

#[test]
fn adapters_come_back_bit_for_bit() {
    let config = tiny(Family::Qwen2);
    let lora = LoraConfig { rank: 3, alpha: 6.5, targets: vec![LoraTarget::Q, LoraTarget::Down] };
    let mut params = LoraParams::new(&config, &lora, 9).unwrap();
    params.data_mut().iter_mut().enumerate().for_each(|(i, x)| *x += i as f32 * 1e-3);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("adapter");
    save_adapter(&folder, &params, "base/model").unwrap();
    assert_eq!(load_adapter(&folder, &config).unwrap(), params);
    let text = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["target_modules"], json!(["down_proj", "q_proj"]));
    assert_eq!((&value["r"], &value["lora_alpha"], &value["peft_type"]), (&json!(3), &json!(6.5), &json!("LORA")));
    let refused = |key: &str, v: Value| {
        let mut changed = value.clone();
        changed[key] = v;
        std::fs::write(folder.join("adapter_config.json"), changed.to_string()).unwrap();
        load_adapter(&folder, &config).unwrap_err()
    };
    for (key, v) in [
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("layers_to_transform", json!([0])),
        ("a_later_invention", json!("x")),
        ("init_lora_weights", json!("pissa")),
        ("peft_type", json!("IA3")),
        ("bias", json!("all")),
        ("rank_pattern", json!({"q_proj": 8})),
        ("modules_to_save", json!(["lm_head"])),
        ("r", json!(0)),
        ("target_modules", json!(["lm_head"])),
        ("target_modules", json!("q_.*")),
    ] {
        assert!(matches!(refused(key, v.clone()), LoadError::Model { .. }), "{key} = {v}");
    }
    assert!(matches!(refused("r", json!(4)), LoadError::Shape { .. }));
    assert!(matches!(refused("target_modules", json!(["q_proj", "down_proj", "k_proj"])), LoadError::Missing { .. }));
    assert!(matches!(refused("target_modules", json!(["q_proj"])), LoadError::Extra { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Cut-off files are always errors; flipped bytes in the header never panic.
    #[test]
    fn damaged_files_do_not_panic(cut in 0usize..2000, flips in prop::collection::vec((0usize..1500, any::<u8>()), 1..4)) {
        let (config, params) = model_of(Family::Llama);
        let dir = folder_with(&config, &raw(&params));
        let file = dir.path().join("model.safetensors");
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..cut]).unwrap();
        prop_assert!(load_folder(dir.path()).is_err());
        let mut damaged = whole.clone();
        for (at, byte) in &flips {
            damaged[*at] ^= byte;
        }
        std::fs::write(&file, &damaged).unwrap();
        let _ = load_folder(dir.path());
        std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
        prop_assert!(load_folder(dir.path()).is_err());
    }
}
