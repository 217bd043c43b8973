//! XXH3-64 (seed 0) of bytes while they are copied: each is read once, and what goes into the
//! checksum is the register that was stored.
//!
//! After the XXH3 section of the xxHash specification (Yann Collet,
//! `doc/xxhash_spec.md` in the xxHash repository): 64-byte stripes are folded into eight 64-bit
//! accumulators, which are scrambled after every sixteenth stripe. Inputs of up to 240 bytes take
//! other paths there; those, and processors without AVX2, are left to `twox-hash`.
//!
//! Source or target may be shared memory that another process writes at the same time. So no byte
//! is read twice: a scribble during the copy can give wrong bytes, never a checksum that vouches
//! for other bytes than those that were copied.

use std::arch::asm;
use std::hash::Hasher;
use std::sync::OnceLock;

use crate::lanes::{Lanes, STRIPE};
use crate::skewed::Skewed;

const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;

const START: [u64; 8] =
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

/// Stripes between two scrambles: the secret moves on by eight bytes with each.
const STRIPES_PER_BLOCK: usize = (SECRET.len() - STRIPE) / 8;
/// Inputs up to this size are hashed by other means.
const SHORT: usize = 240;
/// Copies through `twox-hash` go in tiles that stay in the first-level cache.
const TILE: usize = 4096;

/// How the target is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Not at all: a checksum without a copy.
    None,
    /// Through the cache.
    Cached,
    /// Past the cache, which saves reading the target's lines first.
    Streaming,
}

/// The widest instructions that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => "avx512",
        }
    }

    /// All that this processor can run, the fastest last.
    pub fn available() -> Vec<Kernel> {
        #[allow(unused_mut)]
        let mut all = vec![Kernel::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                all.push(Kernel::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Kernel::Avx512);
            }
        }
        all
    }

    /// By its name, if this processor can run it.
    pub fn named(name: &str) -> Option<Kernel> {
        Kernel::available().into_iter().find(|kernel| kernel.name() == name)
    }

    /// The fastest one, looked up once.
    pub fn best() -> Kernel {
        static BEST: OnceLock<Kernel> = OnceLock::new();
        *BEST.get_or_init(|| *Kernel::available().last().expect("there is always a portable one"))
    }
}

/// Copies `length` bytes (unless `store` is `None`) and returns the XXH3-64 of what was copied.
///
/// # Safety
/// `source` is readable for `length` bytes; `target` is writable for as many unless `store` is
/// `None`, and does not overlap `source`. `kernel` is one that this processor has.
pub unsafe fn copy(
    kernel: Kernel,
    source: *const u8,
    target: *mut u8,
    length: usize,
    store: Store,
) -> u64 {
    unsafe {
        if length <= SHORT {
            return short(source, target, length, store);
        }
        match kernel {
            Kernel::Portable => portable(source, target, length, store),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => avx2(source, target, length, store),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => avx512(source, target, length, store),
        }
    }
}

/// The compiler may not take the bytes at `copied` for those that they were copied from, and read
/// those again: they may have changed.
#[inline(always)]
fn settle(copied: &mut [u8]) {
    unsafe { asm!("/* {0} */", in(reg) copied.as_mut_ptr(), options(nostack, preserves_flags)) }
}

unsafe fn short(source: *const u8, target: *mut u8, length: usize, store: Store) -> u64 {
    let mut bytes = [0u8; SHORT];
    unsafe {
        source.copy_to_nonoverlapping(bytes.as_mut_ptr(), length);
        settle(&mut bytes);
        if store != Store::None {
            target.copy_from_nonoverlapping(bytes.as_ptr(), length);
        }
    }
    twox_hash::XxHash3_64::oneshot(&bytes[..length])
}

