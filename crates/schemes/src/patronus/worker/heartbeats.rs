//! QP polling (Patronus §5.3), the alternative to leases: the memory node looks periodically
//! whether the QPs of its compute nodes still answer.
//!
//! A heartbeat is a WRITE of no bytes to a compute node's management QP: one WQE, which the compute
//! node's NIC answers without its CPU. If it is not answered within a period, the compute node has
//! departed: its QPs are closed, and its permissions and objects are taken back. So a crash is
//! noticed without a lease, and a compute node that hangs is not, because its NIC answers.
//!
//! A compute node is polled from the first request of each connection of its management QP on.
//! Before that, its side of the QP may not be connected yet.

use std::sync::atomic::Ordering;
use std::time::Duration;

use scheme::{ClientId, Error};
use verbs::{Nic, QueuePair};

use super::{Core, NEVER, PermissionId, PermissionNumber, Shared, State};
use crate::answers::Heartbeat;
use crate::patronus::book::Effect;

impl<N: Nic> Core<N> {
    /// Begins to poll the QPs of the core's compute nodes, every `period` from `now` on.
    pub fn begin_heartbeats(&self, now: Duration, period: Duration) {
        let first = nanos(now + period);
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        // If it fails, the core does so already.
        let _ = self.next_heartbeat.compare_exchange(NEVER, first, success, failure);
    }
}

fn nanos(at: Duration) -> u64 {
    at.as_nanos() as u64
}

impl<N: Nic> State<N> {
    /// Looks whether the last heartbeats were answered, and posts the next ones, if they are due.
    pub(super) fn poll_qps(
        &mut self,
        shared: &Shared<N>,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) {
        let Some(period) = shared.options.poll_qps() else { return };
        let next = &shared.cores[self.index].next_heartbeat;
        if nanos(now) < next.load(Ordering::Acquire) {
            return;
        }
        let mut dead = Vec::new();
        for (client, peer) in self.peers.iter_mut().filter(|(_, peer)| !peer.leaving) {
            match peer.answers.heartbeat() {
                Heartbeat::Posted => self.counts.heartbeats += 1,
                Heartbeat::NotPosted => {}
                Heartbeat::Unanswered => dead.push(*client),
            }
        }
        for client in dead {
            // If the NIC refuses to close the QPs, the next look tries again.
            if self.depart(shared, client, effects).is_ok() {
                self.counts.dead_qps += 1;
            }
        }
        let is_alone = self.peers.values().all(|peer| peer.leaving);
        next.store(if is_alone { NEVER } else { nanos(now + period) }, Ordering::Release);
    }

    /// Closes the QPs of a compute node that is gone, so that its keys are dead, and lets the book
    /// take back all it had.
    pub fn depart(
        &mut self,
        shared: &Shared<N>,
        client: ClientId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Error> {
        let Some(peer) = self.peers.get_mut(&client) else { return Ok(()) };
        self.by_management.remove(&peer.answers.management.qp.qpn());
        peer.answers.close()?;
        peer.access.shut_down()?;
        if std::mem::replace(&mut peer.leaving, true) {
            return Ok(());
        }
        self.leaving += 1;
        peer.answers.drop_unconfirmed();
        let (now, tables) = (shared.nic.now(), &shared.tables);
        shared.with_book(|book| {
            // Before the departure: an object of a domain whose name was not delivered would live
            // as long as the domain.
            while let Some(number) = peer.answers.take_lost() {
                let id = PermissionId { client, number: PermissionNumber(number) };
                book.undelivered(now, id, &mut &*tables, effects);
            }
            book.depart(now, client, &mut &*tables, effects);
        });
        Ok(())
    }
}
