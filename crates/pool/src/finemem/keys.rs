//! The windows: of each block one for each key that it has at a time, bound ahead; and how a key dies and another
//! takes its place.
//!
//! They are of type 1: when a window is bound nobody knows yet whose QPs will use it. One rebind ends the old key
//! and makes the new one. Where the NIC has guarded windows, each of them asks the full log of its block's first
//! chunk: whose key it is decides what is written there anyway, and no key is to be guessed.

use fabric::wqe::Umr;
use fabric::{
    Access, CqAttr, Feature, Guards, Key, MemoryRegion, MemoryWindow, Nic, Op, QpAttr, QueuePair,
    Receive, Status, WorkRequest,
};

use super::header::User;
use super::layout::Shape;
use super::log::{Capability, FullLog};
use super::release::Release;
use crate::Error;
use crate::events::poll_until;
use crate::settings::SchemeKind;

/// Windows that are rebound with one doorbell.
pub(super) const BATCH: usize = 64;
/// Building blocks of a UMR that binds.
const BIND_BLOCKS: u32 = 3;
/// Windows that are allocated with one call.
const PIECE: usize = 1 << 15;

/// The windows of all blocks, by entry of the capability table.
pub(super) struct Keys<N: Nic> {
    shape: Shape,
    memory: N::Mr,
    /// Windows of each block.
    each: u32,
    keys: Vec<Key>,
    _windows: Vec<N::Mw>,
    /// Where binds are posted.
    binder: N::Qp,
    binds: N::Cq,
}

/// Whether the windows of blocks are guarded on this NIC.
pub(super) fn are_guarded<N: Nic>(nic: &N, scheme: SchemeKind) -> bool {
    scheme.is_guarded() && nic.caps().has(Feature::GuardedWindows)
}

/// Whether the NIC has windows for all blocks; an error that says what to do if it has not.
pub(super) fn check<N: Nic>(nic: &N, shape: Shape, scheme: SchemeKind) -> Result<(), Error> {
    let count = shape.entries() as u64 * Release::of(scheme).windows() as u64;
    let there = nic.query_device()?.keys as u64;
    if count + OTHER_KEYS <= there {
        return Ok(());
    }
    Err(Error::Setting {
        setting: "chunk_bytes",
        value: shape.chunk_bytes.to_string(),
        why: format!(
            "{} chunks need {count} memory windows, and this NIC has {there} keys in all; take larger chunks \
             (twice as large: half as many windows), donate less, or serve with several memory nodes, each \
             on a NIC of its own",
            shape.chunks
        ),
    })
}

