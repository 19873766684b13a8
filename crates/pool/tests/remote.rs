//! Tests of a memory node and its compute nodes over RoCEv2, on the loopback interface.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use verbs::Key;

use pool::protocol::{self, Opening};
use pool::remote::address::PORT;
use pool::{
    Address, Endpoint, Error, Grant, Lane, Listen, Options, Pool, Remote, Scheme, Service,
    Settings, Step, Token, schemes,
};
use scheme::info::AccessKind;
use schemes::onesidedmw::Budget;

fn settings() -> Settings {
    Settings { donate_bytes: 1 << 20, chunk_bytes: 64 << 10, ..Settings::default() }
}

fn serve(address: &str) -> (Service, Remote) {
    serve_by(schemes::ONESIDEDMW, address)
}

fn serve_by(scheme: Scheme, address: &str) -> (Service, Remote) {
    let listen = Listen::to_all(address.parse().unwrap());
    let settings = Settings { scheme, ..settings() };
    let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).unwrap();
    let to = service.address().unwrap().into();
    (service, Remote { to, token: None, nic: None })
}

fn options() -> Options {
    Options { groups: Some(2), ..Options::default() }
}

#[test]
fn chunks_are_allocated_used_and_freed_over_the_wire() {
    // Another test covers the schemes with access by pages.
    let all = schemes::ALL.iter().filter(|scheme| scheme.access != AccessKind::Pages);
    let places = all.map(|scheme| (*scheme, "127.0.0.1:0"));
    for (scheme, address) in places.chain([(schemes::ONESIDEDMW, "[::1]:0")]) {
        let (service, remote) = serve_by(scheme, address);
        let pool = Pool::connect_remote(&remote, options()).unwrap();
        assert_eq!(pool.nic().function().port_name(), "roce");
        let data: Vec<u8> =
            (0..64 << 10).map(|i: u32| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
        for round in 0..4 {
            let grants: Vec<_> = (0..16).map(|_| pool.allocate_blocking().unwrap()).collect();
            assert!(matches!(pool.allocate_blocking(), Err(Error::OutOfMemory { .. })));
            for grant in &grants {
                let mut zeros = vec![1; 64 << 10];
                pool.read_blocking(grant, 0, &mut zeros).unwrap();
                // The published form does not clear.
                let clears = scheme != schemes::FINEMEM_PAPER;
                let empty = zeros.iter().all(|b| *b == 0);
                assert!(empty || !clears, "{}, round {round}", scheme.name);
                pool.write_blocking(grant, 0, &data).unwrap();
                let mut back = vec![0; 64 << 10];
                pool.read_blocking(grant, 0, &mut back).unwrap();
                assert!(back == data);
                pool.write_blocking(grant, 8, &7u64.to_be_bytes()).unwrap();
                assert_eq!(pool.fetch_and_add_blocking(grant, 8, 5).unwrap(), 7);
                assert_eq!(pool.compare_and_swap_blocking(grant, 8, 12, 1).unwrap(), 12);
                run_list(&pool, grant);
            }
            grants.into_iter().for_each(|grant| pool.free_blocking(grant).unwrap());
        }
        assert_eq!(pool.node_status().unwrap().nic, "shm and roce", "the ports of its NIC");
        drop(pool);
        let start = Instant::now();
        while service.status().unwrap().node.free != 16 {
            assert!(start.elapsed() < Duration::from_secs(10), "its chunks are not reclaimed");
            std::thread::sleep(Duration::from_millis(5));
        }
        service.node().audit().unwrap();
    }
}

/// An ordered list with a WRITE that waits for a READ, and a list of which a step is refused.
fn run_list(pool: &Pool, grant: &Grant) {
    let (mut before, mut after, mut old) = ([0u8; 5000], [0u8; 5000], 0);
    let mut steps = [
        Step::Read { grant, offset: 4096, into: &mut before },
        Step::Write { grant, offset: 4096, from: &[9; 5000] },
        Step::CompareAndSwap { grant, offset: 8, expected: 1, new: 2, old: &mut old },
        Step::Read { grant, offset: 4096, into: &mut after },
    ];
    pool.run_blocking(Lane(1), &mut steps).unwrap();
    assert_eq!((old, after), (1, [9; 5000]));
    assert_ne!(before, after);
    let keys = vec![Key(0xdead_be00); grant.keys().len()];
    let dead = Grant::new(grant.addr, grant.len, grant.entry, grant.group, &keys);
    let mut steps = [
        Step::FetchAndAdd { grant, offset: 8, add: 4, old: &mut old },
        Step::Write { grant: &dead, offset: 0, from: &[1; 8] },
        Step::Write { grant, offset: 8, from: &[1; 8] },
    ];
    let refused = pool.run_blocking(Lane(1), &mut steps).unwrap_err();
    assert!(matches!(refused, Error::List { done: 1, steps: 3, op: "write", .. }), "{refused}");
    assert_eq!((old, pool.fetch_and_add_blocking(grant, 8, 0).unwrap()), (2, 6));
}

/// A proxy that modifies the memory node's messages on the control connection.
fn changed_on_the_way(to: SocketAddr, change: fn(String) -> String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (client, server) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
        let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut into));
        let (mut from, mut into) = (server, client);
        loop {
            let mut len = [0; 4];
            if from.read_exact(&mut len).is_err() {
                return;
            }
            let mut message = vec![0; u32::from_be_bytes(len) as usize];
            from.read_exact(&mut message).unwrap();
            let message = frame(&change(String::from_utf8(message).unwrap()));
            if into.write_all(&message).is_err() {
                return;
            }
        }
    });
    address
}

