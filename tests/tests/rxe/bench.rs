//! Connections between this NIC and the kernel's rxe.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use granary_tests::guest::{Guest, pattern};
use granary_tests::hosts::{V4, V6};
use rnic::nic::{SoftCq, SoftMr, SoftNic, SoftPd, SoftQp};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, PathMtu, Psn, QpAttr, Qpn,
    QueuePair, Receive, ReceiveAttr, ReceiveRequest, RemotePeer, Sge, Status, WorkRequest,
};

/// Bytes of each end's memory: one half for remote access, one half for local work requests.
pub const BUFFER: usize = 4 << 20;
/// Offset of the half for local work requests.
pub const LOCAL: usize = BUFFER / 2;
/// Time limit of a completion; the guest's own limit is 180 s.
const TIMEOUT: Duration = Duration::from_secs(200);

/// Access flags of libibverbs: local write, remote write, remote read, remote atomics.
pub const ALL: u32 = 15;
/// [`ALL`], and binding of windows.
pub const BINDABLE: u32 = ALL | 16;
/// Remote read only.
pub const READ: u32 = 4;

/// Completion statuses of the kernel (`ibv_wc_status`).
pub const SUCCESS: u32 = 0;
pub const REMOTE_ACCESS: u32 = 10;
pub const RETRY_EXCEEDED: u32 = 12;

/// The guest, and NICs that reach it over IPv4 and over IPv6.
pub struct Bench {
    pub guest: Guest,
    nics: [SoftNic; 2],
    /// The guest's slots; true if in use.
    slots: [bool; 16],
    /// Number of connections so far; it varies the initial PSNs.
    connections: u32,
}

/// Parameters of a connection.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub v6: bool,
    pub mtu: PathMtu,
    /// The kernel's local ACK timeout and its retry count.
    pub retry: (u8, u8),
}

impl Default for How {
    fn default() -> Self {
        // A timeout of 0.54 s: the kernel's delay after a packet is lost at the end of a burst. The
        // connection fails after eight timeouts.
        Self { v6: false, mtu: PathMtu::Mtu1024, retry: (17, 7) }
    }
}

/// A connection.
pub struct Link {
    pub nic: SoftNic,
    pub pd: SoftPd,
    pub cq: SoftCq,
    pub qp: SoftQp,
    /// Region over all of this end's memory.
    pub mr: SoftMr,
    /// The guest's slot with the QP.
    pub slot: usize,
    /// Address and rkey of the guest's region.
    pub theirs: (u64, u32),
}

