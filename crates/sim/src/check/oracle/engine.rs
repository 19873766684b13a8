//! Checks for pages behind an engine: clients address the pages directly, and the engine decides
//! over each access.

use rnic::engine::{NextKind, Reachability, StepOutcome, Target};
use verbs::Access;

use super::steps::Originator;
use super::{ClientIndex, Oracle};
use crate::check::invariant::Invariant;
use crate::qp::Observed;

impl Oracle {
    pub(super) fn after_step_on_engine(
        &mut self,
        o: &Observed,
        read: impl FnOnce(&mut Vec<Reachability>),
    ) {
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) {
            self.check_access_rights(read);
        }
        let client = self.of_function(o.function);
        let done = (o.stepped == StepOutcome::Done || o.unanswered) && !o.lost;
        if let (Some(client), Some(aim)) = (client, o.aim.filter(|_| done)) {
            self.reaches_page(client, &aim);
        }
        self.check_engine(client);
    }

    /// Checks an access of a client that took effect.
    fn reaches_page(&mut self, client: ClientIndex, aim: &Target) {
        let Some((entry, at)) = self.place(aim.addr).filter(|_| aim.len > 0) else { return };
        self.counts.accesses += 1;
        let owner = self.node_view.owner(entry);
        let is_own = owner.is_none_or(|owner| owner.is_some_and(|id| self.is(client, id)));
        if aim.need != Access::REMOTE_READ || !is_own || at + aim.len > self.chunk_bytes {
            let name = self.name(client);
            let why = format!(
                "{name} accesses {} bytes at byte {at} of page {entry}, which belongs to {owner:?}",
                aim.len
            );
            self.wrong(Invariant::Accesses, why);
        }
    }

    /// Checks the tables and the pages after the engine may have executed a command of `client`, or
    /// of the memory node's CPU if there is none.
    pub(super) fn check_engine(&mut self, client: Option<ClientIndex>) {
        self.check_owners(client);
        self.account_for_bytes(Originator::Engine(client));
        self.check_free();
    }

    /// Checks that a client has changed the owner of its own pages only.
    fn check_owners(&mut self, client: Option<ClientIndex>) {
        let now = self.node_view.owner_numbers();
        for (entry, (&old, &new)) in (0..).zip(self.owner_numbers.iter().zip(&now)) {
            // A number without a compute node is that of one whose pages were just freed.
            let may_change = |number: u16| {
                let owner = self.node_view.owner_of_number(number);
                number == 0
                    || match (client, owner) {
                        (Some(client), Some(id)) => self.is(client, id),
                        (None, Some(id)) => self.has_departed(id),
                        (_, None) => true,
                    }
            };
            if old != new && !(may_change(old) && may_change(new)) {
                let name = client.map_or("the memory node", |client| self.name(client));
                let why = format!("{name} changes the owner of page {entry} from {old} to {new}");
                self.wrong(Invariant::Owners, why);
                break;
            }
        }
        self.owner_numbers = now;
    }

    /// Returns whether no living client has this number.
    fn has_departed(&self, id: scheme::ClientId) -> bool {
        !(0..self.clients.len()).any(|client| self.is(client, id) && self.clients[client].alive)
    }

    /// Checks a page that the engine has written or cleared.
    pub(super) fn engine_wrote(&mut self, client: Option<ClientIndex>, entry: u32, zeros: bool) {
        let owner = self.node_view.owner(entry);
        let is_right = match owner {
            None => true,
            Some(None) => zeros,
            Some(Some(id)) => client.is_some_and(|client| self.is(client, id)),
        };
        if !is_right {
            let name = client.map_or("the memory node", |client| self.name(client));
            let why = format!("{name} changes page {entry}, which belongs to {owner:?}");
            self.wrong(Invariant::Accesses, why);
        }
    }
}
