//! Codec, frame and digest tests.

use super::codec::{self, Error};
use super::digest::{Digest, FactKey, FactsDigest, fact_key};
use super::*;
use proptest::prelude::*;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schema/golden");

fn round_trip(event: &Event) -> Event {
    let e = codec::encode(event, &Meta::default()).unwrap();
    codec::decode_facts(e.kind as u16, e.version, &e.facts).unwrap()
}

#[test]
fn samples_cover_every_kind_and_round_trip() {
    let kinds: Vec<Kind> = samples::all().iter().map(Event::kind).collect();
    assert_eq!(kinds, Kind::ALL);
    for event in samples::all() {
        assert_eq!(round_trip(&event), event);
    }
    let e = codec::encode(&samples::all()[0], &samples::meta()).unwrap();
    assert_eq!(codec::decode_meta(codec::META_VERSION, &e.meta).unwrap(), samples::meta());
}

/// Files of the golden samples: facts bytes, and the values they stand for.
fn golden_files(kind: Kind, version: u16) -> (String, String) {
    let stem = format!("{GOLDEN}/{:03}-{}-v{version}", kind as u16, kind.name());
    (format!("{stem}.bin"), format!("{stem}.json"))
}

/// Run once for a new kind or version: `COEVOLVE_WRITE_GOLDEN=1 cargo test --release --lib golden -- --ignored`.
/// Existing files are never overwritten.
#[test]
#[ignore = "writes files; see schema/README.md"]
fn golden_write() {
    if std::env::var_os("COEVOLVE_WRITE_GOLDEN").is_none() {
        return;
    }
    for event in samples::all() {
        let (bin, json) = golden_files(event.kind(), codec::newest_version(event.kind()));
        if !std::path::Path::new(&bin).exists() {
            std::fs::write(bin, codec::facts_bytes(&event).unwrap()).unwrap();
            std::fs::write(json, serde_json::to_string_pretty(&event).unwrap() + "\n").unwrap();
        }
    }
    let meta = format!("{GOLDEN}/000-meta-v{}", codec::META_VERSION);
    if !std::path::Path::new(&format!("{meta}.bin")).exists() {
        let bytes = codec::encode(&samples::all()[0], &samples::meta()).unwrap().meta;
        std::fs::write(format!("{meta}.bin"), bytes).unwrap();
        std::fs::write(format!("{meta}.json"), serde_json::to_string_pretty(&samples::meta()).unwrap() + "\n").unwrap();
    }
}

/// Old bytes give exact values, and today's values give the same bytes.
#[test]
fn golden_bytes_are_read_back_to_their_values() {
    for &(kind, version) in codec::READABLE {
        let (bin, json) = golden_files(kind, version);
        let bytes = std::fs::read(&bin).unwrap_or_else(|e| panic!("{bin}: {e}"));
        let read = codec::decode_facts(kind as u16, version, &bytes).unwrap();
        if version == codec::newest_version(kind) {
            let expected: Event = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
            assert_eq!(read, expected, "{kind:?}");
            let sample = samples::all().into_iter().find(|e| e.kind() == kind).unwrap();
            assert_eq!(read, sample, "{kind:?}: the sample and the golden values differ");
            assert_eq!(codec::facts_bytes(&sample).unwrap(), bytes, "{kind:?}: the bytes written have changed");
        } else {
            assert_eq!(read, samples::upcast(kind, version), "{kind:?} version {version}");
        }
    }
    let bytes = std::fs::read(format!("{GOLDEN}/000-meta-v1.bin")).unwrap();
    assert_eq!(codec::decode_meta(1, &bytes).unwrap(), samples::meta());
}

