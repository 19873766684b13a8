//! Wake-up of the memory node's CPU, and the wait for a few completions that arrive soon.

use std::time::{Duration, Instant};

use verbs::{
    Access, Backoff, Completion, CompletionQueue, Error as VerbsError, Nic, Op, QpAttr, QueuePair,
    Receive, WorkRequest,
};

use crate::CpuEvents;
use crate::Error;

/// A CQ as a [`CpuEvents`] source. A wake-up is a NOP that completes into the same CQ as a
/// completion of kind [`verbs::CompletionKind::Send`]; the code that polls the CQ ignores it.
pub struct CqEvents<N: Nic> {
    cq: N::Cq,
    bell: N::Qp,
}

/// Send blocks of the wake-up QP: wake-ups whose completions were not polled yet.
const BELL_BLOCKS: u32 = 16;

impl<N: Nic> CqEvents<N> {
    /// Completions of wake-ups that can be in the CQ at the same time.
    pub const MARGIN: u32 = BELL_BLOCKS;

    /// An event source on `cq`, which must have room for [`CqEvents::MARGIN`] completions more than
    /// its other QPs need.
    pub fn new(nic: &N, pd: &N::Pd, cq: &N::Cq) -> Result<Self, Error> {
        let attr = QpAttr {
            send_cq: cq,
            recv_cq: cq,
            send_blocks: BELL_BLOCKS,
            receive: Receive::None,
            access: Access::NONE,
        };
        let bell = nic.create_qp(pd, attr)?;
        bell.connect(bell.qpn())?;
        Ok(Self { cq: cq.clone(), bell })
    }
}

impl<N: Nic> CpuEvents for CqEvents<N> {
    fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        Ok(self.cq.wait(timeout)?)
    }

    fn wake(&self) {
        // A full queue means that earlier wake-ups are still pending, so the sleeping thread wakes
        // anyway. If the NIC has exited, the wait ends by itself.
        let _ = self.bell.post_send(&[WorkRequest { id: 0, op: Op::Nop, signaled: true }]);
    }
}

/// Time limit for NIC work that touches only the NIC's own tables and memory.
const PATIENCE: Duration = Duration::from_secs(5);
/// Polls `cq` until `on`, which receives every completion, has returned true for `left` of them.
/// Spins briefly, then yields, then sleeps.
pub fn poll_until<C: CompletionQueue>(
    cq: &C,
    mut left: usize,
    mut on: impl FnMut(&Completion) -> bool,
) -> Result<(), Error> {
    let mut batch = [Completion::EMPTY; 32];
    let mut backoff = Backoff::on::<C>();
    let mut deadline = None;
    while left > 0 {
        let n = cq.poll(&mut batch);
        if n > 0 {
            left -= batch[..n].iter().filter(|c| on(c)).count().min(left);
            backoff = Backoff::on::<C>();
        } else if !backoff.snooze() {
            cq.wait(Duration::from_millis(100))?;
            if *deadline.get_or_insert_with(|| Instant::now() + PATIENCE) < Instant::now() {
                return Err(Error::Verbs(VerbsError::Gone {
                    attempt: "waiting for the NIC to bind windows".into(),
                    why: format!("{left} completions did not come in {PATIENCE:?}"),
                }));
            }
        }
    }
    Ok(())
}
