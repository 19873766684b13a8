//! Interoperability of our RoCEv2 with the kernel's soft-RoCE (rdma_rxe), in both roles.
//!
//! A Debian kernel boots in qemu. A program that uses only libibverbs (`tests/rxe/peer.c`) drives
//! its rxe device. A NIC of this process is connected to it by a link that can lose, duplicate and
//! delay packets. See docs/internals/roce.md for the tests and for the differences between rxe and
//! the specification.
//!
//! The test takes minutes and runs with `GRANARY_TEST_FULL=1` only.

mod bench;
mod capture;
mod finemem;
mod kernel_answers;
mod kernel_asks;
mod mixed;
mod patronus;

use std::time::Instant;

use anyhow::{Result, ensure};
use granary_tests::guest::Guest;
use granary_tests::impaired_link::Impairment;
use granary_tests::needs;
use granary_tests::node::full;
use verbs::PathMtu;

use bench::{Bench, How};

/// Message sizes from 0 to 1 MiB, around the boundaries of packets and of their padding.
const SIZES: [usize; 22] = [
    0,
    1,
    2,
    3,
    4,
    5,
    63,
    255,
    256,
    257,
    1023,
    1024,
    1025,
    2047,
    2048,
    4095,
    4096,
    4097,
    65_533,
    300_001,
    (1 << 20) - 1,
    1 << 20,
];

/// The sizes of a case. With the smallest MTU the longest sizes, thousands of packets, are left
/// out.
fn sizes(how: How) -> impl Iterator<Item = usize> {
    SIZES.into_iter().filter(move |len| how.mtu > PathMtu::Mtu256 || *len < 1 << 19)
}

/// Offset number `i`; consecutive offsets have different remainders modulo 8.
fn unaligned(i: usize) -> usize {
    64 * i + 1 + i * 3 % 7
}

