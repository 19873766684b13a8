//! CLIENT and its subcommands.

use std::sync::Arc;

use redis_formats::number::parse_i64;

use super::connection::{WRONG_NAME, is_name};
use super::integer;
use crate::client::{Client, Library, flag};
use crate::context::Context;
use crate::keyspace::Keyspace;
use crate::session::Suppress;

/// Classes of connections that a filter may name. No connection is of the others.
const CLASSES: [&str; 5] = ["normal", "slave", "replica", "pubsub", "master"];

pub(super) fn get_name<K: Keyspace>(cx: &mut Context<'_, K>) {
    let name = cx.session.client.name();
    let name = (!name.is_empty()).then_some(&*name);
    cx.reply().bulk_or_null(name);
}

pub(super) fn set_name<K: Keyspace>(cx: &mut Context<'_, K>) {
    let name = cx.args.get(2);
    if !is_name(name) {
        return cx.error(WRONG_NAME);
    }
    cx.session.client.set_name(name);
    cx.reply().ok();
}

pub(super) fn set_info<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (option, value) = (cx.args.get(2), cx.args.get(3));
    let Some(which) = Library::ALL.into_iter().find(|own| cx.args.is(2, own.name())) else {
        return cx.error([b"ERR Unrecognized option '", option, b"'"].concat());
    };
    if !is_name(value) {
        let why = b" cannot contain spaces, newlines or special characters.";
        return cx.error([b"ERR ", option, why].concat());
    }
    cx.session.client.set_library(which, value);
    cx.reply().ok();
}

pub(super) fn id<K: Keyspace>(cx: &mut Context<'_, K>) {
    let id = cx.session.client.id as i64;
    cx.reply().integer(id);
}

pub(super) fn info<K: Keyspace>(cx: &mut Context<'_, K>) {
    let mut text = Vec::new();
    cx.session.client.describe(cx.now_ms(), &mut text);
    text.push(b'\n');
    cx.reply().verbatim(b"txt", text);
}

pub(super) fn list<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (mut class, mut ids) = (None, None);
    if cx.args.is(2, "type") && cx.args.count() == 4 {
        class = Some(match find_class(cx.args.get(3)) {
            Some(class) => class,
            None => return unknown_class(cx, cx.args.get(3)),
        });
    } else if cx.args.is(2, "id") && cx.args.count() > 3 {
        let wanted: Option<Vec<u64>> =
            cx.args.from(3).map(|id| parse_i64(id).and_then(|id| id.try_into().ok())).collect();
        match wanted {
            Some(wanted) => ids = Some(wanted),
            None => return cx.error("ERR Invalid client ID"),
        }
    } else if cx.args.count() != 2 {
        return cx.syntax_error();
    }
    let mut text = Vec::new();
    for client in cx.server().clients.list() {
        let is_wanted = class.is_none_or(|class| client.class() == class)
            && ids.as_ref().is_none_or(|ids| ids.contains(&client.id));
        if is_wanted {
            client.describe(cx.now_ms(), &mut text);
            text.push(b'\n');
        }
    }
    cx.reply().verbatim(b"txt", text);
}

fn find_class(name: &[u8]) -> Option<&'static str> {
    CLASSES.into_iter().find(|class| name.eq_ignore_ascii_case(class.as_bytes()))
}

fn unknown_class<K: Keyspace>(cx: &mut Context<'_, K>, name: &[u8]) {
    cx.error([b"ERR Unknown client type '", name, b"'"].concat());
}

/// Which connections CLIENT KILL ends.
#[derive(Default)]
struct Filter<'a> {
    id: Option<u64>,
    class: Option<&'static str>,
    address: Option<&'a [u8]>,
    local: Option<&'a [u8]>,
    user: Option<&'a [u8]>,
    spares_own: bool,
}

impl Filter<'_> {
    fn selects(&self, client: &Client, own: u64) -> bool {
        let is = |wanted: Option<&[u8]>, value: &[u8]| wanted.is_none_or(|wanted| wanted == value);
        self.id.is_none_or(|id| client.id == id)
            && self.class.is_none_or(|class| client.class() == class)
            && is(self.address, client.address.as_bytes())
            && is(self.local, client.local.as_bytes())
            && is(self.user, &client.user())
            && !(self.spares_own && client.id == own)
    }
}

pub(super) fn kill<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.args.count() == 3 {
        let filter = Filter { address: Some(cx.args.get(2)), ..Filter::default() };
        return match kill_all(cx, &filter) {
            0 => cx.error("ERR No such client"),
            _ => cx.reply().ok(),
        };
    }
    let Some(filter) = parse_filter(cx) else { return };
    let killed = kill_all(cx, &filter);
    cx.reply().integer(killed);
}

