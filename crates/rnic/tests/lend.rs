//! Queues that a function lends to a borrower. Here the borrower is in the same process; the
//! borrower's mappings are its own all the same.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use common::{End, LONG, end, serve, socket_pair};
use proptest::prelude::*;
use rnic::nic::lend::{Lent, STATE_MAX, lendable_bytes};
use rnic::nic::{SoftCq, SoftMr, SoftNic, SoftPd, SoftQp};
use rnic::port::Function;
use rnic::port::shm::{Attached, BorrowedMemory, Host, LendableMemory, Session, SessionLimits};
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Error, MemoryRegion, Nic, Op, QpAttr, QpState,
    QueuePair, Receive, Status, WorkRequest,
};

const BLOCKS: u32 = 16;
const PAGE: usize = 4096;

/// An owner with a QP that can be lent, and its peer at the NIC's process.
struct Bed {
    nic: SoftNic,
    cq: SoftCq,
    qp: SoftQp,
    local: SoftMr,
    peer: End,
    borrowed: BorrowedMemory,
    _host: Host,
}

fn duplicates(lendable: &LendableMemory) -> [OwnedFd; 2] {
    lendable.descriptors().map(|fd| fd.try_clone_to_owned().unwrap())
}

fn attach(host: &Host, lendable: LendableMemory) -> SoftNic {
    let (client, server) = socket_pair();
    let session = Session::new(host, SessionLimits::default());
    std::thread::spawn(move || serve(session, server));
    SoftNic::new(Function::Attached(Attached::open_lendable(client, lendable).unwrap()))
}

fn send_only(nic: &SoftNic, pd: &SoftPd) -> (SoftCq, SoftQp) {
    let cq = nic.create_cq(CqAttr { entries: BLOCKS, ignore_overrun: false }).unwrap();
    let attr = QpAttr {
        send_cq: &cq,
        recv_cq: &cq,
        send_blocks: BLOCKS,
        receive: Receive::None,
        access: Access::REMOTE_WRITE,
    };
    let qp = nic.create_qp(pd, attr).unwrap();
    (cq, qp)
}

impl Bed {
    fn new(bytes: usize) -> Self {
        let (physical, host) = SoftNic::host().unwrap();
        let lendable = LendableMemory::new(lendable_bytes(&[BLOCKS], &[BLOCKS])).unwrap();
        let borrowed = BorrowedMemory::map(duplicates(&lendable)).unwrap();
        let nic = attach(&host, lendable);
        let pd = nic.alloc_pd().unwrap();
        let (cq, qp) = send_only(&nic, &pd);
        let memory = nic.alloc_dma(bytes).unwrap();
        let local = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).unwrap();
        let bed = Self { nic, cq, qp, local, peer: end(&physical, bytes), borrowed, _host: host };
        bed.connect();
        bed
    }

    fn connect(&self) {
        self.peer.qp.connect(self.qp.qpn()).unwrap();
        self.qp.connect(self.peer.qp.qpn()).unwrap();
    }

    /// Lends the QP, and adopts it as the borrower.
    fn lend(&self) -> (SoftCq, SoftQp) {
        let Lent { state, wake } = self.nic.lend(&self.cq, std::slice::from_ref(&self.qp)).unwrap();
        assert!(state.len() < STATE_MAX);
        self.connect();
        let (cq, mut qps) = SoftNic::adopt(&self.borrowed, wake, &state).unwrap();
        (cq, qps.pop().unwrap())
    }

    fn take_back(&self) {
        self.nic.take_back(&self.cq, std::slice::from_ref(&self.qp)).unwrap();
        assert_eq!(self.qp.state().unwrap(), QpState::Reset, "transfers could be in flight");
        self.connect();
    }

    /// Posts a READ of the page at `from` of the peer to the page at `to`.
    fn read(&self, qp: &SoftQp, id: u64, from: usize, to: usize) -> Result<(), Error> {
        let sge = [self.local.sge(to * PAGE, PAGE as u32)];
        let op = Op::Read { from: self.peer.mr.remote(from * PAGE), to: &sge };
        qp.post_send(&[WorkRequest { id, op, signaled: true }])
    }

    fn local_page(&self, page: usize) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        self.local.memory().read(page * PAGE, &mut bytes);
        bytes
    }
}

fn next(cq: &SoftCq) -> Completion {
    let mut out = [Completion::EMPTY];
    while cq.poll(&mut out) == 0 {
        assert!(cq.wait(LONG).unwrap(), "no completion");
    }
    out[0]
}

