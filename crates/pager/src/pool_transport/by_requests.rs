//! Pages of a scheme without one-sided access (`odrp`): each page is one request to the memory
//! node, which reads or writes the whole page.
//!
//! Such a scheme gives out a page number without a request, and takes memory for the page at the
//! first WRITE. The pager must know before the WRITE whether the pool is full, because the page is
//! then written elsewhere. So an allocation writes zeros.

use pool::join::join;
use verbs::Nic;
use verbs::executor::block_on;

use super::{FRAMES_OF, PoolTransport, gone, not_allocated};
use crate::sys::PAGE_BYTES;
use crate::transport::{ChunkHandle, Direction, PageIo, TransportError};

/// Requests in flight at a time to a single memory node.
const IN_FLIGHT: usize = 16;

impl<N: Nic> PoolTransport<N> {
    /// Allocates a chunk with memory.
    pub(super) fn allocate_by_requests(&self) -> Result<ChunkHandle, TransportError> {
        let pools = &self.nodes.pools;
        let grant = pools.allocate_blocking().map_err(not_allocated)?;
        let zeros = [0; PAGE_BYTES];
        match pools.write_blocking(&grant, 0, &zeros) {
            Ok(()) => Ok(self.chunks_mut().add(grant)),
            Err(error) => {
                // Without memory, the page number alone is given back, which needs no request.
                let _ = pools.free_blocking(grant);
                Err(not_allocated(error))
            }
        }
    }

    /// Moves pages, and waits for them. With several memory nodes one request is in flight at a
    /// time: `block_on` would start a thread for each further CQ, and the start of a thread may
    /// fault while the fault handler waits for it.
    pub(super) fn move_by_requests(
        &self,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<(), TransportError> {
        let (pools, frames) =
            (&self.nodes.pools, self.nodes.nodes[FRAMES_OF.0 as usize].frames.memory());
        let pages = ios.iter().flat_map(|io| (0..usize::from(io.pages)).map(move |at| (io, at)));
        let requests = pages.map(|(io, at)| {
            let placed = *self.chunks().grant(io.chunk);
            let (offset, frame) = (at * PAGE_BYTES, (io.frame as usize + at) * PAGE_BYTES);
            let offset = u64::from(io.offset_bytes) + offset as u64;
            async move {
                let mut page = [0; PAGE_BYTES];
                if direction == Direction::Write {
                    frames.read(frame, &mut page);
                    return pools.write(&placed, offset, &page).await;
                }
                pools.read(&placed, offset, &mut page).await?;
                frames.write(frame, &page);
                Ok(())
            }
        });
        let width = if pools.len() == 1 { IN_FLIGHT } else { 1 };
        let done = block_on(join(requests, width));
        done.into_iter().collect::<Result<(), pool::Error>>().map_err(gone)
    }
}
