//! EXEC and WATCH.
//!
//! A transaction of commands with keys is one call of the store, all or nothing also across a
//! crash. A transaction with a command on whole databases runs alone, command after command.

use kv::Wanted;
use kv::blocks::NoBlock;
use redis_formats::command::Id;
use redis_formats::number::parse_i64;
use verbs::Nic;

use super::Data;
use super::call::{Call, Cell, Cells, Change, Effects, Output, perform};
use super::plan::{KeyAt, Plan, cells_of, keys, plan};
use super::run::{call_of, meets_expired, publish, room, take_expired, text_of};
use super::upkeep::Attempts;
use crate::context::{Args, Context};
use crate::dispatch::{execute_one, is_allowed};
use crate::keyspace::DATABASES;
use crate::session::Queue;

/// A key that a connection watches.
#[derive(Debug)]
pub struct Watched {
    watch: kv::Watch,
    db: u8,
    physical: u8,
    key: Vec<u8>,
    was_there: bool,
}

impl Watched {
    /// `is_there`: the key, in the database of that number, is there now.
    fn is_changed(&self, physical: u8, is_there: bool) -> bool {
        // An expired key that is not deleted yet counts as deleted; one that had expired before
        // the watch began does not count.
        let has_expired = self.was_there && !is_there;
        let is_moved =
            (self.physical != physical || self.watch.is_flushed()) && (self.was_there || is_there);
        self.watch.is_changed() || has_expired || is_moved
    }
}

pub(super) async fn watch<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    if cx.session.queue.is_some() {
        return cx.error("ERR WATCH inside MULTI is not allowed");
    }
    let (data, db) = (cx.store, cx.session.db);
    let physical = data.state.physical(db);
    for key in cx.args.from(1) {
        if cx.watches.iter().any(|own| own.db == db && own.key == key) {
            continue;
        }
        // An expired key is deleted before the watch, so that its deletion changes no watch.
        let result = match data.drop_expired(cx.worker, physical, key, true).await {
            Ok(()) => data.store.watch(physical, key),
            Err(error) => Err(error),
        };
        let there = data.store.exists(physical, key).await;
        match (result, there) {
            (Ok(watch), Ok(was_there)) => {
                let key = key.to_vec();
                cx.watches.push(Watched { watch, db, physical, key, was_there });
            }
            (Err(error), _) | (_, Err(error)) => return cx.error(text_of(&error)),
        }
    }
    cx.reply().ok();
}

/// A command of a transaction.
struct Step<'a> {
    call: Call<'a>,
    plan: Plan,
    keys: Vec<KeyAt>,
    /// For each key the number of its cell, and for each cell its number among all keys.
    of: Vec<usize>,
    cells: Vec<usize>,
    reply: Vec<u8>,
    effects: Effects,
    /// Numbers of the keys that the command has found expired.
    expired: Vec<usize>,
}

/// The steps of a transaction. `None` for a command that is no step.
type Steps<'a> = Vec<Option<Step<'a>>>;

/// Returns whether a command of the transaction concerns whole databases, or the protocol.
fn is_wide<N: Nic>(cx: &Context<'_, Data<N>>, queue: &Queue) -> bool {
    queue.commands.iter().any(|queued| match queued.command.id {
        Id::Keys
        | Id::Scan
        | Id::Randomkey
        | Id::Dbsize
        | Id::Flushdb
        | Id::Flushall
        | Id::Swapdb
        | Id::Save
        | Id::Bgsave
        | Id::ObjectFreq
        | Id::ObjectIdletime
        | Id::Debug
        | Id::Hello => true,
        _ => {
            let call =
                Call { args: Args::of_queued(queued), command: queued.command, ..call_of(cx) };
            // A database that COPY or MOVE cannot have is an error of that command only.
            keys(&call).iter().any(|(db, _)| usize::from(*db) >= DATABASES)
        }
    })
}

/// Plans the commands of a transaction. Commands that the user may not execute any more have no
/// plan.
fn steps<'a, N: Nic>(
    cx: &mut Context<'_, Data<N>>,
    queue: &'a Queue,
    named: &mut Vec<(u8, &'a [u8])>,
) -> Steps<'a> {
    let base = call_of(cx);
    let (mut db, now_ms, bulk_max) = (base.db, base.now_ms, base.bulk_max);
    let mut numbers = std::collections::HashMap::new();
    let mut steps = Steps::new();
    for queued in &queue.commands {
        let args = Args::of_queued(queued);
        let room = room(cx, queued.command.id);
        let call = Call { command: queued.command, args, db, now_ms, bulk_max, room };
        let is_permitted = is_allowed(&cx.of_queued(queued));
        if queued.command.id == Id::Select && is_permitted {
            let number = parse_i64(args.get(1)).and_then(|own| u8::try_from(own).ok());
            db = number.filter(|own| usize::from(*own) < DATABASES).unwrap_or(db);
        }
        let Some(plan) = plan(&call).filter(|_| is_permitted) else {
            steps.push(None);
            continue;
        };
        let keys = keys(&call);
        let own: Vec<(u8, &[u8])> = keys
            .iter()
            .map(|(db, index)| (cx.store.state.physical(*db), args.get(*index)))
            .collect();
        let (of, firsts) = cells_of(&own);
        let mut number = |first: &usize| {
            *numbers.entry(own[*first]).or_insert_with(|| {
                named.push(own[*first]);
                named.len() - 1
            })
        };
        let cells = firsts.iter().map(&mut number).collect();
        let are_told = cx.server().config.live.notify() != 0;
        let (reply, effects, expired) = (Vec::new(), Effects::new(are_told), Vec::new());
        steps.push(Some(Step { call, plan, keys, of, cells, reply, effects, expired }));
    }
    steps
}

