//! Reading a run folder without disturbing it.

use super::output::{Failure, note};
use coevolve::event::digest::FactKey;
use coevolve::event::{Event, RolloutKey};
use coevolve::log::{BranchId, Reader, Stamped};
use coevolve::project::{Lookup, State};
use coevolve::run::state_at;
use std::path::Path;

/// A run opened for reading.
pub struct History {
    /// The log.
    pub reader: Reader,
    /// The branch read.
    pub branch: BranchId,
}

impl History {
    /// Opens a run folder; a running run may be read too.
    pub fn open(dir: &Path, branch: &str) -> Result<History, Failure> {
        if !dir.is_dir() {
            return Err(Failure::no_folder(dir));
        }
        let reader = Reader::open(dir)?;
        if let Err(short) = reader.complete() {
            note(format!("warning: {short}"));
        }
        let branch = reader.branch(branch)?;
        Ok(History { reader, branch })
    }

    /// All durable events.
    pub fn events(
        &self,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<Stamped, coevolve::log::Error>> + use<>, Failure> {
        Ok(self.reader.read(self.branch, from)?)
    }

    /// The state after event `at`, or after the last one.
    pub fn state(&self, at: Option<&str>) -> Result<State, Failure> {
        let at = match at {
            Some(at) => self.position(at)?,
            None => self.reader.head(self.branch)?,
        };
        let state = state_at(&self.reader, self.branch, at)?;
        if state.run.is_none() {
            return Err(Failure::failed("the log holds no run yet"));
        }
        Ok(state)
    }

    /// Sequence number of a rollout.
    pub fn rollout(&self, state: &State, key: RolloutKey) -> Result<Option<u64>, Failure> {
        let Some((first, last)) = state.stretch(key.step) else { return Ok(None) };
        Ok(self.reader.fact(self.branch, first, last, &FactKey::Rollout(key))?.map(|(seq, _)| seq))
    }

    /// Sequence number of an event named by number, or of the end of a step (`step:12`).
    pub fn position(&self, at: &str) -> Result<u64, Failure> {
        // Also events that were undone: they are still there to be looked at.
        let head = self.reader.last(self.branch)?;
        if let Some(step) = at.strip_prefix("step:") {
            let step: u32 = step.parse().map_err(|_| Failure::usage(format!("`{at}`: write step:NUMBER")))?;
            for stamped in self.events(1)? {
                let stamped = stamped?;
                if matches!(&stamped.event, Event::StepFinished(e) if e.step == step) {
                    return Ok(stamped.seq);
                }
            }
            return Err(Failure::usage(format!("step {step} is not finished in this run")));
        }
        match at.parse::<u64>() {
            Ok(seq) if (1..=head).contains(&seq) => Ok(seq),
            _ => Err(Failure::usage(format!("`{at}` names no event: write a number from 1 to {head}, or step:NUMBER"))),
        }
    }
}

impl Lookup for History {
    fn event(&mut self, seq: u64) -> Result<Event, String> {
        self.reader.event(self.branch, seq).map(|s| s.event).map_err(|e| e.to_string())
    }

    fn fact(&mut self, first: u64, last: u64, key: &FactKey) -> Result<Option<(u64, Event)>, String> {
        self.reader.fact(self.branch, first, last, key).map_err(|e| e.to_string())
    }
}
