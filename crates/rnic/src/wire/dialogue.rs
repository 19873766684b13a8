//! Whether the acknowledgement of the peer's messages may wait for a message of one's own.
//!
//! ```text
//!   peer ──SEND──> this side      answered: one exchange        few in a row: a dialogue. What is acknowledged
//!        <──SEND──                                              goes along with one of the next answers
//!        ──SEND──> ...
//! ```
//!
//! An acknowledgement by itself costs either side a system call beside the messages that they wait for. It may wait
//! only for who goes on without it: whose messages come while it is held. Who waits for it instead is found out by
//! that, once, and then takes twice as many exchanges to be trusted again.

/// Exchanges in a row that make a dialogue, at first and at most.
const EXCHANGES: u32 = 4;
const EXCHANGES_MAX: u32 = 1 << 16;

/// What has been seen of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialogue {
    /// Exchanges in a row.
    exchanges: u32,
    /// How many it takes.
    needed: u32,
    /// A request was sent since the peer's last message.
    answered: bool,
}

impl Dialogue {
    pub fn new() -> Self {
        Self { exchanges: 0, needed: EXCHANGES, answered: false }
    }

    /// A message of the peer has arrived, whole.
    pub fn heard(&mut self) {
        self.exchanges = if self.answered { self.exchanges.saturating_add(1) } else { 0 };
        self.answered = false;
    }

    /// A request was sent.
    pub fn said(&mut self) {
        self.answered = true;
    }

    /// True if acknowledgements may wait for the next request.
    pub fn is_on(&self) -> bool {
        self.exchanges >= self.needed
    }

    /// An acknowledgement went along with a request.
    pub fn went_along(&mut self) {
        self.needed = EXCHANGES;
    }

    /// One has waited, and nothing was sent.
    pub fn fell_silent(&mut self) {
        self.exchanges = 0;
        self.needed = EXCHANGES_MAX.min(2 * self.needed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(d: &mut Dialogue, times: u32) {
        for _ in 0..times {
            d.said();
            d.heard();
        }
    }

    #[test]
    fn a_few_exchanges_in_a_row_are_a_dialogue() {
        let mut d = Dialogue::new();
        exchange(&mut d, EXCHANGES - 1);
        assert!(!d.is_on());
        exchange(&mut d, 1);
        assert!(d.is_on());
        // A message beyond what was answered ends it.
        d.heard();
        assert!(!d.is_on());
    }

    #[test]
    fn who_is_waited_for_in_vain_is_trusted_later_each_time() {
        let mut d = Dialogue::new();
        for times in [1, 2, 4, 8] {
            exchange(&mut d, times * EXCHANGES - 1);
            assert!(!d.is_on());
            exchange(&mut d, 1);
            assert!(d.is_on());
            d.fell_silent();
            assert!(!d.is_on());
        }
        exchange(&mut d, 16 * EXCHANGES);
        d.went_along();
        d.fell_silent();
        exchange(&mut d, 2 * EXCHANGES);
        assert!(d.is_on(), "as after the first time");
    }
}
