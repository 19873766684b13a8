//! Lanes of read-ahead and write-back that are lent to the assist.
//!
//! The process lends the queues of all lanes but the first, of each memory node. Keys and windows
//! stay those of the process, and so do the connections: the NIC sees no difference.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pool::nic::LendingNic;
use pool::{Address, LentLanes, MultiPool, NodeIndex, Options, Placement};

use super::{Error, FRAMES_OF, PoolTransport, connect, connect_with_retry, gone, transfer_of};
use crate::assist::link::Link;
use crate::assist::protocol::Message;
use crate::assist::ring::{Item, Producer};
use crate::assist::transport::{AssistTransport, Assisted};
use crate::sys::PAGE_BYTES;
use crate::transport::{Lane, PageIo, Transport, TransportError};

/// As [`connect`], with an assist if its process at the other end of `link` accepts the queues.
pub(crate) fn connect_with_assist(
    nodes: &[Address],
    frames: u32,
    link: Arc<Link>,
) -> Result<Box<dyn Transport>, Error> {
    let pools = connect_with_retry(|| connect_lendable(nodes, &link))?;
    let pool = PoolTransport::over(pools, nodes, frames)?;
    match pool.begin_session(&link) {
        Ok(producer) => Ok(Box::new(AssistTransport::new(Box::new(pool), link, producer))),
        Err(_) => {
            link.end();
            drop(pool);
            // Queues of the old connections may still be lent.
            Ok(Box::new(connect(nodes, frames)?))
        }
    }
}

