//! Answers of LLMs as logs hold them: those of the run itself, and those of a recorded run (`evolve.llm_replay`).

use super::{Run, RunError};
use crate::config::Settings;
use crate::event::view::EventRef;
use crate::evolve::asking::{Book, Keep, Recording, Told};
use crate::evolve::client::Usage;
use crate::log::{BranchId, Error as LogError, MAIN, Reader, Swept};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The answers among events `from..=upto` of a branch, by digest of the request; of several the first.
pub(super) fn answers(
    reader: &Reader,
    branch: BranchId,
    from: u64,
    upto: u64,
) -> Result<BTreeMap<String, Told>, LogError> {
    let mut found = BTreeMap::new();
    reader.sweep(branch, from, upto, |Swept { view, .. }| {
        if let EventRef::LlmAsked(e) = view.event()
            && let Some(answer) = e.answer.as_ref()
        {
            let usage = Usage {
                attempts: 0,
                prompt_tokens: e.prompt_tokens.to_native(),
                completion_tokens: e.completion_tokens.to_native(),
                estimated_tokens: e.estimated_tokens.to_native(),
            };
            let kept = Told { answer: answer.as_str().to_owned(), usage };
            found.entry(e.request.as_str().to_owned()).or_insert(kept);
        }
        Ok::<_, LogError>(())
    })?;
    Ok(found)
}

/// The run that `evolve.llm_replay` names, if it names one that is needed.
pub(super) fn recording(settings: &Settings) -> Result<Option<Arc<Recording>>, RunError> {
    let e = &settings.evolve;
    if e.explorer != "llm" && settings.env.judge != "llm" || e.llm_replay.is_empty() {
        return Ok(None);
    }
    let folder = Path::new(&e.llm_replay).to_path_buf();
    let reader = Reader::open(&folder)?;
    let answers = answers(&reader, MAIN, 1, reader.head(MAIN)?)?;
    Ok(Some(Arc::new(Recording { folder, answers })))
}

/// Nothing is recorded and nothing is kept: for an explorer that is only made to see whether it can be.
pub(super) fn no_book() -> Book {
    let keep: Keep = Box::new(|_, _| Err("no run has begun".into()));
    Book { own: BTreeMap::new(), recording: None, purse: Arc::default(), keep }
}

impl Run {
    /// The book of evolution round `round`, which has begun and whose events are folded. A request of another round is
    /// another request: it tells of other contexts.
    pub(super) fn book_of_round(&self, round: u32) -> Result<Book, RunError> {
        self.book(self.ledger.state().places.rounds.get(&round).copied())
    }

    /// The book of whoever judges episodes from here on: those of steps that are finished are not judged again.
    pub(super) fn book_of_steps(&self) -> Result<Book, RunError> {
        let last = self.ledger.state().places.steps.last().map_or(1, |(_, place)| place.last);
        self.book(Some(last))
    }

    fn book(&self, from: Option<u64>) -> Result<Book, RunError> {
        let own = from.map_or_else(|| Ok(BTreeMap::new()), |first| self.ledger.answers(first))?;
        let (recording, purse) = (self.recording.clone(), self.purse.clone());
        Ok(Book { own, recording, purse, keep: self.ledger.scribe() })
    }
}
