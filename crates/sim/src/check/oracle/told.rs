//! What clients say and are told: who holds which chunk, under which keys.

use std::ops::Range;

use fabric::Key;
use pool::scheme::Grant;

use super::{FRESH, Hold, Named, Oracle, Who};
use crate::check::invariant::Invariant;

impl Oracle {
    pub fn asks(&mut self, who: Who) {
        self.clients[who].asking += 1;
        self.note(|o| format!("{} asks for a chunk", o.name(who)));
    }

    /// A request to allocate has ended without a grant.
    pub fn not_granted(&mut self, who: Who, why: &str) {
        self.clients[who].asking -= 1;
        self.note(|o| format!("{} gets none: {why}", o.name(who)));
    }

    pub fn granted(&mut self, who: Who, grant: &Grant) {
        self.clients[who].asking -= 1;
        let honest = self.clients[who].honest;
        self.seen.grants[!honest as usize] += 1;
        let entry = grant.entry;
        if self.case.is_paged() {
            // A number of its own: whose the page is, the tables say.
            return self.note(|o| format!("{} takes page number {entry}", o.name(who)));
        }
        self.note(|o| format!("{} is granted chunk {entry}", o.name(who)));
        let Some(chunks) = self.chunks_of(grant) else {
            return self.wrong(
                Invariant::Owners,
                format!("{} is granted what is no chunk", self.name(who)),
            );
        };
        let named: Vec<Named> = grant.keys().iter().map(|key| (grant.function, *key)).collect();
        let old = named.iter().find(|k| self.granted.contains(k));
        if let Some((_, key)) = old.filter(|_| self.granted.len() < FRESH) {
            let (name, tag) = (self.name(who), key.tag());
            self.wrong(
                Invariant::Keys,
                format!("{name} is granted chunk {entry} under an old key (tag {tag})"),
            );
        }
        self.granted.extend(&named);
        for entry in chunks {
            self.chunk_granted(who, entry, &named);
        }
    }

    /// The chunks of a grant, if it is of what there is.
    fn chunks_of(&self, grant: &Grant) -> Option<Range<u32>> {
        let (first, within) = self.place(grant.addr)?;
        let count = (grant.len / self.chunk_bytes) as u32;
        let fits = within == 0
            && grant.len == count as u64 * self.chunk_bytes
            && first + count <= self.chunks
            && match self.case.sizes {
                true => count.is_power_of_two() && first.is_multiple_of(count),
                false => count == 1 && first == grant.entry,
            };
        fits.then_some(first..first + count)
    }

    /// The first chunk of what was granted: the number that it has here.
    pub fn first_chunk(&self, grant: &Grant) -> u32 {
        match self.case.sizes {
            true => self.place(grant.addr).map_or(u32::MAX, |(chunk, _)| chunk),
            false => grant.entry,
        }
    }

    fn chunk_granted(&mut self, who: Who, entry: u32, named: &[Named]) {
        let honest = self.clients[who].honest;
        if let Some(owner) = self.books.owner(entry)
            && !owner.is_some_and(|id| self.is(who, id))
        {
            let name = self.name(who);
            self.wrong(
                Invariant::Owners,
                format!("{name} is granted chunk {entry}, whose owner is {owner:?}"),
            );
        }
        if let Some(last) = self.holds[entry as usize].last()
            && !last.freeing
        {
            let (name, other) = (self.name(who), self.name(last.who));
            self.wrong(
                Invariant::Owners,
                format!("{name} is granted chunk {entry}, which {other} holds"),
            );
        }
        let at = entry as usize * self.chunk_bytes as usize;
        if honest
            && self.case.scheme.releases()
            && self.image[at..at + self.chunk_bytes as usize].iter().any(|b| *b != 0)
        {
            let name = self.name(who);
            self.wrong(
                Invariant::Contents,
                format!("{name} is granted chunk {entry}, which shows old contents"),
            );
        }
        let keys = named.iter().map(|(_, key)| *key).collect();
        let function = named.first().map_or(0, |(function, _)| *function);
        self.live[entry as usize].extend(named);
        self.holds[entry as usize].push(Hold { who, keys, function, freeing: false });
    }

    /// What is in a chunk, for who is granted one that was not cleared.
    pub fn contents(&self, entry: u32) -> Vec<u8> {
        let size = self.chunk_bytes as usize;
        self.image[entry as usize * size..][..size].to_vec()
    }

    /// A client asks for a chunk to be freed.
    pub fn frees(&mut self, who: Who, entry: u32, keys: &[Key]) {
        self.note(|o| format!("{} frees chunk {entry}", o.name(who)));
        for holds in self.holds_from(entry) {
            let hold = holds.iter_mut().find(|h| h.who == who && h.keys == keys);
            hold.into_iter().for_each(|hold| hold.freeing = true);
        }
    }

    /// Holds of a chunk; and of those behind it, where it may be the first of several.
    fn holds_from(&mut self, entry: u32) -> impl Iterator<Item = &mut Vec<Hold>> {
        let count = if self.case.sizes { usize::MAX } else { 1 };
        self.holds.iter_mut().skip(entry as usize).take(count)
    }

    /// A client is told that the chunk is free.
    pub fn freed(&mut self, who: Who, entry: u32, keys: &[Key]) {
        self.note(|o| format!("{} has freed chunk {entry}", o.name(who)));
        let honest = self.clients[who].honest;
        self.seen.frees[!honest as usize] += 1;
        let hold = self.holds_from(entry).flatten().find(|h| h.who == who && h.keys == keys);
        let function = hold.map_or(0, |hold| hold.function);
        self.holds_from(entry).for_each(|holds| holds.retain(|h| h.who != who || h.keys != keys));
        if self.case.scheme.releases_late() {
            return; // by design its windows are rebound later, before the next allocation of the chunk has ended
        }
        self.dead.extend(keys.iter().map(|key| (function, *key)));
        if self.reaches.iter().any(|r| keys.contains(&r.key)) {
            let name = self.name(who);
            self.wrong(
                Invariant::Releases,
                format!("{name} was told that chunk {entry} is free, and its key still opens it"),
            );
        }
    }

    /// An error of an honest client: is it one that may be?
    pub fn error(&mut self, who: Who, what: &str, error: &pool::Error) {
        use pool::Error as E;
        let honest = self.clients[who].honest;
        self.seen.errors[!honest as usize] += 1;
        self.note(|o| format!("{} {what}: {error}", o.name(who)));
        if !honest {
            return;
        }
        let may_be = match error {
            E::OutOfMemory { .. } => true,
            // What only the network may bring about.
            E::Access { .. } | E::ManagementBroken { .. } | E::Refused { .. } => !self.calm,
            _ => false,
        };
        if !may_be {
            let name = self.name(who);
            self.wrong(Invariant::Answers, format!("{name} {what}, and that ends with: {error}"));
        }
    }
}
