//! The keys of many slots, in one round trip.

use super::Store;
use super::access::Steps;
use super::look::Want;
use super::trips::Trip;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::Malformed;
use crate::layout::block::{HEADER_BYTES, Head};
use crate::layout::table::Slot;
use crate::reach::{Reach, Step};

/// Bytes of a block that are read for its header and key. A longer key takes a second round trip.
const HEAD_READ: usize = 256;

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Reads headers and keys of the blocks of `slots`. Calls `visit` with the number of each slot,
    /// except those whose memory node is gone.
    pub(super) async fn read_keys(
        &self,
        trip: &Trip<'_>,
        slots: impl Iterator<Item = Slot> + Clone,
        mut visit: impl FnMut(usize, Head, &[u8]),
    ) -> Result<(), Error> {
        let slots = slots.enumerate().filter(|(_, slot)| !self.blocks.is_gone(slot.place));
        let mut buffer = self.buffers.take();
        let mut long = Vec::new();
        let mut total = 0;
        for (_, slot) in slots.clone() {
            total += self.read_bytes(slot, Want::Value, 0)?.min(HEAD_READ);
        }
        if total == 0 {
            return Ok(());
        }
        buffer.resize(total, 0);
        {
            let mut rest = buffer.as_mut_slice();
            let mut steps = Steps::new();
            for (_, slot) in slots.clone() {
                let bytes = self.read_bytes(slot, Want::Value, 0)?.min(HEAD_READ);
                let (into, more) = rest.split_at_mut(bytes);
                steps.push(Step::Read { at: slot.place.at(0), into });
                rest = more;
            }
            self.run(trip, &mut steps).await?;
        }
        let mut start = 0;
        for (i, slot) in slots {
            let bytes = self.read_bytes(slot, Want::Value, 0)?.min(HEAD_READ);
            let read = &buffer[start..start + bytes];
            start += bytes;
            let head = Head::parse(read).map_err(Error::malformed(slot.place.at(0)))?;
            match read.get(HEADER_BYTES..HEADER_BYTES + head.key as usize) {
                Some(key) => self.visit(slot, i, head, key, &mut visit)?,
                None => long.push((i, slot, head)),
            }
        }
        for (i, slot, head) in long {
            let end = HEADER_BYTES + head.key as usize;
            if end > self.read_bytes(slot, Want::Value, 0)? {
                let what = Malformed("a block's key is longer than its slot says");
                return Err(Error::Malformed { at: slot.place.at(0), what });
            }
            buffer.resize(end, 0);
            let into = &mut buffer[..end];
            self.run(trip, &mut [Step::Read { at: slot.place.at(0), into }]).await?;
            self.visit(slot, i, head, &buffer[HEADER_BYTES..end], &mut visit)?;
        }
        Ok(())
    }

    /// Compares the hash of `key` with that of its block. The whole block was not read, so its
    /// checksum cannot be compared.
    fn visit(
        &self,
        slot: Slot,
        i: usize,
        head: Head,
        key: &[u8],
        visit: &mut impl FnMut(usize, Head, &[u8]),
    ) -> Result<(), Error> {
        if self.hasher.hash(key).upper != head.upper {
            let what = Malformed("a block's hash is not that of its key");
            return Err(Error::Malformed { at: slot.place.at(0), what });
        }
        visit(i, head, key);
        Ok(())
    }
}
