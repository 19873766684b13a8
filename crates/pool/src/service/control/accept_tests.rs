//! Tests of which connections are kept, and of listeners from which nothing can be accepted.

use std::net::{SocketAddr, TcpListener, TcpStream};

use rustix::event::Timespec;
use rustix::event::epoll::Event;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::*;
use crate::remote::{Listen, RemoteListener};
use crate::service::Service;
use crate::service::connection::{PoolSession, Role};
use crate::service::control::{Ears, Watch};
use crate::socket::Listener;
use crate::{Endpoint, Settings};

/// Runs a test with a control thread's state, whose listeners are its own. The service lends its memory node only.
fn with_control(clients_max: u32, test: impl FnOnce(&mut Control<'_>)) {
    let settings = Settings { donate_bytes: 1 << 20, clients_max, ..Settings::default() };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let listener = Listener::bind(&Endpoint::Fresh).unwrap();
    let remote = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let (remote, _wire) = RemoteListener::bind(&remote).unwrap();
    let watch = Watch::new().unwrap();
    let ears = Ears::new(watch, &service.shared.wake.eventfd, listener, Some(remote)).unwrap();
    test(&mut Control::new(&service.shared, ears));
}

/// The two ends of TCP connections from 127.0.1.`from`.
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

/// The listeners that the control thread would hear of within `limit`.
fn heard(control: &Control<'_>, limit: Option<&Timespec>) -> Vec<u64> {
    let mut events: Vec<Event> = Vec::with_capacity(8);
    control.watch.wait(&mut events, limit).unwrap();
    let mut heard: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
    heard.retain(|number| [LISTENER, REMOTE_LISTENER].contains(number));
    heard.sort();
    heard
}

#[test]
fn listeners_that_nothing_can_be_accepted_from_are_left_alone_for_a_time() {
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
        // Its time has not come.
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
fn a_connection_that_has_proved_the_token_makes_way_for_none_that_has_not() {
    with_control(4, |control| {
        let tcp = Tcp::new();
        let mut clients = Vec::new();
        let mut admit = |control: &mut Control<'_>| {
            let (stream, client) = tcp.connect(1);
            clients.push(client);
            control.admit_remote(stream, 4791);
            control.connections.len()
        };
        for held in 1..=rooms::UNPROVED_EACH {
            assert_eq!(admit(control), held);
        }
        assert_eq!(admit(control), rooms::UNPROVED_EACH, "one address has its fill");
        let ids: Vec<ConnectionId> = control.connections.keys().copied().collect();
        control.connections.get_mut(&ids[0]).unwrap().role = Role::Pool(PoolSession::default());
        assert_eq!(admit(control), rooms::UNPROVED_EACH + 1, "it has left that room");
        assert_eq!(admit(control), rooms::UNPROVED_EACH + 1);
        // When all are old, the first of those without a proof makes way.
        for connection in control.connections.values_mut() {
            connection.accepted = Instant::now().checked_sub(2 * rooms::PROVING).unwrap();
        }
        assert_eq!(admit(control), rooms::UNPROVED_EACH + 1);
        let there = ids.iter().map(|id| control.connections.contains_key(id));
        let gone: Vec<bool> = there.map(|there| !there).collect();
        assert_eq!(gone.iter().filter(|gone| **gone).count(), 1);
        assert!(gone[1]);
    });
}

#[test]
fn connections_of_other_hosts_that_were_let_in_take_up_room_and_the_others_do_not() {
    with_control(1, |control| {
        let tcp = Tcp::new();
        let mut clients = Vec::new();
        let other = Asker::Host(IpAddr::from([127, 0, 2, 1]));
        for from in 1..=64 {
            let (stream, client) = tcp.connect(from);
            clients.push(client);
            let mut connection = Connection::remote(stream, 4791, 0).unwrap();
            connection.role = Role::Pool(PoolSession::default());
            if control.has_room_for(connection.asker) {
                control.add(connection);
            }
        }
        assert!(control.connections.len() < 64, "the room is bounded");
        assert!(!control.has_room_for(other));
        control.connections.values_mut().for_each(|c| c.role = Role::Unknown);
        assert!(control.has_room_for(other));
    });
}
