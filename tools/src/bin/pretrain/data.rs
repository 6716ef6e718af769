//! Training sequences: copy drills, and demonstrations played through the same episode machinery as
//! rollouts, so that ids and masks are those of rollouts.

use coevolve::agent::puppet::{self, Mind, Utterance};
use coevolve::agent::{Dialect, Episode, EpisodeJob, InlineHands, Limits, Sampling};
use coevolve::config::Settings;
use coevolve::env::desk::habits::{Spoken, demonstration};
use coevolve::env::desk::splits::wide_plan;
use coevolve::env::desk::values::{Ty, Val};
use coevolve::env::desk::{self, Desk};
use coevolve::env::{Environment, Role};
use coevolve::event::RolloutKey;
use coevolve::model::load::LoadedModel;
use coevolve::model::tokenizer::{Tokenizer, TokenizerNotes};
use coevolve::run::policy;
use coevolve::world::{Draw, draw};
use std::collections::{BTreeSet, VecDeque};
use std::error::Error;
use std::sync::Arc;

/// The embedded policy's tokenizer.
pub fn tokenizer() -> Result<Tokenizer, Box<dyn Error>> {
    let notes = TokenizerNotes {
        eos: Some(desk::vocab::EOS.into()),
        chat_template: Some(desk::chat_template().into()),
        ..TokenizerNotes::default()
    };
    Ok(Tokenizer::from_bytes(desk::tokenizer_json().as_bytes(), notes)?)
}

/// One sequence and its trained positions: (position of the logits, token).
pub struct Example {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Targets.
    pub targets: Vec<(u32, u32)>,
}

/// Share of the curriculum with drills and faultless single turns.
const FIRST_STAGE: f64 = 0.3;

/// Source of examples; the n-th depends on the seed and n alone.
pub struct Demos {
    env: Arc<dyn Environment>,
    dialect: Arc<dyn Dialect>,
    tokenizer: Tokenizer,
    values: BTreeSet<u32>,
    keys: Vec<String>,
    seed: u64,
    habits: f64,
}

impl Demos {
    pub fn new(model: &LoadedModel, seed: u64, habits: f64) -> Result<Demos, Box<dyn Error>> {
        let dialect = policy::dialect(model, &Settings::default(), Vec::new())?;
        let mut values = BTreeSet::new();
        for word in Ty::ALL.iter().flat_map(|ty| ty.pool()) {
            values.insert(model.tokenizer.token_to_id(word).ok_or("a value is no token")?);
        }
        let mut keys = BTreeSet::new();
        for tool in desk::tools::TOOLS {
            keys.extend(tool.args.iter().map(|(name, _)| (*name).to_string()));
            keys.extend(tool.fields().iter().map(|(name, _)| (*name).to_string()));
        }
        Ok(Demos {
            env: Arc::new(Desk::new(desk::Limits::default())),
            dialect,
            tokenizer: model.tokenizer.clone(),
            values,
            keys: keys.into_iter().collect(),
            seed,
            habits,
        })
    }

    /// The n-th example at this point (0..1) of the curriculum.
    pub fn example(&self, n: usize, progress: f64) -> Result<Example, Box<dyn Error>> {
        let mut d = draw(self.seed, "pretrain", &[&n.to_string()]);
        let drills = if progress < FIRST_STAGE { 0.4 } else { 0.08 };
        if d.chance(drills) {
            return self.drill(&mut d);
        }
        let turns = (progress < 0.45 || d.chance(0.3)).then_some(1);
        let habits = if progress < FIRST_STAGE { 0.0 } else { self.habits };
        let plan = wide_plan(&mut d, turns);
        let task = plan.task("train-wide", &mut d);
        let said: VecDeque<Spoken> =
            demonstration(&plan, &task, &mut d, habits).into_iter().filter(|s| s.role == Role::Assistant).collect();
        let job = EpisodeJob {
            key: RolloutKey { step: 0, task: task.id.clone(), draw: 0, k: 0 },
            task,
            group: 0,
            sampling: Sampling::at(1.0),
            seed: self.seed,
            label: "demonstration".into(),
        };
        let mut records = Vec::new();
        puppet::play(
            &|_| Ok(Box::new(Script(said.clone()))),
            &self.dialect,
            &mut InlineHands::new(self.env.clone()),
            &[job],
            &Limits::default(),
            &mut |_, record| records.push(record),
        )?;
        let record = records.pop().ok_or("a demonstration did not finish")?;
        let mut targets = Vec::new();
        for (start, len) in &record.sampled {
            targets.extend((*start..start + len).map(|i| (i - 1, record.ids[i as usize])));
        }
        Ok(Example { ids: record.ids, targets })
    }

    /// Key-value pairs, then the same keys in another order: copying is most of what a small model has to
    /// learn here. Only the values of the second list are trained.
    fn drill(&self, d: &mut Draw) -> Result<Example, Box<dyn Error>> {
        let n = 4 + d.below(9);
        let mut keys = self.keys.clone();
        d.shuffle(&mut keys);
        let mut pairs: Vec<(String, &str)> = keys
            .into_iter()
            .take(n)
            .map(|key| {
                let ty = *d.pick(&Ty::ALL).unwrap_or(&Ty::Number);
                (key, Val::draw(ty, d).word())
            })
            .collect();
        let list = |pairs: &[(String, &str)]| {
            let body: Vec<String> = pairs.iter().map(|(k, v)| format!("\"{k}\": \"{v}\"")).collect();
            format!("{{{}}}\n", body.join(", "))
        };
        let mut ids = self.tokenizer.encode(&list(&pairs))?;
        let from = ids.len();
        d.shuffle(&mut pairs);
        ids.extend(self.tokenizer.encode(&list(&pairs))?);
        let targets =
            (from..ids.len()).filter(|i| self.values.contains(&ids[*i])).map(|i| (i as u32 - 1, ids[i])).collect();
        Ok(Example { ids, targets })
    }
}

/// Says what the demonstrator said, in order.
struct Script(VecDeque<Spoken>);

impl Mind for Script {
    fn speak(&mut self, _episode: &Episode) -> Utterance {
        self.0.pop_front().map_or_else(|| Utterance::words("done"), |s| Utterance { text: s.content, calls: s.calls })
    }
}
