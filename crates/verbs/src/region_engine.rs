//! Engines behind memory regions.
//!
//! An engine is logic in the NIC that decides over each access to one region, and acts after each
//! WRITE into it. TDMEM's donor engine is an FPGA on the path of every access (TDMEM §5.3.3); here
//! it is an engine of the software NIC. No hardware NIC has such regions.

/// Logic that guards a region and executes the commands that peers write into it.
///
/// The NIC calls the engine in the thread that executes the access, one call at a time, so a call
/// must take a bounded time and must not wait. Offsets are relative to the first byte of the
/// region. The caller has checked key, PD, rights and range. `tag` is the tag of the QP through
/// which the peer accesses the region: the QP's owner has set it
/// ([`QpChange::Tag`](crate::QpChange::Tag)), so that a peer cannot choose it.
///
/// All bytes, offsets and lengths are a peer's. An engine must not panic on any of them, and must
/// copy bytes before it validates them, because peers may write at any time. A request has up to
/// 2^31 bytes: an engine that looks up each page must refuse requests that take too long.
///
/// An access that the engine refuses completes like an access with an unknown key, and breaks its
/// QP. Accesses of length 0, atomics, and accesses through the region's lkey do not reach the
/// engine.
///
/// The NIC drops the engine with the region, in the thread that runs the NIC. Therefore an engine
/// must own no handle of a NIC's object: the drop of such a handle calls the NIC. It may own the
/// [`DmaMemory`](crate::DmaMemory) of its region.
pub trait RegionEngine: Send {
    /// Returns whether the peer may READ these bytes. The NIC asks for all bytes when a READ
    /// begins, and again, for all bytes or for the next ones, before each later step or packet
    /// reads memory. A READ that is repeated after a loss reads the memory of that later time.
    fn may_read(&self, tag: u64, offset: u64, len: u64) -> bool;

    /// Returns whether the peer may WRITE these bytes. The NIC asks for all bytes when a WRITE
    /// begins, and again, for all bytes or for the next ones, before each step or packet writes
    /// memory.
    fn may_write(&self, tag: u64, offset: u64, len: u64) -> bool;

    /// A WRITE of these bytes has ended. Later work requests of the same QP see all that this call
    /// changes.
    ///
    /// The NIC calls this once for each WRITE, however often its packets were repeated, and before
    /// the completion of a WRITE with immediate data. A WRITE that fails after some of its bytes
    /// were written has no call.
    fn written(&mut self, tag: u64, offset: u64, len: u64);
}