#[test]
fn a_fact_keeps_its_digest_when_its_kind_gets_a_newer_version() {
    use super::digest::{content_hash, fact_hash};
    let blake = |kind: Kind, facts: &[u8]| {
        let mut bytes = (kind as u16).to_le_bytes().to_vec();
        bytes.extend(facts);
        Digest(*blake3::hash(&bytes).as_bytes())
    };
    let mut older = 0;
    for &(kind, version) in codec::READABLE.iter().filter(|(k, _)| k.is_fact() && *k != Kind::RunStarted) {
        let stored = std::fs::read(golden_files(kind, version).0).unwrap();
        let mut scratch = Vec::new();
        let view = codec::view(kind as u16, version, &stored, &mut scratch).unwrap();
        assert_eq!(fact_hash(&view).unwrap(), blake(kind, &stored), "{kind:?} version {version}");
        let newest = codec::facts_bytes(&view.native()).unwrap();
        assert_eq!(content_hash(&view).unwrap(), blake(kind, &newest), "{kind:?} version {version}");
        older += usize::from(stored != newest);
    }
    assert!(older >= 2, "no older version is among the golden bytes");
}

#[test]
fn golden_folder_holds_nothing_else() {
    let expected: std::collections::BTreeSet<String> = codec::READABLE
        .iter()
        .flat_map(|&(kind, version)| {
            let (bin, json) = golden_files(kind, version);
            [bin, json]
        })
        .chain([format!("{GOLDEN}/000-meta-v1.bin"), format!("{GOLDEN}/000-meta-v1.json")])
        // A whole run: tests/golden.rs.
        .chain([format!("{GOLDEN}/run")])
        .collect();
    let found = std::fs::read_dir(GOLDEN)
        .unwrap()
        .map(|f| f.unwrap().path().to_str().unwrap().to_string())
        .collect::<std::collections::BTreeSet<_>>();
    assert_eq!(found, expected);
}

#[test]
fn unknown_kinds_and_versions_are_named() {
    assert_eq!(codec::decode_facts(999, 1, &[]), Err(Error::UnknownKind { code: 999, version: 1 }));
    let newer = codec::decode_facts(18, 7, &[]).unwrap_err();
    assert_eq!(newer, Error::UnknownVersion { kind: Kind::StepFinished, version: 7, newest: 1 });
    assert!(newer.to_string().contains("step_finished version 7"), "{newer}");
    assert_eq!(codec::decode_meta(9, &[]), Err(Error::UnknownMeta { version: 9 }));
    assert!(matches!(codec::decode_facts(18, 1, &[1, 2, 3]), Err(Error::Malformed { kind: Kind::StepFinished, .. })));
}

#[test]
fn schema_mentions_every_kind_and_field() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/schema/events.md")).unwrap();
    // Sections by heading; a field must stand in the section of its own kind.
    let sections: std::collections::BTreeMap<&str, &str> = text
        .split("\n## ")
        .skip(1)
        .map(|s| {
            let name = s.split_whitespace().next().unwrap_or("");
            (name.trim_matches('`'), s)
        })
        .collect();
    let source = include_str!("v1.rs");
    let mut current: Option<String> = None;
    let mut fields = 0;
    for line in source.lines() {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("pub struct ") {
            current = rest.split_whitespace().next().map(str::to_string);
        } else if let (Some(owner), Some(rest)) = (&current, line.strip_prefix("pub ")) {
            let Some((field, _)) = rest.split_once(": ") else { continue };
            let section = sections.get(owner.as_str()).unwrap_or_else(|| panic!("schema/events.md has no `{owner}`"));
            assert!(section.contains(&format!("`{field}`")), "schema/events.md: `{owner}` does not mention `{field}`");
            fields += 1;
        }
    }
    assert!(fields > 120, "only {fields} fields found: the scan is broken");
    for kind in Kind::ALL {
        assert!(text.contains(&format!("code {}, `{}`", *kind as u16, kind.name())), "{kind:?}");
    }
}

