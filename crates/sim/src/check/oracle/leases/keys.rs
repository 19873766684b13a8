//! Checks of keys and accesses: each lies in a permission of its client, and none outlives it.

use scheme::{Right, Sharing};
use schemes::patronus::book::{PermissionId, PermissionView};
use schemes::patronus::message::PermissionNumber;
use verbs::{Access, Key};

use rnic::engine::{Reachability, Target};

use super::book::is_held;
use super::{Leases, wrong};
use crate::check::invariant::{Invariant, Violation};
use crate::check::oracle::{ClientIndex, Oracle};

/// Rights that only a permission for writing has.
const CHANGES: [Access; 2] = [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC];

fn needed(access: Access) -> Right {
    let changes = CHANGES.iter().any(|right| access.allows(*right));
    if changes { Right::Write } else { Right::Read }
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
        let own = |p: &&PermissionView| oracle.is(client, p.id.client);
        self.book.permissions.iter().filter(own).any(|p| opens(p, range, right))
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
            if !leases.allows(oracle, client, range, needed(aim.need)) {
                let invariant = leases.blame(oracle, client, aim.key, range);
                let why =
                    format!("{name} accesses {range:?} ({:?}) without a permission", aim.need);
                return Err(wrong(invariant, why));
            }
            Ok(())
        });
    }

    /// Checks an access outside the donated memory: only READs and atomics of the client's own
    /// lifetime words may take effect.
    fn word_accessed(&mut self, client: ClientIndex, aim: &Target) {
        let table = self.clients[client].link.client().and_then(|id| self.node_view.words(id));
        let is_own = table.is_some_and(|table| {
            let end = table.addr() + table.len() as u64;
            table.addr() <= aim.addr && aim.addr + aim.len <= end
        });
        if !is_own || aim.need == Access::REMOTE_WRITE {
            let name = self.name(client);
            let why = format!(
                "{name} accesses {} bytes ({:?}) outside the donated memory and its own words",
                aim.len, aim.need
            );
            self.wrong(Invariant::Permissions, why);
        }
    }

    // --- replies -------------------------------------------------------------------------------

    /// Records that a client was granted a permission.
    pub fn lease_granted(&mut self, client: ClientIndex, number: u64, keys: &[Key]) {
        let Some(id) = self.clients[client].link.client() else { return };
        let id = PermissionId { client: id, number: PermissionNumber(number) };
        self.counts.grants[!self.clients[client].honest as usize] += 1;
        self.note(|o| format!("{} is granted permission {number:#x}", o.name(client)));
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

    /// Returns numbers of other clients' permissions.
    pub fn lease_numbers_of_others(&self, client: ClientIndex) -> Vec<u64> {
        let Some(leases) = &self.leases else { return Vec::new() };
        let others = leases.book.permissions.iter().filter(|p| !self.is(client, p.id.client));
        others.map(|p| p.id.number.0).collect()
    }
}
