//! Programs over a private memory node, whose chunks the program's processes read and write
//! themselves (`--private-node direct`, the default) or by the software NIC (`nic`).
//!
//! Killed nodes, full pools and limits of file sizes are in `pager_programs` and `pager_files`,
//! whose private node is the default one.

use std::os::unix::process::CommandExt;

use granary_tests::needs;
use granary_tests::pager::{Outcome, Running, assert_same, plain};
use granary_tests::run::{NodeKind, Paged, Site};
use pager::stats::Counter;
use scheme::info::AccessKind;

const MIB: u64 = 1 << 20;
const PYTHON: &str = "/usr/bin/python3";

/// Fills 24 MiB, reads all pages twice, and changes half of them in between.
const PAGES: &str = "
def number(page, version): return (page * 7919 + version).to_bytes(8, 'little')
def fill(memory, version, step):
    for page in range(0, PAGES, step): memory[page * 4096:page * 4096 + 8] = number(page, version)
def check(memory, version, step):
    for page in range(0, PAGES, step):
        assert memory[page * 4096:page * 4096 + 8] == number(page, version), page
PAGES = 6144
memory = bytearray(PAGES * 4096)
fill(memory, 1, 1)
check(memory, 1, 1)
fill(memory, 2, 2)
check(memory, 2, 2)
print('right', flush=True)
";

/// Children that keep their parent's pages and have more of their own, at the same time.
const FAMILY: &str = "
import os
def child(version):
    own = bytearray(PAGES * 4096)
    fill(own, version, 1)
    check(memory, 2, 2)
    check(own, version, 1)
children = []
for version in range(10, 13):
    pid = os.fork()
    if pid == 0:
        child(version)
        os._exit(0)
    children.append(pid)
fill(memory, 3, 1)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
check(memory, 3, 1)
";

fn run(name: &str, options: &[&str], script: &str) -> Paged {
    let site = Site::new(NodeKind::Private, name, 8 * MIB, "1GiB").with_options(options);
    let paged = site.run(PYTHON, &["-c", script]);
    assert_same(&plain(PYTHON, &["-c", script]), &paged.outcome, site.local_bytes());
    assert!(paged.count("pages_out") > 3000 && paged.count("pages_in") > 3000, "{}", paged.stats);
    paged
}

fn moves(paged: &Paged) -> (&str, u64) {
    let private_node = paged.stats["private_node"].as_str().expect("a private node");
    (private_node, paged.count("processes_direct"))
}

#[test]
fn process_copies_its_pages_unless_the_nic_is_chosen() {
    let direct = run("private-direct", &[], PAGES);
    assert_eq!(moves(&direct), ("direct", 1));
    let stderr = &direct.outcome.stderr;
    assert!(
        stderr.contains("1 process(es) copy their pages; the NIC moves those of 0"),
        "{stderr}"
    );
    let nic = run("private-nic", &["--private-node", "nic"], PAGES);
    assert_eq!(moves(&nic), ("nic", 0));
}

#[test]
fn schemes_work_with_a_private_node() {
    for scheme in schemes::ALL {
        let name = scheme.name;
        let paged = run(&format!("private-{name}"), &["--scheme", name], PAGES);
        let moved = match scheme.access {
            AccessKind::OneSided => ("direct", 1),
            _ => ("nic", 0),
        };
        assert_eq!(moves(&paged), moved, "{name}");
    }
}

/// As in FineMem-Swap (FineMem §5), a chunk is a page.
#[test]
fn chunks_of_one_page_work_with_a_private_node() {
    for scheme in ["onesidedmw", "finemem"] {
        let options = ["--scheme", scheme, "--chunk", "4KiB", "--private-node", "nic"];
        let paged = run(&format!("private-pages-{scheme}"), &options, PAGES);
        assert!(paged.count("chunks_peak") > 3000, "{scheme}: {}", paged.stats);
    }
}

