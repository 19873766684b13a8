//! Operations that change one key.

use std::borrow::Cow;
use std::sync::Arc;

use smallvec::SmallVec;

use super::gone::Losses;
use super::look::{Hit, Seen, Want};
use super::trips::{Operation, Trip};
use super::value::Fresh;
use super::{Form, Key, Store};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{EXPIRY, EXPIRY_MAX, expiry_word};
use crate::place::Address;
use crate::reach::{Reach, Step};
use crate::search::{Buckets, View};
use crate::table::{Entered, Entry, Table};
use crate::ticket::Hold;

/// When a value expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expiry {
    /// Never.
    #[default]
    Never,
    /// As the value before.
    Keep,
    /// At this time, in milliseconds since 1970.
    At(u64),
}

/// When a value is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// Always.
    #[default]
    Always,
    /// If the key is not there (NX).
    IfAbsent,
    /// If the key is there (XX).
    IfPresent,
}

/// Options of [`Store::set`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetOptions {
    /// When the value is written.
    pub condition: Condition,
    /// When the value expires.
    pub expiry: Expiry,
    /// Returns the value before.
    pub get: bool,
}

/// The result of [`Store::set`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// True if the value was written.
    pub is_set: bool,
    /// The value before, if asked for.
    pub old: Option<Vec<u8>>,
}

/// What [`Store::update`] does with a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update<'v> {
    /// Leaves the key as it is.
    Keep,
    /// Writes a value.
    Put(Cow<'v, [u8]>, Expiry),
    /// Deletes the key.
    Delete,
    /// Changes the expiry of a key that is there: milliseconds since 1970, 0 for none.
    Expire(u64),
}

impl Update<'_> {
    /// True if the value that a key had is there no more.
    fn replaces(&self) -> bool {
        matches!(self, Self::Put(..) | Self::Delete)
    }
}

/// A key that is there, as a decision sees it.
pub(super) struct Current<'a> {
    /// The value, if the operation wants values.
    pub value: Option<&'a [u8]>,
    /// Milliseconds since 1970; 0: none.
    pub expiry: u64,
}

/// A value that is known before the key has been looked up, and its expiry.
type Ahead<'v> = Option<(&'v [u8], u64)>;

