//! For who schedules QPs himself: which could run, and one step of one of them.

use super::Core;
use super::lists::Place;
use crate::ids::Qpn;
use crate::qp::Qp;
use crate::queue::Fetched;

impl Core {
    /// See [`super::Engine::ready_qps`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        let mut all: Vec<Qpn> = self
            .qps
            .iter()
            .filter(|(_, qp)| self.could_run(qp))
            .map(|(number, _)| Qpn::new(number))
            .collect();
        all.sort_unstable();
        all
    }

    fn could_run(&self, qp: &Qp) -> bool {
        match qp.place {
            Place::Nowhere => self.flushable(qp.qpn) > 0,
            Place::Ready => true,
            Place::Count { cqn, wakes } => {
                self.cqs.get(cqn.raw()).is_none_or(|cq| cq.wakes != wakes)
            }
            Place::Receive(n) => self.recvs.get(n).is_none_or(|r| r.credits() > 0),
        }
    }

    /// See [`super::Engine::step`].
    pub fn step_one(&mut self, wqe: &mut Fetched, now_ns: u64, qpn: Qpn) -> bool {
        self.now_ns = now_ns;
        if !self.qps.get(qpn.raw()).is_some_and(|qp| self.could_run(qp)) {
            return false;
        }
        self.leave(qpn);
        self.step(qpn, wqe);
        self.schedule(qpn);
        self.raise_completion_events();
        true
    }
}
