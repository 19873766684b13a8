//! Changes of several keys, all or nothing also across a crash.
//!
//! 1. Write all blocks, a record of the changes, and the stripe's word that names the record.
//! 2. Replace all slots, then clear the stripe's word.
//!
//! A crash in 1 leaves no record, or one that is not whole, or one whose blocks are not all whole:
//! no slot was changed. A crash in 2 leaves a whole record, which the successor carries out. The
//! keys' tickets are held until the word is cleared. Otherwise a successor could carry out the
//! record again after a later change.
//!
//! In a full pool the record goes to a block that is reserved in each stripe, so that deletions
//! always work. Deletions of more keys than this block names are done in groups: a crash between
//! two groups leaves the first ones done.

use std::sync::{Arc, OnceLock};

use super::access::Steps;
use super::change::Expiry;
use super::gone::Losses;
use super::look::{Hit, Want};
use super::many::{Found, Sought};
use super::owned::Owned;
use super::trips::{Operation, Trip};
use super::value::Fresh;
use super::{Form, Key, Store};
use crate::blocks::{Blocks, NoBlock};
use crate::environment::Environment;
use crate::error::Error;
use crate::gate::Gate;
use crate::layout::block::EXPIRY_MAX;
use crate::layout::journal::{self, CHANGE_BYTES, Change, HEAD_BYTES};
use crate::place::{Address, Place};
use crate::reach::{Reach, Step};
use crate::search::Buckets;
use crate::table::{Entered, Entry, Table};
use crate::ticket::Hold;

/// The journal: one word in each stripe.
#[derive(Debug, Default)]
pub(super) struct Journal {
    pub words: Vec<Place>,
    /// Closed by the call that uses the stripe's word.
    stripes: Vec<Gate>,
    /// A block in each stripe, for the record of a call that finds the pool full. Empty if a
    /// successor found the pool full; the next call that finds room fills the cell.
    reserved: Vec<OnceLock<Place>>,
}

impl Journal {
    pub fn new(words: Vec<Place>) -> Self {
        let stripes = words.iter().map(|_| Gate::default()).collect();
        let reserved = words.iter().map(|_| OnceLock::new()).collect();
        Self { words, stripes, reserved }
    }
}

/// Greatest length of a reserved record in bytes: 682 changes.
const RESERVED_BYTES: u32 = 16 << 10;

/// A key of [`Store::atomically`].
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The database.
    pub db: u8,
    /// The key.
    pub key: &'a [u8],
    /// True if the change needs the present value.
    pub is_read: bool,
}

/// The keys of a call of [`Store::atomically`], by their numbers in the call.
#[derive(Debug)]
pub struct Transaction {
    /// Number of the first key that is equal.
    same: Vec<usize>,
    states: Vec<State>,
    /// Milliseconds since 1970.
    now: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    is_there: bool,
    value: Vec<u8>,
    expiry: u64,
    is_changed: bool,
    /// An expired value is there, which is not deleted yet.
    has_expired: bool,
}

impl Transaction {
    fn state(&mut self, key: usize) -> &mut State {
        &mut self.states[self.same[key]]
    }

    /// True if key number `key` is there.
    pub fn exists(&self, key: usize) -> bool {
        self.states[self.same[key]].is_there
    }

    /// The value of key number `key`. Empty if the call did not ask for the value.
    pub fn get(&self, key: usize) -> Option<&[u8]> {
        let state = &self.states[self.same[key]];
        state.is_there.then_some(&state.value)
    }

    /// The expiry of key number `key` in milliseconds since 1970; 0: none.
    pub fn expiry(&self, key: usize) -> Option<u64> {
        let state = &self.states[self.same[key]];
        state.is_there.then_some(state.expiry)
    }

    /// True if key number `key` has expired, and was neither written nor deleted since.
    pub fn has_expired(&self, key: usize) -> bool {
        let state = &self.states[self.same[key]];
        state.has_expired || state.is_there && (1..=self.now).contains(&state.expiry)
    }

