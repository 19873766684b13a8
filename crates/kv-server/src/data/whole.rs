//! Commands on whole databases, and commands that need the store itself.

use std::sync::atomic::Ordering;

use kv::Cursor;
use redis_formats::command::Id;
use redis_formats::glob;
use redis_formats::number::parse_i64;
use verbs::Nic;

use super::Data;
use super::call::{NOT_INTEGER, SYNTAX};
use super::exec::watch;
use super::run::text_of;
use crate::context::Context;
use crate::keyspace::{DATABASES, Keyspace};

/// Executes a command that has no plan. The caller has entered the barrier, or closed it for a
/// command that [`runs_alone`].
pub(super) async fn execute<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let goes_through = matches!(cx.command.id, Id::Keys | Id::Scan | Id::Randomkey);
    if goes_through {
        // Redis deletes expired keys that such a command meets.
        if let Err(error) = cx.store.sweep(cx.worker).await {
            return cx.error(text_of(&error));
        }
    }
    match cx.command.id {
        Id::Keys => all_keys(cx).await,
        Id::Scan => scan(cx).await,
        Id::Randomkey => random_key(cx).await,
        Id::Dbsize => {
            let keys = cx.store.store.len(cx.store.state.physical(cx.session.db));
            cx.reply().integer(keys as i64);
        }
        Id::Flushdb => flush(cx, false).await,
        Id::Flushall => flush(cx, true).await,
        Id::Swapdb => swap(cx),
        Id::Watch => watch(cx).await,
        Id::Unwatch => {
            cx.store.unwatch(cx.watches);
            cx.reply().ok();
        }
        Id::Save => save(cx).await,
        Id::Bgsave => save_behind(cx),
        Id::Lastsave => {
            let last = cx.store.state.saves.last_s.load(Ordering::Relaxed);
            cx.reply().integer(last as i64);
        }
        Id::ObjectFreq | Id::ObjectIdletime => uses(cx).await,
        Id::Debug => super::debug::execute(cx).await,
        _ => {
            let refusal = redis_formats::command::Refusal::Command;
            let args = cx.args;
            cx.reply().error_with(|out| refusal.text(&args, out));
        }
    }
}

/// Returns whether no other command may run meanwhile.
pub(super) fn runs_alone<N: Nic>(cx: &Context<'_, Data<N>>) -> bool {
    let is_reload = || cx.args.is(1, "reload") || cx.args.is(1, "flushall");
    matches!(cx.command.id, Id::Flushall | Id::Flushdb | Id::Swapdb | Id::Save | Id::Bgsave)
        || cx.command.id == Id::Debug && is_reload()
}

async fn all_keys<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    /// Keys of a step, after which other tasks run.
    const STEP: usize = 1024;
    let (pattern, db) = (cx.args.get(1), cx.store.state.physical(cx.session.db));
    let mut found = std::collections::BTreeSet::new();
    let mut cursor = Cursor::default();
    loop {
        match cx.store.store.scan(db, cursor, STEP).await {
            Ok(step) => {
                let wanted = |key: &Vec<u8>| pattern == b"*" || glob::matches(pattern, key);
                found.extend(step.keys.into_iter().filter(wanted));
                cursor = step.next;
            }
            Err(error) => return cx.error(text_of(&error)),
        }
        if cursor.is_end() {
            break;
        }
        cx.worker.yield_now().await;
    }
    let mut reply = cx.reply();
    reply.array(found.len());
    found.iter().for_each(|key| reply.bulk(key));
}

/// Options of SCAN.
#[derive(Clone, Copy, Debug)]
struct Filter<'a> {
    pattern: Option<&'a [u8]>,
    count: usize,
    /// False: a type is asked for that no key has.
    has_strings: bool,
}

fn filter<'a, N: Nic>(cx: &Context<'a, Data<N>>) -> Result<Filter<'a>, &'static str> {
    let mut filter = Filter { pattern: None, count: 10, has_strings: true };
    let mut at = 2;
    while at < cx.args.count() {
        let value = cx.args.find(at + 1).ok_or(SYNTAX)?;
        match () {
            () if cx.args.is(at, "match") => filter.pattern = Some(value),
            () if cx.args.is(at, "count") => {
                let count = parse_i64(value).ok_or(NOT_INTEGER)?;
                filter.count = usize::try_from(count).ok().filter(|own| *own > 0).ok_or(SYNTAX)?;
            }
            () if cx.args.is(at, "type") => {
                filter.has_strings = value.eq_ignore_ascii_case(b"string");
            }
            () => return Err(SYNTAX),
        }
        at += 2;
    }
    Ok(filter)
}