impl<N: Nic> Keys<N> {
    /// Makes and binds them all, over `memory`. The words of `metadata` guard them, if they are guarded.
    pub fn new(
        nic: &N,
        pd: &N::Pd,
        (memory, metadata): (&N::Mr, &N::Mr),
        shape: Shape,
        scheme: SchemeKind,
    ) -> Result<Self, Error> {
        let each = Release::of(scheme).windows();
        let count = shape.entries() * each;
        let windows = match are_guarded(nic, scheme) {
            true => guarded(nic, pd, metadata, shape)?,
            false => nic.alloc_type1_mws(pd, count as usize)?,
        };
        let binds = nic.create_cq(CqAttr { entries: 2 * BATCH as u32, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &binds,
            recv_cq: &binds,
            send_blocks: (BATCH as u32 * BIND_BLOCKS).next_power_of_two(),
            receive: Receive::None,
            access: Access::NONE,
        };
        let binder = nic.create_qp(pd, attr)?;
        binder.connect(binder.qpn())?;
        let keys = windows.iter().map(|w| w.key()).collect();
        let memory = memory.clone();
        let mut all = Self { shape, memory, each, keys, _windows: windows, binder, binds };
        all.renew(&(0..count).collect::<Vec<u32>>())?;
        Ok(all)
    }

    /// The windows of a block.
    pub fn windows(&self, entry: u32) -> std::ops::Range<u32> {
        entry * self.each..(entry + 1) * self.each
    }

    /// The window of a block that is not the one of its key `main`.
    pub fn other_than(&self, entry: u32, main: Key) -> Option<u32> {
        self.windows(entry).find(|window| self.key(*window) != main)
    }

    /// What opens a window.
    pub fn key(&self, window: u32) -> Key {
        self.keys[window as usize]
    }

    /// The capability of a block with all the keys that it can have.
    pub fn capability(&self, entry: u32) -> Capability {
        let mut keys = self.windows(entry).map(|window| self.key(window));
        let mut next = || keys.next().unwrap_or_default();
        Capability { main: next(), backup: next() }
    }

    /// Whether a word of the capability table is one that a block can have.
    pub fn fits(&self, entry: u32, capability: Capability) -> bool {
        let all = self.capability(entry);
        let swapped = Capability { main: all.backup, backup: all.main };
        let of = |c: Capability| [Capability::open(c.main), Capability::quarantined(c.main), c];
        of(all)
            .into_iter()
            .chain(of(swapped))
            .any(|c| c == capability && c != Capability::default())
    }

    /// Address and bytes of a block.
    pub fn range(&self, entry: u32) -> (u64, u64) {
        let block = self.shape.block(entry).expect("an entry of the table");
        let start = self.memory.memory().addr() + block.chunk as u64 * self.shape.chunk_bytes;
        (start, self.shape.block_bytes(block.order))
    }

    /// Gives windows new keys. When this returns the old ones are dead, and no access under them is pending.
    pub fn renew(&mut self, windows: &[u32]) -> Result<(), Error> {
        windows.chunks(BATCH).try_for_each(|some| self.renew_some(some))
    }

    fn renew_some(&mut self, windows: &[u32]) -> Result<(), Error> {
        let umrs: Vec<Umr> = windows.iter().map(|window| self.rebind(*window)).collect();
        let list: Vec<_> = (0..)
            .zip(&umrs)
            .map(|(id, umr)| WorkRequest { id, op: Op::Window(umr), signaled: true })
            .collect();
        self.binder.post_send(&list)?;
        let mut failed = None;
        poll_until(&self.binds, umrs.len(), |c| {
            failed = failed.or((c.status != Status::Success).then_some(c.status));
            true
        })?;
        if let Some(status) = failed {
            let attempt = "giving blocks of memory new keys".to_string();
            return Err(Error::ManagementBroken { attempt, status });
        }
        for window in windows {
            let key = &mut self.keys[*window as usize];
            *key = Key::new(key.index(), key.tag().wrapping_add(1));
        }
        Ok(())
    }

    fn rebind(&self, window: u32) -> Umr {
        let (key, (start, bytes)) = (self.key(window), self.range(window / self.each));
        let tag = key.tag().wrapping_add(1);
        Umr::bind_type1(key, tag, Access::REMOTE_ALL, self.memory.key(), start, bytes as u32)
    }
}

/// A window for each block, used only through QPs whose tag is the number of the user that the full log says has
/// exactly this block.
fn guarded<N: Nic>(
    nic: &N,
    pd: &N::Pd,
    metadata: &N::Mr,
    shape: Shape,
) -> Result<Vec<N::Mw>, Error> {
    let word = |entry| {
        let block = shape.block(entry).expect("an entry of the table");
        let addr = metadata.memory().addr() + 8 * shape.log(block.chunk).0 as u64;
        (addr, FullLog::taken(User::NOBODY, block).to_word())
    };
    let mut windows = Vec::with_capacity(shape.entries() as usize);
    for first in (0..shape.entries()).step_by(PIECE) {
        let words: Vec<_> = (first..shape.entries().min(first + PIECE as u32)).map(word).collect();
        let guards = Guards { region: metadata, mask: FullLog::OWNERSHIP, words: &words };
        windows.extend(nic.alloc_guarded_mws(pd, &guards)?);
    }
    Ok(windows)
}

/// Keys that a memory node has beside those of blocks and compute nodes.
const OTHER_KEYS: u64 = 1 << 10;
