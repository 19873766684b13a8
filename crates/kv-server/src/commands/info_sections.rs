//! The sections of INFO.

use std::sync::atomic::Ordering;

use super::connection::REDIS_VERSION;
use super::info::Fields;
use super::latency::{all_ids, percentiles};
use crate::channels::To;
use crate::client::{flag, full_name};
use crate::context::Context;
use crate::keyspace::{DATABASES, Keyspace};
use crate::process;
use crate::stats::CommandSum;

/// Makes fields of names and values.
macro_rules! fields {
    ($($name:ident: $value:expr),* $(,)?) => {
        vec![$((stringify!($name).to_owned(), $value.to_string())),*]
    };
}

/// Bytes with a unit, as Redis prints them.
fn human(bytes: u64) -> String {
    let units = ["B", "K", "M", "G", "T", "P"];
    let power = (0..units.len()).rev().find(|power| bytes >> (10 * power) > 0).unwrap_or(0);
    match power {
        0 => format!("{bytes}B"),
        power => format!("{:.2}{}", bytes as f64 / (1_u64 << (10 * power)) as f64, units[power]),
    }
}

pub(super) fn server<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let server = cx.server();
    let config = &server.config;
    let uptime_s = cx.now_ms().saturating_sub(server.since_ms) / 1000;
    let port = match config.number("port") {
        0 => config.number("tls-port"),
        port => port,
    };
    let program = std::env::current_exe().map(|path| path.display().to_string());
    fields! {
        redis_version: REDIS_VERSION,
        redis_git_sha1: "00000000",
        redis_git_dirty: 0,
        redis_build_id: "0",
        redis_mode: "standalone",
        granary_version: env!("CARGO_PKG_VERSION"),
        os: format!("Linux {} {}", process::kernel_release(), std::env::consts::ARCH),
        arch_bits: usize::BITS,
        monotonic_clock: "POSIX clock_gettime",
        multiplexing_api: "epoll",
        process_id: std::process::id(),
        process_supervised: "no",
        run_id: server.run_id,
        tcp_port: port,
        server_time_usec: cx.now_ms() * 1000,
        uptime_in_seconds: uptime_s,
        uptime_in_days: uptime_s / 86_400,
        hz: 10,
        configured_hz: config.get("hz"),
        lru_clock: (cx.now_ms() / 1000) & 0xff_ffff,
        executable: program.unwrap_or_default(),
        config_file: server.config_file,
        io_threads_active: u8::from(server.threads.len() > 1),
    }
}

pub(super) fn clients<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let all = cx.server().clients.list();
    let buffers = || all.iter().map(|client| client.buffers());
    fields! {
        connected_clients: all.len(),
        cluster_connections: 0,
        maxclients: cx.server().config.get("maxclients"),
        client_recent_max_input_buffer: buffers().map(|(input, _)| input).max().unwrap_or(0),
        client_recent_max_output_buffer: buffers().map(|(_, output)| output).max().unwrap_or(0),
        blocked_clients: all.iter().filter(|client| client.has(flag::PAUSED)).count(),
        tracking_clients: 0,
        clients_in_timeout_table: 0,
    }
}

