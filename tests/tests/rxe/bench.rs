//! Both ends of a connection: one of this NIC, one of the kernel's.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric::soft::{SoftCq, SoftMr, SoftNic, SoftPd, SoftQp};
use fabric::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, PathMtu, Psn, QpAttr, Qpn,
    QueuePair, Receive, ReceiveAttr, ReceiveRequest, RemotePeer, Sge, Status, WorkRequest,
};
use granary_tests::guest::{Guest, pattern};
use granary_tests::hosts::{V4, V6};

/// Bytes of each end's memory: half of it for peers, half for what work requests name.
pub const BUFFER: usize = 4 << 20;
/// Where the second half begins.
pub const LOCAL: usize = BUFFER / 2;
/// How long a completion may take; the guest has 180 s.
const PATIENCE: Duration = Duration::from_secs(200);

/// Rights as libibverbs writes them: local write, remote write, read, atomics.
pub const ALL: u32 = 15;
/// Local write, remote read, and that windows are bound to it.
pub const BINDABLE: u32 = ALL | 16;
/// A window that may be read and no more.
pub const READ: u32 = 4;

/// How work of the kernel's ended (`ibv_wc_status`).
pub const SUCCESS: u32 = 0;
pub const REMOTE_ACCESS: u32 = 10;
pub const RETRY_EXCEEDED: u32 = 12;

/// The guest, and NICs that reach it over IPv4 and over IPv6.
pub struct Bench {
    pub guest: Guest,
    nics: [SoftNic; 2],
    /// Slots of the guest's that are taken.
    slots: [bool; 16],
    /// Connections so far: each has PSNs of its own.
    connections: u32,
}

/// How a connection shall be.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub v6: bool,
    pub mtu: PathMtu,
    /// The kernel's local ACK timeout, and its retry count.
    pub patience: (u8, u8),
}

impl Default for How {
    fn default() -> Self {
        // 0.54 s: what is lost at the end of a burst costs the kernel that much, eight times that ends it.
        Self { v6: false, mtu: PathMtu::Mtu1024, patience: (17, 7) }
    }
}

/// A connection.
pub struct Link {
    pub nic: SoftNic,
    pub pd: SoftPd,
    pub cq: SoftCq,
    pub qp: SoftQp,
    /// All of this end's memory.
    pub mr: SoftMr,
    /// Which of the guest's queue pairs it is.
    pub slot: usize,
    /// The guest's region: address and rkey.
    pub theirs: (u64, u32),
}

/// A completion of the kernel's.
#[derive(Clone, Debug)]
pub struct Wc {
    pub id: u64,
    pub status: u32,
    pub opcode: u32,
    pub bytes: u32,
    pub imm: Option<u32>,
    pub text: String,
}

impl Bench {
    pub fn new(guest: Guest) -> Result<Self> {
        let mut nics = Vec::new();
        for address in [V4[0], V6[0]] {
            let socket = guest.socket(SocketAddr::new(address.parse()?, rnic::wire::UDP_PORT))?;
            nics.push(SoftNic::host_over(socket)?.0);
        }
        let nics = nics.try_into().map_err(|_| ()).expect("two");
        Ok(Self { guest, nics, slots: [false; 16], connections: 0 })
    }

    /// A new connection, with memory and a region at both ends.
    pub fn link(&mut self, how: How) -> Result<Link> {
        let nic = &self.nics[usize::from(how.v6)];
        let pd = nic.alloc_pd()?;
        self.link_in(how, &pd, 0)
    }

    /// Another one in our protection domain `pd`; to our queue pair's number `astray` is added in what the kernel is told.
    pub fn link_in(&mut self, how: How, pd: &SoftPd, astray: u32) -> Result<Link> {
        let nic = self.nics[usize::from(how.v6)].clone();
        let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 256,
            receive: Receive::Own(ReceiveAttr { entries: 64, max_sges: 2 }),
            access: Access::REMOTE_ALL,
        };
        let qp = nic.create_qp(pd, attr)?;
        let mr = nic.reg_mr(pd, &nic.alloc_dma(BUFFER)?, Access::LOCAL_ALL | Access::REMOTE_ALL)?;

