//! The control verbs as data: the requests of a function to its NIC, the same in all ports.
//!
//! The type parameter `M` is the representation of memory in a verb: [`DmaMemory`] where the NIC
//! executes the verb, a [`Span`](super::shm::protocol::Span) of a registered descriptor in a
//! message from another process.

use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::error::Error;
use crate::spec::{
    CqSpec, GuardSpec, QpDescription, QpSpec, Recv, RecvSpec, RegionChange, SendSpec,
};
use verbs::direct::KeyInfo;
use verbs::{
    Access, Cqn, DeviceInfo, DmaMemory, Events, FunctionId, Key, KeyIndex, MwKind, Pdn, QpChange,
    Qpn, SrqInfo, Srqn,
};

/// Maximum windows that one [`Verb::AllocMws`] allocates, so that their keys fit one message.
pub const MWS_MAX: u32 = 1024;

/// Maximum windows that one [`Verb::AllocGuardedMws`] allocates, so that their guard words fit one
/// message.
pub const GUARDED_MWS_MAX: u32 = 512;

/// Maximum events that one [`Verb::TakeEvents`] takes, so that they fit one message.
pub const EVENTS_MAX: usize = 256;

/// A control verb.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Verb<M> {
    /// Queries the limits and capabilities of the function: [`Reply::Device`].
    QueryDevice,
    /// Takes up to [`EVENTS_MAX`] asynchronous events: [`Reply::Events`].
    TakeEvents,
    /// Allocates a protection domain: [`Reply::Pd`].
    AllocPd,
    /// Frees a protection domain.
    DeallocPd {
        /// The protection domain.
        pd: Pdn,
    },
    /// Registers memory: [`Reply::Key`].
    RegMr {
        /// Its protection domain.
        pd: Pdn,
        /// The memory.
        memory: M,
        /// The address of its first byte in remote requests and work requests.
        iova: u64,
        /// The operations that the key allows.
        access: Access,
    },
    /// Changes a registration: [`Reply::Key`].
    ReregMr {
        /// The key.
        key: Key,
        /// The new protection domain, if it changes.
        pd: Option<Pdn>,
        /// The new memory and the address (iova) of its first byte, if they change.
        memory: Option<(M, u64)>,
        /// The operations that the key allows, if they change.
        access: Option<Access>,
    },
    /// Deregisters memory.
    DeregMr {
        /// The key.
        key: Key,
    },
    /// Allocates windows: [`Reply::Keys`].
    AllocMws {
        /// Their protection domain.
        pd: Pdn,
        /// Their type; type 2 if the field is missing.
        #[serde(default)]
        kind: MwKind,
        /// Number of windows, at most [`MWS_MAX`].
        count: u32,
    },
    /// Allocates guarded type-1 windows: [`Reply::Keys`].
    AllocGuardedMws {
        /// Their protection domain.
        pd: Pdn,
        /// The region that contains their guard words.
        region: Key,
        /// The bits of a guard word that are compared.
        mask: u64,
        /// Address and expected value of each window's guard word, at most [`GUARDED_MWS_MAX`].
        words: Vec<(u64, u64)>,
    },
    /// Frees a window.
    DeallocMw {
        /// The key.
        key: Key,
    },
    /// Looks up a key: [`Reply::KeyInfo`].
    QueryKey {
        /// Index of the key.
        index: KeyIndex,
    },
    /// Creates a completion queue: [`Reply::Cq`].
    CreateCq {
        /// The ring: `entries` CQEs of 64 bytes.
        ring: M,
        /// Number of CQEs, a power of two.
        entries: u32,
        /// The record of 8 bytes: consumer index, then armed word.
        record: M,
        /// Overwrite CQEs that were not polled instead of raising an overrun error.
        ignore_overrun: bool,
    },
    /// Destroys a completion queue.
    DestroyCq {
        /// The completion queue.
        cqn: Cqn,
    },
    /// Queries the number of completions that a CQ has counted: [`Reply::Count`].
    CqCount {
        /// The completion queue.
        cqn: Cqn,
    },
    /// Creates a shared receive queue: [`Reply::Srq`].
    CreateSrq {
        /// Its protection domain.
        pd: Pdn,
        /// Its ring.
        ring: ReceiveRing<M>,
    },
    /// Arms a shared receive queue's limit.
    ModifySrq {
        /// The shared receive queue.
        srqn: Srqn,
        /// Number of posted receives below which an event is raised; 0 for no event.
        limit: u32,
    },
    /// Queries a shared receive queue: [`Reply::SrqInfo`].
    QuerySrq {
        /// The shared receive queue.
        srqn: Srqn,
    },
    /// Destroys a shared receive queue.
    DestroySrq {
        /// The shared receive queue.
        srqn: Srqn,
    },
    /// Creates a queue pair: [`Reply::Qp`].
    CreateQp(QpVerb<M>),
    /// Changes a queue pair's state.
    ModifyQp {
        /// The queue pair.
        qpn: Qpn,
        /// The transition.
        change: QpChange,
    },
    /// Queries a queue pair's state: [`Reply::QpInfo`].
    QueryQp {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Destroys a queue pair.
    DestroyQp {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Sets a managed send queue's limit.
    EnableSend {
        /// The queue pair.
        qpn: Qpn,
        /// Building-block index modulo 2^16.
        limit: u16,
    },
    /// Sets a managed receive queue's limit.
    EnableRecv {
        /// The queue pair.
        qpn: Qpn,
        /// Running index of the queue.
        limit: u32,
    },
}

/// A receive queue's memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveRing<M> {
    /// The ring: `entries` receive WQEs of `stride` bytes.
    pub ring: M,
    /// Number of receive WQEs, a power of two.
    pub entries: u32,
    /// Bytes of a receive WQE, a multiple of 16.
    pub stride: u32,
    /// The record of 8 bytes with the producer index.
    pub record: M,
}

