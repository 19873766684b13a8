//! Tests of features that only scheme `finemem` has: the quarantine of freed blocks, and windows
//! guarded by the logs. Also tests of `finemem-paper`, the published form, which lacks both.

mod common;

use std::sync::Arc;

use common::{CHUNK, check_whole};
use pool::{EmbeddedNode, Error, Grant, GroupId, Options, Pool, Scheme, Settings, schemes};
use schemes::finemem::block::{Block, CHUNK_ORDER, Order};
use schemes::finemem::layout::Shape;
use verbs::Key;

fn settings(chunks: u64) -> Settings {
    common::settings(schemes::FINEMEM, chunks)
}

/// The chunks of a departed compute node are reclaimed, including a block of several sections.
#[test]
fn sections_of_a_departed_client_are_reclaimed() {
    let embedded = std::sync::Arc::new(pool::EmbeddedNode::start(&settings(2048)).unwrap());
    let staying = Pool::embedded_in(&embedded, Default::default()).unwrap();
    for _ in 0..2 {
        let leaving = Pool::embedded_in(&embedded, Default::default()).unwrap();
        let large = leaving.allocate_bytes_blocking(CHUNK << 10).unwrap();
        leaving.write_blocking(&large, large.len - 8, b"the last").unwrap();
        leaving.allocate_bytes_blocking(CHUNK << 9).unwrap();
        leaving.allocate_bytes_blocking(CHUNK).unwrap();
        assert!(staying.allocate_bytes_blocking(CHUNK << 11).is_err());
        staying.audit().unwrap();
        drop(leaving);
        check_whole(&staying, 2048);
        let all = staying.allocate_bytes_blocking(CHUNK << 11).unwrap();
        let mut bytes = vec![1; all.len as usize];
        staying.read_blocking(&all, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 0), "the departed owner's data is still there");
        staying.free_blocking(all).unwrap();
    }
    check_whole(&staying, 2048);
}

