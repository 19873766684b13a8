//! A host and an assist as threads of one process, over memory in place of a memory node.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};

use verbs::DmaMemory;

use super::link::Link;
use super::mover::Mover;
use super::ring::{BYTES, Completions, Consumer, Item, Number, Outcome, Producer, Request};
use super::session::Session;
use super::transport::{AssistTransport, Assisted, Patience};
use crate::sys::PAGE_BYTES;
use crate::transport::{
    ChunkHandle, Direction, FrameMemory, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};

const FRAMES: u32 = 128;
const REMOTE_PAGES: usize = 256;

/// Memory of a memory node, and frames.
#[derive(Clone)]
struct Node {
    remote: DmaMemory,
    frames: DmaMemory,
    /// Pages that the host itself moved.
    own_pages: Arc<AtomicU64>,
}

impl Node {
    fn new() -> Self {
        let remote = DmaMemory::anonymous(REMOTE_PAGES * PAGE_BYTES).unwrap();
        let frames = DmaMemory::anonymous(FRAMES as usize * PAGE_BYTES).unwrap();
        Self { remote, frames, own_pages: Arc::default() }
    }

    fn copy(&self, direction: Direction, item: &Item) {
        let mut page = [0; PAGE_BYTES];
        for at in 0..usize::from(item.pages) {
            let remote = item.address as usize + at * PAGE_BYTES;
            let frame = (item.frame as usize + at) * PAGE_BYTES;
            let ((from, here), (to, there)) = match direction {
                Direction::Read => ((&self.remote, remote), (&self.frames, frame)),
                Direction::Write => ((&self.frames, frame), (&self.remote, remote)),
            };
            from.read(here, &mut page);
            to.write(there, &page);
        }
    }

    fn item(io: &PageIo) -> Item {
        let address = u64::from(io.offset_bytes);
        Item { address, rkey: 0, node: 0, qp: 0, frame: io.frame, pages: io.pages }
    }

    /// Sets the first word of a frame.
    fn set_frame(&self, frame: u32, value: u64) {
        self.frames.word64(frame as usize * PAGE_BYTES).store(value, Ordering::Relaxed);
    }

    fn frame(&self, frame: u32) -> u64 {
        self.frames.word64(frame as usize * PAGE_BYTES).load(Ordering::Relaxed)
    }

    fn own_pages(&self) -> u64 {
        self.own_pages.load(Ordering::Relaxed)
    }
}

impl Transport for Node {
    fn chunk_bytes(&self) -> usize {
        REMOTE_PAGES * PAGE_BYTES
    }

    fn frames(&self) -> FrameMemory {
        FrameMemory { base: self.frames.as_ptr(), frames: FRAMES }
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        Ok(ChunkHandle(0))
    }

    fn free_chunk(&self, _: ChunkHandle) -> Result<(), TransportError> {
        Ok(())
    }

    fn post(&self, _: Lane, way: Direction, ios: &[PageIo]) -> Result<Ticket, TransportError> {
        for io in ios {
            self.copy(way, &Self::item(io));
            self.own_pages.fetch_add(io.pages.into(), Ordering::Relaxed);
        }
        Ok(Ticket::complete())
    }

    fn stats(&self) -> TransportStats {
        TransportStats::default()
    }

    fn descriptors(&self, _: &mut Vec<i32>) {}
}

impl Assisted for Node {
    fn item(&self, _: Lane, io: &PageIo) -> Option<Item> {
        Some(Self::item(io))
    }

    fn check_alive(&self) -> Result<(), TransportError> {
        Ok(())
    }
}

/// Moves the pages of a session between the memory of a [`Node`].
struct FakeMover {
    node: Node,
    /// Sees the completion words, as the host does.
    completions: Completions,
    /// Requests that may still be moved.
    moves_left: Arc<AtomicU32>,
    /// Every request with this number in a row of as many fails.
    fails_each: u32,
    /// Requests that end later, in another order.
    later: VecDeque<(Number, Request)>,
    ends_later: bool,
    started: u32,
}

