//! Tests of the connection limits, and of listeners whose `accept` fails.

use std::net::{SocketAddr, TcpListener, TcpStream};

use rustix::event::Timespec;
use rustix::event::epoll::Event;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::*;
use crate::remote::{Listen, RemoteListener};
use crate::service::Service;
use crate::service::connection::{PoolSession, Role};
use crate::service::control::{ControlSockets, Epoll};
use crate::socket::Listener;
use crate::{Endpoint, Settings};

/// Runs a test with a control thread's state and listeners of its own. The service only provides
/// the memory node.
fn with_control(clients_max: u32, test: impl FnOnce(&mut Control<'_>)) {
    let settings = Settings { donate_bytes: 1 << 20, clients_max, ..Settings::default() };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let listener = Listener::bind(&Endpoint::Fresh).unwrap();
    let remote = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let (remote, _wire) = RemoteListener::bind(&remote).unwrap();
    let epoll = Epoll::new().unwrap();
    let sockets =
        ControlSockets::new(epoll, &service.shared.wake.eventfd, listener, Some(remote)).unwrap();
    test(&mut Control::new(&service.shared, sockets));
}

/// Source of connected TCP socket pairs; the clients have addresses 127.0.1.`from`.
struct Tcp(TcpListener);

impl Tcp {
    fn new() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    fn connect(&self, from: u8) -> (OwnedFd, TcpStream) {
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let client = net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        net::bind(&client, &SocketAddr::from(([127, 0, 1, from], 0))).unwrap();
        net::connect(&client, &self.0.local_addr().unwrap()).unwrap();
        (self.0.accept().unwrap().0.into(), client.into())
    }
}

/// The listeners that the epoll set reports within `limit`.
fn heard(control: &Control<'_>, limit: Option<&Timespec>) -> Vec<u64> {
    let mut events: Vec<Event> = Vec::with_capacity(8);
    control.epoll.wait(&mut events, limit).unwrap();
    let mut heard: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
    heard.retain(|number| [LISTENER, REMOTE_LISTENER].contains(number));
    heard.sort();
    heard
}

#[test]
fn failing_listeners_are_not_watched_until_the_delay_passed() {
    with_control(4, |control| {
        const BOTH: [u64; 2] = [LISTENER, REMOTE_LISTENER];
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _local = crate::socket::connect(control.listener.path()).unwrap();
        let address = control.remote.as_ref().unwrap().address();
        let _remote = TcpStream::connect(address).unwrap();
        while heard(control, None) != BOTH {}
        let before = Instant::now();
        control.stop_accepting(Errno::MFILE).unwrap();
        assert!(control.accept_again.is_some_and(|at| at >= before + AGAIN));
        assert!(heard(control, Some(&NOW)).is_empty());
        {
            let trouble = control.shared.trouble.lock();
            assert_eq!(trouble.accepts, 1);
            assert!(trouble.last.as_ref().is_some_and(|why| why.contains("Too many open files")));
        }
        // The delay has not passed.
        let later = Instant::now() + Duration::from_secs(3600);
        control.accept_again = Some(later);
        control.accept_again().unwrap();
        assert_eq!((control.accept_again, heard(control, Some(&NOW))), (Some(later), vec![]));
        control.accept_again = Some(Instant::now());
        control.accept_again().unwrap();
        assert_eq!(control.accept_again, None);
        assert_eq!(heard(control, Some(&NOW)), BOTH);
        control.accept().unwrap();
        control.accept_remote().unwrap();
        assert_eq!(control.connections.len(), 2);
        assert!(heard(control, Some(&NOW)).is_empty());
    });
}

#[test]
fn proved_connection_is_never_replaced_by_an_unproved_one() {
    with_control(4, |control| {
        let tcp = Tcp::new();
        let mut clients = Vec::new();
        let mut admit = |control: &mut Control<'_>| {
            let (stream, client) = tcp.connect(1);
            clients.push(client);
            control.admit_remote(stream, 4791);
            control.connections.len()
        };
        for held in 1..=connection_limits::UNPROVED_EACH {
            assert_eq!(admit(control), held);
        }
        assert_eq!(
            admit(control),
            connection_limits::UNPROVED_EACH,
            "one address has reached its limit"
        );
        let ids: Vec<ConnectionId> = control.connections.keys().copied().collect();
        control.connections.get_mut(&ids[0]).unwrap().role = Role::Pool(PoolSession::default());
        assert_eq!(
            admit(control),
            connection_limits::UNPROVED_EACH + 1,
            "it no longer counts as unproved"
        );
        assert_eq!(admit(control), connection_limits::UNPROVED_EACH + 1);
        // Once all are old, the first unproved connection is replaced.
        for connection in control.connections.values_mut() {
            connection.accepted =
                Instant::now().checked_sub(2 * connection_limits::PROVING).unwrap();
        }
        assert_eq!(admit(control), connection_limits::UNPROVED_EACH + 1);
        let there = ids.iter().map(|id| control.connections.contains_key(id));
        let gone: Vec<bool> = there.map(|there| !there).collect();
        assert_eq!(gone.iter().filter(|gone| **gone).count(), 1);
        assert!(gone[1]);
    });
}

#[test]
fn only_proved_remote_connections_count_against_the_limit() {
    with_control(1, |control| {
        let tcp = Tcp::new();
        let mut clients = Vec::new();
        let other = PeerIdentity::Host(IpAddr::from([127, 0, 2, 1]));
        for from in 1..=64 {
            let (stream, client) = tcp.connect(from);
            clients.push(client);
            let mut connection = Connection::remote(stream, 4791, 0).unwrap();
            connection.role = Role::Pool(PoolSession::default());
            if control.has_room_for(connection.identity) {
                control.add(connection);
            }
        }
        assert!(control.connections.len() < 64, "the number of connections is bounded");
        assert!(!control.has_room_for(other));
        control.connections.values_mut().for_each(|c| c.role = Role::Unknown);
        assert!(control.has_room_for(other));
    });
}
