//! A virtual machine with the kernel's soft-RoCE (`tests/rxe`), behind an impaired link.
//!
//! ```text
//!  this process                                       qemu, emulating
//!  NIC ── UDP socket ─┐ network namespace             ┌ rxe ── peer (libibverbs)
//!                     └─ TAP ─ ImpairedLink ─ sockets ┴ card    │
//!  the test ───────────────────────────── socket ───── serial line
//! ```
//!
//! The test sends commands to the program in the guest over a serial line, which is not impaired.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::hosts::{V4, V6, ip};
use crate::impaired_link::{ImpairedLink, Impairment, LinkEnd, in_namespace, open_device};
use crate::needs;

/// Time limit of the guest's boot and of each answer. Long, because the guest is emulated and the
/// machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Bytes of an IP packet on the link.
const MTU: u32 = 9000;
/// The TAP device's name.
const DEVICE: &str = "cable";

/// A running virtual machine.
pub struct Guest {
    child: Child,
    directory: PathBuf,
    namespace: String,
    commands: UnixStream,
    answers: BufReader<UnixStream>,
    restarts: u32,
    /// The link between the guest and this process.
    pub link: ImpairedLink,
}

impl Guest {
    /// Boots a guest; builds its image first if necessary. `None` if this user may not create
    /// network namespaces; then the test is skipped.
    pub fn boot() -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            needs::skip("only root can create network namespaces");
            return Ok(None);
        }
        ensure!(
            Path::new("/dev/net/tun").exists(),
            "/dev/net/tun is missing: load the kernel module tun, or pass the device to this \
             container"
        );
        let image = image()?;
        let name = format!("granary-rxe-{}", std::process::id());
        let directory = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&directory)?;
        let network = Network::new(&name)?;
        let path = |file: &str| directory.join(file);
        let ends = [
            LinkEnd::Device(open_device(&name, DEVICE, true)?),
            LinkEnd::machine(&path("cable.sock"), &path("card.sock"))?,
        ];
        let link = ImpairedLink::start(ends, Impairment::default())?;
        network.set_addresses()?;
        let control = UnixListener::bind(path("control.sock"))?;
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
        let commands = stream.try_clone()?;
        let answers = BufReader::new(stream);
        let namespace = network.keep();
        let mut guest = Self { child, directory, namespace, commands, answers, restarts: 0, link };
        let start = Instant::now();
        guest.receive().context("booting")?;
        eprintln!("the guest is up after {:.1?}", start.elapsed());
        Ok(Some(guest))
    }

    /// Opens a UDP socket at this process's end of the link.
    pub fn socket(&self, address: SocketAddr) -> Result<UdpSocket> {
        let made = move || UdpSocket::bind(address).with_context(|| format!("binding {address}"));
        in_namespace(&self.namespace, made)
    }

    /// Sends a command; [`Guest::receive`] returns the answer.
    pub fn send(&mut self, command: &str) -> Result<()> {
        writeln!(self.commands, "{command}").with_context(|| self.failure(command))
    }

    /// The words of the next answer, without the leading `ok`.
    pub fn receive(&mut self) -> Result<Vec<String>> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line);
        ensure!(matches!(read, Ok(1..)), self.failure("answering"));
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(words.collect()),
            _ => bail!("the guest answered: {}", line.trim()),
        }
    }

    /// Sends a command and returns the answer.
    pub fn ask(&mut self, command: &str) -> Result<Vec<String>> {
        self.send(command)?;
        self.receive().with_context(|| command.to_owned())
    }

    /// Sends a command whose answer is a number.
    pub fn number(&mut self, command: &str) -> Result<u64> {
        let words = self.ask(command)?;
        let word = words.first().with_context(|| format!("{command}: no number"))?;
        Ok(word.parse()?)
    }

    /// Makes the guest's program destroy all objects; discards outstanding answers.
    pub fn restart(&mut self) -> Result<()> {
        self.restarts += 1;
        let last = self.restarts.to_string();
        self.send(&format!("reset {last}"))?;
        loop {
            match self.receive() {
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

    /// Shuts the guest down and checks on its console that it did not crash; qemu's exit status
    /// does not show a crash.
    pub fn end(mut self) -> Result<()> {
        self.ask("bye")?;
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(start.elapsed() < TIMEOUT, self.failure("shutting down"));
            std::thread::sleep(Duration::from_millis(50));
        }
        let console = self.console();
        ensure!(console.contains("init: the peer ended with 0"), "the guest crashed:\n{console}");
        let problems = ["BUG:", "WARNING:", "Oops", "Call Trace"];
        ensure!(
            !problems.iter().any(|p| console.contains(p)),
            "the guest's kernel reports a problem:\n{console}"
        );
        Ok(())
    }

    fn console(&self) -> String {
        let bytes = std::fs::read(self.directory.join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn failure(&self, what: &str) -> anyhow::Error {
        let console = self.console();
        let from = console.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
        anyhow!("the guest has ended or hangs ({what}); end of its console:\n{}", &console[from..])
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

/// The network namespace of this process's end of the link; dropping the value removes the
/// namespace unless it was kept.
struct Network(Option<String>);

impl Network {
    fn new(name: &str) -> Result<Self> {
        ip(&["netns", "add", name])?;
        Ok(Self(Some(name.to_owned())))
    }

    /// Assigns the addresses of the device.
    fn set_addresses(&self) -> Result<()> {
        let name = self.0.as_deref().expect("set until it is kept");
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

/// The directory with the guest's kernel and file system; built if necessary.
fn image() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let directory = root.join("target/rxe");
    let script = root.join("tests/rxe/image");
    let made = Command::new(script).arg(&directory).status().context("tests/rxe/image")?;
    ensure!(made.success(), "building the guest's image failed: see the messages above");
    Ok(directory)
}

fn start(image: &Path, directory: &Path) -> Result<Child> {
    let path = |file: &str| directory.join(file).display().to_string();
    let card = format!(
        "dgram,id=net,local.type=unix,local.path={},remote.type=unix,remote.path={}",
        path("card.sock"),
        path("cable.sock"),
    );
    // `tsc=reliable` disables the guest's clock watchdog, which the tests do not need. On a busy
    // machine a guest once panicked in `sched_clock_cpu`, where the kernel patches its code when
    // the watchdog finds the clock unstable. The watchdog is the suspected cause, without proof.
    let words = format!(
        "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off audit=0 random.trust_cpu=on \
         tsc=reliable v4={}/24 v6={}/64 mtu={MTU}",
        V4[1], V6[1],
    );
    let mut qemu = Command::new("qemu-system-x86_64");
    // Always emulation without KVM, so that the guest behaves the same on every machine.
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

/// Accepts qemu's connection for the guest's serial line.
fn accept(control: &UnixListener, child: &mut Child) -> Result<UnixStream> {
    let start = Instant::now();
    loop {
        match control.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                return Ok(stream);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e).context("the guest's serial line"),
        }
        if let Some(status) = child.try_wait()? {
            bail!("qemu ended immediately ({status}): see its messages above");
        }
        ensure!(start.elapsed() < TIMEOUT, "qemu did not connect within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `len` pseudo-random bytes of a seed; the guest's program (tests/rxe/peer.c) computes the same.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(8) as u64).flat_map(|word| {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(word + 1);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31).to_le_bytes()
    });
    words.take(len).collect()
}

/// FNV-1a; the guest's program computes the same.
pub fn hash(bytes: &[u8]) -> u64 {
    let step = |h: u64, byte: &u8| (h ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