/// Reads the options of CLIENT KILL. Replies with an error if one is wrong.
fn parse_filter<'a, K: Keyspace>(cx: &mut Context<'a, K>) -> Option<Filter<'a>> {
    let mut filter = Filter { spares_own: true, ..Filter::default() };
    if !cx.args.count().is_multiple_of(2) {
        cx.syntax_error();
        return None;
    }
    for at in (2..cx.args.count()).step_by(2) {
        let value = cx.args.get(at + 1);
        if cx.args.is(at, "id") {
            let Some(id @ 1..) = parse_i64(value) else {
                cx.error("ERR client-id should be greater than 0");
                return None;
            };
            filter.id = Some(id as u64);
        } else if cx.args.is(at, "type") {
            filter.class = find_class(value);
            if filter.class.is_none() {
                unknown_class(cx, value);
                return None;
            }
        } else if cx.args.is(at, "addr") {
            filter.address = Some(value);
        } else if cx.args.is(at, "laddr") {
            filter.local = Some(value);
        } else if cx.args.is(at, "user") {
            if cx.server().users.read(|users| users.get(value).is_none()) {
                cx.error([b"ERR No such user '", value, b"'"].concat());
                return None;
            }
            filter.user = Some(value);
        } else if cx.args.is(at, "skipme") && value.eq_ignore_ascii_case(b"yes") {
            filter.spares_own = true;
        } else if cx.args.is(at, "skipme") && value.eq_ignore_ascii_case(b"no") {
            filter.spares_own = false;
        } else {
            cx.syntax_error();
            return None;
        }
    }
    Some(filter)
}

/// Ends connections. The own one ends behind its reply.
fn kill_all<K: Keyspace>(cx: &mut Context<'_, K>, filter: &Filter<'_>) -> i64 {
    let own = cx.session.client.id;
    let all = cx.server().clients.list();
    let selected: Vec<Arc<Client>> =
        all.into_iter().filter(|client| filter.selects(client, own)).collect();
    for client in &selected {
        if client.id == own {
            cx.session.is_closing = true;
        } else {
            // The connection is out of all lists, and its socket shut down, before the reply.
            cx.server().clients.remove(client);
            client.hang_up();
        }
    }
    selected.len() as i64
}

pub(super) fn no_evict<K: Keyspace>(cx: &mut Context<'_, K>) {
    switch(cx, flag::NO_EVICT);
}

pub(super) fn no_touch<K: Keyspace>(cx: &mut Context<'_, K>) {
    switch(cx, flag::NO_TOUCH);
}

/// Sets or clears a flag of the own connection, by ON or OFF.
fn switch<K: Keyspace>(cx: &mut Context<'_, K>, flag: u32) {
    if cx.args.is(2, "on") {
        cx.session.client.set(flag);
    } else if cx.args.is(2, "off") {
        cx.session.client.clear(flag);
    } else {
        return cx.syntax_error();
    }
    cx.reply().ok();
}

pub(super) fn pause<K: Keyspace>(cx: &mut Context<'_, K>) {
    let holds_all = match cx.args.find(3) {
        None => true,
        Some(_) if cx.args.is(3, "all") => true,
        Some(_) if cx.args.is(3, "write") => false,
        Some(_) => return cx.error("ERR CLIENT PAUSE mode must be WRITE or ALL"),
    };
    match integer(cx, 2) {
        None => cx.error("ERR timeout is not an integer or out of range"),
        Some(..0) => cx.error("ERR timeout is negative"),
        Some(ms) => {
            let until = cx.now_ms().saturating_add(ms as u64);
            cx.server().pause.begin(until, holds_all, cx.now_ms());
            cx.reply().ok();
        }
    }
}

pub(super) fn unpause<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.server().pause.end();
    cx.reply().ok();
}

pub(super) fn reply<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.args.is(2, "on") {
        cx.session.suppress = Suppress::No;
        cx.reply().ok();
    } else if cx.args.is(2, "off") {
        cx.session.suppress = Suppress::All;
    } else if cx.args.is(2, "skip") {
        if cx.session.suppress != Suppress::All {
            cx.session.suppress = Suppress::Next;
        }
    } else {
        cx.syntax_error();
    }
}

pub(super) fn tracking<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.args.is(2, "off") && cx.args.count() == 3 {
        cx.reply().ok();
    } else if cx.args.is(2, "on") {
        cx.error("ERR CLIENT TRACKING is not supported by this server");
    } else {
        cx.syntax_error();
    }
}

pub(super) fn caching<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.error(
        "ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or \
         OPTOUT mode enabled",
    );
}

/// Without tracking, there is no connection to which messages go instead.
pub(super) fn redirection<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.reply().integer(-1);
}

pub(super) fn tracking_info<K: Keyspace>(cx: &mut Context<'_, K>) {
    let mut reply = cx.reply();
    reply.map(3);
    reply.bulk("flags");
    reply.set(1);
    reply.bulk("off");
    reply.bulk("redirect");
    reply.integer(-1);
    reply.bulk("prefixes");
    reply.array(0);
}

/// No command waits, so no connection is woken.
pub(super) fn unblock<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.args.count() > 4 {
        return cx.error(
            "ERR unknown subcommand or wrong number of arguments for 'unblock'. Try CLIENT HELP.",
        );
    }
    let is_known = cx.args.find(3).is_none() || cx.args.is(3, "timeout") || cx.args.is(3, "error");
    match integer(cx, 2) {
        _ if !is_known => cx.error("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR"),
        None => cx.error("ERR value is not an integer or out of range"),
        Some(_) => cx.reply().integer(0),
    }
}
