//! Type-2 windows as doors: one for each lane, bound to the lane's QP (OneSidedMW §4.1).
//!
//! A type-2 window cannot be rebound while it is bound, so there is no handover. It is bound by an
//! operation on its QP. If that QP is in the error state after a bad access of its compute node,
//! the worker re-establishes it.

use std::collections::{BTreeMap, VecDeque};

use scheme::client_table::AccessQps;
use scheme::{Error, GroupId, Lane};
use smallvec::SmallVec;
use verbs::wqe::Umr;
use verbs::{Key, MemoryRegion, MemoryWindow, Nic, QueuePair};

use super::{Change, Opening, Post, PostTo, rights};
use crate::patronus::message::PermissionNumber;

/// Windows that are allocated in one step.
const STEP: usize = 32;
/// Windows on the free list below which more are allocated.
const LOW: usize = 16;
/// Binds of a window before its tags repeat.
const TAGS: u16 = 255;

struct Window<N: Nic> {
    mw: N::Mw,
    key: Key,
    /// Tags that were used since the window was allocated.
    used: u16,
}

/// The windows of an open permission, by lane.
struct Open<N: Nic> {
    group: GroupId,
    windows: SmallVec<[Window<N>; 2]>,
}

/// The windows of a compute node over the donated memory.
pub struct QpWindows<N: Nic> {
    pd: N::Pd,
    /// The donated memory, registered in the PD with local rights only.
    region: N::Mr,
    lanes: usize,
    free: VecDeque<Window<N>>,
    open: BTreeMap<PermissionNumber, Open<N>>,
}

impl<N: Nic> QpWindows<N> {
    /// Windows over `region`, in `pd`, for groups of `lanes` QPs.
    pub fn new(nic: &N, pd: &N::Pd, region: N::Mr, lanes: usize) -> Result<Self, Error> {
        let (free, open) = (VecDeque::new(), BTreeMap::new());
        let mut windows = Self { pd: pd.clone(), region, lanes, free, open };
        windows.fill(nic)?;
        Ok(windows)
    }

    /// See [`Door::fill`](super::Door::fill).
    pub fn fill(&mut self, nic: &N) -> Result<bool, Error> {
        if self.free.len() >= LOW.max(self.lanes) {
            return Ok(false);
        }
        let new = nic.alloc_mws(&self.pd, STEP.max(self.lanes))?;
        self.free.extend(new.into_iter().map(|mw| Window { key: mw.key(), mw, used: 0 }));
        Ok(true)
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        self.free.len() + self.open.values().map(|open| open.windows.len()).sum::<usize>()
    }

    /// See [`Door::keys`](super::Door::keys).
    pub fn keys(&self, number: PermissionNumber, keys: &mut [Key]) {
        let Some(open) = self.open.get(&number) else { return };
        keys.iter_mut().zip(&open.windows).for_each(|(key, window)| *key = window.key);
    }

    /// The binds that open a range, one on each lane's QP.
    pub fn bind(&mut self, nic: &N, opening: &Opening, access: &AccessQps<N>) -> Change {
        if self.free.len() < self.lanes && self.fill(nic).is_err() {
            return Change::Impossible;
        }
        let Opening { number, place, right, group, .. } = *opening;
        let start = self.region.memory().addr() + place.offset;
        let len = u32::try_from(place.len).expect("an object is shorter than 4 GiB");
        let (mut posts, mut windows) = (SmallVec::new(), SmallVec::new());
        for lane in (0..self.lanes).map(|lane| Lane(lane as u8)) {
            let (Some(path), Some(mut window)) = (access.get(group, lane), self.free.pop_front())
            else {
                return Change::Impossible;
            };
            let (old, tag) = (window.key, window.key.tag().wrapping_add(1));
            window.key = Key::new(old.index(), tag);
            window.used += 1;
            let (qpn, region) = (path.qp.qpn(), self.region.key());
            let umr = Umr::bind(old, tag, qpn, rights(right), region, start, len);
            posts.push(Post { to: PostTo::Lane(group, lane), umr });
            windows.push(window);
        }
        self.open.insert(number, Open { group, windows });
        Change::Posts(posts)
    }

    /// The unbinds that close a permission.
    pub fn unbind(&mut self, number: PermissionNumber) -> Change {
        let Some(open) = self.open.get(&number) else { return Change::Done };
        let lanes = open.windows.iter().enumerate();
        let post = |(lane, window): (usize, &Window<N>)| Post {
            to: PostTo::Lane(open.group, Lane(lane as u8)),
            umr: Umr::unbind(window.key, true),
        };
        Change::Posts(lanes.map(post).collect())
    }

    /// See [`Door::release`](super::Door::release).
    pub fn release(&mut self, number: PermissionNumber) {
        let Some(open) = self.open.remove(&number) else { return };
        self.free.extend(open.windows.into_iter().filter(|window| window.used + 1 < TAGS));
    }

    /// See [`Door::discard`](super::Door::discard).
    pub fn discard(&mut self, number: PermissionNumber) {
        let Some(open) = self.open.remove(&number) else { return };
        open.windows.into_iter().for_each(|window| drop(window.mw));
    }
}

#[cfg(test)]
mod tests {
    use rnic::nic::SoftNic;
    use scheme::{ConnectRequest, Right};
    use verbs::{Access, CqAttr, QpAttr, Receive};

    use super::*;
    use crate::patronus::book::Place;

    /// A tag that repeats would make an old key valid again.
    #[test]
    fn window_is_deallocated_before_its_tags_repeat() {
        let nic = SoftNic::inline();
        let pd = nic.alloc_pd().unwrap();
        let memory = nic.alloc_dma(4096).unwrap();
        let region = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false }).unwrap();
        let qp = || {
            let (send_cq, recv_cq, access) = (&cq, &cq, Access::REMOTE_ALL);
            let receive = Receive::None;
            nic.create_qp(&pd, QpAttr { send_cq, recv_cq, send_blocks: 16, receive, access })
        };
        let peers = [qp().unwrap(), qp().unwrap()];
        let groups = vec![peers.iter().map(|peer| peer.qpn().raw()).collect()];
        let request = ConnectRequest { groups, ..ConnectRequest::default() };
        let access = AccessQps::new(&request, |_| Ok(qp()?)).unwrap();
        let mut windows = QpWindows::new(&nic, &pd, region, peers.len()).unwrap();
        for serial in 1..10_000 {
            let (number, group) = (PermissionNumber::new(serial, 0), GroupId(0));
            let place = Place { offset: 64, len: 64 };
            let right = Right::Write;
            let opening = Opening { number, place, right, group, has_hole: false };
            assert!(matches!(windows.bind(&nic, &opening, &access), Change::Posts(_)));
            let open = &windows.open[&number].windows;
            assert!(open.len() == 2 && open.iter().all(|window| window.used < TAGS));
            windows.release(number);
            windows.fill(&nic).unwrap();
        }
        assert!(windows.count() < 2 * (STEP + LOW), "{} windows", windows.count());
    }
}
