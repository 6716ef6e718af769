//! What the fold costs, as counts: its allocations do not grow with the number of events.

#[path = "common/training.rs"]
mod training;

use coevolve::event::digest::FactsDigest;
use coevolve::log::{Error, MAIN, Reader};
use coevolve::project::State;

#[global_allocator]
static ALLOCATOR: training::Counting = training::Counting;

/// One test in this file: another one beside it would allocate in its count.
#[test]
fn the_fold_of_a_log_allocates_for_what_stays_and_not_per_event() {
    let dir = tempfile::tempdir().expect("a folder");
    let (events, written) = training::write(dir.path(), 100_000, 100);
    let reader = Reader::open(dir.path()).expect("a reader");
    let (mut state, mut facts, mut half) = (State::new(), FactsDigest::new(), 0);
    let sweep = reader.sweep(MAIN, 1, u64::MAX, |swept| {
        if swept.seq == events / 2 {
            half = training::allocations();
        }
        state.apply_view(swept.seq, &swept.view, &swept.meta);
        facts.add_view(&swept.view).map_err(Error::from)
    });
    sweep.expect("swept");
    let (allocations, of) = (training::allocations() - half, events - events / 2);
    // Lists that double, nodes of maps of what is remembered for good.
    assert!(allocations * 50 < of, "{allocations} allocations in the fold of {of} events");
    // And it is the fold: of the events as they were written, and with the facts digest that reading them gives.
    assert!(state == written);
    let mut read = FactsDigest::new();
    for stamped in reader.read(MAIN, 1).expect("main") {
        read.add(&stamped.expect("an event").event).expect("a fact");
    }
    assert_eq!((facts.value(), facts.facts()), (read.value(), read.facts()));
    assert_eq!(reader.facts_digest(MAIN).expect("a digest"), read.value());
}
