//! ACL and its subcommands.

use std::io::Write as _;

use redis_formats::acl::Users;
use redis_formats::command::bits::category;
use redis_formats::command::{Arguments, all, lookup};
use redis_formats::number::parse_i64;
use units::files;

use crate::client::full_name;
use crate::context::{Args, Context};
use crate::keyspace::Keyspace;
use crate::random;

const NO_FILE: &str = "ERR This Redis instance is not configured to use an ACL file. You may want \
    to specify users via the ACL SETUSER command, or name a file with aclfile in the \
    configuration.";
const NO_INTEGER: &str = "ERR value is not an integer or out of range";
const BITS_MAX: i64 = 4096;

pub(super) fn cat<K: Keyspace>(cx: &mut Context<'_, K>) {
    let Some(name) = cx.args.find(2) else {
        let mut reply = cx.reply();
        reply.array(category::NAMES.len());
        return category::NAMES.iter().for_each(|name| reply.bulk(name));
    };
    let Some(bit) = category::parse(name) else {
        return cx.error([b"ERR Unknown category '", name, b"'"].concat());
    };
    let each = all().flat_map(|command| std::iter::once(command).chain(command.subcommands));
    let names: Vec<String> =
        each.filter(|own| own.categories & bit != 0).map(|own| full_name(own.id)).collect();
    let mut reply = cx.reply();
    reply.array(names.len());
    names.iter().for_each(|name| reply.bulk(name));
}

pub(super) fn delete<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.args.from(2).any(|name| name == Users::DEFAULT) {
        return cx.error("ERR The 'default' user cannot be removed");
    }
    let (names, server) = (cx.args.from(2), cx.server());
    let mut deleted = 0;
    for name in names.filter(|name| server.users.change(|users| users.remove(name))) {
        deleted += 1;
        let own = cx.session.client.id;
        for client in server.clients.list().iter().filter(|client| *client.user() == *name) {
            if client.id == own {
                cx.session.is_closing = true;
            } else {
                client.kill();
            }
        }
    }
    cx.reply().integer(deleted);
}

/// The arguments behind a number of leading ones.
struct Rest<'a>(Args<'a>, usize);

impl Arguments for Rest<'_> {
    fn len(&self) -> usize {
        self.0.count().saturating_sub(self.1)
    }

    fn at(&self, index: usize) -> &[u8] {
        self.0.get(self.1 + index)
    }
}

pub(super) fn dry_run<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (name, tested) = (cx.args.get(2), Rest(cx.args, 3));
    let user = cx.server().users.read(|users| users.get(name).cloned());
    let Some(user) = user else {
        return cx.error([b"ERR User '", name, b"' not found"].concat());
    };
    let command = match lookup(&tested) {
        Ok(command) => command,
        Err(refusal @ redis_formats::command::Refusal::Arity { .. }) => {
            return cx.reply().error_with(|out| refusal.text(&tested, out));
        }
        Err(_) => return cx.error([b"ERR Command '", cx.args.get(3), b"' not found"].concat()),
    };
    match user.check(command, &tested) {
        Ok(()) => cx.reply().ok(),
        Err(denied) => {
            let mut text = Vec::new();
            denied.dry_run_text(command, &tested, &mut text);
            cx.reply().bulk(text);
        }
    }
}

pub(super) fn generate<K: Keyspace>(cx: &mut Context<'_, K>) {
    let bits = match cx.args.find(2).map(parse_i64) {
        None => 256,
        Some(Some(bits @ 1..=BITS_MAX)) => bits,
        Some(Some(_)) => {
            return cx.error(
                "ERR ACL GENPASS argument must be the number of bits for the output password, a \
                 positive number up to 4096",
            );
        }
        Some(None) => return cx.error(NO_INTEGER),
    };
    let digits = (bits as usize).div_ceil(4);
    let text = random::hexadecimal(digits.div_ceil(2));
    cx.reply().bulk(&text[..digits]);
}

pub(super) fn get<K: Keyspace>(cx: &mut Context<'_, K>) {
    let name = cx.args.get(2);
    let Some(user) = cx.server().users.read(|users| users.get(name).cloned()) else {
        return cx.reply().null();
    };
    let written = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut text = Vec::new();
        write(&mut text);
        text
    };
    let mut reply = cx.reply();
    reply.map(6);
    reply.bulk("flags");
    reply.set(user.flags().count());
    user.flags().for_each(|flag| reply.bulk(flag));
    reply.bulk("passwords");
    reply.array(user.passwords().len());
    for password in user.passwords() {
        reply.bulk(written(&|text| password.write(text)));
    }
    reply.bulk("commands");
    reply.bulk(written(&|text| user.write_commands(text)));
    reply.bulk("keys");
    reply.bulk(written(&|text| user.write_keys(text)));
    reply.bulk("channels");
    reply.bulk(written(&|text| user.write_channels(text)));
    reply.bulk("selectors");
    reply.array(0);
}