#[test]
fn borrower_moves_bytes_with_the_keys_of_the_owner() {
    let bed = Bed::new(16 * PAGE);
    let (cq, qp) = bed.lend();
    for id in 0..10 * u64::from(BLOCKS) {
        let page = id as usize % 16;
        bed.peer.put(page * PAGE, &[id as u8; PAGE]);
        bed.read(&qp, id, page, page).unwrap();
        let completion = next(&cq);
        assert_eq!((completion.id, completion.status), (id, Status::Success));
        assert_eq!(bed.local_page(page), [id as u8; PAGE]);
    }
    bed.local.memory().write(0, &[0xab; PAGE]);
    let sge = [bed.local.sge(0, PAGE as u32)];
    let op = Op::Write { to: bed.peer.mr.remote(3 * PAGE), from: &sge };
    qp.post_send(&[WorkRequest { id: 7, op, signaled: true }]).unwrap();
    assert_eq!(next(&cq).status, Status::Success);
    assert_eq!(bed.peer.get(3 * PAGE, PAGE), [0xab; PAGE]);
}

#[test]
fn owner_neither_posts_nor_polls_while_its_queues_are_lent() {
    let bed = Bed::new(16 * PAGE);
    bed.read(&bed.qp, 1, 0, 0).unwrap();
    let (cq, qp) = bed.lend();
    // The owner's work before that has ended, executed or not.
    assert_eq!(next(&bed.cq).id, 1);
    let refused = bed.read(&bed.qp, 2, 0, 0).unwrap_err();
    assert!(refused.to_string().contains("lent to another process"), "{refused}");
    bed.read(&qp, 3, 0, 0).unwrap();
    assert!(cq.wait(LONG).unwrap());
    assert_eq!(bed.cq.poll(&mut [Completion::EMPTY; 4]), 0, "the borrower's completion");
    assert_eq!(next(&cq).id, 3);
    let refused = qp.modify(verbs::QpChange::Reset).unwrap_err();
    assert!(refused.to_string().contains("only their owner"), "{refused}");
}

#[test]
fn indices_agree_after_each_of_many_loans() {
    let bed = Bed::new(16 * PAGE);
    for loan in 0..100_usize {
        let (cq, qp) = bed.lend();
        // More than the rings hold, in total; some completions are never polled.
        let (posted, polled) = (loan % 16, loan % 16 / 2);
        (0..posted).for_each(|page| bed.read(&qp, page as u64, page, page).unwrap());
        (0..polled).for_each(|page| assert_eq!(next(&cq).id, page as u64));
        drop((cq, qp));
        bed.take_back();
        for round in 0..loan % 5 {
            let byte = (loan + round) as u8;
            bed.peer.put(round * PAGE, &[byte; PAGE]);
            bed.read(&bed.qp, 1000 + round as u64, round, 15).unwrap();
            let completion = next(&bed.cq);
            assert_eq!((completion.id, completion.status), (1000 + round as u64, Status::Success));
            assert_eq!(bed.local_page(15), [byte; PAGE], "loan {loan}");
        }
        assert_eq!(bed.cq.poll(&mut [Completion::EMPTY; 4]), 0, "loan {loan}");
    }
}

#[test]
fn nothing_of_the_borrower_is_in_flight_after_take_back() {
    const PIECE: usize = 4 << 20;
    let bed = Bed::new(BLOCKS as usize * PIECE);
    let size = PIECE as u32;
    for _ in 0..5 {
        let (_cq, qp) = bed.lend();
        let read = |i: usize| (bed.peer.mr.remote(i * PIECE), [bed.local.sge(i * PIECE, size)]);
        let parts: Vec<_> = (0..BLOCKS as usize).map(read).collect();
        let request = |(from, to): &'static (verbs::Remote, [verbs::Sge; 1])| WorkRequest {
            id: 0,
            op: Op::Read { from: *from, to },
            signaled: false,
        };
        let list: Vec<_> = Box::leak(parts.into_boxed_slice()).iter().map(request).collect();
        qp.post_send(&list).unwrap();
        bed.nic.take_back(&bed.cq, std::slice::from_ref(&bed.qp)).unwrap();
        for i in 0..BLOCKS as usize {
            bed.local.memory().write(i * PIECE, &[0x11; PAGE]);
        }
        // Time for a late store; without one this test passes whatever the time.
        std::thread::sleep(Duration::from_millis(20));
        let page_of = |i: usize| bed.local_page(i * PIECE / PAGE);
        assert!((0..BLOCKS as usize).all(|i| page_of(i) == [0x11; PAGE]), "a late store");
        bed.connect();
    }
}

