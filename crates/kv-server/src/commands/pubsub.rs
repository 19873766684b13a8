//! Messages between connections: SUBSCRIBE, PUBLISH, PUBSUB and their relatives.

use std::sync::Arc;

use redis_formats::command::Id;

use crate::channels::To;
use crate::context::Context;
use crate::keyspace::Keyspace;

/// The kind of a command's channels.
fn to(id: Id) -> To {
    match id {
        Id::Psubscribe | Id::Punsubscribe => To::Pattern,
        Id::Ssubscribe
        | Id::Sunsubscribe
        | Id::Spublish
        | Id::PubsubShardchannels
        | Id::PubsubShardnumsub => To::Shard,
        _ => To::Channel,
    }
}

pub(super) fn subscribe<K: Keyspace>(cx: &mut Context<'_, K>) {
    let to = to(cx.command.id);
    for name in cx.args.from(1) {
        let name: Arc<[u8]> = name.into();
        if cx.session.subscriptions.of_mut(to).insert(name.clone()) {
            cx.server().channels.subscribe(to, &name, &cx.session.client);
        }
        confirm(cx, to, Some(&name));
    }
    cx.session.show_subscriptions();
}

pub(super) fn unsubscribe<K: Keyspace>(cx: &mut Context<'_, K>) {
    let to = to(cx.command.id);
    let named: Vec<Arc<[u8]>> = match cx.args.count() {
        1 => names(cx, to),
        _ => cx.args.from(1).map(Arc::from).collect(),
    };
    for name in &named {
        leave(cx, to, name);
        confirm(cx, to, Some(name));
    }
    if named.is_empty() {
        confirm(cx, to, None);
    }
    cx.session.show_subscriptions();
}

/// Ends all subscriptions without a reply.
pub(super) fn unsubscribe_all<K: Keyspace>(cx: &mut Context<'_, K>) {
    for to in To::ALL {
        for name in names(cx, to) {
            leave(cx, to, &name);
        }
    }
    cx.session.show_subscriptions();
}

fn names<K: Keyspace>(cx: &Context<'_, K>, to: To) -> Vec<Arc<[u8]>> {
    cx.session.subscriptions.of(to).iter().cloned().collect()
}

fn leave<K: Keyspace>(cx: &mut Context<'_, K>, to: To, name: &[u8]) {
    if cx.session.subscriptions.of_mut(to).remove(name) {
        cx.server().channels.unsubscribe(to, name, &cx.session.client);
    }
}

fn confirm<K: Keyspace>(cx: &mut Context<'_, K>, to: To, name: Option<&[u8]>) {
    let count = cx.session.subscriptions.count(to) as i64;
    let kind = cx.command.name;
    let mut reply = cx.reply();
    reply.push(3);
    reply.bulk(kind);
    reply.bulk_or_null(name);
    reply.integer(count);
}

pub(super) fn publish<K: Keyspace>(cx: &mut Context<'_, K>) {
    let limit = cx.server().config.live.output_limit("pubsub");
    let (channels, channel, message) = (&cx.server().channels, cx.args.get(1), cx.args.get(2));
    let deliveries = match to(cx.command.id) {
        To::Shard => channels.publish_in_shard(channel, message, limit),
        _ => channels.publish(channel, message, limit),
    };
    cx.reply().integer(deliveries as i64);
}

pub(super) fn channels<K: Keyspace>(cx: &mut Context<'_, K>) {
    let names = cx.server().channels.matching(to(cx.command.id), cx.args.find(2));
    let mut reply = cx.reply();
    reply.array(names.len());
    names.iter().for_each(|name| reply.bulk(name));
}

pub(super) fn patterns<K: Keyspace>(cx: &mut Context<'_, K>) {
    let count = cx.server().channels.count(To::Pattern) as i64;
    cx.reply().integer(count);
}

pub(super) fn subscribers<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (names, server, to) = (cx.args.from(2), cx.server(), to(cx.command.id));
    let mut reply = cx.reply();
    reply.array(names.len() * 2);
    for name in names {
        reply.bulk(name);
        reply.integer(server.channels.subscribers(to, name) as i64);
    }
}
