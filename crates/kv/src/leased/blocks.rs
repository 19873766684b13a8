//! Allocation of blocks in objects.
//!
//! A part of the index is one object. Of values, some blocks of one length are one object
//! ([`Together`](super::Together)), so that one request allocates several blocks. The compute node
//! that frees the last block of an object frees the object. It finds out by a count in the
//! [table of names](super::names), which each free of a block increases by FETCH_AND_ADD.
//!
//! A compute node that ends without leaving loses the blocks that it has allocated and not used.
//! They go back with the domain, when its last member leaves.

use std::collections::BTreeMap;

use pool::join::join;
use pool::{LeaseTerms, Object, Others, Permission};
use verbs::Nic;

use super::names::{Kind, Short, Spot};
use super::{End, LeasedMemory, TRIES, no_object, renamed};
use crate::blocks::{Length, SharedBlocks};
use crate::error::Error;
use crate::place::Place;
use crate::pooled::lists::{LIST, stopped};
use crate::reach::{Reach, Step, Stopped};

/// Frees of objects in flight at once.
const WIDTH: usize = 8;

/// Blocks of a compute node.
#[derive(Debug, Default)]
pub(super) struct Free {
    /// Blocks of values that were allocated and not used, by their length.
    blocks: BTreeMap<u32, Vec<Place>>,
    /// Blocks to be freed, with the lengths for which they were allocated.
    released: Vec<(Place, u32)>,
    /// The permission of the latest allocation of values, if it is to be revoked.
    latest: Option<(Short, Permission)>,
}

impl<N: Nic> LeasedMemory<N> {
    /// The whole name of an object, as far as this compute node knows its generation.
    pub(super) fn object(&self, name: Short, kind: Kind) -> Object {
        let upper = self.shared.upper.lock().get(&name.entry).copied().unwrap_or(0);
        self.shared.layout.object(name, kind, upper)
    }

    /// Reads the upper bits of an entry's generation in the table of names. Returns true if they
    /// are not those that this compute node knew.
    pub(super) async fn learn(&self, entry: u32) -> Result<bool, Stopped> {
        let mut word = [0; 8];
        let at = self.shared.layout.word(entry);
        // Boxed, because an access to the table may acquire the table's permission.
        Box::pin(self.run(&mut [Step::Read { at, into: &mut word }])).await?;
        let upper = (u64::from_be_bytes(word) >> 32) as u32;
        Ok(self.shared.upper.lock().insert(entry, upper).unwrap_or(0) != upper)
    }

    /// Writes the upper bits of a new object's generation into the table of names, unless they are
    /// there. No block of the object is named yet, so no other compute node changes the word.
    async fn teach(&self, object: &Object) -> Result<(), Stopped> {
        let (entry, upper) = (object.entry, self.shared.layout.upper(object.generation));
        let known = self.shared.upper.lock().get(&entry).copied().unwrap_or(0);
        if known == upper {
            return Ok(());
        }
        let word = (u64::from(upper) << 32).to_be_bytes();
        let at = self.shared.layout.word(entry);
        self.run(&mut [Step::Write { at, from: &word }]).await?;
        self.shared.upper.lock().insert(entry, upper);
        Ok(())
    }

    /// Allocates an object of `bytes`.
    async fn allocate_object(&self, kind: Kind, bytes: u64) -> Result<Object, Error> {
        let shared = &*self.shared;
        let terms = LeaseTerms::shared_write(shared.settings.lease);
        let bytes = shared.layout.allocated(bytes);
        let allocate = || shared.pool.allocate_object_in(shared.group, bytes, Others::Own, &terms);
        let allocated = match allocate().await {
            Err(pool::Error::OutOfMemory { .. } | pool::Error::TooMany { .. }) => {
                self.free_released().await?;
                allocate().await
            }
            allocated => allocated,
        };
        let (object, permission) = allocated.map_err(no_object)?;
        if shared.layout.place(kind, object.entry, object.generation, 0).is_none() {
            shared.pool.free_object(&object).await.map_err(stopped)?;
            return Err(Error::Setting(
                "the memory node has more objects than the index can name; create the index with \
                 more objects",
            ));
        }
        self.teach(&object).await?;
        let is_open = |held: &Permission| !shared.pool.left(held).is_zero();
        let name = shared.layout.name_of(&object);
        shared.held.lock().add(name, 0..bytes, &permission, is_open);
        if kind == Kind::Values && shared.settings.end == End::Revoke {
            // The blocks of the object before are written by now.
            let latest = shared.free.lock().latest.replace((name, permission));
            if let Some((name, permission)) = latest {
                shared.held.lock().forget(name, &permission);
                shared.pool.revoke(&permission).await.map_err(stopped)?;
            }
        }
        Ok(object)
    }

    /// Place of the bytes at `offset` of an object that [`Self::allocate_object`] has allocated.
    fn place(&self, kind: Kind, object: &Object, offset: u32) -> Result<Place, Error> {
        let place = self.shared.layout.place(kind, object.entry, object.generation, offset);
        place.ok_or(Error::Setting("an object's entry is beyond the table of names"))
    }