#[test]
fn completions_of_a_dead_borrower_do_not_fill_the_queue() {
    let bed = Bed::new(16 * PAGE);
    for _ in 0..20 {
        let (_cq, qp) = bed.lend();
        (0..BLOCKS as usize).for_each(|page| bed.read(&qp, 0, page, page).unwrap());
        let full = bed.read(&qp, 0, 0, 0).unwrap_err();
        assert!(matches!(full, Error::QueueFull { .. }), "{full}");
        bed.take_back();
    }
    bed.read(&bed.qp, 5, 0, 0).unwrap();
    assert_eq!((next(&bed.cq).id, bed.qp.state().unwrap()), (5, QpState::ReadyToSend));
}

#[test]
fn queues_that_no_borrower_can_reach_are_not_lent() {
    let (nic, host) = SoftNic::host().unwrap();
    let (cq, qp) = send_only(&nic, &nic.alloc_pd().unwrap());
    let refused = nic.lend(&cq, &[qp]).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");

    let attached = common::attach_in_process(&host);
    let (cq, qp) = send_only(&attached, &attached.alloc_pd().unwrap());
    let refused = attached.lend(&cq, &[qp]).unwrap_err();
    assert!(refused.to_string().contains("not in memory that a borrower has mapped"), "{refused}");

    let bed = Bed::new(PAGE);
    let refused = bed.nic.lend(&bed.cq, &[]).unwrap_err();
    assert!(refused.to_string().contains("all of them together"), "{refused}");
    // The queues still work.
    bed.read(&bed.qp, 1, 0, 0).unwrap();
    assert_eq!(next(&bed.cq).status, Status::Success);
}

#[test]
fn borrower_maps_only_memory_that_cannot_fail() {
    let lendable = LendableMemory::new(PAGE).unwrap();
    let [page, arena] = duplicates(&lendable);
    let borrowed = BorrowedMemory::map([page.try_clone().unwrap(), arena]).unwrap();
    // The owner cannot make an access fail any more.
    assert_eq!(rustix::fs::ftruncate(&page, 0), Err(rustix::io::Errno::PERM));
    drop(borrowed);

    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(BorrowedMemory::map([null(), null()]).is_err());
    let (read, _write) = std::io::pipe().unwrap();
    assert!(BorrowedMemory::map([page, read.into()]).is_err());
    let empty = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    assert!(BorrowedMemory::map([empty.try_clone().unwrap(), empty]).is_err());

    let lendable = LendableMemory::new(PAGE).unwrap();
    let late = duplicates(&lendable);
    let (_nic, host) = SoftNic::host().unwrap();
    let _attached = attach(&host, lendable);
    let refused = BorrowedMemory::map(late).err().expect("the memory is sealed");
    assert!(refused.to_string().contains("before its owner attaches"), "{refused}");
}

/// A borrowed memory and the state of its queues, without an owner.
fn state_of(next: u32) -> String {
    format!(
        r#"{{"cqn":1,"ring":0,"record":2048,"entries":32,"next":{next},
           "qps":[{{"qpn":5,"slot":0,"ring":4096,"blocks":16}}]}}"#
    )
}

fn memory() -> (LendableMemory, BorrowedMemory) {
    let lendable = LendableMemory::new(8 * PAGE).unwrap();
    let borrowed = BorrowedMemory::map(duplicates(&lendable)).unwrap();
    (lendable, borrowed)
}

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
}

/// Uses adopted queues. Their owner has written anything, so only panics count.
fn use_queues(adopted: Result<(SoftCq, Vec<SoftQp>), Error>) {
    let Ok((cq, qps)) = adopted else { return };
    for qp in &qps {
        for id in 0..3 {
            let nop = WorkRequest { id, op: Op::Nop, signaled: true };
            let _ = qp.post_send(&[nop, nop]);
            let _ = cq.poll(&mut [Completion::EMPTY; 4]);
        }
    }
}

