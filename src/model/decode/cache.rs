//! The paged key/value cache of one engine.
//!
//! A page holds [`KEYS`] tokens of one sequence for all layers and key/value heads: keys transposed in
//! panels of 16, values in rows, heads padded to a multiple of 16. Forked sequences share pages until one
//! of them writes. Page boundaries are fixed positions, so attention goes through the same blocks in the
//! same order however the tokens arrived.

use std::collections::BTreeMap;

use super::super::config::ModelConfig;
use super::super::error::ModelError;
use super::super::kern::{Heads, KEYS, RopeTable};

/// A sequence in a [`Cache`]. Never reused within a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(u64);

#[derive(Debug, Clone, Default)]
struct Sequence {
    len: usize,
    pages: Vec<u32>,
}

/// Keys and values of the sequences of one engine.
#[derive(Debug)]
pub struct Cache {
    pub(super) heads: Heads,
    pub(super) rope: RopeTable,
    layers: usize,
    pages: Vec<Vec<f32>>,
    /// Sequences that hold each page.
    users: Vec<u32>,
    free: Vec<u32>,
    sequences: BTreeMap<SeqId, Sequence>,
    next: u64,
}

impl Cache {
    /// An empty cache for models of this shape.
    pub fn new(config: &ModelConfig) -> Self {
        let c = config;
        Cache {
            heads: Heads::new(c.num_attention_heads, c.num_key_value_heads, c.head_dim),
            rope: RopeTable::new(c.rope_periods(), c.rope_scaling.attention_factor()),
            layers: c.num_hidden_layers,
            pages: Vec::new(),
            users: Vec::new(),
            free: Vec::new(),
            sequences: BTreeMap::new(),
            next: 0,
        }
    }

    /// A new empty sequence.
    pub fn create(&mut self) -> SeqId {
        self.insert(Sequence::default())
    }

    fn insert(&mut self, s: Sequence) -> SeqId {
        self.next += 1;
        self.sequences.insert(SeqId(self.next), s);
        SeqId(self.next)
    }

    fn get(&self, seq: SeqId) -> Result<&Sequence, ModelError> {
        self.sequences.get(&seq).ok_or(ModelError::NoSequence(seq.0))
    }

    /// A copy of a sequence that shares its keys and values so far (no values are copied before one of the
    /// two writes into a shared page).
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, ModelError> {
        let copy = self.get(seq)?.clone();
        for page in &copy.pages {
            self.users[*page as usize] += 1;
        }
        Ok(self.insert(copy))
    }

    /// Forgets a sequence; pages that no other sequence shares are reused.
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn free(&mut self, seq: SeqId) -> Result<(), ModelError> {
        let s = self.sequences.remove(&seq).ok_or(ModelError::NoSequence(seq.0))?;
        for page in s.pages {
            self.release(page);
        }
        Ok(())
    }

    /// Shortens a sequence to its first `len` tokens (a shorter one stays as it is).
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), ModelError> {
        let s = self.sequences.get_mut(&seq).ok_or(ModelError::NoSequence(seq.0))?;
        s.len = s.len.min(len);
        let dropped = s.pages.split_off(s.len.div_ceil(KEYS));
        for page in dropped {
            self.release(page);
        }
        Ok(())
    }

    /// Tokens a sequence holds.
    ///
    /// # Errors
    /// [`ModelError::NoSequence`].
    pub fn len(&self, seq: SeqId) -> Result<usize, ModelError> {
        self.get(seq).map(|s| s.len)
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Bytes of keys and values that sequences hold now (shared ones once).
    pub fn bytes(&self) -> usize {
        (self.pages.len() - self.free.len()) * self.page_len() * size_of::<f32>()
    }

    /// Whether this cache was made for models of that shape.
    pub(super) fn fits(&self, c: &ModelConfig) -> bool {
        let h = Heads::new(c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let rope = self.rope.fits(&c.rope_periods(), c.rope_scaling.attention_factor());
        self.layers == c.num_hidden_layers && self.heads == h && rope
    }

    /// Pages of a sequence.
    pub(super) fn pages_of(&self, seq: SeqId) -> Result<&[u32], ModelError> {
        self.get(seq).map(|s| s.pages.as_slice())
    }

    /// Makes room for `more` tokens: pages exist, and those that will be written belong to `seq` alone. The
    /// length grows at once; the caller fills the positions.
    pub(super) fn extend(&mut self, seq: SeqId, more: usize) -> Result<(), ModelError> {
        let (len, held) = self.get(seq).map(|s| (s.len, s.pages.len()))?;
        if let Some(&last) = self.get(seq)?.pages.last()
            && !len.is_multiple_of(KEYS)
            && self.users[last as usize] > 1
        {
            let own = self.acquire();
            let source = std::mem::take(&mut self.pages[last as usize]);
            self.pages[own as usize].copy_from_slice(&source);
            self.pages[last as usize] = source;
            self.release(last);
            if let Some(page) = self.sequences.get_mut(&seq).and_then(|s| s.pages.last_mut()) {
                *page = own;
            }
        }
        for _ in held..(len + more).div_ceil(KEYS) {
            let page = self.acquire();
            if let Some(s) = self.sequences.get_mut(&seq) {
                s.pages.push(page);
            }
        }
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.len += more;
        }
        Ok(())
    }

    fn page_len(&self) -> usize {
        self.layers * self.heads.kv * 2 * KEYS * self.heads.width
    }

    fn acquire(&mut self) -> u32 {
        let page = self.free.pop().unwrap_or_else(|| {
            self.pages.push(vec![0.0; self.page_len()]);
            self.users.push(0);
            (self.pages.len() - 1) as u32
        });
        self.users[page as usize] = 1;
        page
    }

    fn release(&mut self, page: u32) {
        let users = &mut self.users[page as usize];
        *users -= 1;
        if *users == 0 {
            self.free.push(page);
        }
    }

    fn place(&self, layer: usize, head: usize) -> usize {
        (layer * self.heads.kv + head) * 2 * KEYS * self.heads.width
    }

    /// Keys `[KEYS / 16][width][16]` and values `[KEYS][width]` of a page.
    pub(super) fn block(&self, page: u32, layer: usize, head: usize) -> (&[f32], &[f32]) {
        let size = KEYS * self.heads.width;
        self.pages[page as usize][self.place(layer, head)..][..2 * size].split_at(size)
    }

    /// Writes one token's key and value (`width` floats each) at slot `at` of a page.
    pub(super) fn write(&mut self, page: u32, layer: usize, head: usize, at: usize, k: &[f32], v: &[f32]) {
        let (width, place) = (self.heads.width, self.place(layer, head));
        let (kt, vs) = self.pages[page as usize][place..][..2 * KEYS * width].split_at_mut(KEYS * width);
        let panel = &mut kt[at / 16 * 16 * width..][..16 * width];
        for (to, x) in panel[at % 16..].iter_mut().step_by(16).zip(k) {
            *to = *x;
        }
        vs[at * width..(at + 1) * width].copy_from_slice(v);
    }
}
