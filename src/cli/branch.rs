//! `fork`, `undo`, `branches`, `gc`: standing at an event and going on from there; cleaning up.

use super::history::History;
use super::output::{Failure, json, line, note};
use clap::Args;
use coevolve::event::Meta;
use coevolve::log::{Collect, Log, MAIN, Options, fork_folder};
use coevolve::run::superseded;
use coevolve::world::now_ms;
use serde_json::json;
use std::cmp::Ordering;
use std::path::{Path, PathBuf};

fn meta() -> Meta {
    Meta { time_ms: now_ms(), ..Meta::default() }
}

/// The log of a run that no other process writes. The sled copy catches up at the next resume.
fn open(dir: &Path) -> Result<Log, Failure> {
    if !dir.is_dir() {
        return Err(Failure::no_folder(dir));
    }
    Ok(Log::open(dir, Options { sled: false, ..Options::default() })?)
}

/// Make a branch at an event, in the same folder or as a run folder of its own.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  coevolve fork runs/desk-7 --at step:40 --name hotter\n  coevolve fork runs/desk-7 --at step:40 --run runs/desk-7b && coevolve resume runs/desk-7b"
)]
pub struct Fork {
    /// Run folder. With --run it may train meanwhile.
    dir: PathBuf,
    /// Last event that is shared: its number, or `step:N`.
    #[arg(long)]
    at: String,
    /// Branch to fork.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Name of the new branch.
    #[arg(long, required_unless_present = "run", conflicts_with = "run")]
    name: Option<String>,
    /// New run folder; it shares closed segments, payloads and checkpoints by hard links, and its main goes on from
    /// there.
    #[arg(long)]
    run: Option<PathBuf>,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Fork {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let history = History::open(&self.dir, &self.branch)?;
        let at = history.position(&self.at)?;
        if let Some(out) = &self.run {
            if history.branch != MAIN {
                return Err(Failure::usage("only main becomes a folder of its own; leave out --branch"));
            }
            let reason = format!("forked from {} at event {at}", self.dir.display());
            fork_folder(&self.dir, out, at, &reason, meta())?;
            if self.json {
                return json(&json!({"run": out, "branch": "main", "at": at}));
            }
            return line(format!("{} goes on from event {at}: coevolve resume {}", out.display(), out.display()));
        }
        let name = self.name.unwrap_or_default();
        let log = open(&self.dir)?;
        let id = log.create_branch(&name, history.branch, at, "{}", meta())?;
        if self.json {
            return json(&json!({"run": self.dir, "branch": name, "id": id, "at": at}));
        }
        line(format!("branch {name} shares events up to {at} of {}", self.branch))
    }
}

/// Take a branch back to an event.
#[derive(Args, Debug)]
#[command(
    after_help = "`coevolve log DIR --branch ledger` shows what was undone, forked and removed, and why.\n\nExample:\n  coevolve undo runs/desk-7 --to step:40 && coevolve resume runs/desk-7"
)]
pub struct Undo {
    /// Run folder.
    dir: PathBuf,
    /// Last event that counts: its number, or `step:N`.
    #[arg(long)]
    to: String,
    /// Branch.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Why, for the log.
    #[arg(long, default_value = "")]
    reason: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Undo {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let history = History::open(&self.dir, &self.branch)?;
        let to = history.position(&self.to)?;
        let was = history.reader.head(history.branch)?;
        open(&self.dir)?.undo(history.branch, to, &self.reason, meta())?;
        if self.json {
            return json(&json!({"branch": self.branch, "to": to, "was": was}));
        }
        line(match to.cmp(&was) {
            Ordering::Less => format!(
                "{} goes on from event {to}; what came after is hidden, not gone: `coevolve undo {} --to {was}` brings it back",
                self.branch,
                self.dir.display()
            ),
            Ordering::Equal => format!("{} stands at event {to} already", self.branch),
            Ordering::Greater => format!("{} goes on from event {to}, which was hidden", self.branch),
        })
    }
}

/// List the branches of a run, or delete one.
#[derive(Args, Debug)]
pub struct Branches {
    /// Run folder.
    dir: PathBuf,
    /// Hide a branch; its events stay for the branches forked from it.
    #[arg(long, value_name = "NAME")]
    delete: Option<String>,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Branches {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if let Some(name) = &self.delete {
            let log = open(&self.dir)?;
            log.delete_branch(log.reader().branch(name)?, "", meta())?;
        }
        let reader = History::open(&self.dir, "main")?.reader;
        let mut rows = vec![json!({"id": MAIN, "name": "main", "events": reader.head(MAIN)?})];
        let all = reader.branches();
        for (id, branch) in &all {
            let parent = all.get(&branch.parent).map_or("main", |p| p.name.as_str());
            rows.push(json!({
                "id": id, "name": branch.name, "parent": parent, "at": branch.at, "events": reader.head(*id)?,
            }));
        }
        if self.json {
            return json(&json!({ "branches": rows }));
        }
        for row in rows {
            let fork = row["parent"].as_str().map(|p| format!(", forked from {p} at event {}", row["at"]));
            let name = row["name"].as_str().unwrap_or_default();
            line(format!("{name}: {} events{}", row["events"], fork.unwrap_or_default()))?;
        }
        Ok(())
    }
}

/// Remove what nothing needs.
#[derive(Args, Debug)]
#[command(
    after_help = "Events are never removed. Weights of checkpoints that are removed can be recomputed from the log.\n\nExample:\n  coevolve gc runs/desk-7 --keep 2 --dry-run"
)]
pub struct Gc {
    /// Run folder.
    dir: PathBuf,
    /// Checkpoints to keep of every branch.
    #[arg(long, default_value_t = 3)]
    keep: usize,
    /// Also remove what damage and repairs left in quarantine/.
    #[arg(long)]
    quarantine: bool,
    /// Leave closed segments as they are instead of compressing them.
    #[arg(long)]
    no_compress: bool,
    /// Only say what would be removed.
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Gc {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let log = open(&self.dir)?;
        let also = superseded(&self.dir, self.keep)?;
        let what = Collect { orphans: true, quarantine: self.quarantine, also, dry_run: self.dry_run };
        let removed = log.collect(&what, meta())?;
        let plain = log.reader().plain_segments()?;
        let mut compressed = (0, 0, 0);
        if self.dry_run && !self.no_compress {
            compressed = (plain.0, plain.1, 0);
        }
        if !self.no_compress && !self.dry_run {
            note("compressing closed segments");
            compressed = log.pack()?;
        }
        let bytes: u64 = removed.iter().map(|r| r.bytes).sum();
        let (segments, before, after) = compressed;
        if self.json {
            return json(&json!({
                "removed": removed, "removed_bytes": bytes, "dry_run": self.dry_run,
                "compressed_segments": segments, "bytes_before": before, "bytes_after": after,
            }));
        }
        for file in &removed {
            line(format!("{} ({} bytes): {}", file.path, file.bytes, file.reason))?;
        }
        line(match self.dry_run {
            true => format!("{bytes} bytes would be removed; {segments} segments ({before} bytes) would be compressed"),
            false => format!("{bytes} bytes removed; {segments} segments compressed, {before} to {after} bytes"),
        })
    }
}
