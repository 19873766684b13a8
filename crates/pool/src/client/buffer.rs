//! Registered memory of a compute node: buffers that users fill, and the places where slices pass
//! through.

use std::sync::Arc;

use fabric::{Access, DmaMemory, Key, MemoryRegion, Nic, Sge};
use parking_lot::Mutex;

use super::Transfer;
use crate::Error;
use crate::scheme::Era;

/// Registered memory that chunks are read into and written from without a copy.
///
/// Clones share it. It is shared with the NIC: what an operation in flight does to it is seen at
/// any time, so that it is read and written by copying, never through references.
pub struct Buffer<N: Nic> {
    mr: N::Mr,
    /// The connection whose NIC has it registered.
    era: Era,
}

impl<N: Nic> Clone for Buffer<N> {
    fn clone(&self) -> Self {
        Self { mr: self.mr.clone(), era: self.era }
    }
}

impl<N: Nic> Buffer<N> {
    /// Registers `bytes` of zeroed memory, rounded up to pages.
    pub(super) fn new(nic: &N, pd: &N::Pd, bytes: usize, era: Era) -> Result<Self, Error> {
        let memory = nic.alloc_dma(bytes)?;
        Ok(Self { mr: nic.reg_mr(pd, &memory, Access::LOCAL_ALL)?, era })
    }

    /// The memory.
    pub fn memory(&self) -> &DmaMemory {
        self.mr.memory()
    }

    /// The region.
    pub fn region(&self) -> &N::Mr {
        &self.mr
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.memory().len()
    }

    /// True if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The transfer's bytes in this buffer, for a work request.
    #[inline]
    pub(super) fn part(&self, t: &Transfer<'_>, op: &'static str, era: Era) -> Result<Sge, Error> {
        if self.era != era {
            return Err(Error::Stale { op, what: "buffer" });
        }
        if self.memory().at(t.buffer_offset, t.len as usize).is_none() {
            return Err(Error::Setting {
                setting: "buffer_offset",
                value: t.buffer_offset.to_string(),
                why: format!("the buffer has {} bytes, {} are to be moved", self.len(), t.len),
            });
        }
        Ok(self.mr.sge(t.buffer_offset, t.len))
    }
}

/// Sizes of the places, in bytes: atomics and short slices, pages, long slices.
const SIZES: [usize; 3] = [64, 4 << 10, 256 << 10];
/// Places that are taken from the NIC at a time.
const COUNTS: [usize; 3] = [64, 32, 2];
/// The most bytes that pass through one place.
pub(super) const PLACE_MAX: usize = SIZES[SIZES.len() - 1];

/// Places in registered memory where slices pass through. Those for up to a page are registered from
/// the start, so that such accesses need nobody's CPU; more when all are taken, and kept.
pub(super) struct Bounce<N: Nic> {
    nic: N,
    pd: N::Pd,
    free: [Mutex<Vec<Place<N>>>; SIZES.len()],
}

/// A place: part of a region.
struct Place<N: Nic> {
    region: Arc<N::Mr>,
    offset: usize,
}

/// A place that is taken; given back when dropped.
pub(super) struct Taken<N: Nic> {
    home: Arc<Bounce<N>>,
    class: usize,
    place: Option<Place<N>>,
}

impl<N: Nic> Bounce<N> {
    /// Registers the first places.
    pub fn new(nic: &N, pd: &N::Pd) -> Result<Arc<Self>, Error> {
        let free = std::array::from_fn(|_| Mutex::new(Vec::new()));
        let bounce = Arc::new(Self { nic: nic.clone(), pd: pd.clone(), free });
        for class in 0..SIZES.len() - 1 {
            let place = bounce.grow(class)?;
            bounce.free[class].lock().push(place);
        }
        Ok(bounce)
    }

    /// A place for `len` bytes, at most [`PLACE_MAX`].
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Taken<N>, Error> {
        let class = SIZES.iter().position(|size| len <= *size);
        let class = class.unwrap_or_else(|| panic!("{len} bytes do not pass through one place"));
        let place = self.free[class].lock().pop();
        let place = match place {
            Some(place) => place,
            None => self.grow(class)?,
        };
        Ok(Taken { home: self.clone(), class, place: Some(place) })
    }

    #[cold]
    fn grow(&self, class: usize) -> Result<Place<N>, Error> {
        let (size, count) = (SIZES[class], COUNTS[class]);
        let memory = self.nic.alloc_dma(size * count)?;
        let region = Arc::new(self.nic.reg_mr(&self.pd, &memory, Access::LOCAL_ALL)?);
        let place = |i| Place { region: region.clone(), offset: i * size };
        self.free[class].lock().extend((1..count).map(place));
        Ok(place(0))
    }
}

impl<N: Nic> Taken<N> {
    fn place(&self) -> &Place<N> {
        self.place.as_ref().expect("there until it is dropped")
    }

    /// Its first `len` bytes for a work request.
    pub fn sge(&self, len: usize) -> Sge {
        let Place { region, offset } = self.place();
        let key: Key = region.key();
        Sge { addr: region.memory().addr() + *offset as u64, len: len as u32, lkey: key }
    }

    /// Copies its first bytes out.
    pub fn read(&self, out: &mut [u8]) {
        let Place { region, offset } = self.place();
        region.memory().read(*offset, out);
    }

    /// Copies bytes to its beginning.
    pub fn write(&self, data: &[u8]) {
        let Place { region, offset } = self.place();
        region.memory().write(*offset, data);
    }

    /// Its first 8 bytes as atomics leave them there: big-endian.
    pub fn word(&self) -> u64 {
        let Place { region, offset } = self.place();
        region.memory().load_be64(*offset)
    }
}

impl<N: Nic> Drop for Taken<N> {
    fn drop(&mut self) {
        self.home.free[self.class].lock().extend(self.place.take());
    }
}
