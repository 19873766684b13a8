//! Operations that change one key.

use std::borrow::Cow;

use super::fresh::{Fresh, Known};
use super::look::{Among, Hit, Want};
use super::words::is_frozen;
use super::{Key, Op, SharedStore};
use crate::blocks::{NoBlock, SharedBlocks};
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::EXPIRY_MAX;
use crate::place::Place;
use crate::reach::{Reach, Step};
use crate::store::pieces;
use crate::store::trips::Operation;
use crate::store::{Condition, Expiry, Form, Outcome, SetOptions, Update};

/// Ticks for which a change waits at least until unlinked blocks are free.
const TICKS: usize = 8;
/// Milliseconds for which a change waits until unlinked blocks are free.
const PATIENCE_MS: u64 = 50;
/// Ticks after which the clock counts as stopped.
const TICKS_STUCK: usize = 1000;

/// One attempt at a change.
#[derive(Clone, Copy)]
struct Plan {
    want: Want,
    /// True if the block for the new value was encoded before the look-up.
    is_ahead: bool,
    /// Number of attempts before.
    attempt: u32,
}

/// The result of one attempt at a change.
pub(super) enum Tried {
    Done,
    Again,
}

/// A key that is there: its value, if the operation wants values, and its expiry.
type Current<'a> = Option<(Option<&'a [u8]>, u64)>;

