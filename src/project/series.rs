//! Compact containers for figures that are kept of every step for ever: a hundred thousand steps must stay small, and
//! taking one more must not allocate.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::event::{ArchivedEndReason, ArchivedOrigin, EndReason, Origin, SignalKind};

/// A map whose keys arrive almost in order: a sorted list. In JSON what a `BTreeMap` is; pairs for keys of two parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Series<K, V>(Vec<(K, V)>);

impl<K, V> Default for Series<K, V> {
    fn default() -> Self {
        Series(Vec::new())
    }
}

impl<K: Ord + Copy, V> Series<K, V> {
    fn place(&self, key: K) -> Result<usize, usize> {
        match self.0.last() {
            Some((last, _)) if *last == key => Ok(self.0.len() - 1),
            Some((last, _)) if *last > key => self.0.binary_search_by(|(k, _)| k.cmp(&key)),
            _ => Err(self.0.len()),
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.place(*key).ok().map(|i| &self.0[i].1)
    }

    /// Whether there is a value.
    pub fn contains_key(&self, key: &K) -> bool {
        self.place(*key).is_ok()
    }

    /// The value of a key, made with `new` when missing.
    pub fn get_or_insert_with(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        let i = self.place(key).unwrap_or_else(|i| {
            self.0.insert(i, (key, new()));
            i
        });
        &mut self.0[i].1
    }

    /// The value of a key, the default one when missing.
    pub fn get_or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.get_or_insert_with(key, V::default)
    }

    /// Sets a value; returns the one before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.place(key) {
            Ok(i) => Some(std::mem::replace(&mut self.0[i].1, value)),
            Err(i) => {
                self.0.insert(i, (key, value));
                None
            }
        }
    }

    /// Keys and values in key order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> + ExactSizeIterator {
        self.0.iter().map(|(k, v)| (k, v))
    }

    /// Keys in order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> + ExactSizeIterator {
        self.iter().map(|(k, _)| k)
    }

    /// Values in key order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> + ExactSizeIterator {
        self.iter().map(|(_, v)| v)
    }

    /// Entries with keys in `first..=last`, in order.
    pub fn range(&self, first: K, last: K) -> impl Iterator<Item = (&K, &V)> {
        let start = self.0.partition_point(|(k, _)| *k < first);
        self.0[start..].iter().take_while(move |(k, _)| *k <= last).map(|(k, v)| (k, v))
    }

    /// The entry with the largest key.
    pub fn last(&self) -> Option<(&K, &V)> {
        self.0.last().map(|(k, v)| (k, v))
    }

    /// How many entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// As maps have it: tests name entries that are there.
#[cfg(test)]
impl<K: Ord + Copy, V> std::ops::Index<&K> for Series<K, V> {
    type Output = V;
    fn index(&self, key: &K) -> &V {
        self.get(key).expect("no entry found for key")
    }
}

impl<V: Serialize> Serialize for Series<u32, V> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Series<u32, V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Series(BTreeMap::deserialize(from)?.into_iter().collect()))
    }
}

impl<V: Serialize> Serialize for Series<(u32, u32), V> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.iter())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Series<(u32, u32), V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Series(crate::decide::pairs::deserialize(from)?.into_iter().collect()))
    }
}

/// An enum without fields whose values can be listed.
pub trait Listed: Copy + Eq + Ord + 'static {
    /// Every value, in order.
    const ALL: &'static [Self];
}

impl Listed for SignalKind {
    const ALL: &'static [Self] = &[SignalKind::Forgetting, SignalKind::Boundary, SignalKind::Rare];
}

impl Listed for Origin {
    const ALL: &'static [Self] = &[Origin::Seed, Origin::Explored, Origin::Synthesised];
}

impl Listed for EndReason {
    const ALL: &'static [Self] = &[
        EndReason::Done,
        EndReason::StepLimit,
        EndReason::TokenLimit,
        EndReason::InvalidCalls,
        EndReason::EnvironmentFailure,
    ];
}

/// Counts by a [`Listed`] enum of `N` values. In JSON what a `BTreeMap` of the values counted is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tally<K, const N: usize> {
    counts: [u32; N],
    of: PhantomData<K>,
}

