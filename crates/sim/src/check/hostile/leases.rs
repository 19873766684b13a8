//! Misuse of objects, permissions and lifetime words, with raw requests, READs, WRITEs and CASes.

use scheme::options::parse_terms;
use scheme::{Grant, GroupId, Others, Right, Sharing};
use schemes::patronus::TableTerms;
use schemes::patronus::message::{
    Ask, AskTerms, Granted, Lifetime, ObjectId, Outcome, PermissionNumber, REPLY_BYTES, Reply,
    Request,
};
use verbs::{CompletionKind, Key, MemoryRegion, Op, QueuePair, Remote, Status, WorkRequest};

use super::{Hostile, SCRATCH, to};
use crate::fiber;
use crate::time::Time;

/// A permission as the client knows it: the answer, and the terms it asked for.
#[derive(Clone, Copy)]
pub(super) struct Had {
    pub(super) granted: Granted,
    len: u64,
}

impl Had {
    pub(super) fn grant(&self) -> Grant {
        let Granted { object, address, lanes, keys, .. } = self.granted;
        Grant::new(address, self.len, object.entry.into(), GroupId(0), &keys[..lanes])
    }
}

impl Hostile {
    pub(super) fn round_on_leases(&mut self) {
        match self.random.below(20) {
            0..=2 => self.allocate_object(),
            3 | 4 => self.acquire_posted(),
            5 | 6 => self.write_own_words(),
            7 => self.reach_other_words(),
            8 | 9 => self.name_others(),
            10 => self.acquire_anything(),
            11 => self.free_any_object(),
            12 => self.use_former_key(),
            13 => self.steal_lease_key(),
            14 => self.try_all_tags(),
            15 => self.access_beyond(),
            16 => self.extend_for_ever(),
            17 => self.hoard(),
            18 => self.read_no_reply(),
            _ => self.malformed_ask(),
        }
    }

    // --- requests ------------------------------------------------------------------------------

    fn some_terms(&mut self) -> AskTerms {
        let leases = [1, 50, 500, 1 << 40, (1 << 48) - 1, u64::MAX - 1];
        let waits = [0, 100, u64::MAX];
        AskTerms {
            group: GroupId(self.random.below(self.cx.groups.into()) as u16),
            right: if self.random.below(3) == 0 { Right::Read } else { Right::Write },
            sharing: if self.random.below(2) == 0 { Sharing::Shared } else { Sharing::Exclusive },
            lease_us: *self.random.pick(&leases),
            wait_us: *self.random.pick(&waits),
        }
    }

    pub(super) fn post_ask(&mut self, ask: Ask) -> bool {
        self.number += 1;
        if let Ask::Free { object } = ask {
            self.cx.with_oracle(|o| o.frees_named(self.cx.client, object));
        }
        let data = Request { number: self.number, ask }.to_bytes();
        self.send(0, &data)
    }

    /// Sends a request without waiting for its reply.
    pub(super) fn post_any_ask(&mut self) {
        let terms = self.some_terms();
        let permission = self.some_number();
        let object = self.some_posted();
        let ask = match (self.random.below(4), object) {
            (0, Some((object, len))) => Ask::Acquire { terms, object, offset: 0, len },
            (1, Some((object, _))) => Ask::Free { object },
            (2, _) => Ask::Revoke { permission },
            _ => Ask::Allocate { terms, bytes: 100, others: Others::Write },
        };
        self.post_ask(ask);
    }

    /// Sends a request and takes the next reply, which may be that to an earlier request.
    pub(super) fn ask(&mut self, ask: Ask) -> Option<Reply> {
        let sent = self.post_ask(ask);
        if sent.then(|| self.answer(0)).flatten() != Some(true) {
            self.recover();
            return None;
        }
        self.last_reply()
    }

    /// Decodes the reply that has arrived last.
    pub(super) fn last_reply(&self) -> Option<Reply> {
        let mut bytes = [0; REPLY_BYTES];
        self.memory.memory().read(0, &mut bytes);
        Reply::parse(&bytes)
    }

