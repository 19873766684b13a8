//! Allocation of free chunks: the part that differs between the schemes in which the client
//! allocates.

use super::array::{Array, Taker};
use super::block::{Block, SECTION_ORDER, SPAN_ORDER};
use super::header::{CHUNKS, Header, SPANS, Spread, User, chunk_mask, span_mask};
use super::layout::{Shape, Word};
use super::log::{Capability, FullLog};
use super::tree::{Tree, Verbs};
use crate::Scheme;

/// The tree, or the array that replaces it.
pub(super) enum Map {
    /// Scheme `finemem`.
    Tree(Tree),
    /// Scheme `premmap-onesided`.
    Array(Array),
}

impl Map {
    /// The map of a scheme, for the operations of `user`.
    pub fn new(scheme: Scheme, shape: Shape, user: User, contention_control: bool) -> Self {
        match (super::has_tree(scheme), contention_control) {
            (true, true) => Self::Tree(Tree::new(shape, user)),
            (true, false) => Self::Tree(Tree::without_contention_control(shape, user)),
            (false, true) => Self::Array(Array::new(shape, user)),
            (false, false) => Self::Array(Array::without_contention_control(shape, user)),
        }
    }

    /// The shape of the pool.
    pub fn shape(&self) -> Shape {
        match self {
            Self::Tree(tree) => tree.shape(),
            Self::Array(array) => array.shape(),
        }
    }

    /// Takes a block of 2^`order` chunks, and reads its capability; `None` if no block is free.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
    ) -> Result<Option<(Block, Capability)>, V::Error> {
        match self {
            Self::Tree(tree) => {
                let taken = tree.allocate(verbs, order).await?;
                Ok(taken.map(|taken| (taken.block, taken.capability)))
            }
            Self::Array(array) => array.allocate(verbs, order).await,
        }
    }

    /// Frees a block of `user`. There must be no concurrent free of the same block.
    pub async fn give_back<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
        user: User,
    ) -> Result<(), V::Error> {
        match self {
            Self::Tree(tree) => tree.give_back(verbs, &[block], user).await,
            Self::Array(array) => array.give_back(verbs, &[block]).await,
        }
    }

    /// Blocks of `user` that begin in a section. The user must have stopped working.
    pub async fn taken_by<V: Verbs>(
        &self,
        verbs: &V,
        user: User,
        section: u32,
    ) -> Result<Vec<Block>, V::Error> {
        match self {
            Self::Tree(tree) => tree.taken_by(verbs, user, section).await,
            Self::Array(array) => array.taken_by(verbs, user, section).await,
        }
    }

    /// Completes operations in a section that crashes have left unfinished.
    pub async fn repair_section<V: Verbs>(&self, verbs: &V, section: u32) -> Result<(), V::Error> {
        match self {
            Self::Tree(tree) => tree.repair_section(verbs, section).await.map(drop),
            Self::Array(_) => Ok(()),
        }
    }

    /// Counts free aligned blocks of 2^`order` chunks, including those inside larger free blocks.
    /// `load` reads the words. Returns 0 for an invalid order.
    pub fn free_blocks(&self, order: u64, load: impl Fn(Word) -> u64) -> u32 {
        let shape = self.shape();
        let order = u32::try_from(order).ok().filter(|order| *order <= shape.order_max());
        let Some(order) = order else { return 0 };
        let count = |all: u32, is_free: &dyn Fn(u32) -> bool| {
            (0..all).filter(|block| is_free(*block)).count() as u32
        };
        if let Self::Array(_) = self {
            return count(shape.blocks(order), &|block| {
                (block << order..(block + 1) << order).all(|chunk| load(shape.log(chunk)) == 0)
            });
        }
        let section = |index| Header(load(shape.section(index)));
        if order > SECTION_ORDER {
            return count(shape.blocks(order), &|block| {
                let each = 1 << (order - SECTION_ORDER);
                (block * each..(block + 1) * each).all(|index| section(index).bitmap() == 0)
            });
        }
        let in_span = |index: u32, section: Header| {
            let span = Header(load(shape.span(index)));
            match section.spread(index % SPANS) {
                _ if span.in_use() => count(CHUNKS >> order, &|block| {
                    span.bitmap() & chunk_mask(block << order, order) == 0
                }),
                Spread::Full => 0,
                _ => CHUNKS >> order,
            }
        };
        let in_section = |index| {
            let section = section(index);
            match order.checked_sub(SPAN_ORDER) {
                Some(size) => count(SPANS >> size, &|block| {
                    section.bitmap() & span_mask(block << size, size) == 0
                }),
                None => (0..SPANS).map(|at| in_span(index * SPANS + at, section)).sum(),
            }
        };
        (0..shape.sections()).map(in_section).sum()
    }

    /// Number of blocks that are owned or in quarantine.
    pub fn taken_blocks(&self, load: impl Fn(Word) -> u64) -> u64 {
        let shape = self.shape();
        let begins = |chunk: &u32| {
            let word = load(shape.log(*chunk));
            match self {
                Self::Tree(_) => {
                    let log = FullLog::parse(word);
                    log.taken && log.block(*chunk).chunk == *chunk
                }
                Self::Array(_) => {
                    let block = Taker::parse(word).and_then(|taker| taker.block(shape, *chunk));
                    block.is_some_and(|block| block.chunk == *chunk)
                }
            }
        };
        (0..shape.chunks).filter(begins).count() as u64
    }
}
