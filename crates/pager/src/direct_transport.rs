//! The transport over the private memory node of `granary run`: the calling thread itself moves
//! pages between frames and chunks.
//!
//! A private memory node serves one program, so its NIC need not protect the pages from other
//! programs. The NIC would cost two thread switches for each page, and on a machine with as many
//! CPU-bound processes as cores each switch waits for a turn of the scheduler. So the memory node
//! passes on its chunk memory ([`pool::ChunkMemory`]), and a READ or WRITE is one system call of
//! the thread that needs the page. Chunks are still allocated and freed by the scheme, over the
//! NIC.
//!
//! The NIC moves the pages instead:
//!
//! - in a process to which the memory node does not pass its chunk memory: a process of another
//!   user, such as a child that has changed its user;
//! - where the system refuses the system call: beyond `RLIMIT_FSIZE`, or if memory is short.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use pool::{Address, ChunkMemory, ChunkPart, DefaultNic};

use crate::Error;
use crate::assist::link::Link;
use crate::assist::protocol::Message;
use crate::assist::ring::{Item, Producer};
use crate::assist::transport::{AssistTransport, Assisted};
use crate::pool_transport::{self, PoolTransport};
use crate::sys::PAGE_BYTES;
use crate::transport::{
    ChunkHandle, Direction, FrameMemory, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};

/// A transport that moves pages by `pread` and `pwrite`.
pub(crate) struct DirectTransport {
    memory: ChunkMemory,
    /// Allocates chunks, and moves pages where `memory` cannot.
    pool: PoolTransport<DefaultNic>,
}

/// Connects to a private memory node, with `frames` frames. The NIC moves the pages if the memory
/// node does not pass on its chunk memory.
pub fn connect(nodes: &[Address], frames: u32) -> Result<Box<dyn Transport>, Error> {
    let pool = pool_transport::connect(nodes, frames)?;
    if let [Address::Shm(path)] = nodes
        && let Ok(memory) = ChunkMemory::open(path)?
    {
        return Ok(Box::new(DirectTransport { memory, pool }));
    }
    Ok(Box::new(pool))
}

/// As [`connect`], with an assist if its process at the other end of `link` accepts the session.
pub fn connect_with_assist(
    nodes: &[Address],
    frames: u32,
    link: Arc<Link>,
) -> Result<Box<dyn Transport>, Error> {
    let mut shared = false;
    let mut share = |file: BorrowedFd<'_>| {
        shared = link.share_frames(file, frames as usize * PAGE_BYTES).is_ok();
    };
    let pool = pool_transport::connect_showing(nodes, frames, &mut share)?;
    if let [Address::Shm(path)] = nodes
        && let Ok(memory) = ChunkMemory::open(path)?
    {
        let direct = DirectTransport { memory, pool };
        return Ok(match shared.then(|| direct.begin_session(&link)) {
            Some(Ok(producer)) => Box::new(AssistTransport::new(Box::new(direct), link, producer)),
            _ => Box::new(direct),
        });
    }
    Ok(Box::new(pool))
}

impl DirectTransport {
    /// Gives the assist what it needs to move pages between the frames, which it has, and chunks.
    fn begin_session(&self, link: &Link) -> io::Result<Producer> {
        for (ChunkPart { address, bytes }, file) in self.memory.parts() {
            link.send(&Message::Chunks { address, bytes }, &[file])?;
        }
        let control = self.pool.control().ok_or(io::ErrorKind::NotConnected)?;
        // SAFETY: the connection lives as long as the transport.
        let control = unsafe { BorrowedFd::borrow_raw(control) };
        link.send(&Message::Control, &[control])?;
        link.share_ring()
    }

    /// Moves pages with `call`. Its arguments are an address in the chunk memory, a byte offset in
    /// the frames and a number of bytes. Returns false if a call fails.
    fn each(
        &self,
        ios: &[PageIo],
        call: impl Fn(u64, usize, usize) -> std::io::Result<()>,
    ) -> bool {
        ios.iter().all(|io| {
            let address = self.pool.address(io.chunk) + u64::from(io.offset_bytes);
            let bytes = usize::from(io.pages) * PAGE_BYTES;
            call(address, io.frame as usize * PAGE_BYTES, bytes).is_ok()
        })
    }
}

impl Transport for DirectTransport {
    fn chunk_bytes(&self) -> usize {
        self.pool.chunk_bytes()
    }

    fn frames(&self) -> FrameMemory {
        self.pool.frames()
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        self.pool.allocate_chunk()
    }

