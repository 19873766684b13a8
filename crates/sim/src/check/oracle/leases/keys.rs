//! Checks of keys and accesses: each lies in a permission of its client, and none outlives it.

use scheme::{ClientId, Others, Right, Sharing};
use schemes::patronus::book::{PermissionId, PermissionView};
use schemes::patronus::message::PermissionNumber;
use verbs::{Access, Key};

use rnic::engine::{Reachability, Target};

use super::book::is_held;
use super::{Leases, wrong};
use crate::check::invariant::{Invariant, Violation};
use crate::check::oracle::{ClientIndex, Oracle};

/// Bytes of a lifetime.
const LIFETIME: u64 = 8;

/// Rights that only a permission for writing has.
const CHANGES: [Access; 2] = [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC];

fn needed(access: Access) -> Right {
    let changes = CHANGES.iter().any(|right| access.allows(*right));
    if changes { Right::Write } else { Right::Read }
}

/// Returns the name of the operation that needs a right.
fn operation(need: Access) -> &'static str {
    match need {
        Access::REMOTE_READ => "a READ",
        Access::REMOTE_WRITE => "a WRITE",
        _ => "an atomic",
    }
}

/// Returns whether a permission opens `len` bytes at `offset` with this right.
fn opens(permission: &PermissionView, (offset, len): (u64, u64), right: Right) -> bool {
    let place = permission.place;
    is_held(permission)
        && permission.right >= right
        && place.offset <= offset
        && offset + len <= place.offset + place.len
}

impl Leases {
    /// Returns whether a client has a permission for these bytes and this right.
    pub(super) fn allows(
        &self,
        oracle: &Oracle,
        client: ClientIndex,
        range: (u64, u64),
        right: Right,
    ) -> bool {
        if oracle.case.has_no_permissions() {
            return self.may_use(oracle, client, range, right);
        }
        let own = |p: &&PermissionView| oracle.is(client, p.id.client);
        self.book.permissions.iter().filter(own).any(|p| opens(p, range, right))
    }

    /// Returns whether these bytes are of an object that a client may use: without permissions, the
    /// right to acquire one counts.
    fn may_use(
        &self,
        oracle: &Oracle,
        client: ClientIndex,
        (offset, len): (u64, u64),
        right: Right,
    ) -> bool {
        let least = match right {
            Right::Read => Others::Read,
            Right::Write => Others::Write,
        };
        let domain = oracle.clients[client].domain;
        self.book.objects.iter().any(|object| {
            let is_member = domain.is_some() && domain == object.domain && object.others >= least;
            let is_own = object.owner.is_some_and(|owner| oracle.is(client, owner));
            (is_own || is_member)
                && object.place.offset <= offset
                && offset + len <= object.place.offset + object.place.len
        })
    }

    /// Returns whether an access is a READ or an atomic of a lifetime of the client's own, in a
    /// scheme with headers.
    pub(super) fn is_own_lifetime(
        &self,
        oracle: &Oracle,
        client: ClientIndex,
        aim: &Target,
    ) -> bool {
        let is_own = |p: &PermissionView| {
            let lifetime = oracle.node_view.lifetime(p.id.client, p.id.number.slot());
            is_held(p)
                && oracle.is(client, p.id.client)
                && lifetime.is_some_and(|at| at <= aim.addr && aim.addr + aim.len <= at + LIFETIME)
        };
        aim.need != Access::REMOTE_WRITE && self.book.permissions.iter().any(is_own)
    }

    /// Names the invariant that a use of `key` violates.
    fn blame(
        &self,
        oracle: &Oracle,
        client: ClientIndex,
        key: Key,
        (offset, len): (u64, u64),
    ) -> Invariant {
        let of_another = |p: &PermissionView| {
            is_held(p)
                && p.sharing == Sharing::Exclusive
                && !oracle.is(client, p.id.client)
                && p.place.offset < offset + len
                && offset < p.place.offset + p.place.len
        };
        if self.book.permissions.iter().any(of_another) {
            Invariant::Exclusive
        } else if self.dead.contains(&(client, key)) {
            Invariant::Dead
        } else {
            Invariant::Permissions
        }
    }