#[test]
fn frame_has_the_documented_layout() {
    let mut out = vec![9, 9];
    let header = frame::Header {
        kind: 0x0102,
        version: 3,
        flags: 0,
        branch: 7,
        seq: 0x1122_3344_5566_7788,
        prev: Digest([5; 32]),
        meta_version: 1,
    };
    frame::write(&mut out, &header, b"facts", b"me").unwrap();
    let frame_bytes = &out[2..];
    let mut by_hand = Vec::new();
    by_hand.extend_from_slice(b"CVEF\x01\x00\x02\x01\x03\x00\x00\x00\x07\x00\x00\x00");
    by_hand.extend_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 5, 0, 0, 0, 2, 0, 0, 0]);
    by_hand.extend_from_slice(&[5; 32]);
    by_hand.extend_from_slice(&[1, 0, 0, 0]);
    let mut covered = by_hand.clone();
    covered.extend_from_slice(b"factsme");
    // crc32c bit by bit (reflected polynomial 0x82f63b78).
    let mut crc = !0u32;
    for byte in &covered {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    by_hand.extend_from_slice(&(!crc).to_le_bytes());
    by_hand.extend_from_slice(b"factsme");
    assert_eq!(frame_bytes, by_hand);
    let read = frame::read(frame_bytes).unwrap();
    assert_eq!((read.header, read.facts, read.meta), (header, &b"facts"[..], &b"me"[..]));
    for bit in 0..frame_bytes.len() * 8 {
        let mut bad = frame_bytes.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(frame::read(&bad).is_err(), "bit {bit}");
    }
    for len in 0..frame_bytes.len() {
        assert!(frame::read(&frame_bytes[..len]).is_err(), "length {len}");
    }
}

#[test]
fn fact_keys_are_exactly_those_of_facts_and_unique() {
    let mut seen = std::collections::BTreeSet::new();
    for event in samples::all() {
        let key = fact_key(&event);
        assert_eq!(key.is_some(), event.kind().is_fact(), "{event:?}");
        if let Some(key) = key {
            assert!(seen.insert(key), "{event:?}");
        }
    }
    let key = |k| FactKey::Rollout(samples::rollout_key(1, k));
    assert!(key(2) < key(10));
    assert!(FactKey::Batch { step: 9 } < FactKey::Rollout(samples::rollout_key(1, 0)));
    assert!(FactKey::Batch { step: 9 } < FactKey::Refill { step: 1, round: 1 });
    assert!(FactKey::Refill { step: 1, round: 2 } < FactKey::Refill { step: 1, round: 10 });
    assert!(FactKey::Refill { step: 9, round: 9 } < FactKey::Rollout(samples::rollout_key(1, 0)));
    assert!(FactKey::EvolutionFinished { round: 0 } < FactKey::Step { step: 0 });
}

/// What a view says of an event: the event, and its key as bytes.
fn viewed(event: &Event) -> (Event, Option<Vec<u8>>) {
    let (facts, kind) = (codec::facts_bytes(event).unwrap(), event.kind());
    let (mut scratch, mut key) = (Vec::new(), Vec::new());
    let view = codec::view(kind as u16, codec::newest_version(kind), &facts, &mut scratch).unwrap();
    assert_eq!((view.kind(), view.facts()), (kind, facts.as_slice()));
    let is_fact = digest::key_bytes(&view, &mut key);
    (view.native(), is_fact.then_some(key))
}

#[test]
fn views_are_the_events_and_their_keys_sort_as_keys_do() {
    let mut keys = Vec::new();
    for event in samples::all() {
        let (native, bytes) = viewed(&event);
        assert_eq!(native, event);
        let key = fact_key(&event);
        let expected = key.as_ref().map(|key| {
            let mut bytes = Vec::new();
            key.bytes(&mut bytes);
            bytes
        });
        assert_eq!(bytes, expected, "{event:?}");
        keys.extend(key.zip(bytes));
    }
    // Beside the samples: one coordinate larger than the other, in every part of the longest keys.
    for (step, task, draw, k) in [(1, "a", 0, 1), (1, "a", 1, 0), (1, "a\0", 0, 0), (1, "ab", 0, 0), (256, "", 0, 0)] {
        let key = RolloutKey { step, task: task.into(), draw, k };
        for kind in [SignalKind::Forgetting, SignalKind::Boundary, SignalKind::Rare] {
            let event: Event = SignalRaised { key: key.clone(), kind, because: "{}".into() }.into();
            keys.push((fact_key(&event).unwrap(), viewed(&event).1.unwrap()));
        }
    }
    for (a, a_bytes) in &keys {
        for (b, b_bytes) in &keys {
            assert_eq!(a.cmp(b), a_bytes.cmp(b_bytes), "{a:?} and {b:?}");
        }
    }
}

