//! The two-layer bitmap tree: how blocks are taken and given back by READ and CAS alone (FineMem §4.1,
//! §4.2).
//!
//! What is here owns no NIC and no clock: it asks for one verb after another ([`Verbs`]) and goes on with
//! the results, so that it runs over a management QP, on the memory node's own memory, and in tests that
//! stop it, or have it crash, between any two verbs.
//!
//! **Layers.** A span belongs to the section's header, which gives it out whole, or to its own header,
//! which gives out its chunks. The words must never disagree about that, whoever is late:
//!
//! ```text
//!            section's word                            span's word
//! take spans 00 ──CAS──> 11
//! open       any but 11 ──CAS──> 01, and a new log ──> CAS that expects what was seen before:
//!                                                      first bits, in use
//! close      s, as it was before ───────────────────── CAS: no bits, not in use, a new timestamp
//!            CAS s ──> 00
//! ```
//!
//! An opening changes the section's word, and a closing the span's word, in every case: of an opening and a
//! closing that overlap, one fails. A state 00 therefore says that nobody has anything of the span, or can
//! still get it. The other states are hints that may be wrong for a while; who finds them wrong on the way
//! to memory sets them right.
//!
//! **Where this is not as published.** FineMem updates the section by an RDMA WRITE after a commit in the
//! span. A WRITE of a word that another has changed since undoes that change, also one that took spans.
//! Here it is a CAS from the word that was seen, tried once: it costs the same and undoes nothing. The first
//! chunk of an empty span costs one CAS more than published (the opening), since a span's commit alone does
//! not keep others from taking the span whole at the same time.
//!
//! **Logs.** A header is overwritten only after its temporary log is in the full log; see `flush`.

mod allocate;
mod begin;
mod cache;
mod flush;
mod give_back;
mod recover;
#[cfg(test)]
mod tests;
mod withdraw;

pub use allocate::Taken;
pub(super) use flush::pending;

use std::future::Future;

use parking_lot::Mutex;

use begin::Begin;
use cache::Cache;

use super::header::{Header, SPANS, Spread, User};
use super::layout::{Shape, Word};
use super::log::Layer;

/// CAS failures of one allocation from which on a span is contended (FineMem §4.1).
pub const CONTENDED_FROM: u32 = 10;
/// CAS failures below which it is not contended any more.
pub const CONTENDED_BELOW: u32 = 3;
/// Words that are read with one READ at most.
pub const BATCH: usize = 512;

/// READ and CAS on the words of the metadata.
pub trait Verbs: Sync {
    /// What goes wrong.
    type Error: Send;

    /// Reads the words from `at` on. Each is read whole; they need not be of one moment.
    fn read(
        &self,
        at: Word,
        out: &mut [u64],
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Puts `new` into a word if it is `expected`; what it was.
    fn cas(
        &self,
        at: Word,
        expected: u64,
        new: u64,
    ) -> impl Future<Output = Result<u64, Self::Error>> + Send;

    /// Reads `first` and then `second`, posted together where that is possible.
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

    /// Reads several words from `first` on and then several from `second` on, posted together where that is
    /// possible. Not more than [`BATCH`] in all.
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

    /// A CAS, and what the word `then` is after it, posted together where that is possible.
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

    /// A CAS, and what the words in `then` are after it, read in this order, posted together where that is
    /// possible. What was read after a CAS that failed may be anything.
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

/// A header as it was seen last.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    header: Header,
    /// Its temporary log is in the full log, as far as is known here.
    flushed: bool,
}

/// One of the two kinds of headers, by index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    layer: Layer,
    index: u32,
}

impl Place {
    fn section(index: u32) -> Self {
        Self { layer: Layer::Section, index }
    }

    fn span(index: u32) -> Self {
        Self { layer: Layer::Span, index }
    }

    fn word(self, shape: Shape) -> Word {
        match self.layer {
            Layer::Section => shape.section(self.index),
            Layer::Span => shape.span(self.index),
        }
    }
}

/// A tree as one of its users sees it.
pub struct Tree {
    shape: Shape,
    user: User,
    cache: Box<Mutex<Cache>>,
    begin: Begin,
    contention_control: bool,
}