    fn check_reach(&self, oracle: &Oracle, r: &Reachability) -> Result<(), Violation> {
        let Some(client) = oracle.of_function(r.function) else { return Ok(()) };
        let Some(range) = oracle.offset(r.start).map(|offset| (offset, r.len)) else {
            return Ok(());
        };
        let name = oracle.name(client);
        if self.dead.contains(&(client, r.key)) {
            let why = format!(
                "{name} can access {} bytes at {:#x} by the key of a permission that has ended",
                range.1, range.0
            );
            return Err(wrong(Invariant::Dead, why));
        }
        if !self.allows(oracle, client, range, needed(r.access)) {
            let invariant = self.blame(oracle, client, r.key, range);
            let why = format!(
                "{name} can access {} bytes at {:#x} ({:?}) without a permission",
                range.1, range.0, r.access
            );
            return Err(wrong(invariant, why));
        }
        Ok(())
    }
}

impl Oracle {
    /// Returns the offset of an address in the donated memory.
    pub(super) fn offset(&self, addr: u64) -> Option<u64> {
        let (chunk, within) = self.place(addr)?;
        Some(u64::from(chunk) * self.chunk_bytes + within)
    }

    /// Checks every way in which a client can access donated memory.
    pub(in crate::check::oracle) fn check_lease_reaches(&mut self) {
        self.check_leases(|leases, oracle| {
            oracle.reaches.iter().try_for_each(|r| leases.check_reach(oracle, r))
        });
    }

    /// Checks an access of a client that took effect.
    pub(super) fn lease_accessed(&mut self, client: ClientIndex, aim: &Target) {
        self.counts.accesses += 1;
        let Some(offset) = self.offset(aim.addr) else {
            return self.word_accessed(client, aim);
        };
        self.check_leases(|leases, oracle| {
            let (name, range) = (oracle.name(client), (offset, aim.len));
            if leases.dead.contains(&(client, aim.key)) {
                let why = format!("{name} accesses {range:?} by the key of an ended permission");
                return Err(wrong(Invariant::Dead, why));
            }
            let is_own_lifetime = leases.is_own_lifetime(oracle, client, aim);
            if !is_own_lifetime && !leases.allows(oracle, client, range, needed(aim.need)) {
                let invariant = leases.blame(oracle, client, aim.key, range);
                let by = operation(aim.need);
                let why = format!("{name} accesses {range:?} by {by} without a permission");
                return Err(wrong(invariant, why));
            }
            Ok(())
        });
    }

    /// Checks an access outside the donated memory: only READs and atomics of the client's own
    /// lifetime words may take effect.
    fn word_accessed(&mut self, client: ClientIndex, aim: &Target) {
        let table = self.clients[client].link.client().and_then(|id| self.node_view.words(id));
        let is_in_table = table.is_some_and(|table| {
            let end = table.addr() + table.len() as u64;
            table.addr() <= aim.addr && aim.addr + aim.len <= end
        });
        self.check_leases(|leases, oracle| {
            let name = oracle.name(client);
            if leases.dead.contains(&(client, aim.key)) {
                let why = format!("{name} accesses a lifetime by the key of an ended permission");
                return Err(wrong(Invariant::Dead, why));
            }
            let is_own = is_in_table || leases.is_own_lifetime(oracle, client, aim);
            if !is_own || aim.need == Access::REMOTE_WRITE {
                let (len, by) = (aim.len, operation(aim.need));
                let why = format!(
                    "{name} accesses {len} bytes by {by} outside the donated memory and its own \
                     words"
                );
                return Err(wrong(Invariant::Permissions, why));
            }
            Ok(())
        });
    }

    // --- replies -------------------------------------------------------------------------------