    /// Records a permission that a reply grants.
    pub(super) fn note_grant(&mut self, reply: Option<Reply>, len: u64) -> Option<Had> {
        let Some(Reply { outcome: Outcome::Granted(granted), .. }) = reply else { return None };
        // The reply may be that to an earlier request: the length is that of the permission.
        let lifetime = granted.header.map(|header| header.rkey);
        let keys: Vec<Key> =
            granted.keys[..granted.lanes].iter().copied().chain(lifetime).collect();
        let known = self.cx.with_oracle(|o| {
            o.lease_granted(self.cx.client, granted.permission.0, &keys);
            o.lease_len(self.cx.client, granted.permission.0)
        });
        let had = Had { granted, len: known.unwrap_or(len) };
        self.leased.push(had);
        self.had.push(had.grant());
        self.held = vec![had.grant()];
        Some(had)
    }

    fn allocate_object(&mut self) {
        let terms = self.some_terms();
        let most = *self.random.pick(&[64, 100, 512, 2048]);
        let bytes = 1 + self.random.below(most);
        let all = [Others::None, Others::Read, Others::Write, Others::Own];
        let others = *self.random.pick(&all);
        let reply = self.ask(Ask::Allocate { terms, bytes, others });
        if let Some(had) = self.note_grant(reply, bytes) {
            let data = [0xbb; 8];
            let op = Op::WriteInline { to: to(&had.grant(), 0, 0), data: &data };
            self.access(0, 0, op);
        }
    }

    pub(super) fn some_posted(&mut self) -> Option<(ObjectId, u64)> {
        let board = self.cx.with_oracle(|o| o.board().to_vec());
        if board.is_empty() {
            return None;
        }
        let object = self.random.pick(&board).object;
        let id = ObjectId { entry: object.entry, generation: object.generation };
        Some((id, object.len))
    }

    /// Acquires an object of the board: also a foreign one, and one that was freed.
    fn acquire_posted(&mut self) {
        let Some((object, len)) = self.some_posted() else { return };
        let terms = self.some_terms();
        let reply = self.ask(Ask::Acquire { terms, object, offset: 0, len });
        self.note_grant(reply, len);
    }

    /// Acquires stale generations, unknown entries, and ranges over the end.
    fn acquire_anything(&mut self) {
        let (object, len) = match self.some_posted().filter(|_| self.random.below(2) == 0) {
            Some((id, len)) => {
                let generation = id.generation.wrapping_sub(self.random.below(3) as u32);
                (ObjectId { generation, ..id }, len)
            }
            None => {
                let entry = self.random.below(12) as u32;
                (ObjectId { entry, generation: self.random.below(3) as u32 }, 64)
            }
        };
        let offset = *self.random.pick(&[0, len, len / 2 + 1, u64::MAX, u64::MAX - len]);
        let length = *self.random.pick(&[len, 1, 0, u64::MAX]);
        let terms = self.some_terms();
        let reply = self.ask(Ask::Acquire { terms, object, offset, len: length });
        self.note_grant(reply, 1);
    }

    fn some_number(&mut self) -> PermissionNumber {
        let others = self.cx.with_oracle(|o| o.lease_numbers_of_others(self.cx.client));
        let own: Vec<u64> = self.leased.iter().map(|had| had.granted.permission.0).collect();
        let number = match self.random.below(4) {
            0 | 1 if !others.is_empty() => *self.random.pick(&others),
            2 if !own.is_empty() => *self.random.pick(&own),
            _ => self.random.bits() >> self.random.below(60),
        };
        // Earlier and later permissions of the slot.
        let slots = u64::from(PermissionNumber::SLOTS_MAX);
        let by = self.random.below(3).wrapping_sub(1).wrapping_mul(slots);
        let number = if self.random.below(3) == 0 { number.wrapping_add(by) } else { number };
        PermissionNumber(number)
    }

