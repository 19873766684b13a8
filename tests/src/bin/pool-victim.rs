//! A compute node that a test kills.
//!
//! `pool-victim SOCKET churn SEED`: several threads allocate, write, read and free endlessly, with
//! refused frees and refused accesses in between. `pool-victim SOCKET hold CHUNKS`: allocates that
//! many chunks, prints `holding`, and waits.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use pool::{Error, Grant, GroupId, Options, Pool};
use units::Random;

/// Number of threads, each with a QP group of its own.
const THREADS: u16 = 3;
/// Limit of the chunks that each thread holds.
const HOLD: usize = 24;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, what, number] = &words[..] else { bail!("pool-victim SOCKET churn|hold NUMBER") };
    let number: u64 = number.parse()?;
    match what.as_str() {
        "churn" => churn(socket.as_ref(), number),
        "hold" => hold(socket.as_ref(), number),
        other => bail!("unknown mode {other}: use churn or hold"),
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
                let random = Random::stream(seed, t.into());
                scope.spawn(move || work(pool, GroupId(t), keys_die_late, random))
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a thread panicked"))
    })
}

fn work(pool: &Pool, group: GroupId, keys_die_late: bool, mut random: Random) -> Result<()> {
    let mut held: Vec<Grant> = Vec::new();
    loop {
        let random = random.bits();
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

/// Accesses a freed chunk, which may have a new owner, and frees an invalid entry. Both must be
/// refused without further effects.
fn refused(pool: &Pool, freed: &Grant, keys_die_late: bool) -> Result<()> {
    let access = pool.read_blocking(freed, 0, &mut [0; 64]);
    // In schemes with a quarantine, the key of a freed chunk is revoked before the chunk is
    // allocated again. Until then an access still succeeds, and reads the last owner's data or
    // zeros.
    let quarantined = access.is_ok() && keys_die_late;
    let refused = matches!(access, Err(Error::Access { .. }));
    ensure!(refused || quarantined, "the key of a freed chunk is still valid: {access:?}");
    // An invalid entry, because the freed chunk may already belong to another thread of this
    // client.
    let beyond = Grant::new(
        freed.addr,
        freed.len,
        scheme::index::EntryId::new(0xff_fff0),
        freed.group,
        freed.keys(),
    );
    let free = pool.free_blocking(beyond);
    ensure!(matches!(free, Err(Error::NotYours { .. })), "an invalid free was accepted: {free:?}");
    Ok(())
}
