//! Streaming stores to a target that is not aligned for them.
//!
//! Stripes are laid down in a small tile, as far from an aligned address as the target is, and leave
//! it in aligned lines. The tile stays in the first-level cache.

use crate::lanes::{Lanes, STRIPE};

const TILE: usize = 4096;

#[repr(align(64))]
struct Tile([u8; TILE + STRIPE]);

pub struct Skewed {
    tile: Tile,
    /// How far the target lies behind an aligned address.
    skew: usize,
    /// Where the next whole tile goes: aligned, at first before the target.
    line: *mut u8,
    /// Bytes in the tile, those of `skew` included.
    filled: usize,
    first: bool,
}

impl Skewed {
    /// For stripes that follow each other from `target` on.
    #[inline(always)]
    pub fn new(target: *mut u8) -> Self {
        let skew = target.addr() % STRIPE;
        let line = target.wrapping_sub(skew);
        Self { tile: Tile([0; TILE + STRIPE]), skew, line, filled: skew, first: true }
    }

    /// The next stripe.
    ///
    /// # Safety
    /// As of `Lanes`, and the target has room for it.
    #[inline(always)]
    pub unsafe fn push<L: Lanes>(&mut self, data: L) {
        unsafe {
            data.store(self.tile.0.as_mut_ptr().add(self.filled));
            self.filled += STRIPE;
            if self.filled >= TILE {
                self.flush::<L>();
            }
        }
    }

    /// Everything that was pushed is in the target.
    ///
    /// # Safety
    /// As of `push`.
    #[inline(always)]
    pub unsafe fn finish<L: Lanes>(&mut self) {
        unsafe {
            self.flush::<L>();
            let start = if self.first { self.skew } else { 0 };
            let rest = self.filled - start;
            self.line.add(start).copy_from_nonoverlapping(self.tile.0.as_ptr().add(start), rest);
        }
    }

    /// Whole lines leave, the rest moves to the front.
    #[inline(always)]
    unsafe fn flush<L: Lanes>(&mut self) {
        unsafe {
            let lines = self.filled / STRIPE;
            let mut line = 0;
            if self.first && lines > 0 {
                // Part of the first line belongs to somebody else.
                let own = STRIPE - self.skew;
                let from = self.tile.0.as_ptr().add(self.skew);
                self.line.add(self.skew).copy_from_nonoverlapping(from, own);
                self.first = false;
                line = 1;
            }
            while line < lines {
                L::load(self.tile.0.as_ptr().add(line * STRIPE))
                    .stream(self.line.add(line * STRIPE));
                line += 1;
            }
            let rest = self.filled - lines * STRIPE;
            self.tile.0.copy_within(lines * STRIPE..self.filled, 0);
            self.line = self.line.wrapping_add(lines * STRIPE);
            self.filled = rest;
        }
    }
}
