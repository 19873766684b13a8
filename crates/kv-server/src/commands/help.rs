//! HELP of commands with subcommands, made from the table of commands.

use redis_formats::command::by_id;

use crate::context::Context;
use crate::keyspace::Keyspace;

pub(super) fn reply<K: Keyspace>(cx: &mut Context<'_, K>) {
    let (command, container) = by_id(cx.command.id);
    let container = container.unwrap_or(command);
    let mut lines = vec![format!(
        "{} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
        container.name.to_uppercase()
    )];
    for sub in container.subcommands {
        lines.push(sub.name.to_uppercase());
        lines.push(format!("    {}", sub.summary));
    }
    let mut reply = cx.reply();
    reply.array(lines.len());
    lines.iter().for_each(|line| reply.simple(line));
}
