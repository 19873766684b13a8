//! The weakness of type-1 windows (OneSidedMW §2.3), which type-2 windows do not have.
//!
//! A server grants one window of each type, as a memory node of the RPC-MW baselines does. The
//! server is attached to the NIC and has one protection domain and a QP for each client connection.
//! A client is either the owner of the windows or an attacker. The attacker tries all 256 tags,
//! each on a separate connection, because a wrong tag breaks the connection.

use anyhow::{Context, Result, bail, ensure};
use rnic::port::control::{QpVerb, ReceiveVerb, Reply, Verb};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use verbs::cqe::Syndrome;
use verbs::wqe::{Sge, Umr};
use verbs::{Access, DmaMemory, Key, MwKind, QpChange, Qpn};

use crate::compute::{LONG, remote};
use crate::nic::Nic;
use crate::queue::{Qp, Shape};
use units::Random;

use crate::Arguments;

/// The attacker's connections per window.
const TRIES: usize = 256;
/// Bytes of a window.
const BYTES: usize = 4096;
/// The owner's data in its windows.
const SECRET: &[u8; 17] = b"data of the owner";
/// Data that the attacker writes to an opened window.
const MARK: &[u8; 17] = b"attacker was here";

const _: () = assert!(MARK.len() == SECRET.len());

/// Address and key of a window, as the server sends them to the owner.
#[derive(Serialize, Deserialize)]
struct Window {
    addr: u64,
    key: u32,
}

/// A command to a client.
#[derive(Serialize, Deserialize)]
struct Order {
    /// `own`: write the secret. `search`: try all tags. `look`: check that the secret is unchanged.
    order: String,
    /// The server's QPs, one for each of the client's QPs.
    peers: Vec<u32>,
    windows: Vec<Window>,
}

/// Grants a window of type 1 and one of type 2 to the owner, and connects to the attacker's QPs.
pub fn server(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    let pd = nic.pd()?;
    let memory = nic.memory(2 * BYTES)?;
    let mr = nic.register(pd, &memory, Access::LOCAL_ALL)?;
    let mut owner = Qp::new(&nic, pd, Shape::default())?;
    let others = (0..2 * TRIES)
        .map(|_| {
            let verb = Verb::<DmaMemory>::CreateQp(QpVerb {
                pd,
                send: None,
                receive: ReceiveVerb::None,
                send_cq: owner.cqn,
                recv_cq: owner.cqn,
                access: Access::REMOTE_ALL,
                privileged: false,
            });
            match nic.verb(verb)? {
                Reply::Qp { qpn, .. } => Ok(qpn),
                other => bail!("{other:?}"),
            }
        })
        .collect::<Result<Vec<_>>>()?;
    a.ready()?;
    let numbers: Vec<u32> = others.iter().map(|q| q.raw()).collect();
    println!("{}", json!({ "owner": [owner.qpn.raw()], "other": numbers }));
    let peers: Vec<Vec<u32>> = serde_json::from_str(&a.receive()?).context("the clients' QPs")?;
    let [owners, attackers] = &peers[..] else { bail!("expected two lists of QPs") };
    owner.connect(&nic, Qpn::new(owners[0]))?;
    for (qpn, peer) in others.iter().zip(attackers) {
        let peer = Qpn::new(*peer);
        for change in [QpChange::Init, QpChange::ReadyToReceive { peer: peer.into() }] {
            nic.verb(Verb::ModifyQp { qpn: *qpn, change })?;
        }
    }
    let mut random = Random::new(a.seed);
    let mut windows = Vec::new();
    for (i, kind) in [MwKind::Type1, MwKind::Type2].into_iter().enumerate() {
        let key = nic.windows(pd, kind, 1)?[0];
        let (tag, start) = (random.bits() as u8, memory.addr() + (i * BYTES) as u64);
        let umr = match kind {
            MwKind::Type1 => Umr::bind_type1(key, tag, Access::REMOTE_ALL, mr, start, BYTES as u32),
            MwKind::Type2 => {
                Umr::bind(key, tag, owner.qpn, Access::REMOTE_ALL, mr, start, BYTES as u32)
            }
        };
        owner.post(&nic, |b| _ = b.umr(&umr).signaled());
        let cqe = owner.wait(LONG).context("a bind did not complete")?;
        ensure!(cqe.error.is_none(), "binding a window: {cqe:?}");
        windows.push(Window { addr: start, key: Key::new(key.index(), tag).0 });
    }
    a.report(&json!(windows))?;
    Ok(json!({}))
}