    /// Frees an object. An object that is not there was freed before.
    ///
    /// # Errors
    /// Those of the pool, and [`Stopped::Renamed`]. The object then stays until the last member of
    /// the domain has left.
    async fn free_object(&self, name: Short, kind: Kind) -> Result<(), Stopped> {
        self.shared.held.lock().forget_object(name);
        for _ in 0..TRIES {
            let object = self.object(name, kind);
            match self.shared.pool.free_object(&object).await {
                Ok(()) => return Ok(()),
                Err(pool::Error::NoSuchObject { .. }) => {
                    if !self.learn(name.entry).await? {
                        return Ok(());
                    }
                }
                Err(error) => return Err(stopped(error)),
            }
        }
        Err(renamed(name))
    }

    /// Frees the blocks that were released.
    async fn free_released(&self) -> Result<(), Stopped> {
        let released = std::mem::take(&mut self.shared.free.lock().released);
        let mut empty = Vec::new();
        let mut values = Vec::new();
        for (place, bytes) in released {
            let Spot { name, kind, .. } = self.shared.layout.spot(place.at(0));
            match kind {
                Kind::Values => values.push((name, bytes)),
                kind => empty.push((name, kind)),
            }
        }
        for values in values.chunks(LIST) {
            self.count_freed(values, &mut empty).await?;
        }
        let frees = empty.into_iter().map(|(name, kind)| self.free_object(name, kind));
        join(frees, WIDTH).await.into_iter().collect()
    }

    /// Counts blocks of values as freed. `empty` gets the objects that have no other block.
    async fn count_freed(
        &self,
        values: &[(Short, u32)],
        empty: &mut Vec<(Short, Kind)>,
    ) -> Result<(), Stopped> {
        let layout = &self.shared.layout;
        let mut olds = vec![0; values.len()];
        let mut steps: Vec<Step<'_>> = values
            .iter()
            .zip(&mut olds)
            .map(|((name, _), old)| Step::Add { at: layout.word(name.entry), amount: 1, old })
            .collect();
        self.run(&mut steps).await?;
        drop(steps);
        let counts = values.iter().zip(olds);
        let last = counts.filter_map(|((name, bytes), old)| {
            let (_, count) = layout.blocks(*bytes)?;
            (old as u32 + 1 == count).then_some((*name, count))
        });
        let last: Vec<(Short, u32)> = last.collect();
        let mut before = vec![0; last.len()];
        let mut steps: Vec<Step<'_>> = last
            .iter()
            .zip(&mut before)
            .map(|((name, count), old)| {
                let amount = u64::from(*count).wrapping_neg();
                Step::Add { at: layout.word(name.entry), amount, old }
            })
            .collect();
        if !steps.is_empty() {
            // Before the object is freed: its entry may have another object at once.
            self.run(&mut steps).await?;
        }
        empty.extend(last.iter().map(|(name, _)| (*name, Kind::Values)));
        Ok(())
    }
}

impl<N: Nic> SharedBlocks for LeasedMemory<N> {
    fn slab(&self) -> u32 {
        self.shared.layout.slab
    }

    async fn allocate(&self, bytes: u32) -> Result<Place, Error> {
        let layout = &self.shared.layout;
        if bytes > layout.slab {
            return Err(Error::Setting("a block longer than a slab was asked for"));
        }
        let kind = Kind::of_index(layout.slab, bytes);
        let object = self.allocate_object(kind, layout.bytes(kind)).await?;
        self.place(kind, &object, 0)
    }

    async fn allocate_value(&self, bytes: u32, length: Length) -> Result<Place, Error> {
        if length == Length::Open {
            // Its readers need a permission to the end of the slab.
            return self.allocate(self.shared.layout.slab).await;
        }
        let Some((each, count)) = self.shared.layout.blocks(bytes) else {
            return Err(Error::Setting("a block longer than a slab was asked for"));
        };
        let kept = self.shared.free.lock().blocks.get_mut(&each).and_then(Vec::pop);
        if let Some(place) = kept {
            return Ok(place);
        }
        let object = self.allocate_object(Kind::Values, u64::from(each * count)).await?;
        // The first block comes last, so that it is used first.
        let rest = (1..count).rev().map(|i| self.place(Kind::Values, &object, i * each));
        let rest: Vec<Place> = rest.collect::<Result<_, _>>()?;
        self.shared.free.lock().blocks.entry(each).or_default().extend(rest);
        self.place(Kind::Values, &object, 0)
    }

    fn release(&self, place: Place, bytes: u32) {
        self.shared.free.lock().released.push((place, bytes));
    }

    async fn tend(&self) -> Result<(), Error> {
        Ok(self.free_released().await?)
    }

    /// Fails: the memory node has the list of all objects, and gives no compute node the names of
    /// objects that another one has lost.
    async fn rebuild(&self, _used: &[(Place, u32)]) -> Result<u64, Error> {
        Err(Error::Setting(
            "blocks in objects that a client has lost go back when the last member of the domain \
             has left",
        ))
    }

    async fn leave(&self) -> Result<(), Error> {
        {
            let mut free = self.shared.free.lock();
            let kept = std::mem::take(&mut free.blocks);
            for (each, places) in kept {
                free.released.extend(places.into_iter().map(|place| (place, each)));
            }
        }
        self.free_released().await?;
        let held = self.shared.held.lock().take_all();
        for permission in held {
            self.shared.pool.revoke(&permission).await.map_err(stopped)?;
        }
        Ok(())
    }
}
