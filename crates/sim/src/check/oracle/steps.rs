//! What each step of a NIC or a CPU did, and whether it may have been done.

use std::fmt::Write as _;

use rnic::engine::{Aim, NextKind, Reach, Stepped};
use rnic::ids::{Access, FunctionId};

use super::{FRESH, Hold, Named, Oracle, Who};
use crate::check::invariant::Invariant;
use crate::queues::Observed;

/// Where blocks have several sizes, one in so many steps has all looked at.
const SELDOM: u64 = 16;

/// Who may have changed bytes in a step.
#[derive(Clone, Copy)]
pub(super) enum By {
    /// The memory node.
    Node,
    /// A function that aims there.
    Client(FunctionId, Aim),
    /// The memory node, for a client that has asked it to.
    Answer(Who),
}

/// The key that is used, where it is looked up.
fn named(aim: &Aim) -> Named {
    (aim.space as u8, aim.key)
}

impl Oracle {
    /// A QP did something. `reaches` is asked again if that may have changed.
    pub fn after_step(&mut self, o: &Observed, look: impl FnOnce(&mut Vec<Reach>)) {
        self.seen.steps += 1;
        self.note(|oracle| oracle.describe(o));
        let node = self.is_node(o.function);
        if self.case.is_paged() {
            return self.after_step_on_pages(o, look);
        }
        // Of many windows it is looked at later who can reach what: see `after_cpu`.
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) && !self.case.sizes {
            self.look(look);
        }
        let done = o.stepped == Stepped::Done || o.unanswered;
        // Between two of its own queues it may do what it likes.
        let elsewhere = o.towards != Some(o.function);
        let aims = |aim: &Aim| elsewhere || self.place(aim.addr).is_some();
        if let Some(aim) = o.aim.filter(|aim| done && !o.lost && aims(aim)) {
            match self.of_function(o.function) {
                Some(who) => self.accessed(who, &aim, o.stepped == Stepped::Done),
                None => self.node_wrote(&aim),
            }
        }
        if self.case.sizes {
            return self.account_for_some(o);
        }
        self.account_for_bytes(match o.aim {
            Some(aim) if !node => By::Client(o.function, aim),
            _ => By::Node,
        });
        let moves = matches!(o.next.kind, NextKind::Send { .. } | NextKind::Atomic);
        if node && (moves || matches!(o.next.kind, NextKind::Write { .. } | NextKind::Window)) {
            self.check_free();
        }
    }

    /// Something else happened: a CPU worked, or a message arrived at one.
    pub fn after_cpu(&mut self, look: impl FnOnce(&mut Vec<Reach>)) {
        self.cpu_steps += 1;
        if self.case.sizes && !self.cpu_steps.is_multiple_of(SELDOM) && !self.has_changed() {
            return; // to look at all windows takes long
        }
        self.look(look);
        self.account_for_bytes(By::Node);
        self.check_free();
    }

    /// In a large memory: what a step may have changed is looked at, and from time to time all of it.
    fn account_for_some(&mut self, o: &Observed) {
        let aim = o.aim.filter(|_| !self.is_node(o.function));
        let aim = aim.filter(|aim| self.place(aim.addr).is_some());
        match aim {
            Some(aim) => self.account_for_bytes(By::Client(o.function, aim)),
            None if self.seen.steps.is_multiple_of(SELDOM) => self.account_for_bytes(By::Node),
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

    /// The chunk that an address lies in, and where in it.
    pub(super) fn place(&self, addr: u64) -> Option<(u32, u64)> {
        let at = addr.checked_sub(self.memory.addr()).filter(|at| *at < self.image.len() as u64)?;
        Some(((at / self.chunk_bytes) as u32, at % self.chunk_bytes))
    }

    /// A client's access took effect, or may have.
    fn accessed(&mut self, who: Who, aim: &Aim, surely: bool) {
        if !surely {
            return; // what it wrote is seen in the bytes
        }
        if self.books.is_metadata(aim.addr) {
            return; // it allocates or frees
        }
        self.seen.accesses += 1;
        let kind = match aim.need {
            Access::REMOTE_READ => "reads",
            Access::REMOTE_WRITE => "writes",
            _ => "changes",
        };
        let Some((entry, at)) = self.place(aim.addr) else {
            if aim.len > 0 {
                let name = self.name(who);
                self.wrong(
                    Invariant::Accesses,
                    format!("{name} {kind} {} bytes of what is no chunk", aim.len),
                );
            }
            return;
        };
        if self.case.sizes {
            let end = (at + aim.len).max(1) - 1;
            let other = (entry..=entry + (end / self.chunk_bytes) as u32)
                .find(|entry| *entry >= self.chunks || !self.may_access(who, *entry, named(aim)));
            if let Some(entry) = other {
                let name = self.name(who);
                self.wrong(
                    Invariant::Accesses,
                    format!("{name} {kind} chunk {entry} with a key that is not its own for it"),
                );
            }
        } else if at + aim.len > self.chunk_bytes {
            let name = self.name(who);
            self.wrong(
                Invariant::Accesses,
                format!("{name} {kind} beyond the end of chunk {entry}"),
            );
        } else if !self.may_access(who, entry, named(aim)) {
            let (name, owner) = (self.name(who), self.books.owner(entry));
            let holds = self.holds[entry as usize].last().map(|h| self.name(h.who));
            self.wrong(Invariant::Accesses, format!(
                "{name} {kind} chunk {entry} with a key that is not its own any more: it is held by \
                 {holds:?}, its owner is {owner:?}"
            ));
        }
    }

    fn may_access(&self, who: Who, entry: u32, (function, key): Named) -> bool {
        let holds = &self.holds[entry as usize];
        let holds_it = |h: &Hold| h.who == who && h.function == function && h.keys.contains(&key);
        if holds.iter().any(holds_it) || self.is_given_away(entry) {
            return true;
        }
        if self.granted.len() < FRESH && self.dead.contains(&(function, key)) {
            return false;
        }
        let client = &self.clients[who];
        // Who keeps to no rule may have thrown the grant away, or use it before it is told.
        let owns = || match self.books.owner(entry) {
            Some(Some(id)) => self.is(who, id),
            Some(None) => client.asking > 0,
            None => true,
        };
        !client.honest && owns()
    }

    /// The memory node wrote to a chunk: it clears it, when no key of it is alive.
    fn node_wrote(&mut self, aim: &Aim) {
        if aim.need == Access::REMOTE_WRITE
            && let Some((entry, _)) = self.place(aim.addr)
        {
            self.cleared(entry);
        }
    }

    fn cleared(&mut self, entry: u32) {
        if self.case.is_paged()
            && let Some(Some(owner)) = self.books.owner(entry)
        {
            self.wrong(
                Invariant::Releases,
                format!("page {entry} is cleared while {owner:?} has it"),
            );
        }
        if let Some(who) = self.reached_by(entry) {
            let name = self.name(who);
            self.wrong(
                Invariant::Releases,
                format!("chunk {entry} is cleared while {name} can still reach it"),
            );
        }
        if let Some(hold) = self.holds[entry as usize].last()
            && !hold.freeing
        {
            let name = self.name(hold.who);
            self.wrong(
                Invariant::Owners,
                format!("chunk {entry} is cleared while {name} holds it"),
            );
        }
    }

    /// Every byte that changed must be one that the last step may change.
    pub(super) fn account_for_bytes(&mut self, by: By) {
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

    fn changed(&mut self, entry: u32, (first, last): (u64, u64), zeros: bool, by: By) {
        let (function, aim) = match by {
            By::Client(function, aim) => (function, aim),
            By::Answer(who) => return self.page_written(who, entry),
            By::Node if zeros => return self.cleared(entry),
            By::Node => {
                let why = format!("bytes {first} to {last} of chunk {entry} change by themselves");
                return self.wrong(Invariant::Contents, why);
            }
        };
        let base = self.memory.addr() + entry as u64 * self.chunk_bytes;
        let covers = aim.addr <= base + first && base + last < aim.addr + aim.len;
        let who = self.of_function(function);
        if aim.need == Access::REMOTE_READ || !covers {
            let name = self.name_of(function);
            self.wrong(
                Invariant::Accesses,
                format!(
                    "{name} changes bytes {first} to {last} of chunk {entry}, where it does not aim"
                ),
            );
        } else if !who.is_some_and(|who| self.may_access(who, entry, named(&aim))) {
            let name = self.name_of(function);
            self.wrong(
                Invariant::Accesses,
                format!("{name} changes chunk {entry}, which is not its own"),
            );
        }
    }
}
