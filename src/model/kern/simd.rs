//! Vectors of 8 and 16 floats on AVX2, AVX-512 and plain Rust, with the same results bit for bit.
//!
//! Every kernel is written once, generic over [`Isa`], and compiled for each instruction set by the
//! `dispatch!` macro. Equal bits hold because all sets do the same operations in the same order per lane:
//! reductions always run over 8 lanes, products are always fused. The plain path calls `fmaf`, which is
//! slow on x86 without FMA but exact.

/// Which instruction set the kernels use. A value other than [`Level::PORTABLE`] exists only when the
/// processor supports it, so holding one is the proof that calling those kernels is sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(pub(super) Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Plain Rust.
    pub const PORTABLE: Level = Level(Kind::Portable);

    /// Every level this processor supports, slowest first.
    pub fn available() -> Vec<Level> {
        #[allow(unused_mut)]
        let mut found = vec![Level::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            found.push(Level(Kind::Avx2));
            if is_x86_feature_detected!("avx512f") {
                found.push(Level(Kind::Avx512));
            }
        }
        found
    }

    /// The fastest level this processor supports.
    pub fn detect() -> Level {
        Self::available().pop().unwrap_or(Level::PORTABLE)
    }
}

/// Eight floats. All methods are unsafe because they may only run where the instruction set exists and
/// pointers must be valid for eight floats.
pub(super) trait V8: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn add(self, o: Self) -> Self;
    unsafe fn sub(self, o: Self) -> Self;
    unsafe fn mul(self, o: Self) -> Self;
    unsafe fn div(self, o: Self) -> Self;
    /// `self > o ? self : o`, so a NaN on the right is kept.
    unsafe fn max(self, o: Self) -> Self;
    /// `self < o ? self : o`.
    unsafe fn min(self, o: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// `c - self * b`, rounded once.
    unsafe fn fnma(self, b: Self, c: Self) -> Self;
    /// To the nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// 2 to the power of an integral value in -126..=127.
    unsafe fn pow2(self) -> Self;
    /// Lanes of `self` where `x > t`, else 0.
    unsafe fn keep_above(self, x: Self, t: Self) -> Self;
    unsafe fn array(self) -> [f32; 8];

    /// The first `n <= 8` floats at `p`, other lanes `fill`.
    #[inline(always)]
    unsafe fn load_n(p: *const f32, n: usize, fill: f32) -> Self {
        unsafe {
            if n == 8 {
                Self::load(p)
            } else {
                let mut t = [fill; 8];
                for (i, t) in t.iter_mut().enumerate().take(n) {
                    *t = *p.add(i);
                }
                Self::load(t.as_ptr())
            }
        }
    }

    /// Stores the first `n <= 8` lanes.
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, n: usize) {
        unsafe {
            if n == 8 {
                self.store(p);
            } else {
                for (i, t) in self.array().iter().enumerate().take(n) {
                    *p.add(i) = *t;
                }
            }
        }
    }

    /// Sum of the lanes in a fixed order.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let a = unsafe { self.array() };
        ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]))
    }

    /// Largest lane (NaN lanes are passed over).
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let a = unsafe { self.array() };
        let mut m = a[0];
        for x in a {
            m = if x > m { x } else { m };
        }
        m
    }

    /// `e^x` within 0.7 ulp for -87.33..88.37, clamped outside; NaN stays NaN. (Cephes polynomial.)
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        unsafe {
            macro_rules! s {
                ($v:expr) => {
                    Self::splat($v)
                };
            }
            let x = s!(88.37).min(s!(-87.33).max(self));
            let n = x.mul(s!(std::f32::consts::LOG2_E)).round();
            let r = n.fnma(s!(-2.121_944_4e-4), n.fnma(s!(0.693_359_4), x));
            let mut p = s!(1.987_569_2e-4);
            p = p.fma(r, s!(1.398_2e-3));
            p = p.fma(r, s!(8.333_452e-3));
            p = p.fma(r, s!(4.166_579_6e-2));
            p = p.fma(r, s!(0.166_666_65));
            p = p.fma(r, s!(0.5));
            p.fma(r.mul(r), r).add(s!(1.0)).mul(n.pow2())
        }
    }
}

