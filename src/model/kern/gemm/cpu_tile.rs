//! Register tiles: a few rows by 16 columns of the result, kept in registers over a block of `k`.

use super::super::simd::{Isa, W16};

/// Columns of a panel.
pub const NR: usize = 16;

/// One register tile: `c[mr, n] (+)= a[mr, k] b[k, 16]`, strides in floats; `ars` or `acs` is 1.
#[derive(Clone, Copy)]
pub struct Tile {
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
pub unsafe fn tile_rows<I: Isa>(t: &Tile) {
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
pub unsafe fn pair_rows<I: Isa>(t: &Tile, panel: usize) {
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
