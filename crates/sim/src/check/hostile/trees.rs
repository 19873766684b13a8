//! Where compute nodes allocate by themselves (`finemem`): a service that keeps to the rules has the management QP,
//! and who keeps to none has access QPs only, as FineMem (§4.3) has it.

use fabric::{Key, MemoryRegion, Op, Qpn, Remote};
use pool::client::control::ControlPlane;
use pool::finemem::Client;
use pool::scheme::{Admitted, ClientScheme, Grant, GroupId};

use super::{Hostile, SCRATCH};
use crate::check::invariant::Invariant;
use crate::fiber;
use crate::nic::SimNic;

/// The service of who keeps to no rule.
pub(super) type Service = Box<Client<SimNic>>;

/// Tells the service what the memory node has admitted, and connects it.
pub(super) fn start(service: &Service, terms: &Admitted) -> Option<()> {
    service.admitted(terms);
    let peers: Vec<_> = terms.management.iter().map(|q| Qpn::new(*q).into()).collect();
    service.connect(&peers).ok()
}

impl Hostile {
    pub(super) fn round_on_trees(&mut self) {
        // Windows that ask the log withstand also who has the right key.
        let withstands = self.scheme.is_guarded();
        match self.random.below(16) {
            0..=2 => self.allocate(&[]),
            3 if withstands => self.steal(),
            4 if withstands => self.guess(),
            3..=4 => self.allocate(&[]),
            5..=6 => self.free_own(),
            7..=9 => self.use_what_was(),
            10..=11 => self.reach_beyond(),
            12..=14 => self.reach_metadata(),
            _ => self.windows(),
        }
    }

    /// Has its service allocate a chunk, or a block of some size.
    pub(super) fn allocate_by_service(&mut self) {
        let who = self.cx.who;
        let order = self.cx.some_order(&mut self.random);
        let Some(service) = &self.service else { return };
        self.cx.tell(|o| o.asks(who));
        let bytes = self.terms.chunk_bytes << order.unwrap_or(0);
        match fiber::block_on(service.allocate_bytes(GroupId(0), bytes)) {
            Ok(grant) => {
                self.cx.tell(|o| o.granted(who, &grant));
                self.held.push(grant);
                self.had.push(grant);
                let data = [0xbb; 8];
                let op = Op::WriteInline { to: super::to(&grant, 0, 8), data: &data };
                self.access(0, self.way(&grant, 0), op);
            }
            Err(e) => {
                self.cx.tell(|o| o.not_granted(who, &e.to_string()));
                self.service_again(&e);
            }
        }
    }

    /// Has it freed; true if it was.
    pub(super) fn free_by_service(&mut self, grant: &Grant) -> bool {
        let Some(service) = &self.service else { return false };
        match fiber::block_on(service.free(grant)) {
            Ok(()) => true,
            Err(e) => {
                self.service_again(&e);
                false
            }
        }
    }

    /// Re-establishes the service's connection, if that is what was wrong.
    fn service_again(&mut self, error: &pool::Error) {
        let Some(service) = self.service.as_ref() else { return };
        if !matches!(error, pool::Error::ManagementBroken { .. }) {
            return;
        }
        let again = service.reset().and_then(|()| self.control.reset_management());
        let connected = again.and_then(|peers| service.connect(&peers));
        self.out |= connected.is_err();
        if !self.out {
            let _ = fiber::block_on(service.recall());
        }
    }

    /// Uses the metadata's key, or one near it, on an access QP: nobody but the service has a QP for it.
    fn reach_metadata(&mut self) {
        let Some(metadata) = self.terms.metadata else { return };
        let tag = match self.random.below(2) {
            0 => 0,
            _ => self.random.below(256) as u32,
        };
        let rkey = Key((metadata.rkey & !0xff) | (metadata.rkey.wrapping_add(tag) & 0xff));
        let at = Remote { addr: metadata.addr + 8 * self.random.below(64), rkey };
        let lane = self.some_lane();
        let way = self.some_way(0, lane);
        let word = self.memory.sge(SCRATCH, 8);
        let to = [word];
        let op = match self.random.below(3) {
            0 => Op::Read { from: at, to: &to },
            1 => Op::CompareSwap { at, compare: 0, swap: u64::MAX, old: word },
            _ => Op::WriteInline { to: at, data: &[0xff; 8] },
        };
        self.cx.tell(|o| o.seen.guesses += 1);
        if self.access(0, way, op) {
            let name = self.cx.tell(|o| o.name(self.cx.who).to_owned());
            let why = format!("{name} reaches the metadata over an access QP");
            self.cx.tell(|o| o.wrong(Invariant::Privilege, why));
        }
    }
}
