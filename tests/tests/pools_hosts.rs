//! Several memory nodes, one of them on a host that vanishes: its connections stay open, but no
//! packet arrives any more.
//!
//! Runs with `GRANARY_TEST_FULL=1` only, because the timeouts of NIC and kernel take 20 s in total.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::hosts::{Hosts, V4};
use granary_tests::node::{MemoryNode, full};
use pool::{Address, Error, MultiPool, NodeIndex, Options, PlacedGrant, Placement};

const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// Limit of an allocation's latency when the other host vanishes: the timeouts of the NIC and of
/// the control connection, and a reserve.
const STALL: Duration = Duration::from_secs(30);

/// Allocates, writes, reads back and frees on any memory node that answers; returns the longest
/// latency of an allocation.
fn work(pools: &MultiPool, rounds: u32) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    let mut done = 0;
    while done < rounds {
        let began = Instant::now();
        let placed = pools.allocate_blocking().context("allocating while one node answers")?;
        longest = longest.max(began.elapsed());
        let word = done.to_le_bytes();
        let mut bytes = [0; 4];
        let written = pools.write_blocking(&placed, 0, &word);
        match written.and_then(|()| pools.read_blocking(&placed, 0, &mut bytes)) {
            Ok(()) => {
                ensure!(bytes == word, "{bytes:?} is not {word:?}");
                pools.free_blocking(placed)?;
                done += 1;
            }
            // The vanished node may have granted the chunk just before.
            Err(e) => ensure!(placed.node == NodeIndex(0), "the remaining node failed: {e}"),
        }
    }
    Ok(longest)
}

fn vanishes(scheme: &'static str) -> Result<()> {
    if !full() {
        eprintln!("skipped: the test takes 20 s; GRANARY_TEST_FULL=1 runs it");
        return Ok(());
    }
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    let arguments = [&SMALL[..], &["--scheme", scheme]].concat();
    let far = MemoryNode::start_on(&hosts, &format!("pools-far-{scheme}"), V4[0], &arguments)?;
    let near = MemoryNode::start(&format!("pools-near-{scheme}"), &arguments)?;
    let addresses: Vec<Address> = vec![
        far.pool_at(V4[0]).parse().map_err(anyhow::Error::msg)?,
        Address::Shm(near.socket.clone()),
    ];
    let (request_unplug, unplug) = std::sync::mpsc::channel();
    let (unplugged, go_on) = std::sync::mpsc::channel();
    std::thread::scope(|s| -> Result<()> {
        let hosts = &hosts;
        let client = s.spawn(move || {
            hosts.inside(1, move || {
                let options = Options { groups: Some(1), ..Options::default() };
                let pools = MultiPool::connect(&addresses, options, Placement::RoundRobin)?;
                let mut held: Vec<PlacedGrant> = Vec::new();
                for _ in 0..6 {
                    let placed = pools.allocate_blocking()?;
                    pools.write_blocking(&placed, 0, b"held")?;
                    held.push(placed);
                }
                ensure!(held.iter().filter(|p| p.node == NodeIndex(0)).count() == 3);
                work(&pools, 50)?;
                request_unplug.send(())?;
                go_on.recv()?;
                let began = Instant::now();
                let longest = work(&pools, 200)?;
                ensure!(longest < STALL, "an allocation took {longest:?}");
                eprintln!("{scheme}: the longest allocation took {longest:?}");
                // Chunks on the remaining node are intact; accesses to the other node fail.
                for placed in &held {
                    let mut bytes = [0; 4];
                    let got = pools.read_blocking(placed, 0, &mut bytes);
                    match placed.node {
                        NodeIndex(1) => ensure!(got.is_ok() && &bytes == b"held", "{got:?}"),
                        _ => ensure!(
                            matches!(got, Err(Error::Gone { .. } | Error::Access { .. })),
                            "{got:?}"
                        ),
                    }
                }
                while pools.alive().count() > 1 {
                    ensure!(began.elapsed() < STALL, "the loss is not detected: {pools:?}");
                    work(&pools, 20)?;
                    std::thread::sleep(Duration::from_millis(20));
                }
                eprintln!("{scheme}: loss detected after {:?}", began.elapsed());
                ensure!(pools.alive().collect::<Vec<_>>() == [NodeIndex(1)]);
                // From now on the lost node causes no delay.
                let longest = work(&pools, 50)?;
                ensure!(longest < Duration::from_secs(1), "an allocation took {longest:?}");
                Ok(())
            })
        });
        if unplug.recv_timeout(Duration::from_secs(60)).is_ok() {
            hosts.unplug(0)?;
            unplugged.send(())?;
        }
        client.join().expect("the client does not panic")
    })
}

#[test]
fn vanished_node_does_not_stop_the_others_finemem() -> Result<()> {
    vanishes("finemem")
}

#[test]
fn vanished_node_does_not_stop_the_others_onesidedmw() -> Result<()> {
    vanishes("onesidedmw")
}
