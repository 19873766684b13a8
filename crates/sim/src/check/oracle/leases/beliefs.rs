//! What honest clients know: their permissions, until when they believe in them, and the answers
//! that they may get.

use std::ops::Range;
use std::time::Duration;

use pool::Error;
use scheme::{Object, Others, Permission, Sharing};
use schemes::patronus::book::{PermissionId, PermissionState};
use schemes::patronus::message::{ObjectId, PermissionNumber};

use super::{Posted, wrong};
use crate::check::invariant::Invariant;
use crate::check::oracle::{ClientIndex, ClientState, Oracle};
use crate::check::trace_text;

/// A permission of an honest client.
pub(super) struct Belief {
    client: ClientIndex,
    permission: Permission,
}

/// An access of an honest client by a permission.
pub struct Use {
    /// Whether the client believed in the permission when the access ended.
    pub believed_after: bool,
    /// Accesses to donated memory that the NIC had refused this client before.
    pub refusals: u32,
}

fn range(permission: &Permission) -> Range<u64> {
    permission.terms().range.clone().unwrap_or(0..permission.object().len)
}

fn conflict(a: &Permission, b: &Permission) -> bool {
    let are_shared = [a, b].iter().all(|permission| permission.terms().sharing == Sharing::Shared);
    let ((first, a_range), (second, b_range)) = ((a.object(), range(a)), (b.object(), range(b)));
    first == second && !are_shared && a_range.start < b_range.end && b_range.start < a_range.end
}

fn name_of(object: &Object) -> ObjectId {
    ObjectId { entry: object.entry, generation: object.generation }
}

impl Oracle {
    /// Returns whether a client's belief in its leases must be right: its clock keeps to the bound
    /// of rates.
    pub fn trusts_clock(&self, client: ClientIndex) -> bool {
        let is_bounded = self.leases.as_ref().is_some_and(|leases| leases.drift_is_bounded);
        is_bounded && !self.clients[client].clock_stopped
    }

    /// Returns whether the memory node may be unable to open a range.
    pub fn windows_may_fail(&self) -> bool {
        self.leases.as_ref().is_some_and(|leases| leases.windows_may_fail)
    }

    /// Returns whether a window operation that fails breaks the QP of accesses.
    pub fn window_faults_break_qps(&self) -> bool {
        self.leases.as_ref().is_some_and(|leases| leases.breaks_qps)
    }

    fn believed(&self, belief: &Belief) -> bool {
        let state = &self.clients[belief.client];
        let now = state.hooks.as_ref().map(|hooks| hooks.local_now());
        now.is_some_and(|now| !belief.permission.left(Duration::from_nanos(now.as_ns())).is_zero())
    }

    /// Records that an honest client was granted a permission. No client may still believe in one
    /// that conflicts with it.
    pub fn believes(&mut self, client: ClientIndex, permission: &Permission) {
        self.check_leases(|leases, oracle| {
            leases.beliefs.retain(|belief| oracle.believed(belief));
            let number = permission.lease().number;
            let is_same = |belief: &Belief| {
                belief.client == client && belief.permission.lease().number == number
            };
            let mut others = leases.beliefs.iter().filter(|belief| !is_same(belief));
            let other = others.find(|belief| {
                oracle.trusts_clock(belief.client) && conflict(&belief.permission, permission)
            });
            if let Some(other) = other {
                let (name, holder) = (oracle.name(client), oracle.name(other.client));
                let why = format!(
                    "{name} is granted {permission:?}, while {holder} believes in {:?}",
                    other.permission
                );
                return Err(wrong(Invariant::Exclusive, why));
            }
            leases.beliefs.retain(|belief| !is_same(belief));
            leases.beliefs.push(Belief { client, permission: permission.clone() });
            Ok(())
        });
    }

    /// Forgets what a departed client believed, and what is freed with its departure: the objects
    /// of a domain go with its last member.
    pub(in crate::check::oracle) fn departs_from_domain(&mut self, client: ClientIndex) {
        self.check_leases(|leases, oracle| {
            leases.beliefs.retain(|belief| belief.client != client);
            let domain = oracle.clients[client].domain;
            let is_member = |state: &ClientState| {
                state.alive && state.domain == domain && state.link.client().is_some()
            };
            let has_members = domain.is_some() && oracle.clients.iter().any(is_member);
            for posted in &mut leases.board {
                let goes = posted.owner == client && posted.others == Others::None;
                posted.freeing |= goes || posted.domain == domain && !has_members;
            }
            Ok(())
        });
    }

    /// Returns the number of accesses to donated memory that the NIC has refused a client.
    pub fn refusals(&self, client: ClientIndex) -> u32 {
        self.clients[client].refusals
    }

    /// Checks an access of an honest client that failed although the library let it through.
    pub fn use_failed(&mut self, client: ClientIndex, by: &Use, error: &Error) {
        let was_refused = self.clients[client].refusals > by.refusals;
        let may_judge = self.trusts_clock(client) && self.calm && !self.window_faults_break_qps();
        self.check_leases(|leases, oracle| {
            if was_refused && may_judge && (by.believed_after || !leases.has_stalls) {
                let name = oracle.name(client);
                let why =
                    format!("{name} has an access refused by a lease that it believes in: {error}");
                return Err(wrong(Invariant::Belief, why));
            }
            Ok(())
        });
    }

