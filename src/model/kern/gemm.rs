//! Matrix products in f32 on packed weights.
//!
//! `C (+)= A B`. `B` is packed into panels of 16 columns, `k` in blocks of [`KC`]. Every element of `C` is
//! the same sequence of fused multiply-adds over `k` whatever the number of rows, the tile it falls in, the
//! instruction set or the thread that computes it: so a row's result depends on that row only (batch
//! invariance), and any number of threads gives the same bits. Work is split over rows and columns, never
//! over `k`.

use std::cell::RefCell;

use super::simd::{Isa, W16, dispatch};
use super::{Exec, Shared};

/// Columns of a panel.
pub(super) const NR: usize = 16;
/// Depth of a block: 16 columns of 256 floats (16 KiB) stay in the first-level cache.
pub(super) const KC: usize = 256;
/// Rows of a task: a multiple of 6 and 12.
const MC: usize = 192;
/// Columns of a task.
const NC: usize = 512;
/// One register tile: `c[mr, n] (+)= a[mr, k] b[k, 16]`, strides in floats; `ars` or `acs` is 1.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub mr: usize,
    pub k: usize,
    pub a: *const f32,
    pub ars: usize,
    pub acs: usize,
    pub b: *const f32,
    pub brs: usize,
    pub c: *mut f32,
    pub ldc: usize,
    /// Columns stored, at most 16; all 16 of `b` are read.
    pub n: usize,
    /// Add to `c` instead of overwriting it.
    pub acc: bool,
    /// Memory to bring near while computing (one cache line per four steps), or null.
    pub next: *const f32,
}

/// Runs a tile of 1..=`I::MR` rows.
///
/// # Safety
/// Pointers valid for the extents the fields describe; the instruction set exists.
#[inline(always)]
pub(super) unsafe fn tile_rows<I: Isa>(t: &Tile) {
    unsafe {
        match t.mr {
            12 if I::MR >= 12 => tile::<I, 12>(t),
            11 if I::MR >= 12 => tile::<I, 11>(t),
            10 if I::MR >= 12 => tile::<I, 10>(t),
            9 if I::MR >= 12 => tile::<I, 9>(t),
            8 if I::MR >= 12 => tile::<I, 8>(t),
            7 if I::MR >= 12 => tile::<I, 7>(t),
            6 => tile::<I, 6>(t),
            5 => tile::<I, 5>(t),
            4 => tile::<I, 4>(t),
            3 => tile::<I, 3>(t),
            2 => tile::<I, 2>(t),
            _ => tile::<I, 1>(t),
        }
    }
}

/// Runs two neighbouring tiles of packed rows.
///
/// # Safety
/// As [`tile_rows`], for 32 whole columns.
#[inline(always)]
pub(super) unsafe fn pair_rows<I: Isa>(t: &Tile, panel: usize) {
    unsafe {
        match t.mr {
            12 if I::MR >= 12 => pair::<I, 12>(t, panel),
            8 if I::MR >= 12 => pair::<I, 8>(t, panel),
            _ => {
                let next = if t.next.is_null() { t.next } else { t.next.wrapping_add(panel) };
                I::tile(t);
                I::tile(&Tile { b: t.b.add(panel), c: t.c.add(NR), next, ..*t });
            }
        }
    }
}

