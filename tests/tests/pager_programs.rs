//! Unmodified programs under the pager give the output of a plain run, within their bound.
//!
//! The pool is a diagnostic one here (a file without a name, so that it is nobody's resident memory):
//! what is tested is the pager and the preload library.

use std::fmt::Write;

use granary_tests::pager::{Scratch, assert_same, paged, plain};
use pager::stats::Counter;

const MIB: u64 = 1 << 20;

/// Lines in no order, the same every time.
fn lines(count: u32) -> String {
    let (mut text, mut state) = (String::new(), 1u64);
    for _ in 0..count {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let width = (state >> 59) as usize;
        writeln!(text, "{:012} {}", state >> 24, "x".repeat(width)).expect("memory");
    }
    text
}

#[test]
fn sort_gives_the_same_and_stays_in_its_bound() {
    let scratch = Scratch::new("sort");
    let input = scratch.0.join("lines");
    std::fs::write(&input, lines(1_000_000)).unwrap();
    let input = input.to_str().unwrap();
    let arguments = ["--parallel=1", "-S", "300M", input];
    let plain = plain("sort", &arguments);
    assert!(plain.resident_bytes > 48 * MIB, "the bound must bite");
    let paged = paged(16 * MIB, "memory:1GiB", "sort", &arguments);
    assert_same(&plain, &paged, 16 * MIB);
    assert!(paged.summary.get(Counter::PagesOut) > 2000, "{}", paged.summary);
    assert!(paged.summary.get(Counter::PagesIn) > 2000, "{}", paged.summary);
}

#[test]
fn sort_in_threads_with_a_full_pool_goes_on_in_the_overflow_file() {
    let scratch = Scratch::new("full");
    let input = scratch.0.join("lines");
    std::fs::write(&input, lines(400_000)).unwrap();
    let input = input.to_str().unwrap();
    let arguments = ["--parallel=2", "-S", "200M", input];
    let plain = plain("sort", &arguments);
    let paged = paged(16 * MIB, "memory:4MiB", "sort", &arguments);
    assert_same(&plain, &paged, 16 * MIB);
    assert_eq!(paged.summary.get(Counter::PoolChunksPeak), 4, "{}", paged.summary);
    assert!(paged.summary.get(Counter::OverflowChunksPeak) > 8, "{}", paged.summary);
}

#[test]
fn a_pool_that_goes_away_ends_the_program_with_a_message() {
    let scratch = Scratch::new("gone");
    let input = scratch.0.join("lines");
    std::fs::write(&input, lines(400_000)).unwrap();
    let input = input.to_str().unwrap();
    let paged = paged(16 * MIB, "memory:1GiB,gone-after=20", "sort", &["-S", "200M", input]);
    assert_eq!(paged.code, pager::config::EXIT_POOL_GONE);
    assert!(paged.stderr.contains("the memory pool is gone"), "{}", paged.stderr);
    assert!(paged.stdout.is_empty(), "nothing was sorted yet");
}

const PYTHON: &str = "
import hashlib, subprocess, sys, threading
rows = [(i * 7919 % 1000003, str(i) * 3) for i in range(300000)]
table = dict(rows)
found = []
def look(part):
    found.append(sum(len(table[key]) for key in list(table)[part::4]))
threads = [threading.Thread(target=look, args=(part,)) for part in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sum(found), hashlib.sha256(repr(sorted(rows)).encode()).hexdigest())
print(subprocess.check_output([sys.executable, '-c', 'print(sum(range(1000)))']))
print(subprocess.check_output('x=$(echo one | cat | wc -c); echo $x; exit 0', shell=True))
print(subprocess.run(['sh', '-c', 'exit 7'], preexec_fn=lambda: None).returncode)
sys.exit(3)
";

#[test]
fn python_with_threads_and_subprocesses() {
    let plain = plain("/usr/bin/python3", &["-c", PYTHON]);
    assert!(plain.resident_bytes > 64 * MIB, "the bound must bite");
    let paged = paged(24 * MIB, "memory:1GiB", "/usr/bin/python3", &["-c", PYTHON]);
    assert_eq!(plain.code, 3);
    assert_same(&plain, &paged, 24 * MIB);
    assert!(paged.summary.processes() >= 3, "what it starts is paged too");
}