#[test]
fn a_view_of_bytes_that_are_no_event_is_the_error_that_decoding_gives() {
    for event in samples::all() {
        let (facts, kind) = (codec::facts_bytes(&event).unwrap(), event.kind() as u16);
        let mut cases = vec![(999, 1, facts.clone()), (kind, 77, facts.clone())];
        cases.extend((0..facts.len()).step_by(7).map(|len| (kind, 1, facts[..len].to_vec())));
        for at in 0..facts.len() {
            let mut bad = facts.clone();
            bad[at] ^= 0xff;
            cases.push((kind, 1, bad));
        }
        for (code, version, bytes) in cases {
            let mut scratch = Vec::new();
            let viewed = codec::view(code, version, &bytes, &mut scratch).map(|view| view.native());
            match (viewed, codec::decode_facts(code, version, &bytes)) {
                // Compared as bytes: a flipped number may be no number.
                (Ok(a), Ok(b)) => assert_eq!(codec::facts_bytes(&a), codec::facts_bytes(&b)),
                (a, b) => assert_eq!(a.map(|e| e.kind()), b.map(|e| e.kind())),
            }
        }
    }
}

fn digest_of(events: &[Event]) -> Digest {
    let mut digest = FactsDigest::new();
    for event in events {
        digest.add(event).unwrap();
    }
    digest.value()
}

fn step(step: u32) -> Event {
    StepFinished { step, mean_reward: 0.5, projection_digest: String::new() }.into()
}

fn skipped(step: u32, update: u32) -> Event {
    StepSkipped { step, update, reason: "r".into() }.into()
}

#[test]
fn facts_digest_follows_its_formula() {
    let hash = |e: &Event| {
        let mut bytes = (e.kind() as u16).to_le_bytes().to_vec();
        bytes.extend(codec::facts_bytes(e).unwrap());
        *blake3::hash(&bytes).as_bytes()
    };
    let (a, b, s) = (skipped(1, 0), skipped(1, 1), step(1));
    let mut unit = vec![0; 32];
    unit.extend_from_slice(&3u64.to_le_bytes());
    unit.extend([hash(&a), hash(&b), hash(&s)].concat());
    let first = *blake3::hash(&unit).as_bytes();
    assert_eq!(digest_of(&[b.clone(), a.clone(), s.clone()]).0, first);
    let c = skipped(2, 0);
    let mut unit = first.to_vec();
    unit.extend_from_slice(&1u64.to_le_bytes());
    unit.extend_from_slice(&hash(&c));
    assert_eq!(digest_of(&[a, b, s, c]).0, *blake3::hash(&unit).as_bytes());
    assert_eq!(digest_of(&[]), Digest::ZERO);
}

#[test]
fn facts_digest_ignores_what_is_no_fact_and_the_run_id() {
    let mut events = samples::all();
    let before = digest_of(&events);
    events.push(RunResumed { step: 1, code_version: "x".into() }.into());
    if let Event::RunStarted(e) = &mut events[0] {
        e.run_id = "ffffffff".into();
    }
    assert_eq!(digest_of(&events), before);
    if let Event::RunStarted(e) = &mut events[0] {
        e.seed += 1;
    }
    assert_ne!(digest_of(&events), before);
}

fn text() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[a-zäß猫\\\\\"{}]{0,24}").unwrap()
}

fn key() -> impl Strategy<Value = RolloutKey> {
    (any::<u32>(), text(), any::<u32>(), any::<u32>()).prop_map(|(step, task, draw, k)| RolloutKey {
        step,
        task,
        draw,
        k,
    })
}

fn calls() -> impl Strategy<Value = Vec<ToolCall>> {
    prop::collection::vec((text(), text()).prop_map(|(name, arguments)| ToolCall { name, arguments }), 0..4)
}

fn reward() -> impl Strategy<Value = Reward> {
    prop_oneof![(0.0..=1.0).prop_map(Reward::Scored), text().prop_map(Reward::Unscored)]
}