#[inline(always)]
unsafe fn tile<I: Isa, const MR: usize>(t: &Tile) {
    unsafe {
        let mut r = [I::W::zero(); MR];
        for i in 0..MR {
            I::prefetch(t.c.add(i * t.ldc));
        }
        let (mut b, mut next) = (t.b, t.next);
        macro_rules! step {
            ($row:expr) => {
                let bv = I::W::load(b);
                for i in 0..MR {
                    r[i] = I::W::splat($row(i)).fma(bv, r[i]);
                }
                b = b.wrapping_add(t.brs);
            };
        }
        // Two ways to address the left side, each within what one instruction can add up (otherwise the
        // address arithmetic, not the multiplication, sets the pace: measured 50 against 160 GFLOP/s).
        if t.ars == 1 {
            let mut a = t.a;
            macro_rules! column {
                () => {
                    step!(|i| a.wrapping_add(i));
                    a = a.wrapping_add(t.acs);
                };
            }
            for _ in 0..t.k / 4 {
                if !next.is_null() {
                    I::prefetch(next);
                    next = next.wrapping_add(16);
                }
                column!();
                column!();
                column!();
                column!();
            }
            for _ in 0..t.k % 4 {
                column!();
            }
        } else {
            let mut a = [t.a, t.a.wrapping_add(4 * t.ars), t.a.wrapping_add(8 * t.ars)];
            macro_rules! row {
                ($o:expr) => {
                    step!(|i: usize| a[i / 4].wrapping_add(i % 4 * t.ars + $o));
                };
            }
            for _ in 0..t.k / 4 {
                if !next.is_null() {
                    I::prefetch(next);
                    next = next.wrapping_add(16);
                }
                row!(0);
                row!(1);
                row!(2);
                row!(3);
                for a in &mut a {
                    *a = a.wrapping_add(4);
                }
            }
            for _ in 0..t.k % 4 {
                row!(0);
                for a in &mut a {
                    *a = a.wrapping_add(1);
                }
            }
        }
        // Short loops that unroll completely: an index that stays variable would keep `r` in memory.
        if t.n == NR {
            if t.acc {
                for i in 0..MR {
                    r[i] = r[i].add(I::W::load(t.c.add(i * t.ldc)));
                }
            }
            for i in 0..MR {
                r[i].store(t.c.add(i * t.ldc));
            }
        } else {
            let mut rows = [0.0f32; NR * 12];
            for i in 0..MR {
                r[i].store(rows.as_mut_ptr().add(i * NR));
            }
            for (i, row) in rows.chunks_exact(NR).enumerate().take(MR) {
                let p = t.c.add(i * t.ldc);
                for (j, x) in row.iter().enumerate().take(t.n) {
                    *p.add(j) = if t.acc { *x + *p.add(j) } else { *x };
                }
            }
        }
    }
}

/// Two neighbouring tiles at once, with `b` and, `panel` floats further, the next panel: a value of `a` is loaded once for
/// 32 columns, so that with AVX-512 the multiplications set the pace and no longer the loads (13 for 12 of them in a tile of
/// 16 columns). Each element is the same sequence of operations as in [`tile`].
#[inline(always)]
unsafe fn pair<I: Isa, const MR: usize>(t: &Tile, panel: usize) {
    unsafe {
        let mut r = [[I::W::zero(); 2]; MR];
        for i in 0..MR {
            I::prefetch(t.c.add(i * t.ldc));
            I::prefetch(t.c.add(i * t.ldc + NR));
        }
        let (mut a, mut b, mut next) = (t.a, t.b, t.next);
        macro_rules! step {
            () => {
                let (b0, b1) = (I::W::load(b), I::W::load(b.wrapping_add(panel)));
                for i in 0..MR {
                    let av = I::W::splat(a.wrapping_add(i));
                    r[i] = [av.fma(b0, r[i][0]), av.fma(b1, r[i][1])];
                }
                a = a.wrapping_add(t.acs);
                b = b.wrapping_add(t.brs);
            };
        }
        for _ in 0..t.k / 4 {
            if !next.is_null() {
                I::prefetch(next);
                I::prefetch(next.wrapping_add(panel));
                next = next.wrapping_add(16);
            }
            step!();
            step!();
            step!();
            step!();
        }
        for _ in 0..t.k % 4 {
            step!();
        }
        for i in 0..MR {
            for (j, r) in r[i].into_iter().enumerate() {
                let c = t.c.add(i * t.ldc + j * NR);
                let sum = if t.acc { r.add(I::W::load(c)) } else { r };
                sum.store(c);
            }
        }
    }
}

/// A `k x n` matrix packed for the right side of a product.
#[derive(Debug, Clone, Copy)]
pub struct Packed<'a> {
    k: usize,
    n: usize,
    data: &'a [f32],
}

/// An owned [`Packed`].
#[derive(Debug, Clone, Default)]
pub struct PackedBuf {
    k: usize,
    n: usize,
    data: Vec<f32>,
}

/// A matrix in memory: element (row, column) at `row * rs + column * cs`.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rs: usize,
    cs: usize,
}

impl<'a> Mat<'a> {
    /// Row-major with `cols` columns.
    pub fn rows(data: &'a [f32], cols: usize) -> Self {
        Mat { data, rs: cols, cs: 1 }
    }

    /// The transpose of a row-major matrix with `cols` columns.
    pub fn transposed(data: &'a [f32], cols: usize) -> Self {
        Mat { data, rs: 1, cs: cols }
    }

