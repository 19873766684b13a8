//! From the temporary log into the full log (FineMem §4.2).
//!
//! Who overwrites a header flushes its temporary log first, so a log is lost with no crash, and of the logs
//! of a header only the one in it can be missing. A flush that is late must not undo a later one:
//!
//! ```text
//! READ the full log ── READ the header: still this log? ── CAS the full log from what was read
//! ```
//!
//! If the header has another log by now, who put it there has flushed this one. If it has not, and
//! another log comes between the second READ and the CAS, this one was flushed by then, the full log is no
//! longer what was read, and the CAS fails. So it does not matter how late anybody is, nor how long ago the
//! full log was written.
//!
//! A span that is not in use has a header that still holds its last chunk's log, while the section's header gives
//! the span out whole. A full log of a section is the later one then, and stays: that of the chunk was
//! flushed before the span was closed, and nothing of the span's can come later while it is not in use (FineMem
//! §4.2 looks at the in-use bit too, where the layers differ).
//!
//! FineMem compares the timestamps of both logs instead. They say which is later only within 64 changes: a
//! chunk that was not touched for longer would have its new log taken for an old one, and lost.

use super::{Place, Seen, Tree, Verbs};
use crate::finemem::header::{CHUNKS, Header, Record, SPANS, Spread, User};
use crate::finemem::layout::SECTION;
use crate::finemem::log::{FullLog, Layer};

/// True if the last change of a header took its block.
pub(in crate::finemem) fn has_taken(layer: Layer, header: Header) -> bool {
    let Record { offset, size, .. } = header.record();
    match (layer, size) {
        (Layer::Span, _) => header.bitmap() >> offset & 1 == 1,
        (Layer::Section, Record::OPENED) => false,
        (Layer::Section, Record::PART) => header.bitmap() == u32::MAX,
        (Layer::Section, _) => header.spread(offset % SPANS) == Spread::Full,
    }
}

/// The first chunk of a header's last change, and what the full log is to say of it; `None` if there is
/// nothing to be said.
pub(in crate::finemem) fn pending(
    layer: Layer,
    index: u32,
    header: Header,
) -> Option<(u32, FullLog)> {
    let record = header.record();
    if record.user == User::NOBODY || layer == Layer::Section && record.size == Record::OPENED {
        return None;
    }
    let chunk = match layer {
        Layer::Span => index * CHUNKS + record.offset,
        Layer::Section if record.size == Record::PART => index * SECTION,
        // A section has 16 spans; a larger offset is none of ours.
        Layer::Section => index * SECTION + record.offset % SPANS * CHUNKS,
    };
    Some((chunk, FullLog::of(record, has_taken(layer, header), layer)))
}

impl Tree {
    /// Sees to it that the temporary log of a header is in the full log.
    pub(super) async fn flush<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        seen: Seen,
    ) -> Result<(), V::Error> {
        self.flush_from(verbs, place, seen, None).await
    }

    /// The same, for who has read the full log and then the header already.
    pub(super) async fn flush_from<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        seen: Seen,
        mut read: Option<(u64, u64)>,
    ) -> Result<(), V::Error> {
        let Place { layer, index } = place;
        let pending =
            pending(layer, index, seen.header).filter(|(chunk, _)| *chunk < self.shape.chunks);
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
        }
        self.is_flushed(place, record);
        Ok(())
    }

    /// Remembers that a log needs no flushing any more.
    fn is_flushed(&self, place: Place, record: Record) {
        if let Some(seen) = self.known(place).filter(|seen| seen.header.record() == record) {
            self.remember(place, seen.header, true);
        }
    }
}
