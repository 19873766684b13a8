//! The NIC's state of all connections.

use super::connection::{AckDelay, Keys, PacketAuth};
use crate::limits::WireLimits;
use crate::wire::guess_limiter::GuessLimiter;
use crate::wire::mac::{Opener, Sealer, directions};
use crate::wire::{Outbox, WireStats};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use verbs::{Qpn, RemotePeer};

/// The NIC's state of all connections to other NICs.
pub(in crate::engine) struct RemoteState {
    pub outbox: Outbox,
    pub stats: WireStats,
    /// Deadlines of connections; at most one entry per connection.
    pub timers: BTreeSet<(u64, u32)>,
    /// The local QP of each peer without authentication keys. Packets from a peer's address are
    /// attributed to that peer, so only one QP may have a given peer. A peer with keys is
    /// identified by its tags instead, even if another QP names its address.
    pub unkeyed_peers: HashMap<(SocketAddr, Qpn), Qpn>,
    /// The highest packet counter of all destroyed connections. New connections continue from it,
    /// so no counter repeats under one key, even if two QPs are reconnected with the same secret.
    pub last_counter: u64,
    /// Number of connections with requests in flight.
    pub awaiting: u32,
    /// See [`crate::Engine::expects_more_packets`].
    pub expects_more: bool,
    /// Delayed-ACK policy for short messages.
    pub ack_policy: AckDelay,
    /// QPs whose ACK is delayed for piggybacking, oldest first, with the start time of the delay.
    /// Entries may be stale.
    pub piggybacking: VecDeque<(u64, Qpn)>,
    /// QPs whose ACK is delayed until the port changes the policy. Entries may be stale.
    pub delayed: Vec<Qpn>,
}

impl RemoteState {
    pub fn new(limits: Option<&WireLimits>) -> Self {
        Self {
            outbox: Outbox::new(limits.map_or(0, |l| l.outbox_bytes)),
            stats: WireStats::default(),
            timers: BTreeSet::new(),
            unkeyed_peers: HashMap::new(),
            last_counter: 0,
            awaiting: 0,
            expects_more: false,
            ack_policy: AckDelay::None,
            piggybacking: VecDeque::new(),
            delayed: Vec::new(),
        }
    }

    /// Derives the initial PSNs and keys of a connection of `qpn` from its secret, if it has one.
    pub(super) fn derive_keys(&self, peer: &mut RemotePeer, qpn: Qpn, now_ns: u64) -> PacketAuth {
        let guesses = || PacketAuth::Psn(GuessLimiter::new(now_ns));
        let Some(secret) = peer.secret else { return guesses() };
        let directions = directions(&secret, qpn, peer.qpn);
        (peer.sq_psn, peer.rq_psn) = (directions.out_psn, directions.in_psn);
        let Some((out, into)) = directions.keys else { return guesses() };
        let keys = Keys { sealer: Sealer::new(out, self.last_counter), opener: Opener::new(into) };
        PacketAuth::Key(Box::new(keys))
    }

    /// Earliest deadline of all connections.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.timers.first().map(|&(at, _)| at)
    }
}
