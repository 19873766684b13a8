//! Taking back what the logs say of a block, ahead of the block itself.

use super::flush::pending;
use super::{Place, Tree, Verbs};
use crate::finemem::header::{CHUNKS, Record, User};
use crate::finemem::layout::{Block, SECTION};
use crate::finemem::log::{FullLog, Layer};

impl Tree {
    /// Has the full log of a taken block say that it is given back, while its header still has it as taken: it is
    /// nobody's. Nobody else may be giving it back.
    ///
    /// A NIC that asks the full log who may use the block's window ([`FullLog::OWNERSHIP`]) admits nobody from here
    /// on. The temporary log, if it is still that of the block's taking, is in the full log; it is changed to one
    /// of nobody, so that no flush, however late, brings it back.
    ///
    /// Of a block of several sections each section's log says so: who is broken off between giving back one and the
    /// next leaves none that looks like its owner's.
    pub async fn withdraw<V: Verbs>(&self, verbs: &V, block: Block) -> Result<(), V::Error> {
        match block.parts() {
            None if block.layer() == Layer::Span => {
                self.withdraw_at(verbs, Place::span(block.chunk / CHUNKS), block.chunk).await?;
            }
            None => {
                let place = Place::section(block.chunk / SECTION);
                self.withdraw_at(verbs, place, block.chunk).await?;
            }
            Some(parts) => {
                for index in parts {
                    self.withdraw_at(verbs, Place::section(index), index * SECTION).await?;
                }
            }
        }
        Ok(())
    }

    /// The same for the log at `first`, which is of `place`.
    async fn withdraw_at<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        first: u32,
    ) -> Result<(), V::Error> {
        let mut seen = self.look(verbs, place).await?;
        while let Some((chunk, log)) = pending(place.layer, place.index, seen.header)
            && chunk == first
            && log.taken
        {
            self.flush(verbs, place, seen).await?;
            let nobodys = Record { user: User::NOBODY, ..seen.header.record() };
            let changed = seen.header.with_record(nobodys);
            match self.change(verbs, place, seen.header, changed).await? {
                Ok(()) => break,
                Err(found) => seen = found,
            }
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
