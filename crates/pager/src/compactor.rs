//! Pace of compaction: when a pass begins, and how much of the worker's time it takes.
//!
//! | | pass begins when | threshold of held over live |
//! | --- | --- | --- |
//! | `granary run` | [`SCARCE_PERCENT`] of the pool are allocated | 1.33 |
//! | `granary run --trim` | at any time | 1.1 |
//!
//! While the program faults, compaction takes at most a twentieth of the time, otherwise at most a
//! half. A pass that frees no chunk is followed by a longer pause.

use std::time::{Duration, Instant};

use crate::pager::Pager;
use crate::pages::Hand;
use crate::pages::compact::{Pass, Step};
use crate::slots::Usage;
use crate::stats::Counter;

/// Percentage of the pool from which on chunks are compacted without `--trim`.
const SCARCE_PERCENT: u8 = 90;

/// Pauses after a step, as multiples of the step's time: while the program faults, and otherwise.
const PAUSES: (u32, u32) = (19, 1);
/// The shortest pause between two steps.
const STEP_PAUSE: Duration = Duration::from_millis(1);
/// Pause after a pass, and between two looks at the chunks.
const PASS_PAUSE: Duration = Duration::from_millis(500);
/// Pause after passes without an effect.
const PASS_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Compaction of a process's chunks.
#[derive(Default)]
pub(crate) struct Compactor {
    pass: Pass,
    /// Time of the next step; `None`: now.
    next: Option<Instant>,
    pause: Duration,
    /// Faults until the last step.
    faults: u64,
    /// Slots in the chunks at the start of the pass.
    held_before: u64,
}

impl Compactor {
    /// Sets the time of the next step.
    fn rest(&mut self, pause: Duration) {
        self.next = Some(Instant::now() + pause);
    }
}

impl Usage {
    /// Returns true if held over live is above `percent`, and a chunk of `chunk_slots` slots could
    /// be freed.
    fn exceeds(self, percent: u64, chunk_slots: u64) -> bool {
        let Self { live, held } = self;
        100 * held > percent * live && held - live >= chunk_slots
    }
}

impl Pager {
    /// Does a step of compaction if one is due. Returns the time until the next one, in
    /// milliseconds.
    pub(crate) fn compact(&self, hand: &mut Hand, compactor: &mut Compactor) -> u64 {
        let left = compactor.next.map_or(Duration::ZERO, |at| at.duration_since(Instant::now()));
        if !left.is_zero() {
            return left.as_millis() as u64 + 1;
        }
        if compactor.pass.is_active() || self.is_compaction_due() {
            self.compact_now(hand, compactor);
        } else {
            compactor.rest(PASS_PAUSE);
        }
        let left = compactor.next.map_or(Duration::ZERO, |at| at.duration_since(Instant::now()));
        left.as_millis() as u64 + 1
    }

    fn is_compaction_due(&self) -> bool {
        let usage = self.pages.slots().usage();
        let chunk_slots = (self.pages.backing.chunk_bytes() / crate::sys::PAGE_BYTES) as u64;
        match self.config.trim {
            true => usage.exceeds(110, chunk_slots),
            false => {
                usage.exceeds(133, chunk_slots)
                    && self.pages.backing.used_percent() >= SCARCE_PERCENT
            }
        }
    }

    fn compact_now(&self, hand: &mut Hand, compactor: &mut Compactor) {
        if !compactor.pass.is_active() {
            compactor.held_before = self.pages.slots().usage().held;
        }
        let start = Instant::now();
        let Step { more, .. } = self.pages.compact(hand, &mut compactor.pass);
        self.pages.free_emptied();
        if more {
            let faults = self.stats().get(Counter::Faults);
            let is_quiet = std::mem::replace(&mut compactor.faults, faults) == faults;
            let pause = start.elapsed() * if is_quiet { PAUSES.1 } else { PAUSES.0 };
            return compactor.rest(pause.max(STEP_PAUSE));
        }
        let has_freed = self.pages.slots().usage().held < compactor.held_before;
        compactor.pause = match has_freed {
            true => PASS_PAUSE,
            false => (2 * compactor.pause).clamp(PASS_PAUSE, PASS_PAUSE_MAX),
        };
        compactor.rest(compactor.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_sparse_only_if_one_can_be_freed() {
        let usage = |live, held| Usage { live, held };
        assert!(!usage(0, 0).exceeds(110, 16));
        assert!(!usage(100, 110).exceeds(110, 1));
        assert!(usage(100, 112).exceeds(110, 4));
        assert!(!usage(50, 64).exceeds(110, 16), "14 free slots are not a chunk");
        assert!(usage(48, 64).exceeds(133, 16));
    }
}
