//! The recipe of `schema/README.md`, followed: a made-up version 2 of `FailureNoted`, through the real macros.
//!
//! The code blocks of the recipe stand in this file word for word, which a test checks.

use super::codec::{self as before, Error};
use super::{Kind, Meta, digest::Digest, frame, samples};

/// Step 1 and 2: the new struct and its upcast.
mod v2 {
    use crate::event::v1::{self, frozen};
    use rkyv::{Archive, Deserialize, Serialize};

    frozen! {
        /// Something failed and was survived (a worker died, an endpoint refused). Not a fact.
        pub struct FailureNoted {
            /// Stage, e.g. `environment`, `explorer`.
            pub stage: String,
            /// What, where, what was done about it.
            pub message: String,
            /// How often it was tried; `None` = not known (version 1).
            pub attempts: Option<u32>,
        }
    }

    impl From<v1::FailureNoted> for FailureNoted {
        fn from(old: v1::FailureNoted) -> FailureNoted {
            FailureNoted { stage: old.stage, message: old.message, attempts: None }
        }
    }
}

/// The program after the change. It knows two kinds: one that changed and one that did not.
#[allow(dead_code, reason = "the macros write more than is asked of them here")]
mod after {
    use super::v2;
    use crate::event::codec::{Error, codec};
    use crate::event::{events, v1};
    use rkyv::rancor;

    pub use v1::*;
    pub use v2::FailureNoted;

    events! {
        StepSkipped = 7, "step_skipped", fact true;
        FailureNoted = 21, "failure_noted", fact false;
    }

    codec! {
        StepSkipped: newest 1, 1 => v1::StepSkipped;
        FailureNoted: newest 2, 1 => v1::FailureNoted, 2 => v2::FailureNoted;
    }

    impl From<Kind> for crate::event::Kind {
        fn from(kind: Kind) -> crate::event::Kind {
            match kind {
                Kind::StepSkipped => crate::event::Kind::StepSkipped,
                Kind::FailureNoted => crate::event::Kind::FailureNoted,
            }
        }
    }
}

const CODE: u16 = Kind::FailureNoted as u16;

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/schema/golden/{name}.bin", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn new_event() -> after::Event {
    v2::FailureNoted { stage: "explorer".into(), message: "refused".into(), attempts: Some(3) }.into()
}

/// A frame as the writer makes it.
fn framed(kind: u16, version: u16, facts: &[u8]) -> Vec<u8> {
    let header = frame::Header {
        kind,
        version,
        flags: 0,
        branch: 0,
        seq: 1,
        prev: Digest::ZERO,
        meta_version: before::META_VERSION,
    };
    let meta = before::encode(&samples::all()[0], &Meta::default()).unwrap().meta;
    let mut out = Vec::new();
    frame::write(&mut out, &header, facts, &meta).unwrap();
    out
}

#[test]
fn bytes_of_version_1_become_version_2_through_the_upcast() {
    let old = golden("021-failure_noted-v1");
    let upcast = after::decode_facts(CODE, 1, &old).unwrap();
    let wanted =
        v2::FailureNoted { stage: "environment".into(), message: "worker 2 died; restarted".into(), attempts: None };
    assert_eq!(upcast, wanted.into());
    assert_eq!(
        after::READABLE,
        [(after::Kind::StepSkipped, 1), (after::Kind::FailureNoted, 1), (after::Kind::FailureNoted, 2)]
    );
}

#[test]
fn version_2_is_what_is_written() {
    let facts = after::facts_bytes(&new_event()).unwrap();
    let version = after::newest_version(after::Kind::FailureNoted);
    assert_eq!(version, 2);
    let bytes = framed(CODE, version, &facts);
    let read = frame::read(&bytes).unwrap();
    assert_eq!((read.header.kind, read.header.version), (CODE, 2));
    assert_eq!(after::decode_facts(CODE, 2, read.facts).unwrap(), new_event());
    // An event that came from version 1 is written as version 2 too.
    let old = after::decode_facts(CODE, 1, &golden("021-failure_noted-v1")).unwrap();
    let again = after::facts_bytes(&old).unwrap();
    assert_eq!(after::decode_facts(CODE, 2, &again).unwrap(), old);
}

#[test]
fn a_program_that_knows_version_1_names_version_2_and_never_misreads_it() {
    let unknown = Error::UnknownVersion { kind: Kind::FailureNoted, version: 2, newest: 1 };
    let facts = after::facts_bytes(&new_event()).unwrap();
    let bytes = framed(CODE, 2, &facts);
    let read = frame::read(&bytes).unwrap();
    assert_eq!(before::decode_facts(read.header.kind, read.header.version, read.facts), Err(unknown.clone()));
    // Not even when the bytes would do: the version decides, before they are looked at.
    assert_eq!(before::decode_facts(CODE, 2, &golden("021-failure_noted-v1")), Err(unknown.clone()));
    assert!(unknown.to_string().contains("failure_noted version 2 is not known here (newest: 1)"), "{unknown}");
    // The program after the change says the same of a version 3, and knows no version 0.
    for version in [0, 3, u16::MAX] {
        let unknown = Error::UnknownVersion { kind: Kind::FailureNoted, version, newest: 2 };
        assert_eq!(after::decode_facts(CODE, version, &facts), Err(unknown));
    }
}

#[test]
fn bytes_of_one_version_under_the_number_of_the_other_show_why_it_stands_outside() {
    // Version 1 bytes are too short for the root of version 2 here, so validation refuses them; that it may also
    // accept such bytes is why nothing but the frame's version may choose the struct.
    let old = golden("021-failure_noted-v1");
    match after::decode_facts(CODE, 2, &old) {
        Err(Error::Malformed { kind: Kind::FailureNoted, version: 2, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_kind_that_did_not_change_keeps_its_bytes() {
    let old = golden("007-step_skipped-v1");
    let event = after::decode_facts(7, 1, &old).unwrap();
    assert_eq!(after::facts_bytes(&event).unwrap(), old);
    assert_eq!(after::newest_version(after::Kind::StepSkipped), 1);
}

/// The lines of a text without their indentation.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|l| !l.is_empty()).collect()
}

#[test]
fn the_recipe_says_what_this_file_does() {
    let readme = include_str!("../../schema/README.md");
    let (_, recipe) = readme.split_once("## Recipe: changing a kind").unwrap();
    let own = lines(include_str!("recipe_tests.rs"));
    let blocks: Vec<Vec<&str>> =
        recipe.split("```rust\n").skip(1).map(|b| lines(b.split("```").next().unwrap())).collect();
    assert_eq!(blocks.len(), 3, "the recipe has other blocks than this test knows");
    for block in blocks {
        assert!(own.windows(block.len()).any(|w| w == block), "not in this file: {block:#?}");
    }
}
