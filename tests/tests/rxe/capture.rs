//! Checks of captured packets: the ICRC of each packet by our code and by scapy, and the dissection
//! by tshark.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use granary_tests::impaired_link::PacketRecord;
use rnic::wire::icrc::{self, Route};
use rnic::wire::{Packet, UDP_PORT};

/// Number of captured packets.
pub const PACKETS_MAX: usize = 20_000;
/// Number of packets that scapy and tshark check; scapy is slow.
const TOOL_PACKETS_MAX: usize = 4_000;

/// Heuristic dissectors of tshark that are disabled, because our payload is random.
const GUESSES: &str = include_str!("../../../crates/rnic/tests/tshark-guesses.txt");

/// A RoCEv2 packet of a frame.
struct Found<'a> {
    /// From the IP header to the ICRC.
    ip: &'a [u8],
    /// From the BTH to the ICRC.
    packet: &'a [u8],
    route: Route,
}

fn find(frame: &[u8]) -> Option<Found<'_>> {
    let kind = frame.get(12..14)?;
    let ip = frame.get(14..)?;
    let word = |at: usize| Some(u16::from_be_bytes(*ip.get(at..)?.first_chunk()?));
    let (header, from, to): (usize, IpAddr, IpAddr) = match kind {
        [0x08, 0x00] if ip.get(9) == Some(&17) => {
            let address = |at: usize| Some(IpAddr::from(*ip.get(at..)?.first_chunk::<4>()?));
            (20, address(12)?, address(16)?)
        }
        [0x86, 0xdd] if ip.get(6) == Some(&17) => {
            let address = |at: usize| Some(IpAddr::from(*ip.get(at..)?.first_chunk::<16>()?));
            (40, address(8)?, address(24)?)
        }
        _ => return None,
    };
    let route = Route {
        identification: if header == 20 { word(4)? } else { 0 },
        dont_fragment: header == 20 && word(6)? & 0x4000 != 0,
        ..Route::new(SocketAddr::new(from, word(header)?), SocketAddr::new(to, word(header + 2)?))
    };
    let end = header + usize::from(word(header + 4)?);
    let found = Found { ip: ip.get(..end)?, packet: ip.get(header + 8..end)?, route };
    (route.destination.port() == UDP_PORT).then_some(found)
}

/// Checks frames, each with the number of the sending end: 0 is this NIC, 1 the kernel.
pub fn check(frames: &[(usize, Vec<u8>)]) -> Result<()> {
    let mut opcodes = [BTreeSet::new(), BTreeSet::new()];
    let mut identifications = BTreeSet::new();
    let mut found = Vec::new();
    for (end, frame) in frames {
        let Some(roce) = find(frame) else { continue };
        let sender = ["this NIC", "the kernel"][*end];
        let parsed = Packet::parse(roce.packet);
        let parsed = parsed.map_err(|e| anyhow::anyhow!("a packet of {sender}: {e:?}"))?;
        let (route, packet) = (&roce.route, roce.packet);
        ensure!(icrc::check(route, packet), "{sender}: wrong ICRC: {parsed:?}");
        ensure!(icrc::check_unidentified(route, packet), "{sender}: unidentified: {parsed:?}");
        opcodes[*end].insert(packet[0]);
        if *end == 1 && route.source.is_ipv4() {
            identifications.insert(route.identification);
        }
        found.push((*end, roce));
    }
    let count = |end: usize| found.iter().filter(|(e, _)| *e == end).count();
    println!(
        "        {} packets of this NIC, {} of the kernel with {} identifications; {} and {} \
         opcodes",
        count(0),
        count(1),
        identifications.len(),
        opcodes[0].len(),
        opcodes[1].len(),
    );
    ensure!(count(0) > 500 && count(1) > 500, "too few packets for a check");

    // At least 20 packets of each opcode and end, and a sample of the rest.
    let mut kept = Vec::new();
    let mut seen = std::collections::BTreeMap::new();
    let step = found.len().div_ceil(TOOL_PACKETS_MAX);
    for (i, (end, roce)) in found.iter().enumerate() {
        let times = seen.entry((*end, roce.packet[0])).or_insert(0);
        *times += 1;
        if *times <= 20 || i % step == 0 {
            kept.push(roce);
        }
    }
    let path = std::env::temp_dir().join(format!("granary-rxe-{}.pcap", std::process::id()));
    std::fs::write(&path, file(&kept))?;
    let result = scapy(&path, kept.len()).and_then(|()| tshark(&path, kept.len()));
    std::fs::remove_file(&path)?;
    result
}

/// Describes the last packets before a failure, one per line.
pub fn describe(recent: &[PacketRecord]) -> String {
    let mut text = String::new();
    for record in recent {
        let sender = ["this NIC  ", "the kernel"][record.from];
        let what = match find(&record.bytes) {
            None => format!("{} bytes, not RoCEv2", record.bytes.len()),
            Some(found) => match Packet::parse(found.packet) {
                Ok(p) => format!(
                    "QP {:#x} PSN {:#x} {}{:?}, {} bytes",
                    p.qpn.raw(),
                    p.psn.raw(),
                    if p.ack_request { "(ack) " } else { "" },
                    p.body,
                    p.payload.len()
                ),
                Err(e) => format!("{e:?}"),
            },
        };
        text += &format!(
            "        {:10.3?} {sender} {what}{}\n",
            record.at,
            if record.lost { " LOST" } else { "" }
        );
    }
    text
}

/// A capture file of raw IP packets.
fn file(packets: &[&Found<'_>]) -> Vec<u8> {
    let mut file = Vec::new();
    // Magic, version 2.4, zone, accuracy, longest packet, link type "raw IP".
    for word in [0xa1b2_c3d4u32, 4 << 16 | 2, 0, 0, 65535, 101] {
        file.extend(word.to_le_bytes());
    }
    for (n, packet) in packets.iter().enumerate() {
        let length = packet.ip.len() as u32;
        for word in [1_700_000_000, n as u32, length, length] {
            file.extend(word.to_le_bytes());
        }
        file.extend(packet.ip);
    }
    file
}

fn scapy(path: &Path, count: usize) -> Result<()> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/rnic/tests/icrc.py");
    // Debian's interpreter, because Debian's scapy is installed for it.
    let out = Command::new("/usr/bin/python3").arg(script).arg(path).output();
    let out = out.context("python3 (Debian: python3, python3-scapy)")?;
    let stdout = String::from_utf8_lossy(&out.stdout);
    let stderr = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "scapy (Debian: python3-scapy): {stdout}{stderr}");
    ensure!(stdout.trim() == format!("{count} agree"), "scapy: {stdout}");
    Ok(())
}

fn tshark(path: &Path, count: usize) -> Result<()> {
    let mut tshark = Command::new("tshark");
    tshark.arg("-n").arg("-r").arg(path).args(["-T", "fields"]);
    for guess in GUESSES.lines() {
        tshark.args(["--disable-protocol", guess]);
    }
    for field in ["infiniband.bth.opcode", "_ws.malformed"] {
        tshark.args(["-e", field]);
    }
    let out = tshark.output().context("tshark (Debian: tshark)")?;
    ensure!(out.status.success(), "tshark: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout)?;
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split('\t').collect()).collect();
    ensure!(lines.len() == count, "tshark sees {} packets of {count}", lines.len());
    for (i, line) in lines.iter().enumerate() {
        ensure!(!line[0].is_empty(), "tshark does not dissect packet {i} as RoCEv2");
        ensure!(
            line.get(1).is_none_or(|malformed| malformed.is_empty()),
            "packet {i} is malformed: {line:?}"
        );
    }
    Ok(())
}
