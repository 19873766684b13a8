//! Several memory nodes, of which one is on a host that vanishes: nothing ends its connections, no packet comes any more.
//!
//! `GRANARY_TEST_FULL=1` only: what waits for such a host takes as long as NIC and kernel try, 20 s in all.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::hosts::{Hosts, V4};
use granary_tests::node::{MemoryNode, full};
use pool::{Address, Error, NodeIndex, Options, Placed, Placement, Pools};

const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// How long one allocation may take at the moment when the other host vanishes: what its NIC tries, and what its control
/// connection takes to end, and some more.
const STALL: Duration = Duration::from_secs(30);

/// Allocates, writes, reads back and frees on whichever memory node answers; how long the longest allocation took.
fn work(pools: &Pools, rounds: u32) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    let mut done = 0;
    while done < rounds {
        let began = Instant::now();
        let placed = pools.allocate_blocking().context("allocating while one answers")?;
        longest = longest.max(began.elapsed());
        let word = done.to_le_bytes();
        let mut bytes = [0; 4];
        let there = pools.write_blocking(&placed, 0, &word);
        match there.and_then(|()| pools.read_blocking(&placed, 0, &mut bytes)) {
            Ok(()) => {
                ensure!(bytes == word, "{bytes:?} is not {word:?}");
                pools.free_blocking(placed)?;
                done += 1;
            }
            // Granted in its last moment.
            Err(e) => ensure!(placed.node == NodeIndex(0), "the one that is there: {e}"),
        }
    }
    Ok(longest)
}

fn vanishes(scheme: &'static str) -> Result<()> {
    if !full() {
        eprintln!("skipped: it takes 20 s; GRANARY_TEST_FULL=1 runs it");
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
    let (told, unplug) = std::sync::mpsc::channel();
    let (unplugged, go_on) = std::sync::mpsc::channel();
    std::thread::scope(|s| -> Result<()> {
        let hosts = &hosts;
        let client = s.spawn(move || {
            hosts.inside(1, move || {
                let options = Options { groups: Some(1), ..Options::default() };
                let pools = Pools::connect(&addresses, options, Placement::RoundRobin)?;
                let mut held: Vec<Placed> = Vec::new();
                for _ in 0..6 {
                    let placed = pools.allocate_blocking()?;
                    pools.write_blocking(&placed, 0, b"held")?;
                    held.push(placed);
                }
                ensure!(held.iter().filter(|p| p.node == NodeIndex(0)).count() == 3);
                work(&pools, 50)?;
                told.send(())?;
                go_on.recv()?;
                let began = Instant::now();
                let longest = work(&pools, 200)?;
                ensure!(longest < STALL, "an allocation took {longest:?}");
                eprintln!("{scheme}: the longest allocation took {longest:?}");
                // What is held where somebody is, is there.
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
                    ensure!(began.elapsed() < STALL, "it is not known to be gone: {pools:?}");
                    work(&pools, 20)?;
                    std::thread::sleep(Duration::from_millis(20));
                }
                eprintln!("{scheme}: known to be gone after {:?}", began.elapsed());
                ensure!(pools.alive().collect::<Vec<_>>() == [NodeIndex(1)]);
                // From here on it costs nothing.
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
fn a_memory_node_that_vanishes_does_not_stop_the_others_finemem() -> Result<()> {
    vanishes("finemem")
}

#[test]
fn a_memory_node_that_vanishes_does_not_stop_the_others_onesidedmw() -> Result<()> {
    vanishes("onesidedmw")
}
