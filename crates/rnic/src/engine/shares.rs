//! How functions share the NIC: a deficit round robin over functions, and in each over its QPs.
//!
//! ```text
//!  physical function ──────────────> every `physical_every`-th turn, while it has work
//!  virtual ones: A ─> B ─> C ─> A    the others in order
//!          D ─┘  │
//!                └─ ready QPs: 7 ─> 9 ─> 12 ─> 7
//! ```
//!
//! D has just got work, and had no turn for a round: it has that now, before A, and then stands at the end. Who asks
//! for little waits for the turn that is on, not for one of each other function; and nobody has two turns in a round.
//!
//! Work is counted in bytes: those that are moved, and for fetching, checking and completing as many
//! as could be moved meanwhile. A turn of a function is `function_turn` of them, a turn of a QP
//! `qp_turn`. What a turn took too much, because a WQE's slice is not cut shorter, is missing from the
//! next one. What a function or QP leaves when it runs out of work is forgotten; what it owes is not. But a
//! function pays for it with the turns that it would have had meanwhile: one that has waited long enough between two
//! requests owes nothing, and the second one does not wait for what the first one was too long.

use super::lists::List;
use crate::verbs::Limits;
use std::collections::VecDeque;

/// A function's part.
pub(super) struct Share {
    /// Its QPs with work.
    pub ready: List,
    /// Work that it may still do in this turn; below 0, what it owes.
    pub left: i64,
    stands: Stands,
    /// When what it owes was last reckoned ([`Shares::now`]); while it stands nowhere.
    since: u64,
}

/// Where a function stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// It has no work.
    Nowhere,
    /// In the row.
    Row,
    /// Before the row: it has missed a round.
    Ahead,
}

/// All functions' parts. The physical function's is [`Shares::PHYSICAL`].
pub(super) struct Shares {
    all: Vec<Share>,
    unused: Vec<u32>,
    /// The virtual functions with work; the first one's turn is on, or next.
    row: VecDeque<u32>,
    /// Those that go before the row, once.
    ahead: VecDeque<u32>,
    /// Turns that virtual functions had since the physical one's last.
    others: u32,
    /// Who had the last turn, and how many in a row before that.
    last: u32,
    in_a_row: u32,
    /// Turns that virtual functions had in all.
    turns: u64,
    /// Rounds of the row, in parts of [`ROUND`].
    rounds: u64,
    physical_every: u32,
    physical_turn: i64,
    turn: i64,
}

/// A round in which each function of the row had a turn.
const ROUND: u64 = 1 << 16;
/// Who had so many turns in a row has the NIC to itself.
const ALONE: u32 = 64;
/// So many turns of each count as over when the NIC has nothing to do: nobody has waited.
const IDLE: u64 = 16;

impl Share {
    const NEW: Share = Share { ready: List::EMPTY, left: 0, stands: Stands::Nowhere, since: 0 };

    fn is_active(&self) -> bool {
        self.stands != Stands::Nowhere
    }
}

impl Shares {
    pub const PHYSICAL: u32 = 0;

    pub fn new(limits: &Limits) -> Self {
        Self {
            all: vec![Share::NEW],
            unused: Vec::new(),
            row: VecDeque::with_capacity(16),
            ahead: VecDeque::with_capacity(16),
            others: 0,
            last: Self::PHYSICAL,
            in_a_row: ALONE,
            turns: 0,
            rounds: 0,
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
        // Who becomes active never makes a row grow.
        self.row.reserve(self.all.len() - self.row.len());
        self.ahead.reserve(self.all.len() - self.ahead.len());
        at
    }

    /// Ends a virtual function's, whose QPs have ended.
    pub fn remove(&mut self, at: u32) {
        assert!(at != Self::PHYSICAL && self.of(at).ready.is_empty(), "its QPs ended before");
        self.row.retain(|&other| other != at);
        self.ahead.retain(|&other| other != at);
        self.unused.push(at);
    }

    #[inline]
    pub fn of(&mut self, at: u32) -> &mut Share {
        &mut self.all[at as usize]
    }

    /// Puts a function that has got work into the row; or before it, if it has not had a turn for a round: then this is
    /// the one that it has missed.
    #[inline]
    pub fn activate(&mut self, at: u32) {
        if self.of(at).is_active() {
            return;
        }
        let missed = self.reckon(at);
        let share = self.of(at);
        share.stands = if missed > 0 && share.left == 0 { Stands::Ahead } else { Stands::Row };
        match share.stands {
            _ if at == Self::PHYSICAL => {}
            Stands::Ahead => self.ahead.push_back(at),
            _ => self.row.push_back(at),
        }
    }

    /// Several functions have had turns lately.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.in_a_row < ALONE
    }

