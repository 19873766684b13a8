//! The kernel is the responder, this NIC the requester.

use anyhow::{Result, ensure};
use verbs::{Data, Key, MemoryRegion, Op, Remote, Status};

use crate::bench::{ALL, BUFFER, Bench, How, LOCAL, Link, READ, SUCCESS};
use crate::{sizes, unaligned};

/// `ibv_wc_opcode` of a received SEND, and of a received WRITE with immediate data.
const RECV: u32 = 128;
const RECV_WRITE: u32 = 129;

/// SENDs of all sizes, with and without immediate data.
pub fn send(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for (i, len) in sizes(how).enumerate() {
        let (from, to, seed) = (unaligned(i), LOCAL + unaligned(i + 3), 500 + i as u64);
        bench.guest.ask(&format!("recv {} 7 {to} {}", link.slot, len + 5))?;
        link.fill(from, len, seed);
        let imm = (i % 2 == 1).then_some(0xdead_0000 + i as u32);
        let gather = [
            link.mr.sge(from, len as u32 / 2),
            link.mr.sge(from + len / 2, (len - len / 2) as u32),
        ];
        match imm {
            Some(imm) => link.ok(Op::SendImm { data: Data::Gather(&gather), imm })?,
            None => link.ok(Op::Send { from: &gather })?,
        };
        let wc = bench.wait(&link)?;
        ensure!(wc.status == SUCCESS && wc.opcode == RECV && wc.id == 7, "{wc:?}");
        ensure!(wc.bytes as usize == len && wc.imm == imm, "{wc:?} of {len} bytes, {imm:?}");
        bench.check(to, len, seed)?;
    }
    bench.unlink(link)
}

/// WRITEs of all sizes, with and without immediate data.
pub fn write(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for (i, len) in sizes(how).enumerate() {
        let (from, to, seed) = (LOCAL + unaligned(i + 2), unaligned(i + 5), 600 + i as u64);
        bench.fill(to + len, 16, 9)?;
        link.fill(from, len, seed);
        let (there, gather) = (link.there(to), [link.mr.sge(from, len as u32)]);
        let imm = (i % 3 == 1).then_some(0xbeef_0000 + i as u32);
        match imm {
            Some(imm) => {
                bench.guest.ask(&format!("recv {} 8 0 0", link.slot))?;
                link.ok(Op::WriteImm { to: there, data: Data::Gather(&gather), imm })?;
                let wc = bench.wait(&link)?;
                ensure!(wc.status == SUCCESS && wc.opcode == RECV_WRITE, "{wc:?}");
                ensure!(wc.imm == imm.into() && wc.bytes as usize == len, "{wc:?} of {len} bytes");
            }
            None => drop(link.ok(Op::Write { to: there, from: &gather })?),
        }
        bench.check(to, len, seed)?;
        bench.check(to + len, 16, 9)?;
    }
    bench.unlink(link)
}

/// READs of all sizes.
pub fn read(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for (i, len) in sizes(how).enumerate() {
        let (from, to, seed) = (unaligned(i + 1), LOCAL + unaligned(i + 4), 700 + i as u64);
        bench.fill(from, len, seed)?;
        let around = link.bytes(to + len, 16);
        link.ok(Op::Read { from: link.there(from), to: &[link.mr.sge(to, len as u32)] })?;
        link.check(to, len, seed)?;
        ensure!(
            link.bytes(to + len, 16) == around,
            "{len} bytes: memory beyond the range has changed"
        );
    }
    bench.unlink(link)
}

/// Successful and failing CAS, and FAA with wrap-around.
pub fn atomics(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let (at_old, old) = (LOCAL + 64, link.mr.sge(LOCAL + 64, 8));
    for i in 0..20 {
        let (offset, value) = (8 * i, 0x0123_4567_89ab_cdef_u64.rotate_left(i as u32));
        let at = link.there(offset);
        let get = format!("get {offset}");
        bench.guest.ask(&format!("put {offset} {value}"))?;
        link.ok(Op::CompareSwap { at, compare: value + 1, swap: 5, old })?;
        ensure!(bench.guest.number(&get)? == value, "a CAS swapped despite a wrong value");
        ensure!(link.word(at_old) == value, "failing CAS: wrong old value");
        link.ok(Op::CompareSwap { at, compare: value, swap: !value, old })?;
        ensure!(bench.guest.number(&get)? == !value, "a CAS did not swap");
        ensure!(link.word(at_old) == value, "CAS: wrong old value");
        let add = u64::MAX - 1000 * i as u64;
        link.ok(Op::FetchAdd { at, add, old })?;
        ensure!(bench.guest.number(&get)? == (!value).wrapping_add(add), "FAA: wrong sum");
        ensure!(link.word(at_old) == !value, "FAA: wrong old value");
    }
    bench.unlink(link)
}

