//! Eviction of all keys of a slab, so that blocks of another length find room.
//!
//! A slab has blocks of one class until its last block is free. Keys that are evicted one by one
//! leave holes all over the slabs, which a longer value cannot use.

use std::collections::HashSet;
use std::sync::Arc;

use super::Store;
use super::access::Steps;
use super::compact::give_way;
use super::evict::{Candidates, Eviction, Sampled};
use super::sweep::Tell;
use super::trips::{Operation, Trip};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{HEADER_BYTES, Head, Kind};
use crate::layout::class;
use crate::layout::root::DATABASES;
use crate::layout::table::Slot;
use crate::place::{Place, UNIT};
use crate::reach::{Reach, Step};
use crate::search::{Buckets, View};
use crate::table::Table;

/// Slabs among which one is chosen.
const CHOICES: usize = 4;
/// Keys of a slab whose worth is looked at for the choice.
const LOOKED_AT: usize = 16;
/// Choices in a row that empty no slab, after which the eviction ends.
const VAIN: usize = 16;
/// Keys that are evicted, or blocks that are read, before other tasks run.
const BATCH: usize = 16;

/// The work of an eviction of slabs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Number of keys evicted.
    pub keys: u64,
    /// Number of slabs that have no block in use any more.
    pub slabs: u64,
}

/// A key, and the subtable that has it.
type Owner = (Arc<Table>, Sampled);

/// The next victims.
struct Choice {
    /// The mean worth of its keys: the least goes first.
    worth: i64,
    live_bytes: u64,
    victim: Victim,
}

enum Victim {
    /// The slab that has this place.
    Slab(Place),
    /// A value in pieces, which has slabs of its own.
    Key(Owner),
}

/// Lets new blocks into a slab again when the value is dropped.
struct Vacated<'a, B: Blocks>(&'a B, Place);

