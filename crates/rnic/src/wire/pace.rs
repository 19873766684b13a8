//! How fast a connection sends, and how long it waits for an answer.
//!
//! ```text
//! window (packets)      grows by one for each that is acknowledged, up to where a loss was last seen,
//!                       then by one for each window; halved by a loss, two after a timeout
//! acknowledgements      asked for four times in a window, and in the last packet of a message
//! retransmission time   round-trip time and four times its deviation, twice as long after each timeout,
//!                       never longer than the local ACK timeout
//! ```
//!
//! Whoever is given up is given up by the local ACK timeout and the retry count alone (IBTA vol. 1,
//! §9.7.6.1.3): early retransmissions cost no retry.

use super::outbox::LONG_BURST;

/// The shortest retransmission time: a responder whose thread was put aside is not lost.
const RTO_MIN_NS: u64 = 1_000_000;
/// The retransmission time before anything was measured.
const RTO_FIRST_NS: u64 = 20_000_000;
/// Packets in flight at first, and after a timeout.
const WINDOW_FIRST: u32 = 32;
const WINDOW_AFTER_TIMEOUT: u32 = 2;

/// Time of a local ACK timeout or RNR timer of code 0 in nanoseconds.
const ACK_UNIT_NS: u64 = 4096;

/// Waits that RNR NAKs ask for, in units of 10 us, by code (IBTA vol. 1, §9.7.5.2.8).
const RNR_10US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// Nanoseconds that an RNR NAK with this code asks to wait.
pub fn rnr_ns(code: u8) -> u64 {
    RNR_10US[code as usize & 31] as u64 * 10_000
}

/// Nanoseconds of a local ACK timeout.
pub fn timeout_ns(exponent: u8) -> u64 {
    ACK_UNIT_NS << (exponent & 31)
}

/// A connection's window and clock.
pub(crate) struct Pace {
    window: u32,
    most: u32,
    /// Up to this window it grows fast.
    threshold: u32,
    /// Packets acknowledged since the window last grew slowly.
    acked: u32,
    /// Smoothed round-trip time and its deviation; 0 before anything was measured.
    rtt_ns: u64,
    deviation_ns: u64,
    /// Timeouts in a row.
    timeouts: u32,
    cap_ns: u64,
}

impl Pace {
    /// With at most `most` packets in flight.
    pub fn new(most: u32, timeout: u8) -> Self {
        let most = most.max(WINDOW_AFTER_TIMEOUT);
        Self {
            window: WINDOW_FIRST.min(most),
            most,
            threshold: most,
            acked: 0,
            rtt_ns: 0,
            deviation_ns: 0,
            timeouts: 0,
            cap_ns: timeout_ns(timeout),
        }
    }

    /// Packets that may be in flight.
    #[inline]
    pub fn window(&self) -> u32 {
        self.window
    }

    /// After how many packets an acknowledgement is asked for: a quarter of the window, in full bursts.
    #[inline]
    pub fn ack_every(&self) -> u32 {
        match self.window / 4 {
            few if few < LONG_BURST => few.max(1),
            many => many - many % LONG_BURST,
        }
    }

    /// Nanoseconds without progress after which packets are sent again.
    #[inline]
    pub fn retransmit_ns(&self) -> u64 {
        let measured = match self.rtt_ns {
            0 => RTO_FIRST_NS,
            rtt => (rtt + 4 * self.deviation_ns).max(RTO_MIN_NS),
        };
        measured.saturating_mul(1 << self.timeouts.min(20)).min(self.cap_ns)
    }

    /// `count` packets were acknowledged.
    #[inline]
    pub fn progress(&mut self, count: u32) {
        self.timeouts = 0;
        if self.window >= self.most {
            return;
        }
        if self.window < self.threshold {
            self.window = (self.window + count).min(self.threshold).min(self.most);
            return;
        }
        self.acked += count;
        while self.acked >= self.window && self.window < self.most {
            self.acked -= self.window;
            self.window += 1;
        }
    }

    /// A packet was answered `ns` after it was sent, for the first time.
    pub fn measured(&mut self, ns: u64) {
        let ns = ns.max(1);
        if self.rtt_ns == 0 {
            (self.rtt_ns, self.deviation_ns) = (ns, ns / 2);
            return;
        }
        // RFC 6298.
        self.deviation_ns = (3 * self.deviation_ns + self.rtt_ns.abs_diff(ns)) / 4;
        self.rtt_ns = (7 * self.rtt_ns + ns) / 8;
    }

