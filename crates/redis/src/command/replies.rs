//! The replies of COMMAND and its subcommands.

use super::bits::{category, flag, key};
use super::keys::keys;
use super::{Arguments, Command, Id, KeySpec, Tail, all, by_name, find};
use crate::glob;
use crate::reply::Writer;

/// Executes COMMAND or the subcommand `command` of it, and writes the reply.
///
/// [`lookup`](super::lookup) has found `command` and checked the number of arguments.
pub fn reply<A: Arguments + ?Sized>(command: &Command, arguments: &A, w: &mut Writer<'_>) {
    let operands = Tail { inner: arguments, skip: 2 };
    match command.id {
        Id::CommandCount => w.integer(all().count() as i64),
        Id::CommandInfo if !operands.is_empty() => {
            w.array(operands.len());
            (0..operands.len()).for_each(|at| info_by_name(operands.at(at), w));
        }
        Id::CommandDocs => all_docs(&operands, w),
        Id::CommandList => list(&operands, w),
        Id::CommandGetkeys => get_keys(&operands, false, w),
        Id::CommandGetkeysandflags => get_keys(&operands, true, w),
        Id::CommandHelp => help(w),
        _ => {
            w.array(all().count());
            all().for_each(|command| info(command, None, w));
        }
    }
}

/// Returns the container and the command of a name such as `config|get`.
fn named(name: &[u8]) -> Option<(Option<&'static Command>, &'static Command)> {
    let command = find(name)?;
    let container = name.split(|&byte| byte == b'|').next().and_then(by_name)?;
    Some(((container.id != command.id).then_some(container), command))
}

fn full_name(container: Option<&Command>, command: &Command, w: &mut Writer<'_>) {
    let Some(container) = container else { return w.bulk(command.name) };
    w.bulk_header(container.name.len() + 1 + command.name.len());
    w.raw(container.name.as_bytes());
    w.raw(b"|");
    w.raw(command.name.as_bytes());
    w.bulk_end();
}

fn info_by_name(name: &[u8], w: &mut Writer<'_>) {
    match named(name) {
        Some((container, command)) => info(command, container, w),
        None => w.null(),
    }
}

fn info(command: &Command, container: Option<&Command>, w: &mut Writer<'_>) {
    w.array(10);
    full_name(container, command, w);
    w.integer(command.arity.into());
    w.set(flag::names(command.flags).count());
    flag::names(command.flags).for_each(|name| w.simple(name));
    let (first, last, step) = command.positions;
    [first, last, step].into_iter().for_each(|position| w.integer(position.into()));
    w.set(category::names(command.categories).count());
    category::names(command.categories).for_each(|name| w.simple_parts("@", name));
    w.set(command.tips.len());
    command.tips.iter().for_each(|tip| w.bulk(tip));
    w.set(command.keys.len());
    command.keys.iter().for_each(|spec| key_spec(spec, w));
    // Redis writes an empty set and an array that is not empty.
    match command.subcommands.len() {
        0 => w.set(0),
        count => w.array(count),
    }
    command.subcommands.iter().for_each(|sub| info(sub, Some(command), w));
}

fn key_spec(spec: &KeySpec, w: &mut Writer<'_>) {
    w.map(3 + usize::from(!spec.note.is_empty()));
    if !spec.note.is_empty() {
        w.bulk("notes");
        w.bulk(spec.note);
    }
    w.bulk("flags");
    uses(spec.uses, w);
    search("begin_search", "index", &[("index", spec.first.into())], w);
    let range = [("lastkey", spec.last.into()), ("keystep", spec.step.into()), ("limit", 0)];
    search("find_keys", "range", &range, w);
}

fn search(step: &str, kind: &str, numbers: &[(&str, i64)], w: &mut Writer<'_>) {
    w.bulk(step);
    w.map(2);
    w.bulk("type");
    w.bulk(kind);
    w.bulk("spec");
    w.map(numbers.len());
    for &(name, number) in numbers {
        w.bulk(name);
        w.integer(number);
    }
}

