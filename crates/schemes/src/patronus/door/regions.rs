//! Regions as doors: each permission registers its range (the MR-based solution of Patronus §3.3).

use std::collections::BTreeMap;

use verbs::{DmaMemory, Key, MemoryRegion, Nic};

use super::{Change, Opening, rights};
use crate::patronus::message::PermissionNumber;
use verbs::Access;

/// The regions of a compute node.
pub struct Regions<N: Nic> {
    pd: N::Pd,
    memory: DmaMemory,
    open: BTreeMap<PermissionNumber, N::Mr>,
}

impl<N: Nic> Regions<N> {
    /// Regions of `memory` in `pd`.
    pub fn new(pd: &N::Pd, memory: &DmaMemory) -> Self {
        Self { pd: pd.clone(), memory: memory.clone(), open: BTreeMap::new() }
    }

    /// Number of regions.
    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// Key of an open permission.
    pub fn key(&self, number: PermissionNumber) -> Option<Key> {
        self.open.get(&number).map(|region| region.key())
    }

    /// Registers the range of a permission.
    pub fn register(&mut self, nic: &N, opening: &Opening) -> Change {
        let Opening { number, place, right, .. } = *opening;
        let range = self.memory.slice(place.offset as usize, place.len as usize);
        let range = range.expect("an object lies in the donated memory");
        let rights = rights(right) | Access::LOCAL_WRITE;
        match nic.reg_mr(&self.pd, &range, rights) {
            Ok(region) => {
                self.open.insert(number, region);
                Change::Done
            }
            Err(_) => Change::Impossible,
        }
    }

    /// Deregisters the range of a permission, which invalidates its key.
    pub fn deregister(&mut self, number: PermissionNumber) {
        drop(self.open.remove(&number));
    }
}
