//! Two hosts on one machine: network namespaces, with a cable between them that is good, or is not.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The cable's name at both ends.
const CABLE: &str = "cable";
/// Their addresses.
pub const V4: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// The same in IPv6.
pub const V6: [&str; 2] = ["fd77::1", "fd77::2"];

/// What a cable does to IP packets, TCP's too.
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

/// Two hosts.
pub struct Hosts {
    names: [String; 2],
    _shuttle: Option<Shuttle>,
}

impl Hosts {
    /// Two hosts with a good cable (veth). `None`, with a line that says why, where this user may not make any.
    pub fn new() -> Result<Option<Self>> {
        Self::made(None)
    }

    /// Two hosts with a bad cable: every packet passes through this process.
    pub fn with(trouble: Trouble) -> Result<Option<Self>> {
        Self::made(Some(trouble))
    }

    fn made(trouble: Option<Trouble>) -> Result<Option<Self>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: network namespaces are made as root only");
            return Ok(None);
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("granary-{}-{number}-{side}", std::process::id());
        let mut hosts = Self { names: [name("a"), name("b")], _shuttle: None };
        for name in &hosts.names {
            ip(&["netns", "add", name])?;
        }
        match trouble {
            None => {
                let [a, b] = &hosts.names;
                let ends = ["link", "add", CABLE, "netns", a, "type", "veth", "peer"];
                ip(&[&ends[..], &["name", CABLE, "netns", b]].concat())?;
            }
            Some(trouble) => {
                let tuns = [open_tun(&hosts.names[0])?, open_tun(&hosts.names[1])?];
                hosts._shuttle = Some(Shuttle::start(tuns, trouble)?);
            }
        }
        for (i, name) in hosts.names.iter().enumerate() {
            let inside = |more: &[&str]| ip(&[&["-n", name.as_str()], more].concat());
            inside(&["addr", "add", &format!("{}/24", V4[i]), "dev", CABLE])?;
            inside(&["addr", "add", &format!("{}/64", V6[i]), "dev", CABLE, "nodad"])?;
            inside(&["link", "set", "lo", "up"])?;
            inside(&["link", "set", CABLE, "up"])?;
        }
        Ok(Some(hosts))
    }

    /// A program on a host, 0 or 1.
    pub fn command(&self, host: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program);
        command
    }

    /// Pulls the cable out at a host.
    pub fn unplug(&self, host: usize) -> Result<()> {
        ip(&["-n", &self.names[host], "link", "set", CABLE, "down"])
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let out = Command::new("ip").args(arguments).output().context("ip (Debian: iproute2)")?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "ip {}: {}", arguments.join(" "), said.trim());
    Ok(())
}

/// The end of a new TUN device in a namespace.
fn open_tun(namespace: &str) -> Result<File> {
    let namespace = format!("/run/netns/{namespace}");
    // A thread of its own: it stays in the namespace.
    thread::spawn(move || {
        let inside = File::open(&namespace)?;
        // SAFETY: setns takes no pointers; the descriptor is open.
        let moved = unsafe { libc::setns(inside.as_raw_fd(), libc::CLONE_NEWNET) };
        ensure!(moved == 0, "entering {namespace}: {}", std::io::Error::last_os_error());
        let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
        // SAFETY: all zeros is a value of this structure of integers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (place, byte) in request.ifr_name.iter_mut().zip(CABLE.bytes()) {
            *place = byte as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as i16;
        // SAFETY: the request is what TUNSETIFF reads, and lives until the call returns.
        let made = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &request) };
        ensure!(made == 0, "making a TUN device: {}", std::io::Error::last_os_error());
        rustix::io::ioctl_fionbio(&tun, true)?;
        Ok(tun)
    })
    .join()
    .expect("the thread does not panic")
}

/// The bad cable.
struct Shuttle {
    stop: Arc<AtomicBool>,
    lost: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Shuttle {
    fn start(tuns: [File; 2], trouble: Trouble) -> Result<Self> {
        let (stop, lost) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut cable = Cable {
            tuns,
            trouble,
            random: trouble.seed | 1,
            late: VecDeque::new(),
            lost: Arc::clone(&lost),
        };
        let ends = stop.clone();
        let thread = thread::Builder::new().name("cable".into()).spawn(move || cable.run(&ends))?;
        Ok(Self { stop, lost, thread: Some(thread) })
    }
}

impl Drop for Shuttle {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        eprintln!("the cable has lost {} packets", self.lost.load(Ordering::Relaxed));
    }
}

struct Cable {
    tuns: [File; 2],
    trouble: Trouble,
    random: u64,
    /// Packets that come late, to whom, and when.
    late: VecDeque<(Instant, usize, Vec<u8>)>,
    lost: Arc<AtomicU64>,
}

impl Cable {
    fn run(&mut self, stop: &AtomicBool) {
        let mut packet = [0; 1 << 16];
        while !stop.load(Ordering::Relaxed) {
            let mut fds = self.tuns.each_ref().map(|tun| PollFd::new(tun, PollFlags::IN));
            let wait = if self.late.is_empty() { 50_000_000 } else { 200_000 };
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: wait }));
            for from in 0..2 {
                // Until there is nothing, or the namespace is gone.
                while let Ok(len) = (&self.tuns[from]).read(&mut packet) {
                    self.pass(1 - from, &packet[..len]);
                }
            }
            self.bring_late(Instant::now());
        }
    }

    fn pass(&mut self, to: usize, packet: &[u8]) {
        if self.happens(self.trouble.lost) {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if self.happens(self.trouble.late) {
            let after = Duration::from_micros(self.next() % 2000);
            self.late.push_back((Instant::now() + after, to, packet.to_vec()));
            return;
        }
        self.put(to, packet);
        if self.happens(self.trouble.doubled) {
            self.put(to, packet);
        }
    }

    fn bring_late(&mut self, now: Instant) {
        for _ in 0..self.late.len() {
            let Some((at, to, packet)) = self.late.pop_front() else { return };
            match at <= now {
                true => self.put(to, &packet),
                false => self.late.push_back((at, to, packet)),
            }
        }
    }

    fn put(&mut self, to: usize, packet: &[u8]) {
        match (&self.tuns[to]).write(packet) {
            // Its host has no room, or no interface any more: lost, as on a cable.
            Ok(_) | Err(_) => {}
        }
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
