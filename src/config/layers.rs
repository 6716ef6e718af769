//! Defaults < preset < file < `--set`, with errors that name the key and the remedy.

use super::{CATALOGUE, Settings};
use std::path::{Path, PathBuf};

/// A source of settings on top of the defaults.
#[derive(Debug, Clone)]
pub enum Layer {
    /// A named preset.
    Preset(String),
    /// A TOML file.
    File(PathBuf),
    /// `key=value`.
    Set(String),
}

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// No such preset.
    #[error("there is no preset `{0}`; presets are {list}", list = preset_names().join(", "))]
    UnknownPreset(String),
    /// The file cannot be read.
    #[error("settings file {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not TOML.
    #[error("{origin}: {message}")]
    Syntax {
        /// Where.
        origin: String,
        /// What the parser says.
        message: String,
    },
    /// `--set` without `=`.
    #[error("--set {0}: write key=value, for example --set run.steps=12")]
    NotAnAssignment(String),
    /// No such key.
    #[error("{origin}: there is no setting `{key}`{hint}; `coevolve settings` lists them all")]
    UnknownKey {
        /// Where.
        origin: String,
        /// The key.
        key: String,
        /// A near miss.
        hint: String,
    },
    /// The value does not fit.
    #[error("{key}: {message} (expected: {unit})")]
    BadValue {
        /// The key.
        key: String,
        /// What is wrong.
        message: String,
        /// What is accepted.
        unit: &'static str,
    },
}

const PRESETS: &[(&str, &str)] = &[
    ("desk", include_str!("presets/desk.toml")),
    ("desk-smoke", include_str!("presets/desk-smoke.toml")),
    ("bfcl-smollm2", include_str!("presets/bfcl-smollm2.toml")),
    ("paper-bfcl", include_str!("presets/paper-bfcl.toml")),
];

/// Names of the presets.
pub fn preset_names() -> Vec<&'static str> {
    PRESETS.iter().map(|(n, _)| *n).collect()
}

/// Applies the layers in order to the defaults and checks the result.
pub fn load(layers: &[Layer]) -> Result<Settings, SettingsError> {
    let table = toml::Table::try_from(Settings::default())
        .map_err(|e| SettingsError::Syntax { origin: "defaults".into(), message: e.to_string() })?;
    over(table, layers)
}

fn over(mut table: toml::Table, layers: &[Layer]) -> Result<Settings, SettingsError> {
    for layer in layers {
        let (origin, values) = read(layer)?;
        for (section, keys) in values {
            let toml::Value::Table(keys) = keys else {
                return Err(unknown(&origin, &section));
            };
            for (key, value) in keys {
                let name = format!("{section}.{key}");
                let slot = table
                    .get_mut(&section)
                    .and_then(|s| s.as_table_mut())
                    .and_then(|s| s.get_mut(&key))
                    .ok_or_else(|| unknown(&origin, &name))?;
                *slot = fit(&name, slot, value)?;
            }
        }
    }
    let settings: Settings =
        table.try_into().map_err(|e| SettingsError::Syntax { origin: "settings".into(), message: format!("{e}") })?;
    check(&settings)?;
    Ok(settings)
}

fn read(layer: &Layer) -> Result<(String, toml::Table), SettingsError> {
    let parse = |origin: String, text: &str| match text.parse::<toml::Table>() {
        Ok(t) => Ok((origin, t)),
        Err(e) => Err(SettingsError::Syntax { origin, message: e.to_string() }),
    };
    match layer {
        Layer::Preset(name) => {
            let (_, text) =
                PRESETS.iter().find(|(n, _)| n == name).ok_or_else(|| SettingsError::UnknownPreset(name.clone()))?;
            parse(format!("preset {name}"), text)
        }
        Layer::File(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|source| SettingsError::Unreadable { path: path.clone(), source })?;
            parse(path.display().to_string(), &text)
        }
        Layer::Set(pair) => {
            let (key, value) = pair.split_once('=').ok_or_else(|| SettingsError::NotAnAssignment(pair.clone()))?;
            let (section, leaf) =
                key.trim().split_once('.').ok_or_else(|| unknown(&format!("--set {pair}"), key.trim()))?;
            // Bare words are strings: nobody should have to quote `--set evolve.mode=off`.
            let value = format!("v = {}", value.trim())
                .parse::<toml::Table>()
                .ok()
                .and_then(|mut t| t.remove("v"))
                .unwrap_or_else(|| toml::Value::String(value.trim().to_string()));
            let inner = toml::Table::from_iter([(leaf.to_string(), value)]);
            Ok((format!("--set {pair}"), toml::Table::from_iter([(section.to_string(), toml::Value::Table(inner))])))
        }
    }
}

