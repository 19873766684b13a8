//! Buffers for the SGE lists of the WQE in execution, and the checks that fill them.

use super::local_wqe::{Fault, LocalWqe};
use super::queue::RECV_STRIDE_MAX;
use crate::dma::{Span, SpanList};
use crate::key_namespaces::KeyNamespaces;
use crate::protection::KeyTable;
use verbs::wqe::{Sge, Sges};
use verbs::{Access, Pdn};

/// Buffers for the SGE lists of one WQE.
pub(super) struct Scratch {
    /// The requester's SGEs after their checks.
    pub local: SpanList,
    /// The receive WQE's SGEs after their checks.
    pub receive: SpanList,
    pub recv_wqe: [u8; RECV_STRIDE_MAX as usize],
}

impl Scratch {
    pub fn new() -> Self {
        Self {
            local: SpanList::new(),
            receive: SpanList::new(),
            recv_wqe: [0; RECV_STRIDE_MAX as usize],
        }
    }

    /// Checks the SGEs to gather into `local`; returns their total length.
    #[inline]
    pub fn gather(
        &mut self,
        keys: &KeyNamespaces,
        me: &LocalWqe,
        from: Sges<'_>,
    ) -> Result<u64, Fault> {
        match from {
            Sges::List(_) => self.list_local(keys, me, from, Access::LOCAL_READ)?,
            Sges::Inline(data) => {
                self.local.clear();
                self.local.push(Span::of_bytes(data));
            }
        }
        Ok(self.local.total())
    }

    /// Checks SGEs into `local`.
    #[inline(always)]
    pub fn list_local(
        &mut self,
        keys: &KeyNamespaces,
        me: &LocalWqe,
        list: Sges<'_>,
        need: Access,
    ) -> Result<(), Fault> {
        self.local.clear();
        let table = &keys[me.namespace];
        let mut sges = list.iter();
        let Some(first) = sges.next() else { return Ok(()) };
        let span = table.local(first.lkey, first.addr, first.len as u64, need, me.pd);
        self.local.push(span.map_err(Fault::local)?);
        match sges.next() {
            Some(second) => list_further(&mut self.local, table, me.pd, (second, sges), need),
            None => Ok(()),
        }
    }
}

/// Checks the SGEs after the first into `local`. Not inlined: few WQEs have more than one SGE, and
/// the registers of the caller would be spilled for each.
#[inline(never)]
fn list_further(
    local: &mut SpanList,
    table: &KeyTable,
    pd: Pdn,
    (second, rest): (Sge, impl Iterator<Item = Sge>),
    need: Access,
) -> Result<(), Fault> {
    for sge in std::iter::once(second).chain(rest) {
        let span = table.local(sge.lkey, sge.addr, sge.len as u64, need, pd);
        local.push(span.map_err(Fault::local)?);
    }
    Ok(())
}
