//! The loss's settings as the CUDA kernels take them.

use super::Inner;
use crate::learner::loss::{CorrectionKind, CorrectionLevel, KlKind, LossKind};

/// Same fields in the same order as `struct Options` in grpo.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    pub(super) kind: i32,
    pub(super) kl: i32,
    pub(super) correction: i32,
    pub(super) sequence_level: i32,
    pub(super) has_old: i32,
    pub(super) has_ref: i32,
    pub(super) has_sampler: i32,
    pub(super) has_delta: i32,
    pub(super) has_dual: i32,
    pub(super) has_min: i32,
    pub(super) low: f32,
    pub(super) high: f32,
    pub(super) cispo_bound: f32,
    pub(super) delta: f32,
    pub(super) dual: f32,
    pub(super) beta: f32,
    pub(super) correction_max: f32,
    pub(super) correction_min: f32,
    pub(super) entropy_coef: f32,
}

impl Options {
    /// What the kernels need of an op.
    pub(super) fn new(op: &Inner) -> Options {
        let c = &op.config;
        let correction = c.correction.as_ref();
        Options {
            kind: match c.kind {
                LossKind::Grpo => 0,
                LossKind::Dapo => 1,
                LossKind::DrGrpo => 2,
                LossKind::Bnpo => 3,
                LossKind::Gspo => 4,
                LossKind::Cispo => 5,
                LossKind::Gpg => 6,
            },
            kl: match c.kl {
                KlKind::K1 => 0,
                KlKind::K2 => 1,
                KlKind::K3 => 2,
            },
            correction: correction.map_or(0, |c| match c.kind {
                CorrectionKind::Tis => 1,
                CorrectionKind::Mis => 2,
            }),
            sequence_level: i32::from(correction.is_some_and(|c| c.level == CorrectionLevel::Sequence)),
            has_old: i32::from(op.tokens.logp_old.is_some()),
            has_ref: i32::from(op.tokens.logp_ref.is_some() && c.kind != LossKind::Gpg),
            has_sampler: i32::from(op.tokens.logp_sampler.is_some()),
            has_delta: i32::from(c.delta.is_some()),
            has_dual: i32::from(c.dual_clip.is_some()),
            has_min: i32::from(correction.is_some_and(|c| c.min.is_some())),
            low: (1.0 - c.epsilon_low) as f32,
            high: (1.0 + c.epsilon_high) as f32,
            cispo_bound: c.epsilon_high as f32,
            delta: c.delta.unwrap_or(0.0) as f32,
            dual: c.dual_clip.unwrap_or(0.0) as f32,
            beta: c.beta as f32,
            correction_max: correction.map_or(0.0, |c| c.max) as f32,
            correction_min: correction.and_then(|c| c.min).unwrap_or(0.0) as f32,
            entropy_coef: c.entropy_coef as f32,
        }
    }
}
