//! The two-layer bitmap tree: blocks are allocated and freed by READ and CAS alone (FineMem §4.1,
//! §4.2).
//!
//! The code here owns no NIC and no clock: it requests one verb after another ([`Verbs`]) and
//! continues with the results. Therefore it runs over a management QP, on the memory node's own
//! memory, and in tests that stop or crash it between any two verbs.
//!
//! **Layers.** A span belongs either to its section's header, which allocates it as a whole, or to
//! its own header, which allocates its chunks. The two words must never contradict each other about
//! this, however late a verb is:
//!
//! ```text
//!            section's word                            span's word
//! take spans 00 ──CAS──> 11
//! open       any but 11 ──CAS──> 01, and a new log ──> CAS that expects what was seen before:
//!                                                      first bits, in use
//! close      s, as read before the span changed ────── CAS: no bits, not in use, a new timestamp
//!            CAS s ──> 00
//! ```
//!
//! Every opening changes the section's word, and every closing changes the span's word; so of an
//! overlapping opening and closing, one fails. State 00 therefore means that no client has any part
//! of the span, or can still get one. The other states are hints that may be wrong for a while; a
//! client that finds a wrong hint corrects it.
//!
//! **Differences from the paper.** FineMem updates the section by an RDMA WRITE after a commit in
//! the span. Such a WRITE undoes any change made since the section was read, even the allocation of
//! spans. Here the update is a single CAS from the word that was read: it costs the same and undoes
//! nothing. The first chunk of an empty span costs one more CAS than published (the opening),
//! because a commit in the span alone does not prevent a concurrent allocation of the whole span.
//!
//! **Logs.** A header is overwritten only after its temporary log has been flushed to the full log;
//! see `flush`.
//!
//! **Bound.** A CAS that failed is repeated; see `repeats` for the end of it.

mod allocate;
mod cache;
mod flush;
mod give_back;
mod recover;
mod repeats;
mod start;
#[cfg(test)]
mod tests;
mod withdraw;

pub use allocate::Taken;
pub(super) use flush::pending;
pub use repeats::{Changed, REPEATS_MAX, Repeats};

use std::future::Future;

use parking_lot::Mutex;
use scheme::index::IndexRange;

use cache::Cache;
use start::StartPosition;

use super::block::{Place, SPANS, SectionIndex, SpanIndex};
use super::header::{Header, Spread, User};
use super::layout::{Shape, Word};

/// CAS failures of one allocation at which a span becomes contended (FineMem §4.1).
pub const CONTENDED_FROM: u32 = 10;
/// CAS failures below which a span is no longer contended.
pub const CONTENDED_BELOW: u32 = 3;
/// Maximum words per READ.
pub const BATCH: usize = 512;

/// READ and CAS on the words of the metadata.
pub trait Verbs: Sync {
    /// Error of a verb.
    type Error: Send;

    /// Counts a failed CAS on `word`, before a loop of the operation repeats the CAS.
    ///
    /// # Errors
    /// The operation is to end, because its CASes have failed too often ([`Repeats`]).
    fn repeat(&self, word: Changed) -> Result<(), Self::Error>;

    /// Reads the words from `at` on. Each word is read atomically, but different words may be read
    /// at different times.
    fn read(
        &self,
        at: Word,
        out: &mut [u64],
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Replaces a word by `new` if it is `expected`; returns the previous value.
    fn cas(
        &self,
        at: Word,
        expected: u64,
        new: u64,
    ) -> impl Future<Output = Result<u64, Self::Error>> + Send;

    /// Reads `first` and then `second`, posted together where possible.
    fn read_both(
        &self,
        first: Word,
        second: Word,
    ) -> impl Future<Output = Result<(u64, u64), Self::Error>> + Send {
        async move {
            let (mut a, mut b) = ([0], [0]);
            self.read(first, &mut a).await?;
            self.read(second, &mut b).await?;
            Ok((a[0], b[0]))
        }
    }

    /// Reads words from `first` on and then words from `second` on, posted together where possible.
    /// At most [`BATCH`] words in total.
    fn read_two(
        &self,
        first: (Word, &mut [u64]),
        second: (Word, &mut [u64]),
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        async move {
            self.read(first.0, first.1).await?;
            self.read(second.0, second.1).await
        }
    }

    /// Executes a CAS and then reads the word `then`, posted together where possible.
    fn cas_and_read_one(
        &self,
        at: Word,
        expected: u64,
        new: u64,
        then: Word,
    ) -> impl Future<Output = Result<(u64, u64), Self::Error>> + Send {
        async move {
            let (found, mut word) = (self.cas(at, expected, new).await?, [0]);
            if found == expected {
                self.read(then, &mut word).await?;
            }
            Ok((found, word[0]))
        }
    }

    /// Executes a CAS and then reads the words `then` in this order, posted together where
    /// possible. If the CAS fails, the words read are meaningless.
    fn cas_and_read(
        &self,
        at: Word,
        expected: u64,
        new: u64,
        then: [Word; 3],
    ) -> impl Future<Output = Result<(u64, [u64; 3]), Self::Error>> + Send {
        async move {
            let (found, mut words) = (self.cas(at, expected, new).await?, [0; 3]);
            if found == expected {
                for (at, word) in then.into_iter().zip(words.chunks_mut(1)) {
                    self.read(at, word).await?;
                }
            }
            Ok((found, words))
        }
    }
}

/// A header as last read, possibly outdated.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    header: Header,
    /// The header's temporary log is known to be in the full log.
    flushed: bool,
}

