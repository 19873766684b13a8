//! Checks of ordered lists.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

use pool::{DefaultNic, Error, Grant, GroupId, Lane, Options, Pool, Step, Transfer};
use verbs::executor::block_on;
use verbs::{Key, Status};

use crate::Setup;

type Steps<'a> = Vec<Step<'a, DefaultNic>>;

/// A copy of a grant with dead keys.
fn dead(grant: &Grant) -> Grant {
    let keys = vec![Key(0xdead_be00); grant.keys().len()];
    Grant::new(grant.addr, grant.len, grant.entry, grant.group, &keys).in_function(grant.function)
}

fn word(pool: &Pool, grant: &Grant, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    pool.read_blocking(grant, offset, &mut bytes).unwrap();
    u64::from_be_bytes(bytes)
}

pub fn lists_are_executed_in_order(setup: &Setup) {
    let node = setup.node_of(1 << 18, 2);
    let pool = node.connect();
    let grant = &pool.allocate_in_blocking(GroupId(1)).unwrap();
    let buffer = &pool.buffer(1 << 16).unwrap();
    pool.write_blocking(grant, 0, &[0; 1 << 18]).unwrap();
    for (round, lane) in (0u64..20).zip([Lane(0), Lane(1), Lane(7)].into_iter().cycle()) {
        let (next, long) = ((round + 1).to_be_bytes(), [round as u8 + 1; 5000]);
        buffer.memory().write(0, &[round as u8 ^ 0x55; 300]);
        let to_chunk = Transfer { grant, offset: 8192, buffer_offset: 0, len: 300 };
        let to_buffer = Transfer { grant, offset: 8192, buffer_offset: 4096, len: 300 };
        let (mut before, mut after, mut empty) = ([0u8; 5000], [0u8; 5000], [0u8; 0]);
        let (mut swapped, mut kept, mut added) = (0, 0, 0);
        let mut steps: Steps<'_> = vec![
            Step::Read { grant, offset: 64, into: &mut before },
            Step::Write { grant, offset: 64, from: &long },
            Step::CompareAndSwap { grant, offset: 0, expected: round, new: 999, old: &mut swapped },
            Step::CompareAndSwap { grant, offset: 0, expected: round, new: 7, old: &mut kept },
            Step::Read { grant, offset: 64, into: &mut after },
            Step::Write { grant, offset: 0, from: &next },
            Step::FetchAndAdd { grant, offset: 8, add: 3, old: &mut added },
            Step::WriteFrom(to_chunk, buffer),
            Step::ReadInto(to_buffer, buffer),
            Step::Read { grant, offset: 16, into: &mut empty },
            Step::Write { grant, offset: 16, from: &[] },
        ];
        match round % 2 {
            0 => pool.run_blocking(lane, &mut steps).unwrap(),
            _ => block_on(pool.run(lane, &mut steps)).unwrap(),
        }
        assert_eq!((swapped, kept, added), (round, 999, 3 * round));
        assert_eq!((before, after), ([round as u8; 5000], long));
        assert_eq!(word(&pool, grant, 0), round + 1);
        let mut moved = [0; 300];
        buffer.memory().read(4096, &mut moved);
        assert_eq!(moved, [round as u8 ^ 0x55; 300]);
    }
    let stats = pool.stats();
    assert_eq!((stats.atomics, stats.reads, stats.writes), (60, 20 * 4 + 20, 1 + 20 * 4));
    pool.run_blocking(Lane(0), &mut []).unwrap();
    pool.free_blocking(*grant).unwrap();
    drop(pool);
    node.check_whole(2);
}