/// A send queue's memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendRing<M> {
    /// The ring: `blocks` building blocks of 64 bytes.
    pub ring: M,
    /// Number of building blocks, a power of two.
    pub blocks: u32,
    /// Managed: the queue executes WQEs up to the limit that SEND_EN sets, and has no doorbell.
    pub managed: bool,
}

/// The receive queue of a queue pair.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReceiveVerb<M> {
    /// No receive queue.
    None,
    /// A private receive queue.
    Own {
        /// Its ring.
        ring: ReceiveRing<M>,
        /// Managed: its WQEs are usable up to the limit that RECV_EN sets.
        managed: bool,
    },
    /// A shared receive queue.
    Shared {
        /// The shared receive queue.
        srqn: Srqn,
    },
}

/// The attributes of a new queue pair.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpVerb<M> {
    /// Its protection domain.
    pub pd: Pdn,
    /// Its send queue.
    pub send: Option<SendRing<M>>,
    /// Its receive queue.
    pub receive: ReceiveVerb<M>,
    /// CQ of the send queue.
    pub send_cq: Cqn,
    /// CQ of the receive queue.
    pub recv_cq: Cqn,
    /// The remote operations that the peer may request.
    pub access: Access,
    /// The QP may bind windows to other QPs. Only the physical function may set this.
    pub privileged: bool,
}

/// The reply to a [`Verb`] that succeeded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Success without a result.
    Done,
    /// The new protection domain.
    Pd(Pdn),
    /// The new key.
    Key(Key),
    /// The new windows.
    Keys(Vec<Key>),
    /// The new completion queue.
    Cq(Cqn),
    /// The new shared receive queue.
    Srq(Srqn),
    /// The new queue pair.
    Qp {
        /// Its number.
        qpn: Qpn,
        /// The slot of its doorbell in the function's doorbell array, where the port has one.
        doorbell: Option<u32>,
    },
    /// The protection table's entry for a key.
    KeyInfo(KeyInfo),
    /// The state of a queue pair.
    QpInfo(QpDescription),
    /// The state of a shared receive queue.
    SrqInfo(SrqInfo),
    /// The limits and capabilities of the function.
    Device(DeviceInfo),
    /// Asynchronous events.
    Events(Events),
    /// A count.
    Count(u32),
}