#[test]
fn untagged_packets_need_the_memory_nodes_own_proof() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    std::fs::write(&path, "correct horse battery").unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    for authenticated in [true, false] {
        let token = Token::read(&path).unwrap();
        let listen = Listen { authenticated, ..Listen::new("127.0.0.1:0".parse().unwrap(), token) };
        let service = Service::start_with(&settings(), &Endpoint::Fresh, Some(&listen)).unwrap();
        let to = service.address().unwrap();
        let remote =
            |to: SocketAddr| Remote { to: to.into(), token: Some(path.clone()), nic: None };
        let pool = Pool::connect_remote(&remote(to), options()).unwrap();
        let grant = pool.allocate_blocking().unwrap();
        pool.write_blocking(&grant, 0, b"data").unwrap();
        pool.free_blocking(grant).unwrap();
        let other = |message: String| {
            let (yes, no) = (r#""authenticated":true"#, r#""authenticated":false"#);
            if message.contains(yes) { message.replace(yes, no) } else { message.replace(no, yes) }
        };
        let refused = Pool::connect_remote(&remote(changed_on_the_way(to, other)), options());
        let why = refused.err().expect("the modified welcome was accepted").to_string();
        assert!(why.contains("has not proved that it has the token"), "{why}");
    }
}

#[test]
fn refused_access_breaks_nothing_else() {
    let (_service, remote) = serve("127.0.0.1:0");
    let (a, b) = (
        Pool::connect_remote(&remote, options()).unwrap(),
        Pool::connect_remote(&remote, options()).unwrap(),
    );
    let (mine, theirs) = (a.allocate_blocking().unwrap(), b.allocate_blocking().unwrap());
    b.write_blocking(&theirs, 0, b"theirs").unwrap();
    // Another owner's chunk, under this compute node's key and under the owner's key.
    for keys in [mine.keys().to_vec(), theirs.keys().to_vec()] {
        let forged = pool::Grant::new(theirs.addr, theirs.len, theirs.entry, mine.group, &keys);
        let refused = a.write_blocking(&forged, 0, b"mine");
        assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
        let refused = a.free_blocking(forged);
        assert!(matches!(refused, Err(Error::NotYours { .. })), "{refused:?}");
    }
    let mut bytes = [0; 6];
    b.read_blocking(&theirs, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"theirs");
    // The QPs have been re-established, with new PSNs.
    a.write_blocking(&mine, 0, b"mine").unwrap();
    let freed = mine;
    a.free_blocking(mine).unwrap();
    let refused = a.write_blocking(&freed, 0, b"late");
    assert!(matches!(refused, Err(Error::Access { .. })), "{refused:?}");
    let again = a.allocate_blocking().unwrap();
    a.write_blocking(&again, 0, b"again").unwrap();
}