/// The result of one attempt at a change.
pub(super) enum Tried {
    Done,
    Again,
    /// The subtable has no slot left.
    NoSlot(Arc<Table>, u32),
    /// The database has no directory.
    NoDirectory,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Writes a value.
    pub async fn set(
        &self,
        db: u8,
        key: &[u8],
        value: &[u8],
        options: SetOptions,
    ) -> Result<Outcome, Error> {
        let key = self.key(db, key)?;
        let ahead = match options.expiry {
            Expiry::Never => Some((value, 0)),
            Expiry::At(at) => Some((value, at.min(EXPIRY_MAX))),
            Expiry::Keep => None,
        };
        let is_plain = options.condition == Condition::Always && !options.get;
        let ahead = ahead.filter(|_| is_plain && self.settings.form == Form::Published);
        let want = if options.get { Want::Value } else { Want::Places };
        let mut outcome = Outcome::default();
        let decide = |current: Option<Current<'_>>, _| {
            let is_met = match options.condition {
                Condition::Always => true,
                Condition::IfAbsent => current.is_none(),
                Condition::IfPresent => current.is_some(),
            };
            let old = current.and_then(|current| current.value.map(<[u8]>::to_vec));
            outcome = Outcome { is_set: is_met, old };
            if is_met { Update::Put(Cow::Borrowed(value), options.expiry) } else { Update::Keep }
        };
        self.change(Operation::Set, key, want, ahead, decide).await?;
        Ok(outcome)
    }

    /// Deletes a key. Returns true if the key was there.
    pub async fn delete(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        let key = self.key(db, key)?;
        let mut was_there = false;
        let decide = |current: Option<Current<'_>>, _| {
            was_there = current.is_some();
            Update::Delete
        };
        self.change(Operation::Delete, key, Want::Places, None, decide).await?;
        Ok(was_there)
    }

    /// Changes a key by `change`, which gets the value (`None`: the key is not there) and the
    /// expiry in milliseconds since 1970 (0: none). No other change of the key comes in between.
    ///
    /// `change` may be called again, if a split moved the key meanwhile. Returns true if the change
    /// replaced or deleted a key that had expired.
    pub async fn update<'v>(
        &self,
        db: u8,
        key: &[u8],
        mut change: impl FnMut(Option<&[u8]>, u64) -> Update<'v>,
    ) -> Result<bool, Error> {
        let key = self.key(db, key)?;
        let mut ends_expired = false;
        let decide = |current: Option<Current<'_>>, has_expired| {
            let update = match current {
                Some(current) => change(Some(current.value.unwrap_or_default()), current.expiry),
                None => change(None, 0),
            };
            ends_expired = has_expired && update.replaces();
            update
        };
        self.change(Operation::Update, key, Want::Value, None, decide).await?;
        Ok(ends_expired)
    }

    /// Like [`Store::update`], for a change that does not need the value: `change` gets the expiry
    /// in milliseconds since 1970 (0: none; `None`: the key is not there).
    pub async fn alter<'v>(
        &self,
        db: u8,
        key: &[u8],
        mut change: impl FnMut(Option<u64>) -> Update<'v>,
    ) -> Result<bool, Error> {
        let key = self.key(db, key)?;
        let mut ends_expired = false;
        let decide = |current: Option<Current<'_>>, has_expired| {
            let update = change(current.map(|current| current.expiry));
            ends_expired = has_expired && update.replaces();
            update
        };
        self.change(Operation::Set, key, Want::Places, None, decide).await?;
        Ok(ends_expired)
    }

    /// Sets the expiry of a key to `at`, in milliseconds since 1970; 0 removes the expiry. A time
    /// that has passed deletes the key. `is_wanted` gets the present expiry and decides.
    ///
    /// Returns true if the key is there and its expiry was to change.
    pub async fn expire(
        &self,
        db: u8,
        key: &[u8],
        at: u64,
        mut is_wanted: impl FnMut(u64) -> bool,
    ) -> Result<bool, Error> {
        let key = self.key(db, key)?;
        let mut is_done = false;
        let now = self.environment.now();
        let decide = |current: Option<Current<'_>>, _| {
            is_done = current.is_some_and(|current| is_wanted(current.expiry));
            match is_done {
                false => Update::Keep,
                true if at != 0 && at <= now => Update::Delete,
                true => Update::Expire(at.min(EXPIRY_MAX)),
            }
        };
        self.change(Operation::Expire, key, Want::Places, None, decide).await?;
        Ok(is_done)
    }

    /// Changes one key as `decide` says, which also gets whether the key had expired.
    pub(super) async fn change<'v>(
        &self,
        kind: Operation,
        key: Key<'_>,
        want: Want,
        ahead: Ahead<'_>,
        mut decide: impl FnMut(Option<Current<'_>>, bool) -> Update<'v>,
    ) -> Result<(), Error> {
        let ticket = self.ticket(&key, Hold::Exclusive);
        ticket.valid().await;
        let trip = self.trip(kind);
        let _pin = self.blocks.pin();
        let mut losses = Losses::default();
        loop {
            self.check()?;
            let tried = match self.attempt(&trip, &key, want, ahead, &mut decide).await {
                Ok(tried) => tried,
                Err(error) => {
                    losses.meet(error)?;
                    continue;
                }
            };
            match tried {
                Tried::Done => return Ok(()),
                Tried::Again => {}
                Tried::NoSlot(table, depth) => self.split(&table, depth).await?,
                Tried::NoDirectory => match decide(None, false) {
                    Update::Put(..) => self.begin_database(key.db).await?,
                    _ => return Ok(()),
                },
            }
        }
    }

    async fn attempt<'v>(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        want: Want,
        ahead: Ahead<'_>,
        decide: &mut impl FnMut(Option<Current<'_>>, bool) -> Update<'v>,
    ) -> Result<Tried, Error> {
        let Some(table) = self.database(key).table(key.hash.upper) else {
            return Ok(Tried::NoDirectory);
        };
        let table = table.enter().await;
        if !table.local.lock().covers(key.hash.upper) {
            return Ok(Tried::Again);
        }
        let mut ready = match ahead {
            Some((value, expiry)) => Some(self.fresh(trip, key, value, expiry).await?),
            None => None,
        };
        self.attempt_in(trip, &table, key, want, &mut ready, decide).await
    }

    /// Changes the key in `table`. `ready`: the block of the new value, which is taken if used.
    async fn attempt_in<'s, 'v>(
        &'s self,
        trip: &Trip<'_>,
        table: &Entered,
        key: &Key<'_>,
        want: Want,
        ready: &mut Option<Fresh<'s, B>>,
        decide: &mut impl FnMut(Option<Current<'_>>, bool) -> Update<'v>,
    ) -> Result<Tried, Error> {
        let mut buffer = self.buffers.take();
        let along = ready.as_ref().map(Fresh::write);
        let looked = self.look(trip, table, key, want, &mut buffer, along).await?;
        if let Some(fresh) = ready {
            fresh.is_written = true;
        }
        let Some(Seen { hit, view }) = looked else {
            // The subtable covers the key, and no split or merge runs inside the gate.
            return Err(self.foreign_prefix(table));
        };
        let alive = hit.as_ref().filter(|hit| self.is_alive(hit));
        let mut value = self.buffers.take();
        if let (Some(hit), Want::Value) = (alive, want) {
            self.load(trip, hit.word.place, &hit.whole(&buffer)?, &mut value).await?;
        }
        let seen = (want == Want::Value).then_some(value.as_slice());
        let current = alive.map(|hit| Current { value: seen, expiry: hit.expiry });
        let expiry_before = alive.map_or(0, |hit| hit.expiry);
        let is_lost = |hit: &Hit| self.blocks.is_gone(hit.word.place);
        let has_expired = alive.is_none() && hit.as_ref().is_some_and(|hit| !is_lost(hit));
        match (decide(current, has_expired), &hit) {
            (Update::Keep, _) | (Update::Delete | Update::Expire(_), None) => Ok(Tried::Done),
            (Update::Delete, Some(hit)) => self.unlink(trip, table, key, hit, &buffer).await,
            (Update::Expire(at), Some(hit)) => {
                self.write_expiry(trip, table, key, hit, at).await?;
                Ok(Tried::Done)
            }
            (Update::Put(value, expiry), hit) => {
                let expiry = match expiry {
                    Expiry::Never => 0,
                    Expiry::Keep => expiry_before,
                    Expiry::At(at) => at.min(EXPIRY_MAX),
                };
                match hit {
                    Some(hit) => {
                        let fresh = match ready.take() {
                            Some(fresh) => fresh,
                            None => self.fresh(trip, key, &value, expiry).await?,
                        };
                        self.relink(trip, table, key, hit, &buffer, fresh).await
                    }
                    None => {
                        let new = (ready.take(), &*value, expiry);
                        self.link(trip, table, key, view.as_ref(), new).await
                    }
                }
            }
        }
    }

    /// Writes a key that is not there.
    async fn link<'s>(
        &'s self,
        trip: &Trip<'_>,
        table: &Entered,
        key: &Key<'_>,
        view: Option<&View>,
        (ready, value, expiry): (Option<Fresh<'s, B>>, &[u8], u64),
    ) -> Result<Tried, Error> {
        let buckets = Buckets::of(key.hash.upper, self.shape.groups);
        let word = |slot| view.map_or(0, |view| view.slot(slot));
        let (reserved, depth) = {
            let mut local = table.local.lock();
            (local.reserve(buckets, key.hash.tag, word), local.word.depth)
        };
        let Some(slot) = reserved else {
            return Ok(Tried::NoSlot(table.table().clone(), depth));
        };
        let mut reservation = Reservation { table, slot, entry: None };
        let mut fresh = match ready {
            Some(fresh) => fresh,
            None => self.fresh(trip, key, value, expiry).await?,
        };
        let at = table.spot.slot(slot);
        if self.write_fresh(trip, &mut fresh, at, 0).await? != 0 {
            fresh.disown();
            self.lost_swap(trip, at, table.is_mirrored).await?;
            return Ok(Tried::Again);
        }
        let entry = Entry { word: fresh.word.word(), tag: key.hash.tag, expiry };
        reservation.entry = Some(entry);
        drop(reservation);
        self.database(key).count(1);
        self.note(table, key, slot, expiry);
        if let (Form::Published, Some(before)) = (self.settings.form, view) {
            self.look_for_twin(trip, table, key, before, slot).await?;
        }
        Ok(Tried::Done)
    }

    /// Replaces the block of a key.
    async fn relink(
        &self,
        trip: &Trip<'_>,
        table: &Entered,
        key: &Key<'_>,
        hit: &Hit,
        buffer: &[u8],
        mut fresh: Fresh<'_, B>,
    ) -> Result<Tried, Error> {
        let parts = self.parts(trip, hit, buffer).await?;
        let (at, old) = (table.spot.slot(hit.slot), hit.word.word());
        if self.write_fresh(trip, &mut fresh, at, old).await? != old {
            fresh.disown();
            self.lost_swap(trip, at, table.is_mirrored).await?;
            return Ok(Tried::Again);
        }
        let (word, expiry) = (fresh.word.word(), fresh.expiry);
        table.local.lock().replace(hit.slot, Some(Entry { word, tag: key.hash.tag, expiry }));
        // A value that is read often stays cached.
        let standing = self.retire(hit.word, &parts);
        if standing.is_some() {
            self.keep(table, hit.slot, fresh.word, &fresh.bytes, standing);
        }
        self.note(table, key, hit.slot, expiry);
        Ok(Tried::Done)
    }

    /// Writes the block, unless that is done, and replaces the word at `at`.
    async fn write_fresh(
        &self,
        trip: &Trip<'_>,
        fresh: &mut Fresh<'_, B>,
        at: Address,
        old: u64,
    ) -> Result<u64, Error> {
        let new = fresh.word.word();
        // From here on a slot may name the block, whatever the round trip reports.
        fresh.own();
        if fresh.is_written {
            self.swap(trip, at, old, new).await
        } else {
            self.write_and_swap(trip, fresh.write(), at, old, new).await
        }
    }

    /// Deletes a key that is there.
    pub(super) async fn unlink(
        &self,
        trip: &Trip<'_>,
        table: &Entered,
        key: &Key<'_>,
        hit: &Hit,
        buffer: &[u8],
    ) -> Result<Tried, Error> {
        let parts = self.parts(trip, hit, buffer).await?;
        let (at, old) = (table.spot.slot(hit.slot), hit.word.word());
        if self.swap(trip, at, old, 0).await? != old {
            self.lost_swap(trip, at, table.is_mirrored).await?;
            return Ok(Tried::Again);
        }
        table.local.lock().replace(hit.slot, None);
        self.database(key).count(-1);
        self.retire(hit.word, &parts);
        self.touched(key.name());
        Ok(Tried::Done)
    }

    /// Changes the expiry of a key in place.
    async fn write_expiry(
        &self,
        trip: &Trip<'_>,
        table: &Entered,
        key: &Key<'_>,
        hit: &Hit,
        expiry: u64,
    ) -> Result<(), Error> {
        let word = expiry_word(expiry).to_be_bytes();
        let at = hit.word.place.at(EXPIRY);
        self.commit(trip, &mut [Step::Write { at, from: &word }]).await?;
        let entry = Entry { expiry, ..hit.entry(key.hash.tag) };
        table.local.lock().replace(hit.slot, Some(entry));
        self.note(table, key, hit.slot, expiry);
        Ok(())
    }

    /// Reads the buckets again after an insertion, as published: another compute node may have
    /// inserted the key too. In mode `alone` there is none, so a twin is an error.
    async fn look_for_twin(
        &self,
        trip: &Trip<'_>,
        table: &Table,
        key: &Key<'_>,
        before: &View,
        mine: usize,
    ) -> Result<(), Error> {
        let mut view = View::new(before.buckets);
        self.read_buckets(trip, table, &mut view, None).await?;
        let is_known = |slot: &usize| *slot == mine || view.slot(*slot) == before.slot(*slot);
        let known: SmallVec<[usize; 28]> = view.buckets.slots().filter(is_known).collect();
        let mut buffer = self.buffers.take();
        let twin = self.search(trip, key, Want::Presence, &mut buffer, &view, &known).await?;
        match twin {
            Some(twin) => Err(Error::Diverged(table.spot.slot(twin.slot))),
            None => Ok(()),
        }
    }

    /// Notes a write of a key, for watches, expiry and eviction.
    fn note(&self, table: &Table, key: &Key<'_>, slot: usize, expiry: u64) {
        self.touched(key.name());
        self.used(table, slot, true);
        if expiry != 0 {
            self.will_expire(expiry, key.db, key.hash);
        }
    }
}

/// A slot that is reserved for a new key. The slot is free again if the key was not written.
struct Reservation<'a> {
    table: &'a Table,
    slot: usize,
    entry: Option<Entry>,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.table.local.lock().settle(self.slot, self.entry);
    }
}
