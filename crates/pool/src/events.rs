//! What the memory node's CPU sleeps on, and the wait for a few completions that come soon.

use std::thread;
use std::time::{Duration, Instant};

use fabric::{
    Access, Backoff, Completion, CompletionQueue, Error as VerbsError, Nic, Op, QpAttr, QueuePair,
    Receive, WorkRequest,
};

use crate::Error;
use crate::scheme::CpuEvents;

/// The completions of a CQ as [`CpuEvents`]. Waking is a NOP that completes into the same CQ (of
/// kind [`fabric::CompletionKind::Send`]; who polls the CQ passes over it).
pub struct CqEvents<N: Nic> {
    cq: N::Cq,
    bell: N::Qp,
}

/// Building blocks of the bell's queue: wakes that were not polled yet.
const BELL_BLOCKS: u32 = 16;

impl<N: Nic> CqEvents<N> {
    /// Completions that wakes may have in the CQ at one time.
    pub const MARGIN: u32 = BELL_BLOCKS;

    /// Sleeps on `cq`, which has room for [`CqEvents::MARGIN`] more completions than others put there.
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
        // A full queue means that earlier wakes were not seen yet: the sleeper is woken already. A
        // NIC that is gone has ended the sleep by itself.
        let _ = self.bell.post_send(&[WorkRequest { id: 0, op: Op::Nop, signaled: true }]);
    }
}

/// How long the NIC may take for work that touches only its own tables and memory.
const PATIENCE: Duration = Duration::from_secs(5);
/// Polls `cq` until `on`, which gets each completion, has said of `left` of them that they are what
/// it waits for. Spins briefly, then yields, then sleeps.
pub(crate) fn poll_until<C: CompletionQueue>(
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

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    use std::sync::OnceLock;
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, |n| n.get()))
}
