//! Registered memory of a compute node: buffers of the user, and bounce buffers for slices.

use std::sync::Arc;

use parking_lot::Mutex;
use verbs::{Access, DmaMemory, Key, MemoryRegion, Nic, Sge};

use super::Transfer;
use crate::Error;
use scheme::ConnectionEpoch;

/// Registered memory that chunks are read into and written from without a copy.
///
/// Clones share the memory. Because the NIC accesses it concurrently while an operation is in
/// flight, it is read and written by copying, never through references.
///
/// ```
/// use pool::{Lane, Transfer};
///
/// # let settings = pool::Settings { donate_bytes: 8 << 20, ..pool::Settings::default() };
/// # let pool = pool::Pool::embedded(settings)?;
/// let grant = pool.allocate_blocking()?;
/// let buffer = pool.buffer(4096)?;
/// buffer.memory().write(0, b"hello");
/// let transfer = Transfer { grant: &grant, offset: 64, buffer_offset: 0, len: 5 };
/// pool.write_from(&transfer, &buffer, Lane(0))?.wait()?;
///
/// let mut text = [0; 5];
/// pool.read_blocking(&grant, 64, &mut text)?;
/// assert_eq!(&text, b"hello");
/// # pool.free_blocking(grant)?;
/// # Ok::<(), pool::Error>(())
/// ```
pub struct Buffer<N: Nic> {
    mr: N::Mr,
    /// The connection on whose NIC it is registered.
    connection: ConnectionEpoch,
}

impl<N: Nic> Clone for Buffer<N> {
    fn clone(&self) -> Self {
        Self { mr: self.mr.clone(), connection: self.connection }
    }
}

impl<N: Nic> Buffer<N> {
    /// Registers memory that the NIC has allocated.
    pub(super) fn new(
        nic: &N,
        pd: &N::Pd,
        memory: DmaMemory,
        connection: ConnectionEpoch,
    ) -> Result<Self, Error> {
        Ok(Self { mr: nic.reg_mr(pd, &memory, Access::LOCAL_ALL)?, connection })
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

    /// Scatter/gather element of the transfer's bytes in this buffer.
    #[inline]
    pub(super) fn part(
        &self,
        t: &Transfer<'_>,
        op: &'static str,
        connection: ConnectionEpoch,
    ) -> Result<Sge, Error> {
        if self.connection != connection {
            return Err(Error::Stale { op, what: "buffer" });
        }
        if self.memory().at(t.buffer_offset, t.len as usize).is_none() {
            return Err(Error::Setting {
                setting: "buffer_offset",
                value: t.buffer_offset.to_string(),
                why: format!("the buffer has {} bytes, the transfer needs {}", self.len(), t.len),
            });
        }
        Ok(self.mr.sge(t.buffer_offset, t.len))
    }
}

/// Sizes of bounce buffers in bytes: for atomics and short slices, for pages, for long slices.
const SIZES: [usize; 3] = [64, 4 << 10, 256 << 10];
/// Number of bounce buffers of each size that are registered at a time.
const COUNTS: [usize; 3] = [64, 32, 2];
/// Maximum size of a bounce buffer in bytes.
pub(super) const BOUNCE_MAX: usize = SIZES[SIZES.len() - 1];

/// Pool of bounce buffers in registered memory, through which slices pass. Buffers up to the size
/// of a page are registered at the start, so that such accesses need no CPU of the memory node.
/// More are registered when all are in use, and are kept.
pub(super) struct Bounce<N: Nic> {
    nic: N,
    pd: N::Pd,
    free: [Mutex<Vec<BounceSlot<N>>>; SIZES.len()],
}

/// A bounce buffer: part of a region.
struct BounceSlot<N: Nic> {
    region: Arc<N::Mr>,
    offset: usize,
}

/// A bounce buffer in use; dropping it returns it to the pool.
pub(super) struct BounceBuffer<N: Nic> {
    home: Arc<Bounce<N>>,
    class: usize,
    place: Option<BounceSlot<N>>,
}

impl<N: Nic> Bounce<N> {
    /// Registers the first bounce buffers.
    pub fn new(nic: &N, pd: &N::Pd) -> Result<Arc<Self>, Error> {
        let free = std::array::from_fn(|_| Mutex::new(Vec::new()));
        let bounce = Arc::new(Self { nic: nic.clone(), pd: pd.clone(), free });
        for class in 0..SIZES.len() - 1 {
            let place = bounce.grow(class)?;
            bounce.free[class].lock().push(place);
        }
        Ok(bounce)
    }

    /// Takes a bounce buffer for `len` bytes, at most [`BOUNCE_MAX`].
    pub fn take(self: &Arc<Self>, len: usize) -> Result<BounceBuffer<N>, Error> {
        let class = SIZES.iter().position(|size| len <= *size);
        let class = class.unwrap_or_else(|| panic!("{len} bytes exceed a bounce buffer"));
        let place = self.free[class].lock().pop();
        let place = match place {
            Some(place) => place,
            None => self.grow(class)?,
        };
        Ok(BounceBuffer { home: self.clone(), class, place: Some(place) })
    }

    #[cold]
    fn grow(&self, class: usize) -> Result<BounceSlot<N>, Error> {
        let (size, count) = (SIZES[class], COUNTS[class]);
        let memory = self.nic.alloc_dma(size * count)?;
        let region = Arc::new(self.nic.reg_mr(&self.pd, &memory, Access::LOCAL_ALL)?);
        let place = |i| BounceSlot { region: region.clone(), offset: i * size };
        self.free[class].lock().extend((1..count).map(place));
        Ok(place(0))
    }
}

impl<N: Nic> BounceBuffer<N> {
    fn place(&self) -> &BounceSlot<N> {
        self.place.as_ref().expect("present until drop")
    }

    /// Scatter/gather element of `len` bytes at `at`.
    pub fn sge(&self, at: usize, len: usize) -> Sge {
        let BounceSlot { region, offset } = self.place();
        let key: Key = region.key();
        let addr = region.memory().addr() + (*offset + at) as u64;
        Sge { addr, len: len as u32, lkey: key }
    }

    /// Copies bytes out that begin at `at`.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        let BounceSlot { region, offset } = self.place();
        region.memory().read(*offset + at, out);
    }

    /// Copies `data` to `at`.
    pub fn write(&self, at: usize, data: &[u8]) {
        let BounceSlot { region, offset } = self.place();
        region.memory().write(*offset + at, data);
    }

    /// The 8 bytes at `at` as an atomic returns them: big-endian.
    pub fn word(&self, at: usize) -> u64 {
        let BounceSlot { region, offset } = self.place();
        region.memory().load_be64(*offset + at)
    }
}

impl<N: Nic> Drop for BounceBuffer<N> {
    fn drop(&mut self) {
        self.home.free[self.class].lock().extend(self.place.take());
    }
}
