//! Round trips, and the ticks of the epochs.

use smallvec::SmallVec;

use super::words::PLACE_END;
use super::{SharedStore, epochs};
use crate::blocks::{Length, SharedBlocks};
use crate::environment::Environment;
use crate::error::Error;
use crate::place::{Address, Place};
use crate::reach::{Reach, Step, run_with_rights};
use crate::store::Form;
use crate::store::trips::{Operation, Trip};

/// Steps of one round trip.
pub(super) type Steps<'a> = SmallVec<[Step<'a>; 6]>;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Executes `steps` in one round trip.
    pub(super) async fn run(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error> {
        trip.count();
        Ok(run_with_rights(&self.reach, steps).await?)
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
        self.run(trip, &mut [Step::Cas { at, expected, new, old: &mut old }]).await?;
        Ok(old)
    }

    /// Reads words. One round trip.
    pub(super) async fn words<const N: usize>(
        &self,
        trip: &Trip<'_>,
        at: [Address; N],
    ) -> Result<[u64; N], Error> {
        let mut bytes = [[0; 8]; N];
        let mut steps: Steps<'_> =
            at.iter().zip(&mut bytes).map(|(at, into)| Step::Read { at: *at, into }).collect();
        self.run(trip, &mut steps).await?;
        drop(steps);
        Ok(bytes.map(u64::from_be_bytes))
    }

    /// True if the form lets a WRITE of `block` and a CAS at `at` be posted together.
    pub(super) fn is_fused(&self, block: Address, at: Address) -> bool {
        self.settings.form == Form::Fused && self.reach.ordered(block, at)
    }

    /// Allocates a block for a part of the index, which no word names yet.
    pub(super) async fn allocate(&self, bytes: usize) -> Result<Place, Error> {
        let mut place = self.blocks.allocate(bytes as u32).await?;
        if place.is_none() {
            // Words use place 0 for "none". The block stays allocated, so this happens once.
            place = self.blocks.allocate(bytes as u32).await?;
        }
        self.check_place(place, bytes)
    }

    /// Allocates a block of a value, which no word names yet.
    pub(super) async fn allocate_value(
        &self,
        bytes: usize,
        length: Length,
    ) -> Result<Place, Error> {
        let mut place = self.blocks.allocate_value(bytes as u32, length).await?;
        if place.is_none() {
            place = self.blocks.allocate_value(bytes as u32, length).await?;
        }
        self.check_place(place, bytes)
    }

    fn check_place(&self, place: Place, bytes: usize) -> Result<Place, Error> {
        if place.bits() >= PLACE_END {
            self.blocks.release(place, bytes as u32);
            return Err(Error::Setting("mode `shared` has the memory nodes 0 to 63; use fewer"));
        }
        Ok(place)
    }

    /// Reads the epochs of all clients, if a tick is due: frees unlinked blocks, and tells other
    /// clients that this one has passed. A client that runs no operations must call this too, once
    /// in a few milliseconds; otherwise no unlinked block of another client becomes free.
    pub async fn tick(&self) -> Result<(), Error> {
        self.tick_after(self.settings.tick_ms).await
    }

    /// Like [`SharedStore::tick`], `interval` ms after the latest tick.
    pub(super) async fn tick_after(&self, interval: u64) -> Result<(), Error> {
        let Some(unlinked) = self.epochs.begin_tick(self.environment.now(), interval) else {
            return Ok(());
        };
        let aborted = Aborted(Some(&self.epochs));
        let trip = self.counters.begin(Operation::Maintain);
        let mut block = vec![0; self.epochs.block_bytes()];
        let at = self.epochs.epoch_word();
        self.run(&trip, &mut [Step::Read { at, into: &mut block }]).await?;
        aborted.disarm();
        let found = self.epochs.end_tick(&block, unlinked, self.settings.suspect_ms);
        found.free.iter().for_each(|(place, bytes)| self.blocks.release(*place, *bytes));
        let own = found.own.map(|epoch| self.epochs.own_word(epoch).to_be_bytes());
        let mut before = 0;
        let mut steps = Steps::new();
        if let Some(own) = &own {
            let at = self.epochs.client_word(self.epochs.client());
            steps.push(Step::Write { at, from: own });
        }
        if found.is_reached {
            let (expected, new) = (found.epoch, found.epoch + 1);
            steps.push(Step::Cas { at, expected, new, old: &mut before });
        }
        if !steps.is_empty() {
            self.run(&trip, &mut steps).await?;
        }
        for (client, life) in found.suspects {
            self.examine(client, life).await?;
        }
        Ok(())
    }
}

/// Ends a tick that breaks off.
struct Aborted<'a>(Option<&'a epochs::Epochs>);

impl Aborted<'_> {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Aborted<'_> {
    fn drop(&mut self) {
        if let Some(epochs) = self.0 {
            epochs.abort_tick();
        }
    }
}
