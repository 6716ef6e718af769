use proptest::prelude::*;

use super::key;
use crate::decide::contexts::{MAX_CONTEXT_ROLLOUTS, Mark, select_contexts};
use crate::event::SignalKind::{self, Boundary, Forgetting, Rare};

fn mark(step: u32, task: &str, draw: u32, k: u32, kind: SignalKind, score: f64, group_mean: f64) -> Mark {
    Mark { key: key(step, task, draw, k), kind, score, group_mean }
}

#[test]
fn one_per_task_and_kind_hardest_first() {
    let marks = [
        mark(1, "a", 0, 0, Boundary, 1.0, 0.5),
        mark(1, "a", 0, 1, Boundary, 0.0, 0.5),
        mark(2, "b", 0, 0, Rare, 0.0, 0.125),
        mark(2, "a", 0, 3, Forgetting, 0.0, 0.125),
        mark(3, "c", 0, 0, Rare, 0.0, 0.125),
        // A harder and a later group of (a, boundary).
        mark(3, "a", 0, 5, Boundary, 1.0, 0.25),
        mark(3, "a", 0, 2, Boundary, 0.0, 0.25),
    ];
    let contexts = select_contexts(&marks, 4, 32);
    let got: Vec<_> = contexts.iter().map(|c| (c.id.as_str(), c.task.as_deref().unwrap(), c.kind.unwrap())).collect();
    // 0.125: step 3 before step 2; within step 2 task a before b.
    assert_eq!(got, [("c4.0", "c", Rare), ("c4.1", "a", Forgetting), ("c4.2", "b", Rare), ("c4.3", "a", Boundary)]);
    // The hardest group first, its failure before its success, then the other group likewise.
    let order: Vec<_> = contexts[3].rollouts.iter().map(|r| (r.step, r.k)).collect();
    assert_eq!(order, [(3, 2), (3, 5), (1, 1), (1, 0)]);
    assert_eq!(select_contexts(&marks, 4, 2).len(), 2);
    assert_eq!(select_contexts(&[], 0, 32), []);
}

#[test]
fn a_context_names_a_bounded_number_of_rollouts() {
    let marks: Vec<Mark> = (0..100).map(|k| mark(1, "t", 0, k, Rare, 0.0, 0.0)).collect();
    assert_eq!(select_contexts(&marks, 1, 5)[0].rollouts.len(), MAX_CONTEXT_ROLLOUTS);
}

proptest! {
    #[test]
    fn the_order_of_marks_does_not_matter(
        (list, shuffled) in proptest::collection::btree_set((0u32..4, 0usize..3, 0u32..2, 0u32..3, 0usize..3), 0..30)
            .prop_map(|set| set.into_iter().map(|(step, task, draw, k, kind)| {
                let mean = f64::from((step + draw) % 3) / 4.0;
                mark(step, ["a", "b", "c"][task], draw, k, [Forgetting, Boundary, Rare][kind], f64::from(k % 2), mean)
            }).collect::<Vec<_>>())
            .prop_flat_map(|list| (Just(list.clone()), Just(list).prop_shuffle()))
    ) {
        prop_assert_eq!(select_contexts(&list, 1, 6), select_contexts(&shuffled, 1, 6));
    }
}
