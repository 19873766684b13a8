//! Misuse of requests: for foreign chunks, for former chunks, and malformed requests.

use scheme::{Grant, GroupId};
use schemes::onesidedmw::layout::{granted_entry, reply, status};
use verbs::{Key, MemoryRegion, Op, Qpn, Remote};

use super::{Hostile, to};
use crate::check::invariant::Invariant;

impl Hostile {
    pub(super) fn allocate_request(&mut self, named: &[u32], target: Remote) -> Vec<u8> {
        self.number += 1;
        if self.scheme.needs_cpu() {
            let mut data = vec![0; 16];
            data[0] = 1;
            data[8..].copy_from_slice(&self.number.to_be_bytes());
            return data;
        }
        let own = &self.terms.groups[0];
        let names = own.iter().enumerate().map(|(i, q)| named.get(i).copied().unwrap_or(*q));
        let mut data: Vec<u8> = names.flat_map(|q| q.to_be_bytes()[1..].to_vec()).collect();
        data.extend(target.addr.to_be_bytes());
        data.extend(target.rkey.0.to_be_bytes());
        data
    }

    pub(super) fn free_request(&mut self, entry: u32, target: Remote) -> Vec<u8> {
        self.number += 1;
        let mut data = vec![];
        if self.scheme.needs_cpu() {
            data.resize(16, 0);
            data[0] = 2;
            data[4..8].copy_from_slice(&entry.to_be_bytes());
            data[8..].copy_from_slice(&self.number.to_be_bytes());
        } else {
            data.extend(&entry.to_be_bytes()[1..]);
            data.extend(target.addr.to_be_bytes());
            data.extend(target.rkey.0.to_be_bytes());
        }
        data
    }

    pub(super) fn free_side(&self) -> usize {
        self.kinds() - 1
    }

    /// Allocates a chunk for the QPs in `named` instead of the client's own.
    pub(super) fn allocate(&mut self, named: &[u32]) {
        if self.service.is_some() {
            return self.allocate_by_service();
        }
        let client = self.cx.client;
        let target = self.memory.remote(0);
        let data = self.allocate_request(named, target);
        self.cx.with_oracle(|o| o.requests_chunk(client));
        let sent = self.send(0, &data);
        match sent.then(|| self.answer(0)).flatten() {
            Some(true) => match self.granted() {
                Some(grant) => {
                    self.cx.with_oracle(|o| o.granted(client, &grant));
                    self.held.push(grant);
                    self.had.push(grant);
                    let data = [0xbb; 8];
                    self.access(0, 0, Op::WriteInline { to: to(&grant, 0, 8), data: &data });
                }
                None => self.cx.with_oracle(|o| o.not_granted(client, "there is none")),
            },
            _ => {
                self.recover();
                self.cx.with_oracle(|o| o.not_granted(client, "the connection broke"));
            }
        }
    }

    /// Decodes the grant in the reply buffer.
    pub(super) fn granted(&self) -> Option<Grant> {
        let mut b = [0; 64];
        self.memory.memory().read(0, &mut b);
        let lanes = self.cx.lanes;
        let be32 = |at: usize| u32::from_be_bytes(b[at..at + 4].try_into().expect("4 bytes"));
        let be64 = |at: usize| u64::from_be_bytes(b[at..at + 8].try_into().expect("8 bytes"));
        let bytes = self.terms.chunk_bytes;
        if self.scheme.needs_cpu() {
            let keys: Vec<Key> = (0..lanes).map(|i| Key(be32(32 + 4 * i))).collect();
            return (b[0] == 1)
                .then(|| Grant::new(be64(16), bytes, be32(4).into(), GroupId(0), &keys));
        }
        let key = |window: usize| {
            let index = &b[reply::KEYS + 3 * window..][..3];
            let tag = b[reply::TAGS + 8 * (window / 4) + 4 + window % 4];
            Key(u32::from_be_bytes([index[0], index[1], index[2], tag]))
        };
        let keys: Vec<Key> = (1..=lanes).map(key).collect();
        let entry = granted_entry(be32(reply::ENTRY));
        let granted = b[reply::STATUS] == status::GRANTED;
        granted.then(|| Grant::new(be64(reply::CHUNK), bytes, entry, GroupId(0), &keys))
    }

    pub(super) fn free_own(&mut self) {
        let Some(grant) = self.held.pop() else { return };
        let (client, keys) = (self.cx.client, grant.keys().to_vec());
        let entry = self.cx.with_oracle(|o| o.first_chunk(&grant));
        self.cx.with_oracle(|o| o.frees(client, entry, &keys));
        let freed = match self.service.is_some() {
            true => self.free_by_service(&grant),
            false => self.free(entry),
        };
        if freed {
            self.cx.with_oracle(|o| o.freed(client, entry, &keys));
        }
    }

