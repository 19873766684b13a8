//! A memory node with a low limit of windows per NIC function (`--nic-windows`), with clients over
//! shared memory and over RoCEv2.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::granary;
use pool::{Address, Grant, Options, Pool};
use serde_json::Value;

const CHUNKS: usize = 96;

/// A running `granary serve`.
struct Node {
    child: Child,
    shm: Address,
    roce: Address,
}

impl Node {
    fn start(scheme: &str, windows: &str) -> Result<Self> {
        let mut child = Command::new(granary())
            .args(["serve", "--json", "--private", "--memory", "384KiB"])
            .args(["--listen", "127.0.0.1:0", "--open-to-all"])
            .args(["--chunk", "4KiB", "--scheme", scheme, "--nic-windows", windows])
            .stdout(Stdio::piped())
            .spawn()
            .context("starting granary serve")?;
        let mut ready = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready)?;
        let ready: Value =
            serde_json::from_str(&ready).context("parsing granary serve's output")?;
        let address = |key: &str| -> Result<Address> {
            let text = ready[key].as_str().context("an address")?;
            text.parse().map_err(anyhow::Error::msg)
        };
        Ok(Self { shm: address("pool")?, roce: address("remote")?, child })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Allocates half of the memory and fills it; also returns the functions that hold the windows.
fn fill(pool: &Pool, mark: u8) -> Result<(Vec<Grant>, BTreeSet<u8>)> {
    let mut held = Vec::new();
    for i in 0..CHUNKS as u8 / 2 {
        let grant = pool.allocate_blocking()?;
        pool.write_blocking(&grant, 0, &[mark ^ i; 4096])?;
        held.push(grant);
    }
    let functions = held.iter().map(|grant| grant.function).collect();
    Ok((held, functions))
}

fn check_and_free(pool: &Pool, held: Vec<Grant>, mark: u8) -> Result<()> {
    for (i, grant) in held.into_iter().enumerate() {
        let mut back = [0; 4096];
        pool.read_blocking(&grant, 0, &mut back)?;
        ensure!(back == [mark ^ i as u8; 4096], "chunk {} was changed", grant.entry);
        pool.free_blocking(grant)?;
    }
    Ok(())
}

#[test]
fn clients_use_all_functions_and_leave_nothing_behind() -> Result<()> {
    // Per function: windows of 32 blocks, and a window over the metadata for each of 256 clients.
    for (scheme, windows) in [("finemem", "288"), ("finemem-paper", "320")] {
        let node = Node::start(scheme, windows)?;
        let options = Options { groups: Some(2), ..Options::default() };
        let shm = node.shm.connect(options.clone())?;
        let roce = node.roce.connect(options)?;
        let count = shm.node_status()?.node.functions;
        // 190 blocks; windows of chunks and of larger blocks are in different functions.
        ensure!(count == 6, "the status has windows in {count} functions");
        for round in 0..4 {
            let (held, held_roce) = (fill(&shm, round)?, fill(&roce, 0x80 ^ round)?);
            let functions: BTreeSet<u8> = held.1.union(&held_roce.1).copied().collect();
            ensure!(functions.len() == 3, "the chunks are in functions {functions:?}");
            check_and_free(&shm, held.0, round)?;
            match round {
                3 => drop(held_roce),
                _ => check_and_free(&roce, held_roce.0, 0x80 ^ round)?,
            }
        }
        // The client disconnects while it holds half of the memory.
        drop(roce);
        let start = Instant::now();
        while shm.node_status()?.node.free < CHUNKS as u64 {
            ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", shm.node_status());
            std::thread::sleep(Duration::from_millis(2));
        }
        shm.audit()?;
    }
    Ok(())
}

#[test]
fn too_few_windows_are_refused_with_numbers() -> Result<()> {
    let arguments = ["serve", "--private", "--memory", "384KiB", "--chunk", "4KiB", "--scheme"];
    let out = Command::new(granary())
        .args(arguments)
        .args(["finemem", "--nic-windows", "257"])
        .output()?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(!out.status.success(), "one window per function must not be enough");
    let numbers = ["96 chunks need 190 memory windows", "128 functions of 257", "128 in total"];
    ensure!(numbers.iter().all(|n| error.contains(n)), "{error}");
    Ok(())
}
