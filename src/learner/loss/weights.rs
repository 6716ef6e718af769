//! Aggregation: the weight of a sequence's tokens, fixed for a whole optimiser update.

use super::{LossConfig, LossError, LossKind};

/// What the aggregation has to know about an optimiser update.
#[derive(Debug, Clone, Copy)]
pub struct UpdateShape<'a> {
    /// Trained tokens of each sequence of the update, in canonical order. Sequences with none count as
    /// sequences (as in TRL), also those that are not computed because their advantage is zero.
    pub trained: &'a [usize],
    /// The split into micro-batches (sequence indices); sequences in none of them are not computed.
    /// Empty = one micro-batch with everything.
    pub micro_batches: &'a [Vec<usize>],
}

/// One weight per sequence: the loss of the update is `sum_s weight_s * sum_t token_loss`.
///
/// | family | weight |
/// |---|---|
/// | grpo, gspo | 1 / (sequences x trained tokens of the sequence) |
/// | dapo, cispo, gpg | 1 / trained tokens of the update |
/// | dr_grpo | 1 / (sequences x max completion length) |
/// | bnpo | 1 / (micro-batches x trained tokens of the micro-batch) |
///
/// Counts of zero act as one. Errors when a micro-batch names a sequence twice or one that does not exist.
pub fn token_weights(config: &LossConfig, shape: &UpdateShape<'_>) -> Result<Vec<f64>, LossError> {
    let sequences = shape.trained.len();
    let at_least_one = |n: usize| n.max(1) as f64;
    let mut micro_batch_of = vec![None; sequences];
    for (m, members) in shape.micro_batches.iter().enumerate() {
        for &sequence in members {
            match micro_batch_of.get_mut(sequence) {
                None => return Err(LossError::Split { sequence, fault: "does not exist" }),
                Some(Some(_)) => return Err(LossError::Split { sequence, fault: "is listed twice" }),
                Some(free) => *free = Some(m),
            }
        }
    }
    let total = at_least_one(shape.trained.iter().sum());
    let n = at_least_one(sequences);
    Ok(match config.kind {
        LossKind::Grpo | LossKind::Gspo => shape.trained.iter().map(|&t| 1.0 / (n * at_least_one(t))).collect(),
        LossKind::Dapo | LossKind::Cispo | LossKind::Gpg => vec![1.0 / total; sequences],
        LossKind::DrGrpo => vec![1.0 / (n * f64::from(config.max_completion_length)); sequences],
        LossKind::Bnpo if shape.micro_batches.is_empty() => vec![1.0 / total; sequences],
        LossKind::Bnpo => {
            let batches = shape.micro_batches.len() as f64;
            let tokens: Vec<usize> =
                shape.micro_batches.iter().map(|members| members.iter().map(|&s| shape.trained[s]).sum()).collect();
            micro_batch_of.iter().map(|m| m.map_or(0.0, |m| 1.0 / (batches * at_least_one(tokens[m])))).collect()
        }
    })
}
