//! The shadow state: which client holds which chunk under which keys, by requests and replies.

use std::ops::Range;

use scheme::Grant;
use verbs::Key;

use super::{ClientIndex, FRESH, Holding, Named, Oracle};
use crate::check::invariant::Invariant;
use crate::check::trace_text;

impl Oracle {
    pub fn requests_chunk(&mut self, client: ClientIndex) {
        self.clients[client].allocating += 1;
        self.note(|o| format!("{} asks for a chunk", o.name(client)));
    }

    /// Records that an allocation request has ended without a grant.
    pub fn not_granted(&mut self, client: ClientIndex, why: &str) {
        self.clients[client].allocating -= 1;
        self.note(|o| format!("{} gets none: {why}", o.name(client)));
    }

    pub fn granted(&mut self, client: ClientIndex, grant: &Grant) {
        self.clients[client].allocating -= 1;
        if self.case.has_leases() {
            return self.grant_without_lease(client, grant.addr, grant.keys());
        }
        let honest = self.clients[client].honest;
        self.counts.grants[!honest as usize] += 1;
        let entry = grant.entry;
        if self.case.is_paged() {
            // The grant is a page number of the client's own; the page tables name the page's
            // owner.
            return self.note(|o| format!("{} takes page number {entry}", o.name(client)));
        }
        self.note(|o| format!("{} is granted chunk {entry}", o.name(client)));
        let Some(chunks) = self.chunks_of(grant) else {
            return self.wrong(
                Invariant::Owners,
                format!("{} is granted an invalid block", self.name(client)),
            );
        };
        let named: Vec<Named> = grant.keys().iter().map(|key| (grant.function, *key)).collect();
        let old = named.iter().find(|k| self.granted.contains(k));
        let are_fresh = self.case.has_fresh_keys() && self.granted.len() < FRESH;
        if let Some((_, key)) = old.filter(|_| are_fresh) {
            let (name, tag) = (self.name(client), key.tag());
            self.wrong(
                Invariant::Keys,
                format!("{name} is granted chunk {entry} under an old key (tag {tag})"),
            );
        }
        self.granted.extend(&named);
        for entry in chunks {
            self.chunk_granted(client, entry, &named);
        }
    }

    /// Returns the chunks of a grant, or `None` if the grant is not a valid block.
    fn chunks_of(&self, grant: &Grant) -> Option<Range<u32>> {
        let (first, within) = self.place(grant.addr)?;
        let count = (grant.len / self.chunk_bytes) as u32;
        let fits = within == 0
            && grant.len == count as u64 * self.chunk_bytes
            && first + count <= self.chunks
            && match self.case.sizes {
                true => count.is_power_of_two() && first.is_multiple_of(count),
                false => count == 1 && first == grant.entry.raw(),
            };
        fits.then_some(first..first + count)
    }

    /// Returns the first chunk of a grant, by which the oracle identifies the block.
    pub fn first_chunk(&self, grant: &Grant) -> u32 {
        match self.case.sizes {
            true => self.place(grant.addr).map_or(u32::MAX, |(chunk, _)| chunk),
            false => grant.entry.raw(),
        }
    }

    fn chunk_granted(&mut self, client: ClientIndex, entry: u32, named: &[Named]) {
        let honest = self.clients[client].honest;
        if let Some(owner) = self.node_view.owner(entry)
            && !owner.is_some_and(|id| self.is(client, id))
        {
            let name = self.name(client);
            self.wrong(
                Invariant::Owners,
                format!("{name} is granted chunk {entry}, whose owner is {owner:?}"),
            );
        }
        if let Some(last) = self.holds[entry as usize].last()
            && !last.freeing
        {
            let (name, other) = (self.name(client), self.name(last.client));
            self.wrong(
                Invariant::Owners,
                format!("{name} is granted chunk {entry}, which {other} holds"),
            );
        }
        let at = entry as usize * self.chunk_bytes as usize;
        if honest
            && self.case.scheme.clears()
            && self.image[at..at + self.chunk_bytes as usize].iter().any(|b| *b != 0)
        {
            let name = self.name(client);
            self.wrong(
                Invariant::Contents,
                format!("{name} is granted chunk {entry}, which has old contents"),
            );
        }
        let keys = named.iter().map(|(_, key)| *key).collect();
        let function = named.first().map_or(0, |(function, _)| *function);
        self.live[entry as usize].extend(named);
        self.holds[entry as usize].push(Holding { client, keys, function, freeing: false });
    }

    /// Returns the contents of a chunk, for a client that is granted a chunk without clearing.
    pub fn contents(&self, entry: u32) -> Vec<u8> {
        let size = self.chunk_bytes as usize;
        self.image[entry as usize * size..][..size].to_vec()
    }

    /// Records that a client requests a free.
    pub fn frees(&mut self, client: ClientIndex, entry: u32, keys: &[Key]) {
        self.note(|o| format!("{} frees chunk {entry}", o.name(client)));
        for holds in self.holds_from(entry) {
            let hold = holds.iter_mut().find(|h| h.client == client && h.keys == keys);
            hold.into_iter().for_each(|hold| hold.freeing = true);
        }
    }

    /// Returns the holdings of a chunk; if blocks have several sizes, also those of the chunks
    /// behind it.
    fn holds_from(&mut self, entry: u32) -> impl Iterator<Item = &mut Vec<Holding>> {
        let count = if self.case.sizes { usize::MAX } else { 1 };
        self.holds.iter_mut().skip(entry as usize).take(count)
    }

    /// Records the reply to a client that the chunk is free.
    pub fn freed(&mut self, client: ClientIndex, entry: u32, keys: &[Key]) {
        self.note(|o| format!("{} has freed chunk {entry}", o.name(client)));
        if self.case.has_leases() {
            return self.freed_without_lease(client, keys);
        }
        let honest = self.clients[client].honest;
        self.counts.frees[!honest as usize] += 1;
        let hold = self.holds_from(entry).flatten().find(|h| h.client == client && h.keys == keys);
        let function = hold.map_or(0, |hold| hold.function);
        self.holds_from(entry)
            .for_each(|holds| holds.retain(|h| h.client != client || h.keys != keys));
        if self.case.scheme.releases_late() {
            // By design its windows are rebound later, before the next allocation of the chunk
            // ends.
            return;
        }
        self.dead.extend(keys.iter().map(|key| (function, *key)));
        if self.reaches.iter().any(|r| keys.contains(&r.key)) {
            let name = self.name(client);
            self.wrong(
                Invariant::Releases,
                format!(
                    "{name} got the reply that chunk {entry} is free, but its key still opens \
                         the chunk"
                ),
            );
        }
    }

    /// Records an error of a client, and checks that an honest client may get it.
    pub fn error(&mut self, client: ClientIndex, what: &str, error: &pool::Error) {
        use pool::Error as E;
        let honest = self.clients[client].honest;
        self.counts.errors[!honest as usize] += 1;
        self.note(|o| format!("{} {what}: {}", o.name(client), trace_text(error)));
        if !honest {
            return;
        }
        let may_be = match error {
            E::OutOfMemory { .. } => true,
            // Only network faults may cause these errors.
            E::Access { .. } => !self.calm || self.window_faults_break_qps(),
            E::ManagementBroken { .. } => !self.calm,
            E::Refused { .. } => !self.calm || self.windows_may_fail(),
            _ => false,
        };
        if !may_be {
            let name = self.name(client);
            self.wrong(
                Invariant::Answers,
                format!("{name} {what} and gets an error without a cause: {error}"),
            );
        }
    }
}
