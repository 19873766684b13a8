//! Receive coalescing: in a stream of full bursts, waits one burst time after an empty socket read.
//!
//! ```text
//!   sender    ──burst──burst──burst──burst──burst──burst──burst──
//!   receiver  read burst read burst read empty ........ read burst read burst read empty ....
//!                                              pause of one burst time, once
//! ```
//!
//! A receiver that is slightly faster than the sender slows the sender down, and the sender is the
//! bottleneck. There are two causes: the receiver takes each burst out of the caches of the CPU
//! that has just written it and is writing the next one, and the kernel reuses the memory of the
//! burst that was just read. So the receiver pauses after an empty read until the next burst has
//! arrived. The pause is not wasted, because a sender needs about as much time for a full burst as
//! the receiver does.
//!
//! There is no pause after the last packet of a message, because the sender may be waiting for an
//! acknowledgement, or the user for the message. There is none before a stream is detected, because
//! a pause would delay the last burst of a single long message whose sender waits for the reply.

/// Minimum bytes of a full burst.
const FULL_BURST: usize = 56 << 10;
/// Consecutive full bursts that make a stream: about 2 MiB.
const STREAM: u32 = 32;
/// The longest pause.
const PAUSE_MAX_NS: u64 = 10_000;

/// Detector of streams, and the pause of the current one.
#[derive(Debug, Default)]
pub(super) struct ReceiveCoalescer {
    /// Consecutive full bursts, each of which arrived within the time that the previous one took to
    /// receive.
    bursts: u32,
    /// Start of the read that returned the last full burst.
    read_ns: u64,
    /// Time that this read and the processing took; 0 while it is in progress.
    burst_ns: u64,
    /// End of the current pause.
    pause_end_ns: u64,
    /// The socket was empty since the last full burst.
    emptied: bool,
    /// The last packet was not the last one of its message.
    mid_message: bool,
}

impl ReceiveCoalescer {
    /// Whether the socket may be read now, because no pause is in effect.
    #[inline]
    pub fn may_read(&mut self, now_ns: u64) -> bool {
        if self.burst_ns == 0 {
            self.burst_ns = now_ns.saturating_sub(self.read_ns);
        }
        now_ns >= self.pause_end_ns
    }

    /// Records a burst of `bytes` from one sender. `mid_message`: the last packet was not the last
    /// one of its message.
    #[inline]
    pub fn on_burst(&mut self, now_ns: u64, bytes: usize, mid_message: bool) {
        self.mid_message = mid_message;
        if bytes < FULL_BURST {
            return;
        }
        let waited_ns = now_ns.saturating_sub(self.pause_end_ns.max(self.read_ns + self.burst_ns));
        let flows = waited_ns <= self.burst_ns;
        self.bursts = if flows { self.bursts.saturating_add(1) } else { 1 };
        (self.read_ns, self.burst_ns) = (now_ns, 0);
        self.emptied = false;
    }

    /// Records an empty read, which starts a pause in a stream.
    #[inline]
    pub fn on_empty_read(&mut self, now_ns: u64) {
        if self.emptied || !self.mid_message || self.bursts < STREAM {
            return;
        }
        self.emptied = true;
        self.pause_end_ns = now_ns + self.burst_ns.min(PAUSE_MAX_NS);
    }

    /// True if the last read returned a full burst.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.bursts > 0 && !self.emptied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: usize = 61_680;
    const EACH_NS: u64 = 7_000;

    /// Receives a stream of `bursts`, each of which takes 7 us. Returns the time at its end.
    fn stream(coalescer: &mut ReceiveCoalescer, from_ns: u64, bursts: u32) -> u64 {
        for n in 0..bursts as u64 {
            let now = from_ns + n * EACH_NS;
            assert!(coalescer.may_read(now));
            coalescer.on_burst(now, BURST, true);
        }
        let now = from_ns + bursts as u64 * EACH_NS;
        assert!(coalescer.may_read(now));
        now
    }

    #[test]
    fn stream_pauses_one_burst_time_after_an_empty_read() {
        let mut coalescer = ReceiveCoalescer::default();
        let now = stream(&mut coalescer, 1000, STREAM);
        coalescer.on_empty_read(now);
        assert!(!coalescer.may_read(now + EACH_NS - 1));
        assert!(coalescer.may_read(now + EACH_NS));
        // There is one pause only.
        coalescer.on_empty_read(now + EACH_NS);
        assert!(coalescer.may_read(now + EACH_NS));
        // Less than a full burst starts no new pause; a full burst does.
        coalescer.on_burst(now + EACH_NS, 4112, true);
        coalescer.on_empty_read(now + EACH_NS + 300);
        assert!(coalescer.may_read(now + EACH_NS + 300));
        let now = stream(&mut coalescer, now + 2 * EACH_NS, 1);
        coalescer.on_empty_read(now);
        assert!(!coalescer.may_read(now + EACH_NS - 1));
        // After the last packet of a message there is no pause.
        assert!(coalescer.may_read(now + EACH_NS));
        coalescer.on_burst(now + EACH_NS, BURST, false);
        assert!(coalescer.may_read(now + 2 * EACH_NS));
        coalescer.on_empty_read(now + 2 * EACH_NS);
        assert!(coalescer.may_read(now + 2 * EACH_NS));
    }

    #[test]
    fn traffic_without_stream_has_no_pause() {
        let mut coalescer = ReceiveCoalescer::default();
        let mut now = 0;
        // Messages, or READ responses, of 1 MiB, each requested after the previous one has arrived.
        for _ in 0..10 {
            now = stream(&mut coalescer, now + 2 * EACH_NS, STREAM / 2);
            coalescer.on_empty_read(now);
            assert!(coalescer.may_read(now));
        }
        for _ in 0..10 * STREAM {
            now += 300;
            coalescer.on_burst(now, 4112, true);
            coalescer.on_empty_read(now);
            assert!(coalescer.may_read(now));
        }
    }

    #[test]
    fn receiver_interruption_starts_no_pause() {
        let mut coalescer = ReceiveCoalescer::default();
        let now = stream(&mut coalescer, 0, STREAM - 1) + EACH_NS;
        coalescer.on_burst(now, BURST, true);
        let now = now + 1_000_000;
        assert!(coalescer.may_read(now));
        coalescer.on_empty_read(now);
        assert!(coalescer.may_read(now + PAUSE_MAX_NS));
    }
}
