//! Windows of the published form: of type 1, in one PD for all compute nodes, bound by a QP of the
//! memory node's CPU (Patronus §4.2, §5.4).
//!
//! Each core of the memory node has windows and headers of its own. A permission has a window over
//! its range, and one over the lifetime in its header unless the two are contiguous. Windows come
//! from a queue. Headers come from a stack, as in the published code, so that a header is used
//! again while an old window is still bound over it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use scheme::{Error, Right};
use smallvec::SmallVec;
use verbs::wqe::Umr;
use verbs::{Access, Key, MemoryRegion, MemoryWindow, Nic, QpAttr, QueuePair, Receive, Remote};

use super::Opening;
use crate::patronus::book::PermissionId;
use crate::patronus::header::{HEADER_BYTES, Header, LIFETIME};
use crate::patronus::headers::{HeaderPlace, Headers};
use crate::patronus::message::PermissionNumber;
use crate::patronus::options::Techniques;

/// Windows that are allocated in one step.
const STEP: usize = 32;
/// Windows on the free list below which more are allocated.
const LOW: usize = 16;

/// A type-1 window with its current key.
pub struct Window<N: Nic> {
    /// Deallocated with this value, which makes the key dead.
    _mw: N::Mw,
    key: Key,
}

impl<N: Nic> Window<N> {
    /// Advances the tag. Tags repeat after 256 binds, as in the published code.
    fn next_tag(&mut self) -> (Key, u8) {
        let (old, tag) = (self.key, self.key.tag().wrapping_add(1));
        self.key = Key::new(old.index(), tag);
        (old, tag)
    }

    /// The index of the window.
    fn index(&self) -> u32 {
        self.key.index().raw()
    }
}

/// A range that a window shall open.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    region: Key,
    start: u64,
    len: u32,
    access: Access,
}

/// The windows of a permission.
struct Open<N: Nic> {
    main: Window<N>,
    header: Option<HeaderPlace>,
    /// The window over the lifetime, if it is not the main one.
    lifetime: Option<Window<N>>,
}

/// A permission that is being opened.
pub struct Beginning {
    /// The ranges: first the permission's own, then that of the lifetime, unless it is contiguous.
    pub needs: SmallVec<[Need; 2]>,
    header: Option<HeaderPlace>,
}

/// The windows and headers of a core.
pub struct ManagerWindows<N: Nic> {
    pd: N::Pd,
    /// The donated memory, registered with local rights only.
    region: N::Mr,
    /// The header pool, registered likewise.
    pool: N::Mr,
    /// A loopback QP, to which window operations are posted.
    pub binder: N::Qp,
    /// Techniques that save window operations.
    pub techniques: Techniques,
    free: VecDeque<Window<N>>,
    /// Indices of the core's headers in the pool.
    part: Range<u64>,
    /// Offsets of free headers in the pool; the last one is used first.
    headers: Vec<u64>,
    open: BTreeMap<PermissionId, Open<N>>,
}

