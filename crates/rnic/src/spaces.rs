//! Key spaces: which key table a function's keys are in.
//!
//! ```text
//!   physical function ─┐
//!   attached clients ──┴─> space 0      each entry knows whose it is
//!   function that the owner has opened ─> a space of its own, for as long as the function lives
//! ```
//!
//! A key is 24 bits of index (IBTA vol. 1, §10.6), so that one table ends at 16.7 million keys. A NIC has more by having
//! several functions, each with a table of its own (FineMem §4.3). The functions of clients share one table with
//! the physical function: they need few keys, and no number there names two things.
//!
//! Invariants:
//! - A QP looks keys up in the space of its function, and in no other: those of other spaces do not exist for it.
//! - A space ends with its function; nothing of it is left for the next one with its number.

use std::ops::{Index, IndexMut};

use crate::ids::Qpn;
use crate::protection::{KeyTable, Opening};

/// The number of a key space.
pub(crate) type Space = u32;

/// The key tables of a NIC.
pub(crate) struct KeySpaces {
    /// Most NICs have no other: it is reached without a look into a list.
    first: KeyTable,
    /// From space 1 on.
    others: Vec<KeyTable>,
    unused: Vec<Space>,
    /// Keys of a table at most.
    max: u32,
}

impl KeySpaces {
    /// The space of the physical function, and of clients.
    pub const FIRST: Space = 0;

    /// The first space, of up to `max` keys, as all others have.
    pub fn new(max: u32) -> Self {
        Self { first: KeyTable::new(max), others: Vec::new(), unused: Vec::new(), max }
    }

    /// A space for one function.
    pub fn add(&mut self) -> Space {
        self.unused.pop().unwrap_or_else(|| {
            self.others.push(KeyTable::new(self.max));
            self.others.len() as Space
        })
    }

    /// Ends the space of a function that has ended.
    pub fn remove(&mut self, space: Space) {
        assert_ne!(space, Self::FIRST, "the physical function stays");
        self[space] = KeyTable::new(self.max);
        self.unused.push(space);
    }

    /// False if no window is bound to `qpn`; true if one is, or one to a number that looks like it.
    pub fn may_name(&self, qpn: Qpn) -> bool {
        self.all().any(|table| table.may_name(qpn))
    }

    /// The keys that open some of the `len` bytes from `start` on. PDs tell whose they are.
    pub fn over(&self, start: u64, len: u64) -> Vec<Opening> {
        self.all().flat_map(|table| table.over(start, len)).collect()
    }

    fn all(&self) -> impl Iterator<Item = &KeyTable> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl Index<Space> for KeySpaces {
    type Output = KeyTable;

    #[inline]
    fn index(&self, space: Space) -> &KeyTable {
        match space {
            Self::FIRST => &self.first,
            _ => &self.others[space as usize - 1],
        }
    }
}

impl IndexMut<Space> for KeySpaces {
    #[inline]
    fn index_mut(&mut self, space: Space) -> &mut KeyTable {
        match space {
            Self::FIRST => &mut self.first,
            _ => &mut self.others[space as usize - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::FunctionId;
    use crate::verbs::MwKind;

    #[test]
    fn a_space_begins_anew() {
        let mut spaces = KeySpaces::new(4);
        let (pd, f) = (crate::ids::Pdn::new(16), FunctionId(1));
        let a = spaces.add();
        let b = spaces.add();
        assert_eq!((a, b), (1, 2));
        let keys = [(); 4].map(|()| spaces[a].allocate_window(f, pd, MwKind::Type1).unwrap());
        assert!(spaces[a].allocate_window(f, pd, MwKind::Type1).is_err(), "it is full");
        // As many again, under the same numbers.
        assert_eq!(spaces[b].allocate_window(f, pd, MwKind::Type1).unwrap(), keys[0]);
        spaces.remove(a);
        assert_eq!(spaces.add(), a);
        assert!(spaces[a].describe(f, keys[0].index()).is_err());
        assert!(spaces[b].describe(f, keys[0].index()).is_ok());
    }

    /// What docs/rnic.md says of the memory that keys take.
    #[test]
    fn a_key_takes_as_much_as_the_docs_say() {
        assert_eq!(crate::protection::KEY_BYTES, 80);
        assert!(size_of::<crate::qp::Qp>() <= 512, "{}", size_of::<crate::qp::Qp>());
    }
}
