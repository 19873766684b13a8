//! Allocation of free chunks: the part that differs between the schemes in which the client
//! allocates.

use scheme::Scheme;
use scheme::index::IndexRange;

use super::array::{Array, Taker};
use super::block::{Block, Layer, Order, SectionIndex, SpanIndex, SpanOffset};
use super::header::{Header, Spread, User, chunk_blocks, chunk_mask, span_blocks, span_mask};
use super::layout::{Shape, Word};
use super::log::{Capability, FullLog};
use super::tree::{Tree, Verbs};
use crate::blocks::ChunkIndex;

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

    /// Takes a block of this order, and reads its capability; `None` if no block is free.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
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
        section: SectionIndex,
    ) -> Result<Vec<Block>, V::Error> {
        match self {
            Self::Tree(tree) => tree.taken_by(verbs, user, section).await,
            Self::Array(array) => array.taken_by(verbs, user, section).await,
        }
    }

    /// Completes operations in a section that crashes have left unfinished.
    pub async fn repair_section<V: Verbs>(
        &self,
        verbs: &V,
        section: SectionIndex,
    ) -> Result<(), V::Error> {
        match self {
            Self::Tree(tree) => tree.repair_section(verbs, section).await.map(drop),
            Self::Array(_) => Ok(()),
        }
    }

    /// Counts free aligned blocks of this order, including those inside larger free blocks. `load`
    /// reads the words. Returns 0 if no block has this order.
    pub fn free_blocks(&self, order: Order, load: impl Fn(Word) -> u64) -> u32 {
        let shape = self.shape();
        if order > shape.order_max() {
            return 0;
        }
        let count = |is_free: &dyn Fn(&Block) -> bool| {
            shape.each_block(order).filter(is_free).count() as u32
        };
        if let Self::Array(_) = self {
            let is_free = |chunk| load(shape.log(chunk)) == 0;
            return count(&|block| block.chunks().iter().all(is_free));
        }
        let section = |index| Header(load(shape.section(index)));
        if order.has_parts() {
            let is_empty = |index| section(index).bitmap() == 0;
            return count(&|block| block.parts().is_some_and(|parts| parts.iter().all(is_empty)));
        }
        let in_span = |index: SpanIndex, section: Header| {
            let span = Header(load(shape.span(index)));
            let blocks = chunk_blocks(order);
            match section.spread(index.in_section()) {
                _ if span.in_use() => {
                    blocks.filter(|at| span.bitmap() & chunk_mask(*at, order) == 0).count()
                }
                Spread::Full => 0,
                _ => blocks.len(),
            }
        };
        let in_section = |index: SectionIndex| {
            let header = section(index);
            match order.layer() {
                Layer::Section => {
                    let size = order.in_spans();
                    let is_free = |at: &SpanOffset| header.bitmap() & span_mask(*at, size) == 0;
                    span_blocks(size).filter(is_free).count()
                }
                Layer::Span => index.spans().iter().map(|span| in_span(span, header)).sum(),
            }
        };
        shape.each_section().map(in_section).sum::<usize>() as u32
    }

    /// Number of blocks that are owned or in quarantine.
    pub fn taken_blocks(&self, load: impl Fn(Word) -> u64) -> u64 {
        let shape = self.shape();
        let begins = |chunk: &ChunkIndex| {
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
        shape.each_chunk().filter(begins).count() as u64
    }
}