/// Sixteen floats, for the matrix kernels.
pub(super) trait W16: Copy {
    unsafe fn zero() -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn splat(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn add(self, o: Self) -> Self;
    unsafe fn fma(self, b: Self, c: Self) -> Self;
}

/// An instruction set: its vectors and the rows of its matrix tile.
pub(super) trait Isa: Sized {
    type V: V8;
    type W: W16;
    /// Rows of a register tile (6 rows x 16 columns fill AVX2's 16 registers, 12 use AVX-512's 32).
    const MR: usize;
    unsafe fn prefetch(p: *const f32);
    /// One matrix tile, see [`super::gemm::tile_rows`]; a real function per set, so that its many unrolled
    /// variants exist once.
    unsafe fn tile(t: &super::gemm::Tile);
    /// Two tiles side by side, see [`super::gemm::pair_rows`].
    unsafe fn pair(t: &super::gemm::Tile, panel: usize) {
        // SAFETY: the caller's promise is passed on.
        unsafe { super::gemm::pair_rows::<Self>(t, panel) }
    }
    /// `dst[i * dst_stride + j] = src[j * src_stride + i]` for 8 x 8, written row by row: with a stride below 8
    /// a row overwrites the end of the one before.
    unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize);
}

/// Sum of products of two rows, over 2 x 8 lanes in a fixed order.
///
/// # Safety
/// Both pointers valid for `n` floats.
#[inline(always)]
pub(super) unsafe fn dot<I: Isa>(a: *const f32, b: *const f32, n: usize) -> f32 {
    unsafe {
        let (mut s0, mut s1) = (I::V::splat(0.0), I::V::splat(0.0));
        let mut j = 0;
        while j + 16 <= n {
            s0 = I::V::load(a.add(j)).fma(I::V::load(b.add(j)), s0);
            s1 = I::V::load(a.add(j + 8)).fma(I::V::load(b.add(j + 8)), s1);
            j += 16;
        }
        while j < n {
            let w = (n - j).min(8);
            s0 = I::V::load_n(a.add(j), w, 0.0).fma(I::V::load_n(b.add(j), w, 0.0), s0);
            j += 8;
        }
        s0.add(s1).sum()
    }
}

/// Plain Rust.
pub(super) struct Portable;

#[derive(Clone, Copy)]
pub(super) struct P8([f32; 8]);

macro_rules! lanes {
    ($a:expr, $b:expr, |$x:ident, $y:ident| $e:expr) => {{
        let (a, b) = ($a.0, $b.0);
        let mut o = [0.0f32; 8];
        for i in 0..8 {
            let ($x, $y) = (a[i], b[i]);
            o[i] = $e;
        }
        P8(o)
    }};
}

