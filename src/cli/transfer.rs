//! `export` and `import`: a run as one stream.

use super::output::{Failure, json, note};
use clap::Args;
use coevolve::log::{Streamed, export, import};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::io::{BufReader, BufWriter, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

/// Write a run's log.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  coevolve export runs/desk-7 desk-7.cvx\n  coevolve export runs/desk-7 - | ssh host coevolve import - runs/desk-7"
)]
pub struct Export {
    /// Run folder; it may train meanwhile.
    dir: PathBuf,
    /// File to write, which must not exist; `-` is stdout.
    file: PathBuf,
    /// Print one JSON line (on stderr when the stream goes to stdout).
    #[arg(long)]
    json: bool,
}

/// Read a run's log.
#[derive(Args, Debug)]
pub struct Import {
    /// File that `export` wrote; `-` is stdin.
    file: PathBuf,
    /// Run folder to make.
    dir: PathBuf,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

fn bar(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} events, {eta} to go");
    let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.with_prefix(what)
}

fn words(done: &Streamed, path: &Path) -> String {
    format!("{} events and {} payload files, {} bytes: {}", done.events, done.blobs, done.bytes, path.display())
}

fn failed(action: &str, path: &Path, e: &std::io::Error) -> Failure {
    Failure::usage(format!("cannot {action} {}: {e}", path.display()))
}

impl Export {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if !self.dir.is_dir() {
            return Err(Failure::no_folder(&self.dir));
        }
        let to_stdout = self.file.as_os_str() == "-";
        let bar = bar("export");
        let mut progress = |done: u64, of: u64| {
            bar.set_length(of);
            bar.set_position(done);
        };
        let done = if to_stdout {
            if std::io::stdout().is_terminal() {
                return Err(Failure::usage("a run is no text for a terminal; name a file, or pipe it somewhere"));
            }
            export(&self.dir, &mut std::io::stdout().lock(), &mut progress)?
        } else {
            let file = File::create_new(&self.file).map_err(|e| failed("create", &self.file, &e))?;
            let mut out = BufWriter::with_capacity(1 << 20, file);
            let written = export(&self.dir, &mut out, &mut progress).map_err(Failure::from).and_then(|done| {
                out.flush().and_then(|()| out.get_ref().sync_all()).map_err(|e| failed("write", &self.file, &e))?;
                Ok(done)
            });
            if written.is_err() {
                // Half an export is of no use to anyone.
                let _ = std::fs::remove_file(&self.file);
            }
            written?
        };
        bar.finish_and_clear();
        match (self.json, to_stdout) {
            (true, false) => json(&done)?,
            (true, true) => note(serde_json::to_string(&done)?),
            (false, _) => note(words(&done, &self.file)),
        }
        Ok(())
    }
}

impl Import {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let mut input: Box<dyn Read> = if self.file.as_os_str() == "-" {
            Box::new(std::io::stdin().lock())
        } else {
            let file = File::open(&self.file).map_err(|e| failed("open", &self.file, &e))?;
            Box::new(BufReader::with_capacity(1 << 20, file))
        };
        let bar = bar("import");
        let done = import(&mut input, &self.dir, &mut |done| bar.set_position(done))?;
        bar.finish_and_clear();
        if self.json {
            return json(&done);
        }
        note(words(&done, &self.dir));
        Ok(())
    }
}