#[test]
fn malformed_states_are_refused() {
    let (_lendable, borrowed) = memory();
    let adopt = |state: &str| SoftNic::adopt(&borrowed, eventfd(), state.as_bytes()).map(drop);
    adopt(&state_of(0)).expect("the state itself");
    let changes = [
        (r#""ring":0"#, r#""ring":8"#),
        (r#""ring":0"#, r#""ring":18446744073709551552"#),
        (r#""ring":0"#, r#""ring":32704"#),
        (r#""record":2048"#, r#""record":2049"#),
        (r#""record":2048"#, r#""record":32768"#),
        (r#""entries":32"#, r#""entries":0"#),
        (r#""entries":32"#, r#""entries":33"#),
        (r#""entries":32"#, r#""entries":2147483648"#),
        (r#""next":0"#, r#""next":16777216"#),
        (r#""slot":0"#, r#""slot":1000000"#),
        (r#""ring":4096"#, r#""ring":32000"#),
        (r#""ring":4096"#, r#""ring":4100"#),
        (r#""blocks":16"#, r#""blocks":0"#),
        (r#""blocks":16"#, r#""blocks":24"#),
        (r#""blocks":16"#, r#""blocks":65536"#),
        (r#""blocks":16}"#, r#""blocks":16},{"qpn":6,"slot":0,"ring":4096,"blocks":16}"#),
        (r#""blocks":16}"#, r#""blocks":16},{"qpn":5,"slot":1,"ring":4096,"blocks":16}"#),
        (r#""blocks":16}"#, r#""blocks":512},{"qpn":6,"slot":1,"ring":0,"blocks":512}"#),
        (r#""cqn":1,"#, ""),
        (r#""cqn":1,"#, r#""cqn":1,"more":1,"#),
    ];
    for (from, to) in changes {
        let state = state_of(0).replacen(from, to, 1);
        assert_ne!(state, state_of(0));
        assert!(adopt(&state).is_err(), "{state}");
    }
    let (read, _write) = std::io::pipe().unwrap();
    let blocking = SoftNic::adopt(&borrowed, read.into(), state_of(0).as_bytes());
    assert!(blocking.is_err(), "a write to it could block");
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0u32..40).prop_map(|shift| 1 << shift),
        0u64..100_000,
        any::<u64>(),
        (0u64..600).prop_map(|line| line * 64),
    ]
}

proptest! {
    #[test]
    fn random_bytes_are_no_state(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (_lendable, borrowed) = memory();
        prop_assert!(SoftNic::adopt(&borrowed, eventfd(), &bytes).is_err());
    }

    #[test]
    fn random_states_never_panic(
        [cqn, ring, record, entries, next, qpn, slot, qp_ring, blocks]
            in prop::array::uniform9(number()),
    ) {
        let (_lendable, borrowed) = memory();
        let state = format!(
            r#"{{"cqn":{},"ring":{ring},"record":{record},"entries":{},"next":{},
               "qps":[{{"qpn":{},"slot":{},"ring":{qp_ring},"blocks":{}}}]}}"#,
            cqn as u32, entries as u32, next as u32, qpn as u32, slot as u32, blocks as u32
        );
        use_queues(SoftNic::adopt(&borrowed, eventfd(), state.as_bytes()));
    }

    #[test]
    fn completions_that_the_owner_forges_never_panic(
        next in 0u32..0xff_ffff,
        entries in prop::collection::vec((any::<[u8; 32]>(), any::<bool>(), any::<bool>()), 32),
    ) {
        let (_lendable, borrowed) = memory();
        for (at, (bytes, is_valid, is_ours)) in entries.into_iter().enumerate() {
            let mut bytes = bytes;
            if is_ours {
                bytes[25..28].copy_from_slice(&[0, 0, 5]);
            }
            if is_valid {
                // A completion of a send, with the owner bit of this lap.
                let lap = (next as usize + 32 - at - 1) / 32 % 2;
                bytes[31] = lap as u8;
            }
            borrowed.arena().write(at * 64 + 32, &bytes);
        }
        use_queues(SoftNic::adopt(&borrowed, eventfd(), state_of(next).as_bytes()));
    }
}

#[test]
fn frames_are_shown_before_they_are_sealed() {
    let (_nic, host) = SoftNic::host().unwrap();
    let attached = common::attach_in_process(&host);
    let mut shown = None;
    let memory = attached
        .alloc_shown(PAGE, &mut |file| {
            let file = file.as_fd().try_clone_to_owned().unwrap();
            shown = Some(rnic::port::shm::map_shared(&file, PAGE as u64).unwrap());
        })
        .unwrap();
    shown.expect("shown").write(10, b"from the other mapping");
    let mut bytes = [0; 22];
    memory.read(10, &mut bytes);
    assert_eq!(&bytes, b"from the other mapping");
}
