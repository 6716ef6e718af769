use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::decide::curriculum::{BatchOptions, Candidate, epoch, plan_batch, plan_refill};

fn pool(n: usize) -> Vec<Candidate> {
    (0..n)
        .map(|i| Candidate { id: format!("t{i:03}"), weight: 1.0, planned: 0, base_epoch: 0, admitted_step: 0 })
        .collect()
}

fn options(tasks: usize) -> BatchOptions {
    BatchOptions { tasks, ..BatchOptions::default() }
}

/// Plans `steps` steps and keeps the books as the projection does.
fn run(pool: &mut [Candidate], steps: std::ops::RangeInclusive<u32>, seed: u64, options: &BatchOptions) -> Vec<String> {
    let mut drawn = Vec::new();
    for step in steps {
        for (id, _) in plan_batch(pool, step, seed, options) {
            pool.iter_mut().find(|c| c.id == id).unwrap().planned += 1;
            drawn.push(id);
        }
    }
    drawn
}

#[test]
fn epochs_go_through_every_task_once() {
    let mut tasks = pool(10);
    let drawn = run(&mut tasks, 1..=10, 7, &options(4));
    // 40 draws of 10 tasks: four epochs, each a permutation, also where a batch spans two of them.
    let epochs: Vec<&[String]> = drawn.chunks(10).collect();
    for one in &epochs {
        let mut sorted = one.to_vec();
        sorted.sort();
        assert_eq!(sorted, pool(10).into_iter().map(|c| c.id).collect::<Vec<_>>());
    }
    assert!(epochs.windows(2).any(|w| w[0] != w[1]), "each epoch is shuffled anew");
    assert_eq!(epoch(&tasks), 4);
}

#[test]
fn seeds_differ_and_order_of_tasks_does_not_matter() {
    let tasks = pool(50);
    let mut reversed = tasks.clone();
    reversed.reverse();
    let plan = plan_batch(&tasks, 1, 1, &options(8));
    assert_eq!(plan, plan_batch(&reversed, 1, 1, &options(8)));
    assert_ne!(plan, plan_batch(&tasks, 1, 2, &options(8)));
}

#[test]
fn a_batch_larger_than_d_draws_again() {
    let plan = plan_batch(&pool(3), 1, 5, &options(7));
    let mut draws: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (id, draw) in &plan {
        draws.entry(id).or_default().push(*draw);
    }
    let mut counts: Vec<usize> = draws.values().map(Vec::len).collect();
    counts.sort();
    assert_eq!(counts, [2, 2, 3]);
    assert!(draws.values().all(|d| *d == (0..d.len() as u32).collect::<Vec<_>>()));
}

#[test]
fn weights_are_visits_per_epoch() {
    let mut tasks = pool(4);
    tasks[0].weight = 2.0;
    tasks[1].weight = 0.5;
    tasks[2].weight = 0.0;
    let drawn = run(&mut tasks, 1..=35, 3, &options(2));
    let count = |id: &str| drawn.iter().filter(|d| *d == id).count();
    // 70 draws over rates 2 : 0.5 : 0 : 1 are 20 units of virtual time: 40, 10, 0, 20, up to one visit.
    assert_eq!(count("t002"), 0);
    assert!(count("t000").abs_diff(40) <= 1 && count("t001").abs_diff(10) <= 1 && count("t003").abs_diff(20) <= 1);
}

#[test]
fn nothing_to_draw() {
    assert_eq!(plan_batch(&[], 1, 1, &options(4)), []);
    let mut tasks = pool(2);
    tasks[0].weight = f64::NAN;
    tasks[1].weight = -1.0;
    assert_eq!(plan_batch(&tasks, 1, 1, &options(4)), []);
    assert_eq!(plan_batch(&tasks, 1, 1, &BatchOptions { replacement: true, ..options(4) }), []);
}

#[test]
fn new_tasks_come_first_in_their_share() {
    let mut tasks = pool(20);
    run(&mut tasks, 1..=4, 9, &options(10));
    let base_epoch = epoch(&tasks);
    for i in 0..8 {
        let step = if i < 2 { 3 } else { 4 };
        tasks.push(Candidate { id: format!("n{i}"), weight: 1.0, planned: 0, base_epoch, admitted_step: step });
    }
    let first: Vec<String> = plan_batch(&tasks, 5, 9, &options(10)).into_iter().map(|(id, _)| id).collect();
    // Five of ten places, the earlier admitted first.
    assert!(first[..5].iter().all(|id| id.starts_with('n')));
    let mut oldest = first[..2].to_vec();
    oldest.sort();
    assert_eq!(oldest, ["n0", "n1"]);
    // Share 0: no reserved places; a task that joined is drawn like one of the current epoch.
    let none = BatchOptions { fresh_share: 0.0, ..options(10) };
    let drawn = run(&mut tasks, 5..=7, 9, &none);
    // 28 tasks in epoch 2, 30 draws: everything once, then two again.
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for id in &drawn {
        *counts.entry(id).or_insert(0) += 1;
    }
    assert_eq!((counts.len(), counts.values().filter(|c| **c == 2).count()), (28, 2));
}