#[test]
fn gcc_compiles_a_real_file() {
    let scratch = Scratch::new("gcc");
    let mut source = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
    for number in 0..1500 {
        writeln!(
            source,
            "int f{number}(int a, char *s) {{ for (int i = 0; i < a; i++) s[i] = i * {number} \
             + strlen(s); printf(\"%d %s\", a, s); return a * {number} + s[0]; }}"
        )
        .unwrap();
    }
    let file = scratch.0.join("real.c");
    std::fs::write(&file, source).unwrap();
    let file = file.to_str().unwrap();
    let arguments = ["-O2", "-S", "-o", "-", file];
    let plain = plain("gcc", &arguments);
    let paged = paged(16 * MIB, "memory:1GiB", "gcc", &arguments);
    assert_eq!(paged.code, 0, "{}", paged.stderr);
    assert!(paged.stdout == plain.stdout, "the code differs");
    assert!(paged.summary.get(Counter::PagesIn) > 0, "{}", paged.summary);
}

#[test]
fn sqlite_builds_and_queries_a_table_in_memory() {
    let statements = "create table t(a integer primary key, b text, c real); \
        with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000) \
        insert into t select i, printf('%064d', i * 7919 % 1000003), i * 0.5 from n; \
        create index tb on t(b); \
        select count(*), sum(a), max(b), avg(c) from t; \
        select a, b from t order by b limit 20 offset 100000;";
    let arguments = [":memory:", statements];
    let plain = plain("sqlite3", &arguments);
    let paged = paged(12 * MIB, "memory:1GiB", "sqlite3", &arguments);
    assert!(plain.resident_bytes > 36 * MIB, "the bound must bite");
    assert_same(&plain, &paged, 12 * MIB);
}

#[test]
fn without_a_bound_the_library_pages_nothing() {
    let scratch = Scratch::new("unbound");
    let program = scratch.compile("unbound", include_str!("pager_programs/mappings.c"));
    let mut command = std::process::Command::new(program);
    let output = command.env("LD_PRELOAD", granary_tests::pager::library()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a C program that checks itself, plainly and paged.
fn self_checking(name: &str, source: &str, local: u64) {
    let scratch = Scratch::new(name);
    let program = scratch.compile(name, source);
    let file = scratch.0.join("data");
    let (program, file) = (program.to_str().unwrap(), file.to_str().unwrap());
    let plain = plain(program, &[file]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    let paged = paged(local, "memory:1GiB", program, &[file]);
    assert_same(&plain, &paged, local);
    assert!(paged.summary.get(Counter::PagesIn) > 100, "{}", paged.summary);
}

#[test]
fn threads_share_paged_memory() {
    self_checking("threads", include_str!("pager_programs/threads.c"), 12 * MIB);
}

#[test]
fn system_calls_reach_paged_buffers() {
    self_checking("syscalls", include_str!("pager_programs/syscalls.c"), 12 * MIB);
}

#[test]
fn mappings_are_changed_as_the_kernel_would() {
    self_checking("mappings", include_str!("pager_programs/mappings.c"), 12 * MIB);
}

#[test]
fn a_child_sees_what_was_there_at_the_fork() {
    self_checking("forks", include_str!("pager_programs/forks.c"), 12 * MIB);
}

#[test]
fn a_child_whose_parent_ends_says_so_and_never_reads_zeros() {
    let scratch = Scratch::new("orphan");
    let program = scratch.compile("orphan", include_str!("pager_programs/orphan.c"));
    let paged = paged(12 * MIB, "memory:1GiB", program.to_str().unwrap(), &[]);
    // The output pipe closes when the child is gone too.
    assert_eq!(String::from_utf8_lossy(&paged.stdout), "parent ends\n");
    assert!(paged.stderr.contains("fork and go on without exec is not supported"));
}