/// The steps before the refused one take effect, and the result names the refused one.
pub fn failed_list_says_how_far_it_came(setup: &Setup) {
    const STEPS: usize = 9;
    let node = setup.node_of(4096, 4);
    let pool = node.connect();
    let grant = &pool.allocate_in_blocking(GroupId(0)).unwrap();
    let dead = &dead(grant);
    for bad in 0..STEPS {
        pool.write_blocking(grant, 0, &[0; 4096]).unwrap();
        let (mut olds, mut seen) = ([77u64; STEPS], [0xeeu8; 8]);
        let mut steps: Steps<'_> = olds
            .iter_mut()
            .enumerate()
            .map(|(i, old)| {
                let (grant, offset) = (if i == bad { dead } else { grant }, i as u64 * 8);
                match i % 3 {
                    0 => Step::Write { grant, offset, from: &[1; 8] },
                    1 => Step::FetchAndAdd { grant, offset, add: 5, old },
                    _ => Step::CompareAndSwap { grant, offset, expected: 0, new: 6, old },
                }
            })
            .collect();
        steps.push(Step::Read { grant, offset: 8, into: &mut seen });
        let result = match bad % 2 {
            0 => pool.run_blocking(Lane(0), &mut steps),
            _ => block_on(pool.run(Lane(0), &mut steps)),
        };
        let Err(Error::List { done, steps, op, status }) = result else {
            panic!("step {bad}: {result:?}")
        };
        assert_eq!((done, steps, status), (bad, STEPS + 1, Status::RemoteAccess));
        assert_eq!(op, ["write", "fetch-and-add", "compare-and-swap"][bad % 3]);
        assert_eq!(seen, [0xee; 8], "the read is behind the refused step");
        for (i, old) in olds.into_iter().enumerate() {
            let (done, now) = (i < bad, word(&pool, grant, i as u64 * 8));
            let effect = [0x0101_0101_0101_0101, 5, 6][i % 3];
            assert_eq!(now, if done { effect } else { 0 }, "step {i} of {bad}");
            let delivered = done && i % 3 != 0;
            assert_eq!(old, if delivered { 0 } else { 77 }, "step {i} of {bad}");
        }
    }
    let mut into = [9; 8];
    pool.run_blocking(Lane(0), &mut [Step::Read { grant, offset: 4000, into: &mut into }]).unwrap();
    assert_eq!(into, [0; 8]);
}

/// A list that is refused by this compute node posts nothing.
pub fn refused_list_has_no_effect(setup: &Setup) {
    let node = setup.node_of(1 << 20, 4);
    let pool = node.connect();
    let [here, there] = [0, 1].map(|g| pool.allocate_in_blocking(GroupId(g)).unwrap());
    let (here, there) = (&here, &there);
    pool.write_blocking(here, 0, &[0; 8]).unwrap();
    let writes = pool.stats().writes;
    let other = node.connect();
    let foreign_buffer = &other.buffer(4096).unwrap();
    let buffer = &pool.buffer(4096).unwrap();
    let from = &[1; 8][..];
    let first = || Step::Write { grant: here, offset: 0, from };
    let at = |grant, offset, len| Transfer { grant, offset, buffer_offset: 0, len };
    let (mut old, mut into) = (0, [0; 8]);
    let refused = |second: Step<'_, DefaultNic>, words: &str| {
        let mut steps = [first(), second];
        let blocking = pool.run_blocking(Lane(0), &mut steps);
        for result in [blocking, block_on(pool.run(Lane(0), &mut steps))] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    };
    refused(Step::Write { grant: there, offset: 0, from }, "two QPs keep no order");
    refused(Step::WriteFrom(at(there, 0, 8), buffer), "step 1 would use another QP than step 0");
    refused(Step::ReadInto(at(here, 0, 8), foreign_buffer), "another connection");
    refused(Step::ReadInto(at(here, 0, 8192), buffer), "the buffer has 4096 bytes");
    refused(Step::Read { grant: here, offset: (1 << 20) - 7, into: &mut into }, "outside");
    refused(Step::FetchAndAdd { grant: here, offset: 4, add: 1, old: &mut old }, "multiple of 8");
    let (mut half, mut rest) = (vec![0; 1 << 17], vec![0; (1 << 17) + 1]);
    let mut steps = [&mut half, &mut rest].map(|into| Step::Read { grant: here, offset: 0, into });
    let error = pool.run_blocking(Lane(0), &mut steps).unwrap_err().to_string();
    assert!(error.contains("at most 262144"), "{error}");
    let mut steps: Steps<'_> = (0..65).map(|_| first()).collect();
    let error = pool.run_blocking(Lane(0), &mut steps).unwrap_err().to_string();
    assert!(error.contains("65 steps") && error.contains("at most 64"), "{error}");
    assert_eq!((word(&pool, here, 0), pool.stats().writes), (0, writes), "nothing was posted");
    pool.run_blocking(Lane(0), &mut steps[..64]).unwrap();
    let small =
        node.connect_with(Options { groups: Some(1), send_blocks: 16, ..Options::default() });
    let error = small.run_blocking(Lane(0), &mut steps[..5]).unwrap_err().to_string();
    assert!(error.contains("at most 4"), "{error}");
}