/// Packets of 1 KiB to 4 KiB carry a page. The page that a write replaces is free when the write
/// returns.
#[test]
fn pages_are_stored_read_and_freed_over_the_wire() {
    for scheme in schemes::ALL.iter().filter(|scheme| scheme.access == AccessKind::Pages) {
        let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
        let settings =
            Settings { scheme, chunk_bytes: 4096, donate_bytes: 16 * 4096, ..settings() };
        let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).unwrap();
        let to = service.address().unwrap().into();
        let remote = Remote { to, token: None, nic: None };
        let (pool, other) = (
            Pool::connect_remote(&remote, options()).unwrap(),
            Pool::connect_remote(&remote, options()).unwrap(),
        );
        for round in 1..20u8 {
            let grants: Vec<_> = (0..8).map(|_| pool.allocate_blocking().unwrap()).collect();
            for (i, grant) in (0..).zip(&grants) {
                pool.write_blocking(grant, 0, &[i; 4096]).unwrap();
                pool.write_blocking(grant, 0, &[round + i; 4096]).unwrap();
            }
            assert_eq!(other.node_status().unwrap().node.free, 8, "{scheme}");
            for (i, grant) in (0..).zip(grants) {
                let mut page = [0; 4096];
                pool.read_blocking(&grant, 0, &mut page).unwrap();
                assert!(page == [round + i; 4096], "{scheme}");
                pool.free_blocking(grant).unwrap();
            }
        }
        drop(pool);
        while other.node_status().unwrap().node.leaving > 0 {}
        other.audit().unwrap();
    }
}

/// The initial state is derived from a salt that the compute node draws each time.
#[test]
fn broken_access_qps_are_reestablished_in_every_scheme() {
    // A scheme with access by pages has no keys.
    for scheme in schemes::ALL.iter().filter(|scheme| scheme.access == AccessKind::OneSided) {
        let (_service, remote) = serve_by(scheme, "127.0.0.1:0");
        let pool = Pool::connect_remote(&remote, options()).unwrap();
        let grant = pool.allocate_blocking().unwrap();
        let wrong: Vec<Key> = grant.keys().iter().map(|key| Key(key.0 ^ 0x55)).collect();
        let wrong = pool::Grant::new(grant.addr, grant.len, grant.entry, grant.group, &wrong);
        for _ in 0..3 {
            let refused = pool.write_blocking(&wrong, 0, b"wrong");
            assert!(matches!(refused, Err(Error::Access { .. })), "{scheme}: {refused:?}");
            pool.write_blocking(&grant, 0, b"right").unwrap_or_else(|e| panic!("{scheme}: {e}"));
        }
        pool.free_blocking(grant).unwrap();
    }
}

#[test]
fn operations_end_when_the_remote_node_ends() {
    let (service, remote) = serve("127.0.0.1:0");
    let pool = Pool::connect_remote(&remote, options()).unwrap();
    let grant = pool.allocate_blocking().unwrap();
    service.stop();
    let start = Instant::now();
    let gone = pool.read_blocking(&grant, 0, &mut [0; 8]);
    assert!(matches!(gone, Err(Error::Gone { .. })), "{gone:?}");
    let gone = pool.allocate_blocking();
    assert!(matches!(gone, Err(Error::Gone { .. })), "{gone:?}");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert!(Pool::connect_remote(&remote, options()).is_err());
}

/// The memory node's answer to these bytes, up to the end of the connection.
fn say(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // The connection may be reset if it was closed with unread data.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn frame(message: &str) -> Vec<u8> {
    [&(message.len() as u32).to_be_bytes()[..], message.as_bytes()].concat()
}

