//! Checks of batches.

use pool::{Error, Grant, GroupId, Lane, Options, Transfer};
use verbs::executor::block_on;

use crate::Setup;
use crate::checks::{dead_grant, is_refused};

pub fn batches_over_groups(setup: &Setup) {
    const PAGES: usize = 300;
    let node = setup.node_of(1 << 18, 8);
    let pool =
        node.connect_with(Options { groups: Some(2), send_blocks: 64, ..Options::default() });
    let grants: Vec<Grant> =
        (0..6).map(|i| pool.allocate_in_blocking(GroupId(i % 2)).unwrap()).collect();
    let buffer = pool.buffer(PAGES * 4096).unwrap();
    let transfers: Vec<Transfer<'_>> = (0..PAGES)
        .map(|i| Transfer {
            grant: &grants[i % grants.len()],
            offset: (i / grants.len() * 4096) as u64,
            buffer_offset: i * 4096,
            len: 4096,
        })
        .collect();
    for lane in [Lane(0), Lane(1)] {
        for i in 0..PAGES {
            buffer.memory().write(i * 4096, &[i as u8 ^ lane.0; 4096]);
        }
        pool.write_batch_blocking(&transfers, &buffer, lane).unwrap();
        buffer.memory().zero(0, PAGES * 4096);
        block_on(pool.read_batch(&transfers, &buffer, lane)).unwrap();
        for i in 0..PAGES {
            let mut page = [0; 4096];
            buffer.memory().read(i * 4096, &mut page);
            assert!(page == [i as u8 ^ lane.0; 4096], "page {i}");
        }
    }
    // One bad transfer in the middle: an error, and the QPs work afterwards.
    let old = dead_grant(&pool, setup);
    let mut bad = transfers.clone();
    bad[PAGES / 2].grant = &old;
    bad[PAGES / 2].offset = 0;
    assert!(is_refused(pool.read_batch_blocking(&bad, &buffer, Lane(0))));
    pool.read_batch_blocking(&transfers, &buffer, Lane(0)).unwrap();
    let beyond = Transfer { offset: 1 << 18, ..transfers[0] };
    let result = pool.read_batch_blocking(&[transfers[0], beyond], &buffer, Lane(0));
    assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
    let beyond = Transfer { buffer_offset: PAGES * 4096 - 1, ..transfers[0] };
    let result = pool.write_batch_blocking(&[beyond], &buffer, Lane(0));
    assert!(matches!(result, Err(Error::Setting { .. })), "{result:?}");
    pool.read_batch_blocking(&[], &buffer, Lane(0)).unwrap();
    drop(pool);
    node.check_whole(8);
}

pub fn batches_are_polled_to_their_end(setup: &Setup) {
    const PAGES: usize = 32;
    let node = setup.node_of(1 << 18, 4);
    let pool = node.connect();
    let grants: Vec<Grant> = (0..2).map(|_| pool.allocate_blocking().unwrap()).collect();
    let buffer = pool.buffer(2 * PAGES * 4096).unwrap();
    // Every second page of the chunks, from one half of the buffer or to the other.
    let transfers = |half: usize| -> Vec<Transfer<'_>> {
        let transfer = |i| Transfer {
            grant: &grants[i % 2],
            offset: (i / 2 * 8192) as u64,
            buffer_offset: (half * PAGES + i) * 4096,
            len: 4096,
        };
        (0..PAGES).map(transfer).collect()
    };
    for i in 0..PAGES {
        buffer.memory().write(i * 4096, &[i as u8 + 1; 4096]);
    }
    let mut writes = pool.start_write_batch(&transfers(0), &buffer, Lane(1)).unwrap();
    while !writes.poll().unwrap() {
        std::thread::yield_now();
    }
    assert!(writes.poll().unwrap(), "a batch that has ended stays so");
    // Several batches in flight, polled last one first.
    let mut reads: Vec<_> = transfers(1)
        .chunks(8)
        .map(|part| pool.start_read_batch(part, &buffer, Lane(0)).unwrap())
        .collect();
    while !reads.iter_mut().rev().all(|batch| batch.poll().unwrap()) {
        std::thread::yield_now();
    }
    for i in 0..PAGES {
        let mut page = [0; 4096];
        buffer.memory().read((PAGES + i) * 4096, &mut page);
        assert!(page == [i as u8 + 1; 4096], "page {i}");
    }
    // A refused access is reported, also by another thread than the one that posted, and the QP
    // works afterwards.
    let old = dead_grant(&pool, setup);
    let bad = Transfer { grant: &old, offset: 0, buffer_offset: 0, len: 4096 };
    let mut refused = pool.start_read_batch(&[transfers(1)[0], bad], &buffer, Lane(0)).unwrap();
    let poll = move || {
        loop {
            match refused.poll() {
                Ok(false) => std::thread::yield_now(),
                ended => break ended.map(drop),
            }
        }
    };
    assert!(is_refused(std::thread::spawn(poll).join().unwrap()));
    pool.read_batch_blocking(&transfers(1), &buffer, Lane(0)).unwrap();
    // A batch keeps the connection open.
    drop((pool, writes, reads));
    node.check_whole(4);
}
