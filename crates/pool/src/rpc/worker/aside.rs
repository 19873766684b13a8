//! What a turn does of its own accord: it takes back what was not delivered and what compute nodes had
//! that have gone, opens chunks ahead, closes those that are aside when somebody needs them, and takes "empty" back.

use fabric::Nic;

use super::{BATCH, Shared, State};
use crate::Error;
use crate::rpc::peer::Peer;
use crate::rpc::regions::AHEAD;
use crate::rpc::table::Doors;
use crate::scheme::{ClientId, GroupId, bulletin};
use crate::settings::SchemeKind;

/// Bytes that one turn clears at most of what a compute node had that has gone.
const CLEAR_BYTES: u64 = 1 << 20;

impl<N: Nic> State<N> {
    /// Binds the windows of all blocks, before there is anybody.
    pub fn bind_ahead(&mut self, shared: &Shared<N>) -> Result<(), Error> {
        let all: Vec<u32> = (0..shared.blocks.count()).collect();
        for some in all.chunks(BATCH) {
            let mut ops = Vec::with_capacity(some.len());
            for (job, entry) in some.iter().enumerate() {
                self.close(shared, &mut ops, None, *entry, job);
            }
            self.run(&mut ops)?;
            // One that could not be is bound by its first allocation.
            for op in ops.iter().filter(|op| !op.done) {
                shared.replace_windows(some[op.job])?;
            }
        }
        Ok(())
    }

    /// Closes some of what is aside for anybody, since somebody needs it: it is free then.
    pub(super) fn close_aside(&mut self, shared: &Shared<N>) -> Result<(), Error> {
        // Those that clear fast, a few at a time; a large one alone.
        let most = (CLEAR_BYTES / shared.settings.chunk_bytes).clamp(1, 16) as usize;
        let entries = shared.table.lock().take_aside_of_all(most);
        self.close_for_good(shared, &entries)?;
        Ok(())
    }

    /// Closes chunks, clears and releases them.
    fn close_for_good(&mut self, shared: &Shared<N>, entries: &[u32]) -> Result<(), Error> {
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

    /// Takes a chunk back that was granted to a compute node which did not get to know it. True if there
    /// was one.
    pub(super) fn take_lost(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        let with = |(client, peer): (&ClientId, &mut Peer<N>)| {
            let lost = peer.lost.pop().filter(|_| peer.leaving.is_none())?;
            Some((*client, lost))
        };
        let Some((client, entry)) = self.peers.iter_mut().find_map(with) else { return Ok(false) };
        // It may have guessed, and freed it.
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

    /// Takes back some of what compute nodes had that have gone: as much as it takes little time to
    /// clear. True if there was any.
    pub(super) fn take_back(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        let gone = self.peers.iter_mut().find(|(_, peer)| peer.leaving.is_some());
        let Some((&client, peer)) = gone else { return Ok(false) };
        let entries = peer.leaving.as_mut().expect("just seen");
        let mut left = CLEAR_BYTES;
        let fits = |entry: &&u32| {
            let bytes = shared.blocks.range(**entry).1;
            let fits = left == CLEAR_BYTES || bytes <= left;
            left = left.saturating_sub(bytes);
            fits
        };
        let most = shared.settings.credits as usize;
        let some = entries.iter().rev().take(most).take_while(fits).count();
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

    /// Opens a chunk for a compute node that has few ahead, if there is a free one. True if it did.
    pub(super) fn open_ahead(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        if !shared.is(SchemeKind::StaticMr) {
            self.short.clear();
            return Ok(false);
        }
        while let Some(&client) = self.short.front() {
            let peer = self.peers.get(&client).filter(|peer| peer.leaving.is_none());
            let entry = {
                let mut table = shared.table.lock();
                let wants = peer.is_some() && table.aside_for(client) < AHEAD;
                wants.then(|| table.take(client, GroupId(0), 0)).flatten()
            };
            let (Some(entry), Some(peer)) = (entry, peer) else {
                self.short.pop_front();
                continue;
            };
            let region = shared.register(&peer.pd, entry);
            let mut table = shared.table.lock();
            let Doors::Regions(regions) = &mut table.doors else {
                unreachable!("this scheme opens chunks by regions")
            };
            match region {
                Ok(region) => {
                    regions.open(entry, region);
                    table.set_aside(entry, client);
                    return Ok(true);
                }
                // It is registered when it is wanted, or refused then.
                Err(_) => {
                    table.release(entry);
                    self.short.pop_front();
                }
            }
        }
        Ok(false)
    }

    /// Takes "empty" back where it was said. True if it was.
    pub(super) fn tell_available(&mut self, shared: &Shared<N>) -> bool {
        if !shared.table.lock().tell_available(self.index) {
            return false;
        }
        for peer in self.peers.values_mut().filter(|p| p.told_empty) {
            peer.told_empty = false;
            peer.post_bulletin(bulletin::AVAILABLE);
        }
        true
    }
}
