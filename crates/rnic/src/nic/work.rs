//! Encodes work requests as WQEs.

use verbs::wqe::{Builder, FM_FENCE, MAX_SEGMENTS, SE_SOLICITED, SEGMENT, Umr, WQEBB, umr};
use verbs::{Bind, Data, Error, MwKind, Op, Qpn, SendFlags};

/// Maximum scatter-gather entries of a work request.
pub(super) const MAX_SGES: usize = MAX_SEGMENTS - 2;
/// Maximum bytes of inline data.
pub(super) const MAX_INLINE: usize = Builder::max_inline(2);

/// Returns the building blocks of the WQE of `op`, or an error if `op` cannot be encoded.
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
        Op::SendImm { data, .. } | Op::SendInvalidate { data, .. } => 1 + carried(&data)?,
        Op::WriteImm { data, .. } => 2 + carried(&data)?,
        Op::Window(umr) => umr.segments(),
        Op::Bind(_) => umr::BIND_SEGMENTS,
        Op::With { op: Op::With { .. }, .. } => {
            let what = "flags on a request that already has flags".to_string();
            return Err(Error::BadRequest { what });
        }
        Op::With { op, .. } => return blocks(op),
    };
    Ok((segments * SEGMENT).div_ceil(WQEBB) as u32)
}

/// Encodes `op`, which [`blocks`] has accepted, for a queue of `qpn`.
#[inline]
pub(super) fn build(b: &mut Builder, qpn: Qpn, op: &Op<'_>) {
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
        Op::SendImm { data: Data::Gather(from), imm } => b.send_imm(from, imm),
        Op::SendImm { data: Data::Inline(data), imm } => b.send_imm_inline(data, imm),
        Op::SendInvalidate { data: Data::Gather(from), key } => b.send_invalidate(from, key),
        Op::SendInvalidate { data: Data::Inline(data), key } => b.send_invalidate_inline(data, key),
        Op::WriteImm { to, data: Data::Gather(from), imm } => b.rdma_write_imm(to, from, imm),
        Op::WriteImm { to, data: Data::Inline(data), imm } => {
            b.rdma_write_imm_inline(to, data, imm)
        }
        Op::Window(umr) => b.umr(umr),
        Op::Bind(bind) => b.umr(&umr_of(bind, qpn)),
        Op::LocalInvalidate { key } => b.local_invalidate(key),
        Op::With { flags, op } => {
            build(b, qpn, op);
            b.flags(bits(flags))
        }
    };
}

/// Returns the UMR of a bind that is posted to `qpn`.
fn umr_of(bind: &Bind, qpn: Qpn) -> Umr {
    let Bind { key, kind, tag, region, addr, len, access, zero_based } = *bind;
    let umr = match kind {
        MwKind::Type1 => Umr::bind_type1(key, tag, access, region, addr, len),
        MwKind::Type2 => Umr::bind(key, tag, qpn, access, region, addr, len),
    };
    if zero_based { umr.zero_based() } else { umr }
}

/// Returns the `fm_ce_se` bits of `flags`.
fn bits(flags: SendFlags) -> u8 {
    let bit = |set, bit| if set { bit } else { 0 };
    bit(flags.fence, FM_FENCE) | bit(flags.solicited, SE_SOLICITED)
}

fn carried(data: &Data<'_>) -> Result<usize, Error> {
    match data {
        Data::Gather(from) => sges(from.len()),
        Data::Inline(data) => inline(data.len()),
    }
}

fn sges(count: usize) -> Result<usize, Error> {
    if count <= MAX_SGES {
        return Ok(count);
    }
    let what = format!("{count} scatter-gather entries; a WQE holds at most {MAX_SGES}");
    Err(Error::BadRequest { what })
}

fn inline(bytes: usize) -> Result<usize, Error> {
    if bytes <= MAX_INLINE {
        return Ok((4 + bytes).div_ceil(SEGMENT));
    }
    let what = format!("{bytes} bytes of inline data; a WQE holds at most {MAX_INLINE}");
    Err(Error::BadRequest { what })
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbs::Sge;
    use verbs::wqe::Control;

    fn control(op: &Op<'_>) -> Control {
        blocks(op).expect("a WQE");
        let mut builder = Builder::new(Qpn::new(7), 0);
        build(&mut builder, Qpn::new(7), op);
        Control::from_bytes(builder.bytes()[..SEGMENT].try_into().expect("16 bytes"))
    }

    #[test]
    fn flags_are_encoded_in_the_wqe() {
        // Between QPs of one NIC a fence has no effect; only the WQE shows it.
        let list = [Sge::default()];
        let op = Op::Send { from: &list };
        for (fence, solicited) in [(false, false), (true, false), (false, true), (true, true)] {
            let flags = SendFlags { fence, solicited };
            let bits = control(&Op::With { flags, op: &op }).fm_ce_se;
            assert_eq!((bits & FM_FENCE != 0, bits & SE_SOLICITED != 0), (fence, solicited));
        }
        let flags = SendFlags::default();
        let twice = Op::With { flags, op: &op };
        let refused = blocks(&Op::With { flags, op: &twice });
        assert!(matches!(refused, Err(Error::BadRequest { .. })), "{refused:?}");
    }
}