        let slot = self.take_slot()?;
        let words = self.guest.ask(&format!("mr {slot} 0 {BUFFER} {BINDABLE}"))?;
        let theirs = (words[0].parse()?, words[1].parse()?);
        let their_qpn = self.guest.number(&format!("qp {slot}"))? as u32;

        // Both circles of PSNs end soon.
        self.connections += 1;
        let psn = |end: u32| 0xff_fff0 - 40 * end - self.connections % 7;
        let (our_psn, their_psn) = (psn(0), psn(1));
        let [ours, their_address] = Self::addresses(how)?;
        self.up(how, slot, qp.qpn().raw() + astray, (their_psn, our_psn))?;
        let there = SocketAddr::new(their_address, rnic::wire::UDP_PORT);
        qp.connect(RemotePeer {
            mtu: how.mtu,
            sq_psn: Psn::new(our_psn),
            rq_psn: Psn::new(their_psn),
            // 4.3 s, eight times: who is that late is gone.
            timeout: 20,
            ..RemotePeer::new(there, ours, Qpn::new(their_qpn))
        })?;
        Ok(Link { nic, pd: pd.clone(), cq, qp, mr, slot, theirs })
    }

    /// Our address and the guest's.
    pub fn addresses(how: How) -> Result<[IpAddr; 2]> {
        let [ours, theirs] = if how.v6 { V6 } else { V4 };
        Ok([ours.parse()?, theirs.parse()?])
    }

    /// The NIC that the guest reaches so.
    pub fn nic(&self, how: How) -> SoftNic {
        self.nics[usize::from(how.v6)].clone()
    }

    /// A slot of the guest's that is free; taken from now on.
    pub fn take_slot(&mut self) -> Result<usize> {
        let slot = self.slots.iter().position(|taken| !taken).context("too many connections")?;
        self.slots[slot] = true;
        Ok(slot)
    }

    /// Has the guest connect the QP in `slot` to our `qpn`; both directions begin with `psn`.
    pub fn connect(&mut self, how: How, slot: usize, qpn: u32, psn: u32) -> Result<()> {
        self.up(how, slot, qpn, (psn, psn))
    }

    /// The same with the guest's PSN and ours.
    fn up(&mut self, how: How, slot: usize, qpn: u32, (theirs, ours): (u32, u32)) -> Result<()> {
        let gid = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let [here, there] = Self::addresses(how)?.map(gid);
        let (mtu, (timeout, retries)) = (how.mtu.bytes(), how.patience);
        let order =
            format!("up {slot} {qpn} {theirs} {ours} {mtu} {timeout} {retries} 7 {there} {here}");
        self.guest.ask(&order).map(drop)
    }

    /// Has the kernel run a request on the QP in `slot`, `verb` with the rest of its line; how it ended.
    pub fn run_on(&mut self, slot: usize, verb: &str, rest: &str) -> Result<u32> {
        self.guest.ask(&format!("{verb} {slot} 77 {rest}"))?;
        self.guest.tell(&format!("wait {slot}"))?;
        let wc = self.hear_completion().with_context(|| format!("{verb} {rest}"))?;
        ensure!(wc.id == 77, "another request's completion: {wc:?}");
        Ok(wc.status)
    }

    /// Ends a connection. No window of the guest's may be bound to it: its kernel waits for that.
    pub fn unlink(&mut self, link: Link) -> Result<()> {
        self.guest.ask(&format!("destroy {}", link.slot))?;
        self.guest.ask(&format!("dereg {}", link.slot))?;
        self.slots[link.slot] = false;
        Ok(())
    }

    /// The guest's side of a connection has been destroyed.
    pub fn free(&mut self, slot: usize) {
        self.slots[slot] = false;
    }

    /// After a case that has failed: the guest destroys all that is left.
    pub fn restart(&mut self) -> Result<()> {
        self.guest.restart()?;
        self.slots = [false; 16];
        Ok(())
    }

    /// Has the kernel run a request, `verb` with the rest of its line, and takes the completion.
    pub fn run(&mut self, link: &Link, verb: &str, rest: &str) -> Result<Wc> {
        self.guest.ask(&format!("{verb} {} 77 {rest}", link.slot))?;
        let wc = self.wait(link).with_context(|| format!("{verb} {rest}"))?;
        ensure!(wc.id == 77, "another request's completion: {wc:?}");
        Ok(wc)
    }

    /// Has the kernel run what must succeed.
    pub fn ok(&mut self, link: &Link, verb: &str, rest: &str) -> Result<Wc> {
        let wc = self.run(link, verb, rest)?;
        ensure!(wc.status == SUCCESS, "{verb} {rest}: {}", wc.text);
        Ok(wc)
    }

    /// The next completion of the kernel's.
    pub fn wait(&mut self, link: &Link) -> Result<Wc> {
        self.guest.tell(&format!("wait {}", link.slot))?;
        self.hear_completion()
    }

    /// What the kernel answers to `wait`.
    pub fn hear_completion(&mut self) -> Result<Wc> {
        let words = self.guest.hear()?;
        let n = |i: usize| -> Result<u32> { Ok(words.get(i).context("too short")?.parse()?) };
        let imm = (n(4)? & 2 != 0).then_some(n(5)?);
        let id = words[0].parse()?;
        Ok(Wc { id, status: n(1)?, opcode: n(2)?, bytes: n(3)?, imm, text: words[6..].join(" ") })
    }

    /// Fills the guest's memory with a pattern.
    pub fn fill(&mut self, offset: usize, len: usize, seed: u64) -> Result<()> {
        self.guest.ask(&format!("fill {offset} {len} {seed}")).map(drop)
    }

    /// Has the guest look whether its memory has a pattern.
    pub fn check(&mut self, offset: usize, len: usize, seed: u64) -> Result<()> {
        self.guest.ask(&format!("check {offset} {len} {seed}")).map(drop)
    }
}

