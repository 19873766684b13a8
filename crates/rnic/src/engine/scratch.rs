//! Buffers for the SGE lists of the WQE in execution, and the checks that fill them.

use super::local_wqe::{Fault, LocalWqe};
use super::queue::RECV_STRIDE_MAX;
use crate::dma::{Span, SpanList};
use crate::key_namespaces::KeyNamespaces;
use verbs::Access;
use verbs::wqe::Sges;

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
        for sge in list.iter() {
            let span = keys[me.namespace].local(sge.lkey, sge.addr, sge.len as u64, need, me.pd);
            self.local.push(span.map_err(Fault::local)?);
        }
        Ok(())
    }
}