/// Lists of READs and WRITEs are repeated when another operation breaks their QP. Lists with
/// atomics say how far they came, and no atomic is executed twice.
pub fn lists_survive_bad_accesses_of_other_threads(setup: &Setup) {
    const LISTS: u64 = 300;
    let node = setup.node_of(4096, 4);
    let pool = node.connect();
    let grant = &pool.allocate_in_blocking(GroupId(0)).unwrap();
    pool.write_blocking(grant, 0, &[0; 4096]).unwrap();
    let (dead, is_over) = (&dead(grant), AtomicBool::new(false));
    let (mut certain, mut uncertain) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                pool.read_blocking(dead, 0, &mut [0; 8]).unwrap_err();
                std::thread::yield_now();
            }
        });
        for n in 0..LISTS {
            let (mut back, mut old) = ([0u8; 8], u64::MAX);
            let mut moves = [
                Step::Write { grant, offset: 64, from: &n.to_be_bytes() },
                Step::Read { grant, offset: 64, into: &mut back },
            ];
            pool.run_blocking(Lane(0), &mut moves).unwrap();
            assert_eq!(u64::from_be_bytes(back), n);
            let mut counts = [
                Step::Read { grant, offset: 64, into: &mut back },
                Step::FetchAndAdd { grant, offset: 0, add: 1, old: &mut old },
                Step::Write { grant, offset: 72, from: &n.to_be_bytes() },
            ];
            match block_on(pool.run(Lane(0), &mut counts)) {
                Ok(()) => certain += 1,
                Err(Error::List { done, status: Status::Flushed, .. }) => match done {
                    0 | 1 => uncertain += 1,
                    _ => panic!("a list that ends with a WRITE is repeated"),
                },
                Err(e) => panic!("{e}"),
            }
            assert!(old == u64::MAX || (certain - 1..certain + uncertain).contains(&old));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let counted = word(&pool, grant, 0);
    assert!(
        (certain..=certain + uncertain).contains(&counted),
        "{counted}: {certain} to {uncertain}"
    );
    pool.free_blocking(*grant).unwrap();
    drop(pool);
    node.check_whole(4);
}

pub fn abandoned_lists_keep_their_memory(setup: &Setup) {
    let node = setup.node_of(1 << 20, 2);
    let pool = node.connect();
    let grant = &pool.allocate_blocking().unwrap();
    pool.write_blocking(grant, 0, &[0; 8]).unwrap();
    let cx = &mut Context::from_waker(Waker::noop());
    for round in 0..50 {
        let (mut old, mut bytes) = (0, vec![0; 100_000]);
        {
            let buffer = &pool.buffer(1 << 20).unwrap();
            let whole = Transfer { grant, offset: 0, buffer_offset: 0, len: 1 << 20 };
            let mut steps = [
                Step::ReadInto(whole, buffer),
                Step::FetchAndAdd { grant, offset: 0, add: 1, old: &mut old },
                Step::Read { grant, offset: 0, into: &mut bytes },
            ];
            let _ = std::pin::pin!(pool.run(Lane(0), &mut steps)).poll(cx);
        }
        assert!(old == 0 || old == round);
        drop(bytes);
        pool.write_blocking(grant, 64, &[round as u8; 100]).unwrap();
    }
    assert_eq!(pool.fetch_and_add_blocking(grant, 0, 0).unwrap(), 50);
    pool.free_blocking(*grant).unwrap();
    drop(pool);
    node.check_whole(2);
}
