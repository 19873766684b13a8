//! Runs commands whose keys are among their arguments.

use kv::blocks::{Blocks, NoBlock};
use kv::reach::Stopped;
use kv::{Expiry, Transaction, Update, Wanted};
use redis_formats::command::Id;
use redis_formats::command::bits::flag::WRITE;
use verbs::Nic;

use super::call::{Call, Cell, Cells, Change, Effects, FULL, Output, perform};
use super::plan::{KeyAt, Plan, cells_of, keys, only_key, plan};
use super::upkeep::Attempts;
use super::{Data, whole};
use crate::client::flag;
use crate::context::Context;

impl<'v> Change<'v> {
    fn into_update(self) -> Update<'v> {
        match self {
            Self::None => Update::Keep,
            Self::Put(value, 0) => Update::Put(value, Expiry::Never),
            Self::Put(value, at) => Update::Put(value, Expiry::At(at)),
            Self::Delete => Update::Delete,
            Self::Expire(at) => Update::Expire(at),
        }
    }

    /// Leaves the change of key `number` to a call of several keys.
    pub fn leave(self, transaction: &mut Transaction, number: usize) {
        let expiry = |at| if at == 0 { Expiry::Never } else { Expiry::At(at) };
        match self {
            Self::None => {}
            Self::Put(value, at) => transaction.put(number, value.into_owned(), expiry(at)),
            Self::Delete => {
                transaction.delete(number);
            }
            Self::Expire(at) => {
                if let Some(value) = transaction.get(number).map(<[u8]>::to_vec) {
                    transaction.put(number, value, expiry(at));
                }
            }
        }
    }
}

/// The call of the context's command.
pub(super) fn call_of<'a, N: Nic>(cx: &Context<'a, Data<N>>) -> Call<'a> {
    Call {
        command: cx.command,
        args: cx.args,
        db: cx.session.db,
        now_ms: cx.now_ms(),
        bulk_max: cx.server().config.live.bulk_max(),
        room: room(cx, cx.command.id),
    }
}

/// Maximum bytes of a string that a command makes longer. Eviction may free all other values.
pub(super) fn room<N: Nic>(cx: &Context<'_, Data<N>>, id: Id) -> u64 {
    match id {
        Id::Append | Id::Setrange | Id::Setbit | Id::Bitfield | Id::Bitop => {
            let evicts = !cx.server().config.is("maxmemory-policy", "noeviction");
            let live = if evicts { 0 } else { cx.store.store.blocks().usage().live };
            cx.store.capacity().saturating_sub(live)
        }
        _ => u64::MAX,
    }
}

/// Returns whether a read by a command counts as a use of its keys, for OBJECT and for eviction.
fn counts_as_use<N: Nic>(cx: &Context<'_, Data<N>>, id: Id) -> bool {
    match id {
        Id::Touch => true,
        Id::ObjectEncoding | Id::ObjectRefcount | Id::MemoryUsage => false,
        _ => !cx.session.client.has(flag::NO_TOUCH),
    }
}

/// Returns whether a command that finds its key expired counts that. RESTORE with REPLACE deletes
/// the key without a look at its expiry, as in Redis.
pub(super) fn meets_expired(call: &Call<'_>) -> bool {
    let replaces = || (4..call.args.count()).any(|at| call.args.is(at, "replace"));
    call.command.id != Id::Restore || !replaces()
}

/// Executes a command on data.
pub(super) async fn execute<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    if let Some(reply) = cx.session.prepared.take() {
        cx.out.extend_from_slice(&reply);
        return;
    }
    let barrier = &cx.store.state.barrier;
    if cx.session.in_exec {
        // EXEC has entered the barrier, or closed it.
        execute_inside(cx).await;
    } else if whole::runs_alone(cx) {
        let _alone = barrier.close().await;
        execute_inside(cx).await;
    } else {
        let _shared = barrier.enter(cx.worker.index).await;
        execute_inside(cx).await;
    }
}

async fn execute_inside<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let call = call_of(cx);
    match plan(&call) {
        Some(plan) => run(cx, &call, plan).await,
        None => whole::execute(cx).await,
    }
}

