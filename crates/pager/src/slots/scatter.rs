//! Random placement of pages, which hides the program's pattern of accesses from a memory node.
//!
//! TDMEM (§4.5) draws a random free page for each store. Here each slot is drawn uniformly from the
//! free slots of the chunks that have any: a random chunk and a random place in it, again until the
//! place is free. An eighth of the slots stays free as long as the pool has chunks, so that a draw
//! takes few attempts and has much to choose from.
//!
//! One store of each chunk is not uniform over all chunks: the first store into a new chunk,
//! because a chunk without a used slot would never be freed. Its place within the chunk is uniform.

use std::io;

use super::fill::ANY_FREE;
use super::{SlotId, Slots, Usage, free_page, get};
use crate::config::{EXIT_PAGER, Hide};
use crate::sys;

/// Source of random words.
pub type Random = Box<dyn FnMut() -> u64 + Send>;

/// Random words of the kernel, 32 for each system call.
///
/// # Errors
/// Errors of `getrandom(2)` at the first call. A later error ends the process, because a place must
/// not be predictable.
pub fn kernel_random() -> io::Result<Random> {
    let mut words = [0u64; 32];
    let mut left = 0;
    let fill = move |words: &mut [u64; 32]| {
        // SAFETY: valid for the write. At most 256 bytes are never returned in part.
        match unsafe { libc::getrandom(words.as_mut_ptr().cast(), size_of_val(words), 0) } {
            got if got < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    fill(&mut words)?;
    Ok(Box::new(move || {
        if left == 0 {
            if let Err(error) = fill(&mut words) {
                sys::die(EXIT_PAGER, &format!("cannot get random numbers for --hide: {error}"));
            }
            left = words.len();
        }
        left -= 1;
        std::mem::take(&mut words[left])
    }))
}

/// Placement of stores that hides.
pub(super) struct Scatter {
    hide: Hide,
    random: Random,
}

/// Attempts of a draw. A full pool may have so few free places that a search is faster.
const ATTEMPTS: u32 = 1024;
/// The share of the slots that stays free is the inverse of this.
const SPARE: u64 = 8;

impl Scatter {
    /// Returns a number below `end`, each with the same probability (Lemire, "Fast Random Integer
    /// Generation in an Interval", 2019).
    fn below(&mut self, end: u32) -> u32 {
        let end = u64::from(end);
        loop {
            let wide = ((self.random)() >> 32) * end;
            if wide as u32 as u64 >= (1 << 32) % end {
                return (wide >> 32) as u32;
            }
        }
    }
}

impl Slots {
    /// Draws the slots of stores at random from now on.
    pub fn hide(&mut self, hide: Hide, random: Random) {
        self.scatter = (hide != Hide::Off).then(|| Scatter { hide, random });
    }

    /// Returns true if a page must be written to another slot than it has: a child may need the
    /// content of the slot, or the slot of each store is drawn at random.
    pub fn needs_another(&self, slot: SlotId) -> bool {
        self.scatter.is_some() || self.is_frozen(slot)
    }

    /// Returns true if a slot is read at most once.
    pub fn is_read_once(&self, slot: SlotId) -> bool {
        let hides = self.scatter.as_ref().is_some_and(|scatter| scatter.hide == Hide::Reads);
        hides && slot.has_place()
    }

    /// Returns the number of free slots that random placement needs.
    pub fn spare(&self) -> u64 {
        match self.scatter {
            Some(_) => self.usage().held / SPARE,
            None => 0,
        }
    }

    /// Allocates a random free slot. Returns `None` if the caller should add a chunk.
    pub(super) fn allocate_scattered(&mut self) -> Option<SlotId> {
        if let Some(slot) = self.allocate_open() {
            return Some(slot);
        }
        let Usage { live, held } = self.usage();
        if self.wants_pool() && held - live <= self.spare() {
            return None;
        }
        self.draw()
    }

    /// Allocates a random slot of the chunk at an index.
    pub(super) fn allocate_within(&mut self, index: u32) -> Option<SlotId> {
        let pages = self.chunk_pages();
        let start = self.scatter.as_mut()?.below(pages);
        self.cursor = start;
        self.allocate_in(index)
    }

    fn draw(&mut self) -> Option<SlotId> {
        let pages = self.chunk_pages();
        for _ in 0..ATTEMPTS {
            let chunks = self.fill.count();
            if chunks == 0 {
                return None;
            }
            let scatter = self.scatter.as_mut()?;
            let (at, page) = (scatter.below(chunks), scatter.below(pages));
            let index = self.fill.nth(at);
            let chunk = self.chunks[index as usize].as_ref().expect("a listed chunk exists");
            if !get(&chunk.used, page) {
                debug_assert_eq!(free_page(&chunk.used, page, pages), Some(page));
                self.cursor = page;
                return self.allocate_in(index);
            }
        }
        let index = self.fill.emptiest(ANY_FREE)?;
        self.allocate_within(index)
    }
}

#[cfg(test)]
#[path = "scatter_tests.rs"]
mod tests;
