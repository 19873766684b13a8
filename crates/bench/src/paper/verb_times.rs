//! Times of verbs that the memory node's CPU calls: registration of memory, binding and unbinding
//! of windows, changes of QPs.

use std::time::Duration;

use verbs::wqe::Umr;
use verbs::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Nic, Op, QpAttr,
    QpChange, QueuePair, Receive, Rereg, WorkRequest,
};

use crate::Error;
use bench_report::histogram::Latencies;

/// Measured times.
#[derive(Clone, Debug, Default)]
pub struct VerbTimes {
    /// Times of memory regions, by size.
    pub regions: Vec<Region>,
    /// Time to bind a window, from the post to the completion.
    pub bind: Latencies,
    /// Mean time to bind one window of a long sequence of binds, each waited for.
    pub pass: Latencies,
    /// Time to unbind a window.
    pub unbind: Latencies,
    /// Time to unbind a window and bind it again under a new key.
    pub rebind: Latencies,
    /// Time to allocate a window.
    pub allocate: Latencies,
    /// Time to change the access flags of a QP.
    pub flag: Latencies,
    /// Time to re-establish one side of a connected QP.
    pub reestablish: Latencies,
}

/// Times of a memory region.
#[derive(Clone, Debug, Default)]
pub struct Region {
    /// Size of the region.
    pub bytes: u64,
    /// Time to register the region.
    pub register: Latencies,
    /// Time to deregister the region.
    pub deregister: Latencies,
    /// Time to change the region's access rights, which gives it a new key; its pages stay pinned.
    pub reregister: Latencies,
}

/// Number of binds in a sequence: windows of 4 MiB over 100 GiB.
const PASS: usize = 25 << 10;

/// Windows of a sequence that exist at a time.
const PASS_STEP: usize = 4 << 10;

/// Bytes of the windows that are bound (FineMem, table 1).
const WINDOW_BYTES: u64 = 4 << 20;

/// Times the verbs on the calling thread with the clock `now_ns`.
///
/// # Errors
/// Errors of the verbs.
pub fn measure<N: Nic>(
    nic: &N,
    sizes: &[u64],
    rounds: u32,
    now_ns: impl Fn() -> u64,
) -> Result<VerbTimes, Error> {
    let mut times = VerbTimes::default();
    let pd = nic.alloc_pd()?;
    for &bytes in sizes {
        let memory = nic.alloc_dma(bytes as usize)?;
        let mut region_times = Region { bytes, ..Region::default() };
        for _ in 0..rounds.div_ceil(10) {
            let start = now_ns();
            let region = nic.reg_mr(&pd, &memory, Access::REMOTE_ALL | Access::LOCAL_WRITE)?;
            let registered = now_ns();
            let access = Some(Access::REMOTE_READ);
            let region = nic.rereg_mr(region, Rereg { access, ..Rereg::default() })?;
            let reregistered = now_ns();
            drop(region);
            region_times.register.record_ns(registered - start);
            region_times.reregister.record_ns(reregistered - registered);
            region_times.deregister.record_ns(now_ns() - reregistered);
        }
        times.regions.push(region_times);
    }
    windows(nic, &pd, rounds, &now_ns, &mut times)?;
    Ok(times)
}

fn windows<N: Nic>(
    nic: &N,
    pd: &N::Pd,
    rounds: u32,
    now_ns: &impl Fn() -> u64,
    times: &mut VerbTimes,
) -> Result<(), Error> {
    let memory = nic.alloc_dma(WINDOW_BYTES as usize)?;
    let access = Access::REMOTE_ALL | Access::LOCAL_WRITE;
    let region = nic.reg_mr(pd, &memory, access)?;
    let window = nic.alloc_mw(pd)?;
    let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false })?;
    let make = || {
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 16,
            receive: Receive::None,
            access: Access::REMOTE_ALL,
        };
        nic.create_qp(pd, attr)
    };
    let (one, other) = (make()?, make()?);
    one.connect(other.qpn())?;
    other.connect(one.qpn())?;
    let mut key = window.key();
    let mut done = [Completion::EMPTY];
    let mut execute = |umr: &Umr| -> Result<(), Error> {
        one.post_send(&[WorkRequest { id: 0, op: Op::Window(umr), signaled: true }])?;
        while cq.poll(&mut done) == 0 {
            cq.wait(Duration::MAX)?;
        }
        done[0].ok().map(drop).map_err(|status| Error::Verb { what: "bind a window", status })
    };
    for _ in 0..rounds {
        let tag = key.tag().wrapping_add(1);
        let start = now_ns();
        let (base, bytes) = (memory.addr(), WINDOW_BYTES as u32);
        execute(&Umr::bind(key, tag, one.qpn(), Access::REMOTE_ALL, region.key(), base, bytes))?;
        let bound = now_ns();
        key = Key::new(key.index(), tag);
        execute(&Umr::unbind(key, true))?;
        let unbound = now_ns();
        times.bind.record_ns(bound - start);
        times.unbind.record_ns(unbound - bound);
        times.rebind.record_ns(unbound - start);
    }
    // All windows cover the same 4 MiB, because a bind does not access the memory. The windows are
    // allocated in steps, because a function may have 8,192 keys; their allocation is not timed.
    let count = PASS * rounds.min(100) as usize / 100;
    let mut pass_ns = 0;
    for first in (0..count).step_by(PASS_STEP) {
        let windows = nic.alloc_mws(pd, PASS_STEP.min(count - first))?;
        let start = now_ns();
        for key in windows.iter().map(MemoryWindow::key) {
            let tag = key.tag().wrapping_add(1);
            let (base, bytes) = (memory.addr(), WINDOW_BYTES as u32);
            let access = Access::REMOTE_ALL;
            execute(&Umr::bind(key, tag, one.qpn(), access, region.key(), base, bytes))?;
        }
        pass_ns += now_ns() - start;
    }
    times.pass.record_ns(pass_ns / count as u64);
    for round in 0..rounds {
        let start = now_ns();
        let window = nic.alloc_mw(pd)?;
        let allocated = now_ns();
        drop(window);
        let access = if round % 2 == 0 { Access::REMOTE_READ } else { Access::REMOTE_ALL };
        let changing = now_ns();
        one.modify(QpChange::Access { access })?;
        let changed = now_ns();
        one.connect(other.qpn())?;
        times.allocate.record_ns(allocated - start);
        times.flag.record_ns(changed - changing);
        times.reestablish.record_ns(now_ns() - changed);
    }
    Ok(())
}
