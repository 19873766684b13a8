//! INFO: selects and prints sections.

use crate::context::Context;
use crate::keyspace::Keyspace;

use super::info_sections as sections;

/// Fields of a section.
pub(super) type Fields = Vec<(String, String)>;

/// A section.
struct Section<K: Keyspace> {
    name: &'static str,
    title: &'static str,
    /// Shown without arguments.
    is_default: bool,
    fields: fn(&Context<'_, K>) -> Fields,
}

const fn section<K: Keyspace>(
    name: &'static str,
    title: &'static str,
    fields: fn(&Context<'_, K>) -> Fields,
) -> Section<K> {
    Section { name, title, is_default: true, fields }
}

const fn further<K: Keyspace>(section: Section<K>) -> Section<K> {
    Section { is_default: false, ..section }
}

fn all<K: Keyspace>() -> [Section<K>; 14] {
    [
        section("server", "Server", sections::server),
        section("clients", "Clients", sections::clients),
        section("memory", "Memory", sections::memory),
        section("persistence", "Persistence", sections::persistence),
        section("stats", "Stats", sections::stats),
        section("replication", "Replication", sections::replication),
        section("cpu", "CPU", sections::cpu),
        section("modules", "Modules", |_| Vec::new()),
        further(section("commandstats", "Commandstats", sections::commands)),
        section("errorstats", "Errorstats", sections::errors),
        further(section("latencystats", "Latencystats", sections::latencies)),
        section("cluster", "Cluster", |_| vec![("cluster_enabled".into(), "0".into())]),
        section("keyspace", "Keyspace", sections::keyspace),
        section("pool", "Pool", sections::pool),
    ]
}

pub(super) fn info<K: Keyspace>(cx: &mut Context<'_, K>) {
    let args = cx.args;
    let names = |word: &str| (1..args.count()).any(|at| args.is(at, word));
    let shows_default = args.count() == 1 || names("default");
    let shows_all = names("all") || names("everything");
    let mut text = String::new();
    for section in all::<K>() {
        let is_shown = names(section.name)
            || names("everything")
            || shows_all && section.name != "modules"
            || shows_default && section.is_default;
        if !is_shown {
            continue;
        }
        if !text.is_empty() {
            text += "\r\n";
        }
        text += &format!("# {}\r\n", section.title);
        for (name, value) in (section.fields)(cx) {
            text += &format!("{name}:{value}\r\n");
        }
    }
    cx.reply().verbatim(b"txt", text);
}
