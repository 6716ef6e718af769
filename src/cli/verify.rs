//! `verify`: checksums, chain, references.

use super::output::{Failure, json, line};
use clap::Args;
use coevolve::run::{repair, verify};
use std::path::PathBuf;

/// Check a run folder.
#[derive(Args, Debug)]
pub struct Verify {
    /// Run folder.
    dir: PathBuf,
    /// Restore what has a second copy: journal records from sled, sled from the journal.
    #[arg(long)]
    repair: bool,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

impl Verify {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if !self.dir.is_dir() {
            return Err(Failure::no_folder(&self.dir));
        }
        if self.repair {
            let repaired = repair(&self.dir)?;
            if !self.json {
                for note in &repaired.notes {
                    line(note)?;
                }
                line(format!("{} events restored from the sled copy", repaired.restored_events))?;
            }
        }
        let report = verify(&self.dir)?;
        if self.json {
            json(&report)?;
        } else {
            for f in &report.findings {
                let at = f.offset.map_or(String::new(), |o| format!(" at byte {o}"));
                let event = f.event.map_or(String::new(), |(b, s)| format!(" (event {s} of branch {b})"));
                line(format!("{}{at}{event}: {}; {}", f.path.display(), f.what, f.remedy))?;
            }
            line(format!(
                "{} events in {} records, {} segments, {} blobs; {}; {} findings\n{} bytes of events take {} in the journal \
                 and {} in sled: {:.2}x{}",
                report.events,
                report.records,
                report.segments,
                report.blobs,
                report.sled,
                report.findings.len(),
                report.space.frames,
                report.space.journal,
                report.space.sled,
                report.space.factor,
                if report.facts_digest.is_empty() {
                    String::new()
                } else {
                    format!("\nfacts digest {}", report.facts_digest)
                }
            ))?;
        }
        if report.is_ok() { Ok(()) } else { Err(Failure::failed("the run is damaged; see above")) }
    }
}
