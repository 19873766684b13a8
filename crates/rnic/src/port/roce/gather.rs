//! When to look into the socket where a stream of full bursts comes.
//!
//! ```text
//!   sender    ──burst──burst──burst──burst──burst──burst──burst──
//!   receiver  look take look take look nothing ........ look take look take look take look nothing ....
//!                                              as long as a burst takes, once
//! ```
//!
//! A receiver that is a little faster than the sender takes each burst out of the caches of the CPU that has just written it,
//! while that writes the next one, and the kernel gives the memory of one that was just read to the next but one: both slow the
//! sender down, which is what everybody waits for. So who has found nothing lets the next burst come first. No
//! sender makes a full one in less time than it takes to receive one, about, so that nobody waits for that in vain.
//!
//! Where the last packet was the last one of its message, its sender may wait for what this side says, or its user for the
//! message. And who sends one long message and waits for the answer would wait for its last burst: so it is for streams alone.

/// Bytes of a full burst, at least.
const FULL: usize = 56 << 10;
/// Full bursts that are a stream: about 2 MiB.
const STREAM: u32 = 32;
/// The longest time without a look.
const GATHER_MAX_NS: u64 = 10_000;

/// What has come of late.
#[derive(Debug, Default)]
pub(super) struct Gather {
    /// Full bursts, for each of which nobody waited longer than to take the one before.
    bursts: u32,
    /// When the look began that brought the last one, and how long it took; 0 as long as that is under way.
    taken_ns: u64,
    took_ns: u64,
    /// No look before.
    until_ns: u64,
    /// Nothing was found since.
    dry: bool,
    /// More is to come of the last packet's message.
    goes_on: bool,
}

impl Gather {
    /// Whether this is the time for a look.
    #[inline]
    pub fn may_look(&mut self, now_ns: u64) -> bool {
        if self.took_ns == 0 {
            self.took_ns = now_ns.saturating_sub(self.taken_ns);
        }
        now_ns >= self.until_ns
    }

    /// So many bytes of one sender have come; whether more is to come of the last packet's message.
    #[inline]
    pub fn took(&mut self, now_ns: u64, bytes: usize, goes_on: bool) {
        self.goes_on = goes_on;
        if bytes < FULL {
            return;
        }
        let waited_ns = now_ns.saturating_sub(self.until_ns.max(self.taken_ns + self.took_ns));
        let flows = waited_ns <= self.took_ns;
        self.bursts = if flows { self.bursts.saturating_add(1) } else { 1 };
        (self.taken_ns, self.took_ns) = (now_ns, 0);
        self.dry = false;
    }

    /// Nothing has come.
    #[inline]
    pub fn found_nothing(&mut self, now_ns: u64) {
        if self.dry || !self.goes_on || self.bursts < STREAM {
            return;
        }
        self.dry = true;
        self.until_ns = now_ns + self.took_ns.min(GATHER_MAX_NS);
    }

    /// True if the last look brought a full burst.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.bursts > 0 && !self.dry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: usize = 61_680;
    const EACH_NS: u64 = 7_000;

    /// A stream of `bursts`, each of which took 7 us; gives the time.
    fn stream(gather: &mut Gather, from_ns: u64, bursts: u32) -> u64 {
        for n in 0..bursts as u64 {
            let now = from_ns + n * EACH_NS;
            assert!(gather.may_look(now));
            gather.took(now, BURST, true);
        }
        let now = from_ns + bursts as u64 * EACH_NS;
        assert!(gather.may_look(now));
        now
    }

    #[test]
    fn a_stream_that_runs_dry_is_left_alone_for_as_long_as_a_burst_takes() {
        let mut gather = Gather::default();
        let now = stream(&mut gather, 1000, STREAM);
        gather.found_nothing(now);
        assert!(!gather.may_look(now + EACH_NS - 1));
        assert!(gather.may_look(now + EACH_NS));
        // Once.
        gather.found_nothing(now + EACH_NS);
        assert!(gather.may_look(now + EACH_NS));
        // What is less than a burst changes nothing; another one does.
        gather.took(now + EACH_NS, 4112, true);
        gather.found_nothing(now + EACH_NS + 300);
        assert!(gather.may_look(now + EACH_NS + 300));
        let now = stream(&mut gather, now + 2 * EACH_NS, 1);
        gather.found_nothing(now);
        assert!(!gather.may_look(now + EACH_NS - 1));
        // The end of a message is one of a wait.
        assert!(gather.may_look(now + EACH_NS));
        gather.took(now + EACH_NS, BURST, false);
        assert!(gather.may_look(now + 2 * EACH_NS));
        gather.found_nothing(now + 2 * EACH_NS);
        assert!(gather.may_look(now + 2 * EACH_NS));
    }

    #[test]
    fn what_is_no_stream_is_looked_for_at_any_time() {
        let mut gather = Gather::default();
        let mut now = 0;
        // Messages, or READs, of 1 MiB, each asked for when the one before is there.
        for _ in 0..10 {
            now = stream(&mut gather, now + 2 * EACH_NS, STREAM / 2);
            gather.found_nothing(now);
            assert!(gather.may_look(now));
        }
        for _ in 0..10 * STREAM {
            now += 300;
            gather.took(now, 4112, true);
            gather.found_nothing(now);
            assert!(gather.may_look(now));
        }
    }

    #[test]
    fn an_interrupt_does_not_count() {
        let mut gather = Gather::default();
        let now = stream(&mut gather, 0, STREAM - 1) + EACH_NS;
        gather.took(now, BURST, true);
        let now = now + 1_000_000;
        assert!(gather.may_look(now));
        gather.found_nothing(now);
        assert!(gather.may_look(now + GATHER_MAX_NS));
    }
}
