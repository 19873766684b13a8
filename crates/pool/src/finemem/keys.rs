//! The windows: one for each block, bound ahead; and how a key dies and another takes its place.
//!
//! They are of type 1: when a window is bound nobody knows yet whose QPs will use it. One rebind ends
//! the old key and makes the new one.

use fabric::wqe::Umr;
use fabric::{
    Access, CqAttr, Key, MemoryRegion, MemoryWindow, Nic, Op, QpAttr, QueuePair, Receive, Status,
    WorkRequest,
};

use super::layout::Shape;
use crate::Error;
use crate::events::poll_until;

/// Windows that are rebound with one doorbell.
pub(super) const BATCH: usize = 64;
/// Building blocks of a UMR that binds.
const BIND_BLOCKS: u32 = 3;

/// The windows of all blocks, by entry of the capability table.
pub(super) struct Keys<N: Nic> {
    shape: Shape,
    memory: N::Mr,
    keys: Vec<Key>,
    _windows: Vec<N::Mw>,
    /// Where binds are posted.
    binder: N::Qp,
    binds: N::Cq,
}

impl<N: Nic> Keys<N> {
    /// Makes and binds them all, over `memory`.
    pub fn new(nic: &N, pd: &N::Pd, memory: &N::Mr, shape: Shape) -> Result<Self, Error> {
        let windows = nic.alloc_type1_mws(pd, shape.entries() as usize)?;
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
        let mut all = Self { shape, memory, keys, _windows: windows, binder, binds };
        let entries: Vec<u32> = (0..shape.entries()).collect();
        entries.chunks(BATCH).try_for_each(|some| all.renew(some))?;
        Ok(all)
    }

    /// What opens a block.
    pub fn key(&self, entry: u32) -> Key {
        self.keys[entry as usize]
    }

    /// Address and bytes of a block.
    pub fn range(&self, entry: u32) -> (u64, u64) {
        let block = self.shape.block(entry).expect("an entry of the table");
        let start = self.memory.memory().addr() + block.chunk as u64 * self.shape.chunk_bytes;
        (start, self.shape.block_bytes(block.order))
    }

    /// Gives up to [`BATCH`] blocks new keys. When this returns the old ones are dead, and no access under
    /// them is pending.
    pub fn renew(&mut self, entries: &[u32]) -> Result<(), Error> {
        let umrs: Vec<Umr> = entries.iter().map(|entry| self.rebind(*entry)).collect();
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
        for entry in entries {
            let key = &mut self.keys[*entry as usize];
            *key = Key::new(key.index(), key.tag().wrapping_add(1));
        }
        Ok(())
    }

    fn rebind(&self, entry: u32) -> Umr {
        let (key, (start, bytes)) = (self.key(entry), self.range(entry));
        let tag = key.tag().wrapping_add(1);
        Umr::bind_type1(key, tag, Access::REMOTE_ALL, self.memory.key(), start, bytes as u32)
    }
}