    /// A packet was lost, others arrive.
    pub fn loss(&mut self) {
        self.threshold = (self.window / 2).max(WINDOW_AFTER_TIMEOUT);
        self.window = self.threshold;
        self.acked = 0;
    }

    /// Nothing arrives.
    pub fn timeout(&mut self) {
        if self.timeouts == 0 {
            self.threshold = (self.window / 2).max(WINDOW_AFTER_TIMEOUT);
        }
        self.window = WINDOW_AFTER_TIMEOUT;
        self.acked = 0;
        self.timeouts += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_what_the_network_takes() {
        let mut pace = Pace::new(256, 14);
        assert_eq!(pace.window(), 32);
        pace.progress(1000);
        assert_eq!(pace.window(), 256);
        pace.loss();
        assert_eq!(pace.window(), 128);
        pace.progress(127);
        assert_eq!(pace.window(), 128);
        pace.progress(1);
        assert_eq!(pace.window(), 129);
        pace.timeout();
        pace.timeout();
        assert_eq!(pace.window(), 2);
        pace.progress(200);
        assert_eq!(pace.window(), 64, "fast up to half of where the loss was");
        for _ in 0..100 {
            pace.loss();
        }
        assert_eq!(pace.window(), 2);
    }

    #[test]
    fn acknowledgements_are_asked_for_by_bursts_four_times_in_a_window() {
        let every = |window| {
            let mut pace = Pace::new(window, 14);
            pace.progress(1000);
            pace.ack_every()
        };
        assert_eq!(
            [2, 3, 8, 59, 60, 64, 119, 120, 240].map(every),
            [1, 1, 2, 14, 15, 15, 15, 30, 60]
        );
    }

    #[test]
    fn the_retransmission_time_is_measured_and_capped() {
        let mut pace = Pace::new(64, 14);
        assert_eq!(pace.retransmit_ns(), RTO_FIRST_NS);
        pace.measured(8_000_000);
        assert_eq!(pace.retransmit_ns(), 24_000_000);
        for _ in 0..100 {
            pace.measured(10_000);
        }
        assert_eq!(pace.retransmit_ns(), RTO_MIN_NS);
        pace.timeout();
        pace.timeout();
        assert_eq!(pace.retransmit_ns(), 4 * RTO_MIN_NS);
        for _ in 0..30 {
            pace.timeout();
        }
        assert_eq!(pace.retransmit_ns(), 4096 << 14);
        assert_eq!(Pace::new(64, 1).retransmit_ns(), 8192);
    }

    /// RFC 6298, with a deviation that begins at half of the first measurement.
    #[test]
    fn the_round_trip_is_smoothed_by_eighths_and_its_deviation_by_quarters() {
        let mut pace = Pace::new(64, 20);
        pace.measured(8_000_000);
        assert_eq!((pace.rtt_ns, pace.deviation_ns), (8_000_000, 4_000_000));
        pace.measured(16_000_000);
        assert_eq!((pace.rtt_ns, pace.deviation_ns), (9_000_000, 5_000_000));
        pace.measured(1_000_000);
        assert_eq!((pace.rtt_ns, pace.deviation_ns), (8_000_000, 5_750_000));
        assert_eq!(pace.retransmit_ns(), 31_000_000);
    }

    #[test]
    fn the_window_grows_by_one_for_each_of_its_lengths_up_to_its_most() {
        let mut pace = Pace::new(40, 14);
        pace.progress(1000);
        pace.loss();
        assert_eq!((pace.window(), pace.threshold), (20, 20));
        // Lengths of 20, 21 and 22 packets, and 5 that count for the next.
        pace.progress(20 + 21 + 22 + 5);
        assert_eq!((pace.window(), pace.acked), (23, 5));
        pace.progress(10_000);
        assert_eq!(pace.window(), 40);
    }

    #[test]
    fn rnr_timers_are_the_tables() {
        assert_eq!(rnr_ns(0), 655_360_000);
        assert_eq!(rnr_ns(1), 10_000);
        assert_eq!(rnr_ns(14), 1_280_000);
        assert_eq!(rnr_ns(31), 491_520_000);
    }
}