impl Verb<DmaMemory> {
    /// Executes the verb for function `f`.
    pub(super) fn execute(self, engine: &mut Engine, f: FunctionId) -> Result<Reply, Error> {
        let done = |()| Reply::Done;
        match self {
            Verb::QueryDevice => engine.query_device(f).map(Reply::Device),
            // The port keeps the events of each function (`core.rs`); the engine does not.
            Verb::TakeEvents => Ok(Reply::Events(Events::default())),
            Verb::AllocPd => engine.alloc_pd(f).map(Reply::Pd),
            Verb::DeallocPd { pd } => engine.dealloc_pd(f, pd).map(done),
            Verb::RegMr { pd, memory, iova, access } => {
                engine.reg_mr(f, pd, memory, iova, access).map(Reply::Key)
            }
            Verb::ReregMr { key, pd, memory, access } => {
                engine.rereg_mr(f, key, RegionChange { pd, memory, access }).map(Reply::Key)
            }
            Verb::DeregMr { key } => engine.dereg_mr(f, key).map(done),
            Verb::AllocMws { pd, kind, count } => {
                alloc_mws(engine, f, pd, kind, count).map(Reply::Keys)
            }
            Verb::AllocGuardedMws { pd, region, mask, words } => {
                alloc_guarded_mws(engine, f, pd, (region, mask), &words).map(Reply::Keys)
            }
            Verb::DeallocMw { key } => engine.dealloc_mw(f, key).map(done),
            Verb::QueryKey { index } => engine.query_key(f, index).map(Reply::KeyInfo),
            Verb::CreateCq { ring, entries, record, ignore_overrun } => engine
                .create_cq(f, CqSpec { ring, entries, record, ignore_overrun, initial_count: 0 })
                .map(Reply::Cq),
            Verb::DestroyCq { cqn } => engine.destroy_cq(f, cqn).map(done),
            Verb::CqCount { cqn } => engine.cq_count(f, cqn).map(Reply::Count),
            Verb::CreateSrq { pd, ring } => engine.create_srq(f, pd, ring.into()).map(Reply::Srq),
            Verb::ModifySrq { srqn, limit } => engine.modify_srq(f, srqn, limit).map(done),
            Verb::QuerySrq { srqn } => engine.query_srq(f, srqn).map(Reply::SrqInfo),
            Verb::DestroySrq { srqn } => engine.destroy_srq(f, srqn).map(done),
            Verb::CreateQp(qp) => {
                engine.create_qp(f, qp.into()).map(|qpn| Reply::Qp { qpn, doorbell: None })
            }
            Verb::ModifyQp { qpn, change } => engine.modify_qp(f, qpn, change).map(done),
            Verb::QueryQp { qpn } => engine.query_qp(f, qpn).map(Reply::QpInfo),
            Verb::DestroyQp { qpn } => engine.destroy_qp(f, qpn).map(done),
            Verb::EnableSend { qpn, limit } => engine.enable_send(f, qpn, limit).map(done),
            // Managed receive queues have indices of 16 bits.
            Verb::EnableRecv { qpn, limit } => engine.enable_recv(f, qpn, limit as u16).map(done),
        }
    }
}

/// Allocates `count` windows, or none on an error.
fn alloc_mws(
    engine: &mut Engine,
    f: FunctionId,
    pd: Pdn,
    kind: MwKind,
    count: u32,
) -> Result<Vec<Key>, Error> {
    if count > MWS_MAX {
        let must = "at most 1024";
        return Err(Error::Argument { what: "the number of windows", value: count as u64, must });
    }
    all_or_none(engine, f, count as usize, |engine, _| engine.alloc_mw(f, pd, kind))
}

/// Allocates a guarded window for each of `words`, or none on an error.
fn alloc_guarded_mws(
    engine: &mut Engine,
    f: FunctionId,
    pd: Pdn,
    (region, mask): (Key, u64),
    words: &[(u64, u64)],
) -> Result<Vec<Key>, Error> {
    let count = words.len();
    if count > GUARDED_MWS_MAX as usize {
        let must = "at most 512";
        return Err(Error::Argument { what: "the number of windows", value: count as u64, must });
    }
    all_or_none(engine, f, count, |engine, i| {
        let (addr, value) = words[i];
        engine.alloc_guarded_mw(f, pd, &GuardSpec { region, addr, value, mask })
    })
}

/// Allocates `count` windows with `make`; frees them again if one allocation fails.
fn all_or_none(
    engine: &mut Engine,
    f: FunctionId,
    count: usize,
    make: impl Fn(&mut Engine, usize) -> Result<Key, Error>,
) -> Result<Vec<Key>, Error> {
    let mut keys = Vec::with_capacity(count);
    for i in 0..count {
        match make(engine, i) {
            Ok(key) => keys.push(key),
            Err(e) => {
                for key in keys {
                    engine.dealloc_mw(f, key).expect("a window allocated just now");
                }
                return Err(e);
            }
        }
    }
    Ok(keys)
}

impl From<ReceiveRing<DmaMemory>> for RecvSpec {
    fn from(r: ReceiveRing<DmaMemory>) -> Self {
        RecvSpec {
            ring: r.ring,
            entries: r.entries,
            stride: r.stride,
            record: r.record,
            initial_consumer: 0,
        }
    }
}

impl From<QpVerb<DmaMemory>> for QpSpec {
    fn from(qp: QpVerb<DmaMemory>) -> Self {
        QpSpec {
            pd: qp.pd,
            send: qp.send.map(|s| SendSpec { ring: s.ring, blocks: s.blocks, managed: s.managed }),
            recv: match qp.receive {
                ReceiveVerb::None => Recv::None,
                ReceiveVerb::Own { ring, managed } => Recv::Own { spec: ring.into(), managed },
                ReceiveVerb::Shared { srqn } => Recv::Shared(srqn),
            },
            send_cq: qp.send_cq,
            recv_cq: qp.recv_cq,
            access: qp.access,
            privileged: qp.privileged,
        }
    }
}