    /// Requests a free; returns whether the answer is "freed".
    pub(super) fn free(&mut self, entry: u32) -> bool {
        let which = self.free_side();
        let target = self.memory.remote(which * 128);
        let data = self.free_request(entry, target);
        let mine = self.cx.with_oracle(|o| o.may_own(self.cx.client, entry));
        let sent = self.send(which, &data);
        if sent.then(|| self.answer(which)).flatten() != Some(true) {
            self.recover();
            return false;
        }
        let mut b = [0; 64];
        self.memory.memory().read(which * 128, &mut b);
        let freed = match self.scheme.needs_cpu() {
            true => b[0] == 1,
            false => b[reply::FREE_STATUS + 3] == status::FREED,
        };
        if freed && !mine {
            self.cx.with_oracle(|o| {
                let name = o.name(self.cx.client);
                o.wrong(
                    Invariant::Owners,
                    format!("{name} frees chunk {entry}, which is not its own"),
                );
            });
        }
        freed
    }

    /// Frees a former chunk again, regardless of its current owner.
    pub(super) fn free_former(&mut self) {
        if self.had.is_empty() {
            return;
        }
        let at = self.random.below(self.had.len() as u64) as usize;
        let entry = self.had[at].entry.raw();
        self.free_and_forget(entry);
    }

    pub(super) fn free_anything(&mut self) {
        let entry = match self.random.below(4) {
            0 => self.random.bits() as u32 & 0xff_ffff,
            _ => self.random.below(10) as u32,
        };
        self.free_and_forget(entry);
    }

    pub(super) fn free_and_forget(&mut self, entry: u32) {
        let client = self.cx.client;
        let held = self.held.iter().position(|g| g.entry.raw() == entry);
        let held = held.map(|at| self.held.swap_remove(at));
        if let Some(grant) = &held {
            self.cx.with_oracle(|o| o.frees(client, entry, grant.keys()));
        }
        let freed = self.free(entry);
        if let Some(grant) = held.filter(|_| freed) {
            self.cx.with_oracle(|o| o.freed(client, entry, grant.keys()));
        }
    }

    pub(super) fn name_foreign_qps(&mut self) {
        self.cx.with_oracle(|o| o.misnamed = true);
        let lane = self.terms.groups[0][0];
        let near = lane.wrapping_add_signed(self.random.below(60) as i32 - 30) & Qpn::MAX;
        let named = *self.random.pick(&[near, near, self.terms.management[0], Qpn::NONE.raw(), 0]);
        self.allocate(&[named, named]);
    }

    /// Requests an answer that cannot be delivered, because no key opens the address.
    pub(super) fn unanswerable(&mut self) {
        if self.random.below(2) == 0 {
            return self.malformed();
        }
        let client = self.cx.client;
        let rkey = Key(self.random.bits() as u32);
        let target = Remote { addr: self.memory.remote(0).addr, rkey };
        self.cx.with_oracle(|o| o.requests_chunk(client));
        let data = self.allocate_request(&[], target);
        self.send(0, &data);
        let _ = self.answer(0);
        self.recover();
        self.cx.with_oracle(|o| o.not_granted(client, "it wanted no answer"));
    }

    /// Sends random bytes instead of a request.
    pub(super) fn malformed(&mut self) {
        let which = self.random.below(self.kinds() as u64) as usize;
        let data: Vec<u8> = (0..self.random.below(60)).map(|_| self.random.bits() as u8).collect();
        // The bytes may form a valid request, and free a chunk of the client.
        let client = self.cx.client;
        for grant in std::mem::take(&mut self.held) {
            self.cx.with_oracle(|o| o.frees(client, grant.entry.raw(), grant.keys()));
        }
        self.cx.with_oracle(|o| {
            o.misnamed = true;
            o.requests_chunk(client);
        });
        self.send(which, &data);
        let _ = self.answer(which);
        self.recover();
        self.cx.with_oracle(|o| o.not_granted(client, "it sent what is no request"));
    }

    /// Sends more requests at once than the client may have in flight.
    pub(super) fn flood(&mut self) {
        let which = self.free_side();
        let count = 1 + self.random.below(8);
        for _ in 0..count {
            let entry = 0xff_ff00 + self.random.below(0xff) as u32;
            let target = self.memory.remote(which * 128);
            let data = self.free_request(entry, target);
            self.send(which, &data);
        }
        for _ in 0..count {
            if self.answer(which) != Some(true) {
                return self.recover();
            }
        }
    }
}
