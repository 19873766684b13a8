//! The memory node dies and is started again at the same path. Its clients detect the loss and
//! reconnect. Their old grants are refused, even if keys and addresses are valid again by chance.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use granary_tests::node::{MemoryNode, granary};
use granary_tests::signals::signal;
use pool::{Error, Grant, GroupId, Lane, Options, Pool, Transfer};
use rustix::process::Signal;
use verbs::executor::block_on;

const SETTINGS: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];

/// Time limit of a client to detect the loss of its memory node.
const NOTICED: Duration = Duration::from_secs(2);

fn connect(node: &MemoryNode) -> Result<Pool> {
    Ok(Pool::connect(&node.socket, Options { groups: Some(2), ..Options::default() })?)
}

fn is_stale(result: Result<(), Error>) {
    assert!(matches!(result, Err(Error::Stale { .. })), "{result:?}");
    let text = result.unwrap_err().to_string();
    assert!(text.contains("another connection") && text.contains("allocate a new one"), "{text}");
}

/// All operations on a grant.
fn uses(pool: &Pool, grant: &Grant) -> Vec<Result<(), Error>> {
    let buffer = pool.buffer(4096).expect("a buffer");
    let transfer = Transfer { grant, offset: 0, buffer_offset: 0, len: 64 };
    vec![
        pool.read_blocking(grant, 0, &mut [0; 8]),
        pool.read_blocking(grant, 0, &mut [0; 4096]),
        pool.write_blocking(grant, 0, b"stale"),
        pool.write_blocking(grant, 0, &[7; 4096]),
        pool.compare_and_swap_blocking(grant, 0, 0, 1).map(drop),
        pool.fetch_and_add_blocking(grant, 0, 1).map(drop),
        pool.read_into(&transfer, &buffer, Lane(0)).and_then(|o| o.wait()),
        pool.write_from(&transfer, &buffer, Lane(1)).and_then(|o| o.wait()),
        pool.read_batch_blocking(&[transfer; 3], &buffer, Lane(1)),
        pool.write_batch_blocking(&[transfer; 3], &buffer, Lane(1)),
        pool.free_blocking(*grant),
    ]
}

#[test]
fn grants_from_before_a_restart_are_refused() -> Result<()> {
    let mut node = MemoryNode::start("restart", &SETTINGS)?;
    for round in 0..3 {
        let pool = connect(&node)?;
        let before = pool.welcome().incarnation;
        let held: Vec<Grant> =
            (0..16).map(|i| pool.allocate_in_blocking(GroupId(i % 2))).collect::<Result<_, _>>()?;
        for grant in &held {
            pool.write_blocking(grant, 0, b"of before")?;
        }
        let buffer = pool.buffer(4096)?;
        node.kill()?;

        // Every operation fails with `Gone`, without a long delay.
        let start = Instant::now();
        for result in uses_of_gone(&pool, &held[0]) {
            assert!(matches!(result, Err(Error::Gone { .. })), "round {round}: {result:?}");
            let text = result.unwrap_err().to_string();
            assert!(text.contains("the memory node is gone"), "{text}");
        }
        assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
        let refused = pool.reconnect();
        assert!(refused.is_err(), "reconnected before the restart");

        node.restart(&SETTINGS)?;
        let again = pool.reconnect()?;
        assert_ne!(again.welcome().incarnation, before);
        // In the first round the same requests in the same order give the same entries and keys,
        // including the tags.
        let new_grants: Vec<Grant> = (0..16)
            .map(|i| again.allocate_in_blocking(GroupId(i % 2)))
            .collect::<Result<_, _>>()?;
        let same = |(a, b): (&Grant, &Grant)| a.keys() == b.keys() && a.entry == b.entry;
        let all_same = held.iter().zip(&new_grants).all(same);
        assert!(round > 0 || all_same, "different keys make the test pointless");
        for grant in &held {
            uses(&again, grant).into_iter().for_each(is_stale);
        }
        // A buffer of the old connection is stale, too.
        let transfer = Transfer { grant: &new_grants[0], offset: 0, buffer_offset: 0, len: 64 };
        is_stale(again.read_into(&transfer, &buffer, Lane(0)).map(drop));
        // The old connection stays unusable.
        let gone = pool.allocate_blocking();
        assert!(matches!(gone, Err(Error::Gone { .. })), "{gone:?}");
        for grant in new_grants {
            let mut zeros = [1; 4096];
            again.read_blocking(&grant, 0, &mut zeros)?;
            assert!(zeros == [0; 4096], "a new chunk has data of an old or stale grant");
            again.free_blocking(grant)?;
        }
        again.audit()?;
        assert_eq!(again.node_status()?.node.free, 64);
    }
    Ok(())
}

