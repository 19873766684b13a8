//! Metrics of a server: the declarations, and their values.

use std::sync::Arc;

use metrics::{Declared, Metric, Samples, Unit, counter, declare, gauge};

use crate::keyspace::{DATABASES, Keyspace};
use crate::server::Server;

/// The numbers of a server that the page of `--metrics` shows.
#[derive(Debug)]
struct Report {
    commands: u64,
    accepted: u64,
    refused: u64,
    connections: u64,
    received: u64,
    sent: u64,
    reads: u64,
    writes: u64,
    waves: u64,
    errors: u64,
    denied: u64,
    hits: u64,
    misses: u64,
    expired: u64,
    evicted: u64,
    keys: u64,
    used: u64,
    payload: u64,
    index: u64,
    limbo: u64,
    held: u64,
    limit: u64,
    cache: u64,
    cache_limit: u64,
    cache_hits: u64,
    cache_misses: u64,
    silent: u64,
    outages: u64,
    losses: u64,
    uptime_ms: u64,
}

declare! {
    Report {
        commands: counter("kv_commands", "Commands that were executed."),
        accepted: counter("kv_connections_accepted", "Connections that came."),
        refused: counter(
            "kv_connections_refused",
            "Connections refused because of maxclients or protected-mode."
        ),
        connections: gauge("kv_connections", "Connections that are open."),
        received: counter("kv_received", "Bytes received from clients.").in_unit(Unit::Bytes),
        sent: counter("kv_sent", "Bytes sent to clients.").in_unit(Unit::Bytes),
        reads: counter("kv_socket_reads", "Calls that read from a socket."),
        writes: counter("kv_socket_writes", "Calls that wrote to a socket."),
        waves: counter("kv_waves", "Waves of ready tasks."),
        errors: counter("kv_errors", "Error replies."),
        denied: counter("kv_denied", "Refused passwords, commands, keys and channels."),
        hits: counter("kv_hits", "Reads that found their key."),
        misses: counter("kv_misses", "Reads that did not find their key."),
        expired: counter("kv_expired", "Keys deleted because they expired."),
        evicted: counter("kv_evicted", "Keys deleted because of maxmemory or a full pool."),
        keys: gauge("kv_keys", "Keys of all databases."),
        used: gauge("kv_used", "Memory of blocks, index and limbo.").in_unit(Unit::Bytes),
        payload: gauge("kv_payload", "Memory of blocks with keys and values.").in_unit(Unit::Bytes),
        index: gauge("kv_index", "Memory of the index in the pool.").in_unit(Unit::Bytes),
        limbo: gauge("kv_limbo", "Memory of deleted blocks that a reader may still know.")
            .in_unit(Unit::Bytes),
        held: gauge("kv_held", "Memory of the chunks that the store holds.").in_unit(Unit::Bytes),
        limit: gauge("kv_limit", "maxmemory; 0 without a limit.").in_unit(Unit::Bytes),
        cache: gauge("kv_cache", "Memory of the server's process for cached values.")
            .in_unit(Unit::Bytes),
        cache_limit: gauge("kv_cache_limit", "cache; 0 without cached values.")
            .in_unit(Unit::Bytes),
        cache_hits: counter("kv_cache_hits", "Reads of values that were cached."),
        cache_misses: counter(
            "kv_cache_misses",
            "Reads of values that were not cached, values in pieces excepted."
        ),
        silent: gauge("kv_pool_silent", "1 while a memory node does not answer, 0 otherwise."),
        outages: counter("kv_pool_outages", "Times that a memory node did not answer."),
        losses: counter("kv_pool_losses", "Outages after which the data was lost."),
        uptime_ms: gauge("kv_uptime", "Time since the start of the server.")
            .in_unit(Unit::Milliseconds),
    }
}

/// The declarations of all metrics of a server.
pub fn declared() -> impl Iterator<Item = &'static Metric> {
    Report::METRICS.iter()
}

/// The values of all metrics of a server.
pub fn samples<K: Keyspace>(server: &Arc<Server>, store: &K) -> Samples {
    let (usage, outages) = (store.usage(), store.outages());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_ms = now.unwrap_or_default().as_millis() as u64;
    let report = Report {
        commands: server.sum(|own| &own.commands),
        accepted: server.sum(|own| &own.connections),
        refused: server.sum(|own| &own.refused),
        connections: server.clients.list().len() as u64,
        received: server.sum(|own| &own.received),
        sent: server.sum(|own| &own.sent),
        reads: server.sum(|own| &own.reads),
        writes: server.sum(|own| &own.writes),
        waves: server.sum(|own| &own.waves),
        errors: server.sum(|own| &own.errors),
        denied: server.sum(|own| &own.denied),
        hits: server.sum(|own| &own.hits),
        misses: server.sum(|own| &own.misses),
        expired: server.sum(|own| &own.expired),
        evicted: server.sum(|own| &own.evicted),
        keys: (0..DATABASES as u8).map(|db| store.size(db).keys).sum(),
        used: usage.used,
        payload: usage.payload,
        index: usage.index,
        limbo: usage.limbo,
        held: usage.held,
        limit: server.config.live.max_memory(),
        cache: usage.cache.bytes,
        cache_limit: usage.cache.limit,
        cache_hits: usage.cache.hits,
        cache_misses: usage.cache.misses,
        silent: outages.is_out.into(),
        outages: outages.count,
        losses: outages.losses,
        uptime_ms: now_ms.saturating_sub(server.since_ms),
    };
    let mut samples = Samples::default();
    report.sample(&mut samples);
    samples
}
