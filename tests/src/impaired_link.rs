//! An impaired network link: packets pass through this process, which loses, duplicates, delays and
//! captures them.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use units::Random;

/// Number of recent packets that are kept for the report of a failure.
const RECENT: usize = 60;

/// Impairments of a link, applied to all packets, TCP's included.
#[derive(Clone, Copy, Debug, Default)]
pub struct Impairment {
    /// Lost packets per thousand.
    pub lost: u32,
    /// Duplicated packets per thousand.
    pub duplicated: u32,
    /// Delayed packets per thousand; a delayed packet arrives after some later ones.
    pub delayed: u32,
    /// Seed of the random choice of packets.
    pub seed: u64,
}

/// One of the two ends of a link.
pub enum LinkEnd {
    /// A TUN device (IP packets) or TAP device (frames).
    Device(File),
    /// The network card of a virtual machine, as a pair of datagram sockets.
    Machine {
        /// Receives the frames that the machine sends.
        socket: UnixDatagram,
        /// Path of the socket on which the machine receives frames.
        card: PathBuf,
    },
}

impl LinkEnd {
    /// The end at a virtual machine's card: the machine sends to `here` and receives at `card`.
    pub fn machine(here: &Path, card: &Path) -> Result<Self> {
        let socket =
            UnixDatagram::bind(here).context("binding the socket of the machine's card")?;
        // If qemu does not read in time, the packet is lost.
        socket.set_write_timeout(Some(Duration::from_secs(1)))?;
        Ok(LinkEnd::Machine { socket, card: card.into() })
    }

    /// Reads the next packet without blocking.
    fn receive(&self, packet: &mut [u8]) -> Option<usize> {
        match self {
            LinkEnd::Device(device) => (&*device).read(packet).ok(),
            LinkEnd::Machine { socket, .. } => {
                recv(socket, packet, RecvFlags::DONTWAIT).ok().map(|(len, _)| len)
            }
        }
    }

    /// Sends a packet. The packet is lost if the queue is full or the receiver is gone.
    fn send(&self, packet: &[u8]) {
        let _ = match self {
            LinkEnd::Device(device) => (&*device).write(packet),
            LinkEnd::Machine { socket, card } => socket.send_to(packet, card),
        };
    }
}

impl AsFd for LinkEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            LinkEnd::Device(device) => device.as_fd(),
            LinkEnd::Machine { socket, .. } => socket.as_fd(),
        }
    }
}

/// Creates a TUN device (IP packets) or TAP device (frames) in a network namespace and returns its
/// non-blocking descriptor.
pub fn open_device(namespace: &str, device: &'static str, frames: bool) -> Result<File> {
    in_namespace(namespace, move || {
        let path = "/dev/net/tun";
        let tun = File::options().read(true).write(true).open(path).context(path)?;
        // SAFETY: all zeros is a value of this structure of integers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, byte) in request.ifr_name.iter_mut().zip(device.bytes()) {
            *to = byte as libc::c_char;
        }
        let kind = if frames { libc::IFF_TAP } else { libc::IFF_TUN };
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as i16;
        // SAFETY: TUNSETIFF reads the request, which lives until the call returns.
        let made = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &request) };
        ensure!(made == 0, "creating a TUN device: {}", std::io::Error::last_os_error());
        rustix::io::ioctl_fionbio(&tun, true)?;
        Ok(tun)
    })
}

/// Runs a closure in a network namespace; sockets and devices that it creates stay in the
/// namespace.
pub fn in_namespace<T: Send + 'static>(
    namespace: &str,
    what: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let namespace = format!("/run/netns/{namespace}");
    // A separate thread, because setns moves the calling thread for good.
    let inside = move || {
        let inside = File::open(&namespace)?;
        // SAFETY: setns takes no pointers; the descriptor is open.
        let moved = unsafe { libc::setns(inside.as_raw_fd(), libc::CLONE_NEWNET) };
        ensure!(moved == 0, "entering {namespace}: {}", std::io::Error::last_os_error());
        what()
    };
    thread::spawn(inside).join().expect("the thread does not panic")
}

/// A running impaired link; dropping it cuts the link.
pub struct ImpairedLink {
    stop: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

/// State that the owner of a running link can read and change.
struct State {
    impairment: Impairment,
    random: Random,
    counts: Counts,
    /// Captured packets with the number of the sending end; at most `capture_max`.
    capture: Vec<(usize, Vec<u8>)>,
    capture_max: usize,
    /// The last [`RECENT`] packets.
    recent: VecDeque<PacketRecord>,
    start: Instant,
}

/// A packet that arrived at the link.
#[derive(Clone, Debug)]
pub struct PacketRecord {
    /// Time since the start of the link.
    pub at: Duration,
    /// Number of the sending end, 0 or 1.
    pub from: usize,
    /// The whole packet.
    pub bytes: Vec<u8>,
    /// True if the link lost the packet.
    pub lost: bool,
}

/// Counters of a link.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Packets that arrived at the link.
    pub packets: u64,
    /// Lost packets.
    pub lost: u64,
    /// Duplicated packets.
    pub duplicated: u64,
    /// Delayed packets.
    pub delayed: u64,
}

