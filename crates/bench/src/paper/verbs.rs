//! What verbs of the memory node's CPU take: to register memory, to bind and unbind a window.

use std::time::Duration;

use fabric::wqe::Umr;
use fabric::{
    Access, Completion, CompletionQueue, CqAttr, Key, MemoryRegion, MemoryWindow, Nic, Op, QpAttr,
    QueuePair, Receive, Rereg, WorkRequest,
};

use crate::Error;
use crate::histogram::Latencies;

/// What was timed.
#[derive(Clone, Debug, Default)]
pub struct VerbTimes {
    /// By size.
    pub regions: Vec<Region>,
    /// To bind a window, from the post to the completion.
    pub bind: Latencies,
    /// To bind a window after another, each waited for: for one of them.
    pub pass: Latencies,
    /// To unbind it.
    pub unbind: Latencies,
    /// To unbind it and bind it again: a new key.
    pub rebind: Latencies,
}

/// What a memory region takes.
#[derive(Clone, Debug, Default)]
pub struct Region {
    /// Its bytes.
    pub bytes: u64,
    /// To register it.
    pub register: Latencies,
    /// To deregister it.
    pub deregister: Latencies,
    /// To give it another key, by changing its rights: its pages stay pinned.
    pub reregister: Latencies,
}

/// Windows of a pass: of 4 MiB over 100 GiB.
const PASS: usize = 25 << 10;

/// Windows of a pass that exist at a time.
const PASS_STEP: usize = 4 << 10;

/// Bytes of the windows that are bound (FineMem, table 1).
const WINDOW_BYTES: u64 = 4 << 20;

/// Times the verbs on the running thread, whose clock is `now_ns`.
///
/// # Errors
/// As the verbs.
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
        let mut times_of = Region { bytes, ..Region::default() };
        for _ in 0..rounds.div_ceil(10) {
            let start = now_ns();
            let region = nic.reg_mr(&pd, &memory, Access::REMOTE_ALL | Access::LOCAL_WRITE)?;
            let registered = now_ns();
            let access = Some(Access::REMOTE_READ);
            let region = nic.rereg_mr(region, Rereg { access, ..Rereg::default() })?;
            let reregistered = now_ns();
            drop(region);
            times_of.register.record_ns(registered - start);
            times_of.reregister.record_ns(reregistered - registered);
            times_of.deregister.record_ns(now_ns() - reregistered);
        }
        times.regions.push(times_of);
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
    // A bind does not look at the memory: it is the same 4 MiB for all windows. They are allocated
    // in steps, since a function may have 8,192 keys; allocating them is not timed.
    let many = PASS * rounds.min(100) as usize / 100;
    let mut pass_ns = 0;
    for first in (0..many).step_by(PASS_STEP) {
        let windows = nic.alloc_mws(pd, PASS_STEP.min(many - first))?;
        let start = now_ns();
        for key in windows.iter().map(MemoryWindow::key) {
            let tag = key.tag().wrapping_add(1);
            let (base, bytes) = (memory.addr(), WINDOW_BYTES as u32);
            let access = Access::REMOTE_ALL;
            execute(&Umr::bind(key, tag, one.qpn(), access, region.key(), base, bytes))?;
        }
        pass_ns += now_ns() - start;
    }
    times.pass.record_ns(pass_ns / many as u64);
    Ok(())
}
