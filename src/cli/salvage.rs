//! `salvage`: what is intact of a damaged run, as a run of its own.

use super::output::{Failure, json, line};
use clap::Args;
use coevolve::log::salvage;
use std::path::PathBuf;

/// Save what is intact.
#[derive(Args, Debug)]
pub struct Salvage {
    /// Damaged run folder; it is left as it is.
    dir: PathBuf,
    /// New run folder.
    out: PathBuf,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Salvage {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if !self.dir.is_dir() {
            return Err(Failure::no_folder(&self.dir));
        }
        let report = salvage(&self.dir, &self.out)?;
        if self.json {
            return json(&report);
        }
        for b in &report.branches {
            match b.why.as_str() {
                "" => line(format!("{}: all {} events", b.name, b.kept))?,
                why => line(format!("{}: events 1..={} of {}; {why}", b.name, b.kept, b.of))?,
            }
        }
        if report.acknowledged > report.events {
            let lost = report.acknowledged - report.events;
            line(format!("{lost} of {} acknowledged events of all branches are lost", report.acknowledged))?;
        }
        line(format!(
            "{} events ({} from the sled copy alone) and {} payload files are in {}; go on with: coevolve resume {}",
            report.events,
            report.from_sled,
            report.blobs,
            self.out.display(),
            self.out.display()
        ))
    }
}