    fn allocate_chunks(
        &self,
        count: usize,
        chunks: &mut Vec<ChunkHandle>,
    ) -> Result<(), TransportError> {
        self.pool.allocate_chunks(count, chunks)
    }

    fn used_percent(&self) -> u8 {
        self.pool.used_percent()
    }

    fn origin(&self, chunk: ChunkHandle) -> String {
        self.pool.origin(chunk)
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        self.pool.free_chunk(chunk)
    }

    fn free_chunks(&self, chunks: &[ChunkHandle]) -> Result<(), TransportError> {
        self.pool.free_chunks(chunks)
    }

    /// Moves the pages at once.
    fn post(
        &self,
        lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError> {
        self.run(lane, direction, ios).map(|()| Ticket::complete())
    }

    /// The chunk memory outlives the connection to the memory node, so a transfer would still
    /// succeed. But the memory node ends the connection before it clears the chunks of this process
    /// and gives them to other processes. So content that was read before the connection is found
    /// alive is right. No content is written after the connection is found dead.
    fn run(&self, lane: Lane, direction: Direction, ios: &[PageIo]) -> Result<(), TransportError> {
        let frames = self.pool.frame_memory();
        let done = match direction {
            Direction::Read => {
                let done = self.each(ios, |at, to, bytes| self.memory.read(at, frames, to, bytes));
                self.pool.check_alive()?;
                done
            }
            Direction::Write => {
                self.pool.check_alive()?;
                self.each(ios, |at, from, bytes| self.memory.write(at, frames, from, bytes))
            }
        };
        if done { Ok(()) } else { self.pool.run(lane, direction, ios) }
    }

    fn stats(&self) -> TransportStats {
        TransportStats { is_direct: true, ..self.pool.stats() }
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        self.pool.descriptors(keep);
        keep.extend(self.memory.descriptors());
    }
}

impl Assisted for DirectTransport {
    fn item(&self, _: Lane, io: &PageIo) -> Option<Item> {
        let address = self.pool.address(io.chunk) + u64::from(io.offset_bytes);
        Some(Item { address, rkey: 0, node: 0, qp: 0, frame: io.frame, pages: io.pages })
    }

    fn check_alive(&self) -> Result<(), TransportError> {
        self.pool.check_alive()
    }
}

#[cfg(test)]
mod tests {
    use pool::{Endpoint, Service, Settings};

    use super::*;
    use crate::assist::server::testing::TestAssist;

    const FRAMES: u32 = 8;

    fn start(shares_chunks: bool) -> Service {
        let settings = Settings { donate_bytes: 8 << 20, shares_chunks, ..Settings::default() };
        Service::start(&settings, &Endpoint::Fresh).unwrap()
    }

    fn connect_to(service: &Service) -> Box<dyn Transport> {
        connect(&[Address::Shm(service.path().to_owned())], FRAMES).unwrap()
    }

    fn fill(transport: &dyn Transport, frame: u32, byte: u8) {
        let at = frame as usize * PAGE_BYTES;
        // SAFETY: one frame, which only this test uses.
        unsafe { transport.frames().base.add(at).write_bytes(byte, PAGE_BYTES) };
    }

    fn first_byte(transport: &dyn Transport, frame: u32) -> u8 {
        // SAFETY: as in `fill`.
        unsafe { transport.frames().base.add(frame as usize * PAGE_BYTES).read() }
    }

    #[test]
    fn pages_pass_between_frames_and_chunks() {
        let service = start(true);
        let transport = connect_to(&service);
        assert!(transport.stats().is_direct);
        let chunks = [(); 2].map(|()| transport.allocate_chunk().unwrap());
        let io = |chunk, offset_bytes, frame, pages| PageIo { chunk, offset_bytes, frame, pages };
        (0..4).for_each(|frame| fill(&*transport, frame, 10 + frame as u8));
        let out = [io(chunks[0], 4096, 0, 2), io(chunks[1], 0, 2, 1), io(chunks[0], 1 << 19, 3, 1)];
        transport.run(Lane::WriteBack, Direction::Write, &out).unwrap();
        let back =
            [io(chunks[0], 1 << 19, 4, 1), io(chunks[0], 8192, 5, 1), io(chunks[1], 0, 6, 1)];
        transport.run(Lane::Demand, Direction::Read, &back).unwrap();
        assert_eq!([4, 5, 6].map(|frame| first_byte(&*transport, frame)), [13, 11, 12]);
        // The NIC's work-queue elements are those of the allocations.
        let wqes = || service.status().unwrap().nic_wqes;
        let before = wqes();
        transport.run(Lane::Demand, Direction::Read, &back).unwrap();
        assert_eq!(wqes(), before);
        chunks.into_iter().for_each(|chunk| transport.free_chunk(chunk).unwrap());
    }

