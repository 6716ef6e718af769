//! Event <-> (kind, version, facts bytes, meta bytes).
//!
//! One arm per (kind, version); reading is always checked (`bytecheck`), so arbitrary bytes give an error
//! and never a panic or a misread. A new version of a kind adds an arm that reads the old frozen struct and
//! turns it into the newest one with `From` (`schema/README.md` has the recipe).

use super::view::View;
use super::{Event, Kind, Meta, v1, v2};
use rkyv::rancor;

/// Version of [`Meta`] that is written.
pub const META_VERSION: u16 = 1;

// sled values and frames inside records are not aligned: archived integers must be readable anywhere.
const _: () = assert!(std::mem::align_of::<rkyv::Archived<u64>>() == 1);
const _: () = assert!(std::mem::align_of::<rkyv::Archived<v2::RolloutFinished>>() == 1);

/// Why bytes are not an event, or an event cannot become bytes.
#[derive(thiserror::Error, Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A code that this program does not know.
    #[error("unknown event kind {code} (version {version}): the log was written by a newer coevolve; use that one")]
    UnknownKind {
        /// The frame's kind.
        code: u16,
        /// The frame's kind version.
        version: u16,
    },
    /// A version of a known kind that this program does not know.
    #[error("{} version {version} is not known here (newest: {newest}): use the coevolve that wrote the log", .kind.name())]
    UnknownVersion {
        /// The kind.
        kind: Kind,
        /// The frame's version.
        version: u16,
        /// The newest version this program reads.
        newest: u16,
    },
    /// A version of [`Meta`] that this program does not know.
    #[error("meta version {version} is not known here (newest: {META_VERSION}): use the coevolve that wrote the log")]
    UnknownMeta {
        /// The frame's meta version.
        version: u16,
    },
    /// The bytes are not a valid archive of this kind.
    #[error("{} version {version}: bytes are not a valid payload: {why}", .kind.name())]
    Malformed {
        /// The kind.
        kind: Kind,
        /// The version.
        version: u16,
        /// What the validation said.
        why: String,
    },
    /// The meta bytes are not a valid archive.
    #[error("meta version {version}: bytes are not valid: {why}")]
    MalformedMeta {
        /// The version.
        version: u16,
        /// What the validation said.
        why: String,
    },
    /// Serialisation failed.
    #[error("{} cannot be serialised: {why}", .kind.name())]
    Encode {
        /// The kind.
        kind: Kind,
        /// What the serialiser said.
        why: String,
    },
}

/// An event as bytes, ready for a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Kind.
    pub kind: Kind,
    /// Version of the frozen struct.
    pub version: u16,
    /// Archived frozen struct.
    pub facts: Vec<u8>,
    /// Archived [`Meta`].
    pub meta: Vec<u8>,
}

// `kind.into()`: the test of the recipe has a catalogue, and so a `Kind`, of its own.
macro_rules! codec {
    ($($kind:ident: newest $newest:literal, $($version:literal => $frozen:ty),+;)*) => {
        /// The version that is written for a kind.
        pub fn newest_version(kind: Kind) -> u16 {
            match kind { $(Kind::$kind => $newest,)* }
        }

        /// Every (kind, version) that can be read, in order.
        pub const READABLE: &[(Kind, u16)] = &[$($((Kind::$kind, $version)),+),*];

        /// The archived facts of an event: the newest frozen struct of its kind.
        ///
        /// # Errors
        /// [`Error::Encode`] when a part is beyond what 32-bit relative pointers reach (2 GiB).
        pub fn facts_bytes(event: &Event) -> Result<Vec<u8>, Error> {
            match event {
                $(Event::$kind(e) => rkyv::api::high::to_bytes_in::<Vec<u8>, rancor::Error>(e, Vec::new())
                    .map_err(|e| Error::Encode { kind: Kind::$kind.into(), why: e.to_string() }),)*
            }
        }

        /// Reads the facts of one event.
        ///
        /// # Errors
        /// A named error for an unknown kind or version and for bytes that are no valid archive.
        pub fn decode_facts(code: u16, version: u16, facts: &[u8]) -> Result<Event, Error> {
            let kind = Kind::from_code(code).ok_or(Error::UnknownKind { code, version })?;
            match (kind, version) {
                $($((Kind::$kind, $version) => {
                    let old = rkyv::from_bytes::<$frozen, rancor::Error>(facts)
                        .map_err(|e| Error::Malformed { kind: kind.into(), version, why: e.to_string() })?;
                    // The upcast: the identity for the newest version.
                    Ok(Event::$kind(old.into()))
                })+)*
                _ => Err(Error::UnknownVersion { kind: kind.into(), version, newest: newest_version(kind) }),
            }
        }
    };
}