    /// Revokes, renews and extends permissions of others, and permissions of its own that have
    /// ended.
    fn name_others(&mut self) {
        let permission = self.some_number();
        let lease_us = self.some_terms().lease_us;
        let ask = match self.random.below(3) {
            0 => Ask::Revoke { permission },
            1 => Ask::Renew { permission, lease_us },
            _ => Ask::Extend { permission, lifetime_us: lease_us },
        };
        let len = self.leased.last().map_or(1, |had| had.len);
        let reply = self.ask(ask);
        match ask {
            // A granted extension has the old number.
            Ask::Extend { .. } => {}
            _ => _ = self.note_grant(reply, len),
        }
    }

    fn free_any_object(&mut self) {
        let posted = self.some_posted();
        let any = ObjectId { entry: self.random.below(12) as u32, generation: 0 };
        let own = self.leased.last().map(|had| had.granted.object);
        let object = match self.random.below(3) {
            0 => own.unwrap_or(any),
            1 => posted.map_or(any, |(id, _)| id),
            _ => any,
        };
        let base = self.had.first().map_or(0, |grant| grant.addr);
        let ask = match self.random.below(4) {
            0 => Ask::FreeGrant {
                entry: object.entry,
                address: base.wrapping_add(64 * self.random.below(32)),
            },
            _ => Ask::Free { object },
        };
        self.ask(ask);
    }

    /// Acquires many permissions without using them.
    fn hoard(&mut self) {
        for _ in 0..self.random.below(12) {
            let terms = self.some_terms();
            let ask = match self.some_posted().filter(|_| self.random.below(2) == 0) {
                Some((object, len)) => Ask::Acquire { terms, object, offset: 0, len },
                None => Ask::Allocate { terms, bytes: 64, others: Others::None },
            };
            let reply = self.ask(ask);
            if self.out || reply.is_none() {
                return;
            }
            self.note_grant(reply, 64);
        }
    }

    /// Sends requests without receives for their replies.
    fn read_no_reply(&mut self) {
        for _ in 0..1 + self.random.below(6) {
            self.number += 1;
            let terms = self.some_terms();
            let ask = match self.some_posted() {
                Some((object, len)) => Ask::Acquire { terms, object, offset: 0, len },
                None => Ask::Allocate { terms, bytes: 64, others: Others::None },
            };
            let data = Request { number: self.number, ask }.to_bytes();
            let op = Op::SendInline { data: &data };
            let sent = [WorkRequest { id: 2, op, signaled: true }];
            let _ = self.management[0].qp.post_send(&sent);
        }
        fiber::sleep(Time::us(self.random.below(300)));
        self.recover();
    }

    fn malformed_ask(&mut self) {
        let mut data: Vec<u8> =
            (0..self.random.below(72)).map(|_| self.random.bits() as u8).collect();
        if let Some(op) = data.first_mut() {
            *op %= 9;
        }
        self.cx.with_oracle(|o| o.misnamed = true);
        self.send(0, &data[..data.len().min(64)]);
        let _ = self.answer(0);
        self.recover();
    }

    // --- lifetime words ------------------------------------------------------------------------

    fn table(&self) -> Option<TableTerms> {
        parse_terms(&self.terms.terms).ok()
    }

    /// Executes an operation on the management QP. Returns whether it succeeded.
    fn on_management(&mut self, op: Op<'_>) -> bool {
        let side = self.management[0].clone();
        let posted = side.qp.post_send(&[WorkRequest { id: 3, op, signaled: true }]).is_ok();
        let status = posted.then(|| self.next(&side.cq, CompletionKind::Send)).flatten();
        if status != Some(Status::Success) {
            self.recover();
        }
        status == Some(Status::Success)
    }

    fn word(&self, slot: u64) -> Option<Remote> {
        let table = self.table()?;
        let addr = table.lifetimes_addr.wrapping_add(slot.wrapping_mul(8));
        Some(Remote { addr, rkey: Key(table.lifetimes_key) })
    }

    /// Reads one of its words; `None` if the NIC refuses.
    fn read_word(&mut self, slot: u64) -> Option<u64> {
        let from = self.word(slot)?;
        let local = [self.memory.sge(SCRATCH, 8)];
        self.on_management(Op::Read { from, to: &local })
            .then(|| self.memory.memory().load_be64(SCRATCH))
    }

