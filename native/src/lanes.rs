//! The eight accumulators of XXH3 in vector registers, and the three steps on them.

/// Bytes that are folded into the accumulators at once.
pub const STRIPE: usize = 64;

/// 64 bytes in registers. The methods use the instructions that the type is named after: call them
/// only from functions that enable those.
pub trait Lanes: Copy {
    unsafe fn new(start: &[u64; 8]) -> Self;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    /// Writes past the cache; `to` is aligned to 64.
    unsafe fn stream(self, to: *mut u8);
    /// Streaming stores so far become visible before any store after this.
    unsafe fn fence();
    /// One stripe, with its piece of the secret.
    unsafe fn accumulate(self, data: Self, secret: Self) -> Self;
    /// After each block of stripes, with the last piece of the secret.
    unsafe fn scramble(self, secret: Self) -> Self;
    unsafe fn values(self) -> [u64; 8];
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, STRIPE};

    const PRIME32_1: i64 = 0x9E37_79B1;
    const UPPER_HALVES: i32 = 0b11_11_01_01;
    const SWAP_NEIGHBOURS: i32 = 0b01_00_11_10;

    #[derive(Clone, Copy)]
    pub struct Avx2(__m256i, __m256i);

    #[derive(Clone, Copy)]
    pub struct Avx512(__m512i);

    #[inline]
    #[target_feature(enable = "avx2")]
    fn accumulate_half(acc: __m256i, data: __m256i, secret: __m256i) -> __m256i {
        let key = _mm256_xor_si256(data, secret);
        let product = _mm256_mul_epu32(key, _mm256_shuffle_epi32::<UPPER_HALVES>(key));
        let swapped = _mm256_shuffle_epi32::<SWAP_NEIGHBOURS>(data);
        _mm256_add_epi64(product, _mm256_add_epi64(acc, swapped))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble_half(acc: __m256i, secret: __m256i) -> __m256i {
        let mixed = _mm256_xor_si256(acc, _mm256_srli_epi64::<47>(acc));
        let key = _mm256_xor_si256(mixed, secret);
        let prime = _mm256_set1_epi64x(PRIME32_1);
        let low = _mm256_mul_epu32(key, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(key), prime);
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        unsafe fn new(start: &[u64; 8]) -> Self {
            unsafe { Self::load(start.as_ptr().cast()) }
        }

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            unsafe {
                Self(
                    _mm256_loadu_si256(from.cast()),
                    _mm256_loadu_si256(from.add(STRIPE / 2).cast()),
                )
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            unsafe {
                _mm256_storeu_si256(to.cast(), self.0);
                _mm256_storeu_si256(to.add(STRIPE / 2).cast(), self.1);
            }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            unsafe {
                _mm256_stream_si256(to.cast(), self.0);
                _mm256_stream_si256(to.add(STRIPE / 2).cast(), self.1);
            }
        }

        #[inline(always)]
        unsafe fn fence() {
            unsafe { _mm_sfence() }
        }

        #[inline(always)]
        unsafe fn accumulate(self, data: Self, secret: Self) -> Self {
            unsafe {
                Self(
                    accumulate_half(self.0, data.0, secret.0),
                    accumulate_half(self.1, data.1, secret.1),
                )
            }
        }

        #[inline(always)]
        unsafe fn scramble(self, secret: Self) -> Self {
            unsafe { Self(scramble_half(self.0, secret.0), scramble_half(self.1, secret.1)) }
        }

        #[inline(always)]
        unsafe fn values(self) -> [u64; 8] {
            let mut values = [0; 8];
            unsafe { self.store(values.as_mut_ptr().cast()) };
            values
        }
    }

    impl Lanes for Avx512 {
        #[inline(always)]
        unsafe fn new(start: &[u64; 8]) -> Self {
            unsafe { Self::load(start.as_ptr().cast()) }
        }

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            unsafe { Self(_mm512_loadu_si512(from.cast())) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            unsafe { _mm512_storeu_si512(to.cast(), self.0) }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            unsafe { _mm512_stream_si512(to.cast(), self.0) }
        }

        #[inline(always)]
        unsafe fn fence() {
            unsafe { _mm_sfence() }
        }

        #[inline(always)]
        unsafe fn accumulate(self, data: Self, secret: Self) -> Self {
            unsafe {
                let key = _mm512_xor_si512(data.0, secret.0);
                let product = _mm512_mul_epu32(key, _mm512_shuffle_epi32::<UPPER_HALVES>(key));
                let swapped = _mm512_shuffle_epi32::<SWAP_NEIGHBOURS>(data.0);
                Self(_mm512_add_epi64(product, _mm512_add_epi64(self.0, swapped)))
            }
        }

        #[inline(always)]
        unsafe fn scramble(self, secret: Self) -> Self {
            unsafe {
                let mixed = _mm512_xor_si512(self.0, _mm512_srli_epi64::<47>(self.0));
                let key = _mm512_xor_si512(mixed, secret.0);
                let prime = _mm512_set1_epi64(PRIME32_1);
                let low = _mm512_mul_epu32(key, prime);
                let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(key), prime);
                Self(_mm512_add_epi64(low, _mm512_slli_epi64::<32>(high)))
            }
        }

        #[inline(always)]
        unsafe fn values(self) -> [u64; 8] {
            let mut values = [0; 8];
            unsafe { self.store(values.as_mut_ptr().cast()) };
            values
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};
