//! Checks for access by pages: clients have no keys, and the memory node's queues move the pages
//! that the page tables map.

use rnic::engine::{NextKind, Reachability, StepOutcome, Target};
use verbs::Access;

use super::steps::Originator;
use super::{ClientIndex, Oracle};
use crate::check::invariant::Invariant;
use crate::qp::Observed;

impl Oracle {
    pub(super) fn after_step_on_pages(
        &mut self,
        o: &Observed,
        read: impl FnOnce(&mut Vec<Reachability>),
    ) {
        if matches!(o.next.kind, NextKind::Window | NextKind::Invalidate) {
            self.check_access_rights(read);
        }
        let done = (o.stepped == StepOutcome::Done || o.unanswered) && !o.lost;
        let originator = self.of_function(o.function);
        if let Some(client) = originator
            && let Some(aim) = o.aim.filter(|_| done)
            && let Some((entry, _)) = self.place(aim.addr)
        {
            let name = self.name(client);
            self.wrong(Invariant::Accesses, format!("{name} accesses page {entry} directly"));
        }
        // The memory node writes a page with a READ of the data that the client has sent.
        let answers = self.is_node(o.function);
        let asked = o.towards.filter(|_| answers).and_then(|f| self.of_function(f));
        let fetches = o.aim.is_some_and(|aim| aim.need == Access::REMOTE_READ);
        self.counts.accesses += (done && asked.is_some()) as u64;
        if let Some(aim) = o.aim.filter(|_| done && answers) {
            match asked {
                Some(client) => self.page_sent(client, &aim),
                None => self.note_clearing(&aim),
            }
        }
        self.account_for_bytes(match asked.filter(|_| fetches) {
            Some(client) => Originator::Answer(client),
            None => Originator::Node,
        });
        self.check_pages();
        self.check_free();
    }

    /// Checks data moved to or from a client: a page, or a message of the memory node.
    fn page_sent(&mut self, client: ClientIndex, aim: &Target) {
        let Some((entry, _)) = self.place(aim.local) else { return };
        let name = |o: &Self| o.name(client).to_owned();
        match self.node_view.owner(entry) {
            Some(Some(owner)) if !self.is(client, owner) => {
                let why =
                    format!("page {entry} is moved for {}, but belongs to {owner:?}", name(self));
                self.wrong(Invariant::Accesses, why);
            }
            Some(None) if self.clear[entry as usize] => {
                let why = format!("page {entry} is moved for {} after its release", name(self));
                self.wrong(Invariant::Accesses, why);
            }
            _ => {}
        }
    }

    fn note_clearing(&mut self, aim: &Target) {
        if aim.need == Access::REMOTE_WRITE
            && let Some((entry, _)) = self.place(aim.addr)
        {
            self.clear[entry as usize] = true;
        }
    }

    /// Checks a page into which a client's data was written.
    pub(super) fn page_written(&mut self, client: ClientIndex, entry: u32) {
        // The owner of a page that is being freed is not known.
        if let Some(Some(owner)) = self.node_view.owner(entry)
            && !self.is(client, owner)
        {
            let name = self.name(client);
            let why = format!("{name} has written to page {entry}, which belongs to {owner:?}");
            self.wrong(Invariant::Accesses, why);
        }
    }

    /// Checks that each page is mapped at most once.
    fn check_pages(&mut self) {
        for entry in 0..self.chunks {
            if self.node_view.owner(entry) != Some(None) {
                self.clear[entry as usize] = false;
            }
            if let Some((a, b)) = self.node_view.has_two(entry) {
                let why = format!("page {entry} is mapped twice: for {a:?} and for {b:?}");
                return self.wrong(Invariant::Owners, why);
            }
        }
    }
}