fn any_event() -> impl Strategy<Value = Event> {
    let rollout = (
        key(),
        prop::collection::vec(any::<u32>(), 0..50),
        prop::collection::vec(any::<(u32, u32)>(), 0..5),
        prop::collection::vec(-50f32..0.0, 0..20),
        prop::collection::vec((any::<u32>(), text(), calls(), prop::collection::vec(text(), 0..3)), 0..4),
        reward(),
    )
        .prop_map(|(key, ids, sampled, logprobs, actions, reward)| {
            let actions =
                actions.into_iter().map(|(turn, text, calls, results)| Action { turn, text, calls, results }).collect();
            let prompt_len = ids.len() as u32 / 2;
            let (end, env_steps, policy_version) = (EndReason::Done, 3, 1);
            let e = RolloutFinished {
                key,
                policy_version,
                ids,
                prompt_len,
                sampled,
                sampling_logprobs: logprobs.iter().map(|l| l / 2.0).collect(),
                logprobs,
                actions,
                env_steps,
                reward,
                end,
            };
            Event::from(e)
        });
    let task = (text(), calls(), prop::option::of(text()), prop::option::of((text(), text())), any::<u32>());
    let admitted = prop::collection::vec(task, 0..3).prop_map(|turns| {
        let mut task = samples::task();
        task.turns = turns
            .into_iter()
            .map(|(query, solution, answer, missing, _)| TurnSpec {
                query,
                solution,
                answer,
                missing: missing.map(|(field, reply)| Missing { field, reply }),
            })
            .collect();
        TaskAdmitted { task, origin: Origin::Explored, weight: 0.5, draft: None, step: 0 }.into()
    });
    let evaluated = (any::<u32>(), text(), prop::collection::vec((text(), reward()), 0..6))
        .prop_map(|(step, split, results)| EvaluationFinished { step, policy_version: 0, split, results }.into());
    let signal =
        (key(), text()).prop_map(|(key, because)| SignalRaised { key, kind: SignalKind::Forgetting, because }.into());
    prop_oneof![rollout, admitted, evaluated, signal, (0..samples::all().len()).prop_map(|i| samples::all().remove(i))]
}

proptest! {
    #[test]
    fn any_event_round_trips(event in any_event()) {
        prop_assert_eq!(round_trip(&event), event.clone());
        prop_assert_eq!(codec::facts_bytes(&event).unwrap(), codec::facts_bytes(&event).unwrap());
    }

    #[test]
    fn random_bytes_never_panic(code in 0u16..30, bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = codec::decode_facts(code, 1, &bytes);
        let _ = codec::decode_meta(1, &bytes);
        let _ = frame::read(&bytes);
    }

    /// Valid archives with some bytes changed reach deep into the validation.
    #[test]
    fn mutated_payloads_never_panic(event in any_event(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut in any::<prop::sample::Index>()) {
        let mut bytes = codec::facts_bytes(&event).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = codec::decode_facts(event.kind() as u16, 1, &bytes);
        let _ = codec::decode_facts(event.kind() as u16, 1, &bytes[cut.index(bytes.len())..]);
    }

    /// Whatever order a step is logged in, the digest is the same; a different fact changes it.
    #[test]
    fn facts_digest_is_independent_of_order_within_a_step(events in prop::collection::vec(any_event(), 1..12), seed in any::<u64>()) {
        let unit: Vec<Event> = events.into_iter().filter(|e| e.kind() != Kind::StepFinished).collect();
        let logged = |shuffled: bool| {
            let mut unit = unit.clone();
            if shuffled {
                crate::world::draw(seed, "test", &[]).shuffle(&mut unit);
            }
            unit.push(step(1));
            unit.push(skipped(2, 0));
            digest_of(&unit)
        };
        prop_assert_eq!(logged(false), logged(true));
        let mut more = unit.clone();
        more.extend([skipped(1, 9), step(1), skipped(2, 0)]);
        prop_assert_ne!(digest_of(&more), logged(false));
    }
}
