//! A NIC that is run by the waiting threads of its process, over UDP and with attached clients.

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::LONG;
use rnic::nic::SoftNic;
use verbs::{
    Access, Completion, CompletionQueue, MemoryRegion, Nic, Op, PeerAddress, QpChange, QueuePair,
    ReceiveRequest, RemotePeer, Status, WorkRequest,
};

/// An end with a NIC of its own.
struct End {
    end: common::End,
    nic: SoftNic,
    address: SocketAddr,
}

impl Deref for End {
    type Target = common::End;

    fn deref(&self) -> &common::End {
        &self.end
    }
}

impl End {
    fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let address = socket.local_addr().expect("an address");
        let nic = SoftNic::over(socket).expect("a NIC");
        Self { end: common::end(&nic, 1 << 20), nic, address }
    }

    /// Creates another end on the same NIC.
    fn beside(&self) -> Self {
        Self { end: common::end(&self.nic, 1 << 20), nic: self.nic.clone(), address: self.address }
    }

    fn pair() -> [Self; 2] {
        let ends = [Self::new(), Self::new()];
        Self::connect([&ends[0], &ends[1]]);
        ends
    }

    fn connect(ends: [&Self; 2]) {
        for (here, there) in [(0, 1), (1, 0)] {
            let (here, there) = (ends[here], ends[there]);
            let peer = RemotePeer::new(there.address, here.address.ip(), there.qp.qpn());
            here.qp.modify(QpChange::Init).expect("Init");
            let peer = PeerAddress::Remote(RemotePeer { timeout: 18, ..peer });
            here.qp.modify(QpChange::ReadyToReceive { peer }).expect("RTR");
            here.qp.modify(QpChange::ReadyToSend).expect("RTS");
        }
    }

    fn post(&self, op: Op<'_>) {
        self.qp.post_send(&[WorkRequest { id: 7, op, signaled: true }]).expect("room");
    }

    fn receive(&self) {
        let to = [self.mr.sge(4096, 4096)];
        self.qp.post_recv(&ReceiveRequest { id: 9, to: &to }).expect("room");
    }

    /// Returns the next completion by polling alone: this thread runs the NIC meanwhile.
    fn poll(&self) -> Completion {
        let (mut out, end) = ([Completion::EMPTY], Instant::now() + LONG);
        while self.cq.poll(&mut out) == 0 {
            assert!(Instant::now() < end, "no completion");
        }
        assert_eq!(out[0].status, Status::Success);
        out[0]
    }

    /// Returns the next completion after sleeping: the NIC thread runs the NIC.
    fn sleep(&self) -> Completion {
        let mut out = [Completion::EMPTY];
        assert!(self.cq.wait(LONG).expect("the NIC is there"), "no completion");
        assert_eq!((self.cq.poll(&mut out), out[0].status), (1, Status::Success));
        out[0]
    }
}