/// Makes `value` the type of the default in `slot`: integers may stand for floats, and one word or a
/// comma-separated list for a list of strings.
fn fit(name: &str, slot: &toml::Value, value: toml::Value) -> Result<toml::Value, SettingsError> {
    use toml::Value::*;
    let bad = |message: std::string::String| SettingsError::BadValue { key: name.into(), message, unit: unit(name) };
    match (slot, value) {
        (Float(_), Integer(i)) => Ok(Float(i as f64)),
        (Float(_), Float(f)) if !f.is_finite() => Err(bad(format!("{f} is not a number"))),
        (Integer(_), Integer(i)) if i < 0 => Err(bad(format!("{i} is negative"))),
        (Array(_), String(s)) => {
            Ok(Array(s.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| String(s.to_string())).collect()))
        }
        (String(_), v @ (Integer(_) | Float(_) | Boolean(_))) => Ok(String(v.to_string())),
        (slot, v) if std::mem::discriminant(slot) == std::mem::discriminant(&v) => Ok(v),
        (slot, v) => Err(bad(format!("{v} is of type {}, not {}", v.type_str(), slot.type_str()))),
    }
}

fn unit(name: &str) -> &'static str {
    CATALOGUE.iter().find(|k| k.name == name).map_or("see `coevolve settings`", |k| k.unit)
}

fn unknown(origin: &str, key: &str) -> SettingsError {
    let near = CATALOGUE.iter().map(|k| (distance(k.name, key), k.name)).min();
    let hint = match near {
        Some((d, name)) if d <= 4 => format!("; did you mean `{name}`?"),
        _ => String::new(),
    };
    SettingsError::UnknownKey { origin: origin.into(), key: key.into(), hint }
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut left = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let next = (row[j] + usize::from(ca != *cb)).min(row[j + 1] + 1).min(left + 1);
            row[j] = left;
            left = next;
        }
        row[b.len()] = left;
    }
    row[b.len()]
}

fn check(s: &Settings) -> Result<(), SettingsError> {
    let bad = |key: &str, message: String| SettingsError::BadValue { key: key.into(), message, unit: unit(key) };
    let words: &[(&str, &str)] = &[
        ("learner.loss", &s.learner.loss),
        ("learner.scale", &s.learner.scale),
        ("learner.advantage", &s.learner.advantage),
        ("learner.correction", &s.learner.correction),
        ("learner.correction_level", &s.learner.correction_level),
        ("learner.kl", &s.learner.kl),
        ("learner.schedule", &s.learner.schedule),
        ("learner.precision", &s.learner.precision),
        ("evolve.mode", &s.evolve.mode),
        ("evolve.initial", &s.evolve.initial),
        ("evolve.explorer", &s.evolve.explorer),
        ("env.name", &s.env.name),
        ("env.judge", &s.env.judge),
        ("env.bfcl_version", &s.env.bfcl_version),
        ("policy.tool_docs", &s.policy.tool_docs),
        ("policy.calls", &s.policy.calls),
    ];
    for (key, value) in words {
        if !unit(key).split('|').any(|w| w.trim() == *value) {
            return Err(bad(key, format!("`{value}` is not one of the words")));
        }
    }
    in_range(s)?;
    let mut splits = s.eval.splits.clone();
    splits.sort();
    if splits.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(bad("eval.splits", "names a split twice".into()));
    }
    let asks = s.evolve.explorer == "llm" || s.env.judge == "llm";
    if asks && s.evolve.llm_model.is_empty() {
        return Err(bad("evolve.llm_model", "an llm as explorer or judge needs a model name".into()));
    }
    if s.env.name == "service" && s.env.service.is_empty() {
        return Err(bad(
            "env.service",
            "the service environment needs the env_service's name of it, e.g. webshop".into(),
        ));
    }
    for (used, key, url) in
        [(asks, "evolve.llm_url", &s.evolve.llm_url), (s.env.name == "service", "env.url", &s.env.url)]
    {
        if used && !["http://", "https://"].iter().any(|scheme| url.len() > scheme.len() && url.starts_with(scheme)) {
            return Err(bad(key, format!("`{url}` is no http:// or https:// URL")));
        }
    }
    Ok(())
}

