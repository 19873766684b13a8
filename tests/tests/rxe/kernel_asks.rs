//! The kernel is the requester, this NIC the responder.

use anyhow::{Result, ensure};
use verbs::{
    Access, Bind, Key, MemoryRegion, MemoryWindow, MwKind, Nic, Op, QpState, QueuePair, WcOpcode,
};

use crate::bench::{Bench, How, LOCAL, Link, REMOTE_ACCESS, RETRY_EXCEEDED, SUCCESS};
use crate::{sizes, unaligned};

/// SENDs of all sizes, with and without immediate data.
pub fn send(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for (i, len) in sizes(how).enumerate() {
        let (from, to, seed) = (unaligned(i), LOCAL + unaligned(i + 3), 100 + i as u64);
        link.receive(7, &[link.mr.sge(to, len as u32 + 5)])?;
        bench.fill(from, len, seed)?;
        let imm = (i % 2 == 1).then_some(0xdead_0000 + i as u32);
        let extra = imm.map_or(String::new(), |imm| format!(" imm {imm}"));
        bench.ok(&link, "send", &format!("{from} {len}{extra}"))?;
        let c = link.next()?.ok()?;
        ensure!(c.opcode == WcOpcode::Receive && c.id == 7, "{c:?}");
        ensure!(c.bytes as usize == len && c.imm == imm, "{c:?} of {len} bytes, {imm:?}");
        link.check(to, len, seed)?;
    }
    bench.unlink(link)
}

/// WRITEs of all sizes, with and without immediate data.
pub fn write(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for (i, len) in sizes(how).enumerate() {
        let (from, to, seed) = (LOCAL + unaligned(i + 2), unaligned(i + 5), 200 + i as u64);
        let around = link.bytes(to + len, 16);
        bench.fill(from, len, seed)?;
        let imm = (i % 3 == 1).then_some(0xbeef_0000 + i as u32);
        let extra = imm.map_or(String::new(), |imm| format!(" imm {imm}"));
        if imm.is_some() {
            link.receive(8, &[])?;
        }
        bench.ok(&link, "write", &format!("{from} {len} {}{extra}", link.here(to)))?;
        if imm.is_some() {
            let c = link.next()?.ok()?;
            ensure!(c.opcode == WcOpcode::ReceiveWrite && c.imm == imm, "{c:?}");
            ensure!(c.bytes as usize == len, "{c:?} of {len} bytes");
        }
        link.check(to, len, seed)?;
        ensure!(
            link.bytes(to + len, 16) == around,
            "{len} bytes: memory beyond the range has changed"
        );
    }
    bench.unlink(link)
}

/// READs of all sizes.
pub fn read(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for (i, len) in sizes(how).enumerate() {
        let (from, to, seed) = (unaligned(i + 1), LOCAL + unaligned(i + 4), 300 + i as u64);
        link.fill(from, len, seed);
        bench.fill(to + len, 16, 9)?;
        let wc = bench.ok(&link, "read", &format!("{to} {len} {}", link.here(from)))?;
        ensure!(wc.opcode == 2, "{wc:?}");
        bench.check(to, len, seed)?;
        bench.check(to + len, 16, 9)?;
    }
    bench.unlink(link)
}

/// Successful and failing CAS, and FAA with wrap-around.
pub fn atomics(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let old = LOCAL + 64;
    for i in 0..20 {
        let (at, value) = (8 * i, 0x0123_4567_89ab_cdef_u64.rotate_left(i as u32));
        let here = link.here(at);
        link.put_word(at, value);
        bench.ok(&link, "cas", &format!("{old} {here} {} 5", value + 1))?;
        ensure!(link.word(at) == value, "a CAS swapped despite a wrong value");
        let found = bench.guest.number(&format!("get {old}"))?;
        ensure!(found == value, "failing CAS: wrong old value");
        bench.ok(&link, "cas", &format!("{old} {here} {value} {}", !value))?;
        ensure!(link.word(at) == !value, "a CAS did not swap");
        ensure!(bench.guest.number(&format!("get {old}"))? == value, "CAS: wrong old value");
        let add = u64::MAX - 1000 * i as u64;
        bench.ok(&link, "faa", &format!("{old} {here} {add}"))?;
        ensure!(link.word(at) == (!value).wrapping_add(add), "FAA: wrong sum");
        let found = bench.guest.number(&format!("get {old}"))?;
        ensure!(found == !value, "FAA {i} found {found:#x}, not {:#x}", !value);
    }
    bench.unlink(link)
}

