//! State of a connection: PING, ECHO, HELLO, AUTH, RESET, QUIT, SELECT.

use std::sync::Arc;

use redis_formats::acl::Users;
use redis_formats::number::parse_i64;
use redis_formats::reply::Protocol;

use super::pubsub;
use crate::client::flag;
use crate::context::Context;
use crate::dispatch::log_refusal;
use crate::keyspace::{DATABASES, Keyspace};
use crate::session::Suppress;

/// The version of Redis whose protocol and commands the server has.
pub(crate) const REDIS_VERSION: &str = "7.0.15";

const WRONG_PASSWORD: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const NO_PASSWORD: &str = "ERR AUTH <password> called without any password configured for the \
    default user. Are you sure your configuration is correct?";
const HELLO_NEEDS_AUTH: &str = "NOAUTH HELLO must be called with the client already \
    authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to \
    authenticate the client and select the RESP protocol version at the same time";
pub(super) const WRONG_NAME: &str =
    "ERR Client names cannot contain spaces, newlines or special characters.";

pub(super) fn ping<K: Keyspace>(cx: &mut Context<'_, K>) {
    let text = cx.args.find(1);
    if cx.args.count() > 2 {
        return cx.error("ERR wrong number of arguments for 'ping' command");
    }
    if cx.session.is_subscriber() && cx.session.protocol == Protocol::Resp2 {
        let mut reply = cx.reply();
        reply.array(2);
        reply.bulk("pong");
        return reply.bulk(text.unwrap_or_default());
    }
    match text {
        Some(text) => cx.reply().bulk(text),
        None => cx.reply().simple("PONG"),
    }
}

pub(super) fn echo<K: Keyspace>(cx: &mut Context<'_, K>) {
    let text = cx.args.get(1);
    cx.reply().bulk(text);
}

pub(super) fn hello<K: Keyspace>(cx: &mut Context<'_, K>) {
    let protocol = match cx.args.find(1).map(parse_i64) {
        None => cx.session.protocol,
        Some(Some(2)) => Protocol::Resp2,
        Some(Some(3)) => Protocol::Resp3,
        Some(Some(_)) => return cx.error("NOPROTO unsupported protocol version"),
        Some(None) => return cx.error("ERR Protocol version is not an integer or out of range"),
    };
    let (mut login, mut name, mut at) = (None, None, 2);
    while at < cx.args.count() {
        let left = cx.args.count() - at - 1;
        if cx.args.is(at, "auth") && left >= 2 {
            login = Some((cx.args.get(at + 1), cx.args.get(at + 2)));
            at += 3;
        } else if cx.args.is(at, "setname") && left >= 1 {
            name = Some(cx.args.get(at + 1));
            at += 2;
        } else {
            let word = cx.args.get(at);
            return cx.error([b"ERR Syntax error in HELLO option '", word, b"'"].concat());
        }
    }
    if name.is_some_and(|name| !is_name(name)) {
        return cx.error(WRONG_NAME);
    }
    if let Some((user, password)) = login
        && !log_in(cx, user, password)
    {
        return;
    }
    if !cx.session.login.is_authenticated {
        return cx.error(HELLO_NEEDS_AUTH);
    }
    if let Some(name) = name {
        cx.session.client.set_name(name);
    }
    cx.session.set_protocol(protocol);
    let id = cx.session.client.id as i64;
    let mut reply = cx.reply();
    reply.map(7);
    for (name, value) in [("server", "redis"), ("version", REDIS_VERSION)] {
        reply.bulk(name);
        reply.bulk(value);
    }
    for (name, value) in [("proto", protocol.number()), ("id", id)] {
        reply.bulk(name);
        reply.integer(value);
    }
    for (name, value) in [("mode", "standalone"), ("role", "master")] {
        reply.bulk(name);
        reply.bulk(value);
    }
    reply.bulk("modules");
    reply.array(0);
}

/// Returns whether a connection may have the name.
pub(super) fn is_name(name: &[u8]) -> bool {
    name.iter().all(|byte| (b'!'..=b'~').contains(byte))
}

pub(super) fn auth<K: Keyspace>(cx: &mut Context<'_, K>) {
    let is_logged_in = match cx.args.count() {
        2 => {
            let needs_none = |users: &Users| {
                users.get(Users::DEFAULT).is_some_and(|own| own.needs_no_password())
            };
            if cx.server().users.read(needs_none) {
                return cx.error(NO_PASSWORD);
            }
            log_in(cx, Users::DEFAULT, cx.args.get(1))
        }
        3 => log_in(cx, cx.args.get(1), cx.args.get(2)),
        _ => return cx.syntax_error(),
    };
    if is_logged_in {
        cx.reply().ok();
    }
}

/// Selects a user. Replies with an error, and returns false, if the password is wrong.
fn log_in<K: Keyspace>(cx: &mut Context<'_, K>, name: &[u8], password: &[u8]) -> bool {
    match cx.server().users.authenticate(name, password) {
        Some(login) => {
            cx.session.client.set_user(login.name.clone());
            cx.session.login = login;
            true
        }
        None => {
            let command = cx.command.name.as_bytes().to_vec();
            log_refusal(cx, "auth", command, name);
            cx.error(WRONG_PASSWORD);
            false
        }
    }
}

pub(super) fn reset<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.session.take_queue();
    cx.store.unwatch(cx.watches);
    pubsub::unsubscribe_all(cx);
    let server = cx.server();
    server.monitors.remove(&cx.session.client);
    let session = &mut *cx.session;
    session.select(0);
    session.set_protocol(Protocol::Resp2);
    session.suppress = Suppress::No;
    session.client.set_name(b"");
    session.login = server.users.first_login();
    session.client.set_user(Arc::clone(&session.login.name));
    session.client.clear(flag::NO_EVICT | flag::NO_TOUCH);
    cx.reply().simple("RESET");
}

pub(super) fn quit<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.session.is_closing = true;
    cx.reply().ok();
}

pub(super) fn select<K: Keyspace>(cx: &mut Context<'_, K>) {
    match parse_i64(cx.args.get(1)) {
        None => cx.error("ERR value is not an integer or out of range"),
        Some(db) if (0..DATABASES as i64).contains(&db) => {
            cx.session.select(db as u8);
            cx.reply().ok();
        }
        Some(_) => cx.error("ERR DB index is out of range"),
    }
}
