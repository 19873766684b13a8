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
