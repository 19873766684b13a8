//! Background work of a poll: opens chunks in advance, closes chunks that are set aside when memory
//! is short, and announces "available".

use scheme::index::EntryId;
use scheme::{Error, GroupId};
use verbs::Nic;

use super::super::Opening;
use super::reclaim::CLEAR_BYTES;
use super::{BATCH, Shared, State};
use crate::blocks::CHUNK_ORDER;
use crate::rpc::regions::AHEAD;
use crate::rpc::table::Protection;

impl<N: Nic> State<N> {
    /// Binds the windows of all blocks, before any compute node connects.
    pub fn bind_ahead(&mut self, shared: &Shared<N>) -> Result<(), Error> {
        let all: Vec<EntryId> = shared.blocks.entries().collect();
        for some in all.chunks(BATCH) {
            let mut ops = Vec::with_capacity(some.len());
            for (job, entry) in some.iter().enumerate() {
                self.close(shared, &mut ops, None, *entry, job);
            }
            self.run(&mut ops)?;
            // A block whose bind failed is bound by its first allocation.
            for op in ops.iter().filter(|op| !op.done) {
                shared.replace_windows(some[op.job])?;
            }
        }
        Ok(())
    }

    /// Under memory pressure, closes some chunks that are set aside for any compute node, and frees
    /// them.
    pub(super) fn close_aside(&mut self, shared: &Shared<N>) -> Result<(), Error> {
        // Several small chunks at a time, which are cleared quickly, or one large chunk.
        let max_entries = (CLEAR_BYTES / shared.settings.chunk_bytes).clamp(1, 16) as usize;
        let entries = shared.table.lock().take_aside_of_all(max_entries);
        self.close_and_release(shared, &entries)?;
        Ok(())
    }

    /// Closes, clears and releases chunks.
    fn close_and_release(&mut self, shared: &Shared<N>, entries: &[EntryId]) -> Result<(), Error> {
        let mut ops = Vec::new();
        for (job, entry) in entries.iter().enumerate() {
            self.close(shared, &mut ops, None, *entry, job);
        }
        self.run(&mut ops)?;
        for op in ops.iter().filter(|op| !op.done) {
            shared.replace_windows(entries[op.job])?;
        }
        for &entry in entries {
            shared.clear(entry);
            shared.table.lock().release(entry);
        }
        Ok(())
    }

    /// Opens a chunk for a compute node that has too few opened in advance. False if none needs one
    /// or no chunk is free.
    pub(super) fn open_ahead(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        if shared.opening != Opening::RegisterAhead {
            self.short.clear();
            return Ok(false);
        }
        while let Some(&client) = self.short.front() {
            let peer = self.peers.get(&client).filter(|peer| peer.leaving.is_none());
            let entry = {
                let mut table = shared.table.lock();
                let wants = peer.is_some() && table.aside_for(client) < AHEAD;
                wants.then(|| table.take(client, GroupId(0), CHUNK_ORDER)).flatten()
            };
            let (Some(entry), Some(peer)) = (entry, peer) else {
                self.short.pop_front();
                continue;
            };
            let region = shared.register(&peer.pd, entry);
            let mut table = shared.table.lock();
            let Protection::Regions(regions) = &mut table.protection else {
                unreachable!("this scheme opens chunks by regions")
            };
            match region {
                Ok(region) => {
                    regions.open(entry, region);
                    table.set_aside(entry, client);
                    return Ok(true);
                }
                // Its next allocation registers it, or is refused.
                Err(_) => {
                    table.release(entry);
                    self.short.pop_front();
                }
            }
        }
        Ok(false)
    }

    /// Announces "available" to the compute nodes that saw "empty". False if this core announced no
    /// "empty".
    pub(super) fn announce_available(&mut self, shared: &Shared<N>) -> bool {
        if !shared.table.lock().announce_available(self.index) {
            return false;
        }
        self.peers.values_mut().for_each(|peer| peer.answers.announce_available());
        true
    }
}
