//! Reclamation: grants that were not delivered, and the chunks of departed compute nodes.

use scheme::index::EntryId;
use scheme::{ClientId, Error};
use verbs::Nic;

use super::{Shared, State};
use crate::rpc::connection::Connection;

/// Maximum number of bytes of a departed compute node that one poll clears.
pub(super) const CLEAR_BYTES: u64 = 1 << 20;

impl<N: Nic> State<N> {
    /// Takes back one chunk whose grant was not delivered. False if there is none.
    pub(super) fn reclaim_undelivered(&mut self, shared: &Shared<N>) -> Result<bool, Error> {
        let with = |(client, peer): (&ClientId, &mut Connection<N>)| {
            let lost = peer.answers.take_lost().filter(|_| peer.leaving.is_none())?;
            Some((*client, EntryId::new(lost as u32)))
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
}
