//! Messages between connections: SUBSCRIBE, PUBLISH, PUBSUB and their relatives.

use std::sync::Arc;

use redis_formats::command::Id;

use crate::channels::To;
use crate::context::Context;
use crate::keyspace::Keyspace;

pub(super) fn subscribe<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (to, kind) = match cx.command.id {
        Id::Psubscribe => (To::Pattern, "psubscribe"),
        _ => (To::Channel, "subscribe"),
    };
    for name in cx.args.from(1) {
        let name: Arc<[u8]> = name.into();
        let own = match to {
            To::Channel => &mut cx.session.subscriptions.channels,
            To::Pattern => &mut cx.session.subscriptions.patterns,
        };
        if own.insert(name.clone()) {
            cx.server().channels.subscribe(to, &name, &cx.session.client);
        }
        confirm(cx, kind, Some(&name));
    }
    cx.session.show_subscriptions();
}

pub(super) fn unsubscribe<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (to, kind) = match cx.command.id {
        Id::Punsubscribe => (To::Pattern, "punsubscribe"),
        _ => (To::Channel, "unsubscribe"),
    };
    let named: Vec<Arc<[u8]>> = match cx.args.count() {
        1 => names(cx, to),
        _ => cx.args.from(1).map(Arc::from).collect(),
    };
    for name in &named {
        leave(cx, to, name);
        confirm(cx, kind, Some(name));
    }
    if named.is_empty() {
        confirm(cx, kind, None);
    }
    cx.session.show_subscriptions();
}

/// Ends all subscriptions without a reply.
pub(super) fn unsubscribe_all<K: Keyspace>(cx: &mut Context<'_, K>) {
    for to in [To::Channel, To::Pattern] {
        for name in names(cx, to) {
            leave(cx, to, &name);
        }
    }
    cx.session.show_subscriptions();
}

fn names<K: Keyspace>(cx: &Context<'_, K>, to: To) -> Vec<Arc<[u8]>> {
    let own = &cx.session.subscriptions;
    let names = if to == To::Channel { &own.channels } else { &own.patterns };
    names.iter().cloned().collect()
}

fn leave<K: Keyspace>(cx: &mut Context<'_, K>, to: To, name: &[u8]) {
    let own = &mut cx.session.subscriptions;
    let names = if to == To::Channel { &mut own.channels } else { &mut own.patterns };
    if names.remove(name) {
        cx.server().channels.unsubscribe(to, name, &cx.session.client);
    }
}

fn confirm<K: Keyspace>(cx: &mut Context<'_, K>, kind: &str, name: Option<&[u8]>) {
    let count = cx.session.subscriptions.count() as i64;
    let mut reply = cx.reply();
    reply.push(3);
    reply.bulk(kind);
    reply.bulk_or_null(name);
    reply.integer(count);
}

pub(super) fn publish<K: Keyspace>(cx: &mut Context<'_, K>) {
    let limit = cx.server().config.live.output_limit("pubsub");
    let deliveries = cx.server().channels.publish(cx.args.get(1), cx.args.get(2), limit);
    cx.reply().integer(deliveries as i64);
}

pub(super) fn channels<K: Keyspace>(cx: &mut Context<'_, K>) {
    let names = cx.server().channels.matching(cx.args.find(2));
    let mut reply = cx.reply();
    reply.array(names.len());
    names.iter().for_each(|name| reply.bulk(name));
}

pub(super) fn patterns<K: Keyspace>(cx: &mut Context<'_, K>) {
    let count = cx.server().channels.counts().1 as i64;
    cx.reply().integer(count);
}

pub(super) fn subscribers<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (names, server) = (cx.args.from(2), cx.server());
    let mut reply = cx.reply();
    reply.array(names.len() * 2);
    for name in names {
        reply.bulk(name);
        reply.integer(server.channels.subscribers(name) as i64);
    }
}
