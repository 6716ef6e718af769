//! What can go wrong with a log: what, where, what to do.

use super::BranchId;
use crate::event::{codec, digest::Digest, frame};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Result of log operations.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the event store. Cloneable: one failed flush answers every waiting ticket.
#[derive(thiserror::Error, Debug, Clone)]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Its answer.
        source: Arc<std::io::Error>,
    },
    /// Another process writes this run.
    #[error("{} is being written by {holder}; wait for it or stop it (reading needs no lock)", .dir.display())]
    Locked {
        /// The run folder.
        dir: PathBuf,
        /// pid, host and start of the holder.
        holder: String,
    },
    /// `create` on a folder that holds a run.
    #[error("{} already holds a run; resume it or choose another folder", .dir.display())]
    Exists {
        /// The run folder.
        dir: PathBuf,
    },
    /// `create` in a folder of something else.
    #[error("{} is not empty and no run folder: it holds {name:?}; choose another folder", .dir.display())]
    Foreign {
        /// The folder.
        dir: PathBuf,
        /// An entry that no run has.
        name: String,
    },
    /// Both copies are gone.
    #[error(
        "{} held {events} events, and both its journal and its sled copy are gone; restore them from a backup of the folder",
        .dir.display()
    )]
    Gone {
        /// The run folder.
        dir: PathBuf,
        /// Acknowledged events of all branches, by HEAD.
        events: u64,
    },
    /// Less is there than was acknowledged.
    #[error("{}: {there} of {events} acknowledged events are readable; run `coevolve verify --repair`", .dir.display())]
    Short {
        /// The run folder.
        dir: PathBuf,
        /// Readable events of all branches.
        there: u64,
        /// Acknowledged ones, by HEAD.
        events: u64,
    },
    /// No event was ever made durable here.
    #[error("{} holds no event: not a run folder, or killed before its first event; start it afresh", .dir.display())]
    Empty {
        /// The run folder.
        dir: PathBuf,
    },
    /// Bytes that were durable are not what they should be.
    #[error("{} is damaged at byte {offset}: {what}; run `coevolve verify --repair`", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in it, bytes from its start.
        offset: u64,
        /// What was found.
        what: String,
    },
    /// The bytes are intact but this program cannot read them.
    #[error("event {branch}:{seq}: {source}")]
    Codec {
        /// Branch.
        branch: BranchId,
        /// Sequence number.
        seq: u64,
        /// Why.
        source: codec::Error,
    },
    /// The event cannot be stored.
    #[error("event cannot be stored: {0}")]
    Encode(#[from] codec::Error),
    /// The event does not fit a frame.
    #[error("event cannot be framed: {0}")]
    Frame(#[from] frame::Error),
    /// A flush failed earlier: nothing more is acknowledged.
    #[error(
        "the log stopped accepting events: {reason}; everything acknowledged before is safe; free space or fix the disk, then resume"
    )]
    Failed {
        /// The first failure.
        reason: String,
    },
    /// The log was closed, or its committing thread ended.
    #[error("the log is closed")]
    Closed,
    /// A branch fact that came as a plain event: one that does not fit would stand in the journal for ever.
    #[error("facts about branches are written by creating, undoing and deleting them, not as events")]
    BranchFact,
    /// No such branch.
    #[error("no branch {branch} here")]
    NoBranch {
        /// Number or name asked for.
        branch: String,
    },
    /// No such event.
    #[error("branch {branch} has no event {seq} (its last is {head})")]
    NoEvent {
        /// Branch.
        branch: BranchId,
        /// Sequence number asked for.
        seq: u64,
        /// Last sequence number.
        head: u64,
    },
    /// A branch of that name exists, or the name is not usable.
    #[error("branch name {name:?}: {why}")]
    BranchName {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A payload file is missing or is not what its name says.
    #[error("payload {digest} of event {branch}:{seq} at {}: {what}; restore the file from a copy of the run", .path.display())]
    Blob {
        /// BLAKE3 of the payload.
        digest: Digest,
        /// Branch of the event that refers to it.
        branch: BranchId,
        /// Sequence number of that event.
        seq: u64,
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// The sled copy could not be used.
    #[error("sled copy {}: {what}; it is rebuilt from the journal when the run is next opened for writing", .path.display())]
    Sled {
        /// The sled folder.
        path: PathBuf,
        /// What happened.
        what: String,
    },
    /// An exported run is not as it was written.
    #[error("byte {offset} of the stream: {what}; export it again, nothing was imported")]
    Stream {
        /// Where in the stream, bytes.
        offset: u64,
        /// What was found.
        what: String,
    },
    /// Both copies are valid and differ, or neither has the bytes.
    #[error("{} cannot be repaired: {what}; `coevolve salvage` copies what is intact", .path.display())]
    Unrepairable {
        /// The file.
        path: PathBuf,
        /// Why.
        what: String,
    },
}

impl Error {
    /// Closure for `map_err` on I/O results.
    pub(crate) fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Error + 'a {
        move |source| Error::Io { action, path: path.to_path_buf(), source: Arc::new(source) }
    }

    /// Why a folder without segments and without a sled copy cannot be read.
    pub(crate) fn nothing_in(dir: &Path) -> Error {
        match super::head::read(dir) {
            Ok(Some(mark)) if mark.next_record > 1 => Error::Gone { dir: dir.to_path_buf(), events: mark.events },
            _ => Error::Empty { dir: dir.to_path_buf() },
        }
    }

    /// Damage in a file.
    pub(crate) fn corrupt(path: &Path, offset: u64, what: impl Into<String>) -> Error {
        Error::Corrupt { path: path.to_path_buf(), offset, what: what.into() }
    }
}
