//! A NIC that the threads of its process run while they wait, over UDP or with others attached: who has it when.

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::LONG;
use fabric::soft::SoftNic;
use fabric::{
    Access, Completion, CompletionQueue, MemoryRegion, Nic, Op, PeerAddress, QpChange, QueuePair,
    ReceiveRequest, RemotePeer, Status, WorkRequest,
};

/// An end on a NIC of its own.
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

    /// Another one on the same NIC.
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

    /// The next completion, by polling alone: this thread is the NIC meanwhile.
    fn poll(&self) -> Completion {
        let (mut out, end) = ([Completion::EMPTY], Instant::now() + LONG);
        while self.cq.poll(&mut out) == 0 {
            assert!(Instant::now() < end, "no completion");
        }
        assert_eq!(out[0].status, Status::Success);
        out[0]
    }

    /// The next completion, asleep: the NIC's thread is the NIC.
    fn sleep(&self) -> Completion {
        let mut out = [Completion::EMPTY];
        assert!(self.cq.wait(LONG).expect("the NIC is there"), "no completion");
        assert_eq!((self.cq.poll(&mut out), out[0].status), (1, Status::Success));
        out[0]
    }
}

#[test]
fn who_polls_and_who_sleeps_get_their_completions() {
    let [a, b] = End::pair();
    for round in 0..300 {
        let to = [a.mr.sge(0, 512)];
        // A place for each round: a READ that is sent again may be executed when its answer is there already.
        let at = round * 512;
        b.mr.memory().write(at, &[round as u8; 512]);
        a.post(Op::Read { from: b.mr.remote(at), to: &to });
        // By turns, in all orders of who had it before.
        if round % 3 == 0 {
            a.poll()
        } else {
            a.sleep()
        };
        let mut got = [0; 512];
        a.mr.memory().read(0, &mut got);
        assert_eq!(got, [round as u8; 512]);
        if round % 50 == 0 {
            // Long enough for either NIC to go to sleep.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn what_arrives_is_answered_when_callers_have_gone() {
    let [a, b] = End::pair();
    for round in 0..20 {
        // b's caller has its NIC; then it does something else, and nobody polls there.
        b.post(Op::Write { to: a.mr.remote(0), from: &[b.mr.sge(0, 64)] });
        b.poll();
        // Long enough for its thread to have looked at it more than once.
        let end = Instant::now() + Duration::from_millis(round % 4);
        while Instant::now() < end {
            assert_eq!(b.cq.poll(&mut [Completion::EMPTY]), 0);
        }
        a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
        a.poll();
    }
    // Also where it never polls for what it has posted.
    b.receive();
    b.post(Op::Write { to: a.mr.remote(512), from: &[b.mr.sge(0, 64)] });
    b.post(Op::SendInline { data: b"done" });
    a.receive();
    let c = a.sleep();
    assert_eq!((c.id, c.bytes), (9, 4));
}

/// Acknowledgements wait for a turn in which nothing comes; not for ever, where somebody else sees to it that something does.
#[test]
fn who_waits_for_an_acknowledgement_does_not_wait_for_others_to_be_silent() {
    for answers in [false, true] {
        let (x, y, s) = (End::new(), End::new(), End::new());
        let for_y = s.beside();
        End::connect([&x, &s]);
        End::connect([&y, &for_y]);
        // Callers run all three when y begins: eight turns would do. The others are for y's thread, if it has its NIC after all.
        for round in 0..2000 {
            if round == 50 {
                y.post(Op::Write { to: for_y.mr.remote(0), from: &[y.mr.sge(0, 64)] });
            }
            s.receive();
            x.post(Op::SendInline { data: b"to" });
            // Who polls in vain has had a turn: it is in the socket of s, which finds it in its first one.
            while x.cq.poll(&mut [Completion::EMPTY]) == 1 {}
            while s.poll().id != 9 {}
            if answers {
                x.receive();
                s.post(Op::SendInline { data: b"fro" });
            }
            if y.cq.poll(&mut [Completion::EMPTY]) == 1 {
                break;
            }
            assert!(round < 1999, "y has not heard while s was busy, answers: {answers}");
        }
    }
}

#[test]
fn a_child_leaves_the_socket_to_its_parent() {
    let [a, b] = End::pair();
    a.post(Op::Read { from: b.mr.remote(0), to: &[a.mr.sge(0, 64)] });
    a.poll();
    // SAFETY: the child allocates nothing, takes no lock that a thread holds for good, and ends.
    match unsafe { libc::fork() } {
        0 => {
            let mut out = [Completion::EMPTY];
            let end = Instant::now() + Duration::from_millis(50);
            while Instant::now() < end {
                a.cq.poll(&mut out);
            }
            // SAFETY: ends the process, and runs nothing of it.
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
            // SAFETY: `status` is a valid place for the result.
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

/// An end on a NIC that its process runs while it waits, and one on a function of another process's kind.
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

/// Takes completions until a message has come; how many bytes it has.
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
fn messages_come_and_go_between_its_owner_and_who_is_attached() {
    let [owner, other] = &served();
    let rounds = 600;
    // By turns, in all combinations of who polls and who sleeps.
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
fn who_is_attached_is_heard_when_its_owner_waits_no_more() {
    let [owner, other] = &served();
    for round in 0..30u8 {
        // A place for each round, and a verb between the store and what the NIC does later: both sides of the attached
        // one's rings are in this process, at two addresses, so that ThreadSanitizer sees no order by them.
        let at = usize::from(round) * 512;
        owner.mr.memory().write(at, &[round; 512]);
        owner.nic.query_device().expect("the NIC is there");
        // Its owner has the NIC, and then does something else.
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
