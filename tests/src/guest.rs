//! A virtual machine with soft-RoCE (`tests/rxe`), and a bad cable to it.
//!
//! ```text
//!  this process                                       qemu, emulating
//!  NIC ── UDP socket ─┐ network namespace             ┌ rxe ── peer (libibverbs)
//!                     └─ TAP ── Shuttle ── datagrams ─┴ card    │
//!  the test ───────────────────────────── socket ───── serial line
//! ```
//!
//! What the program in the guest shall do next is told over its serial line, which nothing disturbs.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::cable::{End, Shuttle, Trouble, in_namespace, open_device};
use crate::hosts::{V4, V6, ip};
use crate::needs;

/// How long the guest may take to boot, or to answer: it is emulated, on a machine that does other things.
const PATIENCE: Duration = Duration::from_secs(300);
/// Bytes of an IP packet on the cable.
const MTU: u32 = 9000;
/// The TAP device's name.
const DEVICE: &str = "cable";

/// A running virtual machine.
pub struct Guest {
    child: Child,
    directory: PathBuf,
    namespace: String,
    orders: UnixStream,
    answers: BufReader<UnixStream>,
    restarts: u32,
    /// What is between it and this process.
    pub cable: Shuttle,
}

impl Guest {
    /// Boots one, after making its image if that is not there. `None` where this user may make no
    /// network namespace: the test is skipped.
    pub fn boot() -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            needs::skip("only root can make network namespaces");
            return Ok(None);
        }
        ensure!(
            Path::new("/dev/net/tun").exists(),
            "there is no /dev/net/tun: load the kernel's module tun, or give this container the device"
        );
        let image = image()?;
        let name = format!("granary-rxe-{}", std::process::id());
        let directory = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&directory)?;
        let network = Network::new(&name)?;
        let place = |file: &str| directory.join(file);
        let ends = [
            End::Device(open_device(&name, DEVICE, true)?),
            End::machine(&place("cable.sock"), &place("card.sock"))?,
        ];
        let cable = Shuttle::start(ends, Trouble::default())?;
        network.address()?;
        let control = UnixListener::bind(place("control.sock"))?;
        control.set_nonblocking(true)?;
        let mut child = start(&image, &directory)?;
        let stream = match accept(&control, &mut child) {
            Ok(stream) => stream,
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(e);
            }
        };
        let orders = stream.try_clone()?;
        let answers = BufReader::new(stream);
        let namespace = network.keep();
        let mut guest = Self { child, directory, namespace, orders, answers, restarts: 0, cable };
        let start = Instant::now();
        guest.hear().context("booting")?;
        eprintln!("the guest is up after {:.1?}", start.elapsed());
        Ok(Some(guest))
    }

    /// A UDP socket of the machine at the other end of the cable.
    pub fn socket(&self, address: SocketAddr) -> Result<UdpSocket> {
        let made = move || UdpSocket::bind(address).with_context(|| format!("binding {address}"));
        in_namespace(&self.namespace, made)
    }

    /// Gives an order; its answer is to be heard later.
    pub fn tell(&mut self, order: &str) -> Result<()> {
        writeln!(self.orders, "{order}").with_context(|| self.gone(order))
    }

    /// The next answer, without its `ok`.
    pub fn hear(&mut self) -> Result<Vec<String>> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line);
        ensure!(matches!(read, Ok(1..)), self.gone("answering"));
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(words.collect()),
            _ => bail!("the guest says: {}", line.trim()),
        }
    }

    /// Gives an order and hears its answer.
    pub fn ask(&mut self, order: &str) -> Result<Vec<String>> {
        self.tell(order)?;
        self.hear().with_context(|| order.to_owned())
    }

    /// Gives an order that is answered with a number.
    pub fn number(&mut self, order: &str) -> Result<u64> {
        let words = self.ask(order)?;
        let word = words.first().with_context(|| format!("{order}: no number"))?;
        Ok(word.parse()?)
    }

    /// Has it destroy all objects. Answers that were still to come are dropped.
    pub fn restart(&mut self) -> Result<()> {
        self.restarts += 1;
        let last = self.restarts.to_string();
        self.tell(&format!("reset {last}"))?;
        loop {
            match self.hear() {
                Ok(words)
                    if words.first().is_some_and(|word| word == "reset") && words[1] == last =>
                {
                    return Ok(());
                }
                Err(e) if self.child.try_wait()?.is_some() => return Err(e),
                _ => {}
            }
        }
    }

    /// Ends it, and makes sure that it has not crashed: qemu's own status does not tell.
    pub fn end(mut self) -> Result<()> {
        self.ask("bye")?;
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(start.elapsed() < PATIENCE, self.gone("switching off"));
            std::thread::sleep(Duration::from_millis(50));
        }
        let console = self.console();
        ensure!(console.contains("init: the peer ended with 0"), "it crashed:\n{console}");
        let trouble = ["BUG:", "WARNING:", "Oops", "Call Trace"];
        ensure!(!trouble.iter().any(|t| console.contains(t)), "its kernel complains:\n{console}");
        Ok(())
    }

    fn console(&self) -> String {
        let bytes = std::fs::read(self.directory.join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn gone(&self, what: &str) -> anyhow::Error {
        let console = self.console();
        let from = console.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
        anyhow!("the guest is gone or hangs ({what}); it said last:\n{}", &console[from..])
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = ip(&["netns", "del", &self.namespace]);
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The network namespace that our end of the cable is in; removed with its value, unless it is kept.
struct Network(Option<String>);

impl Network {
    fn new(name: &str) -> Result<Self> {
        ip(&["netns", "add", name])?;
        Ok(Self(Some(name.to_owned())))
    }

    /// Gives the device its addresses.
    fn address(&self) -> Result<()> {
        let name = self.0.as_deref().expect("not yet kept");
        let inside = |more: &[&str]| ip(&[&["-n", name], more].concat());
        inside(&["link", "set", DEVICE, "mtu", &MTU.to_string(), "up"])?;
        inside(&["addr", "add", &format!("{}/24", V4[0]), "dev", DEVICE])?;
        inside(&["addr", "add", &format!("{}/64", V6[0]), "dev", DEVICE, "nodad"])
    }

    fn keep(mut self) -> String {
        self.0.take().expect("kept once")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(name) = &self.0 {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// The directory with the kernel and the file system, made if need be.
fn image() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let directory = root.join("target/rxe");
    let script = root.join("tests/rxe/image");
    let made = Command::new(script).arg(&directory).status().context("tests/rxe/image")?;
    ensure!(made.success(), "the guest's image was not made: see above");
    Ok(directory)
}

fn start(image: &Path, directory: &Path) -> Result<Child> {
    let path = |file: &str| directory.join(file).display().to_string();
    let card = format!(
        "dgram,id=net,local.type=unix,local.path={},remote.type=unix,remote.path={}",
        path("card.sock"),
        path("cable.sock"),
    );
    // Its clock is not watched. On a busy machine a guest has panicked in `sched_clock_cpu`, just where the kernel patches
    // its code when it finds the clock unstable; that this is why was not proven, and there is no need for the watch.
    let words = format!(
        "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off audit=0 random.trust_cpu=on \
         tsc=reliable v4={}/24 v6={}/64 mtu={MTU}",
        V4[1], V6[1],
    );
    let mut qemu = Command::new("qemu-system-x86_64");
    // Always emulated: then it is the same everywhere.
    qemu.args(["-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", "-smp", "2"]);
    qemu.args(["-m", "512", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    qemu.args(["-serial", &format!("file:{}", path("console"))]);
    qemu.args(["-chardev", &format!("socket,id=control,path={}", path("control.sock"))]);
    qemu.args(["-serial", "chardev:control", "-netdev", &card]);
    qemu.args(["-device", &format!("virtio-net-pci,netdev=net,host_mtu={MTU}")]);
    qemu.arg("-kernel").arg(image.join("vmlinuz")).arg("-initrd").arg(image.join("initrd"));
    qemu.args(["-append", &words]).stdin(Stdio::null());
    qemu.spawn().context(
        "starting qemu-system-x86_64 7.2 or newer (Debian: apt-get install qemu-system-x86)",
    )
}

/// The serial line, which qemu connects to when it starts.
fn accept(control: &UnixListener, child: &mut Child) -> Result<UnixStream> {
    let start = Instant::now();
    loop {
        match control.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                return Ok(stream);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e).context("the guest's serial line"),
        }
        if let Some(status) = child.try_wait()? {
            bail!("qemu ended at once ({status}): see above");
        }
        ensure!(start.elapsed() < PATIENCE, "qemu does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `len` bytes that differ by `seed`; the guest's program has the same (tests/rxe/peer.c).
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(8) as u64).flat_map(|word| {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(word + 1);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31).to_le_bytes()
    });
    words.take(len).collect()
}

/// FNV-1a, as the guest's program works it out.
pub fn hash(bytes: &[u8]) -> u64 {
    let step = |h: u64, byte: &u8| (h ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
