//! Products in blocks that fit the caches, on the calling thread or split over rows and columns of the result.

use std::cell::RefCell;

use super::super::simd::{Isa, dispatch};
use super::super::{Exec, Shared};
use super::Mat;
use super::cpu_pack::{KC, Left, Packed, left_room, pack_left, pack_panel_k, padded, strip};
use super::cpu_tile::{NR, Tile};

/// Rows of a task: a multiple of 6 and 12.
const MC: usize = 192;
/// Columns of a task.
const NC: usize = 512;

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