type Case = (&'static str, fn(&mut Bench, How) -> Result<()>);

/// Cases that move data.
const TRAFFIC: [Case; 12] = [
    ("kernel asks: SEND", kernel_asks::send),
    ("kernel asks: WRITE", kernel_asks::write),
    ("kernel asks: READ", kernel_asks::read),
    ("kernel asks: CAS, FAA", kernel_asks::atomics),
    ("kernel asks: SEND_WITH_INV", kernel_asks::send_with_invalidate),
    ("kernel asks: receiver not ready", kernel_asks::receiver_not_ready),
    ("kernel answers: SEND", kernel_answers::send),
    ("kernel answers: WRITE", kernel_answers::write),
    ("kernel answers: READ", kernel_answers::read),
    ("kernel answers: CAS, FAA", kernel_answers::atomics),
    ("kernel answers: SEND_WITH_INV", kernel_answers::send_with_invalidate),
    ("kernel answers: receiver not ready", kernel_answers::receiver_not_ready),
];

/// Cases of windows and of refused accesses.
const KEYS: [Case; 9] = [
    ("kernel asks: through our window", kernel_asks::our_window),
    ("kernel asks: beyond our window", kernel_asks::beyond_our_window),
    ("kernel asks: another QP's window", kernel_asks::another_queue_pairs_window),
    ("kernel asks: wrong keys and ranges", kernel_asks::wrong_keys_and_ranges),
    ("kernel asks: wrong QP", kernel_asks::wrong_qp),
    ("kernel answers: through its window", kernel_answers::their_window),
    ("kernel answers: another QP's window", kernel_answers::another_queue_pairs_window),
    ("kernel answers: wrong keys and ranges", kernel_answers::wrong_keys_and_ranges),
    ("kernel answers: wrong QP", kernel_answers::wrong_qp),
];

/// Operations of a mixed run.
const MIXED: usize = 10_000;

/// Runs cases and prints their results.
struct Runner {
    bench: Bench,
    /// Filter: only cases whose names contain this text (environment variable `GRANARY_RXE`).
    only: Option<String>,
    passed: usize,
    failed: Vec<String>,
}

impl Runner {
    fn run(&mut self, name: &str, what: impl FnOnce(&mut Bench) -> Result<()>) -> Result<()> {
        if self.only.as_ref().is_some_and(|only| !name.contains(only)) {
            return Ok(());
        }
        let start = Instant::now();
        match what(&mut self.bench) {
            Ok(()) => {
                println!("ok      {name} ({:.1?})", start.elapsed());
                self.passed += 1;
            }
            Err(e) => {
                println!("FAILED  {name} ({:.1?}): {e:#}", start.elapsed());
                println!("{}", capture::describe(&self.bench.guest.link.recent()));
                self.failed.push(format!("{name}: {e:#}"));
                self.bench.restart()?;
            }
        }
        Ok(())
    }

    fn cases(&mut self, under: &str, how: How, cases: &[Case]) -> Result<()> {
        for (name, case) in cases {
            self.run(&format!("{under}, {name}"), |bench| case(bench, how))?;
        }
        Ok(())
    }
}

#[test]
fn nic_interoperates_with_kernel_soft_roce() -> Result<()> {
    if !full() {
        println!(
            "skipped: the test boots a virtual machine, which takes minutes; GRANARY_TEST_FULL=1 \
             runs it"
        );
        return Ok(());
    }
    if cfg!(not(target_arch = "x86_64")) {
        needs::skip("the guest's image can be built on x86-64 only");
        return Ok(());
    }
    let Some(guest) = Guest::boot()? else { return Ok(()) };
    let only = std::env::var("GRANARY_RXE").ok();
    let mut runner = Runner { bench: Bench::new(guest)?, only, passed: 0, failed: Vec::new() };
    let plain = How::default();

    runner.bench.guest.link.start_capture(capture::PACKETS_MAX);
    runner.cases("MTU 1024", plain, &TRAFFIC)?;
    runner.cases("MTU 1024", plain, &KEYS)?;
    runner.run("the capture of this", |bench| capture::check(&bench.guest.link.take_capture()))?;
    let any = usize::MAX;
    runner.run("10,000 mixed operations, kernel asks", |b| {
        mixed::kernel_asks(b, plain, MIXED, (1, any))
    })?;
    runner.run("10,000 mixed operations, kernel answers", |b| {
        mixed::kernel_answers(b, plain, MIXED, 2)
    })?;

    runner.run("finemem: chunks by READ, WRITE and CAS", |b| finemem::chunks(b, plain))?;
    runner.run("patronus: leases by SEND and CAS", |b| patronus::leases(b, plain))?;

    let v6 = How { v6: true, ..plain };
    runner.bench.guest.link.start_capture(capture::PACKETS_MAX);
    runner.cases("IPv6", v6, &TRAFFIC)?;
    runner.run("the capture of this", |bench| capture::check(&bench.guest.link.take_capture()))?;
    for mtu in [PathMtu::Mtu256, PathMtu::Mtu4096] {
        runner.cases(&format!("MTU {}", mtu.bytes()), How { mtu, ..plain }, &TRAFFIC)?;
    }

    // Of a hundred packets one is lost, one is duplicated, two are delayed.
    let impairment = Impairment { lost: 10, duplicated: 10, delayed: 20, seed: 77 };
    runner.bench.guest.link.set_impairment(impairment);
    runner.bench.guest.link.start_capture(capture::PACKETS_MAX);
    runner.cases("impaired link", plain, &TRAFFIC)?;
    runner.cases("impaired link", plain, &KEYS)?;
    runner.run("the capture of this", |bench| capture::check(&bench.guest.link.take_capture()))?;
    // READs of one packet only, because a duplicated or delayed ACK between the packets of a READ's
    // response ends rxe's connection.
    let one_packet = 1024;
    runner.run("10,000 mixed operations over an impaired link, kernel asks", |b| {
        mixed::kernel_asks(b, plain, MIXED, (3, one_packet))
    })?;
    runner.run("10,000 mixed operations over an impaired link, kernel answers", |b| {
        mixed::kernel_answers(b, plain, MIXED, 4)
    })?;
    runner.run("impaired link, finemem: chunks by READ, WRITE and CAS", |b| {
        finemem::chunks(b, plain)
    })?;
    runner
        .run("impaired link, patronus: leases by SEND and CAS", |b| patronus::leases(b, plain))?;
    println!("the link: {:?}", runner.bench.guest.link.counts());

    let Runner { bench, passed, failed, .. } = runner;
    bench.guest.end()?;
    ensure!(
        failed.is_empty(),
        "{} of {}:\n{}",
        failed.len(),
        passed + failed.len(),
        failed.join("\n")
    );
    println!("{passed} cases");
    Ok(())
}