    #[test]
    fn assist_moves_pages_of_the_asynchronous_lanes() {
        let service = start(true);
        let mut assist = TestAssist::start("direct");
        let nodes = [Address::Shm(service.path().to_owned())];
        let link = Arc::new(Link::connect(&assist.directory).unwrap());
        let transport: Arc<dyn Transport> =
            connect_with_assist(&nodes, FRAMES, link).unwrap().into();
        assert!(transport.stats().assist.is_used && transport.is_watched());
        let watched = transport.clone();
        let watch = std::thread::spawn(move || watched.watch());
        let chunk = transport.allocate_chunk().unwrap();
        let io = |offset_bytes, frame| PageIo { chunk, offset_bytes, frame, pages: 1 };
        let mut round = 0;
        let mut pass = |transport: &dyn Transport| {
            round = (round + 1) % 24;
            (0..4).for_each(|frame| fill(transport, frame, round * 10 + frame as u8));
            let out = [io(4096, 0), io(0, 1), io(1 << 18, 2), io(1 << 19, 3)];
            transport.post(Lane::WriteBack, Direction::Write, &out).unwrap().wait().unwrap();
            let back = [io(1 << 19, 4), io(4096, 5), io(0, 6), io(1 << 18, 7)];
            transport.post(Lane::Prefetch, Direction::Read, &back).unwrap().wait().unwrap();
            let bytes = [4, 5, 6, 7].map(|frame| first_byte(transport, frame));
            assert_eq!(bytes, [3, 0, 1, 2].map(|frame| round * 10 + frame));
        };
        // Passes until the watching thread has begun to use the assist, and one more.
        while transport.stats().assist.pages < 16 {
            pass(&*transport);
        }
        assist.end();
        watch.join().unwrap();
        let pages = transport.stats().assist.pages;
        pass(&*transport);
        assert!(transport.stats().assist.is_lost);
        assert_eq!(transport.stats().assist.pages, pages);
    }

    #[test]
    fn without_the_chunk_memory_the_nic_moves_the_pages() {
        let transport = connect_to(&start(true));
        drop(transport);
        let service = start(false);
        let transport = connect_to(&service);
        assert!(!transport.stats().is_direct);
        let chunk = transport.allocate_chunk().unwrap();
        fill(&*transport, 0, 7);
        let io = PageIo { chunk, offset_bytes: 0, frame: 0, pages: 1 };
        transport.run(Lane::WriteBack, Direction::Write, &[io]).unwrap();
        transport.run(Lane::Demand, Direction::Read, &[PageIo { frame: 1, ..io }]).unwrap();
        assert_eq!(first_byte(&*transport, 1), 7);
    }

    /// The memory node clears the chunks of its clients when it ends.
    #[test]
    fn page_that_is_read_while_the_memory_node_ends_is_right_or_lost() {
        for round in 0..30 {
            let service = start(true);
            let transport = connect_to(&service);
            let chunk = transport.allocate_chunk().unwrap();
            fill(&*transport, 0, 7);
            let io = PageIo { chunk, offset_bytes: 0, frame: 0, pages: 1 };
            transport.run(Lane::WriteBack, Direction::Write, &[io]).unwrap();
            std::thread::scope(|scope| {
                let (ready, reads) = std::sync::mpsc::channel();
                let transport = &*transport;
                scope.spawn(move || {
                    while transport.run(Lane::Demand, Direction::Read, &[io]).is_ok() {
                        assert_eq!(first_byte(transport, 0), 7, "round {round}");
                        let _ = ready.send(());
                    }
                });
                reads.recv().unwrap();
                service.stop();
            });
        }
    }

    #[test]
    fn transfers_fail_when_the_memory_node_has_ended() {
        let service = start(true);
        let transport = connect_to(&service);
        let chunk = transport.allocate_chunk().unwrap();
        let io = PageIo { chunk, offset_bytes: 0, frame: 0, pages: 1 };
        transport.run(Lane::WriteBack, Direction::Write, &[io]).unwrap();
        service.stop();
        for done in [
            transport.run(Lane::Demand, Direction::Read, &[io]),
            transport.run(Lane::WriteBack, Direction::Write, &[io]),
        ] {
            assert!(matches!(done, Err(TransportError::Gone(_))), "{done:?}");
        }
    }
}
