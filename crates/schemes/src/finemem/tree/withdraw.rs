//! Withdrawal: marks a block as freed in its logs before it is freed in the headers.

use scheme::index::IndexRange;

use super::flush::pending;
use super::{Changed, Tree, Verbs};
use crate::blocks::ChunkIndex;
use crate::finemem::block::{Block, Place};
use crate::finemem::header::{Record, User};
use crate::finemem::log::FullLog;

impl Tree {
    /// Marks a taken block as freed in its full log, while its header still marks it as taken, so
    /// that it has no owner. There must be no concurrent free of the block.
    ///
    /// From then on, a NIC whose windows are guarded by the full log ([`FullLog::OWNERSHIP`])
    /// admits no client to the block's window. If the header's temporary log is still that of the
    /// block's allocation, it is flushed and then rewritten without a user, so that no delayed
    /// flush restores it.
    ///
    /// In a block of several sections, the log of each section is changed. Otherwise an abort
    /// between the frees of two sections would leave a section that seems to belong to the owner.
    pub async fn withdraw<V: Verbs>(&self, verbs: &V, block: Block) -> Result<(), V::Error> {
        match block.parts() {
            None => self.withdraw_at(verbs, block.place(), block.chunk).await,
            Some(parts) => {
                for section in parts.iter() {
                    let place = Place::Section(section);
                    self.withdraw_at(verbs, place, section.first_chunk()).await?;
                }
                Ok(())
            }
        }
    }

    /// Withdraws the log at `first`, whose header is `place`.
    async fn withdraw_at<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        first: ChunkIndex,
    ) -> Result<(), V::Error> {
        let mut seen = self.read_header(verbs, place).await?;
        while let Some((chunk, log)) = pending(place, seen.header)
            && chunk == first
            && log.taken
        {
            self.flush(verbs, place, seen).await?;
            let ownerless = Record { user: User::NOBODY, ..seen.header.record() };
            let changed = seen.header.with_record(ownerless);
            match self.change(verbs, place, seen.header, changed).await? {
                Ok(()) => break,
                Err(found) => seen = found,
            }
            verbs.repeat(Changed::Header(place))?;
        }
        let at = self.shape.log(first);
        let mut word = [0];
        verbs.read(at, &mut word).await?;
        let log = FullLog::parse(word[0]);
        if log.taken {
            let back = FullLog { taken: false, timestamp: log.timestamp.next(), ..log };
            verbs.cas(at, word[0], back.to_word()).await?;
        }
        Ok(())
    }
}
