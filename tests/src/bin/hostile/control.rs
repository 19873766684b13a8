//! Attacks on the control socket.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use granary_tests::control::Control;
use pool::ConnectRequest;
use pool::protocol::{Admission, MAX_BYTES, Reply, Request};
use rnic::port::shm::socket::send;
use rustix::fs::SealFlags;
use serde_json::{Value, json};
use verbs::SessionSecret;

use crate::nic::{Nic, memfd};
use crate::queue::{Qp, Shape};
use units::Random;

use crate::Arguments;

/// Sends malformed packets on new and open connections, with and without descriptors.
pub fn garbage(a: &Arguments) -> Result<Value> {
    a.ready()?;
    let mut random = Random::new(a.seed);
    let fd = memfd(4096, SealFlags::SHRINK)?;
    let deadline = Instant::now() + a.time;
    let (mut packets, mut closed) = (0u64, 0u64);
    let nest = "[".repeat(MAX_BYTES);
    let fixed: [&[u8]; 8] = [
        b"",
        b"\0",
        b"{",
        nest.as_bytes(),
        br#"{"id":1,"request":"status","request":"audit"}"#,
        br#"{"id":-1,"request":"status"}"#,
        br#"{"id":1e999,"request":"await_memory","timeout_ms":1e300}"#,
        br#"{"verb":{"create_qp":{}}}"#,
    ];
    while Instant::now() < deadline {
        let connection = match random.below(3) {
            0 => Control::connect(&a.socket)?,
            1 => Control::pool(&a.socket)?,
            _ => {
                let nic = Control::connect(&a.socket)?;
                nic.send(br#"{"service":"nic"}"#, &[])?;
                if random.below(2) == 0 {
                    nic.send(br#"{"hello":{"version":1}}"#, &[])?;
                }
                nic
            }
        };
        for _ in 0..1 + random.below(20) {
            let bytes = match random.below(4) {
                0 => fixed[random.below(fixed.len() as u64) as usize].to_vec(),
                1 => (0..random.below(200)).map(|_| random.bits() as u8).collect(),
                2 => mutated(&mut random),
                _ => vec![b' '; MAX_BYTES + 1 + random.below(40_000) as usize],
            };
            let fds = vec![fd.as_fd(); random.below(3) as usize];
            packets += 1;
            // The memory node may close the connection.
            if connection.send(&bytes, &fds).is_err() {
                closed += 1;
                break;
            }
        }
    }
    Ok(json!({ "packets": packets, "closed": closed }))
}

/// A valid message with up to two wrong bytes.
fn mutated(random: &mut Random) -> Vec<u8> {
    let messages: [&[u8]; 9] = [
        br#"{"id":1,"request":"admit","management":[1,2],"groups":[[3,4]],
            "bulletin_addr":0,"bulletin_rkey":0}"#,
        br#"{"id":2,"request":"await_memory","timeout_ms":18446744073709551615}"#,
        br#"{"id":3,"request":"reset_access","group":65535,"lane":255}"#,
        br#"{"id":4,"request":"reset_management"}"#,
        br#"{"id":5,"request":"goodbye"}"#,
        br#"{"add_memory":{"bytes":4096}}"#,
        br#"{"remove_memory":{"memory":0}}"#,
        br#"{"verb":{"reg_mr":{"pd":0,"iova":0,"access":255,
            "memory":{"memory":0,"offset":18446744073709551615,"bytes":2}}}}"#,
        br#"{"verb":{"create_cq":{"ring":{"memory":0,"offset":0,"bytes":4096},
            "entries":4294967295,"record":{"memory":0,"offset":1,"bytes":8},
            "ignore_overrun":false}}}"#,
    ];
    let mut bytes = messages[random.below(messages.len() as u64) as usize].to_vec();
    for _ in 0..random.below(3) {
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] = random.bits() as u8;
    }
    bytes
}

/// Sends requests on many connections and never reads a reply.
pub fn deaf(a: &Arguments) -> Result<Value> {
    let count = a.count.max(1);
    let connections = (0..count).map(|_| Control::pool(&a.socket)).collect::<Result<Vec<_>>>()?;
    for connection in &connections {
        rustix::io::ioctl_fionbio(connection, true)?;
    }
    a.ready()?;
    let deadline = Instant::now() + a.time;
    let mut sent = 0u64;
    while Instant::now() < deadline {
        let mut any = false;
        for connection in &connections {
            for request in
                [&br#"{"id":1,"request":"audit"}"#[..], br#"{"id":1,"request":"status"}"#]
            {
                if send(connection, request, &[]).is_ok() {
                    sent += 1;
                    any = true;
                }
            }
        }
        if !any {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(json!({ "said": sent }))
}

/// Requests admission with the QPs of another process, which is attached but not yet admitted, and
/// disconnects. The other process must not be affected.
///
/// Both processes run this function. The line on standard input is `attach` for the attacked
/// process, or the list of its QP numbers for the attacker.
pub fn hijack(a: &Arguments) -> Result<Value> {
    println!("ready");
    let line = a.receive()?;
    if line == "attach" {
        let nic = Nic::open(&a.socket)?;
        let pd = nic.pd()?;
        let qps =
            (0..4).map(|_| Qp::new(&nic, pd, Shape::default())).collect::<Result<Vec<_>>>()?;
        let numbers: Vec<u32> = qps.iter().map(|q| q.qpn.raw()).collect();
        a.report(&json!(numbers))?;
        for qp in &qps {
            nic.query(qp.qpn).context("its NIC session was ended by another process")?;
        }
        return Ok(json!({}));
    }
    let numbers: Vec<u32> = serde_json::from_str(&line).context("the QP numbers")?;
    let [first, second, third, fourth] = numbers[..] else { bail!("{line}") };
    // Without a session secret, with the attacker's own secret, with a guessed secret.
    let own = Nic::open(&a.socket)?;
    let mut reasons = Vec::new();
    for session in [None, Some(own.secret()), Some(SessionSecret::random()?)] {
        let control = Control::pool(&a.socket)?;
        let connect = ConnectRequest {
            management: vec![first, second],
            groups: vec![vec![third, fourth]],
            ..ConnectRequest::default()
        };
        let admission = Admission { connect, session, ..Admission::default() };
        match control.ask(Request::Admit(Box::new(admission)))? {
            Reply::Error { why } => reasons.push(why),
            other => {
                println!("{}", json!({ "admitted": format!("{other:?}") }));
                a.wait()?;
                bail!("QPs of another process were admitted");
            }
        }
    }
    Ok(json!({ "why": reasons }))
}
