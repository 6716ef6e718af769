//! From settings to the rooms' own configurations.

use super::RunError;
use crate::agent::Limits;
use crate::config::Settings;
use crate::decide::advantage::{Estimator, Scale};
use crate::env::Environment;
use crate::env::appworld;
use crate::env::bfcl::{Bfcl, BfclOptions};
use crate::env::desk::{self, Desk};
use crate::env::service::{ServiceEnv, ServiceOptions};
use crate::env::stdio::Bounds;
use crate::env::textworld::{TextWorld, TextWorldOptions};
use crate::learner::LearnerConfig;
use crate::learner::loss::{Correction, Overlong};
use crate::learner::schedule::Schedule;
use crate::model::Precision;
use crate::pipeline::Plan;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Where the set-up scripts install environments and models.
const HOME: &str = ".coevolve";
/// Variable that names another place.
const HOME_VAR: &str = "COEVOLVE_HOME";

/// Something that a set-up script installed: below the folder that `COEVOLVE_HOME` names, else below `.coevolve` in
/// the working folder or the nearest folder above it that has one.
pub fn installed(name: &str) -> PathBuf {
    if let Some(home) = std::env::var_os(HOME_VAR).filter(|home| !home.is_empty()) {
        return Path::new(&home).join(name);
    }
    let here = std::env::current_dir().unwrap_or_default();
    let home = here.ancestors().map(|folder| folder.join(HOME)).find(|home| home.is_dir());
    home.unwrap_or_else(|| HOME.into()).join(name)
}

/// The environment named by `env.name`.
pub fn open_environment(settings: &Settings) -> Result<Arc<dyn Environment>, RunError> {
    let e = &settings.env;
    let sessions = (e.sessions > 0).then_some(e.sessions as usize);
    let bounds =
        |own: usize| Bounds { step_ms: e.deadline_ms, ..Bounds::default() }.for_sessions(sessions.unwrap_or(own));
    Ok(match e.name.as_str() {
        "bfcl" => {
            let version = word("env.bfcl_version", &e.bfcl_version)?;
            let bounds = bounds(Bounds::default().sessions());
            let options = BfclOptions { version, partial: e.partial_credit, bounds, ..BfclOptions::default() };
            Arc::new(Bfcl::open(&installed("bfcl"), options)?)
        }
        "appworld" => {
            let data = (!e.data.is_empty()).then(|| Path::new(&e.data));
            Arc::new(appworld::open(&installed("appworld"), data, e.partial_credit, bounds(appworld::SESSIONS))?)
        }
        "service" => Arc::new(ServiceEnv::open(ServiceOptions {
            url: e.url.clone(),
            env_type: e.service.clone(),
            splits: std::iter::once(&e.split).chain(&settings.eval.splits).cloned().collect(),
            step_limit: e.max_steps,
            partial: e.partial_credit,
            deadline_ms: e.deadline_ms,
            sessions,
        })?),
        "textworld" => {
            // The first play of a game makes it.
            let own = Bounds::default().sessions();
            let bounds = Bounds { reset_ms: 120_000, evaluate_ms: 120_000, ..bounds(own) };
            let games = (!e.games.is_empty()).then(|| PathBuf::from(&e.games));
            let options = TextWorldOptions { admissible: e.admissible, partial: e.partial_credit, games, bounds };
            Arc::new(TextWorld::open(&installed("textworld"), options)?)
        }
        _ => Arc::new(Desk::new(desk::Limits { steps: e.max_steps, ..desk::Limits::default() })),
    })
}

/// Bounds of an episode.
pub fn limits(settings: &Settings) -> Limits {
    let s = &settings.sampling;
    Limits {
        turn_tokens: s.max_turn_tokens as usize,
        context_tokens: s.max_context_tokens as usize,
        env_steps: settings.env.max_steps,
        calls_per_message: s.max_calls_per_message as usize,
        invalid_in_a_row: s.max_invalid_calls,
        observation_bytes: s.max_observation_chars as usize,
        concurrent: s.max_concurrent as usize,
        score_cut_episodes: settings.env.partial_credit,
        ..Limits::default()
    }
}