    fn swap_word(&mut self, slot: u64, old: u64, new: u64) -> bool {
        let Some(at) = self.word(slot) else { return false };
        let local = self.memory.sge(SCRATCH, 8);
        self.on_management(Op::CompareSwap { at, compare: old, swap: new, old: local })
    }

    fn some_slot(&mut self) -> u64 {
        let slots = self.table().map_or(1, |table| table.lifetimes).into();
        let last = self.leased.last().map(|had| u64::from(had.granted.permission.slot()));
        match last.filter(|_| self.random.below(4) != 0) {
            Some(slot) => slot,
            None => self.random.below(slots),
        }
    }

    /// Puts any value into one of its own words: endless lifetimes, zero, other nonces.
    fn write_own_words(&mut self) {
        let slot = self.some_slot();
        let Some(old) = self.read_word(slot) else { return };
        let word = Lifetime(old);
        let new = match self.random.below(6) {
            0 => Lifetime::new(word.nonce(), u64::MAX).0,
            1 => Lifetime::new(word.nonce(), 0).0,
            2 => Lifetime::new(word.nonce().wrapping_add(1), 500).0,
            3 => Lifetime::new(word.nonce().wrapping_sub(1), u64::MAX).0,
            4 => Lifetime::new(word.nonce(), self.random.below(4000)).0,
            _ => self.random.bits(),
        };
        self.swap_word(slot, old, new);
    }

    /// Reads and changes words of others, and writes to the table.
    fn reach_other_words(&mut self) {
        let Some(table) = self.table() else { return };
        let slots = u64::from(table.lifetimes);
        let stray = *self.random.pick(&[slots, slots + 1, slots + 64, 0_u64.wrapping_sub(1)]);
        match self.random.below(4) {
            0 => _ = self.read_word(stray),
            1 => _ = self.swap_word(stray, 0, u64::MAX),
            2 => {
                let slot = self.random.below(slots);
                let Some(to) = self.word(slot) else { return };
                let data = [0xff; 8];
                self.on_management(Op::WriteInline { to, data: &data });
            }
            // The key of the table on another QP.
            _ => {
                let Some(at) = self.word(0) else { return };
                self.access_at(0, at, 8);
            }
        }
    }

    /// Extends a permission again and again, while others may wait for the object.
    fn extend_for_ever(&mut self) {
        let Some(had) = self.leased.last().copied() else { return };
        let slot = had.granted.permission.slot().into();
        for _ in 0..self.random.below(12) {
            let Some(old) = self.read_word(slot) else { return };
            let nonce = Lifetime(old).nonce();
            self.swap_word(slot, old, Lifetime::new(nonce, u64::MAX).0);
            let (qp_index, at) = (self.qp_index(&had.grant(), 0), to(&had.grant(), 0, 0));
            self.access_at(qp_index, at, 8);
            if self.out {
                return;
            }
        }
    }

    // --- keys ----------------------------------------------------------------------------------

    fn steal_lease_key(&mut self) {
        let all = self.cx.with_oracle(|o| o.lease_keys_of_others(self.cx.client));
        if all.is_empty() {
            return;
        }
        let (addr, rkey) = *self.random.pick(&all);
        let by = *self.random.pick(&[0, 0, 1, 2, 3]);
        let rkey = Key::new(rkey.index(), rkey.tag().wrapping_add(by));
        let lane = self.some_lane();
        self.access_at(lane, Remote { addr, rkey }, 8);
    }

    /// Tries tags of a victim's key, or of one of its own.
    fn try_all_tags(&mut self) {
        let others = self.cx.with_oracle(|o| o.lease_keys_of_others(self.cx.client));
        let own = self.had.last().map(|grant| (grant.addr, grant.keys()[0]));
        let victim = (!others.is_empty()).then(|| *self.random.pick(&others));
        let Some((addr, rkey)) = victim.or(own) else { return };
        for _ in 0..8 {
            let tag = self.random.bits() as u8;
            self.cx.with_oracle(|o| o.counts.guesses += 1);
            let lane = self.some_lane();
            self.access_at(lane, Remote { addr, rkey: Key::new(rkey.index(), tag) }, 8);
            if self.out {
                return;
            }
        }
    }
}
