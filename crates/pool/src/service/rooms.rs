//! Room at the control sockets: which connections are kept, and which compute nodes are admitted.
//!
//! ```text
//!  Unix socket ──────────────────────────────┐
//!  TCP ──> unproved: a small room of its own ┴─(token proved)─> connections ──(admit)──> places
//!          oldest ones make way                  the last 16 for processes with few      256
//! ```
//!
//! Everything here decides by counts alone, so that unit tests reach each rule.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::connection::ConnectionId;
use super::paces::Asker;
use crate::scheme::ClientId;

/// Connections beyond two for each compute node, for processes that only ask.
const ASKING: usize = 32;
/// Connections beyond these, for processes that have few.
const RESERVED: usize = 16;
/// What "few" is: a pool and a NIC connection, and as many that only ask.
const FEW: usize = 4;

/// TCP connections that have not proved the token, of all addresses together.
const UNPROVED: usize = 64;
/// The same of one address.
pub const UNPROVED_EACH: usize = 16;
/// A connection that has been unproved for longer makes way for a newer one where room is short.
pub const PROVING: Duration = Duration::from_secs(1);

/// Memory nodes with fewer places than this keep none back: a quarter of them is too few to be
/// shared out.
const PLACES_TO_SHARE: usize = 16;
/// Places that a process may have beyond the shared part: its own, and one while it connects anew.
const FEW_PLACES: usize = 2;

/// Whether `asker` may have one more connection, where those of `held` are let in: local ones, and
/// those of other hosts that have proved the token.
pub fn has_room_for(clients_max: usize, asker: Asker, held: impl Iterator<Item = Asker>) -> bool {
    let limit = clients_max * 2 + ASKING + RESERVED;
    let (mut count, mut of_asker) = (0, 0);
    for other in held {
        count += 1;
        of_asker += usize::from(other == asker);
    }
    count + RESERVED < limit || count < limit && of_asker < FEW
}

/// What becomes of a TCP connection that was just accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unproved {
    /// It is kept.
    Kept,
    /// It is kept, and this one is ended: it has been unproved for long.
    InPlaceOf(ConnectionId),
    /// It is ended; its compute node connects again.
    Refused,
}

/// Decides on a TCP connection from `address`, beside those of `held` that have not proved the
/// token either; of each the number, the address and when it was accepted.
pub fn admit_unproved(
    address: IpAddr,
    now: Instant,
    held: impl Iterator<Item = (ConnectionId, IpAddr, Instant)>,
) -> Unproved {
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
        (true, true) => return Unproved::Kept,
        (_, false) => oldest_of_address,
        (false, true) => oldest,
    };
    match makes_way {
        Some((since, id)) if now.saturating_duration_since(since) > PROVING => {
            Unproved::InPlaceOf(id)
        }
        _ => Unproved::Refused,
    }
}

/// The part of an address that one host cannot change at will: of IPv6 the first 64 bits.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
    }
}

/// The user or the host that a compute node is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// A user of this host.
    Local(Option<u32>),
    /// Another host.
    Host(IpAddr),
}

/// The process or host that holds a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Its process, or its host.
    pub asker: Asker,
    /// Its user, or its host.
    pub user: User,
}

/// The places for compute nodes, and the holder of each.
pub struct Places {
    max: usize,
    /// Some are kept back for others.
    shared: bool,
    held: BTreeMap<ClientId, Holder>,
}

impl Places {
    /// So many places, all free. If they are `shared`, no process, user or host gets all.
    pub fn new(max: usize, shared: bool) -> Self {
        Self { max, shared: shared && max >= PLACES_TO_SHARE, held: BTreeMap::new() }
    }

    /// A compute node was admitted.
    pub fn take(&mut self, client: ClientId, holder: Holder) {
        self.held.insert(client, holder);
    }

