//! The `coevolve` program.

mod cli;

use clap::Parser;
use std::process::ExitCode;

/// glibc's allocator returns large blocks to the system on every free; page faults then cost candle a third
/// of its time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                cli::note(format!("coevolve: {}", failure.message));
            }
            ExitCode::from(failure.code)
        }
    }
}
