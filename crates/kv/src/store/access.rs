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
use crate::reach::{Reach, Step, Stopped, run_with_rights};

/// Steps of one round trip.
pub(super) type Steps<'a> = SmallVec<[Step<'a>; 6]>;

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
        trip.count();
        Ok(run_with_rights(&self.reach, steps).await?)
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
        self.check()?;
        let mut armed = Armed { interrupted: &self.interrupted, ended: false };
        self.run(trip, steps).await?;
        armed.ended = true;
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
        let fused = self.settings.form == super::Form::Fused;
        if fused && self.reach.ordered(block.0, at) {
            self.commit(trip, &mut [write, swap]).await?;
        } else {
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

    /// The meaning of a CAS that found another word: an error, unless the word is of a subtable
    /// without a mirror, where a task of this store may have changed the slot in between.
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

    /// Refuses all operations from now on: the store is to be opened again.
    pub fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Relaxed);
    }

    /// True if the store refuses all operations.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Reads in remote memory whether this process still owns the store.
    ///
    /// # Errors
    /// [`Error::Deposed`], or the memory node does not answer.
    pub async fn check_owner(&self) -> Result<(), Error> {
        self.check()?;
        let trip = self.trip(super::trips::Operation::Maintain);
        let mut bytes = [0; 8];
        let generation = root::generation_word(self.root);
        self.run(&trip, &mut [Step::Read { at: generation, into: &mut bytes }]).await?;
        if word(&bytes, 0) == self.generation { Ok(()) } else { Err(Error::Deposed) }
    }

    /// Refuses an operation after an interrupted change.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.interrupted.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}

impl From<std::convert::Infallible> for Stopped {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}
