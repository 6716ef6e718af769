//! How a run developed: success, reward, signals and the size of D over its steps.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use coevolve::log::Reader;
use coevolve::project::State;
use coevolve_tools::dynamics::Dynamics;
use coevolve_tools::dynamics_text;

const EXAMPLES: &str = "\
Examples:
  dynamics runs/first                          table of all steps
  dynamics runs/first --plot dynamics.svg      and a plot beside it
  dynamics runs/first --json | tail -1         one JSON document
  dynamics runs/first --csv > dynamics.csv     for a spreadsheet
  dynamics runs/first --branch wide --at 5000  a fork, as it stood at event 5000";

/// Shows how a run developed: held-out success, training reward, signals by kind and |D| by origin, step
/// by step. Reads the run folder without locking it, also while the run is going on.
#[derive(Parser)]
#[command(name = "dynamics", after_help = EXAMPLES)]
struct Args {
    /// Run folder.
    dir: PathBuf,
    /// Branch to read.
    #[arg(long, default_value = "main")]
    branch: String,
    /// Only events up to this sequence number.
    #[arg(long, value_name = "EVENT")]
    at: Option<u64>,
    /// One JSON document on one line instead of the table.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// CSV instead of the table; rates in [0, 1].
    #[arg(long)]
    csv: bool,
    /// Also draw success, signals and D into this SVG file (overwritten).
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{0}")]
    Log(#[from] coevolve::log::Error),
    #[error("{dir} holds no events of branch `{branch}` up to there; is it a run folder?", dir = dir.display())]
    Empty { dir: PathBuf, branch: String },
    #[error("{path} could not be written: {source}", path = path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("the answer could not be printed: {0}")]
    Print(#[from] std::io::Error),
    #[error("the answer could not be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// The state of a branch of a run folder, from its durable events up to `at`.
fn read_state(dir: &Path, branch: &str, at: u64) -> Result<State, coevolve::log::Error> {
    let reader = Reader::open(dir)?;
    let id = reader.branch(branch)?;
    let mut state = State::new();
    reader.sweep(id, 1, at, |swept| {
        state.apply_view(swept.seq, &swept.view, &swept.meta);
        Ok::<_, coevolve::log::Error>(())
    })?;
    Ok(state)
}

fn run(args: &Args) -> Result<(), Fault> {
    let state = read_state(&args.dir, &args.branch, args.at.unwrap_or(u64::MAX))?;
    if state.last_seq.is_none() {
        return Err(Fault::Empty { dir: args.dir.clone(), branch: args.branch.clone() });
    }
    let dynamics = Dynamics::of(&state);
    if let Some(path) = &args.plot {
        std::fs::write(path, dynamics.svg()).map_err(|source| Fault::Write { path: path.clone(), source })?;
        eprintln!("wrote {}", path.display());
    }
    let text = if args.json {
        serde_json::to_string(&dynamics)? + "\n"
    } else if args.csv {
        dynamics_text::csv(&dynamics)
    } else {
        dynamics_text::table(&dynamics)
    };
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // The reader of the pipe has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("dynamics: {fault}");
            ExitCode::FAILURE
        }
    }
}