impl FakeMover {
    fn run(&mut self, number: Number, request: &Request) -> Outcome {
        assert_eq!(self.completions.outcome(number), None, "completed before its pages were moved");
        self.started += 1;
        let fails = self.started.is_multiple_of(self.fails_each.max(1)) && self.fails_each > 0;
        // Of a request that fails, some pages have been moved.
        let moved = if fails { request.items.len() / 2 } else { request.items.len() };
        request.items[..moved].iter().for_each(|item| self.node.copy(request.direction, item));
        assert_eq!(self.completions.outcome(number), None, "completed before its pages were moved");
        if fails { Outcome::Failed } else { Outcome::Moved }
    }
}

impl Mover for FakeMover {
    fn start(&mut self, number: Number, request: &Request) -> Result<Option<Outcome>, String> {
        if self.ends_later {
            self.later.push_front((number, request.clone()));
            return Ok(None);
        }
        Ok(Some(self.run(number, request)))
    }

    fn poll(&mut self) -> Result<Option<(Number, Outcome)>, String> {
        if self.moves_left.load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        let Some((number, request)) = self.later.pop_front() else { return Ok(None) };
        self.moves_left.fetch_sub(1, Ordering::AcqRel);
        Ok(Some((number, self.run(number, &request))))
    }
}

/// A host with an assist.
struct Pair {
    node: Node,
    transport: Arc<AssistTransport>,
    watch: JoinHandle<()>,
    assist: JoinHandle<()>,
    /// Ends the assist when it is dropped.
    stop: mpsc::Sender<()>,
    moves_left: Arc<AtomicU32>,
}

fn link_to(process: OwnedFd) -> (Arc<Link>, UnixStream) {
    let (host, assist) = UnixStream::pair().unwrap();
    (Arc::new(Link::with_process(host.into(), process)), assist)
}

/// A process that must not be ended.
fn own_process() -> OwnedFd {
    let own = rustix_pidfd(std::process::id());
    own.unwrap()
}

fn rustix_pidfd(pid: u32) -> std::io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: a plain system call; this function owns the returned descriptor.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32 };
    if opened < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just created.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

fn start_watch(transport: &Arc<AssistTransport>) -> JoinHandle<()> {
    let watched = transport.clone();
    let watch = thread::spawn(move || watched.watch());
    while !transport.is_open() {
        thread::yield_now();
    }
    watch
}

impl Pair {
    fn start(ends_later: bool, fails_each: u32) -> Self {
        let (node, ring) = (Node::new(), DmaMemory::anonymous(BYTES).unwrap());
        let producer = Producer::new(ring.clone());
        let (completions, moves_left) = (producer.completions(), Arc::<AtomicU32>::default());
        let consumer = Consumer::new(ring, &[FRAMES]).unwrap();
        let mover = FakeMover {
            node: node.clone(),
            completions,
            moves_left: moves_left.clone(),
            fails_each,
            later: VecDeque::new(),
            ends_later,
            started: 0,
        };
        let (link, socket) = link_to(own_process());
        let (stop, stopped) = mpsc::channel::<()>();
        let assist = thread::spawn(move || {
            let mut session = Session::new(consumer, Box::new(mover));
            while stopped.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
                if !session.work().unwrap() {
                    thread::yield_now();
                }
            }
            // As at the end of a process: the memory first, then the socket.
            drop(session);
            drop(socket);
        });
        let transport = Arc::new(AssistTransport::new(Box::new(node.clone()), link, producer));
        let watch = start_watch(&transport);
        Self { node, transport, watch, assist, stop, moves_left }
    }

    fn end_assist(self) -> (Node, Arc<AssistTransport>) {
        drop(self.stop);
        self.assist.join().unwrap();
        self.watch.join().unwrap();
        (self.node, self.transport)
    }
}

fn io(page: u32, frame: u32, pages: u16) -> PageIo {
    PageIo { chunk: ChunkHandle(0), offset_bytes: page * PAGE_BYTES as u32, frame, pages }
}