/// A freed block is inaccessible to its last owner, and is not reallocated before its key is dead
/// and it is cleared.
#[test]
fn old_key_is_dead_when_the_block_has_a_new_owner() {
    let pool = Pool::embedded(settings(1)).unwrap();
    for _ in 0..20 {
        let old = pool.allocate_in_blocking(GroupId(0)).unwrap();
        pool.write_blocking(&old, 0, b"secret").unwrap();
        pool.free_blocking(old).unwrap();
        assert!(matches!(pool.free_blocking(old), Err(Error::NotYours { .. })));
        // The pool has one block, so this waits for the end of its quarantine.
        let new = pool.allocate_in_blocking(GroupId(0)).unwrap();
        assert_eq!(new.addr, old.addr);
        let mut bytes = [1; 6];
        assert!(pool.write_blocking(&old, 0, b"stale").is_err());
        assert!(pool.read_blocking(&old, 0, &mut bytes).is_err());
        pool.read_blocking(&new, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
        pool.free_blocking(new).unwrap();
    }
    check_whole(&pool, 1);
}

/// Two compute nodes of one memory node in this process.
struct Two {
    victim: Pool,
    thief: Pool,
}

fn two(scheme: Scheme, chunks: u64) -> Two {
    let node = Arc::new(EmbeddedNode::start(&Settings { scheme, ..settings(chunks) }).unwrap());
    let connect = || Pool::embedded_in(&node, Options::default()).unwrap();
    Two { victim: connect(), thief: connect() }
}

/// A grant of the block of this order at the address of `grant`, with a forged key.
fn block_at(grant: &Grant, chunks: u32, order: Order, windows: u32, tag: u8) -> Grant {
    let shape = Shape { chunks, chunk_bytes: CHUNK };
    let at = shape.block(grant.entry).unwrap();
    let entry = shape.entry(Block { order, ..at });
    let key = grant.keys()[0].index().raw() - windows * grant.entry.raw() + windows * entry.raw();
    let keys = [Key::new(key.into(), tag); 2];
    Grant::new(grant.addr, shape.block_bytes(order), entry, GroupId(0), &keys)
}

/// Tags with which `pool` can read at the address of `grant`: in the block's own window (each block
/// has `windows`), or in that of the block there whose order is greater by `larger`.
fn guessed(pool: &Pool, grant: &Grant, chunks: u32, larger: u32, windows: u32) -> Vec<u8> {
    let block = Shape { chunks, chunk_bytes: CHUNK }.block(grant.entry).unwrap();
    let order = block.order.plus(larger);
    let opens = |tag: &u8| {
        let guess = block_at(grant, chunks, order, windows, *tag);
        pool.read_blocking(&guess, 0, &mut [0; 8]).is_ok()
    };
    (0..=255).filter(opens).collect()
}

/// OneSidedMW §2.3 on windows guarded by the log: none of the 256 tags opens a block of another
/// compute node.
#[test]
fn no_tag_opens_another_compute_nodes_block() {
    let Two { victim, thief } = two(schemes::FINEMEM, 32);
    for order in 0..6 {
        let own = victim.allocate_bytes_blocking(CHUNK << order).unwrap();
        victim.write_blocking(&own, 0, b"a secret").unwrap();
        // Both windows that begin there. A thief that owns memory has no further access.
        let his = (order < 5).then(|| thief.allocate_bytes_blocking(CHUNK << order).unwrap());
        for larger in [0, 1].into_iter().filter(|larger| order + larger < 6) {
            assert!(guessed(&thief, &own, 32, larger, 1).is_empty(), "order {order} + {larger}");
        }
        // The log decides whether a key is valid: the owner of a chunk cannot use a larger window
        // that begins there.
        assert_eq!(guessed(&victim, &own, 32, 0, 1), [own.keys()[0].tag()]);
        if order < 5 {
            assert!(guessed(&victim, &own, 32, 1, 1).is_empty());
        }
        let mut found = [0; 8];
        victim.read_blocking(&own, 0, &mut found).unwrap();
        assert_eq!(&found, b"a secret");
        victim.free_blocking(own).unwrap();
        his.into_iter().for_each(|grant| thief.free_blocking(grant).unwrap());
    }
    check_whole(&victim, 32);
}

/// No key opens a free block, not even for its last owner.
#[test]
fn no_tag_opens_a_free_block() {
    let Two { victim, thief } = two(schemes::FINEMEM, 4);
    let own = victim.allocate_blocking().unwrap();
    victim.free_blocking(own).unwrap();
    check_whole(&victim, 4);
    for pool in [&victim, &thief] {
        assert!(guessed(pool, &own, 4, 0, 1).is_empty());
        assert!(guessed(pool, &own, 4, 1, 1).is_empty());
    }
    let his = thief.allocate_blocking().unwrap();
    assert!(guessed(&victim, &his, 4, 0, 1).is_empty());
    assert_eq!(guessed(&thief, &his, 4, 0, 1).len(), 1);
}

/// The weaknesses of `finemem-paper`, which `finemem` prevents (the tests above): a guessed key
/// opens another owner's block, an old key still opens a block after its reallocation, and the
/// block is not cleared.
#[test]
fn published_form_accepts_guessed_and_old_keys() {
    let Two { victim, thief } = two(schemes::FINEMEM_PAPER, 1);
    let mut found = [0; 8];
    let mut worked = false;
    for _ in 0..100 {
        let late = thief.allocate_blocking().unwrap();
        thief.write_blocking(&late, 0, b"mine: 11").unwrap();
        thief.free_blocking(late).unwrap();
        let own = victim.allocate_blocking().unwrap();
        assert_eq!(own.addr, late.addr);
        assert_ne!(own.keys()[0], late.keys()[0]);
        victim.read_blocking(&own, 0, &mut found).unwrap();
        assert_eq!(&found, b"mine: 11", "old contents");
        victim.write_blocking(&own, 0, b"a secret").unwrap();
        // The memory node's scan may have invalidated the key already.
        worked = thief.read_blocking(&late, 0, &mut found).is_ok();
        if worked {
            assert_eq!(&found, b"a secret");
        }
        // Each of the block's two windows opens with one tag, for any compute node.
        let tags = guessed(&thief, &own, 1, 0, 2);
        assert_eq!(tags.len(), 1);
        let guess = block_at(&own, 1, CHUNK_ORDER, 2, tags[0]);
        thief.write_blocking(&guess, 0, b"changed!").unwrap();
        victim.read_blocking(&own, 0, &mut found).unwrap();
        assert_eq!(&found, b"changed!");
        victim.free_blocking(own).unwrap();
        if worked {
            break;
        }
    }
    assert!(worked, "the scan was faster a hundred times");
    check_whole(&victim, 1);
}

/// A pool with more blocks than the NIC has windows does not start, and the error suggests a
/// remedy.
#[test]
fn more_blocks_than_windows_are_refused_at_the_start() {
    for (scheme, windows) in [(schemes::FINEMEM, 2047), (schemes::FINEMEM_PAPER, 4094)] {
        let settings = Settings { scheme, nic_windows: Some(4 + 8), ..settings(1024) };
        let refused = Pool::embedded(settings).err().unwrap();
        let says = refused.to_string();
        let needs = format!("{windows} memory windows");
        assert!(says.contains(&needs) && says.contains("larger chunks"), "{says}");
        assert!(says.contains("128 functions of 12 windows each"), "{says}");
        assert!(says.contains("1024 in total"), "{says}");
    }
    // With as many windows as the compute nodes take, none is left for blocks.
    let settings = Settings { nic_windows: Some(4), ..settings(1) };
    let says = Pool::embedded(settings).err().unwrap().to_string();
    assert!(says.contains("of which 0 are left"), "{says}");
}