impl ImpairedLink {
    /// Starts a link between two ends.
    pub fn start(ends: [LinkEnd; 2], impairment: Impairment) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let state = Arc::new(Mutex::new(State {
            impairment,
            random: Random::new(impairment.seed),
            counts: Counts::default(),
            capture: Vec::new(),
            capture_max: 0,
            recent: VecDeque::new(),
            start: Instant::now(),
        }));
        let mut forwarder = Forwarder { ends, state: state.clone(), delayed: VecDeque::new() };
        let stop_flag = stop.clone();
        let thread =
            thread::Builder::new().name("link".into()).spawn(move || forwarder.run(&stop_flag))?;
        Ok(Self { stop, state, thread: Some(thread) })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("the link's thread does not panic")
    }

    /// Changes the impairments from now on.
    pub fn set_impairment(&self, impairment: Impairment) {
        let mut state = self.state();
        (state.impairment, state.random) = (impairment, Random::new(impairment.seed));
    }

    /// The counters.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    /// The last packets that arrived at the link.
    pub fn recent(&self) -> Vec<PacketRecord> {
        self.state().recent.iter().cloned().collect()
    }

    /// Captures the next `max` packets, in order of arrival at the link.
    pub fn start_capture(&self, max: usize) {
        let mut state = self.state();
        state.capture_max = state.capture.len() + max;
    }

    /// Ends the capture and returns its packets, with the number of the sending end.
    pub fn take_capture(&self) -> Vec<(usize, Vec<u8>)> {
        let mut state = self.state();
        state.capture_max = 0;
        std::mem::take(&mut state.capture)
    }
}

impl Drop for ImpairedLink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        eprintln!("the impaired link has lost {} packets", self.counts().lost);
    }
}

/// The link's thread: forwards packets between the two ends.
struct Forwarder {
    ends: [LinkEnd; 2],
    state: Arc<Mutex<State>>,
    /// Delayed packets, with the time of delivery and the number of the receiving end.
    delayed: VecDeque<(Instant, usize, Vec<u8>)>,
}

impl Forwarder {
    fn run(&mut self, stop: &AtomicBool) {
        let mut packet = [0; 1 << 16];
        while !stop.load(Ordering::Relaxed) {
            let mut fds = self.ends.each_ref().map(|end| PollFd::new(end, PollFlags::IN));
            let wait = if self.delayed.is_empty() { 50_000_000 } else { 200_000 };
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait }));
            for from in 0..2 {
                // Until the end has no packet, or is gone.
                while let Some(len) = self.ends[from].receive(&mut packet) {
                    self.forward(from, &packet[..len]);
                }
            }
            self.deliver_delayed(Instant::now());
        }
    }

    fn forward(&mut self, from: usize, packet: &[u8]) {
        let to = 1 - from;
        let mut copies = 1;
        {
            let state = &mut *self.state.lock().expect("the link's owner does not panic");
            state.counts.packets += 1;
            if state.capture.len() < state.capture_max {
                state.capture.push((from, packet.to_vec()));
            }
            let lost = state.happens(state.impairment.lost);
            state.remember(from, packet, lost);
            if lost {
                state.counts.lost += 1;
                return;
            }
            if state.happens(state.impairment.delayed) {
                state.counts.delayed += 1;
                let delay = Duration::from_micros(state.random.below(2000));
                self.delayed.push_back((Instant::now() + delay, to, packet.to_vec()));
                return;
            }
            if state.happens(state.impairment.duplicated) {
                state.counts.duplicated += 1;
                copies = 2;
            }
        }
        for _ in 0..copies {
            self.ends[to].send(packet);
        }
    }

    fn deliver_delayed(&mut self, now: Instant) {
        for _ in 0..self.delayed.len() {
            let Some((at, to, packet)) = self.delayed.pop_front() else { return };
            match at <= now {
                true => self.ends[to].send(&packet),
                false => self.delayed.push_back((at, to, packet)),
            }
        }
    }
}

impl State {
    fn remember(&mut self, from: usize, packet: &[u8], lost: bool) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        let (at, bytes) = (self.start.elapsed(), packet.to_vec());
        self.recent.push_back(PacketRecord { at, from, bytes, lost });
    }

    fn happens(&mut self, per_thousand: u32) -> bool {
        self.random.below(1000) < u64::from(per_thousand)
    }
}
