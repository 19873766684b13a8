//! Log lines about refused connections and requests.
//!
//! Because a peer causes them, they are rate-limited: a burst of [`BURST`], then one per [`EACH`].
//! The next line says how many were left out.

use std::time::Duration;

use units::TokenBucket;

use super::client_limits::PeerIdentity;
use super::connection::{Connection, Role};
use super::connection_limits::ConnectionId;
use crate::Error;

/// Lines that may follow each other at once.
const BURST: u32 = 32;
/// Time in which one further line is allowed.
const EACH: Duration = Duration::from_secs(1);

/// The log of refusals. Times are relative to the service's start.
pub struct RefusalLog {
    bucket: TokenBucket,
    left_out: u64,
}

impl RefusalLog {
    /// A log that allows a full burst.
    pub fn new() -> Self {
        // The bucket lends one token more than it holds.
        Self { bucket: TokenBucket::new(BURST - 1, EACH, Duration::ZERO), left_out: 0 }
    }

    /// Logs a connection that is closed without a reply.
    pub fn connection(&mut self, peer: PeerIdentity, why: &str, now: Duration) {
        if let Some(left_out) = self.admit(now) {
            tracing::warn!(%peer, why, left_out, "connection refused");
        }
    }

    /// Logs a failed attempt to accept a connection.
    pub fn accept_failed(&mut self, why: &str, now: Duration) {
        if let Some(left_out) = self.admit(now) {
            tracing::warn!(why, left_out, "accepting a connection failed: it is tried again");
        }
    }

    /// Logs a request, or an opening, that is refused with an error.
    pub fn request(&mut self, id: ConnectionId, from: &Connection, error: &Error, now: Duration) {
        let Some(left_out) = self.admit(now) else { return };
        let client = match &from.role {
            Role::Pool(session) => session.client.map(|client| client.0),
            _ => None,
        };
        let (connection, peer, why) = (id.0, from.identity, error.to_string());
        let why = why.as_str();
        tracing::warn!(connection, client, %peer, why, left_out, "request refused");
    }

    /// The number of lines left out before this one, if this one is allowed.
    fn admit(&mut self, now: Duration) -> Option<u64> {
        if self.bucket.wait(now).is_some() {
            self.left_out += 1;
            return None;
        }
        self.bucket.take(1, now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_beyond_the_burst_are_counted_and_left_out() {
        let mut log = RefusalLog::new();
        let start = Duration::from_secs(10);
        assert_eq!((0..100).filter_map(|_| log.admit(start)).count(), BURST as usize);
        assert_eq!(log.admit(start + EACH), Some(100 - BURST as u64));
        assert_eq!(log.admit(start + EACH), None);
        assert_eq!(log.admit(start + EACH * 2), Some(1));
    }
}