#[test]
fn polling_and_sleeping_threads_get_their_completions() {
    let [a, b] = End::pair();
    for round in 0..300 {
        let to = [a.mr.sge(0, 512)];
        // Each round has its own bytes, because a retransmitted READ may execute after its answer
        // has arrived.
        let at = round * 512;
        b.mr.memory().write(at, &[round as u8; 512]);
        a.post(Op::Read { from: b.mr.remote(at), to: &to });
        // Alternates polling and sleeping, so that each kind of driver follows each other kind.
        if round % 3 == 0 {
            a.poll()
        } else {
            a.sleep()
        };
        let mut got = [0; 512];
        a.mr.memory().read(0, &mut got);
        assert_eq!(got, [round as u8; 512]);
        if round % 50 == 0 {
            // Long enough for both NICs to go to sleep.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn nic_thread_answers_after_callers_stop_polling() {
    let [a, b] = End::pair();
    for round in 0..20 {
        // b's thread runs the NIC while it polls; then it stops polling.
        b.post(Op::Write { to: a.mr.remote(0), from: &[b.mr.sge(0, 64)] });
        b.poll();
        // Long enough for b's NIC thread to check for polling callers more than once.
        let end = Instant::now() + Duration::from_millis(round % 4);
        while Instant::now() < end {
            assert_eq!(b.cq.poll(&mut [Completion::EMPTY]), 0);
        }
        a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
        a.poll();
    }
    // The same if b never polls for its posted work.
    b.receive();
    b.post(Op::Write { to: a.mr.remote(512), from: &[b.mr.sge(0, 64)] });
    b.post(Op::SendInline { data: b"done" });
    a.receive();
    let c = a.sleep();
    assert_eq!((c.id, c.bytes), (9, 4));
}

/// A delayed acknowledgement must be sent even if packets keep arriving at the NIC from another
/// connection.
#[test]
fn delayed_ack_is_sent_while_other_traffic_continues() {
    for answers in [false, true] {
        let (x, y, s) = (End::new(), End::new(), End::new());
        let for_y = s.beside();
        End::connect([&x, &s]);
        End::connect([&y, &for_y]);
        // All three NICs are run by callers when y posts: eight rounds suffice. The further rounds
        // are for the case that y's NIC thread runs the NIC.
        for round in 0..2000 {
            if round == 50 {
                y.post(Op::Write { to: for_y.mr.remote(0), from: &[y.mr.sge(0, 64)] });
            }
            s.receive();
            x.post(Op::SendInline { data: b"to" });
            // A poll without a result has run the engine once, so the packet is in the socket of s,
            // whose first poll finds it.
            while x.cq.poll(&mut [Completion::EMPTY]) == 1 {}
            while s.poll().id != 9 {}
            if answers {
                x.receive();
                s.post(Op::SendInline { data: b"fro" });
            }
            if y.cq.poll(&mut [Completion::EMPTY]) == 1 {
                break;
            }
            assert!(
                round < 1999,
                "no acknowledgement reached y while s was busy, answers: {answers}"
            );
        }
    }
}

#[test]
fn forked_child_leaves_the_socket_to_its_parent() {
    let [a, b] = End::pair();
    a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
    a.poll();
    // SAFETY: the child allocates nothing, takes no lock that a thread holds permanently, and
    // exits.
    match unsafe { libc::fork() } {
        0 => {
            let mut out = [Completion::EMPTY];
            let end = Instant::now() + Duration::from_millis(50);
            while Instant::now() < end {
                a.cq.poll(&mut out);
            }
            // SAFETY: ends the process without running any of its code.
            unsafe { libc::_exit(0) }
        }
        child => {
            assert!(child > 0, "forking");
            let end = Instant::now() + Duration::from_millis(50);
            while Instant::now() < end {
                a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
                a.poll();
            }
            let mut status = 0;
            // SAFETY: `status` is valid for writing the result.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
}

#[test]
fn verbs_are_executed_while_callers_have_the_nic() {
    let [a, b] = End::pair();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
                a.poll();
            }
        });
        for _ in 0..200 {
            let pd = a.nic.alloc_pd().expect("a PD");
            let memory = a.nic.alloc_dma(4096).expect("memory");
            a.nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).expect("an MR");
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn several_threads_wait_on_cqs_of_their_own() {
    let ends: Vec<_> = (0..3).map(|_| End::pair()).collect();
    std::thread::scope(|scope| {
        for [a, b] in &ends {
            scope.spawn(move || {
                for _ in 0..500 {
                    a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
                    a.poll();
                }
            });
        }
    });
}

/// Creates an end on a NIC that is run by waiting threads of this process, and an end on an
/// attached function.
fn served() -> [common::End; 2] {
    let (own, host) = SoftNic::host_own().expect("a NIC");
    let attached = common::attach_in_process(&host);
    let ends = [common::end(&own, 1 << 16), common::end(&attached, 1 << 16)];
    common::connect(&ends[0], &ends[1]);
    ends
}

fn receive(end: &common::End) {
    let to = [end.mr.sge(4096, 4096)];
    end.qp.post_recv(&ReceiveRequest { id: 9, to: &to }).expect("room");
}

fn send(end: &common::End, bytes: u32) {
    let op = Op::Send { from: &[end.mr.sge(0, bytes)] };
    end.qp.post_send(&[WorkRequest { id: 7, op, signaled: true }]).expect("room");
}

/// Takes completions until a message has arrived; returns its length in bytes.
fn message(end: &common::End, sleeps: bool) -> u32 {
    let (mut out, limit) = ([Completion::EMPTY], Instant::now() + LONG);
    loop {
        if end.cq.poll(&mut out) == 0 {
            assert!(Instant::now() < limit, "no completion");
            if sleeps {
                assert!(end.cq.wait(LONG).expect("the NIC is there"), "no completion");
            } else if !end.cq.offer_cpu() {
                std::thread::yield_now();
            }
            continue;
        }
        assert_eq!(out[0].status, Status::Success);
        if out[0].id == 9 {
            return out[0].bytes;
        }
    }
}

#[test]
fn owner_and_attached_client_exchange_messages() {
    let [owner, other] = &served();
    let rounds = 600;
    // Alternates over all combinations of polling and sleeping ends.
    let sleeps = |round: u32, bit: u32| (round / 20) >> bit & 1 == 1;
    receive(owner);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds {
                receive(other);
                send(other, round);
                assert_eq!(message(other, sleeps(round, 0)), round);
            }
        });
        for round in 1..=rounds {
            assert_eq!(message(owner, sleeps(round, 1)), round);
            receive(owner);
            send(owner, round);
        }
    });
}

#[test]
fn nic_thread_serves_attached_client_after_owner_stops_polling() {
    let [owner, other] = &served();
    for round in 0..30u8 {
        // Each round has its own bytes, and a verb separates the store from the NIC's later access.
        // Because both mappings of the attached client's rings are in this process, at two
        // addresses, ThreadSanitizer does not see the order that the rings establish.
        let at = usize::from(round) * 512;
        owner.mr.memory().write(at, &[round; 512]);
        owner.nic.query_device().expect("the NIC is there");
        // The owner's thread runs the NIC while it polls; then it stops polling.
        let end = Instant::now() + Duration::from_millis(u64::from(round) % 4);
        while Instant::now() < end {
            assert_eq!(owner.cq.poll(&mut [Completion::EMPTY]), 0);
        }
        let op = Op::Read { from: owner.mr.remote(at), to: &[other.mr.sge(512, 512)] };
        other.qp.post_send(&[WorkRequest { id: 7, op, signaled: true }]).expect("room");
        let mut out = [Completion::EMPTY];
        assert!(other.cq.wait(LONG).expect("the NIC is there"), "no completion");
        assert_eq!((other.cq.poll(&mut out), out[0].status), (1, Status::Success));
        let mut got = [0; 512];
        other.mr.memory().read(512, &mut got);
        assert_eq!(got, [round; 512]);
    }
}
