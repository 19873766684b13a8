//! A free array in place of the tree: scheme `premmap-onesided`, the one-sided baseline of FineMem
//! (§3.1, §6.1), taken from CXL-SHM.
//!
//! ```text
//! one word per chunk, at the position of the tree's full logs
//!  63                                                   19 18        14 13             0
//! ┌───────────────────────────────────────────────────────┬────────────┬───────────────┐
//! │ zero                                                  │ order (5)  │ user (14)     │
//! └───────────────────────────────────────────────────────┴────────────┴───────────────┘
//! all zero: free
//! ```
//!
//! A search begins where the client's last search ended, the first one at the first chunk (§6.3).
//! It READs one word after another, a round trip each, and CASes a free word; another client may
//! have taken the chunk since the READ. (The paper's text has CASes only; the authors' published
//! code READs first. Neither gives the numbers of table 2; a search that READs and CASes every word
//! does: [`Array::without_contention_control`].)
//!
//! A block of several chunks takes one READ, and a CAS for each chunk in ascending order. If a CAS
//! fails, the search undoes the earlier ones with a CAS each, and continues after the block.
//! Therefore, if a client dies during an allocation, the taken chunks are the beginning of the
//! block, and a block whose words are all equal was taken completely.
//!
//! Keys, quarantine and crash recovery are as in scheme `finemem`; only the search for free chunks
//! differs. As published, all memory is premapped under one key, which stays valid for ever. Here a
//! READ of the block's own key is posted with the CAS, so an allocation takes one round trip, as
//! published. A free is one CAS for a block of any size (on its capability); the memory node's CPU
//! clears the words when the quarantine ends.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use scheme::index::IndexRange;

use super::block::{Block, ORDERS, Order, SectionIndex};
use super::header::User;
use super::layout::Shape;
use super::log::Capability;
use super::tree::{BATCH, Verbs};
use crate::blocks::ChunkIndex;

const ORDER_AT: u32 = 14;
const ORDER_BITS: u64 = 31;
const _: () = assert!(User::MAX as u64 == (1 << ORDER_AT) - 1 && ORDERS as u64 <= ORDER_BITS);

/// Content of the word of a taken chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taker {
    /// The owner.
    pub user: User,
    /// Order of the block that contains the chunk.
    pub order: Order,
}

impl Taker {
    /// The word.
    pub fn to_word(self) -> u64 {
        self.user.raw() as u64 | u64::from(self.order.raw()) << ORDER_AT
    }

    /// Decodes a word; `None` if the chunk is free. Bits outside the fields are ignored.
    pub fn parse(word: u64) -> Option<Self> {
        let user = User::new((word & User::MAX as u64) as u16).unwrap_or(User::NOBODY);
        let order = Order::new((word >> ORDER_AT & ORDER_BITS) as u32);
        (word != 0).then_some(Self { user, order })
    }

    /// The block that contains `chunk`, if it lies within the pool.
    pub fn block(self, shape: Shape, chunk: ChunkIndex) -> Option<Block> {
        let block = Block::around(chunk, self.order);
        (self.order.raw() < ORDERS && shape.has_block(block)).then_some(block)
    }
}

/// The array, with the search state of one user.
pub struct Array {
    shape: Shape,
    user: User,
    /// Skip the CAS if the READ shows that a chunk is taken.
    contention_control: bool,
    /// The chunk at which the next search begins.
    next: AtomicU32,
}

impl Array {
    /// The array of that shape, for `user`.
    pub fn new(shape: Shape, user: User) -> Self {
        Self { shape, user, contention_control: true, next: AtomicU32::new(0) }
    }

    /// As [`Array::new`], but the search CASes every word that it reads, taken or not. For
    /// comparison: FineMem's table 2 has one CAS for every 17 us of a search.
    pub fn without_contention_control(shape: Shape, user: User) -> Self {
        Self { contention_control: false, ..Self::new(shape, user) }
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes a block of this order, and reads its capability; `None` if no block was free on
    /// a whole lap.
    ///
    /// # Errors
    /// Errors of the verbs. The block may then be taken or not.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
    ) -> Result<Option<(Block, Capability)>, V::Error> {
        let blocks = self.shape.blocks(order);
        // Concurrent searches of this client begin after this one's block.
        let len = order.chunks();
        let begin = self.next.fetch_add(len, Ordering::Relaxed).div_ceil(len);
        for i in 0..blocks {
            let block = Block::nth(order, (begin % blocks + i) % blocks);
            if let Some(capability) = self.try_block(verbs, block).await? {
                if i > 0 {
                    self.next.store(block.end().raw(), Ordering::Relaxed);
                }
                return Ok(Some((block, capability)));
            }
        }
        Ok(None)
    }