impl<M> Verb<M> {
    /// The same verb with every memory replaced by the result of `f`.
    pub fn try_map<N, E>(self, mut f: impl FnMut(M) -> Result<N, E>) -> Result<Verb<N>, E> {
        Ok(match self {
            Verb::QueryDevice => Verb::QueryDevice,
            Verb::TakeEvents => Verb::TakeEvents,
            Verb::AllocPd => Verb::AllocPd,
            Verb::DeallocPd { pd } => Verb::DeallocPd { pd },
            Verb::RegMr { pd, memory, iova, access } => {
                Verb::RegMr { pd, memory: f(memory)?, iova, access }
            }
            Verb::ReregMr { key, pd, memory, access } => {
                let memory = match memory {
                    Some((memory, iova)) => Some((f(memory)?, iova)),
                    None => None,
                };
                Verb::ReregMr { key, pd, memory, access }
            }
            Verb::DeregMr { key } => Verb::DeregMr { key },
            Verb::AllocMws { pd, kind, count } => Verb::AllocMws { pd, kind, count },
            Verb::AllocGuardedMws { pd, region, mask, words } => {
                Verb::AllocGuardedMws { pd, region, mask, words }
            }
            Verb::DeallocMw { key } => Verb::DeallocMw { key },
            Verb::QueryKey { index } => Verb::QueryKey { index },
            Verb::CreateCq { ring, entries, record, ignore_overrun } => {
                Verb::CreateCq { ring: f(ring)?, entries, record: f(record)?, ignore_overrun }
            }
            Verb::DestroyCq { cqn } => Verb::DestroyCq { cqn },
            Verb::CqCount { cqn } => Verb::CqCount { cqn },
            Verb::CreateSrq { pd, ring } => Verb::CreateSrq { pd, ring: ring.try_map(&mut f)? },
            Verb::ModifySrq { srqn, limit } => Verb::ModifySrq { srqn, limit },
            Verb::QuerySrq { srqn } => Verb::QuerySrq { srqn },
            Verb::DestroySrq { srqn } => Verb::DestroySrq { srqn },
            Verb::CreateQp(qp) => Verb::CreateQp(qp.try_map(&mut f)?),
            Verb::ModifyQp { qpn, change } => Verb::ModifyQp { qpn, change },
            Verb::QueryQp { qpn } => Verb::QueryQp { qpn },
            Verb::DestroyQp { qpn } => Verb::DestroyQp { qpn },
            Verb::EnableSend { qpn, limit } => Verb::EnableSend { qpn, limit },
            Verb::EnableRecv { qpn, limit } => Verb::EnableRecv { qpn, limit },
        })
    }
}

impl<M> ReceiveRing<M> {
    fn try_map<N, E>(self, f: &mut impl FnMut(M) -> Result<N, E>) -> Result<ReceiveRing<N>, E> {
        let Self { ring, entries, stride, record } = self;
        Ok(ReceiveRing { ring: f(ring)?, entries, stride, record: f(record)? })
    }
}

impl<M> QpVerb<M> {
    fn try_map<N, E>(self, f: &mut impl FnMut(M) -> Result<N, E>) -> Result<QpVerb<N>, E> {
        let send = match self.send {
            None => None,
            Some(SendRing { ring, blocks, managed }) => {
                Some(SendRing { ring: f(ring)?, blocks, managed })
            }
        };
        let receive = match self.receive {
            ReceiveVerb::None => ReceiveVerb::None,
            ReceiveVerb::Own { ring, managed } => {
                ReceiveVerb::Own { ring: ring.try_map(f)?, managed }
            }
            ReceiveVerb::Shared { srqn } => ReceiveVerb::Shared { srqn },
        };
        Ok(QpVerb {
            pd: self.pd,
            send,
            receive,
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            access: self.access,
            privileged: self.privileged,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

    #[test]
    fn verb_rejects_more_windows_than_fit_a_message() {
        let mut engine = Engine::new(Limits::default());
        let f = FunctionId::PHYSICAL;
        let pd = engine.alloc_pd(f).unwrap();
        let mut is_too_many = |count: u32, is_guarded| {
            let words = (0..u64::from(count)).map(|i| (i * 8, 0)).collect();
            let verb = match is_guarded {
                true => Verb::AllocGuardedMws { pd, region: Key(1), mask: 1, words },
                false => Verb::AllocMws { pd, kind: MwKind::default(), count },
            };
            let what = "the number of windows";
            match verb.execute(&mut engine, f) {
                Err(Error::Argument { what: argument, value, .. }) if argument == what => {
                    assert_eq!(value, u64::from(count));
                    true
                }
                _ => false,
            }
        };
        for (maximum, is_guarded) in [(MWS_MAX, false), (GUARDED_MWS_MAX, true)] {
            assert!(!is_too_many(maximum, is_guarded));
            assert!(is_too_many(maximum + 1, is_guarded));
            assert!(is_too_many(u16::MAX.into(), is_guarded));
        }
    }
}
