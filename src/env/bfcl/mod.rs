//! BFCL multi-turn, V3 or V4: 4 x 200 official entries over eight simulated APIs, with the official checker.
//!
//! V4 has the ids of V3, and for each about a third of the queries, states or answers differ. Measured through
//! the official checker, of 800 entries (V3, V4): the answer passes 800, 800; without its first or last call 0, 0;
//! with a junk call in each turn 800, 800; with each call twice 288, 288; reversed 359, 360; with the next turn's
//! calls already in the turn that asks for what is missing, of 400, 274, 272. So an evaluation also gives
//! stricter figures ([`Environment::figures`]): `abstained`, `no_duplicates`, `no_junk`, `strict`; the worker's
//! documentation defines them.
//!
//! Runs in Python workers (`tools/workers/bfcl_worker.py`, embedded here) out of a private environment that
//! `tools/setup-bfcl.sh` makes under `.coevolve/bfcl`.
//!
//! Splits: `base`, `miss_func`, `miss_param`, `long_context` are the official categories. The other three
//! categories are variants of the same 200 scenarios, so each has `-train` and `-test` parts with the *same
//! numbers*: 160 and 40 of the 200, chosen by a hash of the number. A model trained on `base-train` has seen
//! nothing of any `-test` part. Playgrounds and the narrator's values come from train numbers only.

mod catalog;
mod narrator;
mod propose;

pub use narrator::BfclNarrator;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::stdio::{Bounds, Description, Launch, Pool, REPLY_BYTES, WorkerSession, bare};
use super::{EnvError, Environment, Figure, Narrator, Session};
use crate::event::TaskSpec;
use crate::world::draw;

/// The worker program, so that the binary needs no source tree.
const WORKER: &str = include_str!("../../../tools/workers/bfcl_worker.py");
/// Entries per category.
const ENTRIES: usize = 200;
/// Of them in the `-train` splits.
const TRAIN_ENTRIES: usize = 160;
const CATEGORIES: [&str; 4] = ["base", "miss_func", "miss_param", "long_context"];
const NAME: &str = "bfcl";

/// Which release of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BfclVersion {
    /// V3, package `nvidia-bfcl`.
    #[default]
    V3,
    /// V4, package `bfcl-eval`.
    V4,
}

impl BfclVersion {
    /// The worker's word for it, and its package as the set-up script notes it.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            BfclVersion::V3 => ("v3", "nvidia-bfcl=="),
            BfclVersion::V4 => ("v4", "bfcl-eval=="),
        }
    }
}

/// How BFCL is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BfclOptions {
    /// Release.
    pub version: BfclVersion,
    /// Score = share of turns passed before the first failing one (turns without answer calls do not
    /// count), instead of the official 0 or 1.
    pub partial: bool,
    /// Long official tool descriptions instead of their last part.
    pub full_docs: bool,
    /// Deadlines and number of processes.
    pub bounds: Bounds,
}

/// The benchmark as an environment.
#[derive(Debug)]
pub struct Bfcl {
    pool: Arc<Pool>,
    description: Description,
    partial: bool,
    narrator: BfclNarrator,
    /// Official base entries, in official order.
    base: Vec<TaskSpec>,
    /// Numbers of the train entries.
    train: BTreeSet<usize>,
}

impl Bfcl {
    /// Opens the installation in `folder` (usually `.coevolve/bfcl`), starts one worker and reads the base
    /// category. [`EnvError::NotInstalled`] says how to install it.
    pub fn open(folder: &Path, options: BfclOptions) -> Result<Bfcl, EnvError> {
        let python = folder.join("bin").join("python");
        let (word, package) = options.version.words();
        let installed = std::fs::read_to_string(folder.join("ready")).unwrap_or_default();
        if !installed.contains(package) || !python.is_file() {
            return Err(EnvError::NotInstalled {
                env: NAME.into(),
                what: format!("BFCL {} is not installed in {}", word.to_uppercase(), folder.display()),
                remedy:
                    "Run tools/setup-bfcl.sh in the project (about 20 seconds and 60 MB), or set COEVOLVE_HOME to the \
                         .coevolve folder where it is, then try again"
                        .into(),
            });
        }
        let mut args: Vec<_> = ["-I", "-c", WORKER, "--version-set", word].map(Into::into).to_vec();
        if options.partial {
            args.push("--partial".into());
        }
        if options.full_docs {
            args.extend(["--docs", "full"].map(Into::into));
        }
        let launch = Launch {
            env: NAME.into(),
            program: python,
            args,
            vars: vec![("BFCL_PROJECT_ROOT".into(), folder.join("root").into_os_string())],
            reply_bytes: REPLY_BYTES,
        };
        let pool = Pool::new(launch, options.bounds);
        let description = pool.describe()?;
        let base = pool.list("base")?;
        let train = train_numbers();
        let catalog = catalog::Catalog::new(&description.raw, &base, &train);
        let narrator = BfclNarrator::new(catalog, Arc::clone(&pool));
        Ok(Bfcl { pool, description, partial: options.partial, narrator, base, train })
    }

