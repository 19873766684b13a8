//! MULTI and DISCARD. EXEC is part of the dispatch, and WATCH of the store.

use crate::context::Context;
use crate::keyspace::Keyspace;

pub(super) fn multi<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.session.queue.is_some() {
        return cx.error("ERR MULTI calls can not be nested");
    }
    cx.session.begin_queue();
    cx.reply().ok();
}

pub(super) fn discard<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.session.take_queue().is_none() {
        return cx.error("ERR DISCARD without MULTI");
    }
    cx.store.unwatch(cx.watches);
    cx.reply().ok();
}