/// Single pages from `first` on, which no transfer merges.
fn singles(first: u32, count: u32) -> Vec<PageIo> {
    (0..count).map(|at| io(first + count - 1 - at, first + at, 1)).collect()
}

#[test]
fn assist_moves_page_lists_in_both_directions() {
    let pair = Pair::start(false, 0);
    for frame in 0..40 {
        pair.node.set_frame(frame, u64::from(frame) + 7);
    }
    let transport = &pair.transport;
    // Three requests, and one with a run of pages.
    transport.run_by_ticket(Lane::WriteBack, Direction::Write, &singles(0, 40));
    transport.run_by_ticket(Lane::Prefetch, Direction::Read, &[io(0, 64, 40)]);
    for at in 0..40 {
        assert_eq!(pair.node.frame(64 + at), u64::from(39 - at) + 7);
    }
    assert_eq!((transport.stats().assist.pages, pair.node.own_pages()), (80, 0));
    // A thread waits for a demanded page, so the host reads it.
    transport.run(Lane::Demand, Direction::Read, &[io(3, 0, 1)]).unwrap();
    let ticket = transport.post(Lane::Demand, Direction::Read, &[io(3, 1, 1)]).unwrap();
    ticket.wait().unwrap();
    assert_eq!((transport.stats().assist.pages, pair.node.own_pages()), (80, 2));
    let (_, transport) = pair.end_assist();
    assert!(transport.stats().assist.is_lost);
}

#[test]
fn host_repeats_requests_that_fail() {
    let pair = Pair::start(false, 2);
    (0..64).for_each(|frame| pair.node.set_frame(frame, u64::from(frame) + 1));
    pair.transport.run_by_ticket(Lane::WriteBack, Direction::Write, &singles(0, 64));
    (0..64).for_each(|frame| pair.node.set_frame(frame, 0));
    pair.transport.run_by_ticket(Lane::Prefetch, Direction::Read, &singles(0, 64));
    (0..64).for_each(|frame| assert_eq!(pair.node.frame(frame), u64::from(frame) + 1));
    assert_eq!((pair.transport.stats().assist.pages, pair.node.own_pages()), (64, 64));
    pair.end_assist();
}

#[test]
fn requests_in_flight_are_repeated_when_the_assist_ends() {
    // The assist ends after each possible number of requests.
    for moves in 0..=8 {
        let pair = Pair::start(true, 0);
        let (node, transport) = (pair.node.clone(), pair.transport.clone());
        (0..64).for_each(|frame| node.set_frame(frame, u64::from(frame) + 1));
        (64..128)
            .for_each(|page| node.remote.word64(page * PAGE_BYTES).store(9, Ordering::Relaxed));
        let mut written =
            transport.post(Lane::WriteBack, Direction::Write, &singles(0, 64)).unwrap();
        let read = transport.post(Lane::Prefetch, Direction::Read, &singles(64, 64)).unwrap();
        pair.moves_left.store(moves, Ordering::Release);
        while pair.moves_left.load(Ordering::Acquire) > 0 {
            thread::yield_now();
        }
        let _ = written.poll().unwrap();
        pair.end_assist();
        // One ticket is polled only, the other one is waited for.
        assert!(written.poll().unwrap());
        read.wait().unwrap();
        for at in 0..64 {
            let page = node.remote.word64((63 - at) * PAGE_BYTES).load(Ordering::Relaxed);
            assert_eq!(page, at as u64 + 1, "after {moves} requests");
            assert_eq!(node.frame(64 + at as u32), 9, "after {moves} requests");
        }
        assert!(transport.stats().assist.is_lost);
        assert_eq!(node.own_pages(), 128 - 16 * u64::from(moves));
        // The host goes on without the assist.
        transport.run_by_ticket(Lane::Prefetch, Direction::Read, &singles(0, 16));
        assert_eq!(node.own_pages(), 144 - 16 * u64::from(moves));
    }
}