/// Binds a window of this NIC to the connection.
fn window(link: &Link, offset: usize, len: u32, access: Access) -> Result<Bind> {
    let window = link.nic.alloc_mw(&link.pd)?;
    let bind = Bind {
        key: window.key(),
        kind: MwKind::Type2,
        tag: window.key().tag().wrapping_add(1),
        region: link.mr.key(),
        addr: link.mr.iova() + offset as u64,
        len,
        access,
        zero_based: false,
    };
    link.ok(Op::Bind(&bind))?;
    // Dropping the handle would free the window; it must exist until the end of the process.
    std::mem::forget(window);
    Ok(bind)
}

fn through(bind: &Bind, offset: u64) -> String {
    format!("{} {}", bind.addr + offset, bind.new_key().0)
}

/// The kernel uses a window of this NIC: within its range and access rights, until its
/// invalidation.
pub fn our_window(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let bind = window(&link, 1003, 5000, Access::REMOTE_ALL)?;
    bench.fill(LOCAL, 5000, 21)?;
    bench.ok(&link, "write", &format!("{LOCAL} 5000 {}", through(&bind, 0)))?;
    link.check(1003, 5000, 21)?;
    bench.ok(&link, "read", &format!("{} 4999 {}", LOCAL + 9000, through(&bind, 1)))?;
    link.fill(0, 5000, 22);
    bench.ok(&link, "write", &format!("{LOCAL} 0 {}", through(&bind, 5000)))?;
    // The first aligned word in the window.
    let at = 8 - (bind.addr % 8);
    link.put_word(1003 + at as usize, 40);
    bench.ok(&link, "faa", &format!("{LOCAL} {} 2", through(&bind, at)))?;
    ensure!(link.word(1003 + at as usize) == 42, "FAA through a window");

    link.ok(Op::LocalInvalidate { key: bind.new_key() })?;
    refused(bench, &link, "read", &format!("{LOCAL} 1 {}", through(&bind, 0)))?;
    bench.unlink(link)
}

/// Makes the kernel execute a request that this NIC must refuse.
fn refused(bench: &mut Bench, link: &Link, verb: &str, rest: &str) -> Result<()> {
    let wc = bench.run(link, verb, rest)?;
    ensure!(wc.status == REMOTE_ACCESS, "{verb} {rest}: not refused: {}", wc.text);
    ensure!(link.qp.state()? == QpState::Error, "a refusal must break this end, too");
    Ok(())
}

/// Accesses beyond the range or the rights of a window.
pub fn beyond_our_window(bench: &mut Bench, how: How) -> Result<()> {
    let cases: [(&str, Access, u64, usize); 7] = [
        ("one byte before", Access::REMOTE_ALL, u64::MAX, 1),
        ("one byte behind", Access::REMOTE_ALL, 4096, 1),
        ("over its end", Access::REMOTE_ALL, 4000, 97),
        ("across the address space", Access::REMOTE_ALL, 1 << 62, 8),
        ("several packets over its end", Access::REMOTE_ALL, 1, 4096),
        ("without the right to write", Access::REMOTE_READ, 0, 1),
        ("far behind, in its region", Access::REMOTE_ALL, 512 << 10, 8),
    ];
    for (what, access, offset, len) in cases {
        let link = bench.link(how)?;
        let bind = window(&link, 4096, 4096, access)?;
        let before = link.bytes(0, 1 << 20);
        bench.fill(LOCAL, len, 23)?;
        let at = format!("{} {}", bind.addr.wrapping_add(offset), bind.new_key().0);
        refused(bench, &link, "write", &format!("{LOCAL} {len} {at}"))
            .map_err(|e| e.context(what))?;
        // The first packets of a message, inside the window, may be executed.
        let after = link.bytes(0, 1 << 20);
        ensure!(before[..4096] == after[..4096] && before[8192..] == after[8192..], "{what}");
        ensure!(what.contains("several") || before == after, "{what}: memory has changed");
        bench.unlink(link)?;
    }
    let link = bench.link(how)?;
    let bind = window(&link, 4096, 4096, Access::REMOTE_WRITE)?;
    refused(bench, &link, "read", &format!("{LOCAL} 8 {}", through(&bind, 0)))?;
    bench.unlink(link)?;
    let link = bench.link(how)?;
    let bind = window(&link, 4096, 4096, Access::REMOTE_WRITE)?;
    refused(bench, &link, "faa", &format!("{LOCAL} {} 1", through(&bind, 0)))?;
    bench.unlink(link)
}

