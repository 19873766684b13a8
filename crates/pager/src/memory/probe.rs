//! Self-test of the kernel's UFFDIO_MOVE, in memory of its own.
//!
//! UFFDIO_MOVE had several fixes after Linux 6.8. A kernel whose UFFDIO_MOVE gives an unexpected
//! answer is used without it. The test reads the memory that it moves without waiting for a page,
//! because it runs before the pager serves faults.
//!
//! The test pins no page: that needs io_uring, and a seccomp filter may end a process that calls
//! io_uring. A test of this crate pins a page.

use std::io;

use super::copying::ProgramReader;
use super::linux::{WhyCopying, map_shelf};
use crate::sys::{self, PAGE_BYTES};
use crate::uffd::{MoveOptions, Uffd};

const PAGES: usize = 4;
const LEN: usize = PAGES * PAGE_BYTES;

/// Returns the reason why pages must be copied, or `None` if the kernel moves pages as expected.
pub(super) fn reason_to_copy(uffd: &Uffd) -> Option<WhyCopying> {
    if !uffd.can_move() {
        return Some(WhyCopying::NoMove);
    }
    let (region, shelf) = match (map_shelf(LEN), map_shelf(LEN)) {
        (Ok(region), Ok(shelf)) => (region, shelf),
        (Err(error), _) | (_, Err(error)) => {
            return Some(WhyCopying::FailedTest(format!("cannot map memory: {error}")));
        }
    };
    let found = try_moves(uffd, region, shelf);
    // SAFETY: mapped above; the test has ended.
    unsafe {
        let _ = sys::unmap_anonymous(region, LEN);
        let _ = sys::unmap_anonymous(shelf, LEN);
    }
    found.err().map(WhyCopying::FailedTest)
}

/// Moves the pages of `region` to `shelf` and back. These are a page with content, a page of zeros
/// that has no memory of its own, a missing page, and another page with content.
fn try_moves(uffd: &Uffd, region: usize, shelf: usize) -> Result<(), String> {
    let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let reader = ProgramReader::open();
    let source: [[u64; PAGE_BYTES / 8]; PAGES] =
        std::array::from_fn(|page| std::array::from_fn(|word| (page * 1000 + word + 1) as u64));
    let page = |start: usize, index: usize| start + index * PAGE_BYTES;
    // SAFETY: memory that this test has mapped, and a local array.
    unsafe {
        uffd.register(region, LEN).map_err(failed("register"))?;
        uffd.register_target(shelf, LEN).map_err(failed("register the target"))?;
        for index in [0, 3] {
            uffd.copy(page(region, index), source[index].as_ptr() as usize, PAGE_BYTES, false)
                .map_err(failed("fill"))?;
        }
        uffd.zero(page(region, 1), PAGE_BYTES).map_err(failed("fill with zeros"))?;
    }
    let moved = |target, source, len, options| {
        // SAFETY: memory that this test has mapped.
        unsafe { uffd.move_pages(target, source, len, options) }
    };
    let mut found = [[0u64; PAGE_BYTES / 8]; PAGES];
    let present = |start: usize, found: &mut [[u64; PAGE_BYTES / 8]; PAGES]| {
        found.as_flattened_mut().fill(0);
        // SAFETY: a local array.
        unsafe { reader.read(start, found.as_mut_ptr().cast(), LEN) }.map_err(failed("read"))
    };
    let mut expected = source;
    expected[1].fill(0);
    expected[2].fill(0);

    let holes = MoveOptions { holes: true, wake: false };
    match moved(shelf, region, LEN, holes) {
        Ok(LEN) => {}
        Ok(len) => return Err(format!("moved {len} bytes of {LEN} out")),
        Err(error) => return Err(failed("move out")(error)),
    }
    // Without /proc, a read of a missing page waits.
    if reader.descriptor().is_some() && present(region, &mut found)? != 0 {
        return Err("pages are present at the source after a move".into());
    }
    present(shelf, &mut found)?;
    if found != expected {
        return Err("the content has changed by a move out".into());
    }
    // The read has mapped a page of zeros where a page was missing, so a move there must fail.
    match moved(page(shelf, 2), page(shelf, 3), PAGE_BYTES, MoveOptions::default()) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
        other => return Err(format!("a move to a page that is present returned {other:?}")),
    }
    match moved(region, shelf, LEN, MoveOptions { holes: false, wake: true }) {
        Ok(LEN) => {}
        other => return Err(format!("a move back returned {other:?}")),
    }
    if present(region, &mut found)? != PAGES || found != expected {
        return Err("the content has changed by a move back".into());
    }
    Ok(())
}