#[test]
fn replacement_follows_the_weights() {
    let mut tasks = pool(2);
    tasks[0].weight = 3.0;
    let replacement = BatchOptions { replacement: true, ..options(4000) };
    let plan = plan_batch(&tasks, 1, 1, &replacement);
    let heavy = plan.iter().filter(|(id, _)| id == "t000").count();
    // Binomial(4000, 0.75): mean 3000, deviation 27.4; six deviations.
    assert!(heavy.abs_diff(3000) < 165, "{heavy}");
    assert_ne!(plan, plan_batch(&tasks, 2, 1, &replacement));
}

proptest! {
    #[test]
    fn no_task_is_ahead_by_more_than_one_visit(n in 1usize..12, batch in 1usize..9, steps in 1u32..12, seed: u64) {
        let mut tasks = pool(n);
        let drawn = run(&mut tasks, 1..=steps, seed, &options(batch));
        prop_assert_eq!(drawn.len(), batch * steps as usize);
        let (least, most) = (tasks.iter().map(|t| t.planned).min(), tasks.iter().map(|t| t.planned).max());
        prop_assert!(most.unwrap() - least.unwrap() <= 1);
    }
}

#[test]
fn a_further_round_is_the_next_stretch_of_the_epoch() {
    // What a batch of 10 draws at once, a batch of 6 and rounds of 3 and 1 draw one after another.
    let whole = plan_batch(&pool(7), 4, 9, &options(10));
    let mut tasks = pool(7);
    let mut planned: Vec<(String, u32)> = Vec::new();
    for (round, n) in [(0, 6), (1, 3), (2, 1)] {
        let groups = match round {
            0 => plan_batch(&tasks, 4, 9, &options(n)),
            _ => plan_refill(&tasks, (4, round), &planned, 9, &options(n)),
        };
        assert_eq!(groups.len(), n);
        for (id, _) in &groups {
            tasks.iter_mut().find(|c| c.id == *id).unwrap().planned += 1;
        }
        planned.extend(groups);
    }
    assert_eq!(planned, whole);
}

#[test]
fn further_rounds_with_replacement_are_draws_of_their_own() {
    let options = BatchOptions { tasks: 12, replacement: true, ..BatchOptions::default() };
    let tasks = pool(5);
    let plan = plan_batch(&tasks, 3, 1, &options);
    let rounds: Vec<_> = (1..=2).map(|round| plan_refill(&tasks, (3, round), &plan, 1, &options)).collect();
    let ids = |groups: &[(String, u32)]| groups.iter().map(|g| g.0.clone()).collect::<Vec<_>>();
    assert!(ids(&plan) != ids(&rounds[0]) && ids(&rounds[0]) != ids(&rounds[1]));
    assert_ne!(ids(&rounds[0]), ids(&plan_refill(&tasks, (4, 1), &plan, 1, &options)), "another step");
    assert_ne!(ids(&rounds[0]), ids(&plan_refill(&tasks, (3, 1), &plan, 2, &options)), "another seed");
    assert_eq!(rounds[0], plan_refill(&tasks, (3, 1), &plan, 1, &options));
}

#[test]
fn new_tasks_come_first_in_a_further_round_too() {
    let mut tasks = pool(6);
    tasks.iter_mut().for_each(|t| t.planned = 1);
    tasks.push(Candidate { id: "new".into(), weight: 1.0, planned: 0, base_epoch: 1, admitted_step: 2 });
    assert_eq!(plan_refill(&tasks, (3, 1), &[], 1, &options(2))[0], ("new".into(), 0));
    assert_eq!(plan_refill(&[], (3, 1), &[], 1, &options(2)), []);
}

proptest! {
    #[test]
    fn no_group_of_a_step_is_planned_twice(
        n in 1usize..6,
        sizes in prop::collection::vec(1usize..9, 1..5),
        replacement: bool,
        seed in 0u64..50,
    ) {
        let mut tasks = pool(n);
        let mut planned: Vec<(String, u32)> = Vec::new();
        for (round, size) in sizes.iter().enumerate() {
            let options = BatchOptions { tasks: *size, replacement, ..BatchOptions::default() };
            let groups = match round {
                0 => plan_batch(&tasks, 2, seed, &options),
                _ => plan_refill(&tasks, (2, round as u32), &planned, seed, &options),
            };
            prop_assert_eq!(groups.len(), *size);
            for (id, _) in &groups {
                tasks.iter_mut().find(|c| c.id == *id).unwrap().planned += 1;
            }
            planned.extend(groups);
        }
        // Of every task the draws are 0, 1, 2 .. in the order of planning.
        let mut next: BTreeMap<String, u32> = BTreeMap::new();
        for (id, draw) in planned {
            let n = next.entry(id).or_insert(0);
            prop_assert_eq!(draw, *n);
            *n += 1;
        }
    }
}
