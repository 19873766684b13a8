//! Who can reach which chunk by the NIC's own tables, and what is free.

use pool::SchemeKind;
use rnic::engine::Reach;

use super::{Oracle, Who};
use crate::check::invariant::Invariant;

impl Oracle {
    /// Looks who can reach what now.
    pub fn look(&mut self, look: impl FnOnce(&mut Vec<Reach>)) {
        let mut reaches = std::mem::take(&mut self.reaches);
        reaches.clear();
        look(&mut reaches);
        // The memory node's own queues work on chunks too.
        reaches.retain(|r| !self.is_node(r.function));
        if self.case.is_bound_ahead() {
            reaches.clear(); // what is bound ahead opens to whoever has the key: see what is accessed
        }
        self.reaches = reaches;
        self.check_reaches();
    }

    /// Who can reach a chunk, if somebody can.
    pub(super) fn reached_by(&self, entry: u32) -> Option<Who> {
        let start = self.memory.addr() + entry as u64 * self.chunk_bytes;
        let into = |r: &&Reach| r.start < start + self.chunk_bytes && start < r.start + r.len;
        self.reaches.iter().find(into).and_then(|r| self.of_function(r.function))
    }

    fn check_reaches(&mut self) {
        let type1 = self.case.scheme == SchemeKind::RpcMw1;
        let mut by: Vec<Option<Who>> = vec![None; self.chunks as usize];
        for at in 0..self.reaches.len() {
            let r = self.reaches[at];
            let Some((entry, within)) = self.place(r.start) else { continue };
            let most = if self.case.sizes { self.image.len() as u64 } else { self.chunk_bytes };
            if within + r.len > most {
                return self.wrong(
                    Invariant::Owners,
                    format!("a key of chunk {entry} opens what is beyond it"),
                );
            }
            let Some(who) = self.of_function(r.function) else { continue };
            if self.case.is_paged() {
                let name = self.name(who);
                return self.wrong(Invariant::Owners, format!("{name} has a key to page {entry}"));
            }
            let last = ((within + r.len).max(1) - 1) / self.chunk_bytes;
            for entry in entry..=entry + last as u32 {
                // A type-1 window opens to all who have its key: that is what is unsafe about it.
                if type1 || self.is_given_away(entry) {
                    continue;
                }
                if let Some(other) = by[entry as usize].replace(who)
                    && other != who
                {
                    let (a, b) = (self.name(other), self.name(who));
                    return self.wrong(
                        Invariant::Owners,
                        format!("chunk {entry} can be reached by {a} and by {b}"),
                    );
                }
                self.check_reach(who, entry);
            }
        }
    }

    /// Whether a chunk is of somebody who may have had it bound to another's QPs: that harms himself only.
    pub(super) fn is_given_away(&self, entry: u32) -> bool {
        let honest = |who: Who| self.clients[who].honest;
        self.misnamed
            && match self.books.owner(entry) {
                Some(Some(id)) => {
                    (0..self.clients.len()).any(|who| self.is(who, id) && !honest(who))
                }
                // On its way to somebody, or back from him.
                _ => self.holds[entry as usize].last().is_none_or(|h| !honest(h.who)),
            }
    }

    /// Whether a chunk is a client's, or may be.
    pub fn may_own(&self, who: Who, entry: u32) -> bool {
        let holds = self.holds.get(entry as usize);
        holds.is_some_and(|holds| {
            let owner = self.books.owner(entry);
            holds.iter().any(|h| h.who == who)
                || owner.is_none_or(|o| o.is_some_and(|id| self.is(who, id)))
        })
    }

    fn check_reach(&mut self, who: Who, entry: u32) {
        let holds = &self.holds[entry as usize];
        if holds.iter().any(|h| h.who == who) {
            return;
        }
        let last = holds.last();
        if let Some(other) = last.filter(|h| !h.freeing) {
            let (name, other) = (self.name(who), self.name(other.who));
            return self.wrong(
                Invariant::Owners,
                format!("{name} can reach chunk {entry}, which {other} holds"),
            );
        }
        // One that was granted and not told yet, or told to who did not get the answer.
        let client = &self.clients[who];
        let owns = match self.books.owner(entry) {
            Some(Some(id)) => self.is(who, id),
            Some(None) | None => true, // on its way from one to the other
        };
        if !owns && client.asking == 0 {
            let name = self.name(who);
            self.wrong(
                Invariant::Owners,
                format!("{name} can reach chunk {entry}, which is not its own"),
            );
        }
    }

    pub(super) fn check_free(&mut self) {
        let free = match self.books.free() {
            Ok(Some(free)) => free,
            Ok(None) => return,
            Err(why) => return self.wrong(Invariant::FreeQueue, why),
        };
        let mut seen = vec![false; self.chunks as usize];
        for entry in free {
            if std::mem::replace(&mut seen[entry as usize], true) {
                return self.wrong(Invariant::FreeQueue, format!("chunk {entry} is free twice"));
            }
            if let Some(Some(owner)) = self.books.owner(entry) {
                return self.wrong(
                    Invariant::FreeQueue,
                    format!("chunk {entry} is free, and its owner is {owner:?}"),
                );
            }
            if let Some(hold) = self.holds[entry as usize].iter().find(|h| !h.freeing) {
                let name = self.name(hold.who);
                return self.wrong(
                    Invariant::FreeQueue,
                    format!("chunk {entry} is free, and {name} holds it"),
                );
            }
            if let Some(who) = self.reached_by(entry) {
                let name = self.name(who);
                return self.wrong(
                    Invariant::Releases,
                    format!("chunk {entry} is free, and {name} can reach it"),
                );
            }
            // What it was granted under opens nothing from here on, also where its last owner has it again.
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
            if self.case.scheme.releases() && bytes.iter().any(|b| *b != 0) {
                return self.wrong(
                    Invariant::Contents,
                    format!("chunk {entry} is free, and is not clear"),
                );
            }
        }
    }

    /// All have gone: nothing is in memory, and nobody can reach it.
    pub fn check_empty(&self) -> Result<(), String> {
        let left = self.image.iter().position(|b| *b != 0).filter(|_| self.case.scheme.releases());
        match (left, self.reaches.first()) {
            (Some(at), _) => Err(format!("all have gone, and byte {at} is not clear")),
            (_, Some(reach)) => Err(format!("all have gone, and a key opens: {reach:?}")),
            _ => Ok(()),
        }
    }
}
