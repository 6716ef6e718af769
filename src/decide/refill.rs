//! Dynamic sampling (DAPO; `batch.refill`): which groups teach something.
//!
//! A group whose scores are all equal has advantages of exactly 0: whatever was tried there, nothing was better than
//! the rest. Such a group is left out of the update and replaced by a newly drawn one, for at most so many further
//! rounds a step:
//!
//! 1. The step's groups are sampled. While some of them teach nothing and rounds are left, as many groups as are
//!    lacking are drawn by the same rule (`curriculum::plan_refill`; event `BatchRefilled`) and sampled.
//! 2. The update is made of the groups that teach something, in canonical order; never more than were planned.
//!    Advantages and the loss's denominators are over these alone. With none at all the step is skipped, and says so.
//!
//! Every rollout counts for signals, histories and metrics, whether its group is used or not. What counts here is the
//! recorded score, also under `learner.random_rewards`: which groups are used then says nothing about the coins.
//!
//! # Elsewhere
//!
//! | | name | differs |
//! |---|---|---|
//! | verl | `algorithm.filter_groups.enable`, `metric`, `max_num_gen_batches` | whole batches of `data.gen_batch_size` are drawn until `train_batch_size` groups are kept, and the surplus is thrown away; groups are told by the standard deviation of `metric`, which is the score here. `max_num_gen_batches` counts the first batch too: `refill` is one less, and 0 there means no bound. Where verl then stops with an error, the groups there are make a smaller update here |
//! | TRL | no such option in `GRPOTrainer`; `frac_reward_zero_std` reports the share of such groups | they stay in the batch and in its denominators, as with `refill = 0` |
//! | prime-rl | `orchestrator.buffer.online_difficulty_filtering`, `oversampling_factor` | drops groups whose mean reward is 0 or 1; sampling is asynchronous and goes on until the batch is full |

use super::advantage::EQUAL_RANGE;
use crate::event::RolloutFinished;

/// Whether a group with these scores teaches something: at least two finite ones, further apart than [`EQUAL_RANGE`].
/// Exactly then some advantage of it is not 0.
pub fn teaches(scores: impl IntoIterator<Item = f64>) -> bool {
    let (mut n, mut low, mut high) = (0u32, f64::INFINITY, f64::NEG_INFINITY);
    for score in scores.into_iter().filter(|s| s.is_finite()) {
        (n, low, high) = (n + 1, low.min(score), high.max(score));
    }
    n >= 2 && high - low > EQUAL_RANGE
}

/// The rollouts of groups that teach something, of rollouts in canonical order.
pub fn used(rollouts: Vec<RolloutFinished>) -> Vec<RolloutFinished> {
    let same_group = |a: &RolloutFinished, b: &RolloutFinished| {
        (a.key.step, &a.key.task, a.key.draw) == (b.key.step, &b.key.task, b.key.draw)
    };
    let mut keep = Vec::with_capacity(rollouts.len());
    for group in rollouts.chunk_by(same_group) {
        keep.extend(std::iter::repeat_n(teaches(group.iter().filter_map(|r| r.reward.score())), group.len()));
    }
    rollouts.into_iter().zip(keep).filter_map(|(rollout, keep)| keep.then_some(rollout)).collect()
}
