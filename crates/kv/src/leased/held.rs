//! The permissions that a compute node has.

use std::collections::HashMap;
use std::ops::Range;

use pool::{LeaseTerms, Permission, Right, Sharing};
use smallvec::SmallVec;

use super::names::Short;

/// Permissions of one object.
type Ones = SmallVec<[Held; 2]>;

/// A permission with its range.
#[derive(Clone, Debug)]
struct Held {
    permission: Permission,
    start: u64,
    end: u64,
    right: Right,
}

/// The permissions of a compute node, by object.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    objects: HashMap<Short, Ones>,
    /// Number of objects from which on ended permissions are forgotten.
    full: usize,
}

/// Least number of objects at which ended permissions are looked for.
const FULL_MIN: usize = 256;

impl Holdings {
    /// The permission that opens a range with the right, and the offset of the permission's first
    /// byte in the object. Of several ones the latest.
    pub fn find(&self, name: Short, range: &Range<u64>, right: Right) -> Option<(Permission, u64)> {
        let opens = |held: &&Held| {
            held.start <= range.start && range.end <= held.end && right <= held.right
        };
        let held = self.objects.get(&name)?.iter().rev().find(opens)?;
        Some((held.permission.clone(), held.start))
    }

    /// Adds a permission. `is_open` tells whether another permission is still open.
    pub fn add(
        &mut self,
        name: Short,
        range: Range<u64>,
        permission: &Permission,
        is_open: impl Fn(&Permission) -> bool,
    ) {
        if self.objects.len() >= self.full.max(FULL_MIN) {
            self.objects.retain(|_, held| {
                held.retain(|held| is_open(&held.permission));
                !held.is_empty()
            });
            self.full = 2 * self.objects.len();
        }
        let held = self.objects.entry(name).or_default();
        held.retain(|held| is_open(&held.permission));
        let right = permission.terms().right;
        held.push(Held {
            permission: permission.clone(),
            start: range.start,
            end: range.end,
            right,
        });
    }

    /// Forgets a permission.
    pub fn forget(&mut self, name: Short, permission: &Permission) {
        let number = permission.lease().number;
        if let Some(held) = self.objects.get_mut(&name) {
            held.retain(|held| held.permission.lease().number != number);
            if held.is_empty() {
                self.objects.remove(&name);
            }
        }
    }

    /// Forgets the permissions that conflict with a permission of these terms, and returns them.
    pub fn take_conflicting(
        &mut self,
        name: Short,
        range: &Range<u64>,
        terms: &LeaseTerms,
    ) -> Vec<Permission> {
        let Some(held) = self.objects.get_mut(&name) else { return Vec::new() };
        let mut taken = Vec::new();
        held.retain(|held| {
            let overlaps = held.start < range.end && range.start < held.end;
            let sharing = [terms.sharing, held.permission.terms().sharing];
            let conflicts = overlaps && sharing.contains(&Sharing::Exclusive);
            if conflicts {
                taken.push(held.permission.clone());
            }
            !conflicts
        });
        taken
    }

    /// Forgets the permissions of an object.
    pub fn forget_object(&mut self, name: Short) {
        self.objects.remove(&name);
    }

    /// The permissions.
    #[cfg(test)]
    pub fn all(&self) -> Vec<Permission> {
        self.objects.values().flatten().map(|held| held.permission.clone()).collect()
    }

    /// Forgets all permissions, and returns them.
    pub fn take_all(&mut self) -> Vec<Permission> {
        let all = std::mem::take(&mut self.objects);
        all.into_values().flatten().map(|held| held.permission).collect()
    }
}