impl Link {
    /// Posts a receive.
    pub fn receive(&self, id: u64, to: &[Sge]) -> Result<()> {
        Ok(self.qp.post_recv(&ReceiveRequest { id, to })?)
    }

    /// Posts signaled work.
    pub fn post(&self, id: u64, op: Op<'_>) -> Result<()> {
        Ok(self.qp.post_send(&[WorkRequest { id, op, signaled: true }])?)
    }

    /// Runs signaled work.
    pub fn run(&self, op: Op<'_>) -> Result<Completion> {
        self.post(77, op)?;
        let c = self.next().with_context(|| format!("{op:?}"))?;
        ensure!(c.id == 77, "another request's completion: {c:?}");
        Ok(c)
    }

    /// Runs what must succeed.
    pub fn ok(&self, op: Op<'_>) -> Result<Completion> {
        let c = self.run(op)?;
        ensure!(c.status == Status::Success, "{op:?}: {}", c.status);
        Ok(c)
    }

    /// The next completion of ours.
    pub fn next(&self) -> Result<Completion> {
        let mut out = [Completion::EMPTY];
        while self.cq.poll(&mut out) == 0 {
            ensure!(self.cq.wait(PATIENCE)?, "no completion in {PATIENCE:?}");
        }
        Ok(out[0])
    }

    /// Fills our memory with a pattern.
    pub fn fill(&self, offset: usize, len: usize, seed: u64) {
        self.mr.memory().write(offset, &pattern(seed, len));
    }

    /// What is in our memory.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mr.memory().read(offset, &mut out);
        out
    }

    /// Whether our memory has a pattern.
    pub fn check(&self, offset: usize, len: usize, seed: u64) -> Result<()> {
        let (is, should) = (self.bytes(offset, len), pattern(seed, len));
        match is.iter().zip(&should).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => {
                anyhow::bail!("byte {at} of {len} is {:02x}, not {:02x}", is[at], should[at])
            }
        }
    }

    /// A word of ours that atomics work on: big-endian.
    pub fn word(&self, offset: usize) -> u64 {
        u64::from_be_bytes(self.bytes(offset, 8).try_into().expect("eight bytes"))
    }

    pub fn put_word(&self, offset: usize, value: u64) {
        self.mr.memory().write(offset, &value.to_be_bytes());
    }

    /// A place in our memory as the guest's orders name it: address and rkey.
    pub fn here(&self, offset: usize) -> String {
        let at = self.mr.remote(offset);
        format!("{} {}", at.addr, at.rkey.0)
    }

    /// A place in the guest's memory.
    pub fn there(&self, offset: usize) -> fabric::Remote {
        fabric::Remote { addr: self.theirs.0 + offset as u64, rkey: fabric::Key(self.theirs.1) }
    }
}
