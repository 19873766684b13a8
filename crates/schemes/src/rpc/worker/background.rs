//! Background work of a poll: takes back undelivered grants, reclaims the chunks of departed
//! compute nodes, opens chunks in advance, closes chunks that are set aside when memory is short,
//! and announces "available".

use scheme::index::EntryId;
use scheme::{ClientId, Error, GroupId, bulletin};
use verbs::Nic;

use super::super::Opening;
use super::{BATCH, Shared, State};
use crate::finemem::block::CHUNK_ORDER;
use crate::rpc::connection::Peer;
use crate::rpc::regions::AHEAD;
use crate::rpc::table::Protection;

/// Maximum number of bytes of a departed compute node that one poll clears.
const CLEAR_BYTES: u64 = 1 << 20;

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

    /// Takes back one chunk whose grant was not delivered. False if there is none.
    pub(super) fn reclaim_undelivered(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        let with = |(client, peer): (&ClientId, &mut Peer<N>)| {
            let lost = peer.lost.pop().filter(|_| peer.leaving.is_none())?;
            Some((*client, lost))
        };
        let Some((client, entry)) = self.peers.iter_mut().find_map(with) else { return Ok(false) };
        // The compute node may have guessed the entry and freed it.
        if shared.table.lock().start_free(entry, client) {
            let mut ops = Vec::new();
            self.close(shared, &mut ops, Some(client), entry, 0);
            self.run(&mut ops)?;
            if ops.iter().any(|op| !op.done) {
                shared.replace_windows(entry)?;
            }
            shared.clear(entry);
            shared.table.lock().release(entry);
        }
        Ok(true)
    }

    /// Reclaims some chunks of a departed compute node, limited by the time to clear them. False if
    /// there are none.
    pub(super) fn reclaim_departed(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        let gone = self.peers.iter_mut().find(|(_, peer)| peer.leaving.is_some());
        let Some((&client, peer)) = gone else { return Ok(false) };
        let entries = peer.leaving.as_mut().expect("just seen");
        let mut left = CLEAR_BYTES;
        let fits = |entry: &&EntryId| {
            let bytes = shared.blocks.range(**entry).1;
            let fits = left == CLEAR_BYTES || bytes <= left;
            left = left.saturating_sub(bytes);
            fits
        };
        let max_entries = shared.settings.credits as usize;
        let some = entries.iter().rev().take(max_entries).take_while(fits).count();
        let some = entries.split_off(entries.len() - some);
        if some.is_empty() {
            self.peers.remove(&client);
            return Ok(true);
        }
        let mut ops = Vec::new();
        for (job, entry) in some.iter().enumerate() {
            self.close(shared, &mut ops, Some(client), *entry, job);
        }
        ops.sort_by_key(|op| op.path);
        self.run_once(&mut ops)?;
        for op in ops.iter().filter(|op| !op.done) {
            shared.replace_windows(some[op.job])?;
        }
        for entry in some {
            shared.clear(entry);
            shared.table.lock().release(entry);
        }
        Ok(true)
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
        for peer in self.peers.values_mut().filter(|p| p.announced_empty) {
            peer.announced_empty = false;
            peer.post_bulletin(bulletin::AVAILABLE);
        }
        true
    }
}