/// A tree, with the cache and the search state of one user.
pub struct Tree {
    shape: Shape,
    user: User,
    cache: Box<Mutex<Cache>>,
    start: StartPosition,
    contention_control: bool,
}

impl Tree {
    /// The tree of that shape, for `user`, with an empty cache.
    pub fn new(shape: Shape, user: User) -> Self {
        let cache = Box::new(Mutex::new(Cache::new(shape)));
        Self { shape, user, cache, start: StartPosition::for_user(user), contention_control: true }
    }

    /// As [`Tree::new`], but without contention control: a failed CAS is retried in place, and
    /// searches start at few sections that many users share. For comparison (FineMem §6.2, figure
    /// 11).
    pub fn without_contention_control(shape: Shape, user: User) -> Self {
        Self {
            contention_control: false,
            start: StartPosition::shared(user),
            ..Self::new(shape, user)
        }
    }

    /// Failed CAS of an allocation on one header that contention control takes into account.
    fn effective_failures(&self, failures: u32) -> u32 {
        if self.contention_control { failures } else { 0 }
    }

    /// The shape of the pool.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    fn known(&self, place: Place) -> Option<Seen> {
        self.cache.lock().known(place)
    }

    fn remember(&self, place: Place, header: Header, flushed: bool) -> Seen {
        self.cache.lock().remember(place, header, flushed)
    }

    /// Reads a header, bypassing the cache.
    async fn read_header<V: Verbs>(&self, verbs: &V, place: Place) -> Result<Seen, V::Error> {
        let mut word = [0];
        verbs.read(place.word(self.shape), &mut word).await?;
        Ok(self.remember(place, Header(word[0]), false))
    }

    /// A header from the cache; if it is not cached, reads it with its neighbours.
    async fn cached_or_read<V: Verbs>(&self, verbs: &V, place: Place) -> Result<Seen, V::Error> {
        if let Some(seen) = self.known(place) {
            return Ok(seen);
        }
        let (first, count) = match place {
            Place::Section(section) => (place, (section..self.shape.sections_end()).len()),
            Place::Span(span) => (Place::Span(span.section().first_span()), SPANS as usize),
        };
        self.read_headers(verbs, first, count).await?;
        Ok(self.known(place).unwrap_or_default())
    }

    /// Reads up to [`BATCH`] headers, starting at `from`.
    async fn read_headers<V: Verbs>(
        &self,
        verbs: &V,
        from: Place,
        count: usize,
    ) -> Result<(), V::Error> {
        let mut words = vec![0; BATCH.min(count)];
        verbs.read(from.word(self.shape), &mut words).await?;
        let mut cache = self.cache.lock();
        for (i, word) in (0..).zip(&words) {
            cache.remember(from.plus(i), Header(*word), false);
        }
        Ok(())
    }

    /// Reads the headers of sections and then those of their spans.
    async fn read_whole_sections<V: Verbs>(
        &self,
        verbs: &V,
        sections: std::ops::Range<SectionIndex>,
    ) -> Result<(), V::Error> {
        let count = sections.len();
        let (mut own, mut spans) = (vec![0; count], vec![0; count * SPANS as usize]);
        let first = Place::Section(sections.start);
        let span = Place::Span(sections.start.first_span());
        let at = [first, span].map(|place| place.word(self.shape));
        verbs.read_two((at[0], &mut own), (at[1], &mut spans)).await?;
        let mut cache = self.cache.lock();
        for (from, words) in [(first, own), (span, spans)] {
            for (i, word) in (0..).zip(words) {
                cache.remember(from.plus(i), Header(word), false);
            }
        }
        Ok(())
    }

    /// Changes a header by CAS. If the header is not `from`, returns the header found.
    async fn change<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        from: Header,
        to: Header,
    ) -> Result<Result<(), Seen>, V::Error> {
        let found = Header(verbs.cas(place.word(self.shape), from.0, to.0).await?);
        if found == from {
            self.remember(place, to, false);
            return Ok(Ok(()));
        }
        Ok(Err(self.remember(place, found, false)))
    }

    /// Corrects a hint with a single CAS: the state, in the section's header, of a span that
    /// allocates its chunks itself. `seen` is the section's header as read before the span's header
    /// was found in use.
    async fn update_hint<V: Verbs>(
        &self,
        verbs: &V,
        span: SpanIndex,
        seen: Header,
        spread: Spread,
    ) -> Result<(), V::Error> {
        let (section, at) = (Place::Section(span.section()), span.in_section());
        // An empty span is opened, never marked by a hint; here the section's header was outdated.
        if seen.spread(at) != spread && seen.spread(at) != Spread::Empty {
            let _ = self.change(verbs, section, seen, seen.with_spread(at, spread)).await?;
        }
        Ok(())
    }
}
