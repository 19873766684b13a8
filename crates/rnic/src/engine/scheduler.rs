//! The scheduler: deficit round robin over functions, and within each function over its QPs.
//!
//! ```text
//!  physical function ──────────────────> every `physical_every`-th quantum, while it has work
//!  virtual functions: A ─> B ─> C ─> A   the remaining quanta, in order
//!                 D ─┘  │
//!                       └─ ready QPs: 7 ─> 9 ─> 12 ─> 7
//! ```
//!
//! In the diagram, D has just become active and had no quantum for a full round. D gets the missed
//! quantum now, before A, and is then appended to the round. A function with little work thus waits
//! for the quantum in progress, not for one quantum of each other function. No function gets two
//! quanta in one round.
//!
//! Work is counted in bytes: the bytes moved, plus, for fetching, checking and completing WQEs, the
//! bytes that could be moved in the same time. The quantum of a function is `function_turn` bytes,
//! that of a QP is `qp_turn` bytes. A slice is not cut to the rest of the quantum, so a quantum can
//! be overrun; the excess is subtracted from the next quantum (debt). A function or QP that runs
//! out of work loses the rest of its quantum, but keeps its debt. The debt of an idle function is
//! repaid by the quanta that the function would have had meanwhile. A function that pauses long
//! enough between two requests therefore has no debt, and its second request is not delayed by the
//! excess of the first.

use super::qp_list::QpList;
use crate::limits::Limits;
use std::collections::VecDeque;

/// The scheduler's state of one function.
pub(super) struct FunctionQueue {
    /// Its ready QPs.
    pub ready: QpList,
    /// Deficit counter in bytes: the rest of its quantum; negative: its debt.
    pub deficit: i64,
    position: Position,
    /// While the function is idle: the value of [`Scheduler::debt_clock`] up to which the debt is
    /// repaid.
    repaid_until: u64,
}

/// The scheduler queue that contains a function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    /// None: the function has no work.
    Idle,
    /// The round.
    Round,
    /// The priority queue, ahead of the round: the function has missed a round.
    Priority,
}

/// The scheduler. The physical function has index [`Scheduler::PHYSICAL`].
pub(super) struct Scheduler {
    functions: Vec<FunctionQueue>,
    unused: Vec<u32>,
    /// The virtual functions with work. The first one has the current or the next quantum.
    round: VecDeque<u32>,
    /// Virtual functions that get one quantum before the round continues.
    priority: VecDeque<u32>,
    /// Quanta of virtual functions since the last quantum of the physical function.
    virtual_quanta: u32,
    /// The function that had the last quantum, and the number of its consecutive quanta before.
    last: u32,
    consecutive: u32,
    /// Quanta of virtual functions since the NIC was created.
    quanta: u64,
    /// Rounds since the NIC was created, in units of 1 / [`ROUND`].
    rounds: u64,
    physical_every: u32,
    physical_quantum: i64,
    function_quantum: i64,
}

/// Units of one round, in which each active function has one quantum.
const ROUND: u64 = 1 << 16;
/// Number of consecutive quanta after which a function counts as the only active one.
const SOLE_AFTER: u32 = 64;
/// Number of quanta credited against each function's debt when the NIC becomes idle, because no
/// other function had to wait.
const IDLE_CREDIT: u64 = 16;

impl FunctionQueue {
    const NEW: FunctionQueue = FunctionQueue {
        ready: QpList::EMPTY,
        deficit: 0,
        position: Position::Idle,
        repaid_until: 0,
    };

    fn is_active(&self) -> bool {
        self.position != Position::Idle
    }
}

impl Scheduler {
    pub const PHYSICAL: u32 = 0;

    pub fn new(limits: &Limits) -> Self {
        Self {
            functions: vec![FunctionQueue::NEW],
            unused: Vec::new(),
            round: VecDeque::with_capacity(16),
            priority: VecDeque::with_capacity(16),
            virtual_quanta: 0,
            last: Self::PHYSICAL,
            consecutive: SOLE_AFTER,
            quanta: 0,
            rounds: 0,
            physical_every: limits.physical_every.max(1),
            physical_quantum: limits.physical_turn.max(1) as i64,
            function_quantum: limits.function_turn.max(1) as i64,
        }
    }

    /// Adds a function and returns its index.
    pub fn add(&mut self) -> u32 {
        let at = self.unused.pop().unwrap_or(self.functions.len() as u32);
        if at as usize == self.functions.len() {
            self.functions.push(FunctionQueue::NEW);
        } else {
            self.functions[at as usize] = FunctionQueue::NEW;
        }
        // Reserves memory here, because activating a function must not allocate.
        self.round.reserve(self.functions.len() - self.round.len());
        self.priority.reserve(self.functions.len() - self.priority.len());
        at
    }

    /// Removes a virtual function, whose QPs are destroyed.
    pub fn remove(&mut self, at: u32) {
        assert!(
            at != Self::PHYSICAL && self.function(at).ready.is_empty(),
            "the QPs of a removed function are destroyed first"
        );
        self.round.retain(|&other| other != at);
        self.priority.retain(|&other| other != at);
        self.unused.push(at);
    }