#[test]
fn host_moves_pages_itself_while_the_ring_is_full() {
    let pair = Pair::start(true, 0);
    let tickets: Vec<Ticket> = (0..70)
        .map(|at| pair.transport.post(Lane::Prefetch, Direction::Read, &[io(at, at, 1)]).unwrap())
        .collect();
    assert_eq!(pair.node.own_pages(), 6);
    pair.moves_left.store(u32::MAX, Ordering::Release);
    tickets.into_iter().for_each(|ticket| ticket.wait().unwrap());
    pair.transport.run_by_ticket(Lane::Prefetch, Direction::Read, &singles(0, 64));
    assert_eq!((pair.node.own_pages(), pair.transport.stats().assist.pages), (6, 128));
    pair.end_assist();
}

#[test]
fn assist_that_hangs_is_ended_by_a_waiting_thread() {
    // The process holds the other end of the socket, and serves nothing.
    let (host, assist) = UnixStream::pair().unwrap();
    let mut hung = Command::new("sleep")
        .arg("1000")
        .stdin(Stdio::from(OwnedFd::from(assist)))
        .spawn()
        .unwrap();
    let link = Link::with_process(host.into(), rustix_pidfd(hung.id()).unwrap());
    let (node, ring) = (Node::new(), DmaMemory::anonymous(BYTES).unwrap());
    let transport =
        AssistTransport::new(Box::new(node.clone()), Arc::new(link), Producer::new(ring))
            .with_patience(Patience { slice_ms: 1, slices: 3 });
    let transport = Arc::new(transport);
    let watch = start_watch(&transport);
    node.set_frame(5, 55);
    transport.run_by_ticket(Lane::WriteBack, Direction::Write, &[io(9, 5, 1)]);
    assert_eq!(node.remote.word64(9 * PAGE_BYTES).load(Ordering::Relaxed), 55);
    watch.join().unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(hung.wait().unwrap().signal(), Some(libc::SIGKILL));
}

#[test]
fn threads_that_post_lose_no_page_when_the_assist_ends() {
    for _ in 0..20 {
        let pair = Pair::start(false, 3);
        let (transport, node) = (pair.transport.clone(), pair.node.clone());
        let turn = Arc::new(Mutex::new(0u64));
        let host = move |first: u32| {
            let (transport, node, turn) = (transport.clone(), node.clone(), turn.clone());
            thread::spawn(move || {
                for round in 0..200 {
                    let value = {
                        let mut turn = turn.lock().unwrap();
                        *turn += 1;
                        *turn
                    };
                    (0..20).for_each(|at| node.set_frame(first + at, value + u64::from(at)));
                    let ios = singles(first, 20);
                    transport.run_by_ticket(Lane::WriteBack, Direction::Write, &ios);
                    (0..20).for_each(|at| node.set_frame(first + at, 0));
                    transport.run_by_ticket(Lane::Prefetch, Direction::Read, &ios);
                    for at in 0..20 {
                        assert_eq!(node.frame(first + at), value + u64::from(at), "{round}");
                    }
                }
            })
        };
        let hosts = [host(0), host(40), host(80)];
        thread::yield_now();
        pair.end_assist();
        hosts.into_iter().for_each(|host| host.join().unwrap());
    }
}

impl AssistTransport {
    fn run_by_ticket(&self, lane: Lane, direction: Direction, ios: &[PageIo]) {
        self.post(lane, direction, ios).unwrap().wait().unwrap();
    }
}

#[test]
fn packet_of_a_refusal_is_the_reason_of_the_end() {
    let (host, assist) = UnixStream::pair().unwrap();
    let link = Link::with_process(host.into(), own_process());
    let refused = super::protocol::Message::Refused("it hung".into());
    super::socket::send(assist.as_fd(), &refused, &[]).unwrap();
    // A packet that the assist does not read any more must not hide the reason.
    link.wake();
    drop(assist);
    assert_eq!(link.wait_for_end().as_deref(), Some("it hung"));
}
