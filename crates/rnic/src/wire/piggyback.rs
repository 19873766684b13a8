//! Detects request/response traffic, in which ACKs are delayed and piggybacked.
//!
//! ```text
//!   peer ──SEND──> this side      a message and a request of this side: one exchange.
//!        <──SEND──                After a few exchanges in succession ACKs are delayed and leave
//!        ──SEND──> ...            with one of the next requests of this side
//! ```
//!
//! A separate ACK costs both sides a system call in addition to the messages themselves. But an ACK
//! may be delayed only if the peer sends its next message without waiting for the ACK. If no
//! request follows a delayed ACK (the ACK times out), the traffic was misjudged: detection then
//! needs twice as many exchanges as before.

/// Exchanges in succession after which ACKs are piggybacked: the initial value.
const EXCHANGES: u32 = 4;
/// The maximum of this value after ACK timeouts.
const EXCHANGES_MAX: u32 = 1 << 16;

/// The detector's state of one connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PiggybackState {
    /// Exchanges in succession.
    exchanges: u32,
    /// Number of exchanges from which ACKs are piggybacked.
    needed: u32,
    /// A request was sent since the peer's last message.
    answered: bool,
}

impl PiggybackState {
    pub fn new() -> Self {
        Self { exchanges: 0, needed: EXCHANGES, answered: false }
    }

    /// Records that a complete message of the peer has arrived.
    pub fn on_message(&mut self) {
        self.exchanges = if self.answered { self.exchanges.saturating_add(1) } else { 0 };
        self.answered = false;
    }

    /// Records that a request was sent.
    pub fn on_request(&mut self) {
        self.answered = true;
    }

    /// Whether ACKs may be delayed until the next request.
    pub fn is_active(&self) -> bool {
        self.exchanges >= self.needed
    }

    /// Records that an ACK was sent together with a request.
    pub fn on_piggybacked(&mut self) {
        self.needed = EXCHANGES;
    }

    /// Records that a delayed ACK timed out, because no request was sent.
    pub fn on_ack_timeout(&mut self) {
        self.exchanges = 0;
        self.needed = EXCHANGES_MAX.min(2 * self.needed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(d: &mut PiggybackState, times: u32) {
        for _ in 0..times {
            d.on_request();
            d.on_message();
        }
    }

    #[test]
    fn piggybacking_starts_after_a_few_exchanges() {
        let mut d = PiggybackState::new();
        exchange(&mut d, EXCHANGES - 1);
        assert!(!d.is_active());
        exchange(&mut d, 1);
        assert!(d.is_active());
        // A second message without a request in between ends the exchange.
        d.on_message();
        assert!(!d.is_active());
    }

    #[test]
    fn ack_timeouts_double_the_exchanges_needed() {
        let mut d = PiggybackState::new();
        for times in [1, 2, 4, 8] {
            exchange(&mut d, times * EXCHANGES - 1);
            assert!(!d.is_active());
            exchange(&mut d, 1);
            assert!(d.is_active());
            d.on_ack_timeout();
            assert!(!d.is_active());
        }
        exchange(&mut d, 16 * EXCHANGES);
        d.on_piggybacked();
        d.on_ack_timeout();
        exchange(&mut d, 2 * EXCHANGES);
        assert!(d.is_active(), "the threshold was reset by the piggybacked ACK");
    }
}
