//! The command line: one file per command. Arguments become settings, settings go to the library, what
//! comes back is printed. `--json` puts one JSON document on the last line of stdout; progress goes to stderr.

mod audit;
mod bars;
mod branch;
mod check;
mod eval;
mod history;
mod log;
mod output;
mod replay;
mod salvage;
mod settings;
mod show;
mod tasks;
mod train;
mod transfer;
mod verify;

use clap::{Parser, Subcommand};
pub use output::{Failure, note};

/// Trains tool-using LLM agents whose training data evolves with them, with every event in a log.
#[derive(Parser, Debug)]
#[command(
    name = "coevolve",
    version,
    max_term_width = 110,
    after_help = "Exit codes: 0 ok, 1 the run or check failed, 2 usage or configuration.\n\nExamples:\n  coevolve train\n  coevolve train --set evolve.mode=random --set run.seed=3 --run runs/random-3\n  coevolve resume runs/desk-7\n  coevolve audit runs/desk-7 syn-0123456789ab"
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Start a run.
    Train(train::Train),
    /// Take up a run that was stopped or killed; of a finished run, print the summary.
    Resume(train::Resume),
    /// Evaluate a policy on a split: of a run, or a named agent on an environment.
    Eval(eval::Eval),
    /// Fold the whole log again and compare every recorded digest.
    Replay(replay::Replay),
    /// List the events of a run.
    Log(log::Log),
    /// Show one event, rollout or task in full.
    Show(show::Show),
    /// List the training set D, at any event.
    Tasks(tasks::Tasks),
    /// Where a task came from and what trained on it.
    Audit(audit::Audit),
    /// Check every checksum, digest and reference of a run; repair what has a second copy.
    Verify(verify::Verify),
    /// Copy what is intact of a damaged run to a new one, and say what was lost.
    Salvage(salvage::Salvage),
    /// Write a run's events and payloads as one checksummed stream.
    Export(transfer::Export),
    /// Make a run folder of an exported stream.
    Import(transfer::Import),
    /// Make a branch at an event, in the same folder or as a run folder of its own.
    Fork(branch::Fork),
    /// Take a branch back to an event; what came after is hidden, not gone.
    Undo(branch::Undo),
    /// List the branches of a run, or delete one.
    Branches(branch::Branches),
    /// Remove what nothing needs (old checkpoints, files without an event) and compress closed segments.
    Gc(branch::Gc),
    /// Feed JSON cases to the code that training runs: loss, signals, tool-calls, template.
    Check(check::Check),
    /// Print every setting with its default, unit and meaning, as a TOML file.
    Settings(settings::PrintSettings),
    /// Print shell completions.
    Completions(settings::Completions),
}

/// Runs a command.
///
/// # Errors
/// What to print and which code to exit with.
pub fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Train(c) => c.run(),
        Command::Resume(c) => c.run(),
        Command::Eval(c) => c.run(),
        Command::Replay(c) => c.run(),
        Command::Log(c) => c.run(),
        Command::Show(c) => c.run(),
        Command::Tasks(c) => c.run(),
        Command::Audit(c) => c.run(),
        Command::Verify(c) => c.run(),
        Command::Salvage(c) => c.run(),
        Command::Export(c) => c.run(),
        Command::Import(c) => c.run(),
        Command::Fork(c) => c.run(),
        Command::Undo(c) => c.run(),
        Command::Branches(c) => c.run(),
        Command::Gc(c) => c.run(),
        Command::Check(c) => c.run(),
        Command::Settings(c) => c.run(),
        Command::Completions(c) => c.run(),
    }
}