unsafe fn portable(source: *const u8, target: *mut u8, length: usize, store: Store) -> u64 {
    let mut hasher = twox_hash::XxHash3_64::new();
    let mut tile = [0u8; TILE];
    let mut done = 0;
    while done < length {
        let step = TILE.min(length - done);
        unsafe {
            source.add(done).copy_to_nonoverlapping(tile.as_mut_ptr(), step);
            settle(&mut tile);
            if store != Store::None {
                target.add(done).copy_from_nonoverlapping(tile.as_ptr(), step);
            }
        }
        hasher.write(&tile[..step]);
        done += step;
    }
    hasher.finish()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(source: *const u8, target: *mut u8, length: usize, store: Store) -> u64 {
    unsafe { dispatch::<crate::lanes::Avx2>(source, target, length, store) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(source: *const u8, target: *mut u8, length: usize, store: Store) -> u64 {
    unsafe { dispatch::<crate::lanes::Avx512>(source, target, length, store) }
}

#[inline(always)]
unsafe fn dispatch<L: Lanes>(
    source: *const u8,
    target: *mut u8,
    length: usize,
    store: Store,
) -> u64 {
    unsafe {
        match store {
            Store::None => long::<L, NONE>(source, target, length),
            Store::Cached => long::<L, CACHED>(source, target, length),
            Store::Streaming => {
                let sum = if target.addr().is_multiple_of(STRIPE) {
                    long::<L, STREAMING>(source, target, length)
                } else {
                    long::<L, SKEWED>(source, target, length)
                };
                L::fence();
                sum
            }
        }
    }
}

const NONE: u8 = 0;
const CACHED: u8 = 1;
const STREAMING: u8 = 2;
const SKEWED: u8 = 3;

/// More than 240 bytes.
#[inline(always)]
unsafe fn long<L: Lanes, const STORE: u8>(
    source: *const u8,
    target: *mut u8,
    length: usize,
) -> u64 {
    // The last stripe ends where the input ends and may overlap the one before: these two go
    // through memory of our own, so that nothing is read twice.
    let whole = (length - 1) / STRIPE;
    let direct = whole - 1;
    unsafe {
        let secret = SECRET.as_ptr();
        let mut lanes = L::new(&START);
        let mut skewed = Skewed::new(target);
        let mut stripe = 0;
        while stripe < direct {
            let until = direct.min(stripe - stripe % STRIPES_PER_BLOCK + STRIPES_PER_BLOCK);
            while stripe < until {
                let at = stripe * STRIPE;
                let data = L::load(source.add(at));
                match STORE {
                    CACHED => data.store(target.add(at)),
                    STREAMING => data.stream(target.add(at)),
                    SKEWED => skewed.push(data),
                    _ => {}
                }
                lanes = lanes.accumulate(data, L::load(secret.add(stripe % STRIPES_PER_BLOCK * 8)));
                stripe += 1;
            }
            if stripe.is_multiple_of(STRIPES_PER_BLOCK) {
                lanes = lanes.scramble(L::load(secret.add(SECRET.len() - STRIPE)));
            }
        }
        if STORE == SKEWED {
            skewed.finish::<L>();
        }
        let mut tail = [0u8; 2 * STRIPE];
        let rest = length - direct * STRIPE;
        source.add(direct * STRIPE).copy_to_nonoverlapping(tail.as_mut_ptr(), rest);
        settle(&mut tail);
        if STORE != NONE {
            target.add(direct * STRIPE).copy_from_nonoverlapping(tail.as_ptr(), rest);
        }
        lanes = lanes.accumulate(
            L::load(tail.as_ptr()),
            L::load(secret.add(direct % STRIPES_PER_BLOCK * 8)),
        );
        if whole.is_multiple_of(STRIPES_PER_BLOCK) {
            lanes = lanes.scramble(L::load(secret.add(SECRET.len() - STRIPE)));
        }
        lanes = lanes.accumulate(
            L::load(tail.as_ptr().add(rest - STRIPE)),
            L::load(secret.add(SECRET.len() - STRIPE - 7)),
        );
        merge(&lanes.values(), length)
    }
}

fn merge(accumulators: &[u64; 8], length: usize) -> u64 {
    let word = |at: usize| u64::from_le_bytes(SECRET[at..at + 8].try_into().expect("eight bytes"));
    let mut sum = (length as u64).wrapping_mul(PRIME64_1);
    for pair in 0..4 {
        let low = accumulators[2 * pair] ^ word(11 + 16 * pair);
        let high = accumulators[2 * pair + 1] ^ word(19 + 16 * pair);
        let product = u128::from(low) * u128::from(high);
        sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    sum ^= sum >> 37;
    sum = sum.wrapping_mul(PRIME_MX1);
    sum ^ (sum >> 32)
}
