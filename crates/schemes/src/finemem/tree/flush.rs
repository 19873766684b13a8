//! Flush of the temporary log to the full log (FineMem §4.2).
//!
//! A client flushes the header's temporary log before it overwrites the header. So no crash loses a
//! log, and of all logs of a header only the one in the header may be missing from the full logs. A
//! delayed flush must not undo a later one:
//!
//! ```text
//! READ the full log ── READ the header: still this log? ── CAS the full log from what was read
//! ```
//!
//! If the header has another log by then, the client that wrote it has flushed this one. Otherwise,
//! if another log is written between the second READ and the CAS, this log had been flushed before
//! that; the full log then differs from the value read, and the CAS fails. So any delay is
//! harmless, as is any age of the full log.
//!
//! The header of a span that is not in use still holds the log of its last chunk, while the
//! section's header allocates the whole span. In that case a full log written for the section is
//! the later one, and is kept: the chunk's log was flushed before the span was closed, and no later
//! log of the span exists while it is not in use (FineMem §4.2 also checks the in-use bit where the
//! layers differ).
//!
//! FineMem compares the timestamps of both logs instead. Timestamps are ordered only within 64
//! changes: for a chunk not changed for longer, a new log would be taken for an old one, and lost.

use super::{Changed, Seen, Tree, Verbs};
use crate::blocks::ChunkIndex;
use crate::finemem::block::{ChunkOffset, Layer, Place, SPANS, SpanOffset};
use crate::finemem::header::{Header, Record, Spread, User};
use crate::finemem::log::FullLog;

/// True if the last change of a header was an allocation.
pub(in crate::finemem) fn has_taken(layer: Layer, header: Header) -> bool {
    let Record { offset, size, .. } = header.record();
    match (layer, size) {
        (Layer::Span, _) => header.bitmap() >> offset & 1 == 1,
        (Layer::Section, Record::OPENED) => false,
        (Layer::Section, Record::PART) => header.bitmap() == u32::MAX,
        (Layer::Section, _) => header.spread(SpanOffset::new(offset % SPANS)) == Spread::Full,
    }
}

/// The first chunk of a header's last change, and the full log to write for it; `None` if there is
/// nothing to write.
pub(in crate::finemem) fn pending(place: Place, header: Header) -> Option<(ChunkIndex, FullLog)> {
    let (layer, record) = (place.layer(), header.record());
    if record.user == User::NOBODY || layer == Layer::Section && record.size == Record::OPENED {
        return None;
    }
    let chunk = match place {
        Place::Span(span) => span.chunk(ChunkOffset::new(record.offset)),
        Place::Section(section) if record.size == Record::PART => section.first_chunk(),
        // A section has 16 spans; a larger offset is invalid.
        Place::Section(section) => {
            section.span(SpanOffset::new(record.offset % SPANS)).first_chunk()
        }
    };
    Some((chunk, FullLog::of(record, has_taken(layer, header), layer)))
}

impl Tree {
    /// Ensures that the temporary log of a header is in the full log.
    pub(super) async fn flush<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        seen: Seen,
    ) -> Result<(), V::Error> {
        self.flush_from(verbs, place, seen, None).await
    }

    /// As [`Tree::flush`], for a caller that has already read the full log and then the header.
    pub(super) async fn flush_from<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        seen: Seen,
        mut read: Option<(u64, u64)>,
    ) -> Result<(), V::Error> {
        let layer = place.layer();
        let pending = pending(place, seen.header).filter(|(chunk, _)| *chunk < self.shape.end());
        let Some((chunk, log)) = pending.filter(|_| !seen.flushed) else { return Ok(()) };
        let (record, taken) = (seen.header.record(), log.taken);
        let (at, wanted) = (self.shape.log(chunk), log.to_word());
        loop {
            let (full, now) = match read.take() {
                Some(read) => read,
                None => verbs.read_both(at, place.word(self.shape)).await?,
            };
            let now = Header(now);
            if now.record() != record || has_taken(layer, now) != taken {
                return Ok(());
            }
            let is_older = layer == Layer::Span && !now.in_use();
            if full == wanted || is_older && FullLog::parse(full).layer == Layer::Section {
                break;
            }
            let found = verbs.cas(at, full, wanted).await?;
            if found == full || found == wanted {
                break;
            }
            verbs.repeat(Changed::Log(chunk))?;
        }
        self.is_flushed(place, record);
        Ok(())
    }

    /// Marks a header's log as flushed.
    fn is_flushed(&self, place: Place, record: Record) {
        if let Some(seen) = self.known(place).filter(|seen| seen.header.record() == record) {
            self.remember(place, seen.header, true);
        }
    }
}