    /// Writes key number `key`.
    pub fn put(&mut self, key: usize, value: Vec<u8>, expiry: Expiry) {
        let state = self.state(key);
        let expiry = match expiry {
            Expiry::Never => 0,
            Expiry::Keep if state.is_there => state.expiry,
            Expiry::Keep => 0,
            Expiry::At(at) => at.min(EXPIRY_MAX),
        };
        *state = State { is_there: true, value, expiry, is_changed: true, has_expired: false };
    }

    /// Deletes key number `key`. Returns true if the key was there.
    pub fn delete(&mut self, key: usize) -> bool {
        let state = self.state(key);
        let was_there = state.is_there;
        *state = State { is_changed: true, ..State::default() };
        was_there
    }
}

/// A change that is ready to be committed.
struct Ready<'s, B: Blocks> {
    at: Address,
    slot: usize,
    table: Arc<Table>,
    /// Number of the key.
    number: usize,
    old: Option<Hit>,
    parts: Vec<(Place, u32)>,
    /// None: a deletion.
    fresh: Option<Fresh<'s, B>>,
    is_settled: bool,
}

impl<B: Blocks> Ready<'_, B> {
    fn before(&self) -> u64 {
        self.old.as_ref().map_or(0, |hit| hit.word.word())
    }

    /// Address and bytes of the new block.
    fn write(&self) -> Option<(Address, &[u8])> {
        self.fresh.as_ref().map(Fresh::write)
    }

    fn after(&self) -> u64 {
        self.fresh.as_ref().map_or(0, |fresh| fresh.word.word())
    }
}

impl<B: Blocks> Drop for Ready<'_, B> {
    fn drop(&mut self) {
        if self.old.is_none() && !self.is_settled {
            self.table.local.lock().settle(self.slot, None);
        }
    }
}