    #[inline]
    pub fn function(&mut self, at: u32) -> &mut FunctionQueue {
        &mut self.functions[at as usize]
    }

    /// Enqueues a function that has got work: in the round; or ahead of it, if the function has had
    /// no quantum for a round.
    #[inline]
    pub fn activate(&mut self, at: u32) {
        if self.function(at).is_active() {
            return;
        }
        let missed = self.repay_debt(at);
        let queue = self.function(at);
        queue.position =
            if missed > 0 && queue.deficit == 0 { Position::Priority } else { Position::Round };
        match queue.position {
            _ if at == Self::PHYSICAL => {}
            Position::Priority => self.priority.push_back(at),
            _ => self.round.push_back(at),
        }
    }

    /// True if several functions had quanta recently.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.consecutive < SOLE_AFTER
    }

    pub fn is_active(&self) -> bool {
        self.functions[0].is_active() || self.first().is_some()
    }

    #[inline]
    fn first(&self) -> Option<u32> {
        self.priority.front().or(self.round.front()).copied()
    }

    /// Returns the function of the current quantum. The quantum is not used up.
    #[inline]
    pub fn next(&mut self) -> Option<u32> {
        loop {
            let physical = self.functions[0].is_active();
            let at = match self.first() {
                None if physical => Self::PHYSICAL,
                None => {
                    self.rounds = self.rounds.wrapping_add(IDLE_CREDIT * ROUND);
                    self.quanta =
                        self.quanta.wrapping_add(IDLE_CREDIT * self.physical_every as u64);
                    return None;
                }
                Some(_) if physical && self.virtual_quanta + 1 >= self.physical_every => {
                    Self::PHYSICAL
                }
                Some(first) => first,
            };
            let quantum =
                if at == Self::PHYSICAL { self.physical_quantum } else { self.function_quantum };
            let queue = self.function(at);
            if queue.deficit > 0 {
                return Some(at);
            }
            queue.deficit += quantum;
            if queue.deficit > 0 {
                return Some(at);
            }
            self.end_quantum(at, Position::Round);
        }
    }

    /// Subtracts work from the quantum of `at`. The quantum ends when it is used up or when `at`
    /// has no ready QP.
    #[inline]
    pub fn spend(&mut self, at: u32, work: i64) {
        let queue = self.function(at);
        queue.deficit -= work;
        if queue.ready.is_empty() {
            queue.deficit = queue.deficit.min(0);
            self.end_quantum(at, Position::Idle);
            self.function(at).repaid_until = self.debt_clock(at);
        } else if queue.deficit <= 0 {
            self.end_quantum(at, Position::Round);
        }
    }

    /// Subtracts work that was done for `at` outside its quanta. This debt is limited to a few
    /// quanta.
    #[inline]
    pub fn charge(&mut self, at: u32, work: i64) {
        let quantum =
            if at == Self::PHYSICAL { self.physical_quantum } else { self.function_quantum };
        if !self.function(at).is_active() {
            self.repay_debt(at);
        }
        let queue = self.function(at);
        queue.deficit = (queue.deficit - work).max(queue.deficit.min(-4 * quantum));
    }

    /// Clock for the debt of `at`: it advances by the quanta that an always active `at` would have.
    #[inline]
    fn debt_clock(&self, at: u32) -> u64 {
        if at == Self::PHYSICAL { self.quanta } else { self.rounds }
    }

    /// Reduces the debt of the idle function `at` by the quanta that it has missed; returns their
    /// number.
    #[inline]
    fn repay_debt(&mut self, at: u32) -> i64 {
        let (now, quantum, part) = match at {
            Self::PHYSICAL => (self.quanta, self.physical_quantum, self.physical_every as u64),
            _ => (self.rounds, self.function_quantum, ROUND),
        };
        let queue = self.function(at);
        // Usually 0, for each packet that arrives: a division would dominate the cost of this
        // function.
        let missed = match now.wrapping_sub(queue.repaid_until) {
            few if few < part => 0,
            many => (many / part).min(i32::MAX as u64) as i64,
        };
        queue.deficit = queue.deficit.saturating_add(missed.saturating_mul(quantum)).min(0);
        queue.repaid_until = now;
        missed
    }

    /// Ends the quantum of `at` and moves it to the queue `position`.
    #[inline]
    fn end_quantum(&mut self, at: u32, position: Position) {
        let old = std::mem::replace(&mut self.function(at).position, position);
        self.consecutive = if at == self.last { self.consecutive.saturating_add(1) } else { 0 };
        self.last = at;
        if at == Self::PHYSICAL {
            self.virtual_quanta = 0;
            return;
        }
        self.virtual_quanta = self.virtual_quanta.saturating_add(1);
        self.quanta = self.quanta.wrapping_add(1);
        let active = self.round.len() + self.priority.len();
        self.rounds = self.rounds.wrapping_add(ROUND / (active as u64).max(1));
        let queue = if old == Position::Priority { &mut self.priority } else { &mut self.round };
        let first = queue.pop_front();
        debug_assert_eq!(first, Some(at), "the function has the current quantum");
        if position == Position::Round {
            self.round.push_back(at);
        }
    }
}
