//! The kernel is the responder: our requests.

use anyhow::{Result, ensure};
use fabric::{Data, Key, MemoryRegion, Op, Remote, Status};

use crate::bench::{ALL, BUFFER, Bench, How, LOCAL, Link, READ, SUCCESS};
use crate::{sizes, unaligned};

/// The kernel's `ibv_wc_opcode` of a SEND that came, and of a WRITE with immediate data.
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
        ensure!(link.bytes(to + len, 16) == around, "{len} bytes: what is behind them has changed");
    }
    bench.unlink(link)
}

/// CAS that swaps and that does not, FAA, also over the end of the numbers.
pub fn atomics(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    let (at_old, old) = (LOCAL + 64, link.mr.sge(LOCAL + 64, 8));
    for i in 0..20 {
        let (offset, value) = (8 * i, 0x0123_4567_89ab_cdef_u64.rotate_left(i as u32));
        let at = link.there(offset);
        let get = format!("get {offset}");
        bench.guest.ask(&format!("put {offset} {value}"))?;
        link.ok(Op::CompareSwap { at, compare: value + 1, swap: 5, old })?;
        ensure!(bench.guest.number(&get)? == value, "a CAS swapped that should not");
        ensure!(link.word(at_old) == value, "CAS: another old value");
        link.ok(Op::CompareSwap { at, compare: value, swap: !value, old })?;
        ensure!(bench.guest.number(&get)? == !value, "a CAS did not swap");
        ensure!(link.word(at_old) == value, "CAS: another old value");
        let add = u64::MAX - 1000 * i as u64;
        link.ok(Op::FetchAdd { at, add, old })?;
        ensure!(bench.guest.number(&get)? == (!value).wrapping_add(add), "FAA: another sum");
        ensure!(link.word(at_old) == !value, "FAA: another old value");
    }
    bench.unlink(link)
}

/// A type-2 window that the kernel binds to the connection; its key.
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

/// A window that the kernel has bound, used by this NIC: in its range, with its rights, until it is invalidated.
///
/// What lies beyond its range is not tried: rxe looks at the range of the region only.
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
    // The window is bound, which it has to be: rxe does not survive the invalidation of a free one.
    bench.ok(&link, "inv", &key.to_string())?;
    refused(bench, &link, Op::Write { to: at(0), from: &[link.mr.sge(LOCAL, 8)] })?;
    bench.unlink(link)?;
    bench.guest.ask("dealloc 0").map(drop)?;

    // Without the right to write. That it is refused ends the connection, so that the kernel's invalidation
    // has to come from elsewhere: deallocating it does that.
    let link = bench.link(how)?;
    let key = window(bench, &link, 0, (0, 4096), READ)?;
    let at = Remote { rkey: Key(key), ..link.there(0) };
    link.ok(Op::Read { from: at, to: &[link.mr.sge(LOCAL, 8)] })?;
    refused(bench, &link, Op::Write { to: at, from: &[link.mr.sge(LOCAL, 8)] })?;
    bench.guest.ask("dealloc 0")?;
    bench.unlink(link)
}

/// Runs what the kernel must refuse. It says so once, and its queue pair is in Error from then on: if just that is lost
/// nobody answers any more.
fn refused(bench: &Bench, link: &Link, op: Op<'_>) -> Result<()> {
    let lost = || bench.guest.cable.counts().lost;
    let before = lost();
    let c = link.run(op)?;
    let is_unheard = c.status == Status::RetryExceeded && lost() > before;
    let is_refused = c.status == Status::RemoteAccess || is_unheard;
    ensure!(is_refused, "{op:?}: not refused: {}", c.status);
    Ok(())
}

/// A window that the kernel has bound to one queue pair, used through another one.
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

/// SEND_WITH_INV of a window of the kernel's, which then is dead. It does not say so in the completion: rxe leaves
/// `IBV_WC_WITH_INV` out.
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

/// Keys that are not, ranges beyond their region.
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
                // An atomic has to be aligned, so it cannot stand across the end.
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

/// A queue pair that there is not any more: nobody answers, and this NIC gives up.
pub fn wrong_qp(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    bench.guest.ask(&format!("destroy {}", link.slot))?;
    bench.guest.ask(&format!("dereg {}", link.slot))?;
    bench.free(link.slot);
    let c = link.run(Op::Write { to: link.there(0), from: &[link.mr.sge(LOCAL, 8)] })?;
    ensure!(c.status == Status::RetryExceeded, "{}", c.status);
    Ok(())
}

/// A SEND before there is a receive: this NIC is told to wait, and asks again.
pub fn receiver_not_ready(bench: &mut Bench, how: How) -> Result<()> {
    let link = bench.link(how)?;
    for len in [0, 100, 5000] {
        link.fill(LOCAL, len, 71);
        link.post(5, Op::Send { from: &[link.mr.sge(LOCAL, len as u32)] })?;
        // It is refused a few times before this; if not, the case says nothing, and is right.
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
