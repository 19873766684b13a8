//! Validation of packets by other tools: tshark dissects them, scapy recomputes their ICRCs.
//!
//! Requires Debian's `tshark` and `python3-scapy`; otherwise the tests are skipped
//! (`crate::needs`).

use super::lossy::Run;
use super::*;
use crate::needs::skip;
use crate::wire::icrc::{self, Route};
use crate::wire::packet::{Body, Notice, PACKET_MAX, Part, opcode};
use crate::wire::{Packet, UDP_PORT};
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Output};
use verbs::{Key, PathMtu, Psn};

/// Protocols that tshark would guess in payloads.
const GUESSES: &str = include_str!("../../../../tests/tshark-guesses.txt");

/// Creates packets of mixed operations over a lossy network, and of the two opcodes that those
/// lack.
fn traffic(v6: bool) -> Vec<(SocketAddr, SocketAddr, Vec<u8>)> {
    let faults = Faults { loss: 200, ..Faults::default() };
    let link = Link { mtu: PathMtu::Mtu256, ..Link::default() };
    let mut run = Run::new(500 + v6 as u64, faults, &link);
    run.net.log = Some(Vec::new());
    run.go(150);
    let route = |end: usize| {
        let source = SocketAddr::new(address(end, v6), 0xc123);
        (source, SocketAddr::new(address(1 - end, v6), UDP_PORT))
    };
    let mut log = run.net.log.take().unwrap();
    for part in [Part::Only, Part::Last] {
        let packet = Packet {
            qpn: Qpn::new(0x11),
            psn: Psn::new(0x100),
            ack_request: true,
            solicited: true,
            body: Body::Send { part, notice: Notice::Invalidate(Key(0xabcd)) },
            payload: b"gone",
        };
        let mut bytes = [0; PACKET_MAX];
        let len = packet.encode(&mut bytes);
        let (source, destination) = route(0);
        icrc::seal(&Route::new(source, destination), &mut bytes[..len]);
        log.push((0, bytes[..len].to_vec()));
    }
    let sent: Vec<_> = log.into_iter().map(|(end, b)| (route(end).0, route(end).1, b)).collect();
    let mut seen: Vec<u8> = sent.iter().map(|(_, _, b)| b[0]).collect();
    seen.sort_unstable();
    seen.dedup();
    let all: Vec<u8> = (0..=opcode::SEND_ONLY_INV).filter(|code| *code != 0x15).collect();
    assert_eq!(seen, all, "every opcode is there");
    sent
}

/// Writes a capture file of raw IP packets.
fn capture(name: &str, packets: &[(SocketAddr, SocketAddr, Vec<u8>)]) -> std::path::PathBuf {
    let mut file = Vec::new();
    // Magic, version 2.4, time zone, accuracy, maximum packet length, link type "raw IP".
    for word in [0xa1b2_c3d4u32, 4 << 16 | 2, 0, 0, 65535, 101] {
        file.extend(word.to_le_bytes());
    }
    for (n, (source, destination, bytes)) in packets.iter().enumerate() {
        let udp = 8 + bytes.len() as u16;
        let ip: Vec<u8> = match (source.ip(), destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let mut ip = vec![0x45, 0];
                ip.extend((20 + udp).to_be_bytes());
                ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
                ip.extend(from.octets().into_iter().chain(to.octets()));
                let sum: u32 = ip.chunks(2).map(|w| u16::from_be_bytes([w[0], w[1]]) as u32).sum();
                let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                ip
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let mut ip = vec![0x60, 0, 0, 0];
                ip.extend(udp.to_be_bytes());
                ip.extend([17, 64]);
                ip.extend(from.octets().into_iter().chain(to.octets()));
                ip
            }
            _ => unreachable!(),
        };
        let length = ip.len() as u32 + udp as u32;
        for word in [1_700_000_000, n as u32, length, length] {
            file.extend(word.to_le_bytes());
        }
        file.extend(ip);
        for short in [source.port(), destination.port(), udp, 0] {
            file.extend(short.to_be_bytes());
        }
        file.extend(bytes);
    }
    let path = std::env::temp_dir().join(format!("granary-{}-{name}.pcap", std::process::id()));
    std::fs::write(&path, file).unwrap();
    path
}

/// Runs a program and returns its output; `None` if it is not installed.
fn run(program: &str, args: &[&str]) -> Option<Output> {
    match Command::new(program).args(args).output() {
        Ok(output) => Some(output),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => panic!("{program}: {e}"),
    }
}

fn missing(what: &str) {
    skip(format!("{what} is not installed (Debian package of that name)"));
}

#[test]
#[cfg_attr(miri, ignore = "starts programs")]
fn tshark_finds_nothing_malformed() {
    for v6 in [false, true] {
        let packets = traffic(v6);
        let path = capture(&format!("tshark-{v6}"), &packets);
        let fields = ["infiniband.bth.opcode", "infiniband.bth.psn", "infiniband.bth.destqp"];
        let mut args = vec!["-n", "-r", path.to_str().unwrap(), "-T", "fields"];
        // Disable the heuristic dissectors: message contents would match them by chance.
        for guess in GUESSES.lines() {
            args.extend(["--disable-protocol", guess]);
        }
        for field in fields.iter().chain(&["_ws.malformed", "infiniband.invariant.crc"]) {
            args.extend(["-e", field]);
        }
        let Some(output) = run("tshark", &args) else { return missing("tshark") };
        std::fs::remove_file(&path).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let number = |s: &str| match s.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).unwrap(),
            None => s.parse().unwrap_or(u32::MAX),
        };
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), packets.len());
        for (line, (_, _, bytes)) in lines.iter().zip(&packets) {
            let ours = Packet::parse(bytes).unwrap();
            let got: Vec<&str> = line.split('\t').collect();
            let want = [bytes[0] as u32, ours.psn.raw(), ours.qpn.raw()];
            assert_eq!([got[0], got[1], got[2]].map(number), want, "{line}");
            assert_eq!(got[3], "", "malformed: {line}");
            let crc = u32::from_be_bytes(*bytes.last_chunk().unwrap());
            assert_eq!(number(got[4]), crc, "{line}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "starts programs")]
fn scapy_computes_the_same_icrcs() {
    let script = include_str!("../../../../tests/icrc.py");
    let has = |python: &str| {
        let probe = run(python, &["-c", "import scapy.contrib.roce"]);
        probe.is_some_and(|output| output.status.success())
    };
    // Debian's package belongs to Debian's interpreter, which may not be the first in PATH.
    let Some(python) = ["python3", "/usr/bin/python3"].into_iter().find(|p| has(p)) else {
        return missing("python3-scapy");
    };
    for v6 in [false, true] {
        let packets = traffic(v6);
        let path = capture(&format!("scapy-{v6}"), &packets);
        let output =
            run(python, &["-c", script, path.to_str().unwrap()]).expect("scapy was found above");
        std::fs::remove_file(&path).unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(text.trim(), format!("{} agree", packets.len()));
    }
}
