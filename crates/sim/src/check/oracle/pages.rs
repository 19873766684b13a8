//! Where access is by pages: nobody has a key, and the memory node's queues move what tables map.

use rnic::engine::{Aim, NextKind, Reach, Stepped};
use rnic::ids::Access;

use super::steps::By;
use super::{Oracle, Who};
use crate::check::invariant::Invariant;
use crate::queues::Observed;

impl Oracle {
    pub(super) fn after_step_on_pages(&mut self, o: &Observed, look: impl FnOnce(&mut Vec<Reach>)) {
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) {
            self.look(look);
        }
        let done = (o.stepped == Stepped::Done || o.unanswered) && !o.lost;
        let client = self.of_function(o.function);
        if let Some(who) = client
            && let Some(aim) = o.aim.filter(|_| done)
            && let Some((entry, _)) = self.place(aim.addr)
        {
            let name = self.name(who);
            self.wrong(Invariant::Accesses, format!("{name} reaches page {entry} by itself"));
        }
        // A page is written by a READ of what its owner has sent.
        let answers = self.is_node(o.function);
        let asked = o.towards.filter(|_| answers).and_then(|f| self.of_function(f));
        let fetches = o.aim.is_some_and(|aim| aim.need == Access::REMOTE_READ);
        self.seen.accesses += (done && asked.is_some()) as u64;
        if let Some(aim) = o.aim.filter(|_| done && answers) {
            match asked {
                Some(who) => self.page_sent(who, &aim),
                None => self.note_clearing(&aim),
            }
        }
        self.account_for_bytes(match asked.filter(|_| fetches) {
            Some(who) => By::Answer(who),
            None => By::Node,
        });
        self.check_pages();
        self.check_free();
    }

    /// Something was written to a client, or fetched from it: a page, or what the memory node tells it.
    fn page_sent(&mut self, who: Who, aim: &Aim) {
        let Some((entry, _)) = self.place(aim.local) else { return };
        let name = |o: &Self| o.name(who).to_owned();
        match self.books.owner(entry) {
            Some(Some(owner)) if !self.is(who, owner) => {
                let why = format!("page {entry} is moved for {}, and is {owner:?}'s", name(self));
                self.wrong(Invariant::Accesses, why);
            }
            Some(None) if self.clear[entry as usize] => {
                let why = format!("page {entry} is moved for {} after its release", name(self));
                self.wrong(Invariant::Accesses, why);
            }
            _ => {}
        }
    }

    fn note_clearing(&mut self, aim: &Aim) {
        if aim.need == Access::REMOTE_WRITE
            && let Some((entry, _)) = self.place(aim.addr)
        {
            self.clear[entry as usize] = true;
        }
    }

    /// What a client has sent was put into a page.
    pub(super) fn page_written(&mut self, who: Who, entry: u32) {
        // Of one that is being freed nobody says whose it was.
        if let Some(Some(owner)) = self.books.owner(entry)
            && !self.is(who, owner)
        {
            let name = self.name(who);
            let why = format!("{name} has written to page {entry}, which is {owner:?}'s");
            self.wrong(Invariant::Accesses, why);
        }
    }

    /// Each page is mapped once at most.
    fn check_pages(&mut self) {
        for entry in 0..self.chunks {
            if self.books.owner(entry) != Some(None) {
                self.clear[entry as usize] = false;
            }
            if let Some((a, b)) = self.books.has_two(entry) {
                let why = format!("page {entry} is mapped twice: for {a:?} and for {b:?}");
                return self.wrong(Invariant::Owners, why);
            }
        }
    }
}