/// The kernel uses a window that is bound to another QP of the same protection domain.
pub fn another_queue_pairs_window(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let pd = link.pd.clone();
    let other = bench.link_in(how, &pd, 0)?;
    let bind = window(&link, 64, 64, Access::REMOTE_ALL)?;
    let place = format!("{LOCAL} 8 {}", through(&bind, 0));
    refused(bench, &other, "read", &place)?;
    bench.ok(&link, "read", &place)?;
    bench.unlink(other)?;
    bench.unlink(link)
}

/// SEND_WITH_INV invalidates a window of this NIC.
pub fn send_with_invalidate(bench: &mut Bench, how: How) -> Result<()> {
    for len in [0, 1, 37, 1500, 5000] {
        let link = bench.link(how)?;
        let bind = window(&link, 64, 64, Access::REMOTE_ALL)?;
        bench.ok(&link, "write", &format!("{LOCAL} 64 {}", through(&bind, 0)))?;
        link.receive(9, &[link.mr.sge(LOCAL + 3, 6000)])?;
        bench.fill(LOCAL + 1, len, 31)?;
        let key = bind.new_key();
        bench.ok(&link, "send", &format!("{} {len} inv {}", LOCAL + 1, key.0))?;
        let c = link.next()?.ok()?;
        ensure!(c.invalidated == Some(key) && c.bytes as usize == len, "{c:?}");
        link.check(LOCAL + 3, len, 31)?;
        refused(bench, &link, "write", &format!("{LOCAL} 1 {}", through(&bind, 0)))?;
        bench.unlink(link)?;
    }
    // An invalid key, and the key of a region.
    for region in [false, true] {
        let link = bench.link(how)?;
        let key = if region { link.mr.key() } else { Key(link.mr.key().0 ^ 0x55) };
        link.receive(9, &[link.mr.sge(LOCAL, 100)])?;
        refused(bench, &link, "send", &format!("{LOCAL} 10 inv {}", key.0))?;
        bench.unlink(link)?;
    }
    Ok(())
}

/// Invalid keys, and ranges beyond the region.
pub fn wrong_keys_and_ranges(bench: &mut Bench, how: How) -> Result<()> {
    for verb in ["write", "read", "faa"] {
        for what in ["tag", "index", "zero", "before", "behind", "over the end"] {
            let link = bench.link(how)?;
            let (start, end) = (link.mr.iova(), link.mr.iova() + crate::bench::BUFFER as u64);
            let key = link.mr.key().0;
            let (addr, key) = match what {
                "tag" => (start, key ^ 1),
                "index" => (start, key ^ 0x7fff_ff00),
                "zero" => (start, 0),
                "before" => (start - 8, key),
                "behind" => (end, key),
                // An atomic must be aligned, so it cannot cross the end.
                _ => (end - if verb == "faa" { 0 } else { 7 }, key),
            };
            let rest = match verb {
                "faa" => format!("{LOCAL} {addr} {key} 1"),
                _ => format!("{LOCAL} 8 {addr} {key}"),
            };
            refused(bench, &link, verb, &rest).map_err(|e| e.context(what))?;
            bench.unlink(link)?;
        }
    }
    Ok(())
}

/// A nonexistent QP: no answer comes, and the kernel exhausts its retries.
pub fn wrong_qp(bench: &mut Bench, how: How) -> Result<()> {
    let pd = {
        let link = bench.link(how)?;
        let pd = link.pd.clone();
        bench.unlink(link)?;
        pd
    };
    let lost = bench.link_in(How { retry: (14, 1), ..how }, &pd, 0x1234)?;
    let place = lost.here(0);
    let wc = bench.run(&lost, "write", &format!("{LOCAL} 8 {place}"))?;
    ensure!(wc.status == RETRY_EXCEEDED, "{}", wc.text);
    ensure!(lost.qp.state()? == QpState::ReadyToSend, "this end must not be affected");
    bench.unlink(lost)
}

/// A SEND without a posted receive: the kernel receives RNR NAKs and retries.
pub fn receiver_not_ready(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for len in [0, 100, 5000] {
        bench.fill(LOCAL, len, 41)?;
        bench.guest.ask(&format!("send {} 5 {LOCAL} {len}", link.slot))?;
        // Time for a few RNR NAKs before the receive is posted.
        std::thread::sleep(std::time::Duration::from_millis(30));
        link.receive(3, &[link.mr.sge(1, 6000)])?;
        let wc = bench.wait(&link)?;
        ensure!(wc.status == SUCCESS && wc.id == 5, "{wc:?}");
        ensure!(link.next()?.ok()?.bytes as usize == len, "{len} bytes");
        link.check(1, len, 41)?;
    }
    bench.unlink(link)
}
