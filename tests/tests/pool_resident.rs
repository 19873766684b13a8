//! Resident memory of a memory node: in every scheme, pages of released chunks return to the
//! kernel.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::MemoryNode;
use pool::{Grant, Options, Pool, Scheme, schemes};

/// Memory of free chunks that `granary serve` keeps resident by default (`--keep-resident`).
const KEPT: u64 = 64 << 20;
/// Chunks that are held while allocations and frees alternate.
const HELD: usize = 4;
/// Allowance for memory of the NIC and of the process itself.
const OWN: u64 = 8 << 20;

/// Anonymous resident memory of a process in bytes.
fn resident(pid: i32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("RssAnon")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}

/// A memory node with a client.
struct Served {
    node: MemoryNode,
    pool: Pool,
    /// Resident memory before any chunk was used.
    before: u64,
    /// Freed chunks that are not cleared yet.
    deferred: u64,
    kept: u64,
    donated: u64,
    chunk: usize,
}

impl Served {
    fn start(scheme: Scheme, kept: u64, arguments: &[&str]) -> Result<Self> {
        // Less memory for pages, because they are small and the test would take long.
        let (chunk, donated) = match scheme {
            schemes::ODRP | schemes::TDMEM => (4 << 10, 32 << 20),
            _ => (4 << 20, 128 << 20),
        };
        let (memory, chunk_bytes) = (donated.to_string(), chunk.to_string());
        let arguments = [
            &["--scheme", scheme.name, "--memory", &memory, "--chunk", &chunk_bytes],
            &["--credits", "4"][..],
            arguments,
        ]
        .concat();
        let node = MemoryNode::start(&format!("resident-{scheme}-{kept}"), &arguments)?;
        let options = Options { groups: Some(1), ..Options::default() };
        let pool = Pool::connect(&node.socket, options)?;
        let before = resident(node.pid())?;
        // In rpc-mw-1 as many freed chunks as there are credits are not cleared yet.
        let deferred = if scheme == schemes::RPC_MW_1 { 4 * chunk as u64 } else { 0 };
        Ok(Self { node, pool, before, deferred, kept, donated, chunk })
    }

    /// Allocates a chunk, checks that it reads as zeros, and writes all of it.
    fn allocate_and_write(&self, bytes: &mut [u8]) -> Result<Grant> {
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
        ensure!(bytes.iter().all(|byte| *byte == 0), "a new chunk has the last owner's data");
        bytes.fill(0xa5);
        self.pool.write_blocking(&grant, 0, bytes)?;
        Ok(grant)
    }

    /// Waits until at most `held` chunks are held, because schemes may release a chunk some time
    /// after its free.
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
        let limit = self.before + (held * self.chunk) as u64 + self.deferred + self.kept + OWN;
        ensure!(
            now <= limit,
            "{when}: {held} chunks are held and {} MiB resident, {} MiB before; limit {} MiB",
            now >> 20,
            self.before >> 20,
            limit >> 20
        );
        Ok(())
    }
}

/// Allocates, writes and frees until each chunk was used twice: first with few chunks held at a
/// time, then with all chunks held at once. Checks the resident memory in between.
fn keeps_its_bound(scheme: Scheme, kept: u64, arguments: &[&str]) -> Result<()> {
    let served = Served::start(scheme, kept, arguments)?;
    let mut bytes = vec![0; served.chunk];
    let chunks = served.donated as usize / served.chunk;
    let mut held = VecDeque::new();
    for round in 0..chunks + chunks / 4 {
        held.push_back(served.allocate_and_write(&mut bytes)?);
        if held.len() > HELD {
            let oldest = held.pop_front().context("some are held")?;
            served.pool.free_blocking(oldest)?;
        }
        if round % (chunks / 4) == 0 {
            served.check(held.len(), "with few chunks held")?;
        }
    }
    served.check(held.len(), "after every chunk was used")?;
    while held.len() < chunks - 4 {
        held.push_back(served.allocate_and_write(&mut bytes)?);
    }
    ensure!(resident(served.node.pid())? > served.donated / 4 * 3, "the chunks are in use");
    while held.len() > HELD {
        served.pool.free_blocking(held.pop_back().context("some are held")?)?;
    }
    served.check(held.len(), "after all chunks were in use")?;
    // The status of the memory node has the same numbers.
    let status = served.node.status()?;
    let number = |key: &str| status[key].as_u64().context(key.to_owned());
    ensure!(number("kept_bytes")? == kept, "kept_bytes is {}", number("kept_bytes")?);
    ensure!(
        number("held_bytes")? == (held.len() * served.chunk) as u64,
        "held_bytes is {}",
        number("held_bytes")?
    );
    let differs = number("resident_bytes")?.abs_diff(resident(served.node.pid())?);
    ensure!(differs < OWN, "resident_bytes is off by {differs} bytes");
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
                keeps_its_bound(schemes::$scheme, $kept, &$arguments)
            }
        )*

        #[test]
        fn all_releasing_schemes_are_tested() {
            let tested = [$(schemes::$scheme),*];
            let mut releasing = schemes::ALL.iter().filter(|scheme| scheme.clears());
            assert!(releasing.all(|scheme| tested.contains(scheme)));
        }
    };
}

// With the default of `granary serve`, and with other values of `--keep-resident`. Schemes
// with access by pages use 0, because the default would keep all of their memory.
schemes! {
    released_chunks_of_onesidedmw_give_their_memory_back: ONESIDEDMW, KEPT, [];
    released_chunks_of_rpc_mw_2_give_their_memory_back: RPC_MW_2, KEPT, [];
    released_chunks_of_rpc_mw_1_give_their_memory_back: RPC_MW_1, KEPT, [];
    released_chunks_of_fine_mr_give_their_memory_back: FINE_MR, KEPT, [];
    released_chunks_of_static_mr_give_their_memory_back: STATIC_MR, KEPT, [];
    released_chunks_of_finemem_give_their_memory_back: FINEMEM, KEPT, [];
    released_chunks_of_premmap_onesided_give_their_memory_back: PREMMAP_ONESIDED, KEPT, [];
    released_chunks_of_premmap_rpc_give_their_memory_back: PREMMAP_RPC, KEPT, [];
    released_chunks_of_ondemand_rpc_give_their_memory_back: ONDEMAND_RPC, KEPT, [];
    released_chunks_of_shared_region_give_their_memory_back: SHARED_REGION, KEPT, [];
    released_chunks_of_patronus_give_their_memory_back: PATRONUS, KEPT, [];
    released_chunks_of_patronus_2_give_their_memory_back: PATRONUS_2, KEPT, [];
    released_chunks_of_patronus_mr_give_their_memory_back: PATRONUS_MR, KEPT, [];
    released_chunks_of_rpc_data_give_their_memory_back: RPC_DATA, KEPT, [];
    released_pages_of_odrp_give_their_memory_back: ODRP, 0, ["--keep-resident", "0"];
    released_pages_of_tdmem_give_their_memory_back: TDMEM, 0, ["--keep-resident", "0"];
    a_memory_node_may_keep_nothing: ONESIDEDMW, 0, ["--keep-resident", "0"];
    a_memory_node_may_keep_a_part: ONESIDEDMW, 16 << 20, ["--keep-resident", "19MiB"];
    a_memory_node_may_keep_all: ONESIDEDMW, 128 << 20, ["--keep-resident", "1GiB"];
}
