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
/// copy bytes before it validates them, because peers may write at any time.
pub trait RegionEngine: Send {
    /// Returns whether the peer may READ these bytes. The NIC asks again for each part of a READ
    /// that takes several steps or packets.
    fn may_read(&self, tag: u64, offset: u64, len: u64) -> bool;

    /// Returns whether the peer may WRITE these bytes. The NIC asks again for each part of a WRITE
    /// that takes several steps or packets.
    fn may_write(&self, tag: u64, offset: u64, len: u64) -> bool;

    /// A WRITE of these bytes has ended. Later work requests of the same QP see all that this call
    /// changes.
    fn written(&mut self, tag: u64, offset: u64, len: u64);
}