    /// Row-major rows that start `stride` apart.
    pub fn strided(data: &'a [f32], stride: usize) -> Self {
        Mat { data, rs: stride, cs: 1 }
    }

    fn check(&self, rows: usize, cols: usize) {
        if rows > 0 && cols > 0 {
            assert!(
                (rows - 1) * self.rs + (cols - 1) * self.cs < self.data.len(),
                "invariant: matrix inside its slice"
            );
        }
    }
}

fn padded(n: usize) -> usize {
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
unsafe fn pack_panel_k<I: Isa>(kc: usize, cols: usize, b: *const f32, rs: usize, cs: usize, out: *mut f32) {
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
struct Left {
    m: usize,
    kc: usize,
    a: *const f32,
    rs: usize,
    cs: usize,
}

thread_local! {
    static LEFT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static RIGHT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

fn grown(v: &mut Vec<f32>, n: usize) -> *mut f32 {
    if v.len() < n {
        v.resize(n, 0.0);
    }
    v.as_mut_ptr()
}

/// Floats between strips of a packed left block: `I::MR` interleaved rows, and slack for whole vectors.
const fn strip(kc: usize, mr: usize) -> usize {
    kc * mr + NR
}

/// Copies the left block into strips of `I::MR` interleaved rows, which the tiles read front to back. Whole
/// vectors are written: what runs over an entry is overwritten by the next one, or falls into the slack.
#[inline(always)]
unsafe fn pack_left<I: Isa>(l: Left, out: *mut f32) {
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

/// All tiles of one block: `c[m, n] (+)= left right`, `right` packed.
#[inline(always)]
unsafe fn block<I: Isa>(l: Left, packed: bool, n: usize, right: *const f32, c: *mut f32, ldc: usize, acc: bool) {
    unsafe {
        let thin = l.m <= 4 * I::MR;
        let panel = NR * l.kc;
        let mut j = 0;
        while j < n {
            let b = right.add(j * l.kc);
            let columns = if packed && I::MR >= 12 && n - j >= 2 * NR { 2 * NR } else { NR };
            // With few rows the weights stream from memory: fetch the next panels while using these.
            let mut next = if thin { b.wrapping_add(columns / NR * panel) } else { std::ptr::null() };
            let mut i = 0;
            while i < l.m {
                let mr = (l.m - i).min(I::MR);
                let (a, ars, acs) = if packed {
                    (l.a.add(i / I::MR * strip(l.kc, I::MR)), 1, mr)
                } else {
                    (l.a.add(i * l.rs), l.rs, l.cs)
                };
                let n = (n - j).min(NR);
                let t = Tile { mr, k: l.kc, a, ars, acs, b, brs: NR, c: c.add(i * ldc + j), ldc, n, acc, next };
                if columns == NR {
                    I::tile(&t);
                } else {
                    I::pair(&t, panel);
                }
                i += I::MR;
                if thin {
                    next = next.wrapping_add(l.kc / 4 * 16);
                }
            }
            j += columns;
        }
    }
}

/// `c[m, n] (+)= a b` for columns `j..j + n` of a packed `b` of padded width `npad`; `buf` holds the left copy.
#[inline(always)]
unsafe fn stripe_k<I: Isa>(
    l: Left,
    k: usize,
    j: usize,
    n: usize,
    npad: usize,
    right: *const f32,
    c: *mut f32,
    ldc: usize,
    acc: bool,
    buf: *mut f32,
) {
    unsafe {
        // Interleaved rows are read fastest; for one tile of rows or few columns the copy costs more.
        let pack = l.cs != 1 || (l.m > I::MR && n >= 4 * NR);
        for kb in 0..k.div_ceil(KC) {
            let kc = (k - kb * KC).min(KC);
            let mut left = Left { kc, a: l.a.add(kb * KC * l.cs), ..l };
            if pack {
                pack_left::<I>(left, buf);
                left.a = buf;
            }
            block::<I>(left, pack, n, right.add(kb * KC * npad + j * kc), c, ldc, acc || kb > 0);
        }
    }
}
dispatch! {
    unsafe fn stripe(l: Left, k: usize, j: usize, n: usize, npad: usize, right: *const f32, c: *mut f32, ldc: usize,
        acc: bool, buf: *mut f32) = stripe_k
}

/// Room for a copied left block of `m` rows on any instruction set.
fn left_room(m: usize) -> usize {
    m.div_ceil(6) * strip(KC, 6).max(strip(KC, 12))
}

/// `c[m, n] (+)= a[m, k] b[k, n]`; rows of `c` start `ldc` apart; `acc` adds to `c`.
pub fn gemm(exec: Exec, m: usize, a: Mat<'_>, b: Packed<'_>, c: &mut [f32], ldc: usize, acc: bool) {
    let (k, n) = (b.k, b.n);
    if m == 0 || n == 0 {
        return;
    }
    a.check(m, k);
    assert!(ldc >= n && (m - 1) * ldc + n <= c.len(), "invariant: result inside its slice");
    assert!(b.data.len() >= k * padded(n), "invariant: packed data complete");
    let c = Shared::new(c);
    let tasks_n = n.div_ceil(NC);
    exec.each(m.div_ceil(MC) * tasks_n, |t| {
        let (i, j) = (t / tasks_n * MC, t % tasks_n * NC);
        LEFT.with_borrow_mut(|buf| {
            let rows = (m - i).min(MC);
            let buf = grown(buf, left_room(rows));
            // SAFETY: extents were checked above; tasks write disjoint tiles of `c`; `buf` has left_room.
            unsafe {
                let left = Left { m: rows, kc: 0, a: a.data.as_ptr().add(i * a.rs), rs: a.rs, cs: a.cs };
                let (right, out) = (b.data.as_ptr(), c.at(i * ldc + j));
                stripe(exec.level(), left, k, j, (n - j).min(NC), padded(n), right, out, ldc, acc, buf);
            }
        });
    });
}

#[inline(always)]
unsafe fn outer_k<I: Isa>(
    l: Left,
    k: usize,
    n: usize,
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
    buf: *mut f32,
    right: *mut f32,
) {
    unsafe {
        for kb in 0..k.div_ceil(KC) {
            let kc = (k - kb * KC).min(KC);
            let mut j = 0;
            while j < n {
                let src = b.add(kb * KC * ldb + j);
                pack_panel_k::<I>(kc, (n - j).min(NR), src, ldb, 1, right.add(j * kc));
                j += NR;
            }
            pack_left::<I>(Left { kc, a: l.a.add(kb * KC * l.cs), ..l }, buf);
            block::<I>(Left { kc, a: buf, ..l }, true, n, right, c, ldc, true);
        }
    }
}
dispatch! {
    unsafe fn outer(l: Left, k: usize, n: usize, b: *const f32, ldb: usize, c: *mut f32, ldc: usize, buf: *mut f32,
        right: *mut f32) = outer_k
}

/// Weight gradient: `c[m, n] += a^T b` with `a [tokens, m]` (rows `lda` apart) and `b [tokens, n]` (rows
/// `ldb` apart), summed over tokens in blocks of 256 in rising order.
pub fn gemm_outer(
    exec: Exec,
    tokens: usize,
    (m, a, lda): (usize, &[f32], usize),
    (n, b, ldb): (usize, &[f32], usize),
    c: &mut [f32],
) {
    if m == 0 || n == 0 || tokens == 0 {
        return;
    }
    Mat::strided(a, lda).check(tokens, m);
    Mat::strided(b, ldb).check(tokens, n);
    assert!(m * n <= c.len(), "invariant: gradient inside its slice");
    let c = Shared::new(c);
    // Small gradients are cut finer so that every thread has work; tiles never change an element's bits.
    let (mut mt, mut nt) = (MC, 256);
    if exec.threads() > 1 && m.div_ceil(mt) * n.div_ceil(nt) < 4 * exec.threads() {
        (mt, nt) = (96, 128);
    }
    let tasks_n = n.div_ceil(nt);
    exec.each(m.div_ceil(mt) * tasks_n, |t| {
        let (i, j) = (t / tasks_n * mt, t % tasks_n * nt);
        let (rows, cols) = ((m - i).min(mt), (n - j).min(nt));
        LEFT.with_borrow_mut(|left| {
            RIGHT.with_borrow_mut(|right| {
                let left = grown(left, left_room(rows));
                let right = grown(right, padded(cols) * KC);
                // SAFETY: extents were checked above; tasks write disjoint tiles of `c`.
                unsafe {
                    let l = Left { m: rows, kc: 0, a: a.as_ptr().add(i), rs: 1, cs: lda };
                    outer(exec.level(), l, tokens, cols, b.as_ptr().add(j), ldb, c.at(i * n + j), n, left, right);
                }
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;
    use crate::world::draw;

    fn random(seed: u64, n: usize) -> Vec<f32> {
        let mut d = draw(seed, "gemm test", &[]);
        (0..n).map(|_| (d.unit() * 2.0 - 1.0) as f32).collect()
    }

    /// c (+)= a b in f64.
    fn reference(m: usize, k: usize, n: usize, a: impl Fn(usize, usize) -> f32, b: &[f32], c: &mut [f64]) {
        for i in 0..m {
            for j in 0..n {
                c[i * n + j] += (0..k).map(|p| f64::from(a(i, p)) * f64::from(b[p * n + j])).sum::<f64>();
            }
        }
    }

    const SHAPES: [(usize, usize, usize); 8] = [
        (1, 1, 1),
        (1, 300, 17),
        (5, 16, 16),
        (7, 13, 40),
        (12, 256, 32),
        (50, 256, 24),
        (70, 512, 48),
        (200, 300, 530),
    ];

    #[test]
    fn product_is_that_of_f64_for_any_shape_and_layout() {
        for (m, k, n) in SHAPES {
            let (a, b) = (random(1, m * k), random(2, k * n));
            let bt: Vec<f32> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
            let start = random(3, m * n);
            let mut want: Vec<f64> = start.iter().map(|v| f64::from(*v)).collect();
            reference(m, k, n, |i, p| a[i * k + p], &b, &mut want);
            let mut bits: Option<Vec<f32>> = None;
            for level in Level::available() {
                let exec = Exec::serial(level);
                for b in [Mat::rows(&b, n), Mat::transposed(&bt, k)] {
                    let mut packed = PackedBuf::default();
                    packed.pack(exec, k, n, b);
                    let mut c = start.clone();
                    gemm(exec, m, Mat::rows(&a, k), packed.view(), &mut c, n, true);
                    for (x, w) in c.iter().zip(&want) {
                        assert!((f64::from(*x) - w).abs() < 3e-6 * (k as f64).sqrt().max(4.0), "{m} {k} {n}: {x} {w}");
                    }
                    assert_eq!(bits.get_or_insert_with(|| c.clone()), &c, "{m} {k} {n} {level:?}");
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_batch() {
        let (m, k, n) = (64, 512, 40);
        let (a, b) = (random(4, m * k), random(5, k * n));
        for level in Level::available() {
            let exec = Exec::serial(level);
            let mut packed = PackedBuf::default();
            packed.pack(exec, k, n, Mat::rows(&b, n));
            let mut all = vec![0.0; m * n];
            gemm(exec, m, Mat::rows(&a, k), packed.view(), &mut all, n, false);
            for rows in [1, 2, 7, 32, 49] {
                let from = m - rows;
                let mut some = vec![9.0; rows * n];
                gemm(exec, rows, Mat::rows(&a[from * k..], k), packed.view(), &mut some, n, false);
                assert_eq!(some, all[from * n..], "{level:?} {rows}");
            }
            let mut row = vec![0.0; k];
            packed.column(37, &mut row);
            assert!((0..k).all(|p| row[p] == b[p * n + 37]));
        }
    }

    #[test]
    fn weight_gradient_is_that_of_f64_and_equal_on_any_number_of_threads() {
        for (m, tokens, n) in SHAPES {
            let (a, b) = (random(6, tokens * m), random(7, tokens * n));
            let start = random(8, m * n);
            let mut want: Vec<f64> = start.iter().map(|v| f64::from(*v)).collect();
            reference(m, tokens, n, |i, p| a[p * m + i], &b, &mut want);
            let mut bits: Option<Vec<f32>> = None;
            for level in Level::available() {
                for threads in [1, 2, 4] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let mut c = start.clone();
                    pool.install(|| gemm_outer(Exec::new(level, threads), tokens, (m, &a, m), (n, &b, n), &mut c));
                    for (x, w) in c.iter().zip(&want) {
                        let bound = 3e-6 * (tokens as f64).sqrt().max(4.0);
                        assert!((f64::from(*x) - w).abs() < bound, "{m} {tokens} {n}: {x} {w}");
                    }
                    assert_eq!(bits.get_or_insert_with(|| c.clone()), &c, "{level:?} {threads}");
                }
            }
        }
    }
}
