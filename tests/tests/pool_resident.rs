//! RAM of a memory node: released chunks give their pages back, whatever the scheme.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::MemoryNode;
use pool::{Grant, Options, Pool, SchemeKind};

/// What `granary serve` keeps of free chunks, unless `--keep-resident` says otherwise.
const KEPT: u64 = 64 << 20;
/// Chunks that are held while allocations and frees take turns.
const HELD: usize = 4;
/// What the NIC and the program take for themselves while clients come and go.
const OWN: u64 = 8 << 20;

/// RAM that a process has for itself, in bytes.
fn resident(pid: i32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("RssAnon")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}

/// A memory node, and what it had resident before any chunk was used.
struct Served {
    node: MemoryNode,
    pool: Pool,
    before: u64,
    aside: u64,
    kept: u64,
    donated: u64,
    chunk: usize,
}

impl Served {
    fn start(scheme: SchemeKind, kept: u64, arguments: &[&str]) -> Result<Self> {
        // Pages of odrp are many, so that there is less of them.
        let (chunk, donated) = match scheme {
            SchemeKind::Odrp => (4 << 10, 32 << 20),
            _ => (4 << 20, 128 << 20),
        };
        let (memory, chunk_bytes) = (donated.to_string(), chunk.to_string());
        let all = [
            &["--scheme", scheme.name(), "--memory", &memory, "--chunk", &chunk_bytes],
            &["--credits", "4"][..],
            arguments,
        ]
        .concat();
        let node = MemoryNode::start(&format!("resident-{scheme}-{kept}"), &all)?;
        let options = Options { groups: Some(1), ..Options::default() };
        let pool = Pool::connect(&node.socket, options)?;
        let before = resident(node.pid())?;
        // As many chunks as there are credits are aside: free, and not cleared yet.
        let aside = if scheme == SchemeKind::RpcMw1 { 4 * chunk as u64 } else { 0 };
        Ok(Self { node, pool, before, aside, kept, donated, chunk })
    }

    /// A chunk, which reads as zeros and is written whole.
    fn used(&self, bytes: &mut [u8]) -> Result<Grant> {
        let deadline = Instant::now() + Duration::from_secs(30);
        let grant = loop {
            match self.pool.allocate_blocking() {
                Err(pool::Error::OutOfMemory { .. }) if Instant::now() < deadline => {
                    self.pool.wait_for_memory_blocking(Duration::from_secs(1))?;
                }
                other => break other?,
            }
        };
        self.pool.read_blocking(&grant, 0, bytes)?;
        ensure!(bytes.iter().all(|byte| *byte == 0), "the next owner reads the last one's bytes");
        bytes.fill(0xa5);
        self.pool.write_blocking(&grant, 0, bytes)?;
        Ok(grant)
    }

    /// Waits until no more than `held` chunks are held: schemes may release a chunk after its free.
    fn settle(&self, held: usize) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let node = self.pool.node_status()?.node;
            if node.chunks - node.free <= held as u64 {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{} chunks are not released",
                node.chunks - node.free
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn check(&self, held: usize, when: &str) -> Result<()> {
        self.settle(held)?;
        let now = resident(self.node.pid())?;
        let most = self.before + (held * self.chunk) as u64 + self.aside + self.kept + OWN;
        ensure!(
            now <= most,
            "{when}: {held} chunks are held and {} MiB resident, {} MiB before; at most {} MiB was expected",
            now >> 20,
            self.before >> 20,
            most >> 20
        );
        Ok(())
    }
}

/// Allocates, writes and frees until each chunk was somebody's twice, by turns and all at once.
fn keeps_its_bound(scheme: SchemeKind, kept: u64, arguments: &[&str]) -> Result<()> {
    let served = Served::start(scheme, kept, arguments)?;
    let mut bytes = vec![0; served.chunk];
    let chunks = served.donated as usize / served.chunk;
    let mut held = VecDeque::new();
    for turn in 0..chunks + chunks / 4 {
        held.push_back(served.used(&mut bytes)?);
        if held.len() > HELD {
            let oldest = held.pop_front().context("some are held")?;
            served.pool.free_blocking(oldest)?;
        }
        if turn % (chunks / 4) == 0 {
            served.check(held.len(), "by turns")?;
        }
    }
    served.check(held.len(), "when the queue has gone round")?;
    while held.len() < chunks - 4 {
        held.push_back(served.used(&mut bytes)?);
    }
    ensure!(resident(served.node.pid())? > served.donated / 4 * 3, "the chunks are in use");
    while held.len() > HELD {
        served.pool.free_blocking(held.pop_back().context("some are held")?)?;
    }
    served.check(held.len(), "after all were in use")?;
    // The memory node says the same of itself.
    let said = served.node.status()?;
    let of = |key: &str| said[key].as_u64().context(key.to_owned());
    ensure!(of("kept_bytes")? == kept, "it says that it keeps {}", of("kept_bytes")?);
    ensure!(
        of("held_bytes")? == (held.len() * served.chunk) as u64,
        "it holds {}",
        of("held_bytes")?
    );
    let differs = of("resident_bytes")?.abs_diff(resident(served.node.pid())?);
    ensure!(differs < OWN, "what it says of its memory differs by {differs} bytes");
    for grant in held {
        served.pool.free_blocking(grant)?;
    }
    served.settle(0)?;
    served.pool.audit()?;
    Ok(())
}

macro_rules! schemes {
    ($($name:ident: $scheme:ident, $kept:expr, $arguments:expr;)*) => {
        $(
            #[test]
            fn $name() -> Result<()> {
                keeps_its_bound(SchemeKind::$scheme, $kept, &$arguments)
            }
        )*

        #[test]
        fn no_scheme_that_clears_is_left_out() {
            let tested = [$(SchemeKind::$scheme),*];
            let mut all = SchemeKind::ALL.iter().filter(|scheme| scheme.releases());
            assert!(all.all(|scheme| tested.contains(scheme)));
        }
    };
}

// As `granary serve` has it; where that would keep all, or an operator wants another bound, what is said.
schemes! {
    released_chunks_of_onesidedmw_give_their_memory_back: OneSidedMw, KEPT, [];
    released_chunks_of_rpc_mw_2_give_their_memory_back: RpcMw2, KEPT, [];
    released_chunks_of_rpc_mw_1_give_their_memory_back: RpcMw1, KEPT, [];
    released_chunks_of_fine_mr_give_their_memory_back: FineMr, KEPT, [];
    released_chunks_of_static_mr_give_their_memory_back: StaticMr, KEPT, [];
    released_chunks_of_finemem_give_their_memory_back: FineMem, KEPT, [];
    released_chunks_of_premmap_onesided_give_their_memory_back: PremmapOneSided, KEPT, [];
    released_chunks_of_premmap_rpc_give_their_memory_back: PremmapRpc, KEPT, [];
    released_chunks_of_ondemand_rpc_give_their_memory_back: OnDemandRpc, KEPT, [];
    released_pages_of_odrp_give_their_memory_back: Odrp, 0, ["--keep-resident", "0"];
    a_memory_node_may_keep_nothing: OneSidedMw, 0, ["--keep-resident", "0"];
    a_memory_node_may_keep_a_part: OneSidedMw, 16 << 20, ["--keep-resident", "19MiB"];
    a_memory_node_may_keep_all: OneSidedMw, 128 << 20, ["--keep-resident", "1GiB"];
}
