//! Work requests into WQEs.

use rnic::wqe::{Builder, MAX_SEGMENTS, SEGMENT, WQEBB};

use crate::{Error, Op};

/// The most scatter-gather entries of a work request.
pub(super) const MAX_SGES: usize = MAX_SEGMENTS - 2;
/// The most bytes of inline data.
pub(super) const MAX_INLINE: usize = Builder::max_inline(2);

/// Building blocks that the WQE of `op` takes, if it is one.
#[inline]
pub(super) fn blocks(op: &Op<'_>) -> Result<u32, Error> {
    let segments = match *op {
        Op::Nop | Op::LocalInvalidate { .. } => 1,
        Op::Send { from } => 1 + sges(from.len())?,
        Op::Read { to, .. } => 2 + sges(to.len())?,
        Op::Write { from, .. } => 2 + sges(from.len())?,
        Op::SendInline { data } => 1 + inline(data.len())?,
        Op::WriteInline { data, .. } => 2 + inline(data.len())?,
        Op::CompareSwap { .. } | Op::FetchAdd { .. } | Op::MaskedFetchAdd { .. } => 4,
        Op::MaskedCompareSwap { .. } => 5,
        Op::Window(umr) => umr.segments(),
    };
    Ok((segments * SEGMENT).div_ceil(WQEBB) as u32)
}

/// Encodes `op`, which [`blocks`] has found good.
#[inline]
pub(super) fn build(b: &mut Builder, op: &Op<'_>) {
    match *op {
        Op::Nop => b.nop(),
        Op::Send { from } => b.send(from),
        Op::SendInline { data } => b.send_inline(data),
        Op::Read { from, to } => b.rdma_read(from, to),
        Op::Write { to, from } => b.rdma_write(to, from),
        Op::WriteInline { to, data } => b.rdma_write_inline(to, data),
        Op::CompareSwap { at, compare, swap, old } => b.compare_swap(at, compare, swap, old),
        Op::FetchAdd { at, add, old } => b.fetch_add(at, add, old),
        Op::MaskedFetchAdd { at, add, boundary, old } => b.masked_fetch_add(at, add, boundary, old),
        Op::MaskedCompareSwap { at, compare, compare_mask, swap, swap_mask, old } => {
            b.masked_compare_swap(at, (compare, compare_mask), (swap, swap_mask), old)
        }
        Op::Window(umr) => b.umr(umr),
        Op::LocalInvalidate { key } => b.local_invalidate(key),
    };
}

fn sges(count: usize) -> Result<usize, Error> {
    if count <= MAX_SGES {
        return Ok(count);
    }
    let what = format!("{count} scatter-gather entries; a WQE has room for {MAX_SGES}");
    Err(Error::BadRequest { what })
}

fn inline(bytes: usize) -> Result<usize, Error> {
    if bytes <= MAX_INLINE {
        return Ok((4 + bytes).div_ceil(SEGMENT));
    }
    let what = format!("{bytes} bytes of inline data; a WQE has room for {MAX_INLINE}");
    Err(Error::BadRequest { what })
}
