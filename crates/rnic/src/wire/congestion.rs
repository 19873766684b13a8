//! Congestion window and retransmission timer of a connection.
//!
//! ```text
//! window (packets)        grows by one for each acknowledged packet up to the slow-start
//!                         threshold, then by one for each window. A loss halves the window; a
//!                         timeout sets it to two
//! ACK requests            four in each window, and in the last packet of a message
//! retransmission timeout  round-trip time plus four times its deviation; doubled after each
//!                         timeout, never longer than the local ACK timeout
//! ```
//!
//! A connection fails by the local ACK timeout and the retry count alone (IBTA vol. 1, §9.7.6.1.3):
//! retransmissions before the local ACK timeout do not count as retries.

use super::outbox::LONG_BURST;

/// Minimum retransmission timeout. It tolerates a responder whose thread was descheduled for a
/// while.
const RTO_MIN_NS: u64 = 1_000_000;
/// Retransmission timeout before the first measurement of the round-trip time.
const RTO_FIRST_NS: u64 = 20_000_000;
/// Initial congestion window, in packets.
const WINDOW_FIRST: u32 = 32;
/// Congestion window after a timeout, in packets.
const WINDOW_AFTER_TIMEOUT: u32 = 2;

/// Unit of the local ACK timeout, in nanoseconds: code n means 2^n units.
const ACK_UNIT_NS: u64 = 4096;

/// Delays of RNR NAKs in units of 10 us, by timer code (IBTA vol. 1, §9.7.5.2.8).
const RNR_10US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// Delay that an RNR NAK with this timer code requests, in nanoseconds.
pub fn rnr_ns(code: u8) -> u64 {
    RNR_10US[code as usize & 31] as u64 * 10_000
}

/// Duration of a local ACK timeout with this code, in nanoseconds.
pub fn timeout_ns(exponent: u8) -> u64 {
    ACK_UNIT_NS << (exponent & 31)
}

/// A connection's congestion window and round-trip estimate.
pub(crate) struct CongestionControl {
    window: u32,
    /// Maximum of `window`.
    max_window: u32,
    /// Slow-start threshold: up to this window it grows with each acknowledged packet.
    threshold: u32,
    /// Packets acknowledged since the window last grew, above the threshold.
    acked: u32,
    /// Smoothed round-trip time; 0 before the first measurement.
    rtt_ns: u64,
    /// Mean deviation of the round-trip time.
    deviation_ns: u64,
    /// Timeouts in succession.
    timeouts: u32,
    /// Maximum retransmission timeout: the local ACK timeout.
    cap_ns: u64,
}

impl CongestionControl {
    /// Starts with at most `max_window` packets in flight, and a local ACK timeout of code
    /// `timeout`.
    pub fn new(max_window: u32, timeout: u8) -> Self {
        let max_window = max_window.max(WINDOW_AFTER_TIMEOUT);
        Self {
            window: WINDOW_FIRST.min(max_window),
            max_window,
            threshold: max_window,
            acked: 0,
            rtt_ns: 0,
            deviation_ns: 0,
            timeouts: 0,
            cap_ns: timeout_ns(timeout),
        }
    }

    /// Maximum packets in flight.
    #[inline]
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Interval of ACK requests in packets: a quarter of the window, rounded down to full bursts.
    #[inline]
    pub fn ack_every(&self) -> u32 {
        match self.window / 4 {
            few if few < LONG_BURST => few.max(1),
            many => many - many % LONG_BURST,
        }
    }

    /// Retransmission timeout in nanoseconds.
    #[inline]
    pub fn retransmit_ns(&self) -> u64 {
        let measured = match self.rtt_ns {
            0 => RTO_FIRST_NS,
            rtt => (rtt + 4 * self.deviation_ns).max(RTO_MIN_NS),
        };
        measured.saturating_mul(1 << self.timeouts.min(20)).min(self.cap_ns)
    }

    /// Records that `count` packets were acknowledged.
    #[inline]
    pub fn on_ack(&mut self, count: u32) {
        self.timeouts = 0;
        if self.window >= self.max_window {
            return;
        }
        if self.window < self.threshold {
            self.window = (self.window + count).min(self.threshold).min(self.max_window);
            return;
        }
        self.acked += count;
        while self.acked >= self.window && self.window < self.max_window {
            self.acked -= self.window;
            self.window += 1;
        }
    }

