//! ConnectRequest control: which connections the service keeps, and which compute nodes it admits.
//!
//! ```text
//!  Unix socket ──────────────────────────────┐
//!  TCP ──> unproved: a small limit of its own ┴─(token proved)─> connections ──(admit)──> slots
//!          oldest are replaced                    last 16: processes with few connections   256
//! ```
//!
//! All decisions depend only on counts and times, so that unit tests cover each rule.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::client_limits::PeerIdentity;
use scheme::ClientId;

/// Number of a connection, unique while the service runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(pub u64);

/// Additional connections, beyond two per compute node, for processes that only send control
/// requests.
const ASKING: usize = 32;
/// Further connections, reserved for processes that have few.
const RESERVED: usize = 16;
/// Maximum number of connections of a process with "few": one to the pool, one to the NIC, and two
/// that only send control requests.
const FEW: usize = 4;

/// Maximum number of TCP connections that have not proved the token, of all addresses together.
const UNPROVED: usize = 64;
/// Maximum number of TCP connections from one address that have not proved the token.
pub const UNPROVED_EACH: usize = 16;
/// Age from which an unproved connection may be replaced by a newer one.
pub const PROVING: Duration = Duration::from_secs(1);

/// Minimum number of client slots for a reserve. With fewer slots, a reserve of a quarter would be
/// too small to be useful.
const SLOTS_TO_SHARE: usize = 16;
/// Slots that a process may take from the reserve: one, and one more while it reconnects.
const FEW_SLOTS: usize = 2;

/// True if `identity` may have one more connection. `held` lists the owners of the existing
/// connections: local ones, and those from other hosts that have proved the token.
pub fn has_room_for(
    clients_max: usize,
    identity: PeerIdentity,
    held: impl Iterator<Item = PeerIdentity>,
) -> bool {
    let limit = clients_max * 2 + ASKING + RESERVED;
    let (mut count, mut of_asker) = (0, 0);
    for other in held {
        count += 1;
        of_asker += usize::from(other == identity);
    }
    count + RESERVED < limit || count < limit && of_asker < FEW
}

/// Decision on a TCP connection that was just accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnprovedDecision {
    /// Keep the connection.
    Kept,
    /// Keep the connection and close this one, which has been unproved for too long.
    InPlaceOf(ConnectionId),
    /// Close the connection; its compute node reconnects.
    Refused,
}

/// Decides on a TCP connection from `address`. `held` lists the other connections that have not
/// proved the token: number, address and time of acceptance.
pub fn admit_unproved(
    address: IpAddr,
    now: Instant,
    held: impl Iterator<Item = (ConnectionId, IpAddr, Instant)>,
) -> UnprovedDecision {
    let (mut count, mut of_address) = (0, 0);
    let (mut oldest, mut oldest_of_address) = (None, None);
    for (id, other, since) in held {
        count += 1;
        oldest = oldest.min(Some((since, id))).or(Some((since, id)));
        if network(other) == network(address) {
            of_address += 1;
            oldest_of_address = oldest_of_address.min(Some((since, id))).or(Some((since, id)));
        }
    }
    let makes_way = match (count < UNPROVED, of_address < UNPROVED_EACH) {
        (true, true) => return UnprovedDecision::Kept,
        (_, false) => oldest_of_address,
        (false, true) => oldest,
    };
    match makes_way {
        Some((since, id)) if now.saturating_duration_since(since) > PROVING => {
            UnprovedDecision::InPlaceOf(id)
        }
        _ => UnprovedDecision::Refused,
    }
}

/// The part of an address that a host cannot choose freely: the first 64 bits of an IPv6 address.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
    }
}

/// The user or host to which a compute node belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// A user of this host.
    Local(Option<u32>),
    /// Another host.
    Host(IpAddr),
}

/// The process and user, or the host, that holds a client slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The process or host.
    pub identity: PeerIdentity,
    /// The user or host.
    pub user: User,
}

/// The client slots, and the holder of each.
pub struct ClientSlots {
    max: usize,
    /// True if part of the slots is reserved for other processes, users and hosts.
    shared: bool,
    held: BTreeMap<ClientId, Holder>,
}

