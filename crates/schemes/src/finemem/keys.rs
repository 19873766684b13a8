//! The pre-bound windows of all blocks, one for each key that a block has at a time, and the
//! replacement of their keys.
//!
//! The windows are of type 1, because the QPs that will use a block are not yet known when its
//! window is bound. One rebind invalidates the old key and creates the new one. If the NIC has
//! guarded windows, each window checks the full log of its block's first chunk: the log determines
//! the owner of the key, so a guessed key is useless.

use std::ops::Range;

use scheme::index::{EntryId, IndexRange};
use scheme::info::{Isolation, Scheme};
use scheme::wakeup::poll_until;
use scheme::{Error, index_type};
use verbs::wqe::Umr;
use verbs::{
    Access, Feature, Guards, Key, MemoryRegion, MemoryWindow, Nic, Op, QueuePair, Status,
    WorkRequest,
};

use super::function::{BATCH, Function};
use super::header::User;
use super::layout::{Functions, Shape};
use super::log::{Capability, FullLog};
use super::release::Release;

/// Maximum number of windows that are allocated with one call.
const PIECE: usize = 1 << 15;

index_type! {
    /// A window. Each entry of the capability table has the same number of windows.
    WindowIndex
}

/// The windows of all blocks.
pub(super) struct Keys<N: Nic> {
    shape: Shape,
    /// Windows per block.
    each: u32,
    keys: Vec<Key>,
    _windows: Vec<N::Mw>,
    division: Functions,
    functions: Vec<Function<N>>,
}

/// True if the windows of blocks are guarded on this NIC.
pub(super) fn are_guarded<N: Nic>(nic: &N, scheme: Scheme) -> bool {
    scheme.isolation == Isolation::GuardedWindows && nic.caps().has(Feature::GuardedWindows)
}

impl<N: Nic> Keys<N> {
    /// Creates and binds all windows, each in the function that has its entry.
    pub fn new(functions: Vec<Function<N>>, shape: Shape, scheme: Scheme) -> Result<Self, Error> {
        let each = Release::of(scheme).windows();
        let division = Functions::new(shape, functions.len() as u32);
        let mut windows = Vec::with_capacity((shape.entries() * each) as usize);
        for (index, function) in (0..).zip(&functions) {
            let entries = division.entries(shape, index);
            let Function { nic, pd, .. } = function;
            windows.extend(match are_guarded(nic, scheme) {
                true => guarded(function, shape, entries)?,
                false => nic.alloc_type1_mws(pd, entries.len() * each as usize)?,
            });
        }
        let keys = windows.iter().map(|w| w.key()).collect();
        let mut all = Self { shape, each, keys, _windows: windows, division, functions };
        let end = WindowIndex::new(shape.entries() * each);
        all.renew(&(WindowIndex::new(0)..end).iter().collect::<Vec<_>>())?;
        Ok(all)
    }

    /// The functions that have the windows.
    pub fn functions(&self) -> &[Function<N>] {
        &self.functions
    }

    /// The function of a window.
    fn function(&self, window: WindowIndex) -> usize {
        self.division.of(self.entry(window)) as usize
    }

    /// The entry of the block that has a window.
    fn entry(&self, window: WindowIndex) -> EntryId {
        EntryId::new(window.raw() / self.each)
    }

    /// The windows of a block.
    pub fn windows(&self, entry: EntryId) -> Range<WindowIndex> {
        let first = WindowIndex::new(entry.raw() * self.each);
        first..first.plus(self.each)
    }

    /// The window of a block whose key is not `main`.
    pub fn other_than(&self, entry: EntryId, main: Key) -> Option<WindowIndex> {
        self.windows(entry).iter().find(|window| self.key(*window) != main)
    }

    /// The current key of a window.
    pub fn key(&self, window: WindowIndex) -> Key {
        self.keys[window.as_usize()]
    }

    /// The capability of a block with all of its keys.
    pub fn capability(&self, entry: EntryId) -> Capability {
        let mut keys = self.windows(entry).iter().map(|window| self.key(window));
        let mut next = || keys.next().unwrap_or_default();
        Capability { main: next(), backup: next() }
    }

