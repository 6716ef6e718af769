//! What a training forward works on: rows of tokens, some of which share a prefix.

use crate::model::config::ModelConfig;
use crate::model::error::ModelError;

/// One row: the tokens after its prefix (or all tokens), and which of them predict a trained token.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainRow {
    /// Token ids; at least one.
    pub ids: Vec<u32>,
    /// Index into [`TrainBatch::prefixes`]: the row continues there, and sees all of it.
    pub prefix: Option<usize>,
    /// `(position in ids, token)`: the logits *at* that position are scored for that token, normally the one
    /// that follows. Positions rise strictly.
    pub targets: Vec<(u32, u32)>,
}

/// Rows with their shared prefixes. A prefix is computed once, exactly as if it stood before each row.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainBatch {
    /// Token ids of the shared prefixes; each has at least one.
    pub prefixes: Vec<Vec<u32>>,
    /// The rows.
    pub rows: Vec<TrainRow>,
}

/// A whole sequence with its trained positions, before prefixes are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence<'a> {
    /// All token ids from the first one on.
    pub ids: &'a [u32],
    /// `(position in ids, token)`, positions strictly rising.
    pub targets: &'a [(u32, u32)],
}

impl TrainBatch {
    /// Adds sequences of one group, sharing their longest common beginning (up to the first trained
    /// position). Tokens after a sequence's last target influence nothing and are cut off; a sequence
    /// without targets adds no row and no outputs.
    pub fn push_group(&mut self, group: &[Sequence<'_>]) {
        let members: Vec<_> = group.iter().filter(|s| !s.targets.is_empty()).collect();
        let Some(first) = members.first() else { return };
        let mut shared = if members.len() > 1 { usize::MAX } else { 0 };
        for s in &members {
            let common = first.ids.iter().zip(s.ids).take_while(|(a, b)| a == b).count();
            shared = shared.min(common).min(s.targets[0].0 as usize);
        }
        let prefix = (shared > 0).then(|| {
            self.prefixes.push(first.ids[..shared].to_vec());
            self.prefixes.len() - 1
        });
        for s in members {
            let end = s.targets.last().map_or(0, |t| t.0 as usize + 1).clamp(shared, s.ids.len().max(shared));
            self.rows.push(TrainRow {
                ids: s.ids[shared..end].to_vec(),
                prefix,
                targets: s.targets.iter().map(|(p, t)| (p - shared as u32, *t)).collect(),
            });
        }
    }

    /// Tokens that the model computes: prefixes once, rows.
    pub fn tokens(&self) -> usize {
        self.prefixes.iter().map(Vec::len).sum::<usize>() + self.rows.iter().map(|r| r.ids.len()).sum::<usize>()
    }

    /// Number of scored positions: the length of log-probs, entropies and their gradients.
    pub fn targets(&self) -> usize {
        self.rows.iter().map(|r| r.targets.len()).sum()
    }

    /// Checks ids, positions, lengths and prefix indices.
    ///
    /// # Errors
    /// [`ModelError::Batch`], [`ModelError::Token`] or [`ModelError::TooLong`] naming the row.
    pub fn check(&self, c: &ModelConfig) -> Result<(), ModelError> {
        let ids_ok = |place: &dyn Fn() -> String, ids: &[u32]| match ids.iter().find(|t| **t as usize >= c.vocab_size) {
            Some(id) => Err(ModelError::Token { place: place(), id: *id, vocab: c.vocab_size }),
            None if ids.is_empty() => Err(ModelError::Batch(format!("{} is empty", place()))),
            None => Ok(()),
        };
        for (i, p) in self.prefixes.iter().enumerate() {
            ids_ok(&|| format!("prefix {i}"), p)?;
            // Also covers a prefix that no row uses.
            if p.len() > c.max_position_embeddings {
                return Err(ModelError::TooLong {
                    place: format!("prefix {i}"),
                    len: p.len(),
                    max: c.max_position_embeddings,
                });
            }
        }
        for (i, r) in self.rows.iter().enumerate() {
            let place = || format!("row {i}");
            ids_ok(&place, &r.ids)?;
            let before = match r.prefix {
                None => 0,
                Some(p) => match self.prefixes.get(p) {
                    Some(ids) => ids.len(),
                    None => return Err(ModelError::Batch(format!("row {i} names prefix {p}, there is none"))),
                },
            };
            let len = before + r.ids.len();
            if len > c.max_position_embeddings {
                return Err(ModelError::TooLong { place: place(), len, max: c.max_position_embeddings });
            }
            if r.targets.windows(2).any(|w| w[0].0 >= w[1].0) {
                return Err(ModelError::Batch(format!("row {i}: target positions must rise strictly")));
            }
            if let Some(t) = r.targets.iter().find(|t| t.0 as usize >= r.ids.len()) {
                return Err(ModelError::Batch(format!("row {i}: target position {} of {} tokens", t.0, r.ids.len())));
            }
            if let Some(t) = r.targets.iter().find(|t| t.1 as usize >= c.vocab_size) {
                return Err(ModelError::Token { place: format!("row {i} target"), id: t.1, vocab: c.vocab_size });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Family;
    use crate::model::params::tests::tiny;

    #[test]
    fn a_group_shares_what_its_members_have_in_common_up_to_the_first_target() {
        let mut b = TrainBatch::default();
        b.push_group(&[
            Sequence { ids: &[1, 2, 3, 4, 9], targets: &[(2, 4), (3, 9)] },
            Sequence { ids: &[1, 2, 3, 5], targets: &[(2, 5)] },
            Sequence { ids: &[7], targets: &[] },
        ]);
        assert_eq!(b.prefixes, [vec![1, 2]]);
        assert_eq!(b.rows[0], TrainRow { ids: vec![3, 4], prefix: Some(0), targets: vec![(0, 4), (1, 9)] });
        assert_eq!(b.rows[1], TrainRow { ids: vec![3], prefix: Some(0), targets: vec![(0, 5)] });
        assert_eq!((b.rows.len(), b.tokens(), b.targets()), (2, 5, 3));
        b.push_group(&[Sequence { ids: &[1, 2], targets: &[(0, 2)] }]);
        assert_eq!(b.rows[2], TrainRow { ids: vec![1], prefix: None, targets: vec![(0, 2)] });
        assert_eq!(b.check(&tiny(Family::Llama)), Ok(()));
    }

    #[test]
    fn malformed_batches_are_named() {
        let c = tiny(Family::Llama);
        let row = |ids: Vec<u32>, prefix, targets| TrainBatch {
            prefixes: vec![],
            rows: vec![TrainRow { ids, prefix, targets }],
        };
        assert!(matches!(row(vec![], None, vec![]).check(&c), Err(ModelError::Batch(_))));
        assert!(matches!(row(vec![99], None, vec![]).check(&c), Err(ModelError::Token { id: 99, .. })));
        assert!(matches!(row(vec![1], Some(0), vec![]).check(&c), Err(ModelError::Batch(_))));
        assert!(matches!(row(vec![1, 2], None, vec![(1, 1), (1, 1)]).check(&c), Err(ModelError::Batch(_))));
        assert!(matches!(row(vec![1, 2], None, vec![(2, 1)]).check(&c), Err(ModelError::Batch(_))));
        assert!(matches!(row(vec![1, 2], None, vec![(1, 37)]).check(&c), Err(ModelError::Token { id: 37, .. })));
        assert!(matches!(row(vec![1; 513], None, vec![]).check(&c), Err(ModelError::TooLong { .. })));
    }
}
