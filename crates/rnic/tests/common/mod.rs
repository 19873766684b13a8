//! Fixtures of the tests of all ports.

#![allow(dead_code)]

pub mod process;

use std::os::fd::OwnedFd;
use std::time::Duration;

use rnic::nic::{SoftCq, SoftMr, SoftNic, SoftPd, SoftQp};
use rnic::port::Function;
use rnic::port::shm::{Attached, Host, Session, SessionLimits, protocol, socket};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, MemoryRegion, Nic, Op, QpAttr, QueuePair, Receive,
    ReceiveAttr, Sge, WorkRequest,
};

/// Timeout that is long enough for any event here on a busy machine.
pub const LONG: Duration = Duration::from_secs(20);

/// Creates a NIC on each port: inline, on a thread, and attached through a socket.
pub fn all_ports() -> Vec<(&'static str, SoftNic)> {
    let (local, host) = SoftNic::host().expect("a host");
    vec![("inline", SoftNic::inline()), ("local", local), ("attached", attach_in_process(&host))]
}

/// Attaches to `host` over a socket pair, served by a thread.
pub fn attach_in_process(host: &Host) -> SoftNic {
    let (client, server) = socket_pair();
    let session = Session::new(host, SessionLimits::default());
    std::thread::spawn(move || serve(session, server));
    SoftNic::new(Function::Attached(Attached::open(client).expect("attaching")))
}

pub fn socket_pair() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("a socket pair")
}

/// Serves one connection as a memory node's event loop does.
pub fn serve(mut session: Session, socket: OwnedFd) {
    use std::os::fd::AsFd;
    let first = socket::receive(&socket).expect("the service").expect("a client");
    assert_eq!(first.bytes, protocol::SERVICE.as_bytes());
    while let Ok(Some(packet)) = socket::receive(&socket) {
        let (reply, fds) = session.handle(&packet.bytes, packet.descriptors);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if socket::send(&socket, &reply, &fds).is_err() {
            break;
        }
    }
}

/// One side of a connection.
pub struct End {
    pub nic: SoftNic,
    pub pd: SoftPd,
    pub cq: SoftCq,
    pub qp: SoftQp,
    pub mr: SoftMr,
}

pub fn end(nic: &SoftNic, bytes: usize) -> End {
    let pd = nic.alloc_pd().expect("a PD");
    let cq = nic.create_cq(CqAttr { entries: 256, ignore_overrun: false }).expect("a CQ");
    let attr = QpAttr {
        send_cq: &cq,
        recv_cq: &cq,
        send_blocks: 128,
        receive: Receive::Own(ReceiveAttr { entries: 32, max_sges: 2 }),
        access: Access::REMOTE_ALL,
    };
    let qp = nic.create_qp(&pd, attr).expect("a QP");
    let memory = nic.alloc_dma(bytes).expect("memory");
    let mr = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL).expect("an MR");
    End { nic: nic.clone(), pd, cq, qp, mr }
}

/// Creates two connected QPs of one function.
pub fn pair(nic: &SoftNic) -> (End, End) {
    let (a, b) = (end(nic, 1 << 20), end(nic, 1 << 20));
    connect(&a, &b);
    (a, b)
}

pub fn connect(a: &End, b: &End) {
    a.qp.connect(b.qp.qpn()).expect("connecting");
    b.qp.connect(a.qp.qpn()).expect("connecting");
}

impl End {
    /// Posts signaled work and returns its completion.
    pub fn run(&self, op: Op<'_>) -> Completion {
        self.qp.post_send(&[WorkRequest { id: 77, op, signaled: true }]).expect("posting");
        let c = self.next();
        assert_eq!((c.id, c.qpn), (77, self.qp.qpn()));
        c
    }

    /// Returns the next completion.
    pub fn next(&self) -> Completion {
        let mut out = [Completion::EMPTY];
        while self.cq.poll(&mut out) == 0 {
            assert!(self.cq.wait(LONG).expect("the NIC is there"), "no completion");
        }
        out[0]
    }

    pub fn sge(&self, offset: usize, len: u32) -> Sge {
        self.mr.sge(offset, len)
    }

    pub fn put(&self, offset: usize, data: &[u8]) {
        self.mr.memory().write(offset, data);
    }

    pub fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mr.memory().read(offset, &mut out);
        out
    }
}
