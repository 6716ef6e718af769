//! The memory layouts of a product: `B` in panels of 16 columns, a block of `A` in strips of interleaved rows.

use super::super::simd::{Isa, W16, dispatch};
use super::super::{Exec, Shared};
use super::Mat;
use super::cpu_tile::NR;

/// Depth of a block: 16 columns of 256 floats (16 KiB) stay in the first-level cache.
pub const KC: usize = 256;

/// A `k x n` matrix packed for the right side of a product.
#[derive(Debug, Clone, Copy)]
pub struct Packed<'a> {
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) data: &'a [f32],
}

/// An owned [`Packed`].
#[derive(Debug, Clone, Default)]
pub struct PackedBuf {
    k: usize,
    n: usize,
    data: Vec<f32>,
}

pub fn padded(n: usize) -> usize {
    n.div_ceil(NR) * NR
}

impl PackedBuf {
    /// Packs `b` (`k x n`), reusing the memory; columns are padded with zeros to a multiple of 16.
    pub fn pack(&mut self, exec: Exec, k: usize, n: usize, b: Mat<'_>) {
        b.check(k, n);
        (self.k, self.n) = (k, n);
        let size = k * padded(n);
        if self.data.len() < size {
            self.data.clear();
            self.data.resize(size, 0.0);
        }
        let out = Shared::new(&mut self.data);
        let (panels, blocks) = (n.div_ceil(NR), k.div_ceil(KC));
        exec.each(panels * blocks, |t| {
            let (kb, j) = (t / panels, t % panels);
            let kc = (k - kb * KC).min(KC);
            let cols = (n - j * NR).min(NR);
            // SAFETY: the source was checked against its slice; panels are disjoint parts of `data`.
            unsafe {
                let src = b.data.as_ptr().add(kb * KC * b.rs + j * NR * b.cs);
                pack_panel(exec.level(), kc, cols, src, b.rs, b.cs, out.at(kb * KC * padded(n) + j * NR * kc));
            }
        });
    }

    /// The packed matrix.
    pub fn view(&self) -> Packed<'_> {
        Packed { k: self.k, n: self.n, data: &self.data }
    }

    /// Copies column `j` into `out` (`k` values): a row of the transposed original.
    pub fn column(&self, j: usize, out: &mut [f32]) {
        for kb in 0..self.k.div_ceil(KC) {
            let kc = (self.k - kb * KC).min(KC);
            let at = kb * KC * padded(self.n) + j / NR * NR * kc + j % NR;
            for p in 0..kc {
                out[kb * KC + p] = self.data[at + p * NR];
            }
        }
    }
}

#[inline(always)]
pub unsafe fn pack_panel_k<I: Isa>(kc: usize, cols: usize, b: *const f32, rs: usize, cs: usize, out: *mut f32) {
    unsafe {
        if cols < NR {
            for p in 0..kc {
                for j in 0..NR {
                    *out.add(p * NR + j) = if j < cols { *b.add(p * rs + j * cs) } else { 0.0 };
                }
            }
        } else if cs == 1 {
            for p in 0..kc {
                I::W::load(b.add(p * rs)).store(out.add(p * NR));
            }
        } else {
            let full = if rs == 1 { kc / 8 * 8 } else { 0 };
            for p in (0..full).step_by(8) {
                I::transpose8(b.add(p), cs, out.add(p * NR), NR);
                I::transpose8(b.add(p + 8 * cs), cs, out.add(p * NR + 8), NR);
            }
            for p in full..kc {
                for j in 0..NR {
                    *out.add(p * NR + j) = *b.add(p * rs + j * cs);
                }
            }
        }
    }
}
dispatch! { unsafe fn pack_panel(kc: usize, cols: usize, b: *const f32, rs: usize, cs: usize, out: *mut f32) = pack_panel_k }

/// Left block of a task.
#[derive(Clone, Copy)]
pub struct Left {
    pub(super) m: usize,
    pub(super) kc: usize,
    pub(super) a: *const f32,
    pub(super) rs: usize,
    pub(super) cs: usize,
}

/// Floats between strips of a packed left block: `I::MR` interleaved rows, and slack for whole vectors.
pub const fn strip(kc: usize, mr: usize) -> usize {
    kc * mr + NR
}

/// Copies the left block into strips of `I::MR` interleaved rows, which the tiles read front to back. Whole
/// vectors are written: what runs over an entry is overwritten by the next one, or falls into the slack.
#[inline(always)]
pub unsafe fn pack_left<I: Isa>(l: Left, out: *mut f32) {
    unsafe {
        let mut i = 0;
        while i < l.m {
            let mr = (l.m - i).min(I::MR);
            let (src, dst) = (l.a.add(i * l.rs), out.add(i / I::MR * strip(l.kc, I::MR)));
            let mut done = 0;
            if l.rs == 1 && i + NR <= l.m {
                while done < l.kc {
                    I::W::load(src.add(done * l.cs)).store(dst.add(done * I::MR));
                    done += 1;
                }
            } else if l.cs == 1 && mr == I::MR && i + 8 <= l.m {
                while done + 8 <= l.kc {
                    I::transpose8(src.add(done), l.rs, dst.add(done * I::MR), I::MR);
                    if I::MR == 12 {
                        I::transpose8(src.add(done + 4 * l.rs), l.rs, dst.add(done * 12 + 4), 12);
                    }
                    done += 8;
                }
            }
            for p in done..l.kc {
                for r in 0..mr {
                    *dst.add(p * mr + r) = *src.add(r * l.rs + p * l.cs);
                }
            }
            i += I::MR;
        }
    }
}

/// Room for a copied left block of `m` rows on any instruction set.
pub fn left_room(m: usize) -> usize {
    m.div_ceil(6) * strip(KC, 6).max(strip(KC, 12))
}