fn uses(uses: u16, w: &mut Writer<'_>) {
    w.set(key::names(uses).count());
    key::names(uses).for_each(|name| w.simple(name));
}

fn all_docs<A: Arguments + ?Sized>(names: &A, w: &mut Writer<'_>) {
    if names.is_empty() {
        w.map(all().count());
        return all().for_each(|command| docs(None, command, w));
    }
    let found = || (0..names.len()).filter_map(|at| named(names.at(at)));
    w.map(found().count());
    found().for_each(|(container, command)| docs(container, command, w));
}

fn docs(container: Option<&Command>, command: &Command, w: &mut Writer<'_>) {
    full_name(container, command, w);
    let subcommands = command.subcommands;
    w.map(3 + usize::from(!subcommands.is_empty()));
    for (name, text) in
        [("summary", command.summary), ("since", command.since), ("group", command.group.name())]
    {
        w.bulk(name);
        w.bulk(text);
    }
    if !subcommands.is_empty() {
        w.bulk("subcommands");
        w.map(subcommands.len());
        subcommands.iter().for_each(|sub| docs(Some(command), sub, w));
    }
}

/// Lists the names of the commands and subcommands: of all, or of those that a filter selects.
fn list<A: Arguments + ?Sized>(options: &A, w: &mut Writer<'_>) {
    let is = |at: usize, word: &str| options.at(at).eq_ignore_ascii_case(word.as_bytes());
    match options.len() {
        0 => list_if(w, |_, _| true),
        3 if is(0, "filterby") && is(1, "pattern") => {
            let pattern = options.at(2);
            list_if(w, |name, _| glob::matches_in_any_case(pattern, name));
        }
        3 if is(0, "filterby") && is(1, "aclcat") => {
            let bit = category::parse(options.at(2)).unwrap_or(0);
            list_if(w, |_, command| command.categories & bit != 0);
        }
        // No module is ever loaded.
        3 if is(0, "filterby") && is(1, "module") => w.array(0),
        _ => w.error("ERR syntax error"),
    }
}

fn list_if(w: &mut Writer<'_>, selected: impl Fn(&[u8], &Command) -> bool) {
    let mut found = Vec::new();
    for command in all() {
        if selected(command.name.as_bytes(), command) {
            found.push((None, command));
        }
        for sub in command.subcommands {
            let name = [command.name, sub.name].join("|");
            if selected(name.as_bytes(), sub) {
                found.push((Some(command), sub));
            }
        }
    }
    w.array(found.len());
    found.into_iter().for_each(|(container, command)| full_name(container, command, w));
}

fn get_keys<A: Arguments + ?Sized>(whole: &A, with_uses: bool, w: &mut Writer<'_>) {
    let command = by_name(whole.at(0)).and_then(|command| match command.subcommands {
        [] => Some(command),
        _ if whole.len() < 2 => Some(command),
        _ => command.subcommand(whole.at(1)),
    });
    let Some(command) = command else { return w.error("ERR Invalid command specified") };
    if command.keys.iter().all(|spec| spec.uses & key::NOT_KEY != 0) {
        return w.error("ERR The command has no key arguments");
    }
    if !command.takes(whole.len()) {
        return w.error("ERR Invalid number of arguments specified for command");
    }
    let count = keys(command, whole).count();
    if keys(command, whole).any(|key| key.is_err()) {
        return w.error("ERR Invalid arguments specified for command");
    }
    w.array(count);
    for key in keys(command, whole).flatten() {
        if with_uses {
            w.array(2);
        }
        w.bulk(whole.at(key.index));
        if with_uses {
            uses(key.uses, w);
        }
    }
}

const HELP: [&str; 17] = [
    "COMMAND <subcommand> [<arg> ...]. Subcommands are:",
    "(no subcommand)",
    "    Returns the facts of all commands.",
    "COUNT",
    "    Returns the number of commands.",
    "DOCS [<command> ...]",
    "    Returns the descriptions of commands, by default of all.",
    "GETKEYS <command> [<arg> ...]",
    "    Returns the keys among the arguments of a command.",
    "GETKEYSANDFLAGS <command> [<arg> ...]",
    "    Returns the keys among the arguments of a command, and their use.",
    "INFO [<command> ...]",
    "    Returns the facts of commands, by default of all.",
    "LIST [FILTERBY (MODULE <name>|ACLCAT <category>|PATTERN <pattern>)]",
    "    Lists the names of commands.",
    "HELP",
    "    Prints this text.",
];

