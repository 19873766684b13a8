//! A NIC of this host for the processes of one user. Paged programs use it to reach another host.
//!
//! ```text
//!  paged program ─┐  Unix socket, shared memory   ┌───────────────┐
//!  its children  ─┼──────────────────────────────>│ NIC thread    │── UDP ──> memory node
//!                 │                               └───────────────┘
//!                 └── TCP: control connections, one for each process ──────> memory node
//! ```
//!
//! The NIC runs in a process of its own, because a forked process has no threads of its parent, and
//! because a program that exits takes its threads along while the process that serves its
//! children's pages continues.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::client_limits::PeerIdentity;
use crate::Error;
use crate::nic::{NicHost, SessionNeeds};
use crate::protocol::{self, Opening};
use crate::socket::{self, Endpoint, Listener, Peer, PeerSocket};

/// Maximum number of QPs per process with a peer on another host: an access QP per lane and core,
/// and management QPs.
const REMOTE_PEERS: u32 = 1024;
/// Pause of the listener after a lack of descriptors, threads or memory.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A NIC that serves until it is dropped. Only processes of the same user can attach.
pub struct NicService {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl NicService {
    /// Lets other processes attach to a NIC of this process.
    pub fn serve(host: Arc<dyn NicHost>) -> Result<Self, Error> {
        let listener = Listener::bind(&Endpoint::Fresh)?;
        let path = listener.path().to_path_buf();
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| {
            Error::System { attempt: "creating an eventfd".into(), source: e.into() }
        })?;
        let stop = Arc::new(stop);
        let stopped = stop.clone();
        let thread = thread::Builder::new()
            .name("granary-control".into())
            .spawn(move || accept(&host, &listener, &stopped))
            .map_err(|source| Error::System {
                attempt: "starting the NIC's listener thread".into(),
                source,
            })?;
        Ok(Self { path, stop, thread: Some(thread) })
    }

    /// Path of the control socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for NicService {
    fn drop(&mut self) {
        // The write does not block. If the counter is at its maximum, a wake-up is pending already.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread is reported on stderr already.
            let _ = thread.join();
        }
    }
}

/// Accepts processes until `stop` is readable.
fn accept(host: &Arc<dyn NicHost>, listener: &Listener, stop: &OwnedFd) {
    let mut is_full = false;
    loop {
        let was_full = is_full;
        let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // If accepting fails, the listener stays readable. Polling it would keep this thread from
        // sleeping.
        let (watched, timeout) = match is_full {
            true => (&mut fds[..1], Some(&RETRY)),
            false => (&mut fds[..], None),
        };
        match poll(watched, timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            // The kernel lacks memory for the call.
            Err(_) => thread::sleep(Duration::from_nanos(RETRY.tv_nsec as u64)),
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        is_full = match listener.accept() {
            Ok(None) => false,
            Ok(Some(fd)) => {
                let (host, peer) = (host.clone(), PeerSocket::from(fd));
                let named = thread::Builder::new().name("granary-session".into());
                // If no thread can be started, the connection is closed, which its process detects.
                named.spawn(move || serve_session(&*host, peer)).is_err()
            }
            // No descriptor or memory is available: connections stay in the backlog.
            Err(_) => true,
        };
        if is_full && !was_full {
            tracing::warn!("no descriptor, memory or thread for a connection: it is tried again");
        }
    }
}

/// Serves one attached process until its connection ends.
fn serve_session(host: &dyn NicHost, peer: PeerSocket) {
    let process = PeerIdentity::Process(Peer::of(&peer));
    tracing::debug!(peer = %process, "connection accepted");
    let why = run_session(host, peer);
    tracing::debug!(peer = %process, why, "connection closed");
}

/// Answers the requests of a process until its connection ends. Returns the reason for the end.
fn run_session(host: &dyn NicHost, peer: PeerSocket) -> &'static str {
    let needs = SessionNeeds { remote_peers: REMOTE_PEERS, ..SessionNeeds::default() };
    let mut session = None;
    loop {
        let mut fds = [PollFd::new(&peer, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return "waiting for a request failed",
        }
        let packet = match socket::receive(&peer) {
            Ok(Some(packet)) => packet,
            Err(Errno::WOULDBLOCK) => continue,
            Ok(None) | Err(_) => return "the process closed it",
        };
        let Some(session) = &mut session else {
            let opening = protocol::decode::<Opening>("reading an opening", &packet.bytes);
            match opening {
                Ok(opening) if opening.service == "nic" => {
                    session = Some(host.session(&needs));
                    continue;
                }
                // Any other opening is an error: this socket serves only the NIC.
                _ => return "it does not ask for the service `nic`",
            }
        };
        let (reply, descriptors) = session.handle(&packet.bytes, packet.descriptors);
        let descriptors: Vec<_> = descriptors.iter().map(std::os::fd::AsFd::as_fd).collect();
        // The socket's buffer has room for the reply, because the process sends one request at a
        // time.
        if socket::send(&peer, &reply, &descriptors).is_err() {
            return "the process does not read its replies";
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use verbs::Nic;

    use super::*;
    use crate::edge::SoftOpener;
    use crate::nic::NicOpener;

    fn start() -> NicService {
        NicService::start(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap()
    }

    #[test]
    fn processes_attach_until_the_service_is_dropped() {
        let service = start();
        let path = service.path().to_path_buf();
        let attached = [(); 2].map(|()| SoftOpener.open_local(&path).unwrap().nic);
        attached.iter().for_each(|nic| drop(nic.alloc_pd().unwrap()));
        drop(service);
        assert!(!path.exists(), "its socket is removed");
        assert!(SoftOpener.open_local(&path).is_err());
    }

    #[test]
    fn nic_service_refuses_other_services() {
        let service = start();
        for opening in [&br#"{"service":"pool","version":3}"#[..], b"{}", b"\xff"] {
            let peer = crate::socket::connect(service.path()).unwrap();
            socket::send(&peer, opening, &[]).unwrap();
            // A session would answer this message; the connection may have ended by now.
            let _ = socket::send(&peer, b"{}", &[]);
            let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&peer, PollFlags::IN)], Some(&limit));
            assert_eq!(ready, Ok(1), "the connection ends");
            assert!(
                matches!(socket::receive(&peer), Ok(None) | Err(_)),
                "the message was answered"
            );
        }
        SoftOpener.open_local(service.path()).unwrap().nic.alloc_pd().unwrap();
    }

    #[test]
    fn stop_eventfd_is_nonblocking_and_cloexec() {
        let service = start();
        let inherited = rustix::io::fcntl_getfd(&service.stop).unwrap();
        assert!(inherited.contains(rustix::io::FdFlags::CLOEXEC));
        let status = rustix::fs::fcntl_getfl(&service.stop).unwrap();
        assert!(status.contains(rustix::fs::OFlags::NONBLOCK));
    }
}