pub(super) fn list<K: Keyspace>(cx: &mut Context<'_, K>) {
    let lines: Vec<Vec<u8>> =
        cx.server().users.read(|users| users.iter().map(|user| user.line()).collect());
    let mut reply = cx.reply();
    reply.array(lines.len());
    lines.iter().for_each(|line| reply.bulk(line));
}

pub(super) fn users<K: Keyspace>(cx: &mut Context<'_, K>) {
    let names: Vec<Vec<u8>> =
        cx.server().users.read(|users| users.iter().map(|user| user.name().to_vec()).collect());
    let mut reply = cx.reply();
    reply.array(names.len());
    names.iter().for_each(|name| reply.bulk(name));
}

pub(super) fn who_am_i<K: Keyspace>(cx: &mut Context<'_, K>) {
    let name = cx.session.login.name.clone();
    cx.reply().bulk(&*name);
}

pub(super) fn set<K: Keyspace>(cx: &mut Context<'_, K>) {
    let name = cx.args.get(2);
    if !Users::is_name(name) {
        return cx.error(Users::NAME_TEXT);
    }
    let is_new = cx.server().users.read(|users| users.get(name).is_none());
    let opens = cx.server().config.is("acl-pubsub-default", "allchannels");
    let first = (is_new && opens).then_some(&b"allchannels"[..]);
    let rules: Vec<&[u8]> = first.into_iter().chain(cx.args.from(3)).collect();
    match cx.server().users.change(|users| users.set(name, rules)) {
        Ok(()) => {
            cx.server().clients.review();
            cx.reply().ok();
        }
        Err(error) => cx.error(format!("ERR {error}")),
    }
}

pub(super) fn load<K: Keyspace>(cx: &mut Context<'_, K>) {
    let file = cx.server().config.get("aclfile");
    if file.is_empty() {
        return cx.error(NO_FILE);
    }
    let text = match files::read(file.as_ref()) {
        Ok(text) => text,
        Err(error) => return cx.error(format!("ERR {file}: {error}; nothing was changed")),
    };
    match Users::parse(&text) {
        Ok(read) => {
            cx.server().users.change(|users| *users = read);
            cx.server().clients.review();
            cx.reply().ok();
        }
        Err(error) => cx.error(format!("ERR {error}; nothing was changed")),
    }
}

pub(super) fn save<K: Keyspace>(cx: &mut Context<'_, K>) {
    let file = cx.server().config.get("aclfile");
    if file.is_empty() {
        return cx.error(NO_FILE);
    }
    let text = cx.server().users.read(Users::text);
    // A reader of the file sees the old or the new content.
    let new = format!("{file}.new");
    let written = files::create_draft(new.as_ref())
        .and_then(|mut draft| draft.write_all(&text))
        .and_then(|()| std::fs::rename(&new, &file));
    match written {
        Ok(()) => cx.reply().ok(),
        Err(error) => {
            tracing::warn!(file, %error, "saving the users failed");
            cx.error(
                "ERR There was an error trying to save the ACLs. Please check the server logs for \
                 more information",
            );
        }
    }
}

pub(super) fn log<K: Keyspace>(cx: &mut Context<'_, K>) {
    if cx.args.is(2, "reset") {
        cx.server().security_log.clear();
        return cx.reply().ok();
    }
    let count = match cx.args.find(2).map(parse_i64) {
        None => 10,
        Some(Some(count)) => usize::try_from(count).unwrap_or(0),
        Some(None) => return cx.error(NO_INTEGER),
    };
    let (entries, now_ms) = (cx.server().security_log.newest(count), cx.now_ms());
    let mut reply = cx.reply();
    reply.array(entries.len());
    for entry in entries {
        reply.map(7);
        reply.bulk("count");
        reply.integer(entry.count as i64);
        for (name, value) in [
            ("reason", entry.reason.as_bytes()),
            ("context", entry.context.as_bytes()),
            ("object", &entry.object),
            ("username", &entry.user),
        ] {
            reply.bulk(name);
            reply.bulk(value);
        }
        reply.bulk("age-seconds");
        reply.double(now_ms.saturating_sub(entry.created_ms) as f64 / 1000.0);
        reply.bulk("client-info");
        reply.bulk(entry.client);
    }
}