fn help(w: &mut Writer<'_>) {
    w.array(HELP.len());
    HELP.iter().for_each(|line| w.simple(line));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::lookup;
    use crate::reply::{Limits, Protocol, ReplyParser};

    fn replied(line: &str) -> String {
        let words: Vec<_> = line.split(' ').collect();
        let mut out = Vec::new();
        let command = lookup(&words[..]).unwrap();
        reply(command, &words[..], &mut Writer::new(&mut out, Protocol::Resp3));
        let mut parser = ReplyParser::default();
        assert_eq!(parser.parse(&out, &Limits::default()), Ok(Some(out.len())));
        format!("{:?}", parser.reply(&out))
    }

    #[test]
    fn facts_of_commands_are_complete() {
        assert_eq!(
            replied("command info GET nope config|resetstat"),
            concat!(
                r#"[["get", "2", ["readonly", "fast"], "1", "1", "1", "#,
                r#"["@read", "@string", "@fast"], [], [["flags", ["RO", "access"], "#,
                r#""begin_search", ["type", "index", "spec", ["index", "1"]], "#,
                r#""find_keys", ["type", "range", "spec", "#,
                r#"["lastkey", "0", "keystep", "1", "limit", "0"]]]], []], null, "#,
                r#"["config|resetstat", "2", ["admin", "noscript", "loading", "stale"], "#,
                r#""0", "0", "0", ["@admin", "@slow", "@dangerous"], [], [], []]]"#,
            )
        );
        let count: i64 = replied("command count").trim_matches('"').parse().unwrap();
        assert_eq!(count, all().count() as i64);
        assert_eq!(replied("command"), replied("command info"));
        assert!(replied("command").contains("client|no-evict"));
    }

    #[test]
    fn descriptions_are_complete() {
        let text = replied("command docs nope object|freq");
        assert!(text.starts_with(r#"["object|freq", ["summary", "#), "{text}");
        assert!(replied("command docs memory").contains(r#""subcommands", ["memory|doctor""#));
        for command in all().chain(all().flat_map(|command| command.subcommands)) {
            assert!(command.summary.ends_with('.') && command.since.contains('.'), "{command:?}");
        }
        assert!(replied("command docs").contains("GETRANGE"));
    }

    #[test]
    fn names_are_listed_by_filter() {
        let transaction = r#"["multi", "exec", "discard", "watch", "unwatch"]"#;
        assert_eq!(replied("command list filterby aclcat TRANSACTION"), transaction);
        assert_eq!(
            replied("command list filterby pattern CONFIG|?et"),
            r#"["config|get", "config|set"]"#
        );
        assert_eq!(replied("command list filterby module x"), "[]");
        assert_eq!(replied("command list filterby aclcat nope"), "[]");
        assert_eq!(replied("command list x"), r#""ERR syntax error""#);
        assert!(replied("command list").contains("client|list"));
    }

    #[test]
    fn keys_are_extracted() {
        assert_eq!(replied("command getkeys mset a 1 b 2"), r#"["a", "b"]"#);
        assert_eq!(replied("command getkeys object encoding a"), r#"["a"]"#);
        assert_eq!(
            replied("command getkeysandflags copy a b"),
            r#"[["a", ["RO", "access"]], ["b", ["OW", "update"]]]"#
        );
        for (line, error) in [
            ("nope x", "Invalid command specified"),
            ("object nope a", "Invalid command specified"),
            ("config get a", "The command has no key arguments"),
            ("get a b", "Invalid number of arguments specified for command"),
        ] {
            assert_eq!(replied(&format!("command getkeys {line}")), format!("\"ERR {error}\""));
        }
    }
}