/// Threads to use: the setting, or all cores.
pub fn threads(settings: &Settings) -> usize {
    match settings.run.threads {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        n => n as usize,
    }
}

/// How the stages run.
pub fn play_plan(settings: &Settings, limits: Limits, stop: Arc<AtomicBool>) -> Plan {
    Plan { threads: threads(settings), env_workers: settings.env.workers as usize, limits, stop }
}

/// The learner's own settings.
pub fn learner_config(settings: &Settings) -> Result<LearnerConfig, RunError> {
    let s = &settings.learner;
    let updates = u64::from(s.updates_per_step);
    let given = |x: f64| (x != 0.0).then_some(x);
    let correction = match s.correction.as_str() {
        "none" => None,
        kind => Some(Correction {
            kind: word("learner.correction", kind)?,
            level: word("learner.correction_level", &s.correction_level)?,
            max: s.correction_max,
            min: given(s.correction_min),
        }),
    };
    let longest = match s.overlong_max {
        0 => settings.sampling.max_context_tokens,
        max => max,
    };
    let overlong = Overlong { max: longest, cache: s.overlong_ramp, factor: s.overlong_penalty };
    Ok(LearnerConfig {
        loss: word("learner.loss", &s.loss)?,
        epsilon_low: given(s.epsilon_low),
        epsilon_high: given(s.epsilon_high),
        delta: s.delta,
        dual_clip: s.dual_clip,
        correction,
        overlong: (s.overlong_ramp > 0).then_some(overlong),
        advantage: chosen::<Estimator>("learner.advantage", &s.advantage)?,
        beta: s.beta,
        kl: word("learner.kl", &s.kl)?,
        max_completion_length: settings.sampling.max_context_tokens,
        entropy_coef: s.entropy_bonus,
        scale: chosen::<Scale>("learner.scale", &s.scale)?,
        advantage_eps: s.advantage_eps,
        learning_rate: s.learning_rate,
        schedule: word::<Schedule>("learner.schedule", &s.schedule)?,
        warmup_updates: u64::from(s.warmup_steps) * updates,
        total_updates: u64::from(settings.run.steps) * updates,
        min_learning_rate_ratio: s.final_lr_share,
        adam_beta1: s.beta1,
        adam_beta2: s.beta2,
        adam_eps: s.adam_eps,
        weight_decay: s.weight_decay,
        grad_clip: s.max_grad_norm,
        updates_per_step: s.updates_per_step,
        micro_batch_tokens: s.micro_batch_tokens,
        recompute_activations: s.recompute_activations,
        precision: word::<Precision>("learner.precision", &s.precision)?,
        skip_zero_advantage: s.skip_zero_advantage,
        max_skips: s.max_skipped,
    })
}

/// A word's meaning; none for `auto`.
fn chosen<T: DeserializeOwned>(key: &str, value: &str) -> Result<Option<T>, RunError> {
    if value == "auto" { Ok(None) } else { word(key, value).map(Some) }
}

fn word<T: DeserializeOwned>(key: &str, value: &str) -> Result<T, RunError> {
    serde_json::from_value(serde_json::Value::String(value.to_string())).map_err(|e| {
        RunError::Settings(crate::config::SettingsError::BadValue {
            key: key.into(),
            message: e.to_string(),
            unit: "see `coevolve settings`",
        })
    })
}

/// File with the settings a run is about to record: what a kill before the first event leaves to start from.
const PLAN: &str = "settings.json";

/// Writes the settings beside the log, before its first event. Never read once the log has one.
pub(super) fn write_plan(dir: &Path, settings: &Settings) -> Result<(), RunError> {
    let failed = |e: std::io::Error| RunError::Folder { dir: dir.to_path_buf(), message: e.to_string() };
    crate::log::refuse_foreign(dir)?;
    std::fs::create_dir_all(dir).map_err(failed)?;
    // The log itself refuses a folder that holds a run; a kill may leave one without events.
    if crate::log::holds_events(dir)? {
        return Ok(());
    }
    let text = serde_json::to_string_pretty(settings).map_err(|e| RunError::internal("settings", e))?;
    let temporary = dir.join(format!("{PLAN}.new"));
    std::fs::write(&temporary, text).map_err(failed)?;
    std::fs::rename(&temporary, dir.join(PLAN)).map_err(failed)
}