enum Tried<T> {
    Done(T),
    Again,
    Busy(Arc<Table>),
    NoSlot(Arc<Table>, u32),
    NoDirectory(u8),
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Changes several keys: all or nothing, also if this process ends in the middle, and no other
    /// operation sees a part of the changes of a call that waits for the same keys.
    ///
    /// `change` may be called again, if a split moved a key meanwhile.
    pub async fn atomically<T>(
        &self,
        keys: &[Wanted<'_>],
        mut change: impl FnMut(&mut Transaction) -> T,
    ) -> Result<T, Error> {
        let mut distinct: Vec<(Key<'_>, bool)> = Vec::new();
        let mut same = Vec::with_capacity(keys.len());
        let mut numbers = std::collections::HashMap::new();
        for wanted in keys {
            let key = self.key(wanted.db, wanted.key)?;
            let number = *numbers.entry((wanted.db, wanted.key)).or_insert(distinct.len());
            match distinct.get_mut(number) {
                Some((_, is_read)) => *is_read |= wanted.is_read,
                None => distinct.push((key, wanted.is_read)),
            }
            same.push(number);
        }
        let names = distinct.iter().map(|(key, _)| key.name());
        let ticket = self.tickets.all(names, Hold::Exclusive);
        ticket.valid().await;
        let trip = self.trip(Operation::Atomically);
        let _pin = self.blocks.pin();
        let mut losses = Losses::default();
        loop {
            self.check()?;
            let tried = match self.try_atomically(&trip, &distinct, &same, &mut change).await {
                Ok(tried) => tried,
                Err(error) => {
                    losses.meet(error)?;
                    continue;
                }
            };
            match tried {
                Tried::Done(result) => return Ok(result),
                Tried::Again => {}
                Tried::Busy(table) => table.gate.opened().await,
                Tried::NoSlot(table, depth) => self.split(&table, depth).await?,
                Tried::NoDirectory(db) => self.begin_database(db).await?,
            }
        }
    }

    async fn try_atomically<T>(
        &self,
        trip: &Trip<'_>,
        keys: &[(Key<'_>, bool)],
        same: &[usize],
        change: &mut impl FnMut(&mut Transaction) -> T,
    ) -> Result<Tried<T>, Error> {
        // Entered without waiting: a call that waits for a gate inside another gate could wait for
        // a split that waits for this call.
        let mut entered: Vec<Entered> = Vec::new();
        let mut sought = Vec::with_capacity(keys.len());
        let mut inserts = Vec::with_capacity(keys.len());
        for (key, is_read) in keys {
            let table = self.database(key).table(key.hash.upper);
            if let Some(table) = &table {
                if !entered.iter().any(|entered| Arc::ptr_eq(entered.table(), table)) {
                    match Entered::attempt(table) {
                        Some(now) => entered.push(now),
                        None => return Ok(Tried::Busy(table.clone())),
                    }
                }
                let local = table.local.lock();
                if !local.covers(key.hash.upper) {
                    return Ok(Tried::Again);
                }
                inserts.push(local.inserts);
            } else {
                inserts.push(0);
            }
            let want = if *is_read { Want::Value } else { Want::Places };
            sought.push(Sought { key: *key, want, table });
        }
        let mut buffer = self.buffers.take();
        let Some(found) = self.look_all(trip, &sought, &mut buffer).await? else {
            // All subtables cover their keys, and no split or merge runs inside the gates.
            return Err(self.foreign_prefix(sought[0].table.as_ref().unwrap_or(entered[0].table())));
        };
        let now = self.environment.now();
        let states = self.states(trip, &sought, &found, &buffer, now).await?;
        let mut transaction = Transaction { same: same.to_vec(), states, now };
        let result = change(&mut transaction);
        let mut ready = Vec::new();
        for (number, state) in transaction.states.iter().enumerate() {
            let (sought, found) = (&sought[number], &found[number]);
            if !state.is_changed || !state.is_there && found.hit.is_none() {
                continue;
            }
            let Some(table) = &sought.table else {
                return Ok(Tried::NoDirectory(sought.key.db));
            };
            let (slot, depth) = match &found.hit {
                Some(hit) => (Some(hit.slot), 0),
                None => {
                    let mut local = table.local.lock();
                    if found.view.is_some() && local.inserts != inserts[number] {
                        return Ok(Tried::Again);
                    }
                    (reserve(&mut local, &sought.key, found, self.shape.groups), local.word.depth)
                }
            };
            let Some(slot) = slot else { return Ok(Tried::NoSlot(table.clone(), depth)) };
            let (old, at) = (found.hit.clone(), table.spot.slot(slot));
            let table = table.clone();
            let (parts, fresh) = (Vec::new(), None);
            ready.push(Ready { at, slot, table, number, old, parts, fresh, is_settled: false });
            let ready = ready.last_mut().expect("pushed above");
            if let Some(hit) = &found.hit {
                ready.parts = self.parts(trip, hit, &buffer).await?;
            }
            if state.is_there {
                let (value, expiry) = (&state.value, state.expiry);
                ready.fresh = Some(self.fresh(trip, &sought.key, value, expiry).await?);
            }
        }
        self.commit_all(trip, &mut ready).await?;
        self.apply_all(&sought, ready);
        Ok(Tried::Done(result))
    }

    /// The present values of the keys.
    async fn states(
        &self,
        trip: &Trip<'_>,
        sought: &[Sought<'_>],
        found: &[Found],
        buffer: &[u8],
        now: u64,
    ) -> Result<Vec<State>, Error> {
        let mut states = Vec::with_capacity(sought.len());
        for (sought, found) in sought.iter().zip(found) {
            let mut state = State::default();
            let is_lost = |hit: &Hit| self.blocks.is_gone(hit.word.place);
            let expired = found.hit.as_ref().filter(|hit| hit.is_expired(now) && !is_lost(hit));
            state.has_expired = expired.is_some();
            if let Some(hit) = found.hit.as_ref().filter(|hit| !hit.is_expired(now)) {
                (state.is_there, state.expiry) = (true, hit.expiry);
                if sought.want == Want::Value {
                    let block = hit.whole(buffer)?;
                    self.load(trip, hit.word.place, &block, &mut state.value).await?;
                }
            }
            states.push(state);
        }
        Ok(states)
    }

    async fn commit_all(&self, trip: &Trip<'_>, ready: &mut [Ready<'_, B>]) -> Result<(), Error> {
        match ready {
            [] => Ok(()),
            [one] => self.commit_one(trip, one).await,
            several => self.commit_several(trip, several).await,
        }
    }

    async fn commit_one(&self, trip: &Trip<'_>, one: &mut Ready<'_, B>) -> Result<(), Error> {
        let (at, old, new) = (one.at, one.before(), one.after());
        let before = match &mut one.fresh {
            Some(fresh) => {
                fresh.own();
                self.write_and_swap(trip, fresh.write(), at, old, new).await?
            }
            None => self.swap(trip, at, old, 0).await?,
        };
        if before == old { Ok(()) } else { self.lost_in_call(trip, at).await }
    }

    async fn commit_several(
        &self,
        trip: &Trip<'_>,
        ready: &mut [Ready<'_, B>],
    ) -> Result<(), Error> {
        let stripe = ready[0].table.stripe;
        let _stripe = self.journal.stripes[stripe as usize].close().await;
        self.reserve_record(stripe).await?;
        let changes = changes_of(ready);
        let mut owned = self.owned();
        let (records, first) = match self.records(&mut owned, stripe, &changes).await {
            Err(Error::NoBlock(NoBlock::Full)) => {
                drop(owned);
                return self.commit_by_reserve(trip, stripe, ready).await;
            }
            records => records?,
        };
        self.commit_recorded(trip, ready, stripe, (&records, first), &mut owned).await
    }

    /// Reserves blocks for records of all stripes, as far as the pool has room.
    pub(super) async fn reserve_records(&self) -> Result<(), Error> {
        for stripe in 0..self.journal.words.len() {
            self.reserve_record(stripe as u32).await?;
        }
        Ok(())
    }

    async fn reserve_record(&self, stripe: u32) -> Result<(), Error> {
        let reserved = &self.journal.reserved[stripe as usize];
        if reserved.get().is_some() {
            return Ok(());
        }
        let mut owned = self.owned();
        match owned.allocate(stripe, self.reserved_bytes()).await {
            Ok(place) if reserved.set(place).is_ok() => owned.keep(),
            Ok(_) | Err(NoBlock::Full) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn reserved_bytes(&self) -> u32 {
        RESERVED_BYTES.min(self.slab / 4)
    }

    /// Commits changes in a full pool, with records in the reserved block of `stripe`.
    async fn commit_by_reserve(
        &self,
        trip: &Trip<'_>,
        stripe: u32,
        ready: &mut [Ready<'_, B>],
    ) -> Result<(), Error> {
        let full = Err(Error::NoBlock(NoBlock::Full));
        let Some(place) = self.journal.reserved[stripe as usize].get() else { return full };
        let most = (self.reserved_bytes() as usize - HEAD_BYTES) / CHANGE_BYTES;
        if ready.len() > most && ready.iter().any(|one| one.fresh.is_some()) {
            return full;
        }
        for group in ready.chunks_mut(most) {
            let changes = changes_of(group);
            let mut bytes = vec![0; journal::bytes_of(changes.len())];
            journal::encode(*place, &changes, 0, &mut bytes);
            let first = journal::record_word(*place, bytes.len() as u32);
            let records = [(*place, bytes)];
            self.commit_recorded(trip, group, stripe, (&records, first), &mut self.owned()).await?;
        }
        Ok(())
    }

    /// Commits changes whose records are `records`. The gate of `stripe` is closed.
    async fn commit_recorded(
        &self,
        trip: &Trip<'_>,
        ready: &mut [Ready<'_, B>],
        stripe: u32,
        (records, first): (&[(Place, Vec<u8>)], u64),
        owned: &mut Owned<'_, B>,
    ) -> Result<(), Error> {
        let changes = changes_of(ready);
        let word = self.journal.words[stripe as usize].at(0);

        // The loss of a memory node with values must not stop a round trip that has the record.
        let is_apart = |(at, _): &(Address, &[u8])| at.node != word.node;
        let apart = ready.iter().filter_map(Ready::write).filter(is_apart);
        let mut steps: Steps<'_> = apart.map(|(at, from)| Step::Write { at, from }).collect();
        if !steps.is_empty() {
            self.run(trip, &mut steps).await?;
        }
        drop(steps);

        // From here on a record names the blocks.
        ready.iter_mut().filter_map(|one| one.fresh.as_mut()).for_each(Fresh::own);
        owned.keep();
        let first = first.to_be_bytes();
        {
            let blocks = ready.iter().filter_map(Ready::write).filter(|write| !is_apart(write));
            let records = records.iter().map(|(place, bytes)| (place.at(0), bytes.as_slice()));
            let write = |(at, from)| Step::Write { at, from };
            let mut steps: Steps<'_> = blocks.chain(records).map(write).collect();
            steps.push(Step::Write { at: word, from: &first });
            self.commit(trip, &mut steps).await?;
        }
        let mut before = vec![0; ready.len()];
        let together = self.settings.form == Form::Fused
            && ready.iter().all(|one| self.reach.ordered(one.at, word));
        let clear = Step::Write { at: word, from: &[0; 8] };
        {
            let swap = |(change, old): (&Change, _)| Step::Cas {
                at: change.slot,
                expected: change.old,
                new: change.new,
                old,
            };
            let mut steps: Steps<'_> = changes.iter().zip(&mut before).map(swap).collect();
            if together {
                steps.push(clear);
                self.commit(trip, &mut steps).await?;
            } else {
                self.commit(trip, &mut steps).await?;
                self.commit(trip, &mut [clear]).await?;
            }
        }
        owned.free();
        for (change, before) in changes.iter().zip(before) {
            if change.old != before {
                return self.lost_in_call(trip, change.slot).await;
            }
        }
        Ok(())
    }

    /// A slot that a call of several keys found changed: the call is half done.
    async fn lost_in_call(&self, trip: &Trip<'_>, at: Address) -> Result<(), Error> {
        self.lost_swap(trip, at, true).await?;
        self.interrupted.store(true, std::sync::atomic::Ordering::Relaxed);
        Err(Error::Diverged(at))
    }

    /// Allocates and encodes the records of `changes`. Returns the word of the first one too.
    async fn records(
        &self,
        owned: &mut Owned<'_, B>,
        stripe: u32,
        changes: &[Change],
    ) -> Result<(Vec<(Place, Vec<u8>)>, u64), Error> {
        let most = (self.slab as usize - HEAD_BYTES) / CHANGE_BYTES;
        let mut records = Vec::new();
        let mut next = 0;
        for changes in changes.chunks(most).rev() {
            let mut bytes = vec![0; journal::bytes_of(changes.len())];
            let place = owned.allocate(stripe, bytes.len() as u32).await?;
            journal::encode(place, changes, next, &mut bytes);
            next = journal::record_word(place, bytes.len() as u32);
            records.push((place, bytes));
        }
        Ok((records, next))
    }

    /// Notes committed changes locally, and frees what they replaced.
    fn apply_all(&self, sought: &[Sought<'_>], ready: Vec<Ready<'_, B>>) {
        for mut one in ready {
            let key = &sought[one.number].key;
            let expiry = one.fresh.as_ref().map_or(0, |fresh| fresh.expiry);
            let is_new = one.old.is_none();
            let entry = one.fresh.as_ref().map(|fresh| Entry {
                word: fresh.word.word(),
                tag: key.hash.tag,
                expiry,
            });
            let is_there = entry.is_some();
            {
                let mut local = one.table.local.lock();
                if is_new {
                    local.settle(one.slot, entry);
                } else {
                    local.replace(one.slot, entry);
                }
            }
            one.is_settled = true;
            self.database(key).count(i64::from(is_new) - i64::from(!is_there));
            if let Some(old) = &one.old {
                let standing = self.retire(old.word, &one.parts);
                if let (Some(_), Some(fresh)) = (standing, &one.fresh) {
                    self.keep(&one.table, one.slot, fresh.word, &fresh.bytes, standing);
                }
            }
            self.touched(key.name());
            if is_there {
                self.used(&one.table, one.slot, true);
            }
            if expiry != 0 {
                self.will_expire(expiry, key.db, key.hash);
            }
        }
    }
}

fn changes_of<B: Blocks>(ready: &[Ready<'_, B>]) -> Vec<Change> {
    let change = |one: &Ready<'_, B>| Change { slot: one.at, old: one.before(), new: one.after() };
    ready.iter().map(change).collect()
}

fn reserve(
    local: &mut crate::table::Local,
    key: &Key<'_>,
    found: &Found,
    groups: u32,
) -> Option<usize> {
    let buckets = Buckets::of(key.hash.upper, groups);
    let word = |slot| found.view.as_ref().map_or(0, |view| view.slot(slot));
    local.reserve(buckets, key.hash.tag, word)
}