/// Reads a cursor as Redis does: an empty text is 0, and a negative number wraps around.
fn cursor(text: &[u8]) -> Option<Cursor> {
    let text = str::from_utf8(text).ok()?;
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let number: u64 = match digits {
        "" if !is_negative => 0,
        digits if digits.starts_with('+') => return None,
        digits => digits.parse().ok()?,
    };
    Some(Cursor(if is_negative { number.wrapping_neg() } else { number }))
}

async fn scan<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let Some(cursor) = cursor(cx.args.get(1)) else { return cx.error("ERR invalid cursor") };
    let filter = match filter(cx) {
        Ok(filter) => filter,
        Err(text) => return cx.error(text),
    };
    let db = cx.store.state.physical(cx.session.db);
    match cx.store.store.scan(db, cursor, filter.count).await {
        Err(error) => cx.error(text_of(&error)),
        Ok(mut step) => {
            let wanted = |key: &Vec<u8>| {
                filter.has_strings && filter.pattern.is_none_or(|own| glob::matches(own, key))
            };
            step.keys.retain(wanted);
            let mut reply = cx.reply();
            reply.array(2);
            reply.bulk(step.next.0.to_string());
            reply.array(step.keys.len());
            step.keys.iter().for_each(|key| reply.bulk(key));
        }
    }
}

async fn random_key<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    match cx.store.store.random_key(cx.store.state.physical(cx.session.db)).await {
        Ok(key) => cx.reply().bulk_or_null(key.as_deref()),
        Err(error) => cx.error(text_of(&error)),
    }
}

async fn flush<N: Nic>(cx: &mut Context<'_, Data<N>>, all: bool) {
    let is_mode = cx.args.is(1, "async") || cx.args.is(1, "sync");
    if cx.args.count() > 2 || cx.args.count() == 2 && !is_mode {
        return cx.error(SYNTAX);
    }
    let data = cx.store;
    data.abort_save();
    let result = match all {
        true => data.store.flush_all().await,
        false => data.store.flush(data.state.physical(cx.session.db)).await,
    };
    match result {
        Ok(()) => {
            data.state.changes.fetch_add(1, Ordering::Relaxed);
            cx.worker.stats().changes.add(1);
            cx.reply().ok();
        }
        Err(error) => cx.error(text_of(&error)),
    }
}

fn swap<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let number = |at: usize| parse_i64(cx.args.get(at)).filter(|own| i32::try_from(*own).is_ok());
    let Some(one) = number(1) else { return cx.error("ERR invalid first DB index") };
    let Some(other) = number(2) else { return cx.error("ERR invalid second DB index") };
    let database =
        |number: i64| u8::try_from(number).ok().filter(|own| usize::from(*own) < DATABASES);
    let (Some(one), Some(other)) = (database(one), database(other)) else {
        return cx.error("ERR DB index is out of range");
    };
    if one != other {
        cx.store.abort_save();
        cx.store.state.swap(one, other);
    }
    cx.store.state.changes.fetch_add(1, Ordering::Relaxed);
    cx.reply().ok();
}

async fn save<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let data = cx.store;
    if !data.begin_save(cx.now_ms()) {
        return cx.error("ERR Background save already in progress");
    }
    match data.save(cx.worker).await {
        Ok(()) => cx.reply().ok(),
        Err(text) => cx.error(format!("ERR {text}")),
    }
}

fn save_behind<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let is_scheduled = cx.args.is(1, "schedule");
    if cx.args.count() > 2 || cx.args.count() == 2 && !is_scheduled {
        return cx.error(SYNTAX);
    }
    if !cx.store.begin_save(cx.now_ms()) {
        if !is_scheduled {
            return cx.error("ERR Background save already in progress");
        }
        cx.store.state.saves.is_asked.store(true, Ordering::Relaxed);
        return cx.reply().simple("Background saving scheduled");
    }
    cx.store.start_save();
    cx.reply().simple("Background saving started");
}

/// OBJECT FREQ and OBJECT IDLETIME.
async fn uses<N: Nic>(cx: &mut Context<'_, Data<N>>) {
    let counts = cx.server().config.get("maxmemory-policy").ends_with("lfu");
    let asks_count = cx.command.id == Id::ObjectFreq;
    let db = cx.store.state.physical(cx.session.db);
    match cx.store.store.worth(db, cx.args.get(2)).await {
        Err(error) => cx.error(text_of(&error)),
        Ok(None) => cx.reply().null(),
        Ok(Some(_)) if asks_count && !counts => cx.error(
            "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please \
             note that when switching between policies at runtime LRU and LFU data will take some \
             time to adjust.",
        ),
        Ok(Some(_)) if !asks_count && counts => cx.error(
            "ERR An LFU maxmemory policy is selected, idle time not tracked. Please note that \
             when switching between policies at runtime LRU and LFU data will take some time to \
             adjust.",
        ),
        Ok(Some(worth)) => cx.reply().integer(worth as i64),
    }
}