    /// Records a round-trip time of `ns`, measured with a packet that was sent once.
    pub fn on_rtt(&mut self, ns: u64) {
        let ns = ns.max(1);
        if self.rtt_ns == 0 {
            (self.rtt_ns, self.deviation_ns) = (ns, ns / 2);
            return;
        }
        // RFC 6298.
        self.deviation_ns = (3 * self.deviation_ns + self.rtt_ns.abs_diff(ns)) / 4;
        self.rtt_ns = (7 * self.rtt_ns + ns) / 8;
    }

    /// Records a loss while other packets still arrive.
    pub fn on_loss(&mut self) {
        self.threshold = (self.window / 2).max(WINDOW_AFTER_TIMEOUT);
        self.window = self.threshold;
        self.acked = 0;
    }

    /// Records a retransmission timeout.
    pub fn on_timeout(&mut self) {
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
    fn window_follows_acks_losses_and_timeouts() {
        let mut congestion = CongestionControl::new(256, 14);
        assert_eq!(congestion.window(), 32);
        congestion.on_ack(1000);
        assert_eq!(congestion.window(), 256);
        congestion.on_loss();
        assert_eq!(congestion.window(), 128);
        congestion.on_ack(127);
        assert_eq!(congestion.window(), 128);
        congestion.on_ack(1);
        assert_eq!(congestion.window(), 129);
        congestion.on_timeout();
        congestion.on_timeout();
        assert_eq!(congestion.window(), 2);
        congestion.on_ack(200);
        assert_eq!(congestion.window(), 64, "slow start up to half of the window at the loss");
        for _ in 0..100 {
            congestion.on_loss();
        }
        assert_eq!(congestion.window(), 2);
    }

    #[test]
    fn acks_are_requested_four_times_per_window_in_bursts() {
        let every = |window| {
            let mut congestion = CongestionControl::new(window, 14);
            congestion.on_ack(1000);
            congestion.ack_every()
        };
        assert_eq!(
            [2, 3, 8, 59, 60, 64, 119, 120, 240].map(every),
            [1, 1, 2, 14, 15, 15, 15, 30, 60]
        );
    }

    #[test]
    fn retransmission_timeout_is_measured_and_capped() {
        let mut congestion = CongestionControl::new(64, 14);
        assert_eq!(congestion.retransmit_ns(), RTO_FIRST_NS);
        congestion.on_rtt(8_000_000);
        assert_eq!(congestion.retransmit_ns(), 24_000_000);
        for _ in 0..100 {
            congestion.on_rtt(10_000);
        }
        assert_eq!(congestion.retransmit_ns(), RTO_MIN_NS);
        congestion.on_timeout();
        congestion.on_timeout();
        assert_eq!(congestion.retransmit_ns(), 4 * RTO_MIN_NS);
        for _ in 0..30 {
            congestion.on_timeout();
        }
        assert_eq!(congestion.retransmit_ns(), 4096 << 14);
        assert_eq!(CongestionControl::new(64, 1).retransmit_ns(), 8192);
    }

    /// RFC 6298; the deviation starts at half of the first measurement.
    #[test]
    fn round_trip_estimate_follows_rfc_6298() {
        let mut congestion = CongestionControl::new(64, 20);
        congestion.on_rtt(8_000_000);
        assert_eq!((congestion.rtt_ns, congestion.deviation_ns), (8_000_000, 4_000_000));
        congestion.on_rtt(16_000_000);
        assert_eq!((congestion.rtt_ns, congestion.deviation_ns), (9_000_000, 5_000_000));
        congestion.on_rtt(1_000_000);
        assert_eq!((congestion.rtt_ns, congestion.deviation_ns), (8_000_000, 5_750_000));
        assert_eq!(congestion.retransmit_ns(), 31_000_000);
    }

    #[test]
    fn window_grows_by_one_per_window_up_to_its_maximum() {
        let mut congestion = CongestionControl::new(40, 14);
        congestion.on_ack(1000);
        congestion.on_loss();
        assert_eq!((congestion.window(), congestion.threshold), (20, 20));
        // Windows of 20, 21 and 22 packets, and 5 packets towards the next one.
        congestion.on_ack(20 + 21 + 22 + 5);
        assert_eq!((congestion.window(), congestion.acked), (23, 5));
        congestion.on_ack(10_000);
        assert_eq!(congestion.window(), 40);
    }

    #[test]
    fn rnr_delays_match_the_ibta_table() {
        assert_eq!(rnr_ns(0), 655_360_000);
        assert_eq!(rnr_ns(1), 10_000);
        assert_eq!(rnr_ns(14), 1_280_000);
        assert_eq!(rnr_ns(31), 491_520_000);
    }
}
