use super::{attempt, group};
use crate::decide::history::{ForgettingHistory, TaskHistory};

fn after(means: &[f64]) -> TaskHistory {
    let mut history = ForgettingHistory::default();
    for (i, mean) in means.iter().enumerate() {
        history.fold(&group(i as u32 + 1, "t", &[*mean]));
    }
    history.tasks["t"].clone()
}

#[test]
fn learnt_forgotten_relearnt() {
    let h = after(&[0.2, 0.5, 0.9, 0.4, 0.3, 0.5, 0.0]);
    assert_eq!(h.learnt_at, Some(2));
    assert_eq!(h.forgotten_at, [4, 7]);
    assert_eq!(h.relearnt_at, [6]);
    assert!(h.is_forgotten());
    assert_eq!((h.attempts, h.groups, h.solved), (7, 7, 3));
}

#[test]
fn never_learnt_is_never_forgotten() {
    let h = after(&[0.0, 0.4, 0.49]);
    assert_eq!((h.learnt_at, h.forgotten_at.len(), h.is_forgotten()), (None, 0, false));
}

#[test]
fn group_mean_decides_and_unscored_members_do_not_count() {
    let mut history = ForgettingHistory::default();
    history.fold(&[
        attempt(1, "t", 1, Some(1.0), &[]),
        attempt(1, "t", 0, None, &[]),
        attempt(1, "t", 2, Some(0.0), &[]),
    ]);
    // Mean of 1 and 0 is 0.5: learnt.
    let h = &history.tasks["t"];
    assert_eq!((h.learnt_at, h.attempts, h.unscored, h.last_mean), (Some(1), 3, 1, Some(0.5)));
    // A group without any score changes nothing but the attempts.
    history.fold(&[attempt(2, "t", 0, None, &[])]);
    let h = &history.tasks["t"];
    assert_eq!((h.groups, h.attempts, h.forgotten_at.len()), (1, 4, 0));
}

#[test]
fn two_draws_of_a_step_are_two_groups() {
    let mut second = attempt(3, "t", 0, Some(0.0), &[]);
    second.key.draw = 1;
    let mut history = ForgettingHistory::default();
    history.fold(&[second, attempt(3, "t", 0, Some(1.0), &[])]);
    assert_eq!((history.tasks["t"].learnt_at, history.tasks["t"].forgotten_at.clone()), (Some(3), vec![3]));
}