    pub fn any(&self) -> bool {
        self.all[0].is_active() || self.first().is_some()
    }

    #[inline]
    fn first(&self) -> Option<u32> {
        self.ahead.front().or(self.row.front()).copied()
    }

    /// Whose turn it is. It has something left to spend.
    #[inline]
    pub fn next(&mut self) -> Option<u32> {
        loop {
            let physical = self.all[0].is_active();
            let at = match self.first() {
                None if physical => Self::PHYSICAL,
                None => {
                    self.rounds = self.rounds.wrapping_add(IDLE * ROUND);
                    self.turns = self.turns.wrapping_add(IDLE * self.physical_every as u64);
                    return None;
                }
                Some(_) if physical && self.others + 1 >= self.physical_every => Self::PHYSICAL,
                Some(first) => first,
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
            self.pass(at, Stands::Row);
        }
    }

    /// Counts work of `at`, whose turn it is. The turn ends when nothing is left of it, or nothing to do.
    #[inline]
    pub fn spend(&mut self, at: u32, work: i64) {
        let share = self.of(at);
        share.left -= work;
        if share.ready.is_empty() {
            share.left = share.left.min(0);
            self.pass(at, Stands::Nowhere);
            self.of(at).since = self.now(at);
        } else if share.left <= 0 {
            self.pass(at, Stands::Row);
        }
    }

    /// Counts work that was done for `at` outside its turns: it owes for it, up to a few turns.
    #[inline]
    pub fn charge(&mut self, at: u32, work: i64) {
        let most = if at == Self::PHYSICAL { self.physical_turn } else { self.turn };
        if !self.of(at).is_active() {
            self.reckon(at);
        }
        let share = self.of(at);
        share.left = (share.left - work).max(share.left.min(-4 * most));
    }

    /// What the turns are counted by that `at` would have had if it had stood in the row all the time.
    #[inline]
    fn now(&self, at: u32) -> u64 {
        if at == Self::PHYSICAL { self.turns } else { self.rounds }
    }

    /// Pays what `at`, which is not active, owes with the turns that have gone by without it; how many these were.
    #[inline]
    fn reckon(&mut self, at: u32) -> i64 {
        let (now, turn, part) = match at {
            Self::PHYSICAL => (self.turns, self.physical_turn, self.physical_every as u64),
            _ => (self.rounds, self.turn, ROUND),
        };
        let share = self.of(at);
        // As a rule none, for each packet that comes: a division would be most of what this takes.
        let missed = match now.wrapping_sub(share.since) {
            few if few < part => 0,
            many => (many / part).min(i32::MAX as u64) as i64,
        };
        share.left = share.left.saturating_add(missed.saturating_mul(turn)).min(0);
        share.since = now;
        missed
    }

    /// Ends the turn of `at`, which stands there from now on.
    #[inline]
    fn pass(&mut self, at: u32, stands: Stands) {
        let stood = std::mem::replace(&mut self.of(at).stands, stands);
        self.in_a_row = if at == self.last { self.in_a_row.saturating_add(1) } else { 0 };
        self.last = at;
        if at == Self::PHYSICAL {
            self.others = 0;
            return;
        }
        self.others = self.others.saturating_add(1);
        self.turns = self.turns.wrapping_add(1);
        let all = self.row.len() + self.ahead.len();
        self.rounds = self.rounds.wrapping_add(ROUND / (all as u64).max(1));
        let row = if stood == Stands::Ahead { &mut self.ahead } else { &mut self.row };
        let first = row.pop_front();
        debug_assert_eq!(first, Some(at), "it was its turn");
        if stands == Stands::Row {
            self.row.push_back(at);
        }
    }
}