#[test]
fn protocol_violation_is_refused_and_other_clients_served() {
    let (service, remote) = serve("127.0.0.1:0");
    let address = service.address().unwrap();
    let nonce = "00".repeat(32);
    let greeting = frame(&format!(r#"{{"granary":1,"nonce":"{nonce}"}}"#));
    assert_eq!(say(address, b"GET / HTTP/1.1\r\n\r\n").matches("at most").count(), 1);
    assert!(say(address, &frame("{}")).contains("error"));
    let old = frame(&format!(r#"{{"granary":9,"nonce":"{nonce}"}}"#));
    assert!(say(address, &old).contains("version 9"));
    for (opening, why) in [
        (r#"{"service":"nic"}"#, "of its own host"),
        (r#"{"service":"tea"}"#, "there is no service"),
        (r#"{"service":"pool","version":77}"#, "version 77"),
    ] {
        let answer = say(address, &[greeting.clone(), frame(opening)].concat());
        assert!(answer.contains(why), "{opening}: {answer}");
    }
    // An incomplete greeting does not delay other connections.
    let mut silent = TcpStream::connect(address).unwrap();
    silent.write_all(&greeting[..3]).unwrap();
    let pool = Pool::connect_remote(&remote, options()).unwrap();
    pool.allocate_blocking().unwrap();
}

/// After an invalid frame the start of the next message is unknown. The rest of the stream is not
/// stored.
#[test]
fn oversized_message_ends_an_admitted_connection() {
    let (service, remote) = serve("127.0.0.1:0");
    let nonce = "00".repeat(32);
    let greeting = frame(&format!(r#"{{"granary":1,"nonce":"{nonce}"}}"#));
    let opening = String::from_utf8(protocol::encode("a test", &Opening::pool()).unwrap()).unwrap();
    let mut stream = TcpStream::connect(service.address().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(&[greeting, frame(&opening)].concat()).unwrap();
    let mut answers = Vec::new();
    while !String::from_utf8_lossy(&answers).contains("chunk_bytes") {
        let mut some = [0; 4096];
        let got = stream.read(&mut some).expect("no answer to the opening");
        assert_ne!(got, 0, "the connection ended: {}", String::from_utf8_lossy(&answers));
        answers.extend_from_slice(&some[..got]);
    }
    stream.write_all(&(protocol::MAX_BYTES as u32 + 1).to_be_bytes()).unwrap();
    let mut last = Vec::new();
    stream.read_to_end(&mut last).expect("the connection ends");
    assert!(String::from_utf8_lossy(&last).contains("at most"));
    Pool::connect_remote(&remote, options()).unwrap().allocate_blocking().unwrap();
}

#[test]
fn both_ends_prove_that_they_have_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, private).unwrap();
        path
    };
    let (right, wrong) = (file("right", "0123456789abcdef"), file("wrong", "fedcba9876543210"));
    let token = Token::read(&right).unwrap();
    let listen = Listen::new("127.0.0.1:0".parse().unwrap(), token);
    let service = Service::start_with(&settings(), &Endpoint::Fresh, Some(&listen)).unwrap();
    let remote = |token| Remote { to: service.address().unwrap().into(), token, nic: None };
    Pool::connect_remote(&remote(Some(right.clone())), options()).unwrap();
    let error = |token| {
        Pool::connect_remote(&remote(token), options()).err().expect("not refused").to_string()
    };
    assert!(error(Some(wrong)).contains("the token is wrong"));
    assert!(error(None).contains("asks for a token"));
    // A memory node without a token is not accepted in place of one with it.
    let (_open, remote) = serve("127.0.0.1:0");
    let e =
        Pool::connect_remote(&Remote { token: Some(right), ..remote }, options()).err().unwrap();
    assert!(e.to_string().contains("asks for no token"), "{e}");
}

/// A TCP connection to `to` from the address 127.0.1.`from`.
fn connect_from(from: u8, to: SocketAddr) -> TcpStream {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    net::bind(&socket, &SocketAddr::from(([127, 0, 1, from], 0))).unwrap();
    net::connect(&socket, &to).unwrap();
    TcpStream::from(socket)
}

/// More connections than the limit of all connections: those without a proof have a limit of their
/// own, and the oldest are replaced.
#[test]
fn unproved_connections_do_not_block_proved_ones() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let token = Token::read(&file).unwrap();
    let listen = Listen::new("127.0.0.1:0".parse().unwrap(), token);
    let settings = Settings { clients_max: 4, silence: Duration::from_secs(600), ..settings() };
    let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).unwrap();
    let address = service.address().unwrap();
    let silent: Vec<TcpStream> =
        (1..=9).flat_map(|from| (0..20).map(move |_| connect_from(from, address))).collect();
    // They have all been accepted once a later connection is answered or closed.
    let mut later = connect_from(10, address);
    later.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    later.write_all(&frame(&format!(r#"{{"granary":1,"nonce":"{}"}}"#, "00".repeat(32)))).unwrap();
    let received = later.read(&mut [0]);
    let timed_out = |e: &std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
    assert!(!received.is_err_and(|e| timed_out(&e)), "neither answered nor closed");
    let here = Pool::connect(service.path(), options()).unwrap();
    here.allocate_blocking().unwrap();
    let remote = Remote { to: address.into(), token: Some(file), nic: None };
    let far = Pool::connect_remote(&remote, options()).unwrap();
    far.allocate_blocking().unwrap();
    drop(silent);
}

/// A socket bound to `[::]` also receives IPv4 connections and IPv4 packets.
#[test]
fn wildcard_address_serves_ipv4_and_ipv6() {
    let (service, _) = serve("[::]:0");
    let port = service.address().unwrap().port();
    for ip in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
        let to = SocketAddr::new(ip.parse().unwrap(), port).into();
        let pool = Pool::connect_remote(&Remote { to, token: None, nic: None }, options()).unwrap();
        let grant = pool.allocate_blocking().unwrap_or_else(|e| panic!("{ip}: {e}"));
        pool.write_blocking(&grant, 0, &[7; 8192]).unwrap();
        let mut back = [0; 8192];
        pool.read_blocking(&grant, 0, &mut back).unwrap();
        assert_eq!(back, [7; 8192], "{ip}");
        pool.free_blocking(grant).unwrap();
    }
}

#[test]
fn address_without_a_port_gets_the_default_port() {
    let text = "roce://[::1]";
    let Address::Roce(remote) = text.parse().unwrap() else { panic!("{text}") };
    assert_eq!(remote.to.to_string(), format!("roce://[::1]:{PORT}"));
}

/// A request that is acknowledged but never answered: the NICs cannot detect it.
#[test]
fn closed_management_connection_ends_waiting_requests() {
    let budget = Budget { requests_per_s: Some(200), ..Budget::default() };
    let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let settings = settings().with("budget", budget);
    let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).unwrap();
    let to = service.address().unwrap().into();
    let pool = Pool::connect_remote(&Remote { to, token: None, nic: None }, options()).unwrap();
    let kept = pool.allocate_blocking().unwrap();
    let (ended, end) = std::sync::mpsc::channel();
    for _ in 0..4 {
        let (pool, ended) = (pool.clone(), ended.clone());
        std::thread::spawn(move || {
            let error = loop {
                if let Err(e) = pool.allocate_blocking().and_then(|g| pool.free_blocking(g)) {
                    break e;
                }
            };
            let _ = ended.send(error);
        });
    }
    for _ in 0..4 {
        let error =
            end.recv_timeout(Duration::from_secs(60)).expect("a waiting request did not end");
        let expected = matches!(error, Error::OverBudget { .. } | Error::ManagementBroken { .. });
        assert!(expected, "{error}");
    }
    // The grant stays usable, and the compute node can reconnect.
    pool.write_blocking(&kept, 0, b"kept").unwrap();
    let start = Instant::now();
    loop {
        match pool.allocate_blocking() {
            Ok(grant) => break pool.free_blocking(grant).unwrap(),
            Err(Error::OverBudget { retry_after, .. }) => std::thread::sleep(retry_after),
            Err(e) => panic!("{e}"),
        }
        assert!(start.elapsed() < Duration::from_secs(60), "cannot reconnect");
    }
}
