//! Misuse of keys: the client's former keys, keys of other clients, and guessed keys.

use verbs::{Key, MemoryRegion, Op, Remote};

use super::{Hostile, SCRATCH, to};

impl Hostile {
    /// Performs a random access.
    pub(super) fn access_at(&mut self, qp_index: usize, at: Remote, len: u32) {
        let local = self.memory.sge(SCRATCH, len.min(1024));
        let local = [local];
        let word = self.memory.sge(SCRATCH, 8);
        let op = match self.random.below(4) {
            0 => Op::Read { from: at, to: &local },
            1 => Op::Write { to: at, from: &local },
            2 => Op::FetchAdd { at, add: 1, old: word },
            _ => Op::CompareSwap { at, compare: 0, swap: u64::MAX, old: word },
        };
        let group = self.random.below(self.access.len() as u64) as usize;
        self.access(group, qp_index, op);
    }

    pub(super) fn some_lane(&mut self) -> usize {
        self.random.below(self.cx.lanes as u64) as usize
    }

    /// Returns the index of the QP for a lane and a function of the memory node's NIC; sometimes of
    /// another function.
    pub(super) fn some_qp_index(&mut self, function: u8, lane: usize) -> usize {
        let functions = self.access[0].len() / self.cx.lanes;
        let stray = functions > 1 && self.random.below(4) == 0;
        let some = if stray { self.random.below(functions as u64) } else { function as u64 };
        some as usize * self.cx.lanes + lane
    }

    pub(super) fn use_former_key(&mut self) {
        if self.had.is_empty() {
            return;
        }
        let at = self.random.below(self.had.len() as u64) as usize;
        let (grant, lane) = (self.had[at], self.some_lane());
        let offset = 8 * self.random.below(8);
        let qp_index = self.some_qp_index(grant.function, lane);
        self.access_at(qp_index, to(&grant, lane, offset), 8);
    }

    /// Uses a key that was granted to another client.
    pub(super) fn steal(&mut self) {
        let all = self.cx.with_oracle(|o| o.keys_of_others(self.cx.client));
        if all.is_empty() {
            return self.guess();
        }
        let (function, addr, rkey) = *self.random.pick(&all);
        let lane = self.some_lane();
        let qp_index = self.some_qp_index(function, lane);
        self.access_at(qp_index, Remote { addr, rkey }, 8);
    }

    /// Tries other tags of the client's keys, and neighbouring keys, at random chunks.
    pub(super) fn guess(&mut self) {
        let Some(grant) = self.had.last().copied() else { return };
        let bytes = self.terms.chunk_bytes;
        let base = grant.addr - self.cx.with_oracle(|o| o.first_chunk(&grant)) as u64 * bytes;
        for _ in 0..4 {
            let lane = self.some_lane();
            let key = grant.keys()[lane].0;
            let by = self.random.below(16) as u32;
            let rkey = match self.random.below(2) {
                0 => Key(key.wrapping_add(by)),
                _ => {
                    Key((key & 0xff).wrapping_add((key >> 8).wrapping_sub(8).wrapping_add(by) << 8))
                }
            };
            let addr = base + self.random.below(8) * bytes;
            self.cx.with_oracle(|o| o.counts.guesses += 1);
            let qp_index = self.some_qp_index(grant.function, lane);
            self.access_at(qp_index, Remote { addr, rkey }, 8);
        }
    }

    pub(super) fn access_beyond(&mut self) {
        let Some(grant) = self.held.last().copied() else { return };
        let lane = self.some_lane();
        let key = grant.keys()[lane];
        let (addr, len) = match self.random.below(4) {
            0 => (grant.addr + grant.len - 8, 16),
            1 => (grant.addr - 8, 16),
            2 => (grant.addr + grant.len, 8),
            _ => (grant.addr, grant.len as u32 + 8),
        };
        let qp_index = self.some_qp_index(grant.function, lane);
        self.access_at(qp_index, Remote { addr, rkey: key }, len);
    }
}
