//! Permissions of a compute node, and the slots in which they are.
//!
//! A slot has one lifetime word, and one permission at a time. Requests that wait have a slot, too.

use scheme::{GroupId, Right, Sharing};

use super::deadlines::Moment;
use super::{ClientId, PermissionState};
use crate::patronus::message::{AskTerms, Lifetime, PermissionNumber};

/// Position of a permission: its compute node and slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    pub client: ClientId,
    pub slot: u32,
}

/// The kind of a request that waits for the opening of its permission.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Asked {
    Allocate,
    Acquire,
    Renew,
}

/// A request that will be answered when its permission is open.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    pub number: u64,
    pub asked: Asked,
    /// Arrival of the request.
    pub since: Moment,
}

/// A permission, or a request that waits for one.
#[cfg_attr(test, derive(Clone))]
pub struct Permission {
    /// Entry of the object.
    pub object: u32,
    pub group: GroupId,
    pub right: Right,
    pub sharing: Sharing,
    /// The range in the object.
    pub offset: u64,
    pub len: u64,
    /// The lease asked for; [`AskTerms::FOREVER`]: none.
    pub lease_us: u64,
    pub pending: Option<Pending>,
    pub state: PermissionState,
    /// Its header is in the hole in front of the object.
    pub is_in_hole: bool,
    /// Must be closed once it is open.
    pub is_doomed: bool,
    /// The lease cannot be extended any more: the deadline is final.
    pub is_noticed: bool,
    /// Permissions and earlier waiters of the object with which this waiter conflicts.
    pub blockers: u32,
    /// Start of the lease.
    pub start: Moment,
    /// End of the wait or, as far as it is known, of the lease.
    pub deadline: Moment,
}

impl Permission {
    /// True if the two cannot be open at the same time.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let are_shared = self.sharing == Sharing::Shared && other.sharing == Sharing::Shared;
        !are_shared
            && self.offset < other.offset + other.len
            && other.offset < self.offset + self.len
    }

    /// True if the permission has no lease.
    pub fn is_endless(&self) -> bool {
        self.lease_us == AskTerms::FOREVER
    }

    /// End of the lease as the holder's lifetime word has it. A word with a foreign nonce, which
    /// only its holder can have written, changes nothing.
    pub fn end_by(&self, word: Lifetime, nonce: u16, lease_max_us: u64) -> Moment {
        match word.nonce() == nonce {
            true => self.start.after(word.micros().min(lease_max_us)),
            false => self.deadline,
        }
    }
}

/// A slot of a compute node.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Slot {
    /// Permissions that were in the slot so far, with the one that is in it now.
    pub serial: u64,
    pub permission: Option<Permission>,
}

/// Bytes that a permission takes in the tables: its slot, its place among the holders of its
/// object, its deadline and its lifetime word. Free space and nodes of the collections come in
/// addition.
pub const PERMISSION_BYTES: usize =
    size_of::<Slot>() + size_of::<Key>() + size_of::<(Moment, Key)>() + size_of::<Lifetime>();

// The bound of the design.
const _: () = assert!(PERMISSION_BYTES <= 128);

/// Slots with consecutive numbers. Those that were never used have no memory.
#[cfg_attr(test, derive(Clone))]
#[derive(Default)]
struct Area {
    slots: Vec<Slot>,
    /// Slots without a permission; the last one is used first.
    free: Vec<u32>,
}

impl Area {
    fn insert(&mut self, permission: Permission) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let state = &mut self.slots[slot as usize];
        state.serial += 1;
        state.permission = Some(permission);
        slot
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    fn occupied(&self) -> impl Iterator<Item = (u32, &Permission)> {
        let slots = (0u32..).zip(&self.slots);
        slots.filter_map(|(at, slot)| Some((at, slot.permission.as_ref()?)))
    }

    fn audit(&self) -> Result<(), String> {
        let mut free = self.free.clone();
        free.sort_unstable();
        let slots = (0u32..).zip(&self.slots);
        let vacant = slots.filter(|(_, slot)| slot.permission.is_none()).map(|(at, _)| at);
        match vacant.eq(free.iter().copied()) {
            true => Ok(()),
            false => Err(format!("the list of free slots is {free:?}")),
        }
    }
}

/// Number of the first slot for permissions without leases.
const ENDLESS: u32 = PermissionNumber::LEASED_MAX;

/// The slots of a compute node: those for permissions with leases, which have lifetime words and a
/// limit, and those for permissions without leases, which memory limits.
#[cfg_attr(test, derive(Clone))]
pub struct Slots {
    leased: Area,
    endless: Area,
    most: u32,
}

impl Slots {
    /// `most` slots for permissions with leases.
    pub fn new(most: u32) -> Self {
        let most = most.min(ENDLESS);
        Self { leased: Area::default(), endless: Area::default(), most }
    }

    /// True if no slot is free for a permission with a lease, or for one without.
    pub fn are_full(&self, is_endless: bool) -> bool {
        let (area, most) = match is_endless {
            true => (&self.endless, PermissionNumber::SLOTS_MAX - ENDLESS),
            false => (&self.leased, self.most),
        };
        area.free.is_empty() && area.slots.len() >= most as usize
    }

    /// True if no slot has a permission.
    pub fn are_empty(&self) -> bool {
        self.leased.is_empty() && self.endless.is_empty()
    }

    /// Slots that were used and have no permission, in the order in which they are used again.
    #[cfg(test)]
    pub fn free_slots(&self) -> [&[u32]; 2] {
        [&self.leased.free, &self.endless.free]
    }

    /// Puts a permission into a slot. One must be free.
    pub fn insert(&mut self, permission: Permission) -> u32 {
        match permission.is_endless() {
            true => ENDLESS + self.endless.insert(permission),
            false => self.leased.insert(permission),
        }
    }

    /// Takes the permission out of a slot.
    pub fn remove(&mut self, slot: u32) -> Permission {
        let (area, at) = match slot.checked_sub(ENDLESS) {
            Some(at) => (&mut self.endless, at),
            None => (&mut self.leased, slot),
        };
        area.free.push(at);
        area.slots[at as usize].permission.take().expect("a permission in the slot")
    }

    /// The slot, if it was ever used.
    pub fn get(&self, slot: u32) -> Option<&Slot> {
        match slot.checked_sub(ENDLESS) {
            Some(at) => self.endless.slots.get(at as usize),
            None => self.leased.slots.get(slot as usize),
        }
    }

    /// The slot, if it was ever used.
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Slot> {
        match slot.checked_sub(ENDLESS) {
            Some(at) => self.endless.slots.get_mut(at as usize),
            None => self.leased.slots.get_mut(slot as usize),
        }
    }

    /// The slots with permissions.
    pub fn occupied(&self) -> impl Iterator<Item = (u32, &Permission)> {
        let endless = self.endless.occupied().map(|(at, permission)| (ENDLESS + at, permission));
        self.leased.occupied().chain(endless)
    }

    /// Checks that each slot is free or has a permission.
    pub fn audit(&self) -> Result<(), String> {
        self.leased.audit()?;
        self.endless.audit()?;
        match self.leased.slots.len() <= self.most as usize {
            true => Ok(()),
            false => Err(format!("{} slots", self.leased.slots.len())),
        }
    }
}
