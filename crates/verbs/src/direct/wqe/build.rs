//! Encoding of WQEs.

use super::{INLINE, MAX_BYTES, Remote, SEGMENT, Sge, Umr, WQEBB, opcode};
use crate::{Cqn, Key, Qpn};

/// Encodes one WQE at a time into its own buffer.
///
/// ```
/// use verbs::wqe::{Builder, Remote, Sge};
/// use verbs::{Key, Qpn};
///
/// let mut b = Builder::new(Qpn::new(0x11), 0);
/// let from = Sge { addr: 0x1000, len: 64, lkey: Key(0x100) };
/// b.rdma_write(Remote { addr: 0x2000, rkey: Key(0x200) }, &[from]).signaled();
/// assert_eq!(b.bytes().len(), 64);
/// ```
pub struct Builder {
    qpn: Qpn,
    index: u16,
    bytes: [u8; MAX_BYTES],
    segments: usize,
}

impl Builder {
    /// Starts a WQE of queue `qpn` at building-block index `index`. The WQE is a NOP until an
    /// operation is chosen.
    pub fn new(qpn: Qpn, index: u16) -> Self {
        let mut b = Self { qpn, index, bytes: [0; MAX_BYTES], segments: 1 };
        b.nop();
        b
    }

    /// Starts the next WQE, at `index`, in the same buffer. The buffer keeps the previous WQE until
    /// an operation is chosen.
    #[inline]
    pub fn restart(&mut self, index: u16) {
        self.index = index;
    }

    /// The encoded WQE, padded with zeros to whole building blocks.
    pub fn bytes(&self) -> &[u8] {
        self.building_blocks().as_flattened()
    }

    /// The encoded WQE as building blocks.
    #[inline]
    pub fn building_blocks(&self) -> &[[u8; WQEBB]] {
        &self.bytes.as_chunks().0[..self.blocks() as usize]
    }

    /// Number of building blocks of the WQE.
    pub fn blocks(&self) -> u32 {
        self.segments.div_ceil(WQEBB / SEGMENT) as u32
    }

    /// Requests a completion.
    pub fn signaled(&mut self) -> &mut Self {
        self.flags(super::CE_SIGNALED)
    }

    /// Sets bits of `fm_ce_se`.
    pub fn flags(&mut self, fm_ce_se: u8) -> &mut Self {
        self.add64(8, (fm_ce_se as u64) << 32)
    }

    /// NOP of one segment.
    pub fn nop(&mut self) -> &mut Self {
        self.start(opcode::NOP, 0, 1, 0)
    }

    /// NOP that fills `blocks` building blocks, 1 to 15.
    pub fn nop_filling(&mut self, blocks: u32) -> &mut Self {
        assert!((1..=15).contains(&blocks), "a NOP fills 1 to 15 building blocks, not {blocks}");
        self.start(opcode::NOP, 0, blocks as usize * 4, 0)
    }

    /// SEND of the bytes that `from` gathers.
    pub fn send(&mut self, from: &[Sge]) -> &mut Self {
        self.start(opcode::SEND, 0, 1 + from.len(), 0).sges(1, from)
    }

    /// SEND with immediate data.
    pub fn send_imm(&mut self, from: &[Sge], imm: u32) -> &mut Self {
        self.start(opcode::SEND_IMM, 0, 1 + from.len(), imm).sges(1, from)
    }

    /// SEND of `data`, stored in the WQE. At most [`Builder::max_inline`] bytes.
    pub fn send_inline(&mut self, data: &[u8]) -> &mut Self {
        let inline = Self::inline_segments(data.len());
        self.start(opcode::SEND, 0, 1 + inline, 0).inline(1, data)
    }

    /// SEND of `data`, stored in the WQE, with immediate data.
    pub fn send_imm_inline(&mut self, data: &[u8], imm: u32) -> &mut Self {
        let inline = Self::inline_segments(data.len());
        self.start(opcode::SEND_IMM, 0, 1 + inline, imm).inline(1, data)
    }

    /// SEND that invalidates the peer's window `key`.
    pub fn send_invalidate(&mut self, from: &[Sge], key: Key) -> &mut Self {
        self.start(opcode::SEND_INVAL, 0, 1 + from.len(), key.0).sges(1, from)
    }

    /// SEND of `data`, stored in the WQE, that invalidates the peer's window `key`.
    pub fn send_invalidate_inline(&mut self, data: &[u8], key: Key) -> &mut Self {
        let inline = Self::inline_segments(data.len());
        self.start(opcode::SEND_INVAL, 0, 1 + inline, key.0).inline(1, data)
    }

