//! CONFIG and its subcommands.

use redis_formats::glob;

use crate::config::Refused;
use crate::config::table::HIDDEN;
use crate::context::Context;
use crate::keyspace::Keyspace;

pub(super) fn get<K: Keyspace>(cx: &mut Context<'_, K>) {
    let args = cx.args;
    let is_pattern = |own: &[u8]| own.iter().any(|byte| b"*?[".contains(byte));
    let is_wanted = |name: &[u8]| {
        let is_hidden = HIDDEN.iter().any(|own| own.as_bytes() == name);
        args.from(2)
            .any(|own| glob::matches_in_any_case(own, name) && !(is_hidden && is_pattern(own)))
    };
    let found = cx.server().config.select(is_wanted);
    let mut reply = cx.reply();
    reply.map(found.len());
    for (name, value) in found {
        reply.bulk(name);
        reply.bulk(value);
    }
}

pub(super) fn set<K: Keyspace>(cx: &mut Context<'_, K>) {
    if !cx.args.count().is_multiple_of(2) {
        return cx.error("ERR wrong number of arguments for 'config|set' command");
    }
    let words: Vec<&[u8]> = cx.args.from(2).collect();
    let pairs: Vec<(&[u8], &[u8])> =
        words.as_chunks::<2>().0.iter().map(|&[a, b]| (a, b)).collect();
    let server = cx.server();
    match server.config.set(&pairs) {
        Ok(names) => {
            names.iter().for_each(|name| apply(cx, name));
            cx.store.configured(server);
            cx.reply().ok();
        }
        Err(Refused::Unknown(name)) => {
            let text: [&[u8]; 3] =
                [b"ERR Unknown option or number of arguments for CONFIG SET - '", &name, b"'"];
            cx.error(text.concat());
        }
        Err(Refused::Value { name, why }) => {
            let text: [&[u8]; 4] = [
                b"ERR CONFIG SET failed (possibly related to argument '",
                &name,
                b"') - ",
                why.as_bytes(),
            ];
            cx.error(text.concat());
        }
    }
}

/// Carries out the consequences of a changed parameter.
fn apply<K: Keyspace>(cx: &Context<'_, K>, name: &str) {
    let server = cx.server();
    match name {
        "requirepass" => server.users.require_password(&server.config.get(name)),
        "slowlog-max-len" => server.slowlog.truncate(server.config.live.slow_entries()),
        "latency-tracking" if !server.config.live.tracks_latency() => {
            server.stats().for_each(|stats| stats.reset_times(|_| true));
        }
        _ => {}
    }
}

pub(super) fn reset_statistics<K: Keyspace>(cx: &mut Context<'_, K>) {
    let server = cx.server();
    server.stats().for_each(crate::stats::Stats::reset);
    server.errors.lock().clear();
    cx.reply().ok();
}