    /// Takes a block if all of it is free. The READ of its capability is posted with the last CAS.
    async fn try_block<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
    ) -> Result<Option<Capability>, V::Error> {
        let taken = Taker { user: self.user, order: block.order }.to_word();
        let key = self.shape.capability(self.shape.entry(block));
        for some in block.chunks().batches(BATCH) {
            let mut words = [0; BATCH];
            let words = &mut words[..some.len()];
            verbs.read(self.shape.log(some.start), words).await?;
            if self.contention_control && words.iter().any(|word| *word != 0) {
                return Ok(None);
            }
        }
        let mut capability = 0;
        for chunk in block.chunks().iter() {
            let at = self.shape.log(chunk);
            let found = if chunk.plus(1) == block.end() {
                let found;
                (found, capability) = verbs.cas_and_read_one(at, 0, taken, key).await?;
                found
            } else {
                verbs.cas(at, 0, taken).await?
            };
            if found != 0 {
                for chunk in (block.chunk..chunk).iter().rev() {
                    verbs.cas(self.shape.log(chunk), taken, 0).await?;
                }
                return Ok(None);
            }
        }
        Ok(Some(Capability::parse(capability)))
    }

    /// Blocks of `user` that begin in a section. The user must have stopped working. Frees its
    /// partly taken blocks, which were never granted.
    pub async fn taken_by<V: Verbs>(
        &self,
        verbs: &V,
        user: User,
        section: SectionIndex,
    ) -> Result<Vec<Block>, V::Error> {
        let chunks = self.shape.chunks_in(section);
        let mut words = vec![0; chunks.len()];
        self.read(verbs, chunks.start, &mut words).await?;
        let words_of = |some: Range<ChunkIndex>| {
            &words[(chunks.start..some.start).len()..(chunks.start..some.end).len()]
        };
        let (mut blocks, mut chunk) = (Vec::new(), chunks.start);
        while chunk < chunks.end {
            let word = words_of(chunk..chunk.plus(1))[0];
            let taker = Taker::parse(word).filter(|taker| taker.user == user);
            let Some(taker) = taker else {
                chunk = chunk.plus(1);
                continue;
            };
            let block = taker.block(self.shape, chunk).unwrap_or(Block::of_chunk(chunk));
            if block.chunk >= chunks.start {
                let mut all = vec![0; block.chunks().len()];
                self.read(verbs, block.chunk, &mut all).await?;
                match all.iter().all(|other| *other == word) {
                    true => blocks.push(block),
                    false => self.drop_part(verbs, block, word).await?,
                }
            } // else the block begins in an earlier section, and was handled there
            // The chunk at which the allocation failed may belong to a smaller block of the same
            // user.
            let rest = words_of(chunk..block.end().min(chunks.end));
            let same = rest.iter().take_while(|other| **other == word).count();
            chunk = chunk.plus(same as u32);
        }
        Ok(blocks)
    }

    async fn drop_part<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
        word: u64,
    ) -> Result<(), V::Error> {
        for chunk in block.chunks().iter().rev() {
            verbs.cas(self.shape.log(chunk), word, 0).await?;
        }
        Ok(())
    }

    async fn read<V: Verbs>(
        &self,
        verbs: &V,
        from: ChunkIndex,
        words: &mut [u64],
    ) -> Result<(), V::Error> {
        let mut first = from;
        for some in words.chunks_mut(BATCH) {
            verbs.read(self.shape.log(first), some).await?;
            first = first.plus(some.len() as u32);
        }
        Ok(())
    }

    /// Frees blocks whose quarantine has ended. Their words have no other writer.
    pub async fn give_back<V: Verbs>(&self, verbs: &V, blocks: &[Block]) -> Result<(), V::Error> {
        for block in blocks {
            let mut word = [0];
            verbs.read(self.shape.log(block.chunk), &mut word).await?;
            self.drop_part(verbs, *block, word[0]).await?;
        }
        Ok(())
    }
}