impl<N: Nic> ManagerWindows<N> {
    /// Windows in `pd` over the regions of the donated memory and of the header pool, of which the
    /// core has the headers in `part`. Window operations complete to `binds`.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        (region, pool): (N::Mr, N::Mr),
        part: Range<u64>,
        techniques: Techniques,
        (binds, send_blocks): (&N::Cq, u32),
    ) -> Result<Self, Error> {
        let attr = QpAttr {
            send_cq: binds,
            recv_cq: binds,
            send_blocks,
            receive: Receive::None,
            access: Access::NONE,
        };
        let binder = nic.create_qp(pd, attr)?;
        binder.connect(binder.qpn())?;
        let mut windows = Self {
            pd: pd.clone(),
            region,
            pool,
            binder,
            techniques,
            free: VecDeque::new(),
            headers: part.clone().map(|index| index * HEADER_BYTES).rev().collect(),
            part,
            open: BTreeMap::new(),
        };
        windows.fill(nic)?;
        Ok(windows)
    }

    /// Allocates windows ahead if few are free. True if it did.
    pub fn fill(&mut self, nic: &N) -> Result<bool, Error> {
        if self.free.len() >= LOW {
            return Ok(false);
        }
        let new = nic.alloc_type1_mws(&self.pd, STEP)?;
        self.free.extend(new.into_iter().map(|mw| Window { key: mw.key(), _mw: mw }));
        Ok(true)
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        let each = |open: &Open<N>| 1 + usize::from(open.lifetime.is_some());
        self.free.len() + self.open.values().map(each).sum::<usize>()
    }

    /// Checks that each header of the core is free or has one permission.
    ///
    /// # Errors
    /// A description of the inconsistency.
    pub fn audit(&self) -> Result<(), String> {
        let used = self.open.values().filter_map(|open| match open.header? {
            HeaderPlace::Pool(at) => Some(at),
            HeaderPlace::Hole(_) => None,
        });
        let mut all: Vec<u64> = self.headers.iter().copied().chain(used).collect();
        all.sort_unstable();
        let expected = self.part.clone().map(|index| index * HEADER_BYTES);
        match all.iter().copied().eq(expected) {
            true => Ok(()),
            false => {
                Err(format!("the headers of a core are {all:?}, not those in {:?}", self.part))
            }
        }
    }

    /// Key of the range of an open permission.
    pub fn key(&self, id: PermissionId) -> Option<Key> {
        self.open.get(&id).map(|open| open.main.key)
    }

    /// Address and key of the lifetime of an open permission.
    pub fn header(&self, id: PermissionId, headers: &Headers) -> Option<Remote> {
        let open = self.open.get(&id)?;
        let rkey = open.lifetime.as_ref().unwrap_or(&open.main).key;
        Some(Remote { addr: headers.lifetime_addr(open.header?), rkey })
    }

    /// Forgets a permission. Returns the windows that must be unbound now: none if the end of its
    /// keys is delayed, and not that of its header if ends of headers are.
    pub fn end(
        &mut self,
        id: PermissionId,
        is_delayed: bool,
        headers: &Headers,
    ) -> SmallVec<[Window<N>; 2]> {
        let mut ends = SmallVec::new();
        let Some(Open { main, header, lifetime }) = self.open.remove(&id) else { return ends };
        headers.end(id);
        if let Some(HeaderPlace::Pool(at)) = header {
            self.headers.push(at);
        }
        match is_delayed {
            true => self.free.push_back(main),
            false => ends.push(main),
        }
        match lifetime {
            Some(window) if self.techniques.delay => self.free.push_back(window),
            window => ends.extend(window),
        }
        ends
    }

    /// Takes a header for a permission. `None` if the pool has none left.
    pub fn begin(&mut self, opening: &Opening) -> Option<Beginning> {
        let Opening { number, place, right, has_hole, .. } = *opening;
        let header = match number.slot() < PermissionNumber::LEASED_MAX {
            false => None,
            true if has_hole => Some(HeaderPlace::Hole(place.offset - HEADER_BYTES)),
            true => Some(HeaderPlace::Pool(self.headers.pop()?)),
        };
        let mut needs = SmallVec::new();
        let access = match right {
            // As in the published code: READ, and also atomics.
            Right::Read => Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            Right::Write => Access::REMOTE_ALL,
        };
        let len = u32::try_from(place.len).expect("an object is shorter than 4 GiB");
        let before = if has_hole && header.is_some() { HEADER_BYTES - LIFETIME } else { 0 };
        needs.push(Need {
            region: self.region.key(),
            start: self.region.memory().addr() + place.offset - before,
            len: len + before as u32,
            access,
        });
        if let Some(HeaderPlace::Pool(at)) = header {
            needs.push(Need {
                region: self.pool.key(),
                start: self.pool.memory().addr() + at + LIFETIME,
                len: (HEADER_BYTES - LIFETIME) as u32,
                access: Access::REMOTE_ALL,
            });
        }
        Some(Beginning { needs, header })
    }

    /// A window of the free list. `None` if the NIC has none left.
    pub fn take(&mut self, nic: &N) -> Option<Window<N>> {
        if self.free.is_empty() && self.fill(nic).is_err() {
            return None;
        }
        self.free.pop_front()
    }

    /// The UMR that makes a window open a range and its earlier key dead.
    pub fn bind(window: &mut Window<N>, need: Need) -> Umr {
        let Need { region, start, len, access } = need;
        let (key, tag) = window.next_tag();
        Umr::bind_type1(key, tag, access, region, start, len)
    }

    /// The UMR that makes the key of a window dead.
    pub fn unbind(&self, window: &mut Window<N>) -> Umr {
        let (key, tag) = window.next_tag();
        let start = self.region.memory().addr();
        Umr::bind_type1(key, tag, Access::NONE, self.region.key(), start, 0)
    }

    /// Returns an unbound window to the free list.
    pub fn give(&mut self, window: Window<N>) {
        self.free.push_back(window);
    }

    /// Notes that a permission is open, and writes its header. If windows are missing, because
    /// operations failed, the others are deallocated, which makes their keys dead: returns false.
    pub fn opened(
        &mut self,
        (nic, headers): (&N, &Headers),
        (id, opening): (PermissionId, &Opening),
        beginning: Beginning,
        windows: [Option<Window<N>>; 2],
    ) -> bool {
        let Beginning { needs, header } = beginning;
        let [main, lifetime] = windows;
        let main = main.filter(|_| lifetime.is_some() == (needs.len() > 1));
        let Some(main) = main else {
            if let Some(HeaderPlace::Pool(at)) = header {
                self.headers.push(at);
            }
            return false;
        };
        if let Some(place) = header {
            let fields = Header {
                len: opening.place.len,
                address: self.region.memory().addr() + opening.place.offset,
                window: main.index(),
                header_window: lifetime.as_ref().map_or(0, Window::index),
                start_us: nic.now().as_micros() as u64,
            };
            headers.begin(id, place, &fields);
        }
        self.open.insert(id, Open { main, header, lifetime });
        true
    }
}