    /// Returns the length of the range of a client's permission that has not ended.
    pub fn lease_len(&self, client: ClientIndex, number: u64) -> Option<u64> {
        let id = self.clients[client].link.client()?;
        let id = PermissionId { client: id, number: PermissionNumber(number) };
        self.leases.as_ref()?.book.permission(id).map(|p| p.place.len)
    }

    /// Returns whether a client's permission is open at the memory node, and its lease lasts.
    pub fn is_open(&self, client: ClientIndex, number: u64) -> bool {
        let (Some(leases), Some(id)) = (&self.leases, self.clients[client].link.client()) else {
            return false;
        };
        let id = PermissionId { client: id, number: PermissionNumber(number) };
        leases.book.permission(id).is_some_and(|p| {
            p.state == PermissionState::Open && p.deadline.is_none_or(|end| end > self.node_now)
        })
    }

    /// Returns whether the memory node has noticed a permission of a client.
    pub fn is_noticed(&self, client: ClientIndex, number: u64) -> bool {
        let (Some(leases), Some(id)) = (&self.leases, self.clients[client].link.client()) else {
            return false;
        };
        let id = PermissionId { client: id, number: PermissionNumber(number) };
        leases.book.permission(id).is_some_and(|p| p.is_noticed)
    }

    /// Records an extension that succeeded although the permission had been noticed before it
    /// began.
    pub fn extended_after_notice(&mut self, client: ClientIndex, number: u64) {
        let name = self.name(client);
        let why = format!("{name} extends permission {number:#x} after its notice");
        self.wrong(Invariant::Notified, why);
    }

    // --- objects -------------------------------------------------------------------------------

    /// Records a new object, whose name its allocator tells to all clients.
    pub fn post(&mut self, posted: Posted) {
        self.note(|o| format!("{} has allocated object {}", o.name(posted.owner), posted.object));
        self.leases().board.push(posted);
    }

    /// Returns the posted objects, also those that were freed.
    pub fn board(&self) -> &[Posted] {
        self.leases.as_ref().map_or(&[], |leases| &leases.board)
    }

    /// Records that a client asks to free an object.
    pub fn frees_object(&mut self, client: ClientIndex, object: &Object) {
        self.note(|o| format!("{} frees object {object}", o.name(client)));
        let of_object = |posted: &&mut Posted| posted.object == *object;
        if let Some(posted) = self.leases().board.iter_mut().find(of_object) {
            posted.freeing = true;
        }
    }

    /// Records that a hostile client asks to free an object.
    pub fn frees_named(&mut self, client: ClientIndex, id: ObjectId) {
        let named = self.board().iter().find(|posted| name_of(&posted.object) == id);
        if let Some(posted) = named.filter(|posted| self.may_free(client, posted)) {
            let object = posted.object;
            self.frees_object(client, &object);
        }
    }

    fn may_free(&self, client: ClientIndex, posted: &Posted) -> bool {
        let domain = self.clients[client].domain;
        let is_member = domain.is_some() && domain == posted.domain;
        posted.owner == client || is_member && posted.others == Others::Own
    }

    /// Records the reply to a hostile client that a posted object is freed.
    pub fn named_freed(&mut self, client: ClientIndex, id: ObjectId) {
        let named = self.board().iter().find(|posted| name_of(&posted.object) == id);
        if let Some(posted) = named.filter(|posted| !self.may_free(client, posted)) {
            let why = format!("{} frees a foreign object: {posted:?}", self.name(client));
            self.wrong(Invariant::Permissions, why);
        }
    }

    /// Records the reply that an object is freed: it is released.
    pub fn object_freed(&mut self, client: ClientIndex, object: &Object) {
        self.note(|o| format!("{} has freed object {object}", o.name(client)));
        if self.case.has_no_permissions() {
            return; // the name has the object's address, which may be in use again
        }
        self.check_leases(|leases, oracle| {
            if leases.book.object(name_of(object)).is_some() {
                let name = oracle.name(client);
                let why = format!("{name} got the reply that object {object} is released");
                return Err(wrong(Invariant::Released, why));
            }
            Ok(())
        });
        self.check_lease_reaches();
    }

    /// Records an error of an honest client of a scheme with leases, and checks that it may get it.
    pub fn lease_error(&mut self, client: ClientIndex, what: &str, error: &Error) {
        use Error as E;
        self.counts.errors[0] += 1;
        self.counts.unopened += u64::from(matches!(error, E::Refused { .. }));
        self.note(|o| format!("{} {what}: {}", o.name(client), trace_text(error)));
        let may_be = match error {
            E::OutOfMemory { .. }
            | E::Busy { .. }
            | E::Expired { .. }
            | E::NotExtendable { .. }
            | E::NoSuchObject { .. }
            | E::TooMany { .. } => true,
            E::Access { .. } => !self.calm || self.window_faults_break_qps(),
            E::ManagementBroken { .. } => !self.calm,
            E::Refused { .. } => self.windows_may_fail(),
            _ => false,
        };
        // A clock that is too slow lets accesses through that the NIC refuses.
        let by_clock = matches!(error, E::Access { .. }) && !self.trusts_clock(client);
        if !may_be && !by_clock {
            let name = self.name(client);
            let why = format!("{name} {what} and gets an error without a cause: {error}");
            self.wrong(Invariant::Answers, why);
        }
    }
}