/// Everything is bounded: a slip of the finger gets a message, not a machine without memory.
fn in_range(s: &Settings) -> Result<(), SettingsError> {
    let counts: &[(&'static str, u64, u64, u64)] = &[
        ("run.steps", s.run.steps.into(), 1, 10_000_000),
        ("run.threads", s.run.threads.into(), 0, 1024),
        ("run.checkpoint_every", s.run.checkpoint_every.into(), 1, 10_000_000),
        ("env.seed_tasks", s.env.seed_tasks.into(), 1, 100_000),
        ("env.workers", s.env.workers.into(), 0, 512),
        ("env.max_steps", s.env.max_steps.into(), 1, 10_000),
        ("env.sessions", s.env.sessions.into(), 0, 65_536),
        ("env.deadline_ms", s.env.deadline_ms, 1, 86_400_000),
        ("policy.lora_rank", s.policy.lora_rank.into(), 0, 4096),
        ("policy.few_shot", s.policy.few_shot.into(), 0, 64),
        ("batch.tasks", s.batch.tasks.into(), 1, 65_536),
        ("batch.group", s.batch.group.into(), 2, 4096),
        ("batch.refill", s.batch.refill.into(), 0, 64),
        ("sampling.max_turn_tokens", s.sampling.max_turn_tokens.into(), 1, 1 << 17),
        ("sampling.max_context_tokens", s.sampling.max_context_tokens.into(), 1, 1 << 20),
        ("sampling.max_concurrent", s.sampling.max_concurrent.into(), 1, 65_536),
        ("sampling.max_calls_per_message", s.sampling.max_calls_per_message.into(), 1, 1024),
        ("sampling.max_invalid_calls", s.sampling.max_invalid_calls.into(), 1, 1024),
        ("sampling.max_observation_chars", s.sampling.max_observation_chars.into(), 1, 10_000_000),
        ("learner.overlong_ramp", s.learner.overlong_ramp.into(), 0, 1 << 20),
        ("learner.overlong_max", s.learner.overlong_max.into(), 0, 1 << 20),
        ("learner.updates_per_step", s.learner.updates_per_step.into(), 1, 4096),
        ("learner.micro_batch_tokens", s.learner.micro_batch_tokens.into(), 1, 1 << 24),
        ("signals.window", s.signals.window.into(), 1, 65_536),
        ("signals.pattern_length", s.signals.pattern_length.into(), 1, 64),
        ("evolve.every", s.evolve.every.into(), 1, 10_000_000),
        ("evolve.max_contexts", s.evolve.max_contexts.into(), 0, 65_536),
        ("evolve.rounds", s.evolve.rounds.into(), 1, 64),
        ("evolve.steps", s.evolve.steps.into(), 1, 1024),
        ("evolve.max_drafts", s.evolve.max_drafts.into(), 1, 1024),
        ("evolve.llm_timeout_ms", s.evolve.llm_timeout_ms, 1, 86_400_000),
        ("evolve.llm_retries", s.evolve.llm_retries.into(), 0, 100),
        ("evolve.llm_reasks", s.evolve.llm_reasks.into(), 0, 16),
        ("evolve.llm_budget_tokens", s.evolve.llm_budget_tokens, 0, 1 << 50),
        ("evolve.llm_max_tokens", s.evolve.llm_max_tokens.into(), 1, 1 << 20),
        ("eval.tasks", s.eval.tasks.into(), 0, 1_000_000),
        ("log.group_commit_events", s.log.group_commit_events.into(), 1, 65_536),
        ("log.group_commit_bytes", s.log.group_commit_bytes.into(), 1, 32 << 20),
        ("log.group_commit_us", s.log.group_commit_us, 0, 1_000_000),
        ("run.keep_checkpoints", s.run.keep_checkpoints.into(), 0, 1_000_000),
        ("log.blob_copies", s.log.blob_copies.into(), 1, 2),
        ("log.segment_mib", s.log.segment_mib.into(), 1, 4096),
    ];
    for &(key, value, low, high) in counts {
        if value < low || value > high {
            let message = format!("{value} does not lie in {low}..={high}");
            return Err(SettingsError::BadValue { key: key.into(), message, unit: unit(key) });
        }
    }
    // Smallest positive number that makes sense where 0 does not.
    const SOME: f64 = 1e-9;
    let shares: &[(&'static str, f64, f64, f64)] = &[
        ("policy.lora_alpha", s.policy.lora_alpha, SOME, 1e6),
        ("batch.temperature", s.batch.temperature, 1e-3, 100.0),
        ("batch.top_p", s.batch.top_p, 1e-3, 1.0),
        ("batch.min_p", s.batch.min_p, 0.0, 0.999),
        ("batch.fresh_share", s.batch.fresh_share, 0.0, 1.0),
        ("learner.learning_rate", s.learner.learning_rate, 0.0, 10.0),
        ("learner.advantage_eps", s.learner.advantage_eps, 0.0, 1.0),
        ("learner.epsilon_low", s.learner.epsilon_low, 0.0, 1.0),
        ("learner.epsilon_high", s.learner.epsilon_high, 0.0, 100.0),
        ("learner.dual_clip", s.learner.dual_clip, 0.0, 1e6),
        ("learner.beta", s.learner.beta, 0.0, 1e3),
        ("learner.entropy_bonus", s.learner.entropy_bonus, -10.0, 10.0),
        ("learner.final_lr_share", s.learner.final_lr_share, 0.0, 1.0),
        ("learner.weight_decay", s.learner.weight_decay, 0.0, 10.0),
        ("learner.beta1", s.learner.beta1, 0.0, 1.0 - SOME),
        ("learner.beta2", s.learner.beta2, 0.0, 1.0 - SOME),
        ("learner.max_grad_norm", s.learner.max_grad_norm, 0.0, 1e9),
        ("learner.adam_eps", s.learner.adam_eps, 1e-30, 1.0),
        ("learner.delta", s.learner.delta, 0.0, 1e6),
        ("learner.correction_max", s.learner.correction_max, SOME, 1e6),
        ("learner.correction_min", s.learner.correction_min, 0.0, s.learner.correction_max),
        ("learner.overlong_penalty", s.learner.overlong_penalty, 0.0, 1e6),
        ("signals.theta", s.signals.theta, 0.0, 100.0),
        ("evolve.similarity", s.evolve.similarity, 0.0, 1.0),
        ("evolve.llm_price_prompt", s.evolve.llm_price_prompt, 0.0, 1e6),
        ("evolve.llm_price_completion", s.evolve.llm_price_completion, 0.0, 1e6),
    ];
    for &(key, value, low, high) in shares {
        if !(low..=high).contains(&value) {
            let message = format!("{value} does not lie in {low}..={high}");
            return Err(SettingsError::BadValue { key: key.into(), message, unit: unit(key) });
        }
    }
    Ok(())
}

/// The settings as a commented TOML file: what `coevolve settings` prints.
pub fn to_toml(settings: &Settings) -> String {
    let table = toml::Table::try_from(settings).unwrap_or_default();
    let mut out = String::from("# Settings of coevolve. Every key with its default, unit and meaning.\n");
    let mut section = "";
    for key in CATALOGUE {
        let Some((head, leaf)) = key.name.split_once('.') else { continue };
        if head != section {
            out.push_str(&format!("\n[{head}]\n"));
            section = head;
        }
        let value = table.get(head).and_then(|s| s.get(leaf)).map(|v| v.to_string()).unwrap_or_default();
        out.push_str(&format!("# {} Unit or values: {}.\n{leaf} = {value}\n", key.doc, key.unit));
    }
    out
}

/// Settings that decide how fast and on what a run goes, never what comes out. They are no facts: they are left
/// out of what a run records, may differ between two equal runs and may be changed when it is resumed.
pub const EXECUTION: &[&str] = &[
    "run.threads",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "env.workers",
    "env.deadline_ms",
    "env.sessions",
    "env.data",
    "env.url",
    "learner.recompute_activations",
    "sampling.max_concurrent",
    "evolve.llm_url",
    "evolve.llm_key_env",
    "evolve.llm_timeout_ms",
    "evolve.llm_retries",
    "evolve.llm_price_prompt",
    "evolve.llm_price_completion",
    "evolve.llm_replay",
    "log.group_commit_events",
    "log.group_commit_bytes",
    "log.group_commit_us",
    "log.segment_mib",
    "log.compress",
    "log.blob_copies",
];

/// The settings that are facts, as canonical JSON text: everything but [`EXECUTION`].
pub fn to_recorded(settings: &Settings) -> Result<String, SettingsError> {
    let mut value = serde_json::to_value(settings)
        .map_err(|e| SettingsError::Syntax { origin: "settings".into(), message: e.to_string() })?;
    for name in EXECUTION {
        if let Some((section, key)) = name.split_once('.')
            && let Some(section) = value.get_mut(section).and_then(|s| s.as_object_mut())
        {
            section.remove(key);
        }
    }
    Ok(value.to_string())
}

/// Reads settings that a run recorded; execution settings are the defaults.
pub fn from_recorded(json: &str, path: &Path) -> Result<Settings, SettingsError> {
    serde_json::from_str(json).map_err(|e| SettingsError::Syntax {
        origin: format!("settings recorded in {}", path.display()),
        message: e.to_string(),
    })
}

/// Recorded settings with the execution settings of `now` and of `set` (`key=value`).
pub fn with_execution(recorded: Settings, now: &Settings, set: &[String]) -> Result<Settings, SettingsError> {
    for pair in set {
        let key = pair.split_once('=').map_or(pair.as_str(), |p| p.0).trim();
        if !EXECUTION.contains(&key) {
            let known = CATALOGUE.iter().any(|k| k.name == key);
            let hint = if known { " (it is a fact of the run and cannot change; start another run)" } else { "" };
            return Err(SettingsError::UnknownKey {
                origin: format!("--set {pair}"),
                key: key.into(),
                hint: hint.into(),
            });
        }
    }
    let mut value = toml::Table::try_from(recorded)
        .map_err(|e| SettingsError::Syntax { origin: "settings".into(), message: e.to_string() })?;
    let now = toml::Table::try_from(now).unwrap_or_default();
    for name in EXECUTION {
        if let Some((section, key)) = name.split_once('.')
            && let Some(v) = now.get(section).and_then(|s| s.get(key))
            && let Some(section) = value.get_mut(section).and_then(|s| s.as_table_mut())
        {
            section.insert(key.into(), v.clone());
        }
    }
    over(value, &set.iter().cloned().map(Layer::Set).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pair: &str) -> Result<Settings, SettingsError> {
        load(&[Layer::Set(pair.into())])
    }

    #[test]
    fn set_accepts_bare_words_numbers_and_lists() {
        assert_eq!(set("evolve.mode=off").expect("word").evolve.mode, "off");
        assert_eq!(set("learner.beta=1").expect("integer for a float").learner.beta, 1.0);
        assert_eq!(set("eval.splits=a, b").expect("list").eval.splits, ["a", "b"]);
        assert_eq!(set("policy.model=7").expect("string").policy.model, "7");
    }

    #[test]
    fn errors_name_the_key_and_the_remedy() {
        let message = set("run.step=3").expect_err("no such key").to_string();
        assert!(message.contains("did you mean `run.steps`"), "{message}");
        let message = set("evolve.mode=on").expect_err("no such word").to_string();
        assert!(message.contains("feedback | random | off"), "{message}");
        assert!(set("run.steps=0").is_err());
        assert!(set("run.steps=-1").is_err());
        assert!(set("run.steps=1.5").is_err());
        assert!(set("run.steps").is_err());
        assert!(set("steps=1").is_err());
        assert!(set("batch.temperature=0").is_err());
        assert!(set("learner.beta=nan").is_err());
        assert!(load(&[Layer::Preset("nope".into())]).is_err());
        assert!(load(&[Layer::File("/nonexistent/x.toml".into())]).is_err());
    }

    #[test]
    fn presets_load_and_the_printed_file_reads_back() {
        for name in preset_names() {
            let settings = load(&[Layer::Preset(name.into())]).unwrap_or_else(|e| panic!("preset {name}: {e}"));
            let dir = tempfile::tempdir().expect("tempdir");
            let path = dir.path().join("s.toml");
            std::fs::write(&path, to_toml(&settings)).expect("write");
            assert_eq!(load(&[Layer::File(path)]).expect("reads back"), settings);
        }
    }

    #[test]
    fn execution_settings_are_no_facts() {
        let mut a = Settings::default();
        a.run.threads = 7;
        a.log.segment_mib = 3;
        let facts = to_recorded(&a).expect("records");
        assert_eq!(facts, to_recorded(&Settings::default()).expect("records"));
        a.run.steps = 5;
        let facts = to_recorded(&a).expect("records");
        let back = from_recorded(&facts, Path::new("x")).expect("reads");
        assert_eq!((back.run.steps, back.run.threads), (5, 0));
        let back = with_execution(back, &a, &["env.workers=4".into()]).expect("combines");
        assert_eq!((back.run.steps, back.run.threads, back.env.workers, back.log.segment_mib), (5, 7, 4, 3));
        assert!(with_execution(back, &a, &["run.steps=9".into()]).is_err());
        for name in EXECUTION {
            assert!(CATALOGUE.iter().any(|k| k.name == *name), "{name}");
        }
    }

    #[test]
    fn distance_is_levenshtein() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }
}
