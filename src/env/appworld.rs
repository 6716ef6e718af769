//! AppWorld: 11 apps with 457 APIs, behind its own server, in code actions.
//!
//! Each session has a Python worker (`tools/workers/appworld_worker.py`, embedded here) that owns one AppWorld server
//! process, out of a private environment that `tools/setup-appworld.sh` makes under `.coevolve/appworld`. An action is one
//! call `python(code)`: with `policy.calls = python` the first fenced block of a message.
//!
//! Splits are the files of `data/datasets`: `train`, `dev`, `test_normal`, `test_challenge` of the official data when the
//! user has it (`env.data` names another folder that holds `data`), and `made`, nine tasks of our own that the set-up
//! makes. A task's family is its scenario: the success of a split is AppWorld's task goal completion (TGC), and the share
//! of families whose tasks all succeed its scenario goal completion (SGC). Official solutions never leave their folder.
//!
//! A synthesised task (an official state with another instruction) has no evaluation: it is unscored here, and a judge has
//! to score it.

use std::path::Path;

use super::EnvError;
use super::stdio::{Bounds, Launch, REPLY_BYTES, StdioEnv};

/// The worker program, so that the binary needs no source tree.
const WORKER: &str =
    concat!(include_str!("../../tools/workers/protocol.py"), include_str!("../../tools/workers/appworld_worker.py"));
const NAME: &str = "appworld";
/// Of a session's first `reset`, which starts a server (6 to 8 s when nothing else runs).
const RESET_MS: u64 = 120_000;

/// Sessions open at once unless told: each takes 400 MB and some CPU seconds to start.
pub const SESSIONS: usize = 8;

/// Opens the installation in `folder` (usually `.coevolve/appworld`) with the tasks in `data` (a folder that holds `data`;
/// the installation's own when `None`). `partial` scores by the share of checks passed.
///
/// # Errors
/// [`EnvError::NotInstalled`] says how to install it; [`EnvError::Unknown`] that `data` holds none.
pub fn open(folder: &Path, data: Option<&Path>, partial: bool, bounds: Bounds) -> Result<StdioEnv, EnvError> {
    let python = folder.join("bin").join("python");
    if !folder.join("ready").is_file() || !python.is_file() {
        return Err(EnvError::NotInstalled {
            env: NAME.into(),
            what: format!("AppWorld is not installed in {}", folder.display()),
            remedy:
                "Run tools/setup-appworld.sh in the project (about a minute and 300 MB), or set COEVOLVE_HOME to the \
                     .coevolve folder where it is, then try again"
                    .into(),
        });
    }
    let own = folder.join("root");
    let root = data.unwrap_or(&own);
    if !root.join("data").join("datasets").is_dir() {
        return Err(EnvError::Unknown {
            env: NAME.into(),
            what: format!("the task data in {}", root.display()),
            known: "a folder with `data/datasets` and `data/tasks`, as `appworld download data` makes it".into(),
        });
    }
    let mut args: Vec<_> = ["-I", "-c", WORKER, "--root"].map(Into::into).to_vec();
    args.push(std::path::absolute(root).unwrap_or_else(|_| root.to_path_buf()).into_os_string());
    if partial {
        args.push("--partial".into());
    }
    let launch = Launch { env: NAME.into(), program: python, args, vars: Vec::new(), reply_bytes: REPLY_BYTES };
    StdioEnv::open(launch, Bounds { reset_ms: RESET_MS.max(bounds.reset_ms), ..bounds })
}