impl Tree {
    /// The tree of that shape, for `user`, of which nothing is known yet.
    pub fn new(shape: Shape, user: User) -> Self {
        let cache = Box::new(Mutex::new(Cache::new(shape)));
        Self { shape, user, cache, begin: Begin::of(user), contention_control: true }
    }

    /// The same for whom nothing follows from a CAS that fails: he tries again where he is, whoever else is there, and
    /// begins where many others do. To be compared with (FineMem §6.2, figure 11).
    pub fn without_contention_control(shape: Shape, user: User) -> Self {
        Self { contention_control: false, begin: Begin::crowded(user), ..Self::new(shape, user) }
    }

    /// CASes of an allocation that failed on one header, as far as anything follows from it.
    fn counted(&self, failures: u32) -> u32 {
        if self.contention_control { failures } else { 0 }
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    fn known(&self, place: Place) -> Option<Seen> {
        self.cache.lock().known(place)
    }

    fn remember(&self, place: Place, header: Header, flushed: bool) -> Seen {
        self.cache.lock().remember(place, header, flushed)
    }

    /// Reads a header anew.
    async fn look<V: Verbs>(&self, verbs: &V, place: Place) -> Result<Seen, V::Error> {
        let mut word = [0];
        verbs.read(place.word(self.shape), &mut word).await?;
        Ok(self.remember(place, Header(word[0]), false))
    }

    /// A header, as it is known or as it is now, with its neighbours.
    async fn see<V: Verbs>(&self, verbs: &V, place: Place) -> Result<Seen, V::Error> {
        if let Some(seen) = self.known(place) {
            return Ok(seen);
        }
        let (first, count) = match place.layer {
            Layer::Section => (place.index, self.shape.sections() - place.index),
            Layer::Span => (place.index / SPANS * SPANS, SPANS),
        };
        self.read_headers(verbs, Place { index: first, ..place }, count).await?;
        Ok(self.known(place).unwrap_or_default())
    }

    /// Reads up to [`BATCH`] headers from a place on.
    async fn read_headers<V: Verbs>(
        &self,
        verbs: &V,
        from: Place,
        count: u32,
    ) -> Result<(), V::Error> {
        let mut words = vec![0; BATCH.min(count as usize)];
        verbs.read(from.word(self.shape), &mut words).await?;
        let mut cache = self.cache.lock();
        for (index, word) in (from.index..).zip(&words) {
            cache.remember(Place { index, ..from }, Header(*word), false);
        }
        Ok(())
    }

    /// Reads the headers of sections and, after them, of their spans.
    async fn read_whole_sections<V: Verbs>(
        &self,
        verbs: &V,
        sections: std::ops::Range<u32>,
    ) -> Result<(), V::Error> {
        let count = sections.len();
        let (mut own, mut spans) = (vec![0; count], vec![0; count * SPANS as usize]);
        let (first, span) = (Place::section(sections.start), Place::span(sections.start * SPANS));
        let at = [first, span].map(|place| place.word(self.shape));
        verbs.read_two((at[0], &mut own), (at[1], &mut spans)).await?;
        let mut cache = self.cache.lock();
        for (from, words) in [(first, own), (span, spans)] {
            for (index, word) in (from.index..).zip(words) {
                cache.remember(Place { index, ..from }, Header(word), false);
            }
        }
        Ok(())
    }

    /// Changes a header from what was seen; what was found instead, if it was another.
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

    /// Sets a hint right, in one attempt: the state of a span that its own header has for its chunks. `seen`
    /// is the section's header as it was before the span's was found in use.
    async fn hint<V: Verbs>(
        &self,
        verbs: &V,
        span: u32,
        seen: Header,
        spread: Spread,
    ) -> Result<(), V::Error> {
        let (section, at) = (span / SPANS, span % SPANS);
        // An empty span is opened, never hinted at: then the section's word was too old.
        if seen.spread(at) != spread && seen.spread(at) != Spread::Empty {
            let _ = self
                .change(verbs, Place::section(section), seen, seen.with_spread(at, spread))
                .await?;
        }
        Ok(())
    }
}