fn uses_of_gone(pool: &Pool, grant: &Grant) -> Vec<Result<(), Error>> {
    vec![
        pool.read_blocking(grant, 0, &mut [0; 8]),
        pool.write_blocking(grant, 0, &[7; 4096]),
        pool.fetch_and_add_blocking(grant, 0, 1).map(drop),
        pool.allocate_blocking().map(drop),
        pool.free_blocking(*grant),
        pool.audit(),
    ]
}

/// A client that reconnects to a running memory node is a new client to the node. Its old chunks
/// are reclaimed, and its old grants are stale.
#[test]
fn grants_from_before_a_reconnection_are_refused() -> Result<()> {
    let node = MemoryNode::start("reconnect", &SETTINGS)?;
    let pool = connect(&node)?;
    let held: Vec<Grant> =
        (0..8).map(|_| pool.allocate_in_blocking(GroupId(0))).collect::<Result<_, _>>()?;
    pool.write_blocking(&held[0], 0, b"secret")?;
    let again = pool.reconnect()?;
    assert_eq!(again.welcome().incarnation, pool.welcome().incarnation);
    uses(&again, &held[0]).into_iter().for_each(is_stale);
    let mut text = [0; 6];
    pool.read_blocking(&held[0], 0, &mut text)?;
    assert_eq!(&text, b"secret", "the first connection still works");
    drop(pool);
    // Dropping the connection waits until all of its chunks are free.
    assert_eq!(again.node_status()?.node.free, 64);
    let new_grants: Vec<Grant> =
        (0..64).map(|_| again.allocate_in_blocking(GroupId(0))).collect::<Result<_, _>>()?;
    for grant in &new_grants {
        again.read_blocking(grant, 0, &mut text)?;
        assert_eq!(text, [0; 6]);
    }
    uses(&again, &held[0]).into_iter().for_each(is_stale);
    Ok(())
}

/// The memory node is stopped. Each call ends with an error that names the node and the next step.
/// The node goes on, and nothing is lost.
#[test]
fn waits_for_a_stopped_memory_node_end() -> Result<()> {
    let node = MemoryNode::start("stopped", &SETTINGS)?;
    let limit = Duration::from_secs(1);
    let options = Options { groups: Some(2), answer_timeout: limit, ..Options::default() };
    let pool = Pool::connect(&node.socket, options)?;
    let grants: Vec<Grant> =
        (0..2).map(|i| pool.allocate_in_blocking(GroupId(i))).collect::<Result<_, _>>()?;
    for grant in &grants {
        pool.write_blocking(grant, 0, b"of before")?;
    }
    signal(node.pid(), Signal::STOP)?;
    let results = std::thread::scope(|scope| {
        let waits: Vec<_> = (0..6)
            .map(|call| {
                let (pool, grant) = (&pool, &grants[call % 2]);
                scope.spawn(move || (call, stopped_call(pool, grant, call)))
            })
            .collect();
        waits.into_iter().map(|wait| wait.join().expect("it does not panic")).collect::<Vec<_>>()
    });
    for (call, result) in results {
        let error = result.expect_err("the memory node is stopped");
        ensure!(matches!(error, Error::Unanswered { .. }), "call {call}: {error:?}");
        let text = error.to_string();
        let named = text.contains(&*node.socket.to_string_lossy()) && text.contains("for 1 s");
        ensure!(named && text.contains("continue the process, and try again"), "{call}: {text}");
    }
    // A second round, in which the requests of the first one are still in flight.
    for call in 0..6 {
        let result = stopped_call(&pool, &grants[call % 2], call);
        ensure!(matches!(result, Err(Error::Unanswered { .. })), "call {call}: {result:?}");
    }

    signal(node.pid(), Signal::CONT)?;
    for grant in &grants {
        let mut text = [0; 9];
        pool.read_blocking(grant, 0, &mut text)?;
        ensure!(&text == b"of before", "{text:?}");
        let mut late = [0; 8];
        pool.read_blocking(grant, 64, &mut late)?;
        ensure!(matches!(&late, b"of after" | [0, 0, 0, 0, 0, 0, 0, 0]), "{late:?}");
        pool.write_blocking(grant, 64, b"at last!")?;
        pool.read_blocking(grant, 64, &mut late)?;
        ensure!(&late == b"at last!", "{late:?}");
    }
    let more = pool.allocate_blocking()?;
    pool.free_blocking(more)?;
    for grant in grants {
        pool.free_blocking(grant)?;
    }
    // The chunks of requests whose answer came late are not lost, either.
    ensure!(pool.node_status()?.node.free == 64, "{:?}", pool.node_status()?.node);
    pool.audit()?;
    Ok(())
}