    /// RDMA WRITE of the bytes that `from` gathers.
    pub fn rdma_write(&mut self, to: Remote, from: &[Sge]) -> &mut Self {
        self.start(opcode::RDMA_WRITE, 0, 2 + from.len(), 0).remote(to).sges(2, from)
    }

    /// RDMA WRITE of `data`, stored in the WQE.
    pub fn rdma_write_inline(&mut self, to: Remote, data: &[u8]) -> &mut Self {
        let inline = Self::inline_segments(data.len());
        self.start(opcode::RDMA_WRITE, 0, 2 + inline, 0).remote(to).inline(2, data)
    }

    /// RDMA WRITE with immediate data, which also completes a receive at the peer.
    pub fn rdma_write_imm(&mut self, to: Remote, from: &[Sge], imm: u32) -> &mut Self {
        self.start(opcode::RDMA_WRITE_IMM, 0, 2 + from.len(), imm).remote(to).sges(2, from)
    }

    /// RDMA WRITE of `data`, stored in the WQE, with immediate data.
    pub fn rdma_write_imm_inline(&mut self, to: Remote, data: &[u8], imm: u32) -> &mut Self {
        let inline = Self::inline_segments(data.len());
        self.start(opcode::RDMA_WRITE_IMM, 0, 2 + inline, imm).remote(to).inline(2, data)
    }

    /// RDMA READ, scattered over `to`. Its length is the sum of the SGEs' lengths.
    pub fn rdma_read(&mut self, from: Remote, to: &[Sge]) -> &mut Self {
        self.start(opcode::RDMA_READ, 0, 2 + to.len(), 0).remote(from).sges(2, to)
    }

    /// CAS: if the word at `at` equals `compare`, it is replaced by `swap`. The old value is
    /// written to `old`.
    pub fn compare_swap(&mut self, at: Remote, compare: u64, swap: u64, old: Sge) -> &mut Self {
        self.start(opcode::ATOMIC_CS, 0, 4, 0)
            .remote(at)
            .put64(32, swap)
            .put64(40, compare)
            .sges(3, &[old])
    }

    /// FAA: adds `add`. The old value is written to `old`.
    pub fn fetch_add(&mut self, at: Remote, add: u64, old: Sge) -> &mut Self {
        self.start(opcode::ATOMIC_FA, 0, 4, 0).remote(at).put64(32, add).sges(3, &[old])
    }

    /// Masked CAS: compares the bits of `compare_mask`, replaces the bits of `swap_mask`.
    pub fn masked_compare_swap(
        &mut self,
        at: Remote,
        compare: (u64, u64),
        swap: (u64, u64),
        old: Sge,
    ) -> &mut Self {
        let ((compare, compare_mask), (swap, swap_mask)) = (compare, swap);
        self.start(opcode::ATOMIC_MASKED_CS, EXTENDED_ATOMIC_8, 5, 0)
            .remote(at)
            .put64(32, swap)
            .put64(40, compare)
            .put64(48, swap_mask)
            .put64(56, compare_mask)
            .sges(4, &[old])
    }

    /// Masked FAA: the word consists of fields, each of which ends at a set bit of `boundary`.
    /// The NIC adds field by field, so that no field carries into the next one.
    pub fn masked_fetch_add(&mut self, at: Remote, add: u64, boundary: u64, old: Sge) -> &mut Self {
        self.start(opcode::ATOMIC_MASKED_FA, EXTENDED_ATOMIC_8, 4, 0)
            .remote(at)
            .put64(32, add)
            .put64(40, boundary)
            .sges(3, &[old])
    }

    /// UMR: binds or unbinds a window.
    pub fn umr(&mut self, umr: &Umr) -> &mut Self {
        self.start(opcode::UMR, 0, umr.segments(), umr.key.0);
        umr.emit(&mut self.bytes);
        self
    }

    /// LOCAL_INV of `key`.
    pub fn local_invalidate(&mut self, key: Key) -> &mut Self {
        self.start(opcode::LOCAL_INVAL, 0, 1, key.0)
    }

    /// WAIT until `cqn` has counted its completion number `index` (24 bits; the first is 0).
    pub fn wait(&mut self, cqn: Cqn, index: u32) -> &mut Self {
        self.enable(opcode::WAIT, index, cqn.raw())
    }

