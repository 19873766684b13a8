//! The free array in the tree's place: scheme `premmap-onesided`, the one-sided baseline of FineMem (§3.1, §6.1;
//! it is CXL-SHM's).
//!
//! ```text
//! one word for each chunk, where the tree has its full logs
//!  63                                                   19 18        14 13             0
//! ┌───────────────────────────────────────────────────────┬────────────┬───────────────┐
//! │ zero                                                  │ order (5)  │ user (14)     │
//! └───────────────────────────────────────────────────────┴────────────┴───────────────┘
//! all zero: free
//! ```
//!
//! A compute node goes through the array from where its last search ended; its first one begins at the first chunk
//! (§6.3). It READs one word after another, a round trip each, and CASes what it saw free, which others that have seen
//! the same may have taken by then. (The text has CASes only; the authors' published code READs first. What table 2
//! has is met by neither, but by who READs, and CASes in any case: [`Array::without_contention_control`].)
//!
//! A block of several chunks takes one READ, and a CAS for each chunk, in their order. If one fails, those before it are given back,
//! by a CAS each, and the search goes on behind. So what of a block was taken when its taker died is its
//! beginning, and a block whose words all say the same was taken.
//!
//! Keys, quarantine, crashes and all else are as in scheme `finemem`: what differs is how free chunks are found.
//! Published, all memory is premapped under one key, which stays good for ever; here a READ for the block's own
//! key is posted with the CAS, so that it takes one round trip as published. A free is one CAS for a block of any size (on its capability); the CPU of the memory node
//! gives the words back when the quarantine ends.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, Ordering};

use super::header::User;
use super::layout::{Block, ORDERS, SECTION, Shape};
use super::log::Capability;
use super::tree::{BATCH, Verbs};

const ORDER_AT: u32 = 14;
const ORDER_BITS: u64 = 31;
const _: () = assert!(User::MAX as u64 == (1 << ORDER_AT) - 1 && ORDERS as u64 <= ORDER_BITS);

/// What the word of a chunk says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taker {
    /// Who has it.
    pub user: User,
    /// Of the block that it was taken in.
    pub order: u32,
}

impl Taker {
    /// The word.
    pub fn to_word(self) -> u64 {
        self.user.raw() as u64 | (self.order as u64) << ORDER_AT
    }

    /// What a word says; `None`: the chunk is free. Bits beyond the fields are ignored.
    pub fn parse(word: u64) -> Option<Self> {
        let user = User::new((word & User::MAX as u64) as u16).unwrap_or(User::NOBODY);
        let order = (word >> ORDER_AT & ORDER_BITS) as u32;
        (word != 0).then_some(Self { user, order })
    }

    /// The block that `chunk` was taken in, if the pool has it.
    pub fn block(self, shape: Shape, chunk: u32) -> Option<Block> {
        let Self { order, .. } = self;
        let there = order < ORDERS && chunk >> order < shape.blocks(order);
        there.then(|| Block { chunk: chunk >> order << order, order })
    }
}

/// The array as one of its users sees it.
pub struct Array {
    shape: Shape,
    user: User,
    /// What was seen to be taken is left alone.
    contention_control: bool,
    /// The chunk that the next search begins at.
    next: AtomicU32,
}

impl Array {
    /// The array of that shape, for `user`.
    pub fn new(shape: Shape, user: User) -> Self {
        Self { shape, user, contention_control: true, next: AtomicU32::new(0) }
    }

    /// The same for who CASes all that he looks at, taken or not. To be compared with: FineMem's table 2 has one CAS for every
    /// 17 us of a search.
    pub fn without_contention_control(shape: Shape, user: User) -> Self {
        Self { contention_control: false, ..Self::new(shape, user) }
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes a block of 2^`order` chunks, and what its capability says; `None` if there was none on a whole lap.
    ///
    /// # Errors
    /// Those of the verbs. It is open then what was taken.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
    ) -> Result<Option<(Block, Capability)>, V::Error> {
        let blocks = self.shape.blocks(order);
        // Others of this compute node that search at the same time begin behind this one.
        let begin = self.next.fetch_add(1 << order, Ordering::Relaxed).div_ceil(1 << order);
        for i in 0..blocks {
            let at = (begin % blocks + i) % blocks;
            let block = Block { chunk: at << order, order };
            if let Some(capability) = self.try_block(verbs, block).await? {
                if i > 0 {
                    self.next.store(block.chunks().end, Ordering::Relaxed);
                }
                return Ok(Some((block, capability)));
            }
        }
        Ok(None)
    }

