//! Hostile clients where compute nodes allocate by themselves (`finemem`).
//!
//! A trusted service that follows the protocol has the management QP; the hostile client has access
//! QPs only, as in FineMem (§4.3).

use pool::client::control::ControlPlane;
use scheme::info::Isolation;
use scheme::{ClientScheme, ConnectReply, Grant, GroupId};
use schemes::finemem::Client;
use verbs::{Key, MemoryRegion, Op, Qpn, Remote};

use super::{Hostile, SCRATCH};
use crate::check::invariant::Invariant;
use crate::check::trace_text;
use crate::fiber;
use crate::nic::SimNic;

/// The trusted service of a hostile client.
pub(super) type Service = Box<Client<SimNic>>;

/// Passes the memory node's admission to the service, and connects the service.
pub(super) fn start(service: &Service, terms: &ConnectReply) -> Option<()> {
    service.accept(terms).ok()?;
    let peers: Vec<_> = terms.management.iter().map(|q| Qpn::new(*q).into()).collect();
    service.connect(&peers).ok()
}

impl Hostile {
    pub(super) fn round_on_trees(&mut self) {
        // Guarded windows, which check the log, withstand even a client with the right key.
        let withstands = self.scheme.isolation == Isolation::GuardedWindows;
        match self.random.below(16) {
            0..=2 => self.allocate(&[]),
            3 if withstands => self.steal(),
            4 if withstands => self.guess(),
            3..=4 => self.allocate(&[]),
            5..=6 => self.free_own(),
            7..=9 => self.use_former_key(),
            10..=11 => self.access_beyond(),
            12..=14 => self.access_metadata(),
            _ => self.windows(),
        }
    }

    /// Has the service allocate a chunk, or a block of a random size.
    pub(super) fn allocate_by_service(&mut self) {
        let client = self.cx.client;
        let order = self.cx.some_order(&mut self.random);
        let Some(service) = &self.service else { return };
        self.cx.with_oracle(|o| o.requests_chunk(client));
        let bytes = self.terms.chunk_bytes << order.unwrap_or(0);
        match fiber::block_on(service.allocate_bytes(GroupId(0), bytes)) {
            Ok(grant) => {
                self.cx.with_oracle(|o| o.granted(client, &grant));
                self.held.push(grant);
                self.had.push(grant);
                let data = [0xbb; 8];
                let op = Op::WriteInline { to: super::to(&grant, 0, 8), data: &data };
                self.access(0, self.qp_index(&grant, 0), op);
            }
            Err(e) => {
                self.cx.with_oracle(|o| o.not_granted(client, &trace_text(&e)));
                self.reconnect_service(&e);
            }
        }
    }

    /// Has the service free a grant; returns whether it was freed.
    pub(super) fn free_by_service(&mut self, grant: &Grant) -> bool {
        let Some(service) = &self.service else { return false };
        match fiber::block_on(service.free(grant)) {
            Ok(()) => true,
            Err(e) => {
                self.reconnect_service(&e);
                false
            }
        }
    }

    /// Re-establishes the service's connection if `error` says that it broke.
    fn reconnect_service(&mut self, error: &pool::Error) {
        let Some(service) = self.service.as_ref() else { return };
        if !matches!(error, pool::Error::ManagementBroken { .. }) {
            return;
        }
        let again = service.reset().and_then(|()| self.control.reset_management());
        let connected = again.and_then(|peers| service.connect(&peers));
        self.out |= connected.is_err();
        if !self.out {
            let _ = fiber::block_on(service.settle());
        }
    }

    /// Uses the metadata's key, or a key near it, on an access QP. Only the service's QP may use
    /// that key.
    fn access_metadata(&mut self) {
        let Some(metadata) = schemes::finemem::Metadata::of(&self.terms) else { return };
        let tag = match self.random.below(2) {
            0 => 0,
            _ => self.random.below(256) as u32,
        };
        let rkey = Key((metadata.rkey & !0xff) | (metadata.rkey.wrapping_add(tag) & 0xff));
        let at = Remote { addr: metadata.addr + 8 * self.random.below(64), rkey };
        let lane = self.some_lane();
        let qp_index = self.some_qp_index(0, lane);
        let word = self.memory.sge(SCRATCH, 8);
        let to = [word];
        let op = match self.random.below(3) {
            0 => Op::Read { from: at, to: &to },
            1 => Op::CompareSwap { at, compare: 0, swap: u64::MAX, old: word },
            _ => Op::WriteInline { to: at, data: &[0xff; 8] },
        };
        self.cx.with_oracle(|o| o.counts.guesses += 1);
        if self.access(0, qp_index, op) {
            let name = self.cx.with_oracle(|o| o.name(self.cx.client).to_owned());
            let why = format!("{name} accesses the metadata over an access QP");
            self.cx.with_oracle(|o| o.wrong(Invariant::Privilege, why));
        }
    }
}
