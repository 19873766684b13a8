//! The type-1 windows of a compute node, and the operations that open and close permissions.
//!
//! A window is on the free list or opens one permission. The free list is filled ahead, because the
//! allocation of a window takes a hundred times as long as a bind (Patronus §5.6). It is a queue,
//! so that a key comes again as late as possible; a window whose tags are used up is deallocated.

use std::collections::{BTreeMap, VecDeque};

use scheme::Error;
use verbs::wqe::Umr;
use verbs::{Access, Key, MemoryRegion, MemoryWindow, Nic};

use super::{Opening, rights};
use crate::patronus::message::PermissionNumber;

/// Windows that are allocated in one step.
const STEP: usize = 32;
/// Windows on the free list below which more are allocated.
const LOW: usize = 16;
/// Binds of a window before its tags repeat.
const TAGS: u16 = 255;

/// A window and its current key.
struct Window<N: Nic> {
    mw: N::Mw,
    key: Key,
    /// Tags that were used since the window was allocated.
    used: u16,
}

impl<N: Nic> Window<N> {
    fn new(mw: N::Mw) -> Self {
        let key = mw.key();
        Self { mw, key, used: 0 }
    }

    fn next_tag(&mut self) -> (Key, u8) {
        let (old, tag) = (self.key, self.key.tag().wrapping_add(1));
        self.key = Key::new(old.index(), tag);
        self.used += 1;
        (old, tag)
    }

    fn is_used_up(&self) -> bool {
        self.used + 1 >= TAGS
    }
}

/// The windows of a compute node over the donated memory.
pub struct Windows<N: Nic> {
    /// PD of the windows.
    pd: N::Pd,
    /// The donated memory, registered in the PD with local rights only.
    region: N::Mr,
    free: VecDeque<Window<N>>,
    open: BTreeMap<PermissionNumber, Window<N>>,
}

impl<N: Nic> Windows<N> {
    /// Windows over `region`, in `pd`.
    pub fn new(nic: &N, pd: &N::Pd, region: N::Mr) -> Result<Self, Error> {
        let mut windows =
            Self { pd: pd.clone(), region, free: VecDeque::new(), open: BTreeMap::new() };
        windows.fill(nic)?;
        Ok(windows)
    }

    /// Allocates windows ahead if few are free. True if it did.
    pub fn fill(&mut self, nic: &N) -> Result<bool, Error> {
        if self.free.len() >= LOW {
            return Ok(false);
        }
        let new = nic.alloc_type1_mws(&self.pd, STEP)?;
        self.free.extend(new.into_iter().map(Window::new));
        Ok(true)
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        self.free.len() + self.open.len()
    }

    /// Key of an open permission.
    pub fn key(&self, number: PermissionNumber) -> Option<Key> {
        self.open.get(&number).map(|window| window.key)
    }

    /// The UMR that opens a range for a permission; `None` if the NIC has no window left.
    pub fn bind(&mut self, nic: &N, opening: &Opening) -> Option<Umr> {
        if self.free.is_empty() && self.fill(nic).is_err() {
            return None;
        }
        let window = self.free.pop_front()?;
        Some(self.bind_window(window, opening))
    }

    /// The UMR that closes a permission and opens a range for another one with the same window (MW
    /// handover, Patronus §5.4); `None` if the window's tags are used up.
    pub fn rebind(&mut self, old: PermissionNumber, opening: &Opening) -> Option<Umr> {
        if self.open.get(&old)?.is_used_up() {
            return None;
        }
        let window = self.open.remove(&old).expect("just seen");
        Some(self.bind_window(window, opening))
    }

    fn bind_window(&mut self, mut window: Window<N>, opening: &Opening) -> Umr {
        let Opening { number, place, right, .. } = *opening;
        let (key, tag) = window.next_tag();
        let start = self.region.memory().addr() + place.offset;
        let len = u32::try_from(place.len).expect("an object is shorter than 4 GiB");
        let umr = Umr::bind_type1(key, tag, rights(right), self.region.key(), start, len);
        self.open.insert(number, window);
        umr
    }

    /// The UMR that closes a permission; `None` if the permission has no window.
    pub fn unbind(&mut self, number: PermissionNumber) -> Option<Umr> {
        let window = self.open.get_mut(&number)?;
        let (key, tag) = window.next_tag();
        let start = self.region.memory().addr();
        Some(Umr::bind_type1(key, tag, Access::NONE, self.region.key(), start, 0))
    }

    /// Returns the window of a closed permission to the free list, after the unbind has completed.
    pub fn release(&mut self, number: PermissionNumber) {
        let Some(window) = self.open.remove(&number) else { return };
        if !window.is_used_up() {
            self.free.push_back(window);
        }
    }

    /// Deallocates the window of a permission, which invalidates its key: its bind or unbind has
    /// failed.
    pub fn discard(&mut self, number: PermissionNumber) {
        if let Some(Window { mw, .. }) = self.open.remove(&number) {
            drop(mw);
        }
    }
}

#[cfg(test)]
mod tests {
    use rnic::nic::SoftNic;
    use scheme::{GroupId, Right};

    use super::*;
    use crate::patronus::book::Place;

    fn opening(serial: u64, slot: u32, right: Right) -> Opening {
        let (number, group) = (PermissionNumber::new(serial, slot), GroupId(0));
        let place = Place { offset: 64, len: 64 };
        Opening { number, place, right, group, has_hole: false }
    }

    /// The NIC uses the index of a deallocated window again only after others, so that a key comes
    /// again after thousands of permissions.
    #[test]
    fn keys_come_again_late() {
        let nic = SoftNic::inline();
        let pd = nic.alloc_pd().unwrap();
        let memory = nic.alloc_dma(4096).unwrap();
        let region = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let mut windows = Windows::new(&nic, &pd, region).unwrap();
        let mut last = BTreeMap::new();
        let mut use_key = |key: Option<Key>, serial: u64| {
            let before = last.insert(key.expect("an open permission").0, serial);
            assert!(before.is_none_or(|before| serial - before > 4_000), "{before:?}, {serial}");
        };
        for serial in 1..20_000 {
            let number = PermissionNumber::new(serial, 0);
            windows.bind(&nic, &opening(serial, 0, Right::Read)).unwrap();
            use_key(windows.key(number), serial);
            let next = PermissionNumber::new(serial, 1);
            let open = match serial % 3 == 0 {
                true => windows.rebind(number, &opening(serial, 1, Right::Write)).map(|_| next),
                false => None,
            };
            if open.is_some() {
                use_key(windows.key(next), serial);
            }
            windows.unbind(open.unwrap_or(number)).unwrap();
            windows.release(open.unwrap_or(number));
            windows.fill(&nic).unwrap();
            assert!(windows.free.iter().all(|window| window.used < TAGS), "a tag repeats");
        }
        assert!(windows.count() < 2 * (STEP + LOW), "{} windows", windows.count());
    }
}
