//! A cable that is not good: what passes through this process is lost, doubled or late, and can be written down.

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

/// Packets that are remembered, for who wants to know what led to a failure.
const RECENT: usize = 60;

/// What a cable does to packets, TCP's too.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trouble {
    /// Of a thousand packets, so many are lost...
    pub lost: u32,
    /// ... come twice...
    pub doubled: u32,
    /// ... come after some that were sent later.
    pub late: u32,
    /// Which ones.
    pub seed: u64,
}

/// One of the two ends of a cable.
pub enum End {
    /// A TUN or TAP device: IP packets, or frames.
    Device(File),
    /// The network card of a virtual machine: frames come to `socket`, and go to the one at `card`.
    Machine {
        /// Bound to where the machine sends to.
        socket: UnixDatagram,
        /// Where the machine receives.
        card: PathBuf,
    },
}

impl End {
    /// The end at a virtual machine's card: the machine sends to `here` and receives at `card`.
    pub fn machine(here: &Path, card: &Path) -> Result<Self> {
        let socket = UnixDatagram::bind(here).context("a socket for the machine's card")?;
        // Who emulates a card reads soon; if not, the packet is lost.
        socket.set_write_timeout(Some(Duration::from_secs(1)))?;
        Ok(End::Machine { socket, card: card.into() })
    }

    /// The next packet, if there is one.
    fn take(&self, packet: &mut [u8]) -> Option<usize> {
        match self {
            End::Device(device) => (&*device).read(packet).ok(),
            End::Machine { socket, .. } => {
                recv(socket, packet, RecvFlags::DONTWAIT).ok().map(|(len, _)| len)
            }
        }
    }

    /// Where there is no room, or nobody any more, it is lost, as on a cable.
    fn put(&self, packet: &[u8]) {
        let _ = match self {
            End::Device(device) => (&*device).write(packet),
            End::Machine { socket, card } => socket.send_to(packet, card),
        };
    }
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            End::Device(device) => device.as_fd(),
            End::Machine { socket, .. } => socket.as_fd(),
        }
    }
}

/// The end of a new TUN (IP packets) or TAP (frames) device in a network namespace. It does not block.
pub fn open_device(namespace: &str, device: &'static str, frames: bool) -> Result<File> {
    in_namespace(namespace, move || {
        let path = "/dev/net/tun";
        let tun = File::options().read(true).write(true).open(path).context(path)?;
        // SAFETY: all zeros is a value of this structure of integers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (place, byte) in request.ifr_name.iter_mut().zip(device.bytes()) {
            *place = byte as libc::c_char;
        }
        let kind = if frames { libc::IFF_TAP } else { libc::IFF_TUN };
        request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as i16;
        // SAFETY: the request is what TUNSETIFF reads, and lives until the call returns.
        let made = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &request) };
        ensure!(made == 0, "making a TUN device: {}", std::io::Error::last_os_error());
        rustix::io::ioctl_fionbio(&tun, true)?;
        Ok(tun)
    })
}

/// Does something in a network namespace; sockets and devices made there stay in it.
pub fn in_namespace<T: Send + 'static>(
    namespace: &str,
    what: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let namespace = format!("/run/netns/{namespace}");
    // A thread of its own: it stays in the namespace.
    let inside = move || {
        let inside = File::open(&namespace)?;
        // SAFETY: setns takes no pointers; the descriptor is open.
        let moved = unsafe { libc::setns(inside.as_raw_fd(), libc::CLONE_NEWNET) };
        ensure!(moved == 0, "entering {namespace}: {}", std::io::Error::last_os_error());
        what()
    };
    thread::spawn(inside).join().expect("the thread does not panic")
}

/// A bad cable in use, until it is dropped.
pub struct Shuttle {
    stop: Arc<AtomicBool>,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

/// What can be asked of a cable, and changed, while it is in use.
struct State {
    trouble: Trouble,
    random: u64,
    counts: Counts,
    /// Packets that passed, and from which end; no more than so many.
    log: Vec<(usize, Vec<u8>)>,
    log_max: usize,
    /// The last [`RECENT`] packets.
    recent: VecDeque<Passed>,
    start: Instant,
}

/// A packet that came to a cable.
#[derive(Clone, Debug)]
pub struct Passed {
    /// When, since the cable was laid.
    pub at: Duration,
    /// From which end.
    pub from: usize,
    /// All of it.
    pub bytes: Vec<u8>,
    /// It went no further.
    pub lost: bool,
}

/// What a cable has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Packets that came to it.
    pub packets: u64,
    /// Of these, that were lost...
    pub lost: u64,
    /// ... that came twice...
    pub doubled: u64,
    /// ... that came late.
    pub late: u64,
}