pub(super) async fn execute_queue<N: Nic>(cx: &mut Context<'_, Data<N>>, queue: &Queue) {
    if is_wide(cx, queue) {
        return execute_alone(cx, queue).await;
    }
    let data = cx.store;
    let _shared = data.state.barrier.enter(cx.worker.index).await;
    let mut named = Vec::new();
    let mut steps = steps(cx, queue, &mut named);
    let planned = named.len();
    let watched: Vec<(u8, Vec<u8>)> =
        cx.watches.iter().map(|own| (data.state.physical(own.db), own.key.clone())).collect();
    named.extend(watched.iter().map(|(db, key)| (*db, &key[..])));
    let wanted: Vec<Wanted<'_>> = named
        .iter()
        .enumerate()
        .map(|(number, (db, key))| Wanted { db: *db, key, is_read: number < planned })
        .collect();
    let protocol = cx.session.protocol;
    let keeps_expired = data.keeps_expired(cx.worker);
    let args = queue.commands.iter().flat_map(|queued| Args::of_queued(queued).from(0));
    let mut attempts = Attempts::new(args.map(|arg| arg.len() as u64).sum());
    let is_kept = loop {
        let watches = &*cx.watches;
        let result = data.store.atomically(&wanted, |transaction| {
            let mut own = watches.iter().zip(planned..);
            let is_changed = own.any(|(watched, number)| {
                watched.is_changed(wanted[number].db, transaction.exists(number))
            });
            if is_changed {
                return false;
            }
            for step in steps.iter_mut().flatten() {
                step.expired.clear();
                if !keeps_expired {
                    take_expired(transaction, &step.cells, &mut step.expired);
                }
                execute(data, step, transaction, protocol, &named);
            }
            true
        });
        match result.await {
            Ok(is_kept) => break is_kept,
            Err(error) => {
                let is_full = error == kv::Error::NoBlock(NoBlock::Full);
                if !is_full || !data.free_something(cx.worker, &mut attempts).await {
                    let text = text_of(&error);
                    cx.error(format!("EXECABORT Transaction discarded because of: {text}"));
                    return;
                }
            }
        }
    };
    if !is_kept {
        return cx.reply().null_array();
    }
    cx.reply().array(queue.commands.len());
    for (queued, step) in queue.commands.iter().zip(steps) {
        if let Some(step) = step {
            cx.session.is_closing |= step.effects.has_panicked;
            if meets_expired(&step.call) {
                for (db, key) in step.expired.iter().map(|number| named[*number]) {
                    data.note_expired(cx.worker, db, key);
                }
            }
            publish(cx, &step.call, &step.effects, &step.keys);
            let (db, key) = (data.state.physical(step.call.db), step.call.args.get(1));
            if let Err(error) = data.set_worth(db, key, &step.effects).await {
                tracing::warn!(%error, "setting the uses of a key failed");
            }
            cx.session.prepared = Some(step.reply);
        }
        execute_one(&mut cx.of_queued(queued)).await;
    }
}

/// Executes a step within a call of the store.
fn execute<N: Nic>(
    data: &Data<N>,
    step: &mut Step<'_>,
    transaction: &mut kv::Transaction,
    protocol: redis_formats::reply::Protocol,
    named: &[(u8, &[u8])],
) {
    step.reply.clear();
    step.effects.clear();
    let cell = |number: &usize| {
        Cell::new(transaction.get(*number), transaction.expiry(*number).unwrap_or(0))
    };
    let mut cells: Vec<Cell<'_, '_>> = step.cells.iter().map(cell).collect();
    let mut output = Output { out: &mut step.reply, protocol, effects: &mut step.effects };
    let mut keys = Cells { cells: &mut cells, of: &step.of };
    perform(step.plan.body, &step.call, &mut keys, &mut output);
    for (cell, number) in cells.iter().zip(&step.cells) {
        if cell.is_changed() {
            let (db, key) = named[*number];
            let expiry = transaction.expiry(*number).unwrap_or(0);
            data.state.keep_image(&data.store, db, key, transaction.get(*number), expiry);
        }
    }
    let changes: Vec<Change<'_>> = cells.into_iter().map(Cell::into_change).collect();
    for (change, number) in changes.into_iter().zip(&step.cells) {
        change.leave(transaction, *number);
    }
}

/// Executes the commands one after the other, while no other command runs.
async fn execute_alone<N: Nic>(cx: &mut Context<'_, Data<N>>, queue: &Queue) {
    let data = cx.store;
    let _alone = data.state.barrier.close().await;
    for watched in cx.watches.iter() {
        let physical = data.state.physical(watched.db);
        match data.store.exists(physical, &watched.key).await {
            Ok(is_there) if !watched.is_changed(physical, is_there) => {}
            Ok(_) => return cx.reply().null_array(),
            Err(error) => {
                let text = text_of(&error);
                return cx.error(format!("EXECABORT Transaction discarded because of: {text}"));
            }
        }
    }
    cx.reply().array(queue.commands.len());
    for queued in &queue.commands {
        execute_one(&mut cx.of_queued(queued)).await;
    }
}