    /// Takes a block, if all of it is free. The READ of its capability is posted with the last CAS.
    async fn try_block<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
    ) -> Result<Option<Capability>, V::Error> {
        let taken = Taker { user: self.user, order: block.order }.to_word();
        let key = self.shape.capability(self.shape.entry(block));
        for first in block.chunks().step_by(BATCH) {
            let mut words = [0; BATCH];
            let words = &mut words[..BATCH.min((block.chunks().end - first) as usize)];
            verbs.read(self.shape.log(first), words).await?;
            if self.contention_control && words.iter().any(|word| *word != 0) {
                return Ok(None);
            }
        }
        let (last, mut capability) = (block.chunks().end - 1, 0);
        for chunk in block.chunks() {
            let at = self.shape.log(chunk);
            let found = if chunk == last {
                let found;
                (found, capability) = verbs.cas_and_read_one(at, 0, taken, key).await?;
                found
            } else {
                verbs.cas(at, 0, taken).await?
            };
            if found != 0 {
                for chunk in (block.chunk..chunk).rev() {
                    verbs.cas(self.shape.log(chunk), taken, 0).await?;
                }
                return Ok(None);
            }
        }
        Ok(Some(Capability::parse(capability)))
    }

    /// What `user` has that begins in a section. It must not be at work any more. Blocks that it has in part
    /// are given back: nobody was told of them.
    pub async fn taken_by<V: Verbs>(
        &self,
        verbs: &V,
        user: User,
        section: u32,
    ) -> Result<Vec<Block>, V::Error> {
        let (begin, end) = (section * SECTION, self.shape.chunks.min((section + 1) * SECTION));
        let mut words = vec![0; (end - begin) as usize];
        self.read(verbs, begin, &mut words).await?;
        let (mut blocks, mut chunk) = (Vec::new(), begin);
        while chunk < end {
            let word = words[(chunk - begin) as usize];
            let taker = Taker::parse(word).filter(|taker| taker.user == user);
            let Some(taker) = taker else {
                chunk += 1;
                continue;
            };
            let alone = Block { chunk, order: 0 };
            let block = taker.block(self.shape, chunk).unwrap_or(alone);
            if block.chunk >= begin {
                let mut all = vec![0; 1 << block.order];
                self.read(verbs, block.chunk, &mut all).await?;
                match all.iter().all(|other| *other == word) {
                    true => blocks.push(block),
                    false => self.drop_part(verbs, block, word).await?,
                }
            } // else it begins in an earlier section, and was seen to there
            // What stopped the taking of a block may be a smaller one of the same user.
            let rest = (chunk - begin) as usize..(block.chunks().end.min(end) - begin) as usize;
            let rest = &words[rest];
            chunk += rest.iter().take_while(|other| **other == word).count() as u32;
        }
        Ok(blocks)
    }

    async fn drop_part<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
        word: u64,
    ) -> Result<(), V::Error> {
        for chunk in block.chunks().rev() {
            verbs.cas(self.shape.log(chunk), word, 0).await?;
        }
        Ok(())
    }

    async fn read<V: Verbs>(
        &self,
        verbs: &V,
        from: u32,
        words: &mut [u64],
    ) -> Result<(), V::Error> {
        for (first, some) in (from..).step_by(BATCH).zip(words.chunks_mut(BATCH)) {
            verbs.read(self.shape.log(first), some).await?;
        }
        Ok(())
    }

    /// Gives blocks back whose quarantine has ended: nobody else changes their words.
    pub async fn give_back<V: Verbs>(&self, verbs: &V, blocks: &[Block]) -> Result<(), V::Error> {
        for block in blocks {
            let mut word = [0];
            verbs.read(self.shape.log(block.chunk), &mut word).await?;
            self.drop_part(verbs, *block, word[0]).await?;
        }
        Ok(())
    }
}
