//! Which pages of this process exist: in memory, or swapped out by the kernel.

use std::io;
use std::os::unix::fs::FileExt;

use crate::sys::{self, PAGE_BYTES};

/// Maximum number of pages of one query.
pub(crate) const PAGES_AT_ONCE: usize = 512;

/// The file `/proc/self/pagemap`.
pub(crate) struct Presence(std::fs::File);

impl Presence {
    const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;

    /// Opens the file.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn open() -> io::Result<Self> {
        sys::open_own(c"/proc/self/pagemap").map(Self)
    }

    /// Returns the indices of the existing pages among at most [`PAGES_AT_ONCE`] pages.
    pub fn existing(&self, address: usize, pages: usize) -> io::Result<impl Iterator<Item = u32>> {
        let mut entries = [0u64; PAGES_AT_ONCE];
        assert!(pages <= PAGES_AT_ONCE);
        // SAFETY: the bytes of an array of numbers, all of which are valid.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(entries.as_mut_ptr().cast::<u8>(), 8 * pages) };
        self.0.read_exact_at(bytes, (address / PAGE_BYTES * 8) as u64)?;
        let exists = move |index: &u32| entries[*index as usize] & Self::PRESENT_OR_SWAPPED != 0;
        Ok((0..pages as u32).filter(exists))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_exist() {
        let base = sys::map_anonymous(PAGES_AT_ONCE * PAGE_BYTES).unwrap();
        for page in [3, 400] {
            // SAFETY: just mapped.
            unsafe { ((base + page * PAGE_BYTES) as *mut u8).write_volatile(1) };
        }
        let presence = Presence::open().unwrap();
        let found: Vec<u32> = presence.existing(base, PAGES_AT_ONCE).unwrap().collect();
        assert_eq!(found, [3, 400]);
        let found: Vec<u32> = presence.existing(base + 2 * PAGE_BYTES, 3).unwrap().collect();
        assert_eq!(found, vec![1u32; 1]);
        // SAFETY: mapped above.
        unsafe { sys::unmap_anonymous(base, PAGES_AT_ONCE * PAGE_BYTES).unwrap() };
    }
}
