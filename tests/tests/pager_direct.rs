//! Programs that open files with `O_DIRECT`: data that a device writes into a page is not lost,
//! even while pages are evicted.

use granary_tests::needs;
use granary_tests::pager::{Scratch, paged, plain};
use pager::stats::Counter;

const MIB: u64 = 1 << 20;

#[test]
fn direct_reads_into_paged_memory_arrive() {
    let scratch = Scratch::new("direct");
    let program = scratch.compile("direct", include_str!("pager_programs/direct.c"));
    let program = program.to_str().unwrap();
    let file = scratch.0.join("file");
    let arguments = [file.to_str().unwrap()];
    let plain = plain(program, &arguments);
    if plain.code == 77 {
        return needs::skip(String::from_utf8_lossy(&plain.stdout).trim());
    }
    assert_eq!(plain.code, 0, "{}", String::from_utf8_lossy(&plain.stdout));
    let paged = paged(8 * MIB, "memory:256MiB", program, &arguments);
    assert_eq!(paged.code, 0, "{}{}", String::from_utf8_lossy(&paged.stdout), paged.stderr);
    assert!(paged.summary.get(Counter::PagesOut) > 5000, "{}", paged.summary);
}
