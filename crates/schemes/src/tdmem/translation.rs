//! The compute node's translation table (TDMEM §5.4.1, figure 11): the place of each page, and
//! whether a store or loads of the page are pending.
//!
//! A page is named by its position in the table (the paper's swap offset). The compute node chooses
//! names itself. An entry has 8 bytes. The MAC of figure 11 belongs to the layer that seals pages.

use std::future::poll_fn;
use std::task::{Poll, Waker};

use parking_lot::Mutex;
use scheme::Error;
use scheme::index::EntryId;

use super::Tier;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// The name is not in use.
    Unused,
    /// The page was never stored: it is zero.
    Empty,
    /// The page is stored.
    Valid,
    /// A command failed: it may or may not have been executed.
    Unknown,
}

/// The place of a stored page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The tier.
    pub tier: Tier,
    /// Number of the page in the tier's memory.
    pub page: u32,
}

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    page: u32,
    /// Number of pending loads, or [`STORE`].
    pending: u16,
    tier: Tier,
    state: State,
}

/// Value of [`Entry::pending`] while a store is pending.
const STORE: u16 = u16::MAX;

const UNUSED: Entry = Entry { page: 0, pending: 0, tier: Tier::Local, state: State::Unused };

const _: () = assert!(size_of::<Entry>() == 8);

impl Entry {
    /// The state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The place of a page in state [`State::Valid`].
    pub fn place(&self) -> Option<Place> {
        let Self { tier, page, .. } = *self;
        (self.state == State::Valid).then_some(Place { tier, page })
    }
}

/// The table. Its operations may be called by several threads.
pub struct Translation {
    rows: Mutex<Rows>,
}

struct Rows {
    entries: Vec<Entry>,
    /// Number of names.
    end: u32,
    /// Names that were used and are free again.
    free: Vec<u32>,
    /// Waits for pending operations.
    waiting: Vec<Waker>,
}

/// The right to change an entry, until it is dropped: no other store and no load is pending.
pub struct Change<'a> {
    table: &'a Translation,
    name: u32,
}

/// A pending load of a page.
pub struct Load<'a> {
    table: &'a Translation,
    name: u32,
}

impl Translation {
    /// A table for names below `end`.
    pub fn new(end: u32) -> Self {
        let rows = Rows { entries: Vec::new(), end, free: Vec::new(), waiting: Vec::new() };
        Self { rows: Mutex::new(rows) }
    }

    /// Takes a name that is not in use.
    pub fn allocate(&self) -> Option<u32> {
        let mut rows = self.rows.lock();
        let empty = Entry { state: State::Empty, ..UNUSED };
        if let Some(name) = rows.free.pop() {
            rows.entries[name as usize] = empty;
            return Some(name);
        }
        let name = rows.entries.len() as u32;
        if name >= rows.end {
            return None;
        }
        rows.entries.push(empty);
        Some(name)
    }

    /// Waits until nothing is pending on the page; then a change is pending. Returns the entry
    /// before it.
    ///
    /// # Errors
    /// The name is not in use.
    pub async fn change(&self, name: u32) -> Result<(Entry, Change<'_>), Error> {
        poll_fn(|cx| {
            let mut rows = self.rows.lock();
            let entry = match rows.entry(name) {
                Ok(entry) => entry,
                Err(e) => return Poll::Ready(Err(e)),
            };
            if entry.pending > 0 {
                rows.waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            let before = *entry;
            entry.pending = STORE;
            Poll::Ready(Ok((before, Change { table: self, name })))
        })
        .await
    }

    /// Waits until no change is pending on the page; then a load is pending. Returns the entry.
    ///
    /// # Errors
    /// The name is not in use.
    pub async fn load(&self, name: u32) -> Result<(Entry, Load<'_>), Error> {
        poll_fn(|cx| {
            let mut rows = self.rows.lock();
            let entry = match rows.entry(name) {
                Ok(entry) => entry,
                Err(e) => return Poll::Ready(Err(e)),
            };
            if entry.pending >= STORE - 1 {
                rows.waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            entry.pending += 1;
            Poll::Ready(Ok((*entry, Load { table: self, name })))
        })
        .await
    }

    /// Sets the place of a page.
    pub fn set_place(&self, name: u32, place: Place) {
        self.set(name, |entry| {
            (entry.tier, entry.page, entry.state) = (place.tier, place.page, State::Valid);
        });
    }

    /// Sets the state of a page.
    pub fn set_state(&self, name: u32, state: State) {
        self.set(name, |entry| entry.state = state);
    }

    fn set(&self, name: u32, set: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.rows.lock().entries.get_mut(name as usize) {
            set(entry);
        }
    }

    /// Ends a pending operation, and wakes all that wait.
    fn end(&self, name: u32, end: impl FnOnce(&mut Rows, usize)) {
        let waiting = {
            let mut rows = self.rows.lock();
            end(&mut rows, name as usize);
            std::mem::take(&mut rows.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Rows {
    /// The entry of a name in use.
    fn entry(&mut self, name: u32) -> Result<&mut Entry, Error> {
        let entry = self.entries.get_mut(name as usize);
        entry
            .filter(|entry| entry.state != State::Unused)
            .ok_or(Error::NotYours { entry: EntryId::new(name) })
    }
}

impl Change<'_> {
    /// Ends the change and the use of the name.
    pub fn forget(self) {
        self.table.end(self.name, |rows, name| {
            rows.entries[name] = UNUSED;
            rows.free.push(self.name);
        });
        // From now on the name may have another user.
        std::mem::forget(self);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.table.end(self.name, |rows, name| rows.entries[name].pending = 0);
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.table.end(self.name, |rows, name| rows.entries[name].pending -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn changes_wait_for_loads_and_loads_for_changes() {
        let table = Translation::new(2);
        let name = table.allocate().unwrap();
        let (entry, first) = now(table.load(name)).unwrap().unwrap();
        assert_eq!((entry.state(), entry.place()), (State::Empty, None));
        let (_, second) = now(table.load(name)).unwrap().unwrap();
        assert!(now(table.change(name)).is_none(), "two loads are pending");
        drop(first);
        assert!(now(table.change(name)).is_none(), "a load is pending");
        drop(second);
        let (before, change) = now(table.change(name)).unwrap().unwrap();
        assert_eq!(before.state(), State::Empty);
        assert!(now(table.load(name)).is_none() && now(table.change(name)).is_none());
        let place = Place { tier: Tier::Dram, page: 7 };
        table.set_place(name, place);
        drop(change);
        assert_eq!(now(table.load(name)).unwrap().unwrap().0.place(), Some(place));
    }

    #[test]
    fn names_are_reused_and_unused_names_are_refused() {
        let table = Translation::new(2);
        let (a, b) = (table.allocate().unwrap(), table.allocate().unwrap());
        assert_eq!((a, b, table.allocate()), (0, 1, None));
        table.set_place(b, Place { tier: Tier::Fast, page: 1 });
        now(table.change(b)).unwrap().unwrap().1.forget();
        assert!(matches!(now(table.load(b)).unwrap(), Err(Error::NotYours { .. })));
        assert!(matches!(now(table.change(9)).unwrap(), Err(Error::NotYours { .. })));
        assert_eq!(table.allocate(), Some(b));
        assert_eq!(now(table.load(b)).unwrap().unwrap().0.state(), State::Empty);
    }
}
