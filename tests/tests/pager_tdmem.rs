//! Paged programs over scheme `tdmem`, with and without a tier of the process's own memory.
//!
//! The memory node runs in the test, which sees how many pages it holds. Other programs over this
//! scheme run in `pager_private_node`.

use granary_tests::pager::{Scratch, assert_same_within, plain};
use granary_tests::run::{NodeKind, Site};
use granary_tests::waiting::{self, Waiting};
use pager::config::Cipher;
use pager::sys::PAGE_BYTES;
use pool::{Endpoint, Service, Settings, schemes};

const MIB: u64 = 1 << 20;
const PAGE: u64 = PAGE_BYTES as u64;
/// Bound of local memory. The program fills 24 MiB.
const LOCAL: u64 = 8 * MIB;

/// Runs the program, and returns how many pages the memory node holds while the program waits.
fn pages_held(scratch: &Scratch, tier_bytes: u64, seal: Option<Cipher>) -> u64 {
    let settings = Settings {
        scheme: schemes::TDMEM,
        chunk_bytes: PAGE,
        donate_bytes: 32 * MIB,
        ..Settings::default()
    };
    let node = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let pool = format!("shm:{}", node.path().display());
    let config = pager::Config { tier_bytes, seal, ..pager::Config::new(LOCAL, pool) };
    let waiting = Waiting::start(scratch.0.join("fsize"), &config);
    let status = node.status().unwrap().node;
    let (code, stdout, stderr) = waiting.check_memory();
    assert_eq!((code, &*stdout), (Some(0), "as expected\n"), "tier {tier_bytes}: {stderr}");
    status.chunks - status.free
}

#[test]
fn pages_go_to_the_local_tier_first() {
    let scratch = Scratch::new("tdmem-tier");
    waiting::compile(&scratch);
    for seal in [None, Some(Cipher::Aes256Gcm)] {
        let without = pages_held(&scratch, 0, seal);
        assert!(without >= 16 * MIB / PAGE, "{without} pages");
        assert_eq!(pages_held(&scratch, 32 * MIB, seal), 0, "all pages fit into the tier");
        let tier = 4 * MIB;
        let with = pages_held(&scratch, tier, seal);
        // The kernel decides which pages leave local memory a little earlier or later.
        let expected = without - tier / PAGE;
        assert!(with.abs_diff(expected) < 300, "{with} pages, and {without} without a tier");
    }
}

/// Fills 16 MiB, forks children that change half of their pages, and checks all.
const FAMILY: &str = "
import os
PAGES = 4096
def number(page, version): return (page * 7919 + version).to_bytes(8, 'little')
def fill(version, step):
    for page in range(0, PAGES, step): memory[page * 4096:page * 4096 + 8] = number(page, version)
def check(version, first, step):
    for page in range(first, PAGES, step):
        assert memory[page * 4096:page * 4096 + 8] == number(page, version), page
memory = bytearray(PAGES * 4096)
fill(1, 1)
children = []
for version in range(10, 13):
    pid = os.fork()
    if pid == 0:
        check(1, 0, 1)
        fill(version, 2)
        check(version, 0, 2)
        check(1, 1, 2)
        os._exit(0)
    children.append(pid)
fill(2, 1)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
check(2, 0, 1)
print('right', flush=True)
";

#[test]
fn forked_children_have_local_tiers_of_their_own() {
    const PYTHON: &str = "/usr/bin/python3";
    for tier_mib in [2, 64] {
        let tier = format!("local={tier_mib}MiB");
        let site = Site::new(NodeKind::Private, &format!("tdmem-{tier_mib}"), LOCAL, "1GiB")
            .with_options(&["--scheme", "tdmem", "--tier", &tier]);
        let paged = site.run(PYTHON, &["-c", FAMILY]);
        // A child has its own tier, and that of its parent until it ends.
        let limit = LOCAL + 2 * tier_mib * MIB + pager::CONSTANT_BYTES;
        assert_same_within(&plain(PYTHON, &["-c", FAMILY]), &paged.outcome, limit);
        assert!(paged.count("pages_in") > 3_000, "{}", paged.stats);
    }
}