/// Makes the kernel bind a type-2 window to the connection; returns the key.
fn window(
    bench: &mut Bench,
    link: &Link,
    mw: usize,
    (offset, len): (usize, usize),
    access: u32,
) -> Result<u32> {
    let key = bench.guest.number(&format!("mw {mw}"))? as u32;
    let key = key & !0xff | (key + 1) & 0xff;
    bench.ok(link, "bind", &format!("{mw} {} {offset} {len} {access} {key}", link.slot))?;
    Ok(key)
}

/// This NIC uses a window of the kernel: within its range and access rights, until its
/// invalidation.
///
/// Accesses beyond the range are not tested, because rxe checks the range of the region only.
pub fn their_window(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let key = window(bench, &link, 0, (1003, 5000), ALL & !1)?;
    let at = |offset: usize| Remote { rkey: Key(key), ..link.there(1003 + offset) };
    link.fill(LOCAL, 5000, 51);
    link.ok(Op::Write { to: at(0), from: &[link.mr.sge(LOCAL, 5000)] })?;
    bench.check(1003, 5000, 51)?;
    link.ok(Op::Read { from: at(0), to: &[link.mr.sge(LOCAL + 9001, 5000)] })?;
    link.check(LOCAL + 9001, 5000, 51)?;
    bench.guest.ask("put 1008 40")?;
    link.ok(Op::FetchAdd { at: at(5), add: 2, old: link.mr.sge(LOCAL, 8) })?;
    ensure!(bench.guest.number("get 1008")? == 42, "FAA through a window");
    // The window must be bound here, because rxe crashes on the invalidation of an unbound window.
    bench.ok(&link, "inv", &key.to_string())?;
    refused(bench, &link, Op::Write { to: at(0), from: &[link.mr.sge(LOCAL, 8)] })?;
    bench.unlink(link)?;
    bench.guest.ask("dealloc 0").map(drop)?;

    // A window without write access. The refusal breaks the connection, so the window cannot be
    // invalidated through it; its deallocation invalidates it.
    let link = bench.link(how)?;
    let key = window(bench, &link, 0, (0, 4096), READ)?;
    let at = Remote { rkey: Key(key), ..link.there(0) };
    link.ok(Op::Read { from: at, to: &[link.mr.sge(LOCAL, 8)] })?;
    refused(bench, &link, Op::Write { to: at, from: &[link.mr.sge(LOCAL, 8)] })?;
    bench.guest.ask("dealloc 0")?;
    bench.unlink(link)
}

/// Executes a request that the kernel must refuse. The kernel sends a single NAK and then has its
/// QP in state Error. If the NAK is lost, no further answer comes, and the retries are exhausted.
fn refused(bench: &Bench, link: &Link, op: Op<'_>) -> Result<()> {
    let lost = || bench.guest.link.counts().lost;
    let before = lost();
    let c = link.run(op)?;
    let nak_lost = c.status == Status::RetryExceeded && lost() > before;
    let is_refused = c.status == Status::RemoteAccess || nak_lost;
    ensure!(is_refused, "{op:?}: not refused: {}", c.status);
    Ok(())
}

/// This NIC uses a window that the kernel has bound to another QP.
pub fn another_queue_pairs_window(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let pd = link.pd.clone();
    let other = bench.link_in(how, &pd, 0)?;
    let key = window(bench, &link, 0, (64, 64), ALL & !1)?;
    let at = Remote { rkey: Key(key), ..link.there(64) };
    refused(bench, &other, Op::Read { from: at, to: &[other.mr.sge(LOCAL, 8)] })?;
    link.ok(Op::Read { from: at, to: &[link.mr.sge(LOCAL, 8)] })?;
    bench.guest.ask("dealloc 0")?;
    bench.unlink(other)?;
    bench.unlink(link)
}