impl<B: Blocks> Drop for Vacated<'_, B> {
    fn drop(&mut self) {
        self.0.reuse(self.1);
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Evicts all keys of slabs until `slabs` slabs are empty, or no further slab can be emptied.
    /// A slab with a key that is no candidate stays, and so does one with a part of the index.
    ///
    /// The keys are chosen as by [`Store::evict`], and of their slabs the one whose keys are of
    /// least worth, or the one with the fewest keys. Other tasks of the thread run between keys.
    pub async fn evict_slabs(
        &self,
        slabs: u64,
        candidates: Candidates,
        by: Eviction,
        mut tell: Option<Tell<'_>>,
    ) -> Result<Cleared, Error> {
        let (mut cleared, mut vain) = (Cleared::default(), 0);
        // Slabs that cannot be emptied.
        let mut stay = HashSet::new();
        while cleared.slabs < slabs && vain < VAIN {
            self.check()?;
            let trip = self.trip(Operation::Evict);
            let before = cleared;
            match self.choose_slab(&trip, candidates, by, &mut stay).await? {
                Some(Victim::Slab(slab)) => {
                    let tell = &mut tell;
                    self.empty(&trip, slab, (candidates, by), tell, &mut cleared).await?;
                    stay.insert(slab);
                }
                Some(Victim::Key((table, key))) => {
                    let live = self.blocks.usage().live;
                    let is_evicted = self.evict_key(&trip, &table, key, &mut tell).await?;
                    cleared.keys += u64::from(is_evicted);
                    let freed = live.saturating_sub(self.blocks.usage().live);
                    cleared.slabs += freed / u64::from(self.slab);
                }
                None => {}
            }
            vain = if cleared.slabs > before.slabs { 0 } else { vain + 1 };
            give_way().await;
        }
        self.blocks.give_back().await?;
        Ok(cleared)
    }

    async fn choose_slab(
        &self,
        trip: &Trip<'_>,
        candidates: Candidates,
        by: Eviction,
        stay: &mut HashSet<Place>,
    ) -> Result<Option<Victim>, Error> {
        let mut best: Option<Choice> = None;
        for _ in 0..CHOICES {
            let Some(table) = self.random_table() else { break };
            let mut sample = self.sample(trip, &table, candidates, by).await?;
            let is_alone =
                |word: Slot| word.length == class::PIECES || self.blocks.is_gone(word.place);
            sample
                .retain(|key| is_alone(key.word) || !stay.contains(&self.slab_of(key.word.place)));
            let Some(key) = self.choose(&sample, by) else { continue };
            let choice = if is_alone(key.word) {
                let (worth, live_bytes) = (worth_by(&key, by), self.slab.into());
                Choice { worth, live_bytes, victim: Victim::Key((table, key)) }
            } else {
                let slab = self.slab_of(key.word.place);
                let blocks = self.blocks.blocks_beside(slab);
                let live_bytes = blocks.iter().map(|(_, bytes)| u64::from(*bytes)).sum();
                let every = blocks.len().div_ceil(LOOKED_AT).max(1);
                let some: Vec<Place> = blocks.iter().step_by(every).map(|own| own.0).collect();
                let owners = self.owners(trip, &some, by).await?;
                let Some(worth) = mean_worth(&owners, candidates, by) else {
                    stay.insert(slab);
                    continue;
                };
                Choice { worth, live_bytes, victim: Victim::Slab(slab) }
            };
            let order = |choice: &Choice| (choice.worth, choice.live_bytes);
            if best.as_ref().is_none_or(|best| order(&choice) < order(best)) {
                best = Some(choice);
            }
        }
        Ok(best.map(|best| best.victim))
    }

    /// Evicts all keys of a slab, if all its blocks are those of candidates.
    async fn empty(
        &self,
        trip: &Trip<'_>,
        slab: Place,
        (candidates, by): (Candidates, Eviction),
        tell: &mut Option<Tell<'_>>,
        cleared: &mut Cleared,
    ) -> Result<(), Error> {
        self.blocks.vacate(slab);
        let _vacated = Vacated(&self.blocks, slab);
        let places: Vec<Place> =
            self.blocks.blocks_beside(slab).iter().map(|(place, _)| *place).collect();
        let mut owners = Vec::with_capacity(places.len());
        for places in places.chunks(BATCH) {
            let found = self.owners(trip, places, by).await?;
            if mean_worth(&found, candidates, by).is_none() {
                return Ok(());
            }
            owners.extend(found.into_iter().flatten());
            give_way().await;
        }
        for (at, (table, key)) in owners.into_iter().enumerate() {
            cleared.keys += u64::from(self.evict_key(trip, &table, key, tell).await?);
            if at % BATCH == BATCH - 1 {
                give_way().await;
            }
        }
        cleared.slabs += u64::from(self.blocks.blocks_beside(slab).is_empty());
        Ok(())
    }

    /// The keys whose blocks lie at `places`. `None`: the block is that of no key, or of one that
    /// another operation is about to write.
    async fn owners(
        &self,
        trip: &Trip<'_>,
        places: &[Place],
        by: Eviction,
    ) -> Result<Vec<Option<Owner>>, Error> {
        if places.iter().any(|place| self.blocks.is_gone(*place)) {
            return Ok(vec![None; places.len()]);
        }
        let _pin = self.blocks.pin();
        let mut heads = vec![0; places.len() * HEADER_BYTES];
        if !places.is_empty() {
            let into = heads.chunks_exact_mut(HEADER_BYTES);
            let read = |(place, into): (&Place, _)| Step::Read { at: place.at(0), into };
            let mut steps: Steps<'_> = places.iter().zip(into).map(read).collect();
            self.run(trip, &mut steps).await?;
        }
        let mut owners = Vec::with_capacity(places.len());
        for (place, head) in places.iter().zip(heads.chunks_exact(HEADER_BYTES)) {
            // The bytes may be those of a piece or of the index. A slot decides.
            owners.push(match Head::parse(head) {
                Ok(head) => self.owner(trip, *place, head, by).await?,
                Err(_) => None,
            });
        }
        Ok(owners)
    }

    /// The key whose slot names the block at `place`.
    async fn owner(
        &self,
        trip: &Trip<'_>,
        place: Place,
        head: Head,
        by: Eviction,
    ) -> Result<Option<Owner>, Error> {
        if head.kind == Kind::Continuation || usize::from(head.db) >= DATABASES {
            return Ok(None);
        }
        let Some(table) = self.databases[usize::from(head.db)].table(head.upper) else {
            return Ok(None);
        };
        let buckets = Buckets::of(head.upper, self.shape.groups);
        let named = |word: u64| Slot::parse(word).filter(|word| word.place == place);
        let (now, measure) = (self.environment.now(), self.measured());
        let worth = |slot| table.local.lock().uses.worth(slot, measure, now);
        let found = if table.is_mirrored {
            let local = table.local.lock();
            let Some(mirror) = &local.mirror else { return Ok(None) };
            let slot = buckets.slots().find(|slot| named(mirror.slots[*slot]).is_some());
            slot.and_then(|slot| Some((slot, mirror.entry(slot)?)))
                .and_then(|(slot, own)| Some((slot, named(own.word)?, own.tag, own.expiry)))
        } else {
            let mut view = View::new(buckets);
            self.read_buckets(trip, &table, &mut view, None).await?;
            let mut slots = buckets.slots();
            let found = slots.find_map(|slot| Some((slot, named(view.slot(slot))?)));
            let mut own = None;
            if let Some((slot, word)) = found {
                let tell = |_, head: Head, key: &[u8]| {
                    own = Some((slot, word, self.hasher.hash(key).tag, head.expiry));
                };
                match self.read_keys(trip, std::iter::once(word), tell).await {
                    // The block was freed since the slot was read.
                    Err(Error::Malformed { .. }) => {}
                    read => read?,
                }
            }
            own
        };
        let Some((slot, word, tag, expiry)) = found else { return Ok(None) };
        let worth = if by == Eviction::LeastUsed { worth(slot) } else { 0 };
        Ok(Some((table, Sampled { slot, word, tag, expiry, worth })))
    }

    /// The first place of the slab that has `place`.
    fn slab_of(&self, place: Place) -> Place {
        let units = u64::from(self.slab) / UNIT;
        Place::new(place.node(), place.unit() / units * units).unwrap_or(place)
    }
}

/// The worth of a key in the order of `by`.
fn worth_by(key: &Sampled, by: Eviction) -> i64 {
    match by {
        Eviction::LeastUsed => key.worth,
        Eviction::Random => 0,
        Eviction::SoonestExpiry if key.expiry == 0 => i64::MAX,
        Eviction::SoonestExpiry => key.expiry as i64,
    }
}

/// The mean worth of keys. `None`: one of the blocks has to stay.
fn mean_worth(owners: &[Option<Owner>], candidates: Candidates, by: Eviction) -> Option<i64> {
    let mut sum = 0_i128;
    for owner in owners {
        let (_, key) = owner.as_ref()?;
        if candidates == Candidates::Volatile && key.expiry == 0 {
            return None;
        }
        sum += i128::from(worth_by(key, by));
    }
    Some((sum / owners.len().max(1) as i128) as i64)
}