/// Fills 64 MiB, frees 7 of 8 pages, waits for the end of its input, and checks the other pages.
/// Nothing is read ahead, so only compaction opens a window of READs.
const HOLES: &str = "
import mmap, sys
PAGES = 16384
memory = mmap.mmap(-1, PAGES * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_RANDOM)
def number(page): return (page * 7919 + 1).to_bytes(8, 'little')
for page in range(PAGES): memory[page * 4096:page * 4096 + 8] = number(page)
for page in range(PAGES):
    if page % 8: memory.madvise(mmap.MADV_DONTNEED, page * 4096, 4096)
sys.stdin.read()
for page in range(PAGES):
    expected = bytes(8) if page % 8 else number(page)
    assert memory[page * 4096:page * 4096 + 8] == expected, page
print('right', flush=True)
";

#[test]
fn sparse_chunks_return_to_the_pool_with_trim() {
    let site = Site::new(NodeKind::Private, "private-trim", 4 * MIB, "1GiB")
        .with_options(&["--trim", "--chunk", "64KiB"]);
    let mut running =
        Running::start(site.command(PYTHON, &["-c", HOLES]).stdin(std::process::Stdio::piped()));
    site.wait_for_counters(&running, |summary| {
        let [live, held] = [Counter::LiveBytes, Counter::HeldBytes].map(|c| summary.get(c));
        summary.get(Counter::PagesCompacted) > 0 && held < 16 * MIB && 10 * held <= 11 * live
    });
    drop(running.input());
    let paged = site.finish(running);
    let Outcome { code, stdout, .. } = &paged.outcome;
    assert_eq!((*code, &stdout[..]), (0, &b"right\n"[..]), "{:?}", paged.outcome);
}

#[test]
fn forked_children_copy_their_pages_too() {
    let paged = run("private-family", &[], &[PAGES, FAMILY].concat());
    assert_eq!(moves(&paged), ("direct", paged.count("processes")));
    assert!(paged.count("processes") >= 4, "{}", paged.stats);
}

/// The scheduling of the NIC thread and of the handler is reported, with the reason for a refusal.
#[test]
fn granted_and_refused_scheduling_is_reported() {
    let paged = run("private-scheduling", &[], PAGES);
    let said = |paged: &Paged, name: &str| paged.stats[name].as_str().unwrap().to_owned();
    let (nic, handler) = (said(&paged, "nic_scheduling"), said(&paged, "handler_scheduling"));
    // The test may run without the right to SCHED_RR; then both give the reason.
    assert_eq!(paged.count("handlers_real_time"), u64::from(handler == "SCHED_RR"), "{handler}");
    assert!(nic == "SCHED_RR" || nic.contains('('), "{nic}");

    let site = Site::new(NodeKind::Private, "private-rttime", 8 * MIB, "1GiB");
    let mut command = site.command(PYTHON, &["-c", PAGES]);
    // SAFETY: the closure makes a single system call in the new process.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 1_000_000, rlim_max: 2_000_000 };
            match libc::setrlimit(libc::RLIMIT_RTTIME, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let paged = site.finish(Running::start(&mut command));
    assert_eq!((paged.outcome.code, paged.count("handlers_real_time")), (0, 0), "{:?}", paged);
    // Under `nice` the threads keep the nice value, and ask for nothing.
    let nice = rustix::process::getpriority_process(None).unwrap();
    let reason = if nice > 0 { "which it keeps" } else { "RLIMIT_RTTIME" };
    for name in ["nic_scheduling", "handler_scheduling"] {
        assert!(said(&paged, name).contains(reason), "{}", paged.stats);
    }
    assert!(paged.outcome.stderr.contains(reason), "{}", paged.outcome.stderr);
}

/// With the chunk memory, a child without root's rights could read its parent's pages.
#[test]
fn children_of_another_user_use_the_nic() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can change its user");
    }
    let site = Site::new(NodeKind::Private, "private-users", 12 * MIB, "1GiB");
    let source = include_str!("pager_programs/drops_privileges.c");
    let program = site.scratch.compile("drops_privileges", source);
    let paged = site.run(program.to_str().unwrap(), &[]);
    assert_eq!(String::from_utf8_lossy(&paged.outcome.stdout), "done\n", "{:?}", paged.outcome);
    // The daemon is root. Its two workers, and a child of each, are not.
    assert_eq!(moves(&paged), ("direct", 1));
    assert!(paged.count("processes") >= 3, "{}", paged.stats);
}