    /// SEND_EN: lets the managed send queue `qpn` execute WQEs up to building-block index `index`.
    pub fn send_enable(&mut self, qpn: Qpn, index: u32) -> &mut Self {
        self.enable(opcode::SEND_EN, index, qpn.raw())
    }

    /// RECV_EN: lets the managed receive queue of `qpn` use WQEs up to `index`.
    pub fn receive_enable(&mut self, qpn: Qpn, index: u32) -> &mut Self {
        self.enable(opcode::RECV_EN, index, qpn.raw())
    }

    /// Maximum number of inline bytes behind `leading` segments.
    pub const fn max_inline(leading: usize) -> usize {
        (super::MAX_SEGMENTS - leading) * SEGMENT - 4
    }

    fn enable(&mut self, op: u8, index: u32, number: u32) -> &mut Self {
        self.start(op, 0, 2, 0).put32(24, index).put32(28, number)
    }

    #[inline]
    fn start(&mut self, op: u8, opmod: u8, segments: usize, imm: u32) -> &mut Self {
        assert!(
            (1..=super::MAX_SEGMENTS).contains(&segments),
            "a WQE has at most {} segments, this one {segments}",
            super::MAX_SEGMENTS
        );
        let old = self.segments.max(segments).div_ceil(WQEBB / SEGMENT);
        let (first, more) = self.bytes.as_chunks_mut::<WQEBB>().0.split_at_mut(1);
        // Most WQEs have one block, which a few stores clear.
        first[0] = [0; WQEBB];
        if old > 1 {
            more[..old - 1].fill([0; WQEBB]);
        }
        self.segments = segments;
        let what = (opmod as u32) << 24 | (self.index as u32) << 8 | op as u32;
        let whose = self.qpn.raw() << 8 | segments as u32;
        self.put64(0, (what as u64) << 32 | whose as u64).put64(8, imm as u64)
    }

    #[inline]
    fn remote(&mut self, r: Remote) -> &mut Self {
        self.put64(16, r.addr).put64(24, (r.rkey.0 as u64) << 32)
    }

    #[inline]
    fn sges(&mut self, first_segment: usize, list: &[Sge]) -> &mut Self {
        for (i, sge) in list.iter().enumerate() {
            let at = (first_segment + i) * SEGMENT;
            self.put64(at, (sge.len as u64) << 32 | sge.lkey.0 as u64).put64(at + 8, sge.addr);
        }
        self
    }

    fn inline_segments(len: usize) -> usize {
        (4 + len).div_ceil(SEGMENT)
    }

    fn inline(&mut self, first_segment: usize, data: &[u8]) -> &mut Self {
        let at = first_segment * SEGMENT;
        self.put32(at, INLINE | data.len() as u32);
        self.bytes[at + 4..at + 4 + data.len()].copy_from_slice(data);
        self
    }

    /// Sets the 4 bytes at `at`, which are zero.
    fn put32(&mut self, at: usize, v: u32) -> &mut Self {
        let shift = if at.is_multiple_of(8) { 32 } else { 0 };
        self.add64(at - at % 8, (v as u64) << shift)
    }

    /// Sets bits of the word at `at`. Stores whole words, because posting then loads the WQE in
    /// words: a load that spans several smaller, pending stores has to wait for them.
    #[inline]
    fn add64(&mut self, at: usize, v: u64) -> &mut Self {
        let word = self.word(at);
        *word = (u64::from_be_bytes(*word) | v).to_be_bytes();
        self
    }

    #[inline]
    fn put64(&mut self, at: usize, v: u64) -> &mut Self {
        *self.word(at) = v.to_be_bytes();
        self
    }

    #[inline]
    fn word(&mut self, at: usize) -> &mut [u8; 8] {
        debug_assert!(at.is_multiple_of(8));
        &mut self.bytes.as_chunks_mut().0[at / 8]
    }
}

/// Operation modifier of masked atomics: extended atomic on 8 bytes.
const EXTENDED_ATOMIC_8: u8 = 9;

impl Sge {
    /// Encodes the SGE, as in a WQE and in a receive WQE.
    pub fn to_bytes(&self) -> [u8; SEGMENT] {
        let mut out = [0; SEGMENT];
        out[..4].copy_from_slice(&self.len.to_be_bytes());
        out[4..8].copy_from_slice(&self.lkey.0.to_be_bytes());
        out[8..].copy_from_slice(&self.addr.to_be_bytes());
        out
    }
}
