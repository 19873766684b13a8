//! A memory node whose NIC has few windows for each function, as an operator sets it, with compute nodes in other
//! processes: on its host over shared memory, and over RoCEv2.

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
        let ready: Value = serde_json::from_str(&ready).context("it serves")?;
        let address = |of: &str| -> Result<Address> {
            let text = ready[of].as_str().context("an address")?;
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

/// Takes half of the memory and fills it; in which functions it is.
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
    // 32 blocks to a function, and a window over the metadata for each of 256 clients.
    for (scheme, windows) in [("finemem", "288"), ("finemem-paper", "320")] {
        let node = Node::start(scheme, windows)?;
        let options = Options { groups: Some(2), ..Options::default() };
        let here = node.shm.connect(options.clone())?;
        let far = node.roce.connect(options)?;
        let told = here.node_status()?.node.functions;
        // 190 blocks, of which the larger ones are in other functions than chunks are.
        ensure!(told == 6, "it says that windows are in {told} functions");
        for round in 0..4 {
            let (own, theirs) = (fill(&here, round)?, fill(&far, 0x80 ^ round)?);
            let all: BTreeSet<u8> = own.1.union(&theirs.1).copied().collect();
            ensure!(all.len() == 3, "all chunks are in {all:?}");
            check_and_free(&here, own.0, round)?;
            match round {
                3 => drop(theirs),
                _ => check_and_free(&far, theirs.0, 0x80 ^ round)?,
            }
        }
        // It goes with half of the memory in its hands.
        drop(far);
        let start = Instant::now();
        while here.node_status()?.node.free < CHUNKS as u64 {
            ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", here.node_status());
            std::thread::sleep(Duration::from_millis(2));
        }
        here.audit()?;
    }
    Ok(())
}

#[test]
fn too_few_windows_in_all_are_refused_with_the_numbers() -> Result<()> {
    let arguments = ["serve", "--private", "--memory", "384KiB", "--chunk", "4KiB", "--scheme"];
    let out = Command::new(granary())
        .args(arguments)
        .args(["finemem", "--nic-windows", "257"])
        .output()?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(!out.status.success(), "one window to each function is not enough");
    let numbers = ["96 chunks need 190 memory windows", "128 functions of 257", "128 in all"];
    ensure!(numbers.iter().all(|n| said.contains(n)), "{said}");
    Ok(())
}
