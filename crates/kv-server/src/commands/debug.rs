//! Subcommands of DEBUG that need no data. The others belong to the store.

use std::time::Duration;

use redis_formats::number::parse_f64;
use redis_formats::reply::Protocol;

use crate::context::Context;
use crate::keyspace::Keyspace;

const OWN: [&str; 9] = [
    "panic",
    "sleep",
    "set-active-expire",
    "error",
    "protocol",
    "log",
    "help",
    "pause-cron",
    "replybuffer",
];

const HELP: [&str; 23] = [
    "DEBUG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "DIGEST",
    "    Returns a hash of all keys and values.",
    "DIGEST-VALUE <key> [<key> ...]",
    "    Returns a hash of the values of keys.",
    "ERROR <text>",
    "    Replies with an error.",
    "LOG <text>",
    "    Writes a line to the log.",
    "OBJECT <key>",
    "    Describes the value of a key.",
    "PANIC",
    "    Fails as a defect of the server would. The connection ends.",
    "PROTOCOL <kind>",
    "    Replies with a value of a kind of the protocol.",
    "RELOAD [NOSAVE]",
    "    Saves and loads the file.",
    "SET-ACTIVE-EXPIRE <0|1>",
    "    Switches the deletion of expired keys in the background.",
    "SLEEP <seconds>",
    "    Delays the reply.",
    "HELP",
    "    Lists the subcommands.",
];

/// Returns whether the subcommand is executed here.
pub(super) fn is_own<K: Keyspace>(cx: &Context<'_, K>) -> bool {
    OWN.iter().any(|own| cx.args.is(1, own))
}

/// Replies to a subcommand that does not exist, or has a wrong number of arguments.
pub fn unknown<K: Keyspace>(cx: &mut Context<'_, K>) {
    let text: [&[u8]; 3] = [
        b"ERR unknown subcommand or wrong number of arguments for '",
        cx.args.get(1),
        b"'. Try DEBUG HELP.",
    ];
    cx.error(text.concat());
}

pub(super) async fn execute<K: Keyspace>(cx: &mut Context<'_, K>) {
    let count = cx.args.count();
    if cx.args.is(1, "sleep") && count == 3 {
        let seconds = parse_f64(cx.args.get(2)).unwrap_or(0.0).clamp(0.0, 1e6);
        cx.worker.wait(Duration::from_secs_f64(seconds)).await;
        cx.reply().ok();
    } else if cx.args.is(1, "panic") && count == 2 {
        panic!("DEBUG PANIC");
    } else if cx.args.is(1, "set-active-expire") && count == 3 {
        cx.server().set_expires_actively(cx.args.get(2) != b"0");
        cx.reply().ok();
    } else if cx.args.is(1, "error") && count == 3 {
        let text = cx.args.get(2);
        cx.error(text);
    } else if cx.args.is(1, "protocol") && count == 3 {
        protocol(cx);
    } else if cx.args.is(1, "log") && count == 3 {
        tracing::warn!(text = %String::from_utf8_lossy(cx.args.get(2)), "DEBUG LOG");
        cx.reply().ok();
    } else if cx.args.is(1, "help") && count == 2 {
        let mut reply = cx.reply();
        reply.array(HELP.len());
        HELP.iter().for_each(|line| reply.simple(line));
    } else if cx.args.is(1, "pause-cron") || cx.args.is(1, "replybuffer") {
        // Tests of Redis switch parts off that this server has not.
        cx.reply().ok();
    } else {
        unknown(cx);
    }
}

fn protocol<K: Keyspace>(cx: &mut Context<'_, K>) {
    let is = |word| cx.args.is(2, word);
    let kinds = [
        "string", "integer", "double", "bignum", "null", "array", "set", "map", "attrib", "push",
        "verbatim", "true", "false",
    ];
    let kind = kinds.into_iter().find(|kind| is(kind));
    let is_resp3 = cx.session.protocol == Protocol::Resp3;
    if kind == Some("push") && !is_resp3 {
        return cx.error("ERR RESP2 is not supported by this command");
    }
    if kind == Some("attrib") && is_resp3 {
        cx.out.extend(b"|1\r\n$14\r\nkey-popularity\r\n*2\r\n$7\r\nkey:123\r\n:90\r\n");
    }
    let mut reply = cx.reply();
    match kind {
        Some("string") => reply.bulk("Hello World"),
        Some("integer") => reply.integer(12_345),
        Some("double") => reply.double(3141.0 / 1000.0),
        Some("bignum") => reply.big_number("1234567999999999999999999999999999999"),
        Some("null") => reply.null(),
        Some("array") => {
            reply.array(3);
            (0..3).for_each(|value| reply.integer(value));
        }
        Some("set") => {
            reply.set(3);
            (0..3).for_each(|value| reply.integer(value));
        }
        Some("map") => {
            reply.map(3);
            for value in 0..3 {
                reply.integer(value);
                reply.boolean(value == 1);
            }
        }
        Some("attrib") => reply.bulk("Some real reply following the attribute"),
        Some("push") => {
            reply.push(2);
            reply.bulk("server-cpu-usage");
            reply.integer(42);
        }
        Some("verbatim") => reply.verbatim(b"txt", "This is a verbatim\nstring"),
        Some("true") => reply.boolean(true),
        Some("false") => reply.boolean(false),
        _ => reply.error(format!(
            "ERR Wrong protocol type name. Please use one of the following: {}",
            kinds.join("|")
        )),
    }
}
