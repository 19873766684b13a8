//! Tests of schemes with several block sizes, and of schemes with one size.

mod common;

use common::{CHUNK, check_whole, settings};
use pool::{Error, Grant, Pool, Scheme, schemes};
use scheme::info::AccessKind;

fn with_sizes() -> impl Iterator<Item = Scheme> {
    schemes::ALL.iter().copied().filter(|scheme| scheme.has_sizes())
}

#[test]
fn every_size_up_to_several_sections() {
    for scheme in with_sizes() {
        let pool = Pool::embedded(settings(scheme, 1024)).unwrap();
        for order in 0..11 {
            let bytes = CHUNK << order;
            let grant = pool.allocate_bytes_blocking(bytes).unwrap();
            assert_eq!(grant.len, bytes, "{scheme}");
            let mut all = vec![1; bytes as usize];
            pool.read_blocking(&grant, 0, &mut all).unwrap();
            assert!(all.iter().all(|b| *b == 0) || !scheme.clears());
            pool.write_blocking(&grant, bytes - 8, b"the last").unwrap();
            let beyond = Grant::new(grant.addr + 8, bytes, grant.entry, grant.group, grant.keys());
            let beyond = beyond.in_function(grant.function);
            assert!(pool.write_blocking(&beyond, bytes - 8, b"too far.").is_err());
            pool.free_blocking(grant).unwrap();
        }
        assert_eq!(pool.allocate_bytes_blocking(CHUNK + 1).unwrap().len, 2 * CHUNK);
        let too_large = pool.allocate_bytes_blocking((CHUNK << 10) + 1).unwrap_err();
        assert!(too_large.to_string().contains("largest block"), "{scheme}: {too_large}");
    }
}

/// Small and large blocks share the free memory in both directions.
#[test]
fn sizes_share_the_memory() {
    for scheme in with_sizes() {
        share_the_memory(scheme);
    }
}

fn share_the_memory(scheme: Scheme) {
    let chunks = 512;
    let pool = Pool::embedded(settings(scheme, chunks)).unwrap();
    let mut seed = 1u64;
    for _ in 0..3 {
        let mut held = Vec::new();
        let mut taken = 0;
        while taken < chunks / 2 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            let order = (seed >> 33) % 7;
            let grant = pool.allocate_bytes_blocking(CHUNK << order).unwrap();
            taken += 1 << order;
            pool.write_blocking(&grant, 0, &[held.len() as u8 + 1; 64]).unwrap();
            held.push(grant);
        }
        pool.audit().unwrap();
        for (i, grant) in held.into_iter().enumerate() {
            let mut mark = [0; 64];
            pool.read_blocking(&grant, 0, &mut mark).unwrap();
            assert_eq!(mark, [i as u8 + 1; 64]);
            pool.free_blocking(grant).unwrap();
        }
        let all = pool.allocate_bytes_blocking(chunks * CHUNK).unwrap();
        let mut bytes = vec![1; all.len as usize];
        pool.read_blocking(&all, 0, &mut bytes).unwrap();
        let clear = bytes.iter().all(|b| *b == 0) || !scheme.clears();
        assert!(clear, "the freed data is still there");
        pool.free_blocking(all).unwrap();
    }
    check_whole(&pool, chunks);
}

/// Enough memory is free, but fragmented: the allocation fails at once and has no side effect.
#[test]
fn fragmented_memory_refuses_a_large_block() {
    // In a scheme by RPC, the address of a grant does not tell which memory it has.
    let has_addresses = |scheme: &Scheme| scheme.access != AccessKind::ByRpc;
    for scheme in with_sizes().filter(has_addresses) {
        let pool = Pool::embedded(settings(scheme, 64)).unwrap();
        let mut held: Vec<_> = (0..64).map(|_| pool.allocate_blocking().unwrap()).collect();
        let (odd, even): (Vec<_>, Vec<_>) =
            held.drain(..).partition(|grant| grant.addr / CHUNK % 2 == 1);
        even.into_iter().for_each(|grant| pool.free_blocking(grant).unwrap());
        let none = pool.allocate_bytes_blocking(2 * CHUNK);
        assert!(matches!(none, Err(Error::OutOfMemory { .. })), "{scheme}: {none:?}");
        let one = pool.allocate_blocking().unwrap();
        pool.free_blocking(one).unwrap();
        odd.into_iter().for_each(|grant| pool.free_blocking(grant).unwrap());
        let all = pool.allocate_bytes_blocking(64 * CHUNK).unwrap();
        pool.free_blocking(all).unwrap();
        check_whole(&pool, 64);
    }
}

#[test]
fn other_schemes_have_one_size() {
    for scheme in [schemes::ONESIDEDMW, schemes::RPC_MW_2, schemes::FINE_MR] {
        assert!(!scheme.has_sizes());
        let pool = Pool::embedded(settings(scheme, 8)).unwrap();
        let grant = pool.allocate_bytes_blocking(100).unwrap();
        assert_eq!(grant.len, CHUNK);
        pool.free_blocking(grant).unwrap();
        let e = pool.allocate_bytes_blocking(CHUNK + 1).unwrap_err().to_string();
        assert!(e.contains("finemem"), "{e}");
        check_whole(&pool, 8);
    }
}

/// The cost of allocations is counted in schemes by CAS only.
#[test]
fn cas_cost_is_counted() {
    for scheme in [schemes::PREMMAP_ONESIDED, schemes::FINEMEM, schemes::PREMMAP_RPC] {
        let pool = Pool::embedded(settings(scheme, 512)).unwrap();
        for _ in 0..64 {
            pool.allocate_blocking().unwrap();
        }
        let small = pool.cas_stats();
        pool.allocate_bytes_blocking(64 * CHUNK).unwrap();
        let all = pool.cas_stats();
        println!("{scheme}: {small:?}, with 64 chunks at once {all:?}");
        assert_eq!(pool.stats().cas_retries, all.cas_retries);
        match scheme {
            schemes::PREMMAP_ONESIDED => {
                // Each takes a CAS and the READ of the key; a large block takes a CAS per chunk.
                let counts = (small.allocations, small.round_trips, small.cas, small.cas_retries);
                assert_eq!(counts, (64, 128, 64, 0));
                assert_eq!((all.cas - small.cas, all.round_trips - small.round_trips), (64, 65));
            }
            schemes::FINEMEM => {
                assert_eq!(small.allocations, 64);
                assert!(small.cas >= 64 && small.round_trips >= 128 && small.cas_retries == 0);
                assert!(
                    all.round_trips - small.round_trips < 10,
                    "a block takes one CAS regardless of its size"
                );
            }
            _ => assert_eq!(all, pool::CasStats::default()),
        }
    }
}

#[test]
fn later_client_reads_the_chunks_already_taken() {
    let settings = settings(schemes::PREMMAP_ONESIDED, 64);
    let node = std::sync::Arc::new(pool::EmbeddedNode::start(&settings).unwrap());
    let connect = || Pool::embedded_in(&node, pool::Options::default()).unwrap();
    let (first, second) = (connect(), connect());
    for _ in 0..16 {
        first.allocate_blocking().unwrap();
    }
    second.allocate_blocking().unwrap();
    // A READ per chunk visited, and a CAS on the free one.
    let pool::CasStats { round_trips, cas, cas_retries, .. } = second.cas_stats();
    assert_eq!((round_trips, cas, cas_retries), (18, 1, 0));
    second.allocate_blocking().unwrap();
    assert_eq!(second.cas_stats().round_trips, 20, "a search continues where the last one ended");
}
