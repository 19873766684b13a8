//! Checks which clients can access which chunks by the NIC's tables, and which chunks are free.

use pool::schemes;
use rnic::engine::Reachability;

use super::{ClientIndex, Oracle};
use crate::check::invariant::Invariant;

impl Oracle {
    /// Reads the current access rights from the NIC and checks them.
    pub fn check_access_rights(&mut self, read: impl FnOnce(&mut Vec<Reachability>)) {
        let mut reaches = std::mem::take(&mut self.reaches);
        reaches.clear();
        read(&mut reaches);
        // The memory node's own queues may access chunks.
        reaches.retain(|r| !self.is_node(r.function));
        if self.case.is_bound_ahead() {
            reaches.clear(); // open to any holder of the key: accesses are checked instead
        }
        self.reaches = reaches;
        match self.case.has_leases() {
            true => self.check_lease_reaches(),
            false => self.check_reaches(),
        }
    }

    /// Returns a client that can access a chunk, if any.
    pub(super) fn reached_by(&self, entry: u32) -> Option<ClientIndex> {
        let start = self.memory.addr() + entry as u64 * self.chunk_bytes;
        let into =
            |r: &&Reachability| r.start < start + self.chunk_bytes && start < r.start + r.len;
        self.reaches.iter().find(into).and_then(|r| self.of_function(r.function))
    }

    fn check_reaches(&mut self) {
        let type1 = self.case.scheme == schemes::RPC_MW_1;
        let mut by: Vec<Option<ClientIndex>> = vec![None; self.chunks as usize];
        for at in 0..self.reaches.len() {
            let r = self.reaches[at];
            let Some((entry, within)) = self.place(r.start) else { continue };
            let most = if self.case.sizes { self.image.len() as u64 } else { self.chunk_bytes };
            if within + r.len > most {
                return self.wrong(
                    Invariant::Owners,
                    format!("a key of chunk {entry} opens memory beyond the chunk"),
                );
            }
            let Some(client) = self.of_function(r.function) else { continue };
            if self.case.is_paged() {
                let name = self.name(client);
                return self.wrong(Invariant::Owners, format!("{name} has a key to page {entry}"));
            }
            let last = ((within + r.len).max(1) - 1) / self.chunk_bytes;
            for entry in entry..=entry + last as u32 {
                // A type-1 window opens to any holder of its key; the scheme is unsafe in this
                // respect.
                if type1 || self.is_given_away(entry) {
                    continue;
                }
                if let Some(other) = by[entry as usize].replace(client)
                    && other != client
                {
                    let (a, b) = (self.name(other), self.name(client));
                    return self.wrong(
                        Invariant::Owners,
                        format!("chunk {entry} can be accessed by {a} and by {b}"),
                    );
                }
                self.check_reach(client, entry);
            }
        }
    }

    /// Returns whether the owner of a chunk may have had it bound to another client's QPs, which
    /// harms only that owner.
    pub(super) fn is_given_away(&self, entry: u32) -> bool {
        let honest = |client: ClientIndex| self.clients[client].honest;
        self.misnamed
            && match self.node_view.owner(entry) {
                Some(Some(id)) => {
                    (0..self.clients.len()).any(|client| self.is(client, id) && !honest(client))
                }
                // On its way to a client or back.
                _ => self.holds[entry as usize].last().is_none_or(|h| !honest(h.client)),
            }
    }

    /// Returns whether a chunk is a client's, or may be.
    pub fn may_own(&self, client: ClientIndex, entry: u32) -> bool {
        let holds = self.holds.get(entry as usize);
        holds.is_some_and(|holds| {
            let owner = self.node_view.owner(entry);
            holds.iter().any(|h| h.client == client)
                || owner.is_none_or(|o| o.is_some_and(|id| self.is(client, id)))
        })
    }

    fn check_reach(&mut self, client: ClientIndex, entry: u32) {
        let holds = &self.holds[entry as usize];
        if holds.iter().any(|h| h.client == client) {
            return;
        }
        let last = holds.last();
        if let Some(other) = last.filter(|h| !h.freeing) {
            let (name, other) = (self.name(client), self.name(other.client));
            return self.wrong(
                Invariant::Owners,
                format!("{name} can access chunk {entry}, which {other} holds"),
            );
        }
        // The chunk is granted but the reply has not arrived, or was lost.
        let state = &self.clients[client];
        let owns = match self.node_view.owner(entry) {
            Some(Some(id)) => self.is(client, id),
            Some(None) | None => true, // on its way from one owner to the next
        };
        if !owns && state.allocating == 0 {
            let name = self.name(client);
            self.wrong(
                Invariant::Owners,
                format!("{name} can access chunk {entry}, which is not its own"),
            );
        }
    }

    pub(super) fn check_free(&mut self) {
        let free = match self.node_view.free() {
            Ok(Some(free)) => free,
            Ok(None) => return,
            Err(why) => return self.wrong(Invariant::FreeQueue, why),
        };
        let mut counts = vec![false; self.chunks as usize];
        for entry in free {
            if std::mem::replace(&mut counts[entry as usize], true) {
                return self.wrong(Invariant::FreeQueue, format!("chunk {entry} is free twice"));
            }
            if let Some(Some(owner)) = self.node_view.owner(entry) {
                return self.wrong(
                    Invariant::FreeQueue,
                    format!("chunk {entry} is free, but owned by {owner:?}"),
                );
            }
            if let Some(hold) = self.holds[entry as usize].iter().find(|h| !h.freeing) {
                let name = self.name(hold.client);
                return self.wrong(
                    Invariant::FreeQueue,
                    format!("chunk {entry} is free, but held by {name}"),
                );
            }
            if let Some(client) = self.reached_by(entry) {
                let name = self.name(client);
                return self.wrong(
                    Invariant::Releases,
                    format!("chunk {entry} is free, but {name} can access it"),
                );
            }
            // The keys of the grant are dead from now on, even if the same client gets the chunk
            // again.
            let keys = std::mem::take(&mut self.live[entry as usize]);
            if self.case.is_trusting() {
                self.dead.extend(keys);
            }
            if self.found_clear[entry as usize] {
                continue;
            }
            let at = entry as usize * self.chunk_bytes as usize;
            let bytes = &self.image[at..at + self.chunk_bytes as usize];
            self.found_clear[entry as usize] = bytes.iter().all(|b| *b == 0);
            if self.case.scheme.clears() && bytes.iter().any(|b| *b != 0) {
                return self
                    .wrong(Invariant::Contents, format!("chunk {entry} is free, but not clear"));
            }
        }
    }

    /// After all clients have departed, checks that the memory is clear and inaccessible.
    pub fn check_empty(&self) -> Result<(), String> {
        let left = self.image.iter().position(|b| *b != 0).filter(|_| self.case.clears());
        match (left, self.reaches.first()) {
            (Some(at), _) => {
                Err(format!("after all clients have departed, byte {at} is not clear"))
            }
            (_, Some(reach)) => {
                Err(format!("after all clients have departed, a key is valid: {reach:?}"))
            }
            _ => Ok(()),
        }
    }
}