/// An allocation ends as unanswered, and the memory node executes it when it goes on. The chunk is
/// given back, in each scheme whose memory node grants by a reply.
#[test]
fn chunks_of_late_replies_are_given_back() -> Result<()> {
    for scheme in ["onesidedmw", "rpc-mw-1", "rpc-mw-2", "rpc-data", "patronus", "patronus-paper"] {
        let memory = ["--memory", "1MiB", "--chunk", "4KiB", "--scheme", scheme];
        let node = MemoryNode::start(&format!("late-{scheme}"), &memory)?;
        let options = Options { answer_timeout: Duration::from_secs(1), ..Options::default() };
        let pool = Pool::connect(&node.socket, options)?;
        let held = pool.allocate_blocking().with_context(|| format!("scheme {scheme}"))?;
        let before = pool.node_status()?.node.free;
        signal(node.pid(), Signal::STOP)?;
        std::thread::scope(|scope| {
            let waits: Vec<_> = (0..4).map(|_| scope.spawn(|| pool.allocate_blocking())).collect();
            waits.into_iter().try_for_each(|wait| match wait.join().expect("it does not panic") {
                Err(Error::Unanswered { .. }) => Ok(()),
                other => bail!("scheme {scheme}: {other:?}"),
            })
        })?;
        signal(node.pid(), Signal::CONT)?;
        let more = pool.allocate_blocking().with_context(|| format!("scheme {scheme}"))?;
        pool.free_blocking(more)?;
        let node = pool.node_status()?.node;
        ensure!(node.free == before, "scheme {scheme}: {node:?}, free before: {before}");
        pool.free_blocking(held)?;
        pool.audit()?;
    }
    Ok(())
}

/// One of the calls that wait for a memory node.
fn stopped_call(pool: &Pool, grant: &Grant, call: usize) -> Result<(), Error> {
    match call {
        0 => pool.read_blocking(grant, 0, &mut [0; 9]),
        1 => pool.write_blocking(grant, 64, b"of after"),
        2 => pool.allocate_blocking().map(drop),
        3 => block_on(pool.read(grant, 0, &mut [0; 4096])),
        4 => pool.node_status().map(drop),
        _ => pool.fetch_and_add_blocking(grant, 128, 1).map(drop),
    }
}

/// `granary status` names the memory node that is gone, and works again after its restart.
#[test]
fn status_reports_a_lost_memory_node() -> Result<()> {
    let settings = ["--memory", "64MiB", "--chunk", "1MiB"];
    let mut node = MemoryNode::start("restart-run", &settings)?;
    let pool = format!("shm:{}", node.socket.display());
    node.kill()?;
    let status = || Command::new(granary()).args(["status", "--pool", &pool]).output();
    let out = status()?;
    assert!(!out.status.success());
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("pool.sock"), "the error names no memory node: {text}");
    node.restart(&settings)?;
    assert!(status()?.status.success());
    Ok(())
}
