//! Attacks that exhaust a resource.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use granary_tests::control::Control;
use pool::ConnectRequest;
use pool::protocol::{Admission, Reply, Request};
use rnic::port::control::{MWS_MAX, QpVerb, ReceiveRing, ReceiveVerb, SendRing, Verb};
use serde_json::{Value, json};
use verbs::{Access, MwKind};

use crate::Arguments;
use crate::compute::Compute;
use crate::nic::{Nic, part};
use crate::queue::{Qp, Shape};

/// Allocates every chunk, keeps requesting more for a while, and holds all chunks until it is
/// killed.
pub fn hoard(a: &Arguments) -> Result<Value> {
    let mut me = Compute::join(a)?;
    a.ready()?;
    let lanes = me.lanes();
    let (mut held, mut empty) = (0, 0);
    let deadline = Instant::now() + a.time;
    while Instant::now() < deadline || empty == 0 {
        match me.allocate_for(&lanes)? {
            Some(_) => held += 1,
            None => empty += 1,
        }
        if empty > 100 {
            std::thread::sleep(Duration::from_micros(500));
        }
    }
    a.report(&json!({ "held": held, "empty": empty }))?;
    bail!("the test must kill this process");
}

/// Creates objects of each kind until the NIC refuses because of a limit.
pub fn objects(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    a.ready()?;
    let memory = nic.memory(64 << 10)?;
    let pd = nic.pd()?;
    let base = Qp::new(&nic, pd, Shape { receives: 64, ..Shape::default() })?;
    let ring = || ReceiveRing {
        ring: part(&memory, 0, 1024),
        entries: 64,
        stride: 16,
        record: part(&memory, 4096, 8),
    };
    let many = |verb: &dyn Fn() -> Verb<verbs::DmaMemory>| -> Result<(u64, String)> {
        for made in 0..200_000 {
            if let Err(e) = nic.verb(verb()) {
                return Ok((made, e.to_string()));
            }
        }
        bail!("no limit after 200,000 objects");
    };
    let create_qp = || {
        let own = ReceiveVerb::Own { ring: ring(), managed: true };
        Verb::CreateQp(QpVerb {
            pd,
            send: Some(SendRing { ring: part(&memory, 8192, 4096), blocks: 64, managed: false }),
            receive: own,
            send_cq: base.cqn,
            recv_cq: base.cqn,
            access: Access::REMOTE_ALL,
            privileged: false,
        })
    };
    let create_cq = || Verb::CreateCq {
        ring: part(&memory, 0, 4096),
        entries: 64,
        record: part(&memory, 8192, 8),
        ignore_overrun: true,
    };
    let windows = || Verb::AllocMws { pd, kind: MwKind::Type2, count: MWS_MAX };
    let region = || Verb::RegMr {
        pd,
        memory: part(&memory, 0, 64),
        iova: memory.addr(),
        access: Access::REMOTE_ALL,
    };
    let kinds: [(&str, &dyn Fn() -> _); 6] = [
        ("QPs", &create_qp),
        ("CQs", &create_cq),
        ("SRQs", &|| Verb::CreateSrq { pd, ring: ring() }),
        ("PDs", &|| Verb::AllocPd),
        ("windows", &windows),
        ("regions", &region),
    ];
    let mut made = serde_json::Map::new();
    for (kind, verb) in kinds {
        let (count, why) = many(verb)?;
        ensure!(why.contains("limit"), "{kind}: {why}");
        made.insert(kind.into(), count.into());
    }
    a.report(&Value::Object(made))?;
    Ok(json!({}))
}

/// Shares as many pieces of memory as possible over several functions. Each is a mapping in the
/// memory node's process, which may have about 65,530 mappings.
pub fn memories(a: &Arguments) -> Result<Value> {
    let mut functions = Vec::new();
    a.ready()?;
    let (mut shared, mut why) = (0u64, String::new());
    for _ in 0..a.count {
        let Ok(nic) = Nic::open(&a.socket) else { break };
        let last = loop {
            // A new memfd each time, because the NIC's process seals it and a sealed one cannot be
            // shared again.
            let fd = crate::nic::filled_memfd(4096, rustix::fs::SealFlags::empty())?;
            match nic.add_memory(&fd, 4096) {
                Ok(_) => shared += 1,
                Err(e) => break e.to_string(),
            }
        };
        why = last;
        functions.push(nic);
    }
    a.report(&json!({ "functions": functions.len(), "shared": shared, "why": why }))?;
    Ok(json!({}))
}

/// Opens `--count` connections, more than the memory node keeps.
pub fn connections(a: &Arguments) -> Result<Value> {
    a.ready()?;
    let open = open_connections(&a.socket, a.count as usize)?;
    a.report(&json!({ "open": open.len() }))?;
    Ok(json!({}))
}

fn open_connections(path: &Path, count: usize) -> Result<Vec<Control>> {
    raise_descriptors()?;
    let mut open = Vec::new();
    for i in 0..count {
        // Blocks while the socket's backlog is full.
        let connection = Control::connect(path).with_context(|| format!("connection {i}"))?;
        // The memory node closes connections beyond its limit; this side notices when it reads.
        open.push(connection);
    }
    Ok(open)
}

fn raise_descriptors() -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum })?)
}

/// Requests admission with far more QP groups than it has QPs, by naming the same QPs repeatedly.
pub fn groups(a: &Arguments) -> Result<Value> {
    let nic = Nic::open(&a.socket)?;
    let pd = nic.pd()?;
    let qp = Qp::new(&nic, pd, Shape::default())?.qpn.raw();
    a.ready()?;
    let mut refusals = Vec::new();
    for groups in [1, 64, 65, 1000, 2400] {
        let control = Control::pool(&a.socket)?;
        let connect = ConnectRequest {
            management: vec![qp, qp],
            groups: vec![vec![qp, qp]; groups],
            ..ConnectRequest::default()
        };
        let admission = Admission { connect, session: Some(nic.secret()), ..Admission::default() };
        match control.ask(Request::Admit(Box::new(admission)))? {
            Reply::Error { why } => refusals.push(why),
            other => bail!("{groups} groups of the same QPs were admitted: {other:?}"),
        }
    }
    Ok(json!({ "refusals": refusals }))
}

/// Attaches many times and creates as many QPs as allowed each time.
pub fn many_functions(a: &Arguments) -> Result<Value> {
    a.ready()?;
    raise_descriptors()?;
    let mut functions = Vec::new();
    let (mut qps, mut why) = (0u64, String::from("none"));
    for _ in 0..a.count {
        let nic = match Nic::open(&a.socket) {
            Ok(nic) => nic,
            Err(e) => {
                why = e.to_string();
                break;
            }
        };
        let pd = nic.pd()?;
        let base = Qp::new(&nic, pd, Shape::default())?;
        let make = || {
            Verb::CreateQp(QpVerb {
                pd,
                send: Some(SendRing {
                    ring: part(&base.memory, base.send_at(), 4096),
                    blocks: 64,
                    managed: false,
                }),
                receive: ReceiveVerb::None,
                send_cq: base.cqn,
                recv_cq: base.cqn,
                access: Access::NONE,
                privileged: false,
            })
        };
        while nic.verb(make()).is_ok() {
            qps += 1;
        }
        // Writes a value to every doorbell.
        for slot in 0..nic.doorbells {
            nic.write_doorbell(slot, 0xdead_0000 | slot);
        }
        functions.push((nic, base));
    }
    let made = functions.len();
    a.report(&json!({ "functions": made, "qps": qps, "why": why }))?;
    drop(functions);
    Ok(json!({}))
}
