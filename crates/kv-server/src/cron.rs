//! Periodic work of a thread: idle connections, slow readers, rates.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::client::{Client, flag};
use crate::keyspace::Keyspace;
use crate::worker::Worker;

/// Intervals over which rates are computed.
const SAMPLES: usize = 16;

/// Freed bytes of requests and replies, for which the allocator gives memory back to the system.
const TRIM_BYTES: usize = 16 << 20;
/// Least time between two such calls. Memory that is used again soon stays.
const TRIM_NS: u64 = 1_000_000_000;

/// A sample: monotonic time, commands, bytes received, bytes sent.
type Sample = [u64; 4];

/// State of the periodic work.
#[derive(Debug, Default)]
pub(crate) struct Cron {
    samples: [Sample; SAMPLES],
    next: usize,
    /// When the allocator may give memory back again.
    trim_ns: u64,
}

impl Cron {
    pub fn run<'a, K: Keyspace>(
        &mut self,
        worker: &Worker,
        store: &K,
        clients: impl Iterator<Item = &'a Arc<Client>>,
    ) {
        worker.end_late();
        let server = &worker.server;
        let timeout_ms = server.config.live.timeout_s() * 1000;
        let now_ms = worker.now_ms();
        for client in clients {
            let is_exempt = client.has(flag::SUBSCRIBER | flag::MONITOR | flag::PAUSED);
            let idle_ms = now_ms.saturating_sub(client.last_ms());
            let is_idle = timeout_ms > 0 && !is_exempt && idle_ms > timeout_ms;
            let limit = server.config.live.output_limit(client.output_class());
            let is_over = client.is_over(limit, now_ms);
            if is_over {
                client.log_output();
            }
            if is_idle || is_over {
                client.kill();
            }
        }
        if worker.now_ns() >= self.trim_ns && worker.take_freed(TRIM_BYTES) {
            self.trim_ns = worker.now_ns() + TRIM_NS;
            units::allocator::trim();
        }
        if worker.index == 0 {
            server.pause.forget(now_ms);
            let evicted = server.clients.evict(server.config.live.client_memory());
            worker.stats().evicted_clients.add(evicted);
            server.peak_memory.fetch_max(store.usage().used, Ordering::Relaxed);
            self.measure(worker);
        }
    }

    /// Computes rates from the oldest sample to now.
    fn measure(&mut self, worker: &Worker) {
        let server = &worker.server;
        let now = [
            worker.now_ns(),
            server.sum(|stats| &stats.commands),
            server.sum(|stats| &stats.received),
            server.sum(|stats| &stats.sent),
        ];
        let old = std::mem::replace(&mut self.samples[self.next], now);
        self.next = (self.next + 1) % SAMPLES;
        let ns = now[0].saturating_sub(old[0]).max(1);
        let rate = |at: usize| {
            let amount = u128::from(now[at].saturating_sub(old[at]));
            (amount * 1_000_000_000 / u128::from(ns)) as u64
        };
        server.rates.commands.store(rate(1), Ordering::Relaxed);
        server.rates.received.store(rate(2), Ordering::Relaxed);
        server.rates.sent.store(rate(3), Ordering::Relaxed);
    }
}
