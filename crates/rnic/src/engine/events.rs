//! The events that the port has not taken yet.

use super::queue::CompletionQueue;
use super::queues::Queues;
use crate::spec::Event;
use crate::table::Table;
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use verbs::{AsyncEvent, Cqn, FunctionId};

/// Pending events, and the CQs whose consumers may wait for one.
pub(super) struct Events {
    pending: VecDeque<Event>,
    /// CQs that received a completion in the current `poll`.
    touched: Vec<Cqn>,
}

impl Events {
    pub fn new() -> Self {
        Self { pending: VecDeque::with_capacity(64), touched: Vec::with_capacity(64) }
    }

    /// Raises an asynchronous event for a function.
    pub fn raise(&mut self, function: FunctionId, event: AsyncEvent) {
        self.pending.push_back(Event::Async { function, event });
    }

    /// Notes that a CQ received a completion.
    #[inline]
    pub fn touch(&mut self, cqn: Cqn, cq: &mut CompletionQueue) {
        if !cq.touched {
            cq.touched = true;
            self.touched.push(cqn);
        }
    }

    /// The CQs that received completions since the last [`Events::raise_completions`].
    pub fn touched(&self) -> &[Cqn] {
        &self.touched
    }

    /// Raises an event for each armed CQ that received completions since the last call.
    ///
    /// The fence separates writing the completions from reading `armed`; the consumer has a fence
    /// between writing `armed` and its last poll. So either the NIC sees `armed`, or the consumer
    /// sees the completion.
    #[inline]
    pub fn raise_completions(&mut self, cqs: &mut Table<CompletionQueue>) {
        if self.touched.is_empty() {
            return;
        }
        fence(Ordering::SeqCst);
        while let Some(cqn) = self.touched.pop() {
            let Some(cq) = cqs.get_mut(cqn.raw()) else { continue };
            cq.touched = false;
            if cq.disarm() && !cq.reported {
                cq.reported = true;
                self.pending.push_back(Event::Completion(cqn));
            }
        }
    }

    /// True if no event is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// See [`super::Engine::take_events`].
    pub fn take<'a>(&'a mut self, queues: &'a mut Queues) -> impl Iterator<Item = Event> + 'a {
        let Queues { cqs, qps, .. } = queues;
        self.pending.drain(..).inspect(|event| match event {
            Event::Completion(cqn) => _ = cqs.get_mut(cqn.raw()).map(|cq| cq.reported = false),
            Event::Async { event: AsyncEvent::QpError { qpn, .. }, .. } => {
                _ = qps.get_mut(qpn.raw()).map(|qp| qp.reported = false);
            }
            Event::Async { event: AsyncEvent::LastWqeReached { qpn }, .. } => {
                _ = qps.get_mut(qpn.raw()).map(|qp| qp.last_wqe_reported = false);
            }
            Event::Async { event: AsyncEvent::CqOverrun { .. }, .. }
            | Event::Async { event: AsyncEvent::SrqLimit { .. }, .. } => {}
        })
    }
}