impl ClientSlots {
    /// `max` free slots. If `shared`, no process, user or host can take all of them.
    pub fn new(max: usize, shared: bool) -> Self {
        Self { max, shared: shared && max >= SLOTS_TO_SHARE, held: BTreeMap::new() }
    }

    /// Assigns a slot to an admitted compute node.
    pub fn take(&mut self, client: ClientId, holder: Holder) {
        self.held.insert(client, holder);
    }

    /// Frees the slots of retired compute nodes.
    pub fn forget(&mut self, is_retired: impl Fn(ClientId) -> bool) {
        self.held.retain(|client, _| !is_retired(*client));
    }

    /// Checks that `holder` may take one more slot.
    ///
    /// # Errors
    /// The limit that was reached, as text for the compute node.
    pub fn check(&self, holder: Holder) -> Result<(), String> {
        let (max, free) = (self.max, self.max.saturating_sub(self.held.len()));
        if free == 0 {
            return Err(format!("all of its {max} client slots are taken or being reclaimed"));
        }
        if !self.shared {
            return Ok(());
        }
        let (for_processes, for_users) = (max / 4, max / 8);
        let held_by =
            |same: &dyn Fn(&Holder) -> bool| self.held.values().filter(|h| same(h)).count();
        let of_process = held_by(&|h| h.identity == holder.identity);
        if let PeerIdentity::Process(_) = holder.identity
            && free <= for_processes
            && of_process >= FEW_SLOTS
        {
            return Err(format!(
                "of its {max} client slots, the last {for_processes} are reserved for other \
                 processes; this process has {of_process}"
            ));
        }
        let of_user = held_by(&|h| h.user == holder.user);
        if free <= for_users && of_user >= for_users {
            let (others, this) = match holder.user {
                User::Local(_) => ("other users and other hosts", "this user"),
                User::Host(_) => ("other hosts and local users", "this host"),
            };
            return Err(format!(
                "of its {max} client slots, the last {for_users} are reserved for {others}; \
                 {this} has {of_user}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Peer;

    fn process(pid: i32) -> PeerIdentity {
        PeerIdentity::Process(Peer::Process(pid))
    }

    fn host(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    /// Opens as many connections as possible for each of `identities` in turn; returns the accepted
    /// ones.
    fn greedy(identities: impl Iterator<Item = PeerIdentity>) -> Vec<PeerIdentity> {
        let mut held = Vec::new();
        for identity in identities {
            while has_room_for(4, identity, held.iter().copied()) {
                held.push(identity);
            }
        }
        held
    }

    #[test]
    fn reserved_connections_go_to_processes_with_few() {
        let limit = 4 * 2 + ASKING + RESERVED;
        let greedy_one = greedy([process(1)].into_iter());
        assert_eq!(
            greedy_one.len(),
            limit - RESERVED,
            "one process gets all but the reserved connections"
        );
        let all = greedy((1..=4).map(process));
        let of = |pid| all.iter().filter(|a| **a == process(pid)).count();
        assert_eq!([of(2), of(3), of(4)], [FEW; 3], "each further process gets a few");
        let full = greedy((1..100).map(process));
        assert_eq!(full.len(), limit);
        assert!(
            !has_room_for(4, process(1000), full.into_iter()),
            "the number of connections is bounded"
        );
    }

    #[test]
    fn unproved_connections_have_own_limit_and_oldest_is_replaced() {
        let start = Instant::now();
        let mut held: Vec<(ConnectionId, IpAddr, Instant)> = Vec::new();
        let mut ids = (1..).map(ConnectionId);
        let mut enter = |held: &mut Vec<_>, address, now| {
            let entry = admit_unproved(address, now, held.iter().copied());
            if let UnprovedDecision::InPlaceOf(old) = entry {
                held.retain(|(id, ..): &(ConnectionId, _, _)| *id != old);
            }
            if entry != UnprovedDecision::Refused {
                held.push((ids.next().expect("endless"), address, now));
            }
            entry
        };
        for _ in 0..UNPROVED_EACH {
            assert_eq!(enter(&mut held, host(1), start), UnprovedDecision::Kept);
        }
        assert_eq!(
            enter(&mut held, host(1), start),
            UnprovedDecision::Refused,
            "one address has reached its limit"
        );
        let addresses = (2..).map(host).take(UNPROVED / UNPROVED_EACH - 1);
        for address in addresses {
            for _ in 0..UNPROVED_EACH {
                assert_eq!(enter(&mut held, address, start), UnprovedDecision::Kept);
            }
        }
        assert_eq!(
            enter(&mut held, host(99), start),
            UnprovedDecision::Refused,
            "the common limit is reached"
        );
        let in_time = enter(&mut held, host(99), start + PROVING);
        assert_eq!(
            in_time,
            UnprovedDecision::Refused,
            "no connection is old enough to be replaced"
        );
        let later = start + PROVING + Duration::from_millis(1);
        let oldest = held[0].0;
        assert_eq!(enter(&mut held, host(99), later), UnprovedDecision::InPlaceOf(oldest));
        assert_eq!(held.len(), UNPROVED);
        let of_second = held.iter().find(|(_, address, _)| *address == host(2)).expect("held").0;
        assert_eq!(enter(&mut held, host(2), later), UnprovedDecision::InPlaceOf(of_second));
    }

    #[test]
    fn ipv6_addresses_of_one_prefix_count_as_one() {
        let now = Instant::now();
        let address = |n: u16| IpAddr::from([0xfd00, 0, 0, 1, 0, 0, 0, n]);
        let held = (0..UNPROVED_EACH as u16).map(|n| (ConnectionId(n.into()), address(n), now));
        assert_eq!(admit_unproved(address(999), now, held.clone()), UnprovedDecision::Refused);
        let other = IpAddr::from([0xfd00, 0, 0, 2, 0, 0, 0, 1]);
        assert_eq!(admit_unproved(other, now, held), UnprovedDecision::Kept);
    }

    fn local(pid: i32, uid: u32) -> Holder {
        Holder { identity: process(pid), user: User::Local(Some(uid)) }
    }

    fn remote(n: u8) -> Holder {
        Holder { identity: PeerIdentity::Host(host(n)), user: User::Host(host(n)) }
    }

    /// Takes slots for `holder` until it is refused; returns the number taken.
    fn fill(slots: &mut ClientSlots, holder: Holder) -> usize {
        let before = slots.held.len();
        while slots.check(holder).is_ok() {
            slots.take(ClientId(slots.held.len() as u32 + 1), holder);
        }
        slots.held.len() - before
    }

    #[test]
    fn process_cannot_take_the_reserved_slots() {
        let mut slots = ClientSlots::new(256, true);
        assert_eq!(fill(&mut slots, local(1, 1000)), 192);
        let why = slots.check(local(1, 1000)).unwrap_err();
        assert!(why.contains("256 client slots") && why.contains("the last 64"), "{why}");
        assert_eq!(fill(&mut slots, local(2, 1000)), FEW_SLOTS);
        assert_eq!(fill(&mut slots, remote(1)), 32, "also to hosts");
        assert_eq!(fill(&mut slots, remote(2)), 30);
        assert!(slots.check(local(3, 7)).unwrap_err().contains("are taken"));
    }

    #[test]
    fn user_or_host_cannot_take_the_reserved_slots() {
        let kinds: [fn(i32) -> Holder; 2] = [|_| remote(1), |pid| local(pid, 1000)];
        for of_one in kinds {
            let mut slots = ClientSlots::new(256, true);
            let many: usize = (1..=300).map(|pid| fill(&mut slots, of_one(pid))).sum();
            assert_eq!(many, 224);
            let why = slots.check(of_one(999)).unwrap_err();
            assert!(why.contains("the last 32"), "{why}");
            assert_eq!(fill(&mut slots, remote(2)), 32);
        }
    }

    #[test]
    fn process_may_take_all_slots_if_few_or_not_shared() {
        for (max, shared) in [(SLOTS_TO_SHARE - 1, true), (256, false)] {
            assert_eq!(fill(&mut ClientSlots::new(max, shared), local(1, 1000)), max);
        }
    }

    #[test]
    fn slot_is_free_once_its_compute_node_is_retired() {
        let mut slots = ClientSlots::new(1, true);
        slots.take(ClientId(1), local(1, 1));
        slots.forget(|_| false);
        assert!(slots.check(local(2, 1)).is_err());
        slots.forget(|client| client == ClientId(1));
        assert_eq!(slots.check(local(2, 1)), Ok(()));
    }
}