/// Executes a command with its plan.
async fn run<N: Nic>(cx: &mut Context<'_, Data<N>>, call: &Call<'_>, plan: Plan) {
    let begin = cx.out.len();
    let mut effects = Effects::new(cx.server().config.live.notify() != 0);
    let bytes = call.args.from(0).map(|arg| arg.len() as u64).sum();
    let mut attempts = Attempts::new(bytes);
    loop {
        let result = match only_key(call) {
            Some(index) => run_one(cx, call, plan, index, &mut effects).await,
            None => run_several(cx, call, plan, &mut effects).await,
        };
        match result {
            Ok(()) => break,
            Err(error) => {
                cx.out.truncate(begin);
                effects.clear();
                let is_full = error == kv::Error::NoBlock(NoBlock::Full);
                if !is_full || !cx.store.free_something(cx.worker, &mut attempts).await {
                    cx.error(text_of(&error));
                    break;
                }
            }
        }
    }
    cx.session.is_closing |= effects.has_panicked;
    if effects.events.is_empty() {
        publish(cx, call, &effects, &[]);
    } else {
        publish(cx, call, &effects, &keys(call));
    }
}

/// The reply to an error of the store.
pub(super) fn text_of(error: &kv::Error) -> String {
    match error {
        kv::Error::NoBlock(NoBlock::Full) => FULL.to_owned(),
        // Nothing was done: the store had an operation without an answer before.
        kv::Error::Interrupted => format!("MASTERDOWN {error}"),
        kv::Error::NoBlock(NoBlock::Lost(_)) => format!("MASTERDOWN {error}"),
        kv::Error::Stopped(Stopped::Lost(_)) => format!("UNCERTAIN {error}"),
        error => format!("ERR {error}"),
    }
}