    /// Frees the places of compute nodes of which nothing is left.
    pub fn forget(&mut self, is_retired: impl Fn(ClientId) -> bool) {
        self.held.retain(|client, _| !is_retired(*client));
    }

    /// Checks that `holder` may have one more place.
    ///
    /// # Errors
    /// What to say: the limit that was reached.
    pub fn check(&self, holder: Holder) -> Result<(), String> {
        let (max, free) = (self.max, self.max.saturating_sub(self.held.len()));
        if free == 0 {
            return Err(format!(
                "it has {max} places for compute nodes, and all are taken or being taken back"
            ));
        }
        if !self.shared {
            return Ok(());
        }
        let (for_processes, for_users) = (max / 4, max / 8);
        let held_by =
            |same: &dyn Fn(&Holder) -> bool| self.held.values().filter(|h| same(h)).count();
        let of_process = held_by(&|h| h.asker == holder.asker);
        if let Asker::Process(_) = holder.asker
            && free <= for_processes
            && of_process >= FEW_PLACES
        {
            return Err(format!(
                "of its {max} places for compute nodes the last {for_processes} are for other \
                 processes, and this process has {of_process}"
            ));
        }
        let of_user = held_by(&|h| h.user == holder.user);
        if free <= for_users && of_user >= for_users {
            let (others, this) = match holder.user {
                User::Local(_) => ("other users and other hosts", "this user"),
                User::Host(_) => ("other hosts and local users", "this host"),
            };
            return Err(format!(
                "of its {max} places for compute nodes the last {for_users} are for {others}, and \
                 {this} has {of_user}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rnic::port::shm::Peer;

    use super::*;

    fn process(pid: i32) -> Asker {
        Asker::Process(Peer::Process(pid))
    }

    fn host(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    /// Connections that `askers` get, each as many as it can, one after the other.
    fn greedy(askers: impl Iterator<Item = Asker>) -> Vec<Asker> {
        let mut held = Vec::new();
        for asker in askers {
            while has_room_for(4, asker, held.iter().copied()) {
                held.push(asker);
            }
        }
        held
    }

    #[test]
    fn the_last_connections_are_for_processes_with_few() {
        let limit = 4 * 2 + ASKING + RESERVED;
        let greedy_one = greedy([process(1)].into_iter());
        assert_eq!(greedy_one.len(), limit - RESERVED, "one process gets all but the last");
        let all = greedy((1..=4).map(process));
        let of = |pid| all.iter().filter(|a| **a == process(pid)).count();
        assert_eq!([of(2), of(3), of(4)], [FEW; 3], "each of the next gets a few");
        let full = greedy((1..100).map(process));
        assert_eq!(full.len(), limit);
        assert!(!has_room_for(4, process(1000), full.into_iter()), "the room is bounded");
    }

    #[test]
    fn connections_without_a_proof_take_no_other_rooms_and_the_old_ones_make_way() {
        let start = Instant::now();
        let mut held: Vec<(ConnectionId, IpAddr, Instant)> = Vec::new();
        let mut ids = (1..).map(ConnectionId);
        let mut enter = |held: &mut Vec<_>, address, now| {
            let entry = admit_unproved(address, now, held.iter().copied());
            if let Unproved::InPlaceOf(old) = entry {
                held.retain(|(id, ..): &(ConnectionId, _, _)| *id != old);
            }
            if entry != Unproved::Refused {
                held.push((ids.next().expect("endless"), address, now));
            }
            entry
        };
        for _ in 0..UNPROVED_EACH {
            assert_eq!(enter(&mut held, host(1), start), Unproved::Kept);
        }
        assert_eq!(enter(&mut held, host(1), start), Unproved::Refused, "one address has its fill");
        let addresses = (2..).map(host).take(UNPROVED / UNPROVED_EACH - 1);
        for address in addresses {
            for _ in 0..UNPROVED_EACH {
                assert_eq!(enter(&mut held, address, start), Unproved::Kept);
            }
        }
        assert_eq!(enter(&mut held, host(99), start), Unproved::Refused, "all have their fill");
        let in_time = enter(&mut held, host(99), start + PROVING);
        assert_eq!(in_time, Unproved::Refused, "the time to prove it is not over");
        let later = start + PROVING + Duration::from_millis(1);
        let oldest = held[0].0;
        assert_eq!(enter(&mut held, host(99), later), Unproved::InPlaceOf(oldest));
        assert_eq!(held.len(), UNPROVED);
        let of_second = held.iter().find(|(_, address, _)| *address == host(2)).expect("held").0;
        assert_eq!(enter(&mut held, host(2), later), Unproved::InPlaceOf(of_second));
    }

    #[test]
    fn an_ipv6_host_is_one_address_whatever_it_calls_itself() {
        let now = Instant::now();
        let address = |n: u16| IpAddr::from([0xfd00, 0, 0, 1, 0, 0, 0, n]);
        let held = (0..UNPROVED_EACH as u16).map(|n| (ConnectionId(n.into()), address(n), now));
        assert_eq!(admit_unproved(address(999), now, held.clone()), Unproved::Refused);
        let other = IpAddr::from([0xfd00, 0, 0, 2, 0, 0, 0, 1]);
        assert_eq!(admit_unproved(other, now, held), Unproved::Kept);
    }

    fn local(pid: i32, uid: u32) -> Holder {
        Holder { asker: process(pid), user: User::Local(Some(uid)) }
    }

    fn remote(n: u8) -> Holder {
        Holder { asker: Asker::Host(host(n)), user: User::Host(host(n)) }
    }

    /// Places that `holder` gets besides those that are held.
    fn fill(places: &mut Places, holder: Holder) -> usize {
        let before = places.held.len();
        while places.check(holder).is_ok() {
            places.take(ClientId(places.held.len() as u32 + 1), holder);
        }
        places.held.len() - before
    }

    #[test]
    fn a_process_leaves_places_to_other_processes() {
        let mut places = Places::new(256, true);
        assert_eq!(fill(&mut places, local(1, 1000)), 192);
        let why = places.check(local(1, 1000)).unwrap_err();
        assert!(why.contains("256 places") && why.contains("the last 64"), "{why}");
        assert_eq!(fill(&mut places, local(2, 1000)), FEW_PLACES);
        assert_eq!(fill(&mut places, remote(1)), 32, "and to hosts");
        assert_eq!(fill(&mut places, remote(2)), 30);
        assert!(places.check(local(3, 7)).unwrap_err().contains("all are taken"));
    }

    #[test]
    fn a_user_or_host_leaves_places_to_other_users_and_hosts() {
        let kinds: [fn(i32) -> Holder; 2] = [|_| remote(1), |pid| local(pid, 1000)];
        for of_one in kinds {
            let mut places = Places::new(256, true);
            let many: usize = (1..=300).map(|pid| fill(&mut places, of_one(pid))).sum();
            assert_eq!(many, 224);
            let why = places.check(of_one(999)).unwrap_err();
            assert!(why.contains("the last 32"), "{why}");
            assert_eq!(fill(&mut places, remote(2)), 32);
        }
    }

    #[test]
    fn one_process_may_have_all_of_few_places_and_of_those_that_are_not_shared() {
        for (max, shared) in [(PLACES_TO_SHARE - 1, true), (256, false)] {
            assert_eq!(fill(&mut Places::new(max, shared), local(1, 1000)), max);
        }
    }

    #[test]
    fn a_place_is_free_again_when_its_compute_node_is_retired() {
        let mut places = Places::new(1, true);
        places.take(ClientId(1), local(1, 1));
        places.forget(|_| false);
        assert!(places.check(local(2, 1)).is_err());
        places.forget(|client| client == ClientId(1));
        assert_eq!(places.check(local(2, 1)), Ok(()));
    }
}