/// Runs a client: the owner of the windows, or the attacker.
pub fn client(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    let pd = nic.pd()?;
    let memory = nic.memory(4096)?;
    let lkey = nic.register(pd, &memory, Access::LOCAL_ALL)?;
    let count = a.count.max(1) as usize;
    let mut qps = (0..count).map(|_| Qp::new(&nic, pd, small())).collect::<Result<Vec<_>>>()?;
    a.ready()?;
    println!("{}", json!(qps.iter().map(|q| q.qpn.raw()).collect::<Vec<_>>()));
    let sge = Sge { addr: memory.addr(), len: SECRET.len() as u32, lkey };
    let mut connected = false;
    loop {
        let order: Order = serde_json::from_str(&a.receive()?).context("an order")?;
        if !connected {
            for (qp, peer) in qps.iter().zip(&order.peers) {
                qp.connect(&nic, Qpn::new(*peer))?;
            }
            connected = true;
        }
        let access = |qp: &mut Qp, at, write: bool| -> Result<u8> {
            qp.post(&nic, |b| {
                if write {
                    b.rdma_write(at, &[sge])
                } else {
                    b.rdma_read(at, &[sge])
                };
                b.signaled();
            });
            let cqe = qp.wait(LONG).context("an access did not complete")?;
            Ok(cqe.error.map_or(0, |e| e.syndrome))
        };
        let report = match order.order.as_str() {
            "own" => {
                for w in &order.windows {
                    memory.write(0, SECRET);
                    ensure!(access(&mut qps[0], remote(w.addr, w.key), true)? == 0, "its own");
                }
                json!({})
            }
            "look" => {
                let mut intact = Vec::new();
                for w in &order.windows {
                    memory.zero(0, SECRET.len());
                    ensure!(access(&mut qps[0], remote(w.addr, w.key), false)? == 0, "its own");
                    let mut found = [0; SECRET.len()];
                    memory.read(0, &mut found);
                    intact.push(found == *SECRET);
                }
                println!("{}", json!({ "intact": intact }));
                return Ok(json!({}));
            }
            "search" => {
                let mut qps = qps.iter_mut();
                let mut found = Vec::new();
                for w in &order.windows {
                    let (mut tries, mut secret) = (0, false);
                    for tag in 0..=255 {
                        let qp = qps.next().context("no connection is left")?;
                        let at = remote(w.addr, w.key & !0xff | tag);
                        memory.zero(0, SECRET.len());
                        tries += 1;
                        let got = access(qp, at, false)?;
                        if got != 0 {
                            ensure!(got == Syndrome::RemoteAccess as u8, "{got:#x}");
                            continue;
                        }
                        let mut read = [0; SECRET.len()];
                        memory.read(0, &mut read);
                        secret = read == *SECRET;
                        memory.write(0, MARK);
                        ensure!(access(qp, at, true)? == 0, "a READ succeeds but a WRITE does not");
                        break;
                    }
                    found.push(json!({ "tries": tries, "secret": secret }));
                }
                println!("{}", json!(found));
                return Ok(json!({}));
            }
            other => bail!("unknown order {other}"),
        };
        println!("{report}");
    }
}

fn small() -> Shape {
    Shape { blocks: 16, completions: 16, ..Shape::default() }
}