#[cfg(test)]
pub(super) use codec;

codec! {
    RunStarted: newest 1, 1 => v1::RunStarted;
    TaskAdmitted: newest 1, 1 => v1::TaskAdmitted;
    BatchPlanned: newest 2, 1 => v1::BatchPlanned, 2 => v2::BatchPlanned;
    RolloutFinished: newest 2, 1 => v1::RolloutFinished, 2 => v2::RolloutFinished;
    SignalRaised: newest 1, 1 => v1::SignalRaised;
    GradientStepTaken: newest 1, 1 => v1::GradientStepTaken;
    StepSkipped: newest 1, 1 => v1::StepSkipped;
    PolicyPublished: newest 1, 1 => v1::PolicyPublished;
    CheckpointSaved: newest 1, 1 => v1::CheckpointSaved;
    EvaluationFinished: newest 1, 1 => v1::EvaluationFinished;
    EvolutionStarted: newest 1, 1 => v1::EvolutionStarted;
    ReflectionWritten: newest 1, 1 => v1::ReflectionWritten;
    ExplorationStepTaken: newest 1, 1 => v1::ExplorationStepTaken;
    DraftProposed: newest 1, 1 => v1::DraftProposed;
    DraftValidated: newest 1, 1 => v1::DraftValidated;
    DraftRejected: newest 1, 1 => v1::DraftRejected;
    EvolutionFinished: newest 1, 1 => v1::EvolutionFinished;
    StepFinished: newest 1, 1 => v1::StepFinished;
    RunFinished: newest 1, 1 => v1::RunFinished;
    RunResumed: newest 1, 1 => v1::RunResumed;
    FailureNoted: newest 1, 1 => v1::FailureNoted;
    BranchCreated: newest 1, 1 => v1::BranchCreated;
    BranchUndone: newest 1, 1 => v1::BranchUndone;
    BranchDeleted: newest 1, 1 => v1::BranchDeleted;
    GarbageCollected: newest 1, 1 => v1::GarbageCollected;
    BatchRefilled: newest 1, 1 => v1::BatchRefilled;
    LlmAsked: newest 1, 1 => v1::LlmAsked;
}

/// Serialises an event and its meta in the newest versions.
///
/// # Errors
/// See [`facts_bytes`].
pub fn encode(event: &Event, meta: &Meta) -> Result<Encoded, Error> {
    let kind = event.kind();
    let facts = facts_bytes(event)?;
    let meta = rkyv::api::high::to_bytes_in::<Vec<u8>, rancor::Error>(meta, Vec::new())
        .map_err(|e| Error::Encode { kind, why: e.to_string() })?;
    Ok(Encoded { kind, version: newest_version(kind), facts, meta })
}

/// The facts of one event where they lie. Those of an older version are brought to the newest one in `scratch`.
///
/// # Errors
/// As [`decode_facts`].
pub fn view<'a>(code: u16, version: u16, facts: &'a [u8], scratch: &'a mut Vec<u8>) -> Result<View<'a>, Error> {
    let kind = Kind::from_code(code).ok_or(Error::UnknownKind { code, version })?;
    let newest = if version == newest_version(kind) {
        facts
    } else {
        *scratch = facts_bytes(&decode_facts(code, version, facts)?)?;
        scratch
    };
    let view = View::access(kind, newest).map_err(|why| Error::Malformed { kind, version, why })?;
    Ok(view.of_stored(facts))
}

/// Reads the meta section.
///
/// # Errors
/// A named error for an unknown version and for bytes that are no valid archive.
pub fn decode_meta(version: u16, meta: &[u8]) -> Result<Meta, Error> {
    if version != META_VERSION {
        return Err(Error::UnknownMeta { version });
    }
    rkyv::from_bytes::<Meta, rancor::Error>(meta).map_err(|e| Error::MalformedMeta { version, why: e.to_string() })
}