    /// Records that a client was granted a permission.
    pub fn lease_granted(&mut self, client: ClientIndex, number: u64, keys: &[Key]) {
        let Some(id) = self.clients[client].link.client() else { return };
        let id = PermissionId { client: id, number: PermissionNumber(number) };
        self.counts.grants[!self.clients[client].honest as usize] += 1;
        self.note(|o| format!("{} is granted permission {number:#x}", o.name(client)));
        if self.case.has_no_permissions() {
            return; // all have one key, which stays valid
        }
        self.check_leases(|leases, oracle| {
            // The lanes of a group share a key.
            let mut distinct = keys.to_vec();
            distinct.dedup();
            for key in &distinct {
                if !leases.had.insert((client, *key)) {
                    let name = oracle.name(client);
                    let why = format!("{name} is granted a permission under an old key");
                    return Err(wrong(Invariant::Keys, why));
                }
            }
            // The reply may arrive after the end.
            if leases.ended.contains(&id) || leases.book.permission(id).is_none() {
                leases.dead.extend(keys.iter().map(|key| (client, *key)));
            } else {
                leases.granted.insert(id, distinct);
            }
            Ok(())
        });
        self.check_lease_reaches();
    }

    /// Records the reply to a client that a permission has ended: its keys are dead.
    pub fn lease_revoked(&mut self, client: ClientIndex, number: u64, keys: &[Key]) {
        let Some(id) = self.clients[client].link.client() else { return };
        let id = PermissionId { client: id, number: PermissionNumber(number) };
        self.counts.frees[!self.clients[client].honest as usize] += 1;
        self.note(|o| format!("{} has revoked permission {number:#x}", o.name(client)));
        if self.case.has_no_permissions() {
            return;
        }
        self.check_leases(|leases, oracle| {
            if leases.book.permission(id).is_some() {
                let name = oracle.name(client);
                let why = format!("{name} got the reply that permission {number:#x} has ended");
                return Err(wrong(Invariant::Dead, why));
            }
            leases.dead.extend(keys.iter().map(|key| (client, *key)));
            Ok(())
        });
        self.check_lease_reaches();
    }

    /// Records a grant without a lease.
    pub(in crate::check::oracle) fn grant_without_lease(
        &mut self,
        client: ClientIndex,
        addr: u64,
        keys: &[Key],
    ) {
        let offset = self.offset(addr);
        let id = self.check_leases(|leases, oracle| {
            let is_it = |p: &&PermissionView| {
                is_held(p) && oracle.is(client, p.id.client) && Some(p.place.offset) == offset
            };
            Ok(leases.book.permissions.iter().find(is_it).map(|p| p.id.number.0))
        });
        match id.flatten() {
            Some(number) => self.lease_granted(client, number, keys),
            // The connection ends while the reply arrives.
            None => self.counts.grants[!self.clients[client].honest as usize] += 1,
        }
    }

    /// Records the reply to a client that a grant without a lease is freed.
    pub(in crate::check::oracle) fn freed_without_lease(
        &mut self,
        client: ClientIndex,
        keys: &[Key],
    ) {
        self.counts.frees[!self.clients[client].honest as usize] += 1;
        if self.case.has_no_permissions() {
            return;
        }
        self.check_leases(|leases, _| {
            leases.dead.extend(keys.iter().map(|key| (client, *key)));
            Ok(())
        });
        self.check_lease_reaches();
    }

    /// Returns keys that other clients were granted, with the offsets of their ranges.
    pub fn lease_keys_of_others(&self, client: ClientIndex) -> Vec<(u64, Key)> {
        let Some(leases) = &self.leases else { return Vec::new() };
        let others = leases.granted.iter().filter(|(id, _)| !self.is(client, id.client));
        let with_place = others.filter_map(|(id, keys)| {
            let addr = self.memory.addr() + leases.book.permission(*id)?.place.offset;
            Some(keys.iter().map(move |key| (addr, *key)))
        });
        with_place.flatten().collect()
    }

    /// Returns the addresses of objects that other clients have allocated.
    pub fn objects_of_others(&self, client: ClientIndex) -> Vec<u64> {
        let Some(leases) = &self.leases else { return Vec::new() };
        let is_own = |owner: ClientId| self.is(client, owner);
        let objects = leases.book.objects.iter().filter(|object| !object.owner.is_some_and(is_own));
        objects.map(|object| self.memory.addr() + object.place.offset).collect()
    }

    /// Returns numbers of other clients' permissions.
    pub fn lease_numbers_of_others(&self, client: ClientIndex) -> Vec<u64> {
        let Some(leases) = &self.leases else { return Vec::new() };
        let others = leases.book.permissions.iter().filter(|p| !self.is(client, p.id.client));
        others.map(|p| p.id.number.0).collect()
    }
}
