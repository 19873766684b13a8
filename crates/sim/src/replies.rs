//! Answers of requests to other nodes: the resources that they wait for, event by event, until the
//! requester counts the completion.
//!
//! ```text
//!              ┌─ Memory ──┐
//! executed ────┤           ├─> Link ──> Back ──> counted
//!              └─ Atomics ─┘
//! ```
//!
//! Requests without an answer but an acknowledgement go to `Back` at once: acknowledgements need no
//! link.

use rnic::engine::NextKind;
use rnic::port::inline::InlineNic;
use verbs::Qpn;

use crate::ids::NodeId;
use crate::state::{Event, Pending, State};
use crate::time::Time;

/// Index of an answer.
pub(crate) type ReplyId = u32;

/// The next resource of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    /// The data comes from the memory of the responder.
    Memory,
    /// The responder's atomics unit works on the word at this address.
    Atomics(u64),
    /// The link of the responder; the last byte of the data comes at this time.
    Link(Time),
    /// The requester; the last byte arrives at this time.
    Back(Time),
}

/// An answer under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    pub stage: Stage,
    pub kind: NextKind,
    /// The responder and the requester.
    pub from: NodeId,
    pub to: NodeId,
    /// Time beyond the link's latency: a retransmission, or the report of a refusal.
    pub late: Time,
    /// The completion to count.
    pub counts: Option<Pending>,
    /// The managed QP, with its era, that continues when the request has taken effect.
    pub continues: Option<(Qpn, u32)>,
}

/// The answers under way.
#[derive(Default)]
pub(crate) struct Replies {
    all: Vec<Reply>,
    unused: Vec<ReplyId>,
}

impl Replies {
    fn add(&mut self, reply: Reply) -> ReplyId {
        match self.unused.pop() {
            Some(id) => {
                self.all[id as usize] = reply;
                id
            }
            None => {
                self.all.push(reply);
                self.all.len() as ReplyId - 1
            }
        }
    }
}

impl State {
    /// Starts an answer, whose first stage begins at `at`.
    pub fn answer(&mut self, reply: Reply, at: Time) {
        let id = self.replies.add(reply);
        self.push(at, Event::Reply(id));
    }

    /// Continues an answer.
    pub fn reply(&mut self, nic: &InlineNic, id: ReplyId) {
        let (now, params) = (self.now, self.params.clone());
        let Reply { kind, from, to, .. } = self.replies.all[id as usize];
        let bytes = match kind {
            NextKind::Read { bytes } => bytes,
            _ => 0,
        };
        let (responder, requester) = (from.0 as usize, to.0 as usize);
        let (stage, at) = match self.replies.all[id as usize].stage {
            Stage::Memory => {
                let (first, last) = self.nodes[responder].fetch(now, bytes);
                self.continues(nic, id, last);
                (Stage::Link(last), first)
            }
            Stage::Atomics(addr) => {
                let done = self.nodes[responder].atomic(&params, addr, now) + params.pcie.read;
                self.continues(nic, id, done);
                (Stage::Link(done), done)
            }
            Stage::Link(last) => {
                let (first, last) = self.nodes[responder].send(now, last, bytes);
                let way = params.link.latency + self.replies.all[id as usize].late;
                (Stage::Back(last + way), first + way)
            }
            Stage::Back(last) => {
                let known = self.nodes[requester].answered(&kind, now, last);
                self.replies.unused.push(id);
                if let Some(pending) = self.replies.all[id as usize].counts {
                    self.settle(pending, known);
                    self.plan_waits(nic, pending.cqn());
                }
                return;
            }
        };
        self.replies.all[id as usize].stage = stage;
        match at > now {
            true => self.push(at, Event::Reply(id)),
            // The data is there.
            false => self.reply(nic, id),
        }
    }

    /// Plans the next WQE of the managed QP whose request has taken effect, from `at` on.
    fn continues(&mut self, nic: &InlineNic, id: ReplyId, at: Time) {
        if let Some((qpn, era)) = self.replies.all[id as usize].continues {
            self.plan_again(nic, qpn, era, at);
        }
    }
}