/// Publishes and counts the effects of a command.
pub(super) fn publish<N: Nic>(
    cx: &Context<'_, Data<N>>,
    call: &Call<'_>,
    effects: &Effects,
    keys: &[KeyAt],
) {
    for event in &effects.events {
        if let Some((db, index)) = keys.get(event.key) {
            cx.notify(event.class, event.name, *db, call.args.get(*index));
        }
    }
    let stats = cx.worker.stats();
    stats.hits.add(effects.hits);
    stats.misses.add(effects.misses);
    stats.changes.add(effects.is_changed.into());
    if effects.is_changed {
        cx.store.state.changes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

impl<N: Nic> Data<N> {
    /// Sets the uses of a key, if its command did.
    pub(super) async fn set_worth(
        &self,
        db: u8,
        key: &[u8],
        effects: &Effects,
    ) -> Result<(), kv::Error> {
        match effects.worth {
            Some((measure, told)) => self.store.set_worth(db, key, measure, told).await,
            None => Ok(()),
        }
    }
}

/// Executes `call` on one key.
async fn run_one<N: Nic>(
    cx: &mut Context<'_, Data<N>>,
    call: &Call<'_>,
    plan: Plan,
    index: usize,
    effects: &mut Effects,
) -> Result<(), kv::Error> {
    let (data, key, protocol) = (cx.store, call.args.get(index), cx.session.protocol);
    let (db, begin) = (data.state.physical(call.db), cx.out.len());
    let is_use = counts_as_use(cx, call.command.id);
    let out = &mut *cx.out;
    let mut is_missing = false;
    let mut execute = |value: Option<&[u8]>, expiry| {
        out.truncate(begin);
        effects.clear();
        let mut cell = [Cell::new(value, expiry)];
        let mut cells = Cells { cells: &mut cell, of: &[0] };
        let mut output = Output { out: &mut *out, protocol, effects: &mut *effects };
        perform(plan.body, call, &mut cells, &mut output);
        let [cell] = cell;
        is_missing = value.is_none() && !cell.is_changed();
        if cell.is_changed() {
            data.state.keep_image(&data.store, db, key, value, expiry);
        }
        cell.into_change()
    };
    let needs_value = plan.needs_value || data.state.is_saving();
    if call.command.has(WRITE) {
        let ends_expired = if needs_value {
            let change = |value: Option<&[u8]>, expiry| execute(value, expiry).into_update();
            data.store.update(db, key, change).await?
        } else {
            let change = |expiry: Option<u64>| {
                execute(expiry.map(|_| &[][..]), expiry.unwrap_or(0)).into_update()
            };
            data.store.alter(db, key, change).await?
        };
        if ends_expired && meets_expired(call) {
            data.note_expired(cx.worker, db, key);
        }
        data.set_worth(db, key, effects).await?;
    } else if plan.needs_value {
        match cx.session.ahead.value() {
            Some(Some((value, expiry))) => execute(Some(value), expiry),
            Some(None) => execute(None, 0),
            None => match data.store.get_pinned(db, key, is_use).await? {
                Some(value) => execute(Some(&value), value.expiry()),
                None => execute(None, 0),
            },
        };
    } else {
        let expiry = data.store.expiry(db, key).await?;
        execute(expiry.map(|_| &[][..]), expiry.unwrap_or(0));
    }
    if meets_expired(call) {
        return data.drop_expired(cx.worker, db, key, is_missing).await;
    }
    // RESTORE deletes the old key, also if the new one has expired.
    if is_missing && cx.out.get(begin) != Some(&b'-') {
        data.delete_expired(db, key).await?;
    }
    Ok(())
}

/// Executes `call` on several keys, all or nothing.
async fn run_several<'v, N: Nic>(
    cx: &mut Context<'_, Data<N>>,
    call: &Call<'v>,
    plan: Plan,
    effects: &mut Effects,
) -> Result<(), kv::Error> {
    let (data, protocol, begin) = (cx.store, cx.session.protocol, cx.out.len());
    let is_use = counts_as_use(cx, call.command.id);
    let found = keys(call);
    let named: Vec<(u8, &[u8])> =
        found.iter().map(|(db, index)| (data.state.physical(*db), call.args.get(*index))).collect();
    let (of, firsts) = cells_of(&named);
    let out = &mut *cx.out;
    let mut execute = |cells: &mut [Cell<'_, 'v>]| {
        out.truncate(begin);
        effects.clear();
        let mut output = Output { out: &mut *out, protocol, effects: &mut *effects };
        perform(plan.body, call, &mut Cells { cells, of: &of }, &mut output);
    };
    if !call.command.has(WRITE) && plan.needs_value {
        let names: Vec<&[u8]> = firsts.iter().map(|number| named[*number].1).collect();
        let db = data.state.physical(call.db);
        let values = data.store.read_many(db, &names, is_use).await?;
        let mut cells: Vec<Cell<'_, '_>> =
            values.iter().map(|value| Cell::new(value.as_deref(), 0)).collect();
        execute(&mut cells);
        for (key, value) in names.iter().zip(&values) {
            data.drop_expired(cx.worker, db, key, value.is_none()).await?;
        }
        return Ok(());
    }
    let is_read = plan.needs_value || data.state.is_saving();
    let wanted: Vec<Wanted<'_>> =
        named.iter().map(|(db, key)| Wanted { db: *db, key, is_read }).collect();
    let (keeps_expired, mut expired) = (data.keeps_expired(cx.worker), Vec::new());
    data.store
        .atomically(&wanted, |transaction| {
            expired.clear();
            if !keeps_expired {
                take_expired(transaction, &firsts, &mut expired);
            }
            let cell = |number: &usize| {
                let expiry = transaction.expiry(*number).unwrap_or(0);
                Cell::new(transaction.get(*number), expiry)
            };
            let mut cells: Vec<Cell<'_, '_>> = firsts.iter().map(cell).collect();
            execute(&mut cells);
            let changed = cells.iter().zip(&firsts).filter(|(cell, _)| cell.is_changed());
            for (_, number) in changed {
                let (value, expiry) = (transaction.get(*number), transaction.expiry(*number));
                let (db, key) = named[*number];
                data.state.keep_image(&data.store, db, key, value, expiry.unwrap_or(0));
            }
            let changes: Vec<Change<'_>> = cells.into_iter().map(Cell::into_change).collect();
            for (change, number) in changes.into_iter().zip(&firsts) {
                change.leave(transaction, *number);
            }
        })
        .await?;
    for (db, key) in expired.into_iter().map(|number| named[number]) {
        data.note_expired(cx.worker, db, key);
    }
    Ok(())
}

/// Deletes those of the keys that have expired, and adds their numbers to `expired`.
pub(super) fn take_expired(
    transaction: &mut Transaction,
    numbers: &[usize],
    expired: &mut Vec<usize>,
) {
    for &number in numbers {
        if transaction.has_expired(number) {
            transaction.delete(number);
            expired.push(number);
        }
    }
}
