//! Checks the effects of each step of a NIC or a CPU.

use std::fmt::Write as _;

use rnic::engine::{NextKind, Reachability, StepOutcome, Target};
use verbs::{Access, FunctionId};

use super::{ClientIndex, FRESH, Holding, Named, Oracle};
use crate::check::invariant::Invariant;
use crate::qp::Observed;

/// If blocks have several sizes, everything is checked only once in this number of steps.
const FULL_CHECK_INTERVAL: u64 = 16;

/// The possible originator of changed bytes.
#[derive(Clone, Copy)]
pub(super) enum Originator {
    /// The memory node.
    Node,
    /// A function that accessed this memory.
    Client(FunctionId, Target),
    /// The memory node, at the request of a client.
    Answer(ClientIndex),
    /// The engine, at the request of a client, or of the memory node's CPU if there is none.
    Engine(Option<ClientIndex>),
}

/// Returns the key of an access, with the function in which it is looked up.
fn named(aim: &Target) -> Named {
    (aim.namespace as u8, aim.key)
}

impl Oracle {
    /// Checks a step of a QP. `read` reads the access rights again if the step may have changed
    /// them.
    pub fn after_step(&mut self, o: &Observed, read: impl FnOnce(&mut Vec<Reachability>)) {
        self.counts.steps += 1;
        self.note(|oracle| oracle.describe(o));
        let node = self.is_node(o.function);
        if self.case.has_leases() {
            return self.after_step_on_leases(o, read);
        }
        if self.case.has_engine() {
            return self.after_step_on_engine(o, read);
        }
        if self.case.is_paged() {
            return self.after_step_on_pages(o, read);
        }
        // If there are many windows, their access rights are checked later, in `after_cpu`.
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) && !self.case.sizes {
            self.check_access_rights(read);
        }
        let done = o.stepped == StepOutcome::Done || o.unanswered;
        // Accesses between two queues of the same function are not restricted.
        let elsewhere = o.towards != Some(o.function);
        let aims = |aim: &Target| elsewhere || self.place(aim.addr).is_some();
        if let Some(aim) = o.aim.filter(|aim| done && !o.lost && aims(aim)) {
            match self.of_function(o.function) {
                Some(client) => self.accessed(client, &aim, o.stepped == StepOutcome::Done),
                None => self.node_wrote(&aim),
            }
        }
        if self.case.sizes {
            return self.account_for_some(o);
        }
        self.account_for_bytes(match o.aim {
            Some(aim) if !node => Originator::Client(o.function, aim),
            _ => Originator::Node,
        });
        let moves = matches!(o.next.kind, NextKind::Send { .. } | NextKind::Atomic);
        if node && (moves || matches!(o.next.kind, NextKind::Write { .. } | NextKind::Window)) {
            self.check_free();
        }
    }

    /// Checks any other event: a CPU worked, or a message arrived at a CPU.
    pub fn after_cpu(&mut self, read: impl FnOnce(&mut Vec<Reachability>)) {
        self.cpu_steps += 1;
        if self.case.has_leases() {
            return self.after_cpu_on_leases(read);
        }
        if self.case.sizes
            && !self.cpu_steps.is_multiple_of(FULL_CHECK_INTERVAL)
            && !self.has_changed()
        {
            return; // reading the access rights of all windows takes long
        }
        self.check_access_rights(read);
        if self.case.has_engine() {
            return self.check_engine(None);
        }
        self.account_for_bytes(Originator::Node);
        self.check_free();
    }

    /// In a large memory: checks the bytes that a step may have changed, and from time to time all
    /// bytes.
    fn account_for_some(&mut self, o: &Observed) {
        let aim = o.aim.filter(|_| !self.is_node(o.function));
        let aim = aim.filter(|aim| self.place(aim.addr).is_some());
        match aim {
            Some(aim) => self.account_for_bytes(Originator::Client(o.function, aim)),
            None if self.counts.steps.is_multiple_of(FULL_CHECK_INTERVAL) => {
                self.account_for_bytes(Originator::Node)
            }
            None => {}
        }
    }

    fn has_changed(&mut self) -> bool {
        let mut now = std::mem::take(&mut self.now_bytes);
        self.memory.read(0, &mut now);
        let changed = now != self.image;
        self.now_bytes = now;
        changed
    }

    fn describe(&self, o: &Observed) -> String {
        let mut line = format!(
            "{} QP {} -> {}: {:?}",
            self.name_of(o.function),
            o.qpn.raw(),
            o.next.peer.raw(),
            o.next.kind
        );
        if let Some(aim) = &o.aim
            && let Some((entry, at)) = self.place(aim.addr)
        {
            let _ = write!(line, " at chunk {entry} +{at}");
        }
        let _ = write!(line, " {:?}", o.stepped);
        if o.lost {
            line.push_str(", lost");
        }
        if o.unanswered {
            line.push_str(", the answer lost");
        }
        line
    }

    /// Returns the chunk that contains an address, and the offset within the chunk.
    pub(super) fn place(&self, addr: u64) -> Option<(u32, u64)> {
        let at = addr.checked_sub(self.memory.addr()).filter(|at| *at < self.image.len() as u64)?;
        Some(((at / self.chunk_bytes) as u32, at % self.chunk_bytes))
    }

    /// Checks a client's access that took effect or may have taken effect.
    fn accessed(&mut self, client: ClientIndex, aim: &Target, surely: bool) {
        if !surely {
            return; // a write shows in the bytes
        }
        if self.node_view.is_metadata(aim.addr) {
            return; // it allocates or frees
        }
        self.counts.accesses += 1;
        let kind = match aim.need {
            Access::REMOTE_READ => "reads",
            Access::REMOTE_WRITE => "writes",
            _ => "changes",
        };
        let Some((entry, at)) = self.place(aim.addr) else {
            if aim.len > 0 {
                let name = self.name(client);
                self.wrong(
                    Invariant::Accesses,
                    format!("{name} {kind} {} bytes outside the donated memory", aim.len),
                );
            }
            return;
        };
        if self.case.sizes {
            let end = (at + aim.len).max(1) - 1;
            let other = (entry..=entry + (end / self.chunk_bytes) as u32).find(|entry| {
                *entry >= self.chunks || !self.may_access(client, *entry, named(aim))
            });
            if let Some(entry) = other {
                let name = self.name(client);
                self.wrong(
                    Invariant::Accesses,
                    format!("{name} {kind} chunk {entry} with a key that was not granted to it"),
                );
            }
        } else if at + aim.len > self.chunk_bytes {
            let name = self.name(client);
            self.wrong(
                Invariant::Accesses,
                format!("{name} {kind} beyond the end of chunk {entry}"),
            );
        } else if !self.may_access(client, entry, named(aim)) {
            let (name, owner) = (self.name(client), self.node_view.owner(entry));
            let holds = self.holds[entry as usize].last().map(|h| self.name(h.client));
            self.wrong(
                Invariant::Accesses,
                format!(
                    "{name} {kind} chunk {entry} with a key that is no longer valid for it: holder \
                 {holds:?}, owner {owner:?}"
                ),
            );
        }
    }

    fn may_access(&self, client: ClientIndex, entry: u32, (function, key): Named) -> bool {
        let holds = &self.holds[entry as usize];
        let holds_it =
            |h: &Holding| h.client == client && h.function == function && h.keys.contains(&key);
        if holds.iter().any(holds_it) || self.is_given_away(entry) {
            return true;
        }
        if self.granted.len() < FRESH && self.dead.contains(&(function, key)) {
            return false;
        }
        let state = &self.clients[client];
        // A hostile client may have discarded the grant, or use it before the reply arrives.
        let owns = || match self.node_view.owner(entry) {
            Some(Some(id)) => self.is(client, id),
            Some(None) => state.allocating > 0,
            None => true,
        };
        !state.honest && owns()
    }

    /// Checks a write of the memory node to a chunk, which clears it: no key of the chunk may be
    /// valid.
    fn node_wrote(&mut self, aim: &Target) {
        if aim.need == Access::REMOTE_WRITE
            && let Some((entry, _)) = self.place(aim.addr)
        {
            self.cleared(entry);
        }
    }

    fn cleared(&mut self, entry: u32) {
        if self.case.is_paged()
            && let Some(Some(owner)) = self.node_view.owner(entry)
        {
            self.wrong(
                Invariant::Releases,
                format!("page {entry} is cleared while {owner:?} owns it"),
            );
        }
        if let Some(client) = self.reached_by(entry) {
            let name = self.name(client);
            self.wrong(
                Invariant::Releases,
                format!("chunk {entry} is cleared while {name} can still access it"),
            );
        }
        if let Some(hold) = self.holds[entry as usize].last()
            && !hold.freeing
        {
            let name = self.name(hold.client);
            self.wrong(
                Invariant::Owners,
                format!("chunk {entry} is cleared while {name} holds it"),
            );
        }
    }

    /// Checks that every changed byte is one that the last step may change.
    pub(super) fn account_for_bytes(&mut self, by: Originator) {
        let mut now = std::mem::take(&mut self.now_bytes);
        self.memory.read(0, &mut now);
        if now != self.image {
            let size = self.chunk_bytes as usize;
            for entry in 0..self.chunks {
                let (old, new) = (
                    &self.image[entry as usize * size..][..size],
                    &now[entry as usize * size..][..size],
                );
                if old == new {
                    continue;
                }
                let Some(first) = (0..size).find(|i| old[*i] != new[*i]) else { continue };
                self.found_clear[entry as usize] = false;
                let last = (0..size).rfind(|i| old[*i] != new[*i]).unwrap_or(first);
                let zeros = (first..=last).all(|i| new[i] == 0 || new[i] == old[i]);
                self.changed(entry, (first as u64, last as u64), zeros, by);
            }
            self.image.copy_from_slice(&now);
        }
        self.now_bytes = now;
    }

    fn changed(&mut self, entry: u32, (first, last): (u64, u64), zeros: bool, by: Originator) {
        let (function, aim) = match by {
            Originator::Client(function, aim) => (function, aim),
            Originator::Answer(client) => return self.page_written(client, entry),
            Originator::Engine(client) => return self.engine_wrote(client, entry, zeros),
            Originator::Node if zeros => return self.cleared(entry),
            Originator::Node => {
                let why =
                    format!("bytes {first} to {last} of chunk {entry} change without a cause");
                return self.wrong(Invariant::Contents, why);
            }
        };
        let base = self.memory.addr() + entry as u64 * self.chunk_bytes;
        let covers = aim.addr <= base + first && base + last < aim.addr + aim.len;
        let client = self.of_function(function);
        if aim.need == Access::REMOTE_READ || !covers {
            let name = self.name_of(function);
            self.wrong(
                Invariant::Accesses,
                format!(
                    "{name} changes bytes {first} to {last} of chunk {entry}, outside its access"
                ),
            );
        } else if !client.is_some_and(|client| self.may_access(client, entry, named(&aim))) {
            let name = self.name_of(function);
            self.wrong(
                Invariant::Accesses,
                format!("{name} changes chunk {entry}, which is not its own"),
            );
        }
    }
}
