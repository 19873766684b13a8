//! Chunks with free slots, sorted by the share of their slots that is used.
//!
//! An exact order would cost a search for each allocation and each free: with chunks of 4 KiB there
//! are as many chunks as slots. So the chunks are in classes, each of which spans an eighth.

/// Number of classes. Class `n` has the chunks of which more than `n` eighths are used, but at most
/// `n + 1` eighths.
const CLASSES: usize = 8;

/// The last class whose chunks have at least a quarter of their slots free.
pub(super) const QUARTER_FREE: usize = 5;
/// The last class.
pub(super) const ANY_FREE: usize = CLASSES - 1;

/// Class of a chunk that is not listed.
const NONE: u8 = u8::MAX;

/// Place of a chunk in its class.
#[derive(Clone, Copy)]
struct Entry {
    class: u8,
    at: u32,
}

/// Chunks by class.
#[derive(Default)]
pub(super) struct Fill {
    classes: [Vec<u32>; CLASSES],
    /// By the index of the chunk.
    entries: Vec<Entry>,
}

impl Fill {
    /// Enters the chunk at an index, of which `live` of `1 << pages_log2` slots are used. Removes
    /// the chunk if no slot is free.
    pub fn set(&mut self, index: u32, live: u32, pages_log2: u32) {
        let pages = 1 << pages_log2;
        debug_assert!((1..=pages).contains(&live), "{live} of {pages} slots are used");
        let class = if live == pages { NONE } else { ((8 * live - 1) >> pages_log2) as u8 };
        self.put(index, class);
    }

    /// Removes the chunk at an index, if it is listed.
    pub fn remove(&mut self, index: u32) {
        self.put(index, NONE);
    }

    fn put(&mut self, index: u32, class: u8) {
        if self.entries.len() <= index as usize {
            self.entries.resize(index as usize + 1, Entry { class: NONE, at: 0 });
        }
        let entry = self.entries[index as usize];
        if entry.class == class {
            return;
        }
        if let Some(list) = self.classes.get_mut(entry.class as usize) {
            list.swap_remove(entry.at as usize);
            if let Some(&moved) = list.get(entry.at as usize) {
                self.entries[moved as usize].at = entry.at;
            }
        }
        let mut at = 0;
        if let Some(list) = self.classes.get_mut(class as usize) {
            at = list.len() as u32;
            list.push(index);
        }
        self.entries[index as usize] = Entry { class, at };
    }

    /// Returns the number of listed chunks.
    pub fn count(&self) -> u32 {
        self.classes.iter().map(|list| list.len() as u32).sum()
    }

    /// Returns the listed chunk with a number below [`Fill::count`], in any order.
    pub fn nth(&self, mut number: u32) -> u32 {
        for list in &self.classes {
            match list.get(number as usize) {
                Some(index) => return *index,
                None => number -= list.len() as u32,
            }
        }
        unreachable!("a number below the count names a chunk")
    }

    /// Returns a chunk of the emptiest class with chunks, up to class `last`.
    pub fn emptiest(&self, last: usize) -> Option<u32> {
        self.classes[..=last].iter().find_map(|list| list.last().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_quarter_is_free_up_to_its_class() {
        for pages_log2 in 1..=8 {
            let pages = 1 << pages_log2;
            for live in 1..pages {
                let mut fill = Fill::default();
                fill.set(0, live, pages_log2);
                let is_found = fill.emptiest(QUARTER_FREE).is_some();
                assert_eq!(is_found, 4 * live <= 3 * pages, "{live} of {pages}");
                assert_eq!(fill.emptiest(ANY_FREE), Some(0), "{live} of {pages}");
            }
            let mut fill = Fill::default();
            fill.set(0, pages, pages_log2);
            assert_eq!(fill.emptiest(ANY_FREE), None, "a full chunk");
        }
    }

    proptest! {
        #[test]
        fn found_chunk_is_in_the_emptiest_class(
            steps in proptest::collection::vec((0u32..12, 0u32..=16), 1..200),
        ) {
            let mut fill = Fill::default();
            let mut model = [0u32; 12];
            for (index, live) in steps {
                match live {
                    0 => fill.remove(index),
                    live => fill.set(index, live, 4),
                }
                model[index as usize] = live;
                let class = |live: u32| (live > 0 && live < 16).then(|| (8 * live - 1) / 16);
                let least = model.iter().filter_map(|live| class(*live)).min();
                let found = fill.emptiest(ANY_FREE);
                prop_assert_eq!(found.and_then(|index| class(model[index as usize])), least);
            }
        }
    }
}