pub(super) fn memory<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let (usage, server) = (cx.store.usage(), cx.server());
    let limit = server.config.live.max_memory();
    let peak = server.peak_memory.fetch_max(usage.used, Ordering::Relaxed).max(usage.used);
    let share =
        |part: u64, whole: u64| format!("{:.2}%", part as f64 * 100.0 / whole.max(1) as f64);
    let fragmentation = usage.held as f64 / usage.used.max(1) as f64;
    let (total, process) = (process::system_memory(), process::memory());
    let clients: usize = server.clients.list().iter().map(|client| client.memory()).sum();
    fields! {
        used_memory: usage.used,
        used_memory_human: human(usage.used),
        used_memory_rss: usage.held,
        used_memory_rss_human: human(usage.held),
        used_memory_peak: peak,
        used_memory_peak_human: human(peak),
        used_memory_peak_perc: share(usage.used, peak),
        used_memory_overhead: usage.used.saturating_sub(usage.payload),
        used_memory_startup: 0,
        used_memory_dataset: usage.payload,
        used_memory_dataset_perc: share(usage.payload, usage.used),
        allocator_allocated: usage.used,
        allocator_active: usage.held,
        allocator_resident: usage.held,
        total_system_memory: total,
        total_system_memory_human: human(total),
        used_memory_lua: 0,
        used_memory_scripts: 0,
        number_of_cached_scripts: 0,
        number_of_functions: 0,
        number_of_libraries: 0,
        maxmemory: limit,
        maxmemory_human: human(limit),
        maxmemory_policy: server.config.get("maxmemory-policy"),
        allocator_frag_ratio: format!("{fragmentation:.2}"),
        allocator_frag_bytes: usage.held.saturating_sub(usage.used),
        mem_fragmentation_ratio: format!("{fragmentation:.2}"),
        mem_fragmentation_bytes: usage.held.saturating_sub(usage.used),
        mem_not_counted_for_evict: 0,
        mem_replication_backlog: 0,
        mem_clients_slaves: 0,
        mem_clients_normal: clients,
        mem_aof_buffer: 0,
        mem_allocator: "granary",
        active_defrag_running: 0,
        lazyfree_pending_objects: 0,
        lazyfreed_objects: 0,
        index_memory: usage.index,
        limbo_memory: usage.limbo,
        local_index_memory: usage.local,
        local_cache_memory: usage.cache.bytes,
        process_memory: process,
        process_memory_human: human(process),
    }
}

pub(super) fn persistence<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let mut fields = fields! {
        loading: u8::from(cx.server().is_loading()),
        async_loading: 0,
        rdb_changes_since_last_save: 0,
        rdb_bgsave_in_progress: 0,
        rdb_last_save_time: cx.server().since_ms / 1000,
        rdb_last_bgsave_status: "ok",
        rdb_last_bgsave_time_sec: -1,
        rdb_current_bgsave_time_sec: -1,
        rdb_saves: 0,
        rdb_last_cow_size: 0,
        rdb_last_load_keys_expired: 0,
        rdb_last_load_keys_loaded: 0,
        aof_enabled: 0,
        aof_rewrite_in_progress: 0,
        aof_rewrite_scheduled: 0,
        aof_last_rewrite_time_sec: -1,
        aof_current_rewrite_time_sec: -1,
        aof_last_bgrewrite_status: "ok",
        aof_last_write_status: "ok",
    };
    replace(&mut fields, cx.store.persistence());
    fields
}

fn replace(fields: &mut Fields, facts: Vec<crate::keyspace::Fact>) {
    for fact in facts {
        match fields.iter_mut().find(|(name, _)| name == fact.name) {
            Some((_, value)) => *value = fact.value,
            None => fields.push((fact.name.to_owned(), fact.value)),
        }
    }
}

pub(super) fn stats<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let server = cx.server();
    let [channels, patterns, shards] = To::ALL.map(|to| server.channels.count(to));
    let rate = |bytes: u64| format!("{:.2}", bytes as f64 / 1024.0);
    let rates = &server.rates;
    fields! {
        total_connections_received: server.sum(|own| &own.connections),
        total_commands_processed: server.sum(|own| &own.commands),
        instantaneous_ops_per_sec: rates.commands.load(Ordering::Relaxed),
        total_net_input_bytes: server.sum(|own| &own.received),
        total_net_output_bytes: server.sum(|own| &own.sent),
        total_net_repl_input_bytes: 0,
        total_net_repl_output_bytes: 0,
        instantaneous_input_kbps: rate(rates.received.load(Ordering::Relaxed)),
        instantaneous_output_kbps: rate(rates.sent.load(Ordering::Relaxed)),
        rejected_connections: server.sum(|own| &own.refused),
        sync_full: 0,
        sync_partial_ok: 0,
        sync_partial_err: 0,
        expired_keys: server.sum(|own| &own.expired),
        expired_stale_perc: "0.00",
        expired_time_cap_reached_count: 0,
        evicted_keys: server.sum(|own| &own.evicted),
        evicted_clients: server.sum(|own| &own.evicted_clients),
        keyspace_hits: server.sum(|own| &own.hits),
        keyspace_misses: server.sum(|own| &own.misses),
        pubsub_channels: channels,
        pubsub_patterns: patterns,
        pubsubshard_channels: shards,
        latest_fork_usec: 0,
        total_forks: 0,
        migrate_cached_sockets: 0,
        slave_expires_tracked_keys: 0,
        tracking_total_keys: 0,
        tracking_total_items: 0,
        tracking_total_prefixes: 0,
        unexpected_error_replies: 0,
        total_error_replies: server.sum(|own| &own.errors),
        dump_payload_sanitizations: 0,
        total_reads_processed: server.sum(|own| &own.reads),
        total_writes_processed: server.sum(|own| &own.writes),
        io_threaded_reads_processed: 0,
        io_threaded_writes_processed: 0,
        acl_access_denied: server.sum(|own| &own.denied),
        waves: server.sum(|own| &own.waves),
    }
}

