//! Wake-up of the memory node's CPU, and the wait for a few completions that arrive soon.

use std::time::Duration;

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

/// Time limit for NIC work that touches only the NIC's own tables and memory: the longest time
/// without a completion, by the clock of the NIC.
const PATIENCE: Duration = Duration::from_secs(5);
/// Length of one wait for a completion.
const WAIT: Duration = Duration::from_millis(100);

/// Polls `cq` until `on`, which receives every completion, has returned true for `left` of them.
/// Spins briefly, then yields, then sleeps.
pub fn poll_until<C: CompletionQueue>(
    cq: &C,
    mut left: usize,
    mut on: impl FnMut(&Completion) -> bool,
) -> Result<(), Error> {
    let mut batch = [Completion::EMPTY; 32];
    let mut backoff = Backoff::on::<C>();
    let mut idle = Duration::ZERO;
    while left > 0 {
        let n = cq.poll(&mut batch);
        if n > 0 {
            left -= batch[..n].iter().filter(|c| on(c)).count().min(left);
            (backoff, idle) = (Backoff::on::<C>(), Duration::ZERO);
        } else if !backoff.snooze() {
            let before = cq.now();
            cq.wait(WAIT)?;
            // A clock that leaps, as after a pause of the machine, counts as one wait.
            idle += cq.now().saturating_sub(before).min(WAIT);
            if idle >= PATIENCE {
                return Err(Error::Verbs(VerbsError::Gone {
                    attempt: "waiting for the NIC to bind windows".into(),
                    why: format!("{left} completions did not come in {PATIENCE:?}"),
                }));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use verbs::Cqn;

    use super::*;

    /// A CQ with virtual time: completions come at given times, and waits pass in no time.
    #[derive(Clone, Default)]
    struct VirtualCq(Arc<Mutex<VirtualTime>>);

    #[derive(Default)]
    struct VirtualTime {
        now: Duration,
        /// Time that the clock leaps during the next wait.
        leap: Duration,
        /// Times of completions that were not polled yet.
        coming: Vec<Duration>,
        waits: u32,
    }

    impl CompletionQueue for VirtualCq {
        const VIRTUAL: bool = true;

        fn cqn(&self) -> Cqn {
            Cqn::new(0)
        }

        fn entries(&self) -> u32 {
            64
        }

        fn now(&self) -> Duration {
            self.0.lock().now
        }

        fn poll(&self, _: &mut [Completion]) -> usize {
            let mut time = self.0.lock();
            let now = time.now;
            let before = time.coming.len();
            time.coming.retain(|at| *at > now);
            before - time.coming.len()
        }

        fn wait(&self, timeout: Duration) -> Result<bool, VerbsError> {
            self.wait_unless(timeout, &|| false)
        }

        fn wait_unless(&self, timeout: Duration, _: &dyn Fn() -> bool) -> Result<bool, VerbsError> {
            let mut time = self.0.lock();
            time.waits += 1;
            assert!(time.waits < 10_000, "the limit is not that of the CQ's clock");
            let end = time.now + timeout;
            let next = time.coming.iter().min().copied().filter(|at| *at <= end);
            time.now = next.unwrap_or(end) + std::mem::take(&mut time.leap);
            Ok(next.is_some())
        }

        fn wake(&self) {}
    }

    #[test]
    fn limit_of_a_wait_is_time_of_the_nic_without_a_completion() {
        let cq = VirtualCq::default();
        // Each completion comes before the limit, all of them together after it.
        cq.0.lock().coming = (1..=4).map(|i| i * Duration::from_secs(4)).collect();
        let seen = Cell::new(0);
        let count = |_: &Completion| seen.replace(seen.get() + 1) < 4;
        poll_until(&cq, 4, count).expect("the completions come");
        assert_eq!((seen.get(), cq.now()), (4, Duration::from_secs(16)));

        let begin = cq.now();
        let error = poll_until(&cq, 1, count).expect_err("nothing comes");
        assert!(error.to_string().contains("1 completions did not come in 5s"), "{error}");
        assert_eq!(cq.now() - begin, PATIENCE);
    }

    #[test]
    fn leap_of_the_clock_is_not_a_wait_without_end() {
        let cq = VirtualCq::default();
        {
            let mut time = cq.0.lock();
            (time.leap, time.coming) = (Duration::from_secs(3600), vec![Duration::from_secs(3601)]);
        }
        poll_until(&cq, 1, |_| true).expect("the completion comes after the leap");
    }
}
