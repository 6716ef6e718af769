//! Text games: TextWorld's own, made offline with a seed, or a folder of the user's.
//!
//! Runs in Python workers (`tools/workers/textworld_worker.py`, embedded here; its documentation says how games are
//! made and scored) out of a private environment that `tools/setup-textworld.sh` makes under `.coevolve/textworld`.
//! One tool, `act`, with one string argument `text`: the command. Games have no narrator: new tasks come from an LLM
//! explorer.
//!
//! Splits of made games are ranges of seeds: `train` 0..9,999, `dev` 10,000..19,999, `test` 20,000..29,999; of each the
//! first 1,000 can be listed. A game is made (about 2 seconds) when it is first listed or played, and kept in the
//! installation's folder `games`. Measured: 3.5 ms a command, 11 ms a restart, 0.5 s to open a game first.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::stdio::{Bounds, Description, Launch, Pool, REPLY_BYTES, bare};
use super::{EnvError, Environment, Figure, Session};
use crate::event::TaskSpec;
use crate::world::draw;

/// The worker program, so that the binary needs no source tree.
const WORKER: &str = include_str!("../../tools/workers/textworld_worker.py");
const NAME: &str = "textworld";
/// Games listed with one request: making so many takes well under its deadline.
const GAMES_PER_REQUEST: usize = 8;
/// Games that playgrounds start from: few, so that they are made once.
const PLAYGROUNDS: usize = 16;

/// How text games are run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextWorldOptions {
    /// Only commands that the game lists as possible are let through; others are error results that name those.
    pub admissible: bool,
    /// Score of a game that is not won = the share of its points, instead of 0.
    pub partial: bool,
    /// Folder of game files (.z8, .z5, .ulx) to play instead of made ones.
    pub games: Option<PathBuf>,
    /// Deadlines and number of processes.
    pub bounds: Bounds,
}

/// Text games as an environment.
#[derive(Debug)]
pub struct TextWorld {
    pool: Arc<Pool>,
    description: Description,
    options: TextWorldOptions,
}

impl TextWorld {
    /// Opens the installation in `folder` (usually `.coevolve/textworld`) and starts one worker.
    /// [`EnvError::NotInstalled`] says how to install it.
    pub fn open(folder: &Path, options: TextWorldOptions) -> Result<TextWorld, EnvError> {
        let python = folder.join("bin").join("python");
        if !folder.join("ready").is_file() || !python.is_file() {
            return Err(EnvError::NotInstalled {
                env: NAME.into(),
                what: format!("TextWorld is not installed in {}", folder.display()),
                remedy: "Run tools/setup-textworld.sh in the project (about 20 seconds and 150 MB), or set \
                         COEVOLVE_HOME to the .coevolve folder where it is, then try again"
                    .into(),
            });
        }
        let mut args: Vec<std::ffi::OsString> = ["-I", "-c", WORKER].map(Into::into).to_vec();
        match &options.games {
            Some(games) => args.extend(["--games".into(), games.into()]),
            None => args.extend(["--cache".into(), folder.join("games").into()]),
        }
        for (given, flag) in [(options.admissible, "--admissible"), (options.partial, "--partial")] {
            if given {
                args.push(flag.into());
            }
        }
        let launch = Launch { env: NAME.into(), program: python, args, vars: vec![], reply_bytes: REPLY_BYTES };
        let pool = Pool::new(launch, options.bounds);
        let description = pool.describe()?;
        Ok(TextWorld { pool, description, options })
    }

    /// Its worker processes.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// At most `limit` games of a split, in order.
    fn list(&self, split: &str, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        let mut tasks = Vec::new();
        while tasks.len() < limit {
            let some = GAMES_PER_REQUEST.min(limit - tasks.len());
            let part = Map::from_iter([
                ("from".to_owned(), Value::from(tasks.len())),
                ("limit".to_owned(), Value::from(some)),
            ]);
            let listed = self.pool.list_part(split, part)?;
            let last = listed.len() < some;
            tasks.extend(listed);
            if last {
                break;
            }
        }
        Ok(tasks)
    }
}

impl Environment for TextWorld {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        let commands = if self.options.admissible { "admissible commands" } else { "any command" };
        let scoring = if self.options.partial { "share of points" } else { "won" };
        format!("{}, {commands}, score: {scoring}", self.description.version)
    }

    fn splits(&self) -> Vec<String> {
        self.description.splits.clone()
    }

    /// Games with their walkthroughs as solutions, in the order of their seeds or names; `seed` changes nothing.
    fn tasks(&self, split: &str, _seed: u64, limit: usize) -> Result<Vec<TaskSpec>, EnvError> {
        if !self.description.splits.iter().any(|s| s == split) {
            return Err(EnvError::Unknown {
                env: NAME.into(),
                what: format!("split `{split}`"),
                known: self.description.splits.join(", "),
            });
        }
        self.list(split, limit)
    }

    fn open(&self) -> Result<Box<dyn Session>, EnvError> {
        Ok(Box::new(self.pool.session()))
    }

    /// The initial state of the given game, else of one of the first split's first games.
    fn playground(&self, near: Option<&TaskSpec>, seed: u64) -> Result<TaskSpec, EnvError> {
        if let Some(near) = near {
            return Ok(bare(near.clone()));
        }
        let split = self.description.splits.first().map(String::as_str).unwrap_or_default();
        let tasks = self.list(split, PLAYGROUNDS)?;
        match draw(seed, "textworld playground", &[]).pick(&tasks) {
            Some(task) => Ok(bare(task.clone())),
            None => Err(EnvError::Unknown { env: NAME.into(), what: split.into(), known: "no game".into() }),
        }
    }

    fn max_sessions(&self) -> Option<usize> {
        // Each is a Python process; a few stay free for exploration and validation.
        Some((self.pool.bounds().max_workers / 4).max(1))
    }

    fn figures(&self) -> Vec<Figure> {
        self.pool.figures()
    }
}
