//! A compute node that is there to be killed.
//!
//! `pool-victim SOCKET churn SEED`: allocates, writes, reads and frees from several threads without
//! end, with refused frees and refused accesses in between. `pool-victim SOCKET hold CHUNKS`:
//! allocates so many, prints `holding`, and waits.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use pool::{Error, Grant, GroupId, Options, Pool};

/// Threads that churn, each with a QP group of its own.
const THREADS: u16 = 3;
/// Chunks that each holds at most.
const HOLD: usize = 24;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, what, number] = &words[..] else { bail!("pool-victim SOCKET churn|hold NUMBER") };
    let number: u64 = number.parse()?;
    match what.as_str() {
        "churn" => churn(socket.as_ref(), number),
        "hold" => hold(socket.as_ref(), number),
        other => bail!("churn or hold, not {other}"),
    }
}

fn hold(socket: &Path, chunks: u64) -> Result<()> {
    let pool = Pool::connect(socket, Options { groups: Some(1), ..Options::default() })?;
    for _ in 0..chunks {
        let grant = pool.allocate_in_blocking(GroupId(0))?;
        pool.write_blocking(&grant, 0, b"held")?;
    }
    println!("holding");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn churn(socket: &Path, seed: u64) -> Result<()> {
    let pool = Pool::connect(socket, Options { groups: Some(THREADS), ..Options::default() })?;
    let keys_die_late = pool.node_status()?.node.scheme == "finemem";
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|t| {
                let pool = &pool;
                let random = seed ^ (t as u64 + 1) << 56 | 1;
                scope.spawn(move || work(pool, GroupId(t), keys_die_late, random))
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a thread panicked"))
    })
}

fn work(pool: &Pool, group: GroupId, keys_die_late: bool, mut random: u64) -> Result<()> {
    let mut held: Vec<Grant> = Vec::new();
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if held.len() < HOLD && random & 3 != 0 {
            match pool.allocate_in_blocking(group) {
                Ok(grant) => {
                    let mut seen = [1; 64];
                    pool.read_blocking(&grant, 0, &mut seen).context("the first read")?;
                    ensure!(seen == [0; 64], "chunk {} shows old contents", grant.entry);
                    pool.write_blocking(&grant, 0, &[0xdd; 4096]).context("writing")?;
                    held.push(grant);
                }
                Err(Error::OutOfMemory { .. }) => {}
                Err(e) => return Err(e).context("allocating"),
            }
            continue;
        }
        if held.is_empty() {
            continue;
        }
        let grant = held.swap_remove(random as usize % held.len());
        pool.free_blocking(grant).context("freeing")?;
        if random >> 32 & 7 == 0 {
            refused(pool, &grant, keys_die_late)?;
        }
    }
}

/// What is refused, and stays without consequence: the chunk was freed, and may be another's now.
fn refused(pool: &Pool, freed: &Grant, keys_die_late: bool) -> Result<()> {
    let access = pool.read_blocking(freed, 0, &mut [0; 64]);
    // Where a freed chunk is set aside first, its key dies some time before it is given out again: until then it
    // shows what its last owner has left there, or nothing.
    let aside = access.is_ok() && keys_die_late;
    let refused = matches!(access, Err(Error::Access { .. }));
    ensure!(refused || aside, "a dead key opened something: {access:?}");
    // It may have been granted to another thread of this client: then the free would be right.
    let beyond = Grant::new(freed.addr, freed.len, 0xff_fff0, freed.group, freed.keys());
    let free = pool.free_blocking(beyond);
    ensure!(matches!(free, Err(Error::NotYours { .. })), "freed what it does not own: {free:?}");
    Ok(())
}
