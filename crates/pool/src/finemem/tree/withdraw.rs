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
    pub async fn withdraw<V: Verbs>(&self, verbs: &V, block: Block) -> Result<(), V::Error> {
        let place = match block.layer() {
            Layer::Span => Place::span(block.chunk / CHUNKS),
            Layer::Section => Place::section(block.chunk / SECTION),
        };
        let mut seen = self.look(verbs, place).await?;
        while let Some((chunk, log)) = pending(place.layer, place.index, seen.header)
            && chunk == block.chunk
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
        let at = self.shape.log(block.chunk);
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