    /// Its worker processes.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// A session with access to the checker's details.
    pub fn session(&self) -> WorkerSession {
        self.pool.session()
    }

    fn is_train(&self, id: &str) -> bool {
        number(id).is_some_and(|n| self.train.contains(&n))
    }
}

/// The number at the end of an official id.
fn number(id: &str) -> Option<usize> {
    id.rsplit('_').next()?.parse().ok()
}

/// The 160 numbers with the smallest hashes.
fn train_numbers() -> BTreeSet<usize> {
    let mut hashed: Vec<_> = (0..ENTRIES)
        .map(|n| (blake3::derive_key("coevolve 2026 bfcl split v1", n.to_string().as_bytes()), n))
        .collect();
    hashed.sort_unstable();
    hashed.into_iter().take(TRAIN_ENTRIES).map(|(_, n)| n).collect()
}

impl Environment for Bfcl {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        let scoring = if self.partial { "turns passed" } else { "official" };
        format!("{}, score: {scoring}", self.description.version)
    }

    fn splits(&self) -> Vec<String> {
        CATEGORIES.iter().flat_map(|c| [(*c).to_owned(), format!("{c}-train"), format!("{c}-test")]).collect()
    }

    /// Official tasks with their solutions, in official order, at most `limit` of them, evenly spaced; `seed`
    /// changes nothing.
    fn tasks(&self, split: &str, _seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        let (category, part) = match split.rsplit_once('-') {
            Some((category, part @ ("train" | "test"))) => (category, Some(part == "train")),
            _ => (split, None),
        };
        if !CATEGORIES.contains(&category) {
            return Err(EnvError::Unknown {
                env: NAME.into(),
                what: format!("split `{split}`"),
                known: self.splits().join(", "),
            });
        }
        let mut tasks = if category == "base" { self.base.clone() } else { self.pool.list(category)? };
        tasks.retain(|t| part.is_none_or(|train| self.is_train(&t.id) == train));
        // Official order groups the entries by API: a subset covers it evenly.
        let all = tasks.len();
        if limit < all {
            let mut kept = (0..limit).map(|i| i * all / limit).peekable();
            let mut at = 0..;
            tasks.retain(|_| kept.next_if_eq(&at.next().unwrap_or_default()).is_some());
        }
        for task in &mut tasks {
            split.clone_into(&mut task.split);
        }
        Ok(tasks)
    }

    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(self.session()))
    }

    /// The initial state of a train entry: with `near` one of the same APIs (its own included), and all
    /// tools of those APIs.
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        let family = near.and_then(|near| {
            let number = number(&near.base)?;
            self.base.iter().find(|t| self::number(&t.id) == Some(number)).map(|t| &t.family)
        });
        let all: Vec<&TaskSpec> = self.base.iter().filter(|t| self.is_train(&t.id)).collect();
        let mut close: Vec<&TaskSpec> = all.iter().copied().filter(|t| Some(&t.family) == family).collect();
        if close.is_empty() {
            close = all;
        }
        let near_id = near.map_or("", |n| n.id.as_str());
        match draw(seed, "bfcl playground", &[near_id]).pick(&close) {
            Some(task) => Ok(TaskSpec { tools: self.tools_of(&task.family), ..bare((*task).clone()) }),
            None => Err(EnvError::Unknown { env: NAME.into(), what: "base-train".into(), known: "no entry".into() }),
        }
    }

    fn max_sessions(&self) -> Option<usize> {
        Some(self.pool.bounds().sessions())
    }

    fn narrator(&self) -> Option<&dyn Narrator> {
        Some(&self.narrator)
    }

    fn figures(&self) -> Vec<Figure> {
        self.pool.figures()
    }
}

impl Bfcl {
    /// Names of the tools of a family (`ClassA+ClassB`), in official order.
    fn tools_of(&self, family: &str) -> Vec<String> {
        let classes = self.description.raw["classes"].as_array().map(Vec::as_slice).unwrap_or_default();
        classes
            .iter()
            .filter(|c| c["name"].as_str().is_some_and(|n| family.split('+').any(|f| f == n)))
            .flat_map(|c| c["tools"].as_array().map(Vec::as_slice).unwrap_or_default())
            .filter_map(|t| t["name"].as_str().map(str::to_owned))
            .collect()
    }
}