/// A value and an expiry that are known before the look-up.
type Ahead<'v> = Option<(&'v [u8], u64)>;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
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
        let decide = |current: Current<'_>| {
            let is_met = match options.condition {
                Condition::Always => true,
                Condition::IfAbsent => current.is_none(),
                Condition::IfPresent => current.is_some(),
            };
            let old = current.and_then(|(value, _)| value.map(<[u8]>::to_vec));
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
        let decide = |current: Current<'_>| {
            was_there = current.is_some();
            Update::Delete
        };
        self.change(Operation::Delete, key, Want::Places, None, decide).await?;
        Ok(was_there)
    }

    /// Changes a key by `change`, which gets the value (`None`: the key is not there) and the
    /// expiry in milliseconds since 1970 (0: none). No other change of the key comes in between.
    ///
    /// `change` is called again if another client changed the key meanwhile.
    pub async fn update<'v>(
        &self,
        db: u8,
        key: &[u8],
        mut change: impl FnMut(Option<&[u8]>, u64) -> Update<'v>,
    ) -> Result<(), Error> {
        let key = self.key(db, key)?;
        let decide = |current: Current<'_>| match current {
            Some((value, expiry)) => change(Some(value.unwrap_or_default()), expiry),
            None => change(None, 0),
        };
        self.change(Operation::Update, key, Want::Value, None, decide).await
    }

    /// Sets the expiry of a key to `at`, in milliseconds since 1970; 0 removes the expiry. A time
    /// that has passed deletes the key. `is_wanted` gets the present expiry and decides.
    ///
    /// Returns true if the key is there and its expiry was to change. The call writes a new block:
    /// a WRITE of the expiry in place could be lost beside a change that keeps the old expiry.
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
        let decide = |current: Current<'_>| {
            is_done = current.is_some_and(|(_, expiry)| is_wanted(expiry));
            match is_done {
                false => Update::Keep,
                true if at != 0 && at <= now => Update::Delete,
                true => Update::Expire(at.min(EXPIRY_MAX)),
            }
        };
        self.change(Operation::Expire, key, Want::Value, None, decide).await?;
        Ok(is_done)
    }

    /// Changes one key as `decide` says.
    async fn change<'v>(
        &self,
        kind: Operation,
        key: Key<'_>,
        want: Want,
        ahead: Ahead<'_>,
        mut decide: impl FnMut(Current<'_>) -> Update<'v>,
    ) -> Result<(), Error> {
        let mut now = self.environment.now();
        let (until, mut moved) = (now.saturating_add(PATIENCE_MS), 0);
        for tick in 1.. {
            let op = self.begin(kind).await?;
            let failed = match self.change_in(&op, &key, want, ahead, &mut decide).await {
                Err(error @ Error::HeldBack(_)) => error,
                Err(error @ Error::NoBlock(NoBlock::Full)) if self.limbo_bytes() > 0 => error,
                result => return result,
            };
            // Without the operation, which holds back the epoch of this client.
            drop(op);
            self.tick_after(0).await?;
            let before = std::mem::replace(&mut now, self.environment.now());
            moved = if now == before { moved } else { tick };
            if tick >= TICKS && (now >= until || tick - moved >= TICKS_STUCK) {
                return Err(failed);
            }
        }
        Ok(())
    }

    async fn change_in<'v>(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        want: Want,
        ahead: Ahead<'_>,
        decide: &mut impl FnMut(Current<'_>) -> Update<'v>,
    ) -> Result<(), Error> {
        let mut ready = match ahead {
            Some((value, expiry)) => Some(self.fresh(op, key, value, expiry).await?),
            None => None,
        };
        for attempt in 0..self.settings.attempts {
            let plan = Plan { want, is_ahead: ahead.is_some(), attempt };
            match self.attempt(op, key, plan, &mut ready, decide).await? {
                Tried::Done => return Ok(()),
                Tried::Again => {}
            }
        }
        Err(Error::contended(self.settings.attempts))
    }

    /// Attempts a change. `ready`: a block for the new value.
    async fn attempt<'s, 'v>(
        &'s self,
        op: &Op<'_>,
        key: &Key<'_>,
        plan: Plan,
        ready: &mut Option<Fresh<'s, B>>,
        decide: &mut impl FnMut(Current<'_>) -> Update<'v>,
    ) -> Result<Tried, Error> {
        let mut buffer = self.buffers.take();
        let along = ready.as_ref().filter(|fresh| !fresh.is_written).map(Fresh::write);
        let seen = self.look(op, key, true, along).await?;
        let Some(seen) = seen else {
            return match decide(None) {
                Update::Put(..) => {
                    self.begin_database(op, key.db).await?;
                    Ok(Tried::Again)
                }
                _ => Ok(Tried::Done),
            };
        };
        if let Some(fresh) = ready {
            fresh.is_written = true;
        }
        let among = Among { view: &seen.view, tentative: true, known: &[] };
        let hits = self.search(op, key, plan.want, among, &mut buffer).await?;
        let (twins, finals): (Vec<Hit>, Vec<Hit>) =
            hits.into_iter().partition(|hit| super::words::is_tentative(hit.raw));
        let hit = finals.into_iter().next();
        let now = self.environment.now();
        let alive = hit.as_ref().filter(|hit| !hit.head.is_expired(now));
        let mut loaded = self.buffers.take();
        let value = match (alive, plan.want) {
            (Some(hit), Want::Value) => {
                let block = self.block(hit, &buffer)?;
                pieces::load(self, &op.trip, hit.word.place, &block, &mut loaded).await?;
                Some(loaded.as_slice())
            }
            _ => None,
        };
        let expiry_before = alive.map_or(0, |hit| hit.head.expiry);
        let update = decide(alive.map(|_| (value, expiry_before)));
        let (value, expiry) = match update {
            Update::Keep => return Ok(Tried::Done),
            Update::Delete => {
                return match &hit {
                    Some(hit) => {
                        let places = self.places(op, hit, &buffer).await?;
                        self.replace(op, key, seen.table, (hit, &places), None).await
                    }
                    None => Ok(Tried::Done),
                };
            }
            Update::Expire(_) if alive.is_none() => return Ok(Tried::Done),
            Update::Expire(at) => (Cow::Owned(value.unwrap_or_default().to_vec()), at),
            Update::Put(value, Expiry::Never) => (value, 0),
            Update::Put(value, Expiry::Keep) => (value, expiry_before),
            Update::Put(value, Expiry::At(at)) => (value, at.min(EXPIRY_MAX)),
        };
        if !plan.is_ahead {
            *ready = None;
        }
        let fresh = match ready {
            Some(fresh) => fresh,
            None => ready.insert(self.fresh(op, key, &value, expiry).await?),
        };
        match &hit {
            Some(hit) => {
                let places = self.places(op, hit, &buffer).await?;
                self.replace(op, key, seen.table, (hit, &places), Some(fresh)).await
            }
            None => self.insert(op, key, &seen, &twins, plan.attempt, fresh).await,
        }
    }

    /// Replaces the block of a key that is there by `fresh`, or by nothing. `places`: all blocks of
    /// the key.
    async fn replace(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        table: Place,
        (hit, places): (&Hit, &[(Place, u32)]),
        fresh: Option<&mut Fresh<'_, B>>,
    ) -> Result<Tried, Error> {
        if is_frozen(hit.raw) {
            self.help_split(op, key, table, false).await?;
            return Ok(Tried::Again);
        }
        let at = self.slot_at(table, hit.slot);
        let old = match fresh {
            None => self.swap(&op.trip, at, hit.raw, 0).await?,
            Some(fresh) => {
                let known = fresh.know(Known::Slot);
                let new = fresh.word.word();
                let old = self.write_and_swap(op, fresh, at, hit.raw, new, &mut []).await?;
                if old != hit.raw {
                    fresh.know(known);
                }
                old
            }
        };
        if old != hit.raw {
            return Ok(Tried::Again);
        }
        self.retire(places);
        Ok(Tried::Done)
    }

    /// Writes the block, unless that is done, and replaces the word at `at`; then executes `more`.
    /// One round trip if the form and the QPs allow it. Returns the word before.
    pub(super) async fn write_and_swap(
        &self,
        op: &Op<'_>,
        fresh: &mut Fresh<'_, B>,
        at: crate::place::Address,
        expected: u64,
        new: u64,
        more: &mut [Step<'_>],
    ) -> Result<u64, Error> {
        let mut old = 0;
        let (place, bytes) = fresh.write();
        let is_fused = self.is_fused(place, at);
        let mut steps = super::access::Steps::new();
        if !fresh.is_written {
            steps.push(Step::Write { at: place, from: bytes });
            if !is_fused {
                self.run(&op.trip, &mut steps).await?;
                steps.clear();
            }
        }
        steps.push(Step::Cas { at, expected, new, old: &mut old });
        if self.settings.form == Form::Fused {
            steps.extend(more.iter_mut().map(Step::reborrow));
            self.run(&op.trip, &mut steps).await?;
        } else {
            self.run(&op.trip, &mut steps).await?;
            if !more.is_empty() {
                self.run(&op.trip, more).await?;
            }
        }
        drop(steps);
        fresh.is_written = true;
        Ok(old)
    }
}
