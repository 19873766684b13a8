//! Speed at which scheme `finemem` reclaims the memory of a departed client (FineMem §6.2).
//!
//! Runs in this process on the inline NIC, so the NIC's time counts as the memory node's CPU time.

use std::time::{Duration, Instant};

use pool::{Error, GroupId, Scheme, Settings, schemes};
use rnic::nic::SoftNic;
use scheme::{ClientScheme, NodeScheme};
use schemes::finemem::{Node, ReleaseTimes};

use crate::inline_client::{self, Connection};

/// Results of one recovery.
#[derive(Clone, Copy, Debug)]
pub struct Recovery {
    /// Blocks that the client held.
    pub entries: u64,
    /// Time from the end of the client's connection until all of its blocks are free, cleared and
    /// have new keys.
    pub total: Duration,
    /// The longest single call of the node's poll function: the longest time for which the memory
    /// node's CPU is unavailable to other clients.
    pub longest_poll: Duration,
    /// Time by step.
    pub times: ReleaseTimes,
}

impl Recovery {
    /// Entries per second.
    pub fn rate(&self) -> f64 {
        self.entries as f64 / self.total.as_secs_f64()
    }

    /// Entries per second without the time for clearing, which FineMem does not do. The rest is
    /// finding logs, rebinding windows and freeing headers.
    pub fn rate_without_clearing(&self) -> f64 {
        self.entries as f64 / (self.total - self.times.clearing).as_secs_f64()
    }
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each = |time: Duration| time.as_nanos() as f64 / self.entries as f64;
        let times = &self.times;
        write!(
            f,
            "{} entries in {:?}: {:.0} per second, {:.0} per second without clearing; per entry: \
             finding {:.0} ns, rebinding {:.0} ns, clearing {:.0} ns, freeing {:.0} ns; longest \
             poll {:?}",
            self.entries,
            self.total,
            self.rate(),
            self.rate_without_clearing(),
            each(times.finding),
            each(times.rebinding),
            each(times.clearing),
            each(times.freeing),
            self.longest_poll,
        )
    }
}

/// A client allocates all `chunks`, one at a time, and disconnects without freeing them. Measures
/// their recovery.
///
/// # Errors
/// Errors of the pool.
pub fn recovery(chunks: u64, chunk_bytes: u64) -> Result<Recovery, Error> {
    let settings = Settings {
        donate_bytes: chunks * chunk_bytes,
        chunk_bytes,
        scheme: schemes::FINEMEM,
        ..Settings::default()
    }
    .node()?;
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings)?;
    let Connection { client, id, .. } = &inline_client::connect(&nic, &mut node, &settings, 1)?;
    for _ in 0..chunks {
        verbs::executor::block_on(client.allocate(GroupId(0)))?;
    }
    // Writes all pages, as a client would have; clearing untouched pages would be cheaper.
    let memory = node.allocation_view().memory();
    let page = [1; 4096];
    let bytes = (chunks * chunk_bytes) as usize;
    for at in (0..bytes).step_by(page.len()) {
        memory.write(at, &page[..page.len().min(bytes - at)]);
    }
    let before = node.release_times();
    let (started, mut longest_poll) = (Instant::now(), Duration::ZERO);
    node.retire(*id)?;
    while !node.is_retired(*id) {
        let start = Instant::now();
        node.poll()?;
        longest_poll = longest_poll.max(start.elapsed());
    }
    let total = started.elapsed();
    node.audit()?;
    let now = node.release_times();
    let times = ReleaseTimes {
        finding: now.finding - before.finding,
        rebinding: now.rebinding - before.rebinding,
        clearing: now.clearing - before.clearing,
        freeing: now.freeing - before.freeing,
        looking: now.looking - before.looking,
        entries: now.entries - before.entries,
    };
    Ok(Recovery { entries: chunks, total, longest_poll, times })
}

/// Cost of a scan of the capability table that finds no freed chunk (FineMem §6.2), in nanoseconds
/// per entry of the table.
///
/// The pool has `chunks` chunks of 4 KiB. If `taken`, a client has allocated all of them, one at a
/// time; otherwise all are free.
///
/// # Errors
/// Errors of the pool.
pub fn scan_ns_per_entry(
    scheme: Scheme,
    chunks: u64,
    scans: u64,
    taken: bool,
) -> Result<f64, Error> {
    const CHUNK: u64 = 4096;
    let donate_bytes = chunks * CHUNK;
    let settings =
        Settings { donate_bytes, chunk_bytes: CHUNK, scheme, ..Settings::default() }.node()?;
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings)?;
    let Connection { client, .. } = &inline_client::connect(&nic, &mut node, &settings, 1)?;
    for _ in 0..if taken { chunks } else { 0 } {
        verbs::executor::block_on(client.allocate(GroupId(0)))?;
    }
    let before = node.release_times();
    let scanned = |node: &Node<SoftNic>| {
        let now = node.release_times();
        (now.entries - before.entries, now.looking - before.looking)
    };
    // Scans are up to 100 ms apart, so 40 scans take a few seconds.
    while scanned(&node).0 < scans * chunks {
        node.poll()?;
    }
    let (entries, time) = scanned(&node);
    Ok(time.as_nanos() as f64 / entries as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_frees_all_blocks_of_a_departed_client() {
        let r = recovery(3000, 4096).unwrap();
        println!("{r}");
        assert_eq!(r.entries, 3000);
        assert!(r.times.clearing <= r.total && r.longest_poll <= r.total);
    }
}
