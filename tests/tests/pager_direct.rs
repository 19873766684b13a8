//! Programs whose pages the kernel pins or references while it transfers them: files with
//! `O_DIRECT`, pipes that `vmsplice` fills, sockets with `MSG_ZEROCOPY`. No data is lost or mixed
//! up, even while pages are evicted.

use granary_tests::needs;
use granary_tests::pager::{Outcome, Scratch, paged_with, plain};
use pager::Config;
use pager::config::Pages;
use pager::stats::Counter;

const MIB: u64 = 1 << 20;

fn config(pages: Pages) -> Config {
    let mut config = Config::new(8 * MIB, "memory:256MiB");
    config.pages = pages;
    config
}

fn output(outcome: &Outcome) -> String {
    String::from_utf8_lossy(&outcome.stdout).into_owned()
}

/// Runs `direct.c` plain and paged. Returns whether `O_DIRECT` was kept and whether pages were
/// moved, or `None` if the test was skipped.
fn direct(name: &str, pages: Pages) -> Option<(bool, bool)> {
    let scratch = Scratch::new(name);
    let program = scratch.compile("direct", include_str!("pager_programs/direct.c"));
    let program = program.to_str().unwrap();
    let file = scratch.0.join("file");
    let arguments = [file.to_str().unwrap()];
    let plain = plain(program, &arguments);
    if plain.code == 77 {
        needs::skip(output(&plain).trim());
        return None;
    }
    assert_eq!(plain.code, 0, "{}", output(&plain));
    assert!(output(&plain).contains("open 1, set 1"), "{}", output(&plain));
    let paged = paged_with(&config(pages), program, &arguments);
    let text = output(&paged);
    assert_eq!(paged.code, 0, "{text}{}", paged.stderr);
    assert!(paged.summary.get(Counter::PagesOut) > 5000, "{}", paged.summary);
    let is_kept = text.contains("open 1, set 1");
    assert!(is_kept || text.contains("open 0, set 0"), "{text}");
    Some((is_kept, paged.summary.get(Counter::ProcessesMoving) == 1))
}

#[test]
fn direct_reads_into_paged_memory_arrive() {
    let Some((is_kept, is_moving)) = direct("direct", Pages::Auto) else { return };
    // `direct.c` exits with 77 unless the file system pins pages.
    assert_eq!(is_kept, is_moving, "O_DIRECT is kept where pages are moved");
}

#[test]
fn direct_reads_arrive_where_pages_are_copied() {
    let Some((is_kept, is_moving)) = direct("direct-copy", Pages::Copy) else { return };
    assert!(!is_kept && !is_moving);
}

/// Runs `unpinned.c` plain and paged.
fn unpinned(name: &str, pages: Pages, way: &str) {
    let scratch = Scratch::new(name);
    let program = scratch.compile("unpinned", include_str!("pager_programs/unpinned.c"));
    let (program, fifo) = (program.to_str().unwrap(), scratch.0.join("fifo"));
    let arguments = [way, fifo.to_str().unwrap()];
    let zero_copy = |errno: i32| format!("SO_ZEROCOPY: {errno}\nas expected\n");
    let plain = plain(program, &arguments);
    assert_eq!((plain.code, output(&plain)), (0, zero_copy(0)), "{}", plain.stderr);
    let paged = paged_with(&config(pages), program, &arguments);
    let is_moving = paged.summary.get(Counter::ProcessesMoving) == 1;
    let errno = if is_moving { libc::ENOPROTOOPT } else { 0 };
    assert_eq!((paged.code, output(&paged)), (0, zero_copy(errno)), "{}", paged.stderr);
    assert!(paged.summary.get(Counter::PagesOut) > 5000, "{}", paged.summary);
}

#[test]
fn pipes_and_sockets_transfer_the_content_of_the_call() {
    unpinned("unpinned", Pages::Auto, "libc");
}

#[cfg(target_arch = "x86_64")]
#[test]
fn pipes_and_sockets_transfer_it_after_calls_by_number() {
    unpinned("unpinned-raw", Pages::Auto, "raw");
}

#[test]
fn pipes_transfer_it_where_pages_are_copied() {
    unpinned("unpinned-copy", Pages::Copy, "libc");
}