/// SEND_WITH_INV invalidates a window of the kernel. The completion does not show the invalidation,
/// because rxe omits `IBV_WC_WITH_INV`.
pub fn send_with_invalidate(bench: &mut Bench, how: How) -> Result<()> {
    for len in [0, 1, 37, 1500, 5000] {
        let link = bench.link(how)?;
        let key = window(bench, &link, 0, (64, 64), ALL & !1)?;
        let at = Remote { rkey: Key(key), ..link.there(64) };
        link.ok(Op::Write { to: at, from: &[link.mr.sge(LOCAL, 64)] })?;
        bench.guest.ask(&format!("recv {} 9 {} 6000", link.slot, LOCAL + 3))?;
        link.fill(LOCAL + 1, len, 61);
        let data = Data::Gather(&[link.mr.sge(LOCAL + 1, len as u32)]);
        link.ok(Op::SendInvalidate { data, key: Key(key) })?;
        let wc = bench.wait(&link)?;
        ensure!(wc.status == SUCCESS && wc.bytes as usize == len, "{wc:?}");
        bench.check(LOCAL + 3, len, 61)?;
        refused(bench, &link, Op::Write { to: at, from: &[link.mr.sge(LOCAL, 1)] })?;
        bench.unlink(link)?;
        bench.guest.ask("dealloc 0")?;
    }
    Ok(())
}

/// Invalid keys, and ranges beyond the region.
pub fn wrong_keys_and_ranges(bench: &mut Bench, how: How) -> Result<()> {
    for verb in ["write", "read", "faa"] {
        for what in ["tag", "index", "before", "behind", "over the end"] {
            let link = bench.link(how)?;
            let (start, key) = link.theirs;
            let end = start + BUFFER as u64;
            let (addr, key) = match what {
                "tag" => (start, key ^ 1),
                "index" => (start, key ^ 0x7fff_ff00),
                "before" => (start - 8, key),
                "behind" => (end, key),
                // An atomic must be aligned, so it cannot cross the end.
                _ => (end - if verb == "faa" { 0 } else { 7 }, key),
            };
            let at = Remote { addr, rkey: Key(key) };
            let here = [link.mr.sge(LOCAL, 8)];
            refused(
                bench,
                &link,
                match verb {
                    "write" => Op::Write { to: at, from: &here },
                    "read" => Op::Read { from: at, to: &here },
                    _ => Op::FetchAdd { at, add: 1, old: here[0] },
                },
            )
            .map_err(|e| e.context(what))?;
            bench.unlink(link)?;
        }
    }
    Ok(())
}

/// A destroyed QP: no answer comes, and this NIC exhausts its retries.
pub fn wrong_qp(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    bench.guest.ask(&format!("destroy {}", link.slot))?;
    bench.guest.ask(&format!("dereg {}", link.slot))?;
    bench.free(link.slot);
    let c = link.run(Op::Write { to: link.there(0), from: &[link.mr.sge(LOCAL, 8)] })?;
    ensure!(c.status == Status::RetryExceeded, "{}", c.status);
    Ok(())
}

/// A SEND without a posted receive: this NIC receives RNR NAKs and retries.
pub fn receiver_not_ready(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for len in [0, 100, 5000] {
        link.fill(LOCAL, len, 71);
        link.post(5, Op::Send { from: &[link.mr.sge(LOCAL, len as u32)] })?;
        // Time for a few RNR NAKs before the receive is posted.
        std::thread::sleep(std::time::Duration::from_millis(30));
        bench.guest.ask(&format!("recv {} 3 1 6000", link.slot))?;
        let c = link.next()?.ok()?;
        ensure!(c.id == 5, "{c:?}");
        let wc = bench.wait(&link)?;
        ensure!(wc.status == SUCCESS && wc.bytes as usize == len, "{wc:?}");
        bench.check(1, len, 71)?;
    }
    bench.unlink(link)
}
