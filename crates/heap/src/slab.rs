//! A slab: the bitmaps of its blocks, and its links in a list.

use smallvec::SmallVec;

use crate::classes::Class;
use crate::lists::Link;

/// Bits of a word.
const BITS: u32 = u64::BITS;

/// The part of a chunk that has blocks of one class, or no block.
///
/// A block is free, live or in limbo. Bitmap `used` has the blocks that are live or in limbo, and
/// bitmap `live` those that are live. The bits of `used` behind the last block are set.
#[derive(Debug, Default)]
pub(crate) struct Slab {
    /// `None`: no block is live or in limbo.
    pub class: Option<Class>,
    /// Number of blocks that are live or in limbo.
    pub used: u32,
    /// Number of blocks that are live.
    pub live: u32,
    /// Links in the list of slabs with the same use.
    pub link: Link,
    /// Number of blocks.
    blocks: u32,
    /// All words of `used` before this one are full.
    first: u32,
    /// The words of `used`, and then the words of `live`. Up to 64 blocks need no allocation.
    words: SmallVec<[u64; 2]>,
}

impl Slab {
    /// Divides an unused slab into `blocks` blocks of `class`.
    pub fn divide(&mut self, class: Class, blocks: u32) {
        debug_assert_eq!(self.used, 0);
        let words = blocks.div_ceil(BITS) as usize;
        self.words.clear();
        self.words.resize(2 * words, 0);
        if !blocks.is_multiple_of(BITS) {
            self.words[words - 1] = u64::MAX << (blocks % BITS);
        }
        (self.class, self.blocks, self.first) = (Some(class), blocks, 0);
    }

    /// True if no block is free.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.used == self.blocks
    }

    /// Makes the first free block live. `None` if none is free.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        let used = &self.words[self.first as usize..self.half()];
        let word = used.iter().position(|word| *word != u64::MAX)?;
        self.first += word as u32;
        let block = self.first * BITS + self.words[self.first as usize].trailing_ones();
        self.claim(block);
        Some(block)
    }

    /// Makes a free block live. False if it is not free, or does not exist.
    #[inline]
    pub fn claim(&mut self, block: u32) -> bool {
        if block >= self.blocks || self.is_set(0, block) {
            return false;
        }
        self.flip(0, block);
        self.flip(self.half(), block);
        (self.used, self.live) = (self.used + 1, self.live + 1);
        true
    }

    /// Moves a live block to limbo. False if it is not live, or does not exist.
    #[inline]
    pub fn retire(&mut self, block: u32) -> bool {
        if !self.is_live(block) {
            return false;
        }
        self.flip(self.half(), block);
        self.live -= 1;
        true
    }

    /// Frees a block that is in limbo.
    #[inline]
    pub fn release(&mut self, block: u32) {
        debug_assert!(self.is_in_limbo(block));
        self.flip(0, block);
        self.used -= 1;
        self.first = self.first.min(block / BITS);
    }

    /// True if the block is live.
    #[inline]
    pub fn is_live(&self, block: u32) -> bool {
        block < self.blocks && self.is_set(self.half(), block)
    }

    /// True if the block is in limbo.
    pub fn is_in_limbo(&self, block: u32) -> bool {
        block < self.blocks && self.is_set(0, block) && !self.is_set(self.half(), block)
    }

    /// The first live block from `from` on.
    pub fn live_from(&self, from: u32) -> Option<u32> {
        (from..self.blocks).find(|block| self.is_live(*block))
    }

    /// Numbers of blocks that are used and live, by the bitmaps.
    pub fn recount(&self) -> (u32, u32) {
        let live = |block: &u32| self.is_live(*block);
        let used = |block: &u32| self.is_set(0, *block);
        let count = |is: &dyn Fn(&u32) -> bool| (0..self.blocks).filter(is).count() as u32;
        (count(&used), count(&live))
    }

    /// Number of words of one bitmap, and index of the first word of `live`.
    #[inline]
    fn half(&self) -> usize {
        self.words.len() / 2
    }

    #[inline]
    fn is_set(&self, bitmap: usize, block: u32) -> bool {
        self.words[bitmap + (block / BITS) as usize] >> (block % BITS) & 1 == 1
    }

    #[inline]
    fn flip(&mut self, bitmap: usize, block: u32) {
        self.words[bitmap + (block / BITS) as usize] ^= 1 << (block % BITS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::Classes;

    fn slab(blocks: u32) -> Slab {
        let class = Classes::new(4096).unwrap().get(0).unwrap();
        let mut slab = Slab::default();
        slab.divide(class, blocks);
        slab
    }

    #[test]
    fn every_block_is_taken_once_for_any_count() {
        for blocks in [1, 3, 63, 64, 65, 128, 130, 32768] {
            let mut slab = slab(blocks);
            assert!((0..blocks).all(|block| slab.take() == Some(block)));
            assert!(slab.is_full());
            assert_eq!(slab.take(), None);
            assert!(!slab.claim(blocks));
            assert_eq!(slab.recount(), (blocks, blocks));
        }
    }

    #[test]
    fn block_is_taken_again_after_its_release() {
        let mut slab = slab(200);
        while slab.take().is_some() {}
        assert!(slab.retire(150) && slab.retire(3));
        assert!(!slab.retire(150), "in limbo");
        assert_eq!(slab.take(), None);
        assert!(slab.is_in_limbo(150) && !slab.is_live(150));
        slab.release(150);
        assert_eq!(slab.take(), Some(150));
        slab.release(3);
        assert_eq!((slab.used, slab.live), (199, 199));
        assert_eq!(slab.live_from(2), Some(2));
        assert_eq!(slab.live_from(3), Some(4));
        assert_eq!(slab.live_from(200), None);
        assert_eq!(slab.take(), Some(3));
    }
}