pub(super) fn replication<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    fields! {
        role: "master",
        connected_slaves: 0,
        master_failover_state: "no-failover",
        master_replid: cx.server().run_id,
        master_replid2: "0".repeat(40),
        master_repl_offset: 0,
        second_repl_offset: -1,
        repl_backlog_active: 0,
        repl_backlog_size: 0,
        repl_backlog_first_byte_offset: 0,
        repl_backlog_histlen: 0,
    }
}

pub(super) fn cpu<K: Keyspace>(_: &Context<'_, K>) -> Fields {
    let (user, system) = process::cpu_times();
    fields! {
        used_cpu_sys: format!("{:.6}", system.as_secs_f64()),
        used_cpu_user: format!("{:.6}", user.as_secs_f64()),
        used_cpu_sys_children: "0.000000",
        used_cpu_user_children: "0.000000",
    }
}

/// The counters of each command that was called or refused.
fn sums<K: Keyspace>(cx: &Context<'_, K>) -> Vec<(String, CommandSum)> {
    let sum = |id| (full_name(id), CommandSum::of(cx.server().stats(), id));
    let is_used = |(_, sum): &(String, CommandSum)| sum.calls + sum.rejected > 0;
    all_ids().map(sum).filter(is_used).collect()
}

pub(super) fn commands<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let row = |(name, sum): (String, CommandSum)| {
        let us = sum.ns / 1000;
        let value = format!(
            "calls={},usec={us},usec_per_call={:.2},rejected_calls={},failed_calls={}",
            sum.calls,
            us as f64 / sum.calls.max(1) as f64,
            sum.rejected,
            sum.failed
        );
        (format!("cmdstat_{name}"), value)
    };
    sums(cx).into_iter().map(row).collect()
}

pub(super) fn errors<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let row = |(code, count): (&Vec<u8>, &u64)| {
        (format!("errorstat_{}", String::from_utf8_lossy(code)), format!("count={count}"))
    };
    cx.server().errors.lock().iter().map(row).collect()
}

pub(super) fn latencies<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let wanted = percentiles(cx);
    let row = |(name, sum): (String, CommandSum)| {
        let values: Vec<String> = wanted
            .iter()
            .map(|(text, percent)| {
                format!("p{text}={:.3}", sum.times.percentile(*percent) as f64 / 1000.0)
            })
            .collect();
        (format!("latency_percentiles_usec_{name}"), values.join(","))
    };
    sums(cx).into_iter().filter(|(_, sum)| sum.times.count() > 0).map(row).collect()
}

pub(super) fn keyspace<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    let sizes = (0..DATABASES as u8).map(|db| (db, cx.store.size(db)));
    sizes
        .filter(|(_, size)| size.keys > 0)
        .map(|(db, size)| {
            let value = format!(
                "keys={},expires={},avg_ttl={}",
                size.keys, size.volatile, size.mean_ttl_ms
            );
            (format!("db{db}"), value)
        })
        .collect()
}

pub(super) fn pool<K: Keyspace>(cx: &Context<'_, K>) -> Fields {
    cx.store.facts().into_iter().map(|fact| (fact.name.to_owned(), fact.value)).collect()
}

#[cfg(test)]
mod tests {
    use super::human;

    #[test]
    fn bytes_have_units_as_in_redis() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (941_064, "919.01K"),
            (7_221_248, "6.89M"),
            (1 << 30, "1.00G"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
