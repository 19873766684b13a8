//! The table of objects.

use std::collections::VecDeque;

use scheme::{ClientId, Others};

use super::Place;
use super::members::DomainId;
use super::permissions::Key;
use super::slabs::Piece;
use crate::patronus::message::{ObjectId, PermissionNumber};

/// The bytes in front of an object, for the header of a permission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hole {
    /// The object has no hole.
    None,
    /// No permission has its header there.
    Free,
    /// A permission has its header there.
    Taken,
}

/// An object.
#[cfg_attr(test, derive(Clone))]
pub struct Object {
    /// The compute node that allocated it; `None` if it has departed, and the object is shared.
    pub owner: Option<ClientId>,
    /// Domain of the compute node that allocated it.
    pub domain: Option<DomainId>,
    pub others: Others,
    pub piece: Piece,
    /// The bytes that permissions may open.
    pub place: Place,
    /// The permission that its allocation granted.
    pub first: Option<PermissionNumber>,
    /// Permissions that are opening, open or closing.
    pub holders: Vec<Key>,
    /// Requests that wait, in the order of their arrival.
    pub queue: VecDeque<Key>,
    pub hole: Hole,
    /// A permission was opened, so that the memory may not be zero.
    pub was_open: bool,
    pub freeing: Option<Freeing>,
}

/// State of an object that is being freed.
#[cfg_attr(test, derive(Clone))]
pub struct Freeing {
    /// The request that is answered when the object is released.
    pub request: Option<(ClientId, u64)>,
    /// Its memory is being cleared.
    pub is_clearing: bool,
}

/// Entry of the table.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
struct Entry {
    /// Number of earlier objects with this entry.
    generation: u32,
    object: Option<Object>,
}

/// The table of objects.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Objects {
    entries: Vec<Entry>,
    /// Entries without an object; the last one is used first.
    free: Vec<u32>,
}

impl Objects {
    /// Adds an object and returns its entry.
    pub fn insert(&mut self, object: Object) -> u32 {
        let entry = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.entries.len() as u32 - 1
        });
        self.entries[entry as usize].object = Some(object);
        entry
    }

    /// Removes an object. Its name never comes again: an entry that has had all generations stays
    /// unused.
    pub fn remove(&mut self, entry: u32) -> Object {
        let state = &mut self.entries[entry as usize];
        let object = state.object.take().expect("an object of the table");
        if let Some(next) = state.generation.checked_add(1) {
            state.generation = next;
            self.free.push(entry);
        }
        object
    }

    /// The name of the object of an entry.
    pub fn id(&self, entry: u32) -> ObjectId {
        ObjectId { entry, generation: self.entries[entry as usize].generation }
    }

    /// The object of this name.
    pub fn find(&self, id: ObjectId) -> Option<&Object> {
        let state = self.entries.get(id.entry as usize)?;
        state.object.as_ref().filter(|_| state.generation == id.generation)
    }

    /// The object with an entry that a peer named.
    pub fn with_entry(&self, entry: u32) -> Option<&Object> {
        self.entries.get(entry as usize)?.object.as_ref()
    }

    /// The object of an entry, which must exist.
    pub fn at(&self, entry: u32) -> &Object {
        self.with_entry(entry).expect("an object of the table")
    }

    /// The object of an entry, which must exist.
    pub fn at_mut(&mut self, entry: u32) -> &mut Object {
        self.entries[entry as usize].object.as_mut().expect("an object of the table")
    }

    /// All objects with their entries.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Object)> {
        let entries = (0u32..).zip(&self.entries);
        entries.filter_map(|(at, entry)| Some((at, entry.object.as_ref()?)))
    }

    /// Checks that each entry is free, or has an object, or has had all generations.
    pub fn audit(&self) -> Result<(), String> {
        let mut free = self.free.clone();
        free.sort_unstable();
        let entries = (0u32..).zip(&self.entries);
        let vacant = entries.filter(|(_, entry)| entry.object.is_none());
        let usable = vacant
            .filter(|(at, entry)| entry.generation != u32::MAX || free.binary_search(at).is_ok());
        match usable.map(|(at, _)| at).eq(free.iter().copied()) {
            true => Ok(()),
            false => Err(format!("the list of free entries is {free:?}")),
        }
    }
}