impl Shuttle {
    /// Puts a cable between two ends.
    pub fn start(ends: [End; 2], trouble: Trouble) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let state = Arc::new(Mutex::new(State {
            trouble,
            random: trouble.seed | 1,
            counts: Counts::default(),
            log: Vec::new(),
            log_max: 0,
            recent: VecDeque::new(),
            start: Instant::now(),
        }));
        let mut cable = Cable { ends, state: state.clone(), late: VecDeque::new() };
        let stops = stop.clone();
        let thread =
            thread::Builder::new().name("cable".into()).spawn(move || cable.run(&stops))?;
        Ok(Self { stop, state, thread: Some(thread) })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("the cable does not panic")
    }

    /// From now on it is as bad as that.
    pub fn make(&self, trouble: Trouble) {
        let mut state = self.state();
        (state.trouble, state.random) = (trouble, trouble.seed | 1);
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    /// The last packets that came to it.
    pub fn recent(&self) -> Vec<Passed> {
        self.state().recent.iter().cloned().collect()
    }

    /// From now on, what the next `most` packets are is kept, in the order in which they came to it.
    pub fn keep(&self, most: usize) {
        let mut state = self.state();
        state.log_max = state.log.len() + most;
    }

    /// What has been kept, and from which end it came.
    pub fn kept(&self) -> Vec<(usize, Vec<u8>)> {
        let mut state = self.state();
        state.log_max = 0;
        std::mem::take(&mut state.log)
    }
}

impl Drop for Shuttle {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        eprintln!("the cable has lost {} packets", self.counts().lost);
    }
}

struct Cable {
    ends: [End; 2],
    state: Arc<Mutex<State>>,
    /// Packets that come late, to whom, and when.
    late: VecDeque<(Instant, usize, Vec<u8>)>,
}

impl Cable {
    fn run(&mut self, stop: &AtomicBool) {
        let mut packet = [0; 1 << 16];
        while !stop.load(Ordering::Relaxed) {
            let mut fds = self.ends.each_ref().map(|end| PollFd::new(end, PollFlags::IN));
            let wait = if self.late.is_empty() { 50_000_000 } else { 200_000 };
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait }));
            for from in 0..2 {
                // Until there is nothing, or the end is gone.
                while let Some(len) = self.ends[from].take(&mut packet) {
                    self.pass(from, &packet[..len]);
                }
            }
            self.bring_late(Instant::now());
        }
    }

    fn pass(&mut self, from: usize, packet: &[u8]) {
        let to = 1 - from;
        let mut copies = 1;
        {
            let state = &mut *self.state.lock().expect("who asks does not panic");
            state.counts.packets += 1;
            if state.log.len() < state.log_max {
                state.log.push((from, packet.to_vec()));
            }
            let lost = state.happens(state.trouble.lost);
            state.remember(from, packet, lost);
            if lost {
                state.counts.lost += 1;
                return;
            }
            if state.happens(state.trouble.late) {
                state.counts.late += 1;
                let after = Duration::from_micros(state.next() % 2000);
                self.late.push_back((Instant::now() + after, to, packet.to_vec()));
                return;
            }
            if state.happens(state.trouble.doubled) {
                state.counts.doubled += 1;
                copies = 2;
            }
        }
        for _ in 0..copies {
            self.ends[to].put(packet);
        }
    }

    fn bring_late(&mut self, now: Instant) {
        for _ in 0..self.late.len() {
            let Some((at, to, packet)) = self.late.pop_front() else { return };
            match at <= now {
                true => self.ends[to].put(&packet),
                false => self.late.push_back((at, to, packet)),
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
        self.recent.push_back(Passed { at, from, bytes, lost });
    }

    fn happens(&mut self, of_a_thousand: u32) -> bool {
        self.next() % 1000 < u64::from(of_a_thousand)
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}