    /// True if `capability` is a valid value for the block of `entry`.
    pub fn fits(&self, entry: EntryId, capability: Capability) -> bool {
        let capability_now = self.capability(entry);
        let swapped = Capability { main: capability_now.backup, backup: capability_now.main };
        let states = |c: Capability| [Capability::open(c.main), Capability::quarantined(c.main), c];
        states(capability_now)
            .into_iter()
            .chain(states(swapped))
            .any(|c| c == capability && c != Capability::default())
    }

    /// Address and bytes of a block.
    pub fn range(&self, entry: EntryId) -> (u64, u64) {
        let block = self.shape.block(entry).expect("an entry of the table");
        let memory = self.functions[0].memory.memory();
        let (offset, bytes) = self.shape.range(block);
        (memory.addr() + offset, bytes)
    }

    /// Rebinds windows under new keys. On return the old keys are dead, and no access under them is
    /// pending.
    pub fn renew(&mut self, windows: &[WindowIndex]) -> Result<(), Error> {
        if self.functions.len() == 1 {
            return windows.chunks(BATCH).try_for_each(|some| self.renew_some(0, some));
        }
        let mut by_function = vec![Vec::new(); self.functions.len()];
        windows.iter().for_each(|window| by_function[self.function(*window)].push(*window));
        (0..).zip(&by_function).try_for_each(|(function, windows)| {
            windows.chunks(BATCH).try_for_each(|some| self.renew_some(function, some))
        })
    }

    /// Rebinds windows of one function with one doorbell. The work of a QP completes in order, so
    /// the completion of the last bind covers all. A failed bind always completes, and the binds
    /// after it are flushed.
    fn renew_some(&mut self, function: usize, windows: &[WindowIndex]) -> Result<(), Error> {
        let Function { binder, binds, .. } = &self.functions[function];
        let umrs: Vec<Umr> = windows.iter().map(|window| self.rebind(*window)).collect();
        let last = umrs.len() as u64 - 1;
        let list: Vec<_> = (0..=last)
            .zip(&umrs)
            .map(|(id, umr)| WorkRequest { id, op: Op::Window(umr), signaled: id == last })
            .collect();
        binder.post_send(&list)?;
        let mut failed = None;
        poll_until(binds, 1, |c| {
            failed = failed.or((c.status != Status::Success).then_some(c.status));
            true
        })?;
        if let Some(status) = failed {
            let attempt = "rebinding the windows of blocks".to_string();
            return Err(Error::ManagementBroken { attempt, status });
        }
        for window in windows {
            let key = &mut self.keys[window.as_usize()];
            *key = Key::new(key.index(), key.tag().wrapping_add(1));
        }
        Ok(())
    }

    fn rebind(&self, window: WindowIndex) -> Umr {
        let (key, (start, bytes)) = (self.key(window), self.range(self.entry(window)));
        let tag = key.tag().wrapping_add(1);
        let memory = self.functions[self.function(window)].memory.key();
        Umr::bind_type1(key, tag, Access::REMOTE_ALL, memory, start, bytes as u32)
    }
}

/// Allocates a window for each block that is usable only through QPs tagged with the user number
/// that the full log names as the owner of exactly this block.
fn guarded<N: Nic>(
    function: &Function<N>,
    shape: Shape,
    entries: Range<EntryId>,
) -> Result<Vec<N::Mw>, Error> {
    let Function { nic, pd, metadata, .. } = function;
    let word = |entry| {
        let block = shape.block(entry).expect("an entry of the table");
        let addr = metadata.memory().addr() + shape.log(block.chunk).offset() as u64;
        (addr, FullLog::taken(User::NOBODY, block).to_word())
    };
    let mut windows = Vec::with_capacity(entries.len());
    for some in entries.batches(PIECE) {
        let words: Vec<_> = some.iter().map(word).collect();
        let guards = Guards { region: metadata, mask: FullLog::OWNERSHIP, words: &words };
        windows.extend(nic.alloc_guarded_mws(pd, &guards)?);
    }
    Ok(windows)
}