/// A completion of the kernel.
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

    /// A connection in our protection domain `pd`. The kernel connects to our QP number plus
    /// `qpn_offset`, which is 0 for a working connection.
    pub fn link_in(&mut self, how: How, pd: &SoftPd, qpn_offset: u32) -> Result<Link> {
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

        // The PSNs of both directions wrap around soon.
        self.connections += 1;
        let psn = |end: u32| 0xff_fff0 - 40 * end - self.connections % 7;
        let (our_psn, their_psn) = (psn(0), psn(1));
        let [ours, their_address] = Self::addresses(how)?;
        self.up(how, slot, qp.qpn().raw() + qpn_offset, (their_psn, our_psn))?;
        let there = SocketAddr::new(their_address, rnic::wire::UDP_PORT);
        qp.connect(RemotePeer {
            mtu: how.mtu,
            sq_psn: Psn::new(our_psn),
            rq_psn: Psn::new(their_psn),
            // A timeout of 4.3 s; the connection fails after eight of them.
            timeout: 20,
            ..RemotePeer::new(there, ours, Qpn::new(their_qpn))
        })?;
        Ok(Link { nic, pd: pd.clone(), cq, qp, mr, slot, theirs })
    }

    /// The IP addresses of this NIC and of the guest.
    pub fn addresses(how: How) -> Result<[IpAddr; 2]> {
        let [ours, theirs] = if how.v6 { V6 } else { V4 };
        Ok([ours.parse()?, theirs.parse()?])
    }

    /// This process's NIC for a connection with these parameters.
    pub fn nic(&self, how: How) -> SoftNic {
        self.nics[usize::from(how.v6)].clone()
    }

    /// Reserves a free slot of the guest.
    pub fn take_slot(&mut self) -> Result<usize> {
        let slot = self.slots.iter().position(|taken| !taken).context("too many connections")?;
        self.slots[slot] = true;
        Ok(slot)
    }

    /// Makes the guest connect the QP in `slot` to our `qpn`; both directions start at `psn`.
    pub fn connect(&mut self, how: How, slot: usize, qpn: u32, psn: u32) -> Result<()> {
        self.up(how, slot, qpn, (psn, psn))
    }

    /// Makes the guest connect the QP in `slot` to our `qpn`, with separate PSNs.
    fn up(&mut self, how: How, slot: usize, qpn: u32, (theirs, ours): (u32, u32)) -> Result<()> {
        let gid = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let [here, there] = Self::addresses(how)?.map(gid);
        let (mtu, (timeout, retries)) = (how.mtu.bytes(), how.retry);
        let command =
            format!("up {slot} {qpn} {theirs} {ours} {mtu} {timeout} {retries} 7 {there} {here}");
        self.guest.ask(&command).map(drop)
    }

    /// Makes the kernel execute a request on the QP in `slot`; returns its status. The command is
    /// `verb`, slot and id, then `rest`.
    pub fn run_on(&mut self, slot: usize, verb: &str, rest: &str) -> Result<u32> {
        self.guest.ask(&format!("{verb} {slot} 77 {rest}"))?;
        self.guest.send(&format!("wait {slot}"))?;
        let wc = self.receive_completion().with_context(|| format!("{verb} {rest}"))?;
        ensure!(wc.id == 77, "another request's completion: {wc:?}");
        Ok(wc.status)
    }

    /// Ends a connection. No window of the guest may be bound to it, because the guest's kernel
    /// waits for the unbinding.
    pub fn unlink(&mut self, link: Link) -> Result<()> {
        self.guest.ask(&format!("destroy {}", link.slot))?;
        self.guest.ask(&format!("dereg {}", link.slot))?;
        self.slots[link.slot] = false;
        Ok(())
    }

    /// Releases a slot whose QP the guest has destroyed.
    pub fn free(&mut self, slot: usize) {
        self.slots[slot] = false;
    }

    /// Cleans up after a failed case: the guest destroys all objects.
    pub fn restart(&mut self) -> Result<()> {
        self.guest.restart()?;
        self.slots = [false; 16];
        Ok(())
    }

    /// Makes the kernel execute a request; returns its completion.
    pub fn run(&mut self, link: &Link, verb: &str, rest: &str) -> Result<Wc> {
        self.guest.ask(&format!("{verb} {} 77 {rest}", link.slot))?;
        let wc = self.wait(link).with_context(|| format!("{verb} {rest}"))?;
        ensure!(wc.id == 77, "another request's completion: {wc:?}");
        Ok(wc)
    }

    /// Makes the kernel execute a request that must succeed.
    pub fn ok(&mut self, link: &Link, verb: &str, rest: &str) -> Result<Wc> {
        let wc = self.run(link, verb, rest)?;
        ensure!(wc.status == SUCCESS, "{verb} {rest}: {}", wc.text);
        Ok(wc)
    }

    /// The kernel's next completion.
    pub fn wait(&mut self, link: &Link) -> Result<Wc> {
        self.guest.send(&format!("wait {}", link.slot))?;
        self.receive_completion()
    }

    /// Parses the guest's answer to `wait`.
    pub fn receive_completion(&mut self) -> Result<Wc> {
        let words = self.guest.receive()?;
        let n = |i: usize| -> Result<u32> { Ok(words.get(i).context("too short")?.parse()?) };
        let imm = (n(4)? & 2 != 0).then_some(n(5)?);
        let id = words[0].parse()?;
        Ok(Wc { id, status: n(1)?, opcode: n(2)?, bytes: n(3)?, imm, text: words[6..].join(" ") })
    }

    /// Fills the guest's memory with a pattern.
    pub fn fill(&mut self, offset: usize, len: usize, seed: u64) -> Result<()> {
        self.guest.ask(&format!("fill {offset} {len} {seed}")).map(drop)
    }

    /// Makes the guest check that its memory contains a pattern.
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

    /// Executes signaled work; returns its completion.
    pub fn run(&self, op: Op<'_>) -> Result<Completion> {
        self.post(77, op)?;
        let c = self.next().with_context(|| format!("{op:?}"))?;
        ensure!(c.id == 77, "another request's completion: {c:?}");
        Ok(c)
    }

    /// Executes work that must succeed.
    pub fn ok(&self, op: Op<'_>) -> Result<Completion> {
        let c = self.run(op)?;
        ensure!(c.status == Status::Success, "{op:?}: {}", c.status);
        Ok(c)
    }

    /// The next completion of this NIC.
    pub fn next(&self) -> Result<Completion> {
        let mut out = [Completion::EMPTY];
        while self.cq.poll(&mut out) == 0 {
            ensure!(self.cq.wait(TIMEOUT)?, "no completion in {TIMEOUT:?}");
        }
        Ok(out[0])
    }

    /// Fills our memory with a pattern.
    pub fn fill(&self, offset: usize, len: usize, seed: u64) {
        self.mr.memory().write(offset, &pattern(seed, len));
    }

    /// The contents of our memory.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mr.memory().read(offset, &mut out);
        out
    }

    /// Checks that our memory contains a pattern.
    pub fn check(&self, offset: usize, len: usize, seed: u64) -> Result<()> {
        let (is, should) = (self.bytes(offset, len), pattern(seed, len));
        match is.iter().zip(&should).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => {
                anyhow::bail!("byte {at} of {len} is {:02x}, not {:02x}", is[at], should[at])
            }
        }
    }

    /// A big-endian word in our memory, as atomics see it.
    pub fn word(&self, offset: usize) -> u64 {
        u64::from_be_bytes(self.bytes(offset, 8).try_into().expect("eight bytes"))
    }

    pub fn put_word(&self, offset: usize, value: u64) {
        self.mr.memory().write(offset, &value.to_be_bytes());
    }

    /// An address and rkey in our memory, as in the guest's commands.
    pub fn here(&self, offset: usize) -> String {
        let at = self.mr.remote(offset);
        format!("{} {}", at.addr, at.rkey.0)
    }

    /// An address and rkey in the guest's memory.
    pub fn there(&self, offset: usize) -> verbs::Remote {
        verbs::Remote { addr: self.theirs.0 + offset as u64, rkey: verbs::Key(self.theirs.1) }
    }
}
