//! How functions share the NIC: a deficit round robin over functions, and in each over its QPs.
//!
//! ```text
//!  physical function ──────────────> every `physical_every`-th turn, while it has work
//!  virtual ones: A ─> B ─> C ─> A    the others in order
//!                │
//!                └─ ready QPs: 7 ─> 9 ─> 12 ─> 7
//! ```
//!
//! Work is counted in bytes: those that are moved, and for fetching, checking and completing as many
//! as could be moved meanwhile. A turn of a function is `function_turn` of them, a turn of a QP
//! `qp_turn`. What a turn took too much, because a WQE's slice is not cut shorter, is missing from the
//! next one. What a function or QP leaves when it runs out of work is forgotten; what it owes is not.

use super::lists::List;
use crate::verbs::Limits;
use std::collections::VecDeque;

/// A function's part.
pub(super) struct Share {
    /// Its QPs with work.
    pub ready: List,
    /// Work that it may still do in this turn; below 0, what it owes.
    pub left: i64,
    /// It has a turn, or stands in the row for one.
    active: bool,
}

/// All functions' parts. The physical function's is [`Shares::PHYSICAL`].
pub(super) struct Shares {
    all: Vec<Share>,
    unused: Vec<u32>,
    /// The virtual functions with work; the first one's turn is on, or next.
    row: VecDeque<u32>,
    /// Turns that virtual functions had since the physical one's last.
    others: u32,
    physical_every: u32,
    physical_turn: i64,
    turn: i64,
}

impl Share {
    const NEW: Share = Share { ready: List::EMPTY, left: 0, active: false };
}

impl Shares {
    pub const PHYSICAL: u32 = 0;

    pub fn new(limits: &Limits) -> Self {
        Self {
            all: vec![Share::NEW],
            unused: Vec::new(),
            row: VecDeque::with_capacity(16),
            others: 0,
            physical_every: limits.physical_every.max(1),
            physical_turn: limits.physical_turn.max(1) as i64,
            turn: limits.function_turn.max(1) as i64,
        }
    }

    /// A new function's.
    pub fn add(&mut self) -> u32 {
        let at = self.unused.pop().unwrap_or(self.all.len() as u32);
        if at as usize == self.all.len() {
            self.all.push(Share::NEW);
        } else {
            self.all[at as usize] = Share::NEW;
        }
        // Who becomes active never makes the row grow.
        self.row.reserve(self.all.len() - self.row.len());
        at
    }

    /// Ends a virtual function's, whose QPs have ended.
    pub fn remove(&mut self, at: u32) {
        assert!(at != Self::PHYSICAL && self.of(at).ready.is_empty(), "its QPs ended before");
        self.row.retain(|&other| other != at);
        self.unused.push(at);
    }

    #[inline]
    pub fn of(&mut self, at: u32) -> &mut Share {
        &mut self.all[at as usize]
    }

    /// Puts a function that has got work into the row.
    #[inline]
    pub fn activate(&mut self, at: u32) {
        let share = &mut self.all[at as usize];
        if !share.active {
            share.active = true;
            if at != Self::PHYSICAL {
                self.row.push_back(at);
            }
        }
    }

    pub fn any(&self) -> bool {
        self.all[0].active || !self.row.is_empty()
    }

    /// Whose turn it is. It has something left to spend.
    #[inline]
    pub fn next(&mut self) -> Option<u32> {
        loop {
            let physical = self.all[0].active;
            let at = match self.row.front() {
                None if physical => Self::PHYSICAL,
                None => return None,
                Some(_) if physical && self.others + 1 >= self.physical_every => Self::PHYSICAL,
                Some(&first) => first,
            };
            let turn = if at == Self::PHYSICAL { self.physical_turn } else { self.turn };
            let share = self.of(at);
            if share.left > 0 {
                return Some(at);
            }
            share.left += turn;
            if share.left > 0 {
                return Some(at);
            }
            self.pass(at);
        }
    }

    /// Counts work of `at`, whose turn it is. The turn ends when nothing is left of it, or nothing to do.
    #[inline]
    pub fn spend(&mut self, at: u32, work: i64) {
        let share = self.of(at);
        share.left -= work;
        if share.ready.is_empty() {
            share.active = false;
            share.left = share.left.min(0);
            self.pass(at);
        } else if share.left <= 0 {
            self.pass(at);
        }
    }

    /// Counts work that was done for `at` outside its turns: it owes for it, up to a few turns.
    #[inline]
    pub fn charge(&mut self, at: u32, work: i64) {
        let most = if at == Self::PHYSICAL { self.physical_turn } else { self.turn };
        let share = self.of(at);
        share.left = (share.left - work).max(share.left.min(-4 * most));
    }

    /// Ends the turn of `at`.
    #[inline]
    fn pass(&mut self, at: u32) {
        if at == Self::PHYSICAL {
            self.others = 0;
            return;
        }
        self.others = self.others.saturating_add(1);
        let first = self.row.pop_front();
        debug_assert_eq!(first, Some(at), "it was its turn");
        if self.all[at as usize].active {
            self.row.push_back(at);
        }
    }
}