impl<K, const N: usize> Default for Tally<K, N> {
    fn default() -> Self {
        Tally { counts: [0; N], of: PhantomData }
    }
}

impl<K: Listed, const N: usize> Tally<K, N> {
    /// Counts one more.
    pub fn add(&mut self, value: K) {
        if let Some(i) = K::ALL.iter().position(|v| *v == value).filter(|i| *i < N) {
            self.counts[i] += 1;
        }
    }

    /// How many.
    pub fn get(&self, value: K) -> u32 {
        K::ALL.iter().position(|v| *v == value).and_then(|i| self.counts.get(i)).copied().unwrap_or(0)
    }

    /// All together.
    pub fn total(&self) -> u32 {
        self.counts.iter().sum()
    }

    /// Values that were counted, in order.
    pub fn iter(&self) -> impl Iterator<Item = (K, u32)> {
        K::ALL.iter().copied().zip(self.counts).filter(|(_, n)| *n > 0)
    }
}

impl<K: Listed + Serialize, const N: usize> Serialize for Tally<K, N> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

impl<'de, K: Listed + Deserialize<'de>, const N: usize> Deserialize<'de> for Tally<K, N> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut tally = Tally::default();
        for (value, n) in BTreeMap::<K, u32>::deserialize(from)? {
            if let Some(i) = K::ALL.iter().position(|v| *v == value).filter(|i| *i < N) {
                tally.counts[i] = n;
            }
        }
        Ok(tally)
    }
}

/// Buffers and other things that follow from the rest: no part of a comparison, a clone or a snapshot.
#[derive(Debug, Default)]
pub struct Uncompared<T>(pub T);

impl<T> PartialEq for Uncompared<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T: Default> Clone for Uncompared<T> {
    fn clone(&self) -> Self {
        Uncompared::default()
    }
}

/// The owned value of an archived [`Origin`].
pub(super) fn origin(archived: &ArchivedOrigin) -> Origin {
    crate::event::view::Archived::native(archived)
}

/// The owned value of an archived [`EndReason`].
pub(super) fn end(archived: &ArchivedEndReason) -> EndReason {
    crate::event::view::Archived::native(archived)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn tallies_are_maps_of_what_was_counted() {
        let mut ends = Tally::<EndReason, 5>::default();
        for end in [EndReason::TokenLimit, EndReason::Done, EndReason::TokenLimit] {
            ends.add(end);
        }
        assert_eq!(serde_json::to_value(ends).unwrap(), json!({"done": 1, "token_limit": 2}));
        assert_eq!(serde_json::from_value::<Tally<EndReason, 5>>(json!({"done": 1, "token_limit": 2})).unwrap(), ends);
        assert_eq!((ends.get(EndReason::TokenLimit), ends.get(EndReason::StepLimit), ends.total()), (2, 0, 3));
        for n in [SignalKind::ALL.len(), Origin::ALL.len()] {
            assert_eq!(n, 3);
        }
    }

    proptest! {
        #[test]
        fn a_series_is_a_map(
            writes in proptest::collection::vec((0u32..12, any::<u16>(), any::<bool>()), 0..40),
            from in 0u32..12,
            to in 0u32..12,
        ) {
            let (mut series, mut map) = (Series::<u32, u16>::default(), BTreeMap::new());
            for (key, value, insert) in writes {
                if insert {
                    prop_assert_eq!(series.insert(key, value), map.insert(key, value));
                } else {
                    prop_assert_eq!(*series.get_or_insert_with(key, || value), *map.entry(key).or_insert(value));
                }
            }
            prop_assert!(series.iter().eq(map.iter()));
            prop_assert_eq!(series.last(), map.last_key_value());
            prop_assert!((0..13).all(|k| series.get(&k) == map.get(&k)));
            prop_assert!(series.range(from, to).eq(map.iter().filter(|(k, _)| (from..=to).contains(*k))));
            let text = serde_json::to_string(&series).unwrap();
            prop_assert_eq!(&text, &serde_json::to_string(&map).unwrap());
            prop_assert_eq!(serde_json::from_str::<Series<u32, u16>>(&text).unwrap(), series);
        }
    }
}
