//! Commands on the server: TIME, ROLE, REPLICAOF, WAIT, MONITOR, SHUTDOWN, FUNCTION, LOLWUT.

use super::connection::REDIS_VERSION;
use super::integer;
use crate::context::Context;
use crate::keyspace::Keyspace;

pub(super) fn time<K: Keyspace>(cx: &mut Context<'_, K>) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.unwrap_or_default();
    let mut reply = cx.reply();
    reply.array(2);
    reply.bulk_integer(now.as_secs() as i64);
    reply.bulk_integer(now.subsec_micros().into());
}

pub(super) fn lolwut<K: Keyspace>(cx: &mut Context<'_, K>) {
    let text = format!(
        "  .-------.\n  | o o o |\n  | o o o |  a granary, full\n  '-------'\n\nRedis ver. \
         {REDIS_VERSION}\n"
    );
    cx.reply().verbatim(b"txt", text);
}

pub(super) fn role<K: Keyspace>(cx: &mut Context<'_, K>) {
    let mut reply = cx.reply();
    reply.array(3);
    reply.bulk("master");
    reply.integer(0);
    reply.array(0);
}

/// The server is a master and stays one.
pub(super) fn replica_of<K: Keyspace>(cx: &mut Context<'_, K>) {
    match cx.args.is(1, "no") && cx.args.is(2, "one") {
        true => cx.reply().ok(),
        false => cx.error("ERR Replication is not supported by this server"),
    }
}

/// No replica can confirm a write, and none can come, so the reply does not wait.
pub(super) fn wait<K: Keyspace>(cx: &mut Context<'_, K>) {
    match (integer(cx, 1), integer(cx, 2)) {
        (None, _) => cx.error("ERR value is not an integer or out of range"),
        (_, None) => cx.error("ERR timeout is not an integer or out of range"),
        (_, Some(..0)) => cx.error("ERR timeout is negative"),
        _ => cx.reply().integer(0),
    }
}

pub(super) fn monitor<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.session.in_exec {
        return cx.error("ERR MONITOR isn't allowed for DENY BLOCKING client");
    }
    cx.server().monitors.add(&cx.session.client);
    cx.reply().ok();
}

/// Saves and ends the server. There is no reply, except for an error.
pub(super) async fn shutdown<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (mut save, mut is_forced) = (None, false);
    for at in 1..cx.args.count() {
        if cx.args.is(at, "save") && save != Some(false) {
            save = Some(true);
        } else if cx.args.is(at, "nosave") && save != Some(true) {
            save = Some(false);
        } else if cx.args.is(at, "force") {
            is_forced = true;
        } else if cx.args.is(at, "abort") && cx.args.count() == 2 {
            return cx.error("ERR No shutdown in progress.");
        } else if !cx.args.is(at, "now") {
            return cx.syntax_error();
        }
    }
    match cx.store.finish(cx.worker, save).await {
        Err(why) if !is_forced => {
            tracing::error!(why, "saving before the end failed: the server goes on");
            return cx.error("ERR Errors trying to SHUTDOWN. Check logs.");
        }
        Err(why) => tracing::error!(why, "saving before the end failed: the server ends"),
        Ok(()) => {}
    }
    cx.session.is_closing = true;
    cx.server().end();
}

pub(super) fn function_flush<K: Keyspace>(cx: &mut Context<'_, K>) {
    let is_mode = cx.args.is(2, "sync") || cx.args.is(2, "async");
    if cx.args.count() > 3 || cx.args.count() == 3 && !is_mode {
        return cx.error("ERR FUNCTION FLUSH only supports SYNC|ASYNC option");
    }
    cx.reply().ok();
}

pub(super) fn function_list<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.reply().array(0);
}

pub(super) fn function_stats<K: Keyspace>(cx: &mut Context<'_, K>) {
    let mut reply = cx.reply();
    reply.map(2);
    reply.bulk("running_script");
    reply.null();
    reply.bulk("engines");
    reply.map(0);
}
