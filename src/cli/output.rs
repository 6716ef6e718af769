//! Printing and failing.

use coevolve::config::SettingsError;
use coevolve::env::EnvError;
use coevolve::event::Reward;
use coevolve::evolve::ExploreError;
use coevolve::run::RunError;
use std::fmt::Display;
use std::io::Write;
use std::path::Path;

/// What to print on stderr and which code to exit with.
#[derive(Debug)]
pub struct Failure {
    /// 1 = the run or check failed, 2 = usage or configuration, 0 = the reader of stdout went away.
    pub code: u8,
    /// The message.
    pub message: String,
}

impl Failure {
    /// The run or check failed.
    pub fn failed(message: impl Display) -> Failure {
        Failure { code: 1, message: message.to_string() }
    }

    /// The run folder is not there.
    pub fn no_folder(dir: &Path) -> Failure {
        Failure::usage(format!("{} is no folder; runs lie below runs/ unless --run said otherwise", dir.display()))
    }

    /// The command line or a setting is wrong.
    pub fn usage(message: impl Display) -> Failure {
        Failure { code: 2, message: message.to_string() }
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        match error {
            RunError::Log(e) => e.into(),
            // What a person asked for is not here: another command line or an installation helps.
            RunError::Settings(_) | RunError::Policy { .. } | RunError::NothingToResume { .. } => Failure::usage(error),
            RunError::Environment(EnvError::Unknown { .. } | EnvError::NotInstalled { .. }) => Failure::usage(error),
            RunError::Explore(ExploreError::Unsupported { .. }) => Failure::usage(error),
            other => Failure::failed(other),
        }
    }
}

impl From<SettingsError> for Failure {
    fn from(error: SettingsError) -> Failure {
        Failure::usage(error)
    }
}

impl From<coevolve::log::Error> for Failure {
    fn from(error: coevolve::log::Error) -> Failure {
        use coevolve::log::Error;
        match error {
            Error::Exists { .. }
            | Error::Foreign { .. }
            | Error::Empty { .. }
            | Error::NoBranch { .. }
            | Error::NoEvent { .. }
            | Error::BranchName { .. } => Failure::usage(error),
            other => Failure::failed(other),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::failed(format!("writing JSON: {error}"))
    }
}

/// Writes a line of progress or a warning to stderr. Nobody may be listening any more (a closed pipe, a full disk
/// below a redirection): that is no reason to stop a run.
pub fn note(text: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Writes a line to stdout. A closed pipe ends the program quietly, as `| head` expects.
pub fn line(text: impl Display) -> Result<(), Failure> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure { code: 0, message: String::new() }),
        Err(e) => Err(Failure::failed(format!("writing to stdout: {e}"))),
    }
}

/// Writes a value as one line of JSON.
pub fn json(value: &impl serde::Serialize) -> Result<(), Failure> {
    line(serde_json::to_string(value)?)
}

/// An enum as JSON spells it: the spelling of `--kind`, of the schema and of `--json`.
pub fn word(value: impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

/// A reward in words.
pub fn reward(reward: &Reward) -> String {
    match reward {
        Reward::Scored(score) => format!("score {score:.3}"),
        Reward::Unscored(why) => format!("unscored: {why}"),
    }
}

/// A share in percent with one digit, or a dash.
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_string(), |s| format!("{:.1} %", s * 100.0))
}

/// Left-aligned columns, two spaces apart.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = Vec::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(s, w)| format!("{s:<w$}", w = *w)).collect();
        out.push(cells.join("  ").trim_end().to_string());
    }
    out.join("\n")
}

/// At most `n` characters, with a mark where something was cut.
pub fn cut(text: &str, n: usize) -> String {
    let flat = text.replace('\n', " ");
    if flat.chars().count() <= n {
        flat
    } else {
        format!("{}...", flat.chars().take(n.saturating_sub(3)).collect::<String>())
    }
}
