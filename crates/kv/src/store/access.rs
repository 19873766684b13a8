//! Round trips, and what follows from their results.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::Store;
use super::trips::Trip;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::{root, word};
use crate::place::Address;
use crate::reach::{Range, Reach, Step, Stopped};

/// Steps of one round trip.
pub(super) type Steps<'a> = SmallVec<[Step<'a>; 6]>;

/// Attempts to finish a round trip that broke off. The pool establishes the connection again.
const ATTEMPTS: u32 = 3;

/// Marks the store as interrupted, unless the change ends.
struct Armed<'a> {
    interrupted: &'a AtomicBool,
    ended: bool,
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.interrupted.store(true, Ordering::Relaxed);
        }
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Executes `steps` in one round trip.
    pub(super) async fn run(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error> {
        self.run_if(trip, steps, false).await.map(drop)
    }

    /// Like [`Store::run`]. `in_order`: only if the order of the steps is kept. Returns false if the
    /// steps were not executed for this reason.
    async fn run_if(
        &self,
        trip: &Trip<'_>,
        steps: &mut [Step<'_>],
        in_order: bool,
    ) -> Result<bool, Error> {
        let mut rights = SmallVec::<[R::Right; 6]>::new();
        let mut result = Ok(true);
        for step in steps.iter() {
            match self.reach.open(range_of(step)).await {
                Ok(right) => rights.push(right),
                Err(stopped) => {
                    result = Err(stopped);
                    break;
                }
            }
        }
        if result.is_ok() {
            result = match in_order {
                true => self.reach.run_in_order(steps).await,
                false => self.reach.run(steps).await.map(|()| true),
            };
        }
        if result != Ok(false) {
            trip.count();
        }
        for right in rights {
            self.reach.close(right).await;
        }
        result.map_err(Error::from)
    }

    /// Like [`Store::run`], for steps that change what words in remote memory name.
    ///
    /// If the round trip does not end well, the fate of the steps is unknown, and the mirror may be
    /// older than remote memory. Therefore the store refuses all further operations.
    pub(super) async fn commit(
        &self,
        trip: &Trip<'_>,
        steps: &mut [Step<'_>],
    ) -> Result<(), Error> {
        self.commit_if(trip, steps, false).await.map(drop)
    }

    /// Like [`Store::commit`], if the order of the steps is kept. Otherwise returns false, and
    /// nothing is executed.
    async fn commit_in_order(
        &self,
        trip: &Trip<'_>,
        steps: &mut [Step<'_>],
    ) -> Result<bool, Error> {
        self.commit_if(trip, steps, true).await
    }

    async fn commit_if(
        &self,
        trip: &Trip<'_>,
        steps: &mut [Step<'_>],
        in_order: bool,
    ) -> Result<bool, Error> {
        let mut armed = Armed { interrupted: &self.interrupted, ended: false };
        let mut result = self.run_if(trip, steps, in_order).await;
        if let Err(Error::Stopped(Stopped::Lost(_))) = &result {
            // Boxed, so that the futures of operations stay small.
            result = Box::pin(self.finish(trip, steps)).await.map(|()| true);
        }
        // The memory that the steps were to change is lost, so it has no fate.
        armed.ended = result.as_ref().map_or_else(|error| self.is_outlived(error), |_| true);
        result
    }

    /// Finishes steps whose round trip broke off, so that each of them may have taken effect or not.
    async fn finish(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.try_to_finish(trip, steps).await {
                Err(Error::Stopped(Stopped::Lost(_))) if attempts < ATTEMPTS => {}
                result => return result,
            }
        }
    }

    /// Executes steps one after the other, in their order. A WRITE has the same effect twice. A CAS
    /// has not, so its word is read first: the old word, the new one and a foreign one tell the
    /// cases apart, because no place is used again while an operation names it.
    async fn try_to_finish(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error> {
        for step in steps {
            match step {
                Step::Read { at, into } => {
                    self.run(trip, &mut [Step::Read { at: *at, into }]).await?;
                }
                Step::Write { at, from } => {
                    self.run(trip, &mut [Step::Write { at: *at, from }]).await?;
                }
                Step::Cas { at, expected, new, old } => {
                    let mut bytes = [0; 8];
                    self.run(trip, &mut [Step::Read { at: *at, into: &mut bytes }]).await?;
                    let found = word(&bytes, 0);
                    **old = if found == *new { *expected } else { found };
                    if found == *expected {
                        let (at, expected, new) = (*at, *expected, *new);
                        self.run(trip, &mut [Step::Cas { at, expected, new, old }]).await?;
                    }
                }
                // The store adds to no word.
                Step::Add { .. } => return Err(Error::Interrupted),
            }
        }
        Ok(())
    }

    /// Writes `from` to `block`, then replaces the word at `at`. Returns the word before.
    ///
    /// One round trip if the order of the two is kept, two otherwise and in form `published`.
    pub(super) async fn write_and_swap(
        &self,
        trip: &Trip<'_>,
        block: (Address, &[u8]),
        at: Address,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        let mut old = 0;
        let write = Step::Write { at: block.0, from: block.1 };
        let swap = Step::Cas { at, expected, new, old: &mut old };
        let mut steps = [write, swap];
        let fused = self.settings.form == super::Form::Fused;
        if !fused || !self.commit_in_order(trip, &mut steps).await? {
            let [write, swap] = steps;
            self.run(trip, &mut [write]).await?;
            self.commit(trip, &mut [swap]).await?;
        }
        Ok(old)
    }

    /// Replaces the word at `at`. Returns the word before.
    pub(super) async fn swap(
        &self,
        trip: &Trip<'_>,
        at: Address,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        let mut old = 0;
        self.commit(trip, &mut [Step::Cas { at, expected, new, old: &mut old }]).await?;
        Ok(old)
    }

    /// The meaning of a CAS that found another word: an error, unless the slot is not mirrored, so
    /// that another task of this store may have changed it in between.
    pub(super) async fn lost_swap(
        &self,
        trip: &Trip<'_>,
        at: Address,
        is_mirrored: bool,
    ) -> Result<(), Error> {
        let mut bytes = [0; 8];
        let generation = root::generation_word(self.root);
        self.run(trip, &mut [Step::Read { at: generation, into: &mut bytes }]).await?;
        let error = if word(&bytes, 0) != self.generation {
            Error::Deposed
        } else if is_mirrored {
            Error::Diverged(at)
        } else {
            return Ok(());
        };
        self.interrupted.store(true, Ordering::Relaxed);
        Err(error)
    }

    /// Refuses an operation after an interrupted change.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.interrupted.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

fn range_of(step: &Step<'_>) -> Range {
    let (bytes, writes) = match step {
        Step::Read { into, .. } => (into.len(), false),
        Step::Write { from, .. } => (from.len(), true),
        Step::Cas { .. } | Step::Add { .. } => (8, true),
    };
    Range { start: step.at(), bytes: bytes as u32, writes }
}

impl From<std::convert::Infallible> for Stopped {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}