impl V8 for P8 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        P8([x; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        P8(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        lanes!(self, o, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        lanes!(self, o, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        lanes!(self, o, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        lanes!(self, o, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        lanes!(self, o, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn min(self, o: Self) -> Self {
        lanes!(self, o, |x, y| if x < y { x } else { y })
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        let mut o = c.0;
        for (i, o) in o.iter_mut().enumerate() {
            *o = self.0[i].mul_add(b.0[i], *o);
        }
        P8(o)
    }
    #[inline(always)]
    unsafe fn fnma(self, b: Self, c: Self) -> Self {
        let mut o = c.0;
        for (i, o) in o.iter_mut().enumerate() {
            *o = (-self.0[i]).mul_add(b.0[i], *o);
        }
        P8(o)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        lanes!(self, self, |x, _y| x.round_ties_even())
    }
    #[inline(always)]
    unsafe fn pow2(self) -> Self {
        // A NaN converts to 0 here and to i32::MIN on x86; either way NaN times the result is NaN.
        lanes!(self, self, |x, _y| f32::from_bits(((x as i32).wrapping_add(127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn keep_above(self, x: Self, t: Self) -> Self {
        let mut o = self.0;
        for (i, o) in o.iter_mut().enumerate() {
            *o = if x.0[i] > t.0[i] { *o } else { 0.0 };
        }
        P8(o)
    }
    #[inline(always)]
    unsafe fn array(self) -> [f32; 8] {
        self.0
    }
}

#[derive(Clone, Copy)]
pub(super) struct P16([f32; 16]);

impl W16 for P16 {
    #[inline(always)]
    unsafe fn zero() -> Self {
        P16([0.0; 16])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        P16(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self {
        P16([unsafe { *p }; 16])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { p.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        let mut r = self.0;
        for (i, r) in r.iter_mut().enumerate() {
            *r += o.0[i];
        }
        P16(r)
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        let mut r = c.0;
        for (i, r) in r.iter_mut().enumerate() {
            *r = self.0[i].mul_add(b.0[i], *r);
        }
        P16(r)
    }
}

impl Isa for Portable {
    type V = P8;
    type W = P16;
    const MR: usize = 6;
    #[inline(always)]
    unsafe fn prefetch(_p: *const f32) {}
    unsafe fn tile(t: &super::gemm::Tile) {
        // SAFETY: the caller's promise is passed on.
        unsafe { super::gemm::tile_rows::<Self>(t) }
    }
    #[inline(always)]
    unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the caller gives 8 x 8 readable and writable floats at these strides.
                unsafe { *dst.add(i * dst_stride + j) = *src.add(j * src_stride + i) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! SAFETY of every block here: the trait's contract (the set exists, pointers are valid) is what the
    //! intrinsics ask for.
    use super::super::gemm::{Tile, pair_rows, tile_rows};
    use super::{Isa, V8, W16};
    use std::arch::x86_64::*;

    pub(crate) struct Avx2;
    pub(crate) struct Avx512;

    #[derive(Clone, Copy)]
    pub(crate) struct A8(__m256);

    impl V8 for A8 {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            A8(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            A8(unsafe { _mm256_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, o: Self) -> Self {
            A8(unsafe { _mm256_add_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, o: Self) -> Self {
            A8(unsafe { _mm256_sub_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, o: Self) -> Self {
            A8(unsafe { _mm256_mul_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn div(self, o: Self) -> Self {
            A8(unsafe { _mm256_div_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn max(self, o: Self) -> Self {
            A8(unsafe { _mm256_max_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn min(self, o: Self) -> Self {
            A8(unsafe { _mm256_min_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            A8(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        unsafe fn fnma(self, b: Self, c: Self) -> Self {
            A8(unsafe { _mm256_fnmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        unsafe fn round(self) -> Self {
            A8(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }
        #[inline(always)]
        unsafe fn pow2(self) -> Self {
            unsafe {
                let i = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
                A8(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(i)))
            }
        }
        #[inline(always)]
        unsafe fn keep_above(self, x: Self, t: Self) -> Self {
            A8(unsafe { _mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_GT_OQ>(x.0, t.0)) })
        }
        #[inline(always)]
        unsafe fn array(self) -> [f32; 8] {
            let mut a = [0.0; 8];
            unsafe { _mm256_storeu_ps(a.as_mut_ptr(), self.0) };
            a
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct A16(__m256, __m256);

    impl W16 for A16 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { A16(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { A16(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn splat(p: *const f32) -> Self {
            unsafe {
                let x = _mm256_broadcast_ss(&*p);
                A16(x, x)
            }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn add(self, o: Self) -> Self {
            unsafe { A16(_mm256_add_ps(self.0, o.0), _mm256_add_ps(self.1, o.1)) }
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            unsafe { A16(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Z16(__m512);

    impl W16 for Z16 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            Z16(unsafe { _mm512_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Z16(unsafe { _mm512_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn splat(p: *const f32) -> Self {
            Z16(unsafe { _mm512_set1_ps(*p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, o: Self) -> Self {
            Z16(unsafe { _mm512_add_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            Z16(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }
    }

    #[inline(always)]
    unsafe fn transpose8(src: *const f32, ss: usize, dst: *mut f32, ds: usize) {
        unsafe {
            macro_rules! r {
                ($i:expr) => {
                    _mm256_loadu_ps(src.add($i * ss))
                };
            }
            let (r0, r1, r2, r3, r4, r5, r6, r7) = (r!(0), r!(1), r!(2), r!(3), r!(4), r!(5), r!(6), r!(7));
            let (t0, t1) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (t2, t3) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let (t4, t5) = (_mm256_unpacklo_ps(r4, r5), _mm256_unpackhi_ps(r4, r5));
            let (t6, t7) = (_mm256_unpacklo_ps(r6, r7), _mm256_unpackhi_ps(r6, r7));
            let (u0, u1) = (_mm256_shuffle_ps::<0x44>(t0, t2), _mm256_shuffle_ps::<0xee>(t0, t2));
            let (u2, u3) = (_mm256_shuffle_ps::<0x44>(t1, t3), _mm256_shuffle_ps::<0xee>(t1, t3));
            let (u4, u5) = (_mm256_shuffle_ps::<0x44>(t4, t6), _mm256_shuffle_ps::<0xee>(t4, t6));
            let (u6, u7) = (_mm256_shuffle_ps::<0x44>(t5, t7), _mm256_shuffle_ps::<0xee>(t5, t7));
            _mm256_storeu_ps(dst, _mm256_permute2f128_ps::<0x20>(u0, u4));
            _mm256_storeu_ps(dst.add(ds), _mm256_permute2f128_ps::<0x20>(u1, u5));
            _mm256_storeu_ps(dst.add(2 * ds), _mm256_permute2f128_ps::<0x20>(u2, u6));
            _mm256_storeu_ps(dst.add(3 * ds), _mm256_permute2f128_ps::<0x20>(u3, u7));
            _mm256_storeu_ps(dst.add(4 * ds), _mm256_permute2f128_ps::<0x31>(u0, u4));
            _mm256_storeu_ps(dst.add(5 * ds), _mm256_permute2f128_ps::<0x31>(u1, u5));
            _mm256_storeu_ps(dst.add(6 * ds), _mm256_permute2f128_ps::<0x31>(u2, u6));
            _mm256_storeu_ps(dst.add(7 * ds), _mm256_permute2f128_ps::<0x31>(u3, u7));
        }
    }

    impl Isa for Avx2 {
        type V = A8;
        type W = A16;
        const MR: usize = 6;
        #[inline(always)]
        unsafe fn prefetch(p: *const f32) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
        #[target_feature(enable = "avx2,fma")]
        unsafe fn tile(t: &Tile) {
            unsafe { tile_rows::<Self>(t) }
        }
        #[inline(always)]
        unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            unsafe { transpose8(src, src_stride, dst, dst_stride) }
        }
    }

    impl Isa for Avx512 {
        type V = A8;
        type W = Z16;
        const MR: usize = 12;
        #[inline(always)]
        unsafe fn prefetch(p: *const f32) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
        #[target_feature(enable = "avx512f,avx2,fma")]
        unsafe fn tile(t: &Tile) {
            unsafe { tile_rows::<Self>(t) }
        }
        #[target_feature(enable = "avx512f,avx2,fma")]
        unsafe fn pair(t: &Tile, panel: usize) {
            unsafe { pair_rows::<Self>(t, panel) }
        }
        #[inline(always)]
        unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            unsafe { transpose8(src, src_stride, dst, dst_stride) }
        }
    }
}

/// Compiles a kernel generic over [`Isa`] for every instruction set and picks one by [`Level`]:
/// `dispatch! { unsafe fn name(arg: Type, ...) = generic }`. The kernel must be `#[inline(always)]`.
macro_rules! dispatch {
    ($(#[$meta:meta])* unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name(level: $crate::model::kern::simd::Level, $($arg: $ty),*) {
            use $crate::model::kern::simd::Kind;
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::model::kern::simd::{Avx2, Avx512};
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2($($arg: $ty),*) {
                    unsafe { $generic::<Avx2>($($arg),*) }
                }
                #[target_feature(enable = "avx512f,avx2,fma")]
                unsafe fn avx512($($arg: $ty),*) {
                    unsafe { $generic::<Avx512>($($arg),*) }
                }
                // SAFETY: a level other than Portable exists only where the processor has the set; the
                // rest is the kernel's own contract, passed on to the caller.
                match level.0 {
                    Kind::Avx2 => return unsafe { avx2($($arg),*) },
                    Kind::Avx512 => return unsafe { avx512($($arg),*) },
                    Kind::Portable => {}
                }
            }
            let _ = Kind::Portable;
            let _ = level;
            // SAFETY: the kernel's own contract, passed on to the caller.
            unsafe { $generic::<$crate::model::kern::simd::Portable>($($arg),*) }
        }
    };
}
pub(super) use dispatch;

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(always)]
    unsafe fn exp_rows<I: Isa>(x: *const f32, y: *mut f32, n: usize) {
        for i in (0..n).step_by(8) {
            // SAFETY: n is a multiple of 8 and both slices hold n floats.
            unsafe { I::V::load(x.add(i)).exp().store(y.add(i)) };
        }
    }
    dispatch! { unsafe fn exp(x: *const f32, y: *mut f32, n: usize) = exp_rows }

    #[test]
    fn exp_is_within_one_ulp_of_f64_and_equal_on_every_level() {
        let x: Vec<f32> = (0..80_000).map(|i| -87.0 + i as f32 * 0.002_187).collect();
        let mut first: Option<Vec<f32>> = None;
        for level in Level::available() {
            let mut y = vec![0.0; x.len()];
            // SAFETY: 80,000 is a multiple of 8.
            unsafe { exp(level, x.as_ptr(), y.as_mut_ptr(), x.len()) };
            for (x, y) in x.iter().zip(&y) {
                let want = f64::from(*x).exp();
                let ulp = f64::from(f32::EPSILON) * want;
                assert!((f64::from(*y) - want).abs() <= ulp, "{level:?}: exp({x}) = {y}, want {want}");
            }
            assert_eq!(first.get_or_insert_with(|| y.clone()), &y, "{level:?}");
        }
        let mut y = [0.0; 8];
        let x = [f32::NAN, f32::NEG_INFINITY, -200.0, 0.0, 200.0, f32::INFINITY, -0.0, 1.0];
        // SAFETY: eight floats.
        unsafe { exp(Level::detect(), x.as_ptr(), y.as_mut_ptr(), 8) };
        assert!(y[0].is_nan() && y[1] < 1.3e-38 && y[2] < 1.3e-38 && y[4].is_finite() && y[5].is_finite());
        assert_eq!((y[3], y[6]), (1.0, 1.0));
    }
}