/// The settings that [`write_plan`] left.
pub(super) fn planned_settings(dir: &Path) -> Result<Settings, RunError> {
    let text =
        std::fs::read_to_string(dir.join(PLAN)).map_err(|_| RunError::NothingToResume { dir: dir.to_path_buf() })?;
    Ok(crate::config::from_recorded(&text, dir)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learner::loss::{CorrectionKind, CorrectionLevel, LossKind};

    fn with(change: impl FnOnce(&mut Settings)) -> LearnerConfig {
        let mut settings = Settings::default();
        change(&mut settings);
        let config = learner_config(&settings).unwrap();
        config.validate().unwrap();
        config
    }

    #[test]
    fn every_loss_starts_from_its_own_ranges_and_estimator() {
        let table = [
            ("grpo", LossKind::Grpo, 0.2, 0.28, Estimator::Grpo, Scale::Group),
            ("dapo", LossKind::Dapo, 0.2, 0.28, Estimator::Grpo, Scale::Group),
            ("dr_grpo", LossKind::DrGrpo, 0.2, 0.28, Estimator::Grpo, Scale::None),
            ("bnpo", LossKind::Bnpo, 0.2, 0.28, Estimator::Grpo, Scale::Group),
            ("gspo", LossKind::Gspo, 3e-4, 4e-4, Estimator::Grpo, Scale::Group),
            ("cispo", LossKind::Cispo, 0.2, 5.0, Estimator::Grpo, Scale::Group),
            ("gpg", LossKind::Gpg, 0.2, 0.28, Estimator::Gpg, Scale::Group),
        ];
        for (word, kind, low, high, estimator, scale) in table {
            let c = with(|s| s.learner.loss = word.into());
            let loss = c.loss_config();
            assert_eq!((loss.kind, loss.epsilon_low, loss.epsilon_high), (kind, low, high));
            assert_eq!((loss.delta, loss.dual_clip, loss.correction), (None, Some(3.0), None), "{word}");
            assert_eq!((c.advantage_config().estimator, c.advantage_config().scale), (estimator, scale), "{word}");
            assert_eq!(c.overlong, None);
        }
    }

    #[test]
    fn what_is_set_reaches_the_learner() {
        let c = with(|s| {
            let l = &mut s.learner;
            (l.loss, l.advantage, l.scale) = ("dr_grpo".into(), "rloo".into(), "batch".into());
            (l.epsilon_low, l.epsilon_high, l.delta, l.dual_clip) = (0.1, 0.3, 1.5, 0.0);
            (l.correction, l.correction_level) = ("mis".into(), "sequence".into());
            (l.correction_max, l.correction_min) = (4.0, 0.25);
            (l.overlong_ramp, l.overlong_penalty, l.adam_eps, l.max_grad_norm) = (50, 0.5, 1e-6, 0.0);
            (l.recompute_activations, l.precision) = (true, "bf16".into());
            s.sampling.max_context_tokens = 700;
        });
        let loss = c.loss_config();
        assert_eq!((loss.epsilon_low, loss.epsilon_high, loss.delta, loss.dual_clip), (0.1, 0.3, Some(1.5), None));
        let (kind, level) = (CorrectionKind::Mis, CorrectionLevel::Sequence);
        assert_eq!(loss.correction, Some(Correction { kind, level, max: 4.0, min: Some(0.25) }));
        assert_eq!((c.advantage_config().estimator, c.advantage_config().scale), (Estimator::Rloo, Scale::Batch));
        assert_eq!(c.overlong, Some(Overlong { max: 700, cache: 50, factor: 0.5 }));
        assert_eq!((c.adam_eps, c.grad_clip, c.max_completion_length), (1e-6, 0.0, 700));
        assert_eq!((c.recompute_activations, c.precision), (true, Precision::Bf16));
        assert_eq!(with(|s| (s.learner.overlong_ramp, s.learner.overlong_max) = (50, 600)).overlong.unwrap().max, 600);
    }
}
