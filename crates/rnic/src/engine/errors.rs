//! The error state of QPs: transitions to it, their events, and the flush of outstanding work.

use super::core::Core;
use verbs::cqe::{self, Cqe, Syndrome};
use verbs::{AsyncEvent, QpState, Qpn};

impl Core {
    /// Moves a QP to Error. With a syndrome (one of its own WQEs failed), an event is raised for
    /// its owner.
    #[cold]
    pub fn enter_error(&mut self, qpn: Qpn, why: Option<Syndrome>) {
        self.move_to_error(qpn, why, false);
    }

    /// Moves a QP to Error that rejects a request of its peer.
    #[cold]
    pub fn enter_error_rejecting(&mut self, qpn: Qpn, syndrome: Syndrome) {
        self.move_to_error(qpn, Some(syndrome), true);
    }

    fn move_to_error(&mut self, qpn: Qpn, why: Option<Syndrome>, by_peer: bool) {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return };
        if qp.state == QpState::Error {
            return;
        }
        qp.state = QpState::Error;
        qp.drop_partial();
        if let Some(syndrome) = why.filter(|_| !qp.reported) {
            qp.reported = true;
            self.events.raise(qp.function, AsyncEvent::QpError { qpn, syndrome, by_peer });
        }
        if qp.taken_wqe.is_some() {
            self.flush_taken(qpn);
        }
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("looked up above");
        if qp.recv_shared && !qp.last_wqe_reported {
            qp.last_wqe_reported = true;
            self.events.raise(qp.function, AsyncEvent::LastWqeReached { qpn });
        }
        let own = qp.recv.filter(|_| !qp.recv_shared && !qp.flushing);
        if own.and_then(|n| self.queues.recvs.get(n)).is_some_and(|r| !r.managed) {
            qp.flushing = true;
            self.record_poller.add_flushing(qpn);
        }
        self.queues.leave(qpn);
        self.queues.wake_peer(qpn);
        self.queues.schedule(qpn);
    }

    /// Completes, as flushed, the receive WQE of a shared queue that a partly received message has
    /// taken.
    #[cold]
    fn flush_taken(&mut self, qpn: Qpn) {
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("looked up above");
        let Some(counter) = qp.taken_wqe.take() else { return };
        let cqe = Cqe {
            opcode: cqe::opcode::RESP_ERR,
            qpn,
            srqn: Self::srqn_of(qp.recv.unwrap_or(0), qp.recv_shared),
            wqe_counter: counter,
            error: Some(cqe::CqeError { syndrome: Syndrome::Flushed as u8, vendor: 0 }),
            ..Cqe::default()
        };
        let recv_cq = qp.recv_cq;
        self.stats.flushed += 1;
        self.push_cqe(recv_cq, &cqe);
    }

    /// Completes the next outstanding WQE of a QP in Error as flushed (IBTA vol. 1, §10.3.1); send
    /// WQEs first. Returns false if no WQE is outstanding.
    #[cold]
    pub fn flush(&mut self, qpn: Qpn) -> bool {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return false };
        let mut cqe = Cqe {
            qpn,
            error: Some(cqe::CqeError { syndrome: Syndrome::Flushed as u8, vendor: 0 }),
            ..Cqe::default()
        };
        let cqn;
        if qp.pending() > 0 {
            let send = qp.send.as_mut().expect("the QP has a send queue with work");
            let ctrl = send.fetch_control();
            let blocks = ctrl.blocks().min(send.pending());
            cqe.opcode = cqe::opcode::REQ_ERR;
            cqe.wqe_opcode = ctrl.opcode;
            cqe.wqe_counter = send.consumer;
            send.consumer = send.consumer.wrapping_add(blocks as u16);
            cqn = qp.send_cq;
        } else {
            cqn = qp.recv_cq;
            let own = qp.recv.filter(|_| !qp.recv_shared);
            let Some(recv) = own.and_then(|n| self.queues.recvs.get_mut(n)) else { return false };
            if recv.managed || recv.credits() == 0 {
                return false;
            }
            cqe.opcode = cqe::opcode::RESP_ERR;
            cqe.wqe_counter = recv.consumer as u16;
            recv.advance();
        }
        self.stats.flushed += 1;
        self.work += super::core::WQE_WORK;
        self.push_cqe(cqn, &cqe);
        true
    }
}
