//! Helpers: a small memory node, and connections that send arbitrary messages.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use pool::protocol::{Numbered, Opening, Reply, Request};
use pool::{Endpoint, Options, Pool, Scheme, Service, Settings};
use rnic::port::shm::socket::{receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

pub fn settings(scheme: Scheme) -> Settings {
    Settings {
        donate_bytes: 64 * 4096,
        chunk_bytes: 4096,
        scheme,
        clients_max: 4,
        ..Settings::default()
    }
}

pub fn service(scheme: Scheme) -> Service {
    Service::start(&settings(scheme), &Endpoint::Fresh).unwrap()
}

pub fn connect(service: &Service) -> Pool {
    Pool::connect(service.path(), Options { groups: Some(1), ..Options::default() }).unwrap()
}

pub fn check_whole(service: &Service) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let status = service.status().unwrap().node;
        if status.free == status.chunks && (status.clients, status.leaving) == (0, 0) {
            break;
        }
        assert!(Instant::now() < deadline, "chunks are missing: {status:?}");
        thread::sleep(Duration::from_millis(1));
    }
    service.node().audit().unwrap();
    assert_eq!(service.failure(), None);
}

/// A connection that sends arbitrary messages.
pub struct Raw(pub OwnedFd);

impl Raw {
    pub fn new(path: &Path) -> Self {
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(path).unwrap()).unwrap();
        let timeout = Some(Duration::from_secs(10));
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, timeout).unwrap();
        Self(fd)
    }

    pub fn pool(path: &Path) -> Self {
        let raw = Self::new(path);
        raw.say(&serde_json::to_vec(&Opening::pool()).unwrap());
        assert!(matches!(raw.hear().unwrap().body, Reply::Welcome(_)));
        raw
    }

    pub fn say(&self, bytes: &[u8]) {
        send(&self.0, bytes, &[]).unwrap();
    }

    pub fn ask(&self, id: u64, body: Request) -> Reply {
        self.say(&serde_json::to_vec(&Numbered { id, body }).unwrap());
        let reply = self.hear().unwrap();
        assert_eq!(reply.id, id);
        reply.body
    }

    /// Receives the next reply; `None` at the end of the connection.
    pub fn hear(&self) -> Option<Numbered<Reply>> {
        let packet = receive(&self.0).expect("an answer in time")?;
        Some(serde_json::from_slice(&packet.bytes).unwrap())
    }
}
