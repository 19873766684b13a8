//! How fast scheme `finemem` takes back what a compute node had that has gone (FineMem §6.2): in this process, on the
//! inline NIC, whose time is the memory node's CPU time here.

use std::time::{Duration, Instant};

use fabric::soft::SoftNic;
use pool::finemem::{Node, ReleaseTimes};
use pool::scheme::{ClientScheme, NodeScheme};
use pool::{Error, GroupId, SchemeKind, Settings};

use crate::local::{self, Connection};

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Recovery {
    /// Blocks that the compute node had.
    pub entries: u64,
    /// From the end of its connection until it is forgotten: all is free and clear, under new keys.
    pub total: Duration,
    /// The longest that anybody else could have waited for the memory node's CPU.
    pub longest_turn: Duration,
    /// Where the time went.
    pub times: ReleaseTimes,
}

impl Recovery {
    /// Entries a second, all included.
    pub fn rate(&self) -> f64 {
        self.entries as f64 / self.total.as_secs_f64()
    }

    /// Entries a second without the writing of zeros, which FineMem does not do: logs found, windows rebound,
    /// headers freed.
    pub fn rate_without_clearing(&self) -> f64 {
        self.entries as f64 / (self.total - self.times.clearing).as_secs_f64()
    }
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each = |time: Duration| time.as_nanos() as f64 / self.entries as f64;
        let e = &self.times;
        write!(
            f,
            "{} entries in {:?}: {:.0} a second, {:.0} without clearing; of each entry's time finding {:.0} ns, \
             rebinding {:.0} ns, clearing {:.0} ns, freeing {:.0} ns; longest turn {:?}",
            self.entries,
            self.total,
            self.rate(),
            self.rate_without_clearing(),
            each(e.finding),
            each(e.rebinding),
            each(e.clearing),
            each(e.freeing),
            self.longest_turn,
        )
    }
}

/// A compute node takes all `chunks` one by one, and goes without a word.
///
/// # Errors
/// What the pool says.
pub fn recovery(chunks: u64, chunk_bytes: u64) -> Result<Recovery, Error> {
    let settings = Settings {
        donate_bytes: chunks * chunk_bytes,
        chunk_bytes,
        scheme: SchemeKind::FineMem,
        ..Settings::default()
    };
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings)?;
    let Connection { client, id, .. } = &local::connect(&nic, &mut node, &settings, 1)?;
    for _ in 0..chunks {
        fabric::executor::block_on(client.allocate(GroupId(0)))?;
    }
    // As its pages were written.
    let memory = node.books().memory();
    let page = [1; 4096];
    let bytes = (chunks * chunk_bytes) as usize;
    for at in (0..bytes).step_by(page.len()) {
        memory.write(at, &page[..page.len().min(bytes - at)]);
    }
    let before = node.release_times();
    let (started, mut longest_turn) = (Instant::now(), Duration::ZERO);
    node.retire(*id)?;
    while !node.is_retired(*id) {
        let turn = Instant::now();
        node.turn()?;
        longest_turn = longest_turn.max(turn.elapsed());
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
    Ok(Recovery { entries: chunks, total, longest_turn, times })
}

/// What it takes the memory node's CPU to look for what was freed in a pool of so many chunks of 4 KiB where nothing was,
/// in nanoseconds for each entry of the capability table: FineMem's scan (§6.2). A compute node has all of them, one by
/// one, if they are `taken`, or nobody has any.
///
/// # Errors
/// What the pool says.
pub fn look_ns(scheme: SchemeKind, chunks: u64, scans: u64, taken: bool) -> Result<f64, Error> {
    const CHUNK: u64 = 4096;
    let donate_bytes = chunks * CHUNK;
    let settings = Settings { donate_bytes, chunk_bytes: CHUNK, scheme, ..Settings::default() };
    let nic = SoftNic::inline();
    let mut node = Node::new(&nic, &settings)?;
    let Connection { client, .. } = &local::connect(&nic, &mut node, &settings, 1)?;
    for _ in 0..if taken { chunks } else { 0 } {
        fabric::executor::block_on(client.allocate(GroupId(0)))?;
    }
    let before = node.release_times();
    let of = |node: &Node<SoftNic>| {
        let now = node.release_times();
        (now.entries - before.entries, now.looking - before.looking)
    };
    // Scans are up to 100 ms apart, and those of a few seconds are enough.
    while of(&node).0 < scans * chunks {
        node.turn()?;
    }
    let (entries, looking) = of(&node);
    Ok(looking.as_nanos() as f64 / entries as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_comes_back() {
        let r = recovery(3000, 4096).unwrap();
        println!("{r}");
        assert_eq!(r.entries, 3000);
        assert!(r.times.clearing <= r.total && r.longest_turn <= r.total);
    }
}