/// Connects to memory nodes. The assist maps the queues before the NIC's process seals them.
fn connect_lendable(nodes: &[Address], link: &Arc<Link>) -> Result<MultiPool, pool::Error> {
    let connect = |(node, address): (u16, &Address)| {
        let link = link.clone();
        let show = move |files: [BorrowedFd<'_>; 2]| link.share_queues(node, files).is_ok();
        address.connect_lendable(Options::default(), show)
    };
    let pools = (0..).zip(nodes).map(connect).collect::<Result<Vec<_>, _>>()?;
    MultiPool::over(pools, Placement::RoundRobin)
}

impl<N: LendingNic> PoolTransport<N> {
    /// Lends the queues to the assist, which has mapped their memory.
    fn begin_session(&self, link: &Link) -> io::Result<Producer> {
        if self.by_requests {
            return Err(io::ErrorKind::Unsupported.into());
        }
        for (index, node) in (0..).zip(&self.nodes.nodes) {
            let lent = node.pool.lend_lanes(&node.frames).map_err(io::Error::other)?;
            let LentLanes { state, wake } = lent;
            let bytes = u64::from(self.frames) * PAGE_BYTES as u64;
            link.send(&Message::Lent { node: index, bytes, state }, &[wake.as_fd()])?;
        }
        link.share_ring()
    }
}

impl<N: LendingNic> Assisted for PoolTransport<N> {
    fn item(&self, lane: Lane, io: &PageIo) -> Option<Item> {
        let placed = *self.chunks().grant(io.chunk);
        let pool = &self.nodes.nodes[placed.node.0 as usize].pool;
        let transfer = transfer_of(io, &placed.grant);
        let transfer = pool.lent_transfer(&transfer, self.lane(lane)).ok()?;
        Some(Item {
            address: transfer.address,
            rkey: transfer.rkey,
            node: placed.node.0,
            qp: transfer.qp,
            frame: io.frame,
            pages: io.pages,
        })
    }

    fn check_alive(&self) -> Result<(), TransportError> {
        self.check_alive()
    }

    fn before_write(&self, io: &PageIo) {
        self.nodes.copy_out(self.node_of(io), io);
    }

    fn after_read(&self, io: &PageIo) {
        self.nodes.copy((self.node_of(io), FRAMES_OF), io);
    }

    fn take_back(&self) -> Result<(), TransportError> {
        let each = self.nodes.nodes.iter().map(|node| node.pool.take_back().map_err(gone));
        each.fold(Ok(()), Result::and)
    }
}

impl<N: LendingNic> PoolTransport<N> {
    fn node_of(&self, io: &PageIo) -> NodeIndex {
        self.chunks().grant(io.chunk).node
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use pool::{Endpoint, Service, Settings};

    use super::*;
    use crate::assist::server::testing::TestAssist;
    use crate::transport::{ChunkHandle, Direction};

    const FRAMES: u32 = 32;

    fn start() -> Service {
        let settings = Settings { donate_bytes: 8 << 20, ..Settings::default() };
        Service::start(&settings, &Endpoint::Fresh).unwrap()
    }

    /// The first word of a frame.
    fn word(transport: &dyn Transport, frame: u32) -> &AtomicU64 {
        assert!(frame < FRAMES);
        // SAFETY: a word of the frames, which live as long as the transport.
        unsafe {
            let at = transport.frames().base.add(frame as usize * PAGE_BYTES);
            AtomicU64::from_ptr(at.cast())
        }
    }

    /// Writes pages to chunks and reads them back, `lane` by `lane`.
    fn pass(transport: &dyn Transport, chunks: &[ChunkHandle], value: u64) {
        let half = FRAMES / 2;
        let chunk = |at: u32| chunks[at as usize % chunks.len()];
        let io = |at: u32, frame| PageIo {
            chunk: chunk(at),
            offset_bytes: at * 2 * PAGE_BYTES as u32,
            frame,
            pages: 1,
        };
        let out: Vec<PageIo> = (0..half).map(|at| io(at, at)).collect();
        (0..half)
            .for_each(|at| word(transport, at).store(value + u64::from(at), Ordering::Relaxed));
        transport.post(Lane::WriteBack, Direction::Write, &out).unwrap().wait().unwrap();
        let back: Vec<PageIo> = (0..half).map(|at| io(at, FRAMES - 1 - at)).collect();
        transport.post(Lane::Prefetch, Direction::Read, &back).unwrap().wait().unwrap();
        for at in 0..half {
            let arrived = word(transport, FRAMES - 1 - at).load(Ordering::Relaxed);
            assert_eq!(arrived, value + u64::from(at));
        }
        // The lane on which a thread waits is never lent.
        transport.run(Lane::Demand, Direction::Read, &[io(3, 0)]).unwrap();
        assert_eq!(word(transport, 0).load(Ordering::Relaxed), value + 3);
    }

    fn check(name: &str, services: &[Service]) {
        let mut assist = TestAssist::start(name);
        let nodes: Vec<Address> =
            services.iter().map(|service| Address::Shm(service.path().to_owned())).collect();
        let link = Arc::new(Link::connect(&assist.directory).unwrap());
        let transport: Arc<dyn Transport> =
            connect_with_assist(&nodes, FRAMES, link).unwrap().into();
        assert!(transport.stats().assist.is_used);
        // Two chunks of each memory node.
        let mut chunks = Vec::new();
        while chunks.len() < 2 * nodes.len() {
            transport.allocate_chunks(1, &mut chunks).unwrap();
        }
        // Before a thread watches the assist, the process moves all pages on the lane of its own.
        pass(&*transport, &chunks, 1000);
        assert_eq!(transport.stats().assist.pages, 0);
        let watched = transport.clone();
        let watch = std::thread::spawn(move || watched.watch());
        let mut value = 2000;
        while transport.stats().assist.pages < 200 {
            pass(&*transport, &chunks, value);
            value += 100;
        }
        assist.end();
        watch.join().unwrap();
        let pages = transport.stats().assist.pages;
        (1..5).for_each(|round| pass(&*transport, &chunks, value + 1000 * round));
        assert_eq!(transport.stats().assist.pages, pages);
        assert!(transport.stats().assist.is_lost);
        chunks.into_iter().for_each(|chunk| transport.free_chunk(chunk).unwrap());
    }

    #[test]
    fn lent_queues_move_pages_and_come_back() {
        check("lent", &[start()]);
    }

    #[test]
    fn queues_of_two_memory_nodes_are_lent() {
        check("lent-two", &[start(), start()]);
    }

    #[test]
    fn process_goes_on_without_an_assist_that_accepts_no_queues() {
        let service = start();
        let mut assist = TestAssist::start("lent-none");
        let link = Arc::new(Link::connect(&assist.directory).unwrap());
        assist.end();
        let nodes = [Address::Shm(service.path().to_owned())];
        let transport = connect_with_assist(&nodes, FRAMES, link).unwrap();
        assert!(!transport.stats().assist.is_used);
        let chunk = transport.allocate_chunk().unwrap();
        pass(&*transport, &[chunk], 7);
    }
}
