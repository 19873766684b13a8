//! Key namespaces: the assignment of functions to key tables.
//!
//! ```text
//!   physical function ─┐
//!   attached clients ──┴─> namespace 0  each entry records its function
//!   function that the owner opened ─> a separate namespace, for the lifetime of the function
//! ```
//!
//! A key has a 24-bit index (IBTA vol. 1, §10.6), so one table holds at most 16.7 million keys. For
//! more keys, a NIC has several functions, each with its own table (FineMem §4.3). Clients'
//! functions share one table with the physical function: they need few keys, and every key number
//! in that table names one object.
//!
//! Invariants:
//! - A QP looks up keys only in the namespace of its function. Keys of other namespaces do not
//!   exist for the QP.
//! - A namespace is destroyed with its function. The next namespace with the same number starts
//!   empty.

use std::ops::{Index, IndexMut};

use crate::protection::{KeyRange, KeyTable};
use verbs::Qpn;

/// Number of a key namespace.
pub(crate) type Namespace = u32;

/// The key tables of a NIC.
pub(crate) struct KeyNamespaces {
    /// Namespace 0. Most NICs have no other, so lookups in it avoid an indirection through a list.
    first: KeyTable,
    /// Namespaces 1 and up.
    others: Vec<KeyTable>,
    unused: Vec<Namespace>,
    /// Maximum number of keys in one table.
    max: u32,
}

impl KeyNamespaces {
    /// The namespace of the physical function and of clients' functions.
    pub const FIRST: Namespace = 0;

    /// Creates the first namespace. Every namespace holds up to `max` keys.
    pub fn new(max: u32) -> Self {
        Self { first: KeyTable::new(max), others: Vec::new(), unused: Vec::new(), max }
    }

    /// Creates a namespace for one function.
    pub fn add(&mut self) -> Namespace {
        self.unused.pop().unwrap_or_else(|| {
            self.others.push(KeyTable::new(self.max));
            self.others.len() as Namespace
        })
    }

    /// Destroys the namespace of a removed function.
    pub fn remove(&mut self, namespace: Namespace) {
        assert_ne!(namespace, Self::FIRST, "the physical function's namespace is permanent");
        self[namespace] = KeyTable::new(self.max);
        self.unused.push(namespace);
    }

    /// Returns whether a window may be bound to `qpn`. Approximate (hashed count): no false
    /// negatives, possible false positives.
    pub fn may_have_window(&self, qpn: Qpn) -> bool {
        self.all().any(|table| table.may_have_window(qpn))
    }

    /// Returns the keys that give access to any of the `len` bytes from `start`. The PD of a key
    /// identifies its function.
    pub fn keys_over(&self, start: u64, len: u64) -> Vec<KeyRange> {
        self.all().flat_map(|table| table.keys_over(start, len)).collect()
    }

    fn all(&self) -> impl Iterator<Item = &KeyTable> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl Index<Namespace> for KeyNamespaces {
    type Output = KeyTable;

    #[inline]
    fn index(&self, namespace: Namespace) -> &KeyTable {
        match namespace {
            Self::FIRST => &self.first,
            _ => &self.others[namespace as usize - 1],
        }
    }
}

impl IndexMut<Namespace> for KeyNamespaces {
    #[inline]
    fn index_mut(&mut self, namespace: Namespace) -> &mut KeyTable {
        match namespace {
            Self::FIRST => &mut self.first,
            _ => &mut self.others[namespace as usize - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbs::{FunctionId, MwKind};

    #[test]
    fn reused_namespace_starts_empty() {
        let mut namespaces = KeyNamespaces::new(4);
        let (pd, f) = (verbs::Pdn::new(16), FunctionId(1));
        let a = namespaces.add();
        let b = namespaces.add();
        assert_eq!((a, b), (1, 2));
        let keys = [(); 4].map(|()| namespaces[a].allocate_window(f, pd, MwKind::Type1).unwrap());
        assert!(
            namespaces[a].allocate_window(f, pd, MwKind::Type1).is_err(),
            "the key table is full"
        );
        // Namespace b has the same capacity and assigns the same numbers.
        assert_eq!(namespaces[b].allocate_window(f, pd, MwKind::Type1).unwrap(), keys[0]);
        namespaces.remove(a);
        assert_eq!(namespaces.add(), a);
        assert!(namespaces[a].describe(f, keys[0].index()).is_err());
        assert!(namespaces[b].describe(f, keys[0].index()).is_ok());
    }

    /// The memory per key as documented in docs/internals/rnic.md.
    #[test]
    fn key_size_matches_the_documentation() {
        assert_eq!(crate::protection::KEY_BYTES, 80);
        assert!(
            size_of::<crate::engine::qp::Qp>() <= 512,
            "{}",
            size_of::<crate::engine::qp::Qp>()
        );
    }
}
