//! Unmodified programs under the pager have the output of a run without the pager, and stay within
//! their limit of local memory.
//!
//! Most tests use the built `granary run`, with a private memory node and with a running one. Some
//! tests use the diagnostic pool, an unnamed file in the program's own process: for the library
//! with debug assertions, for a pool that fails after an exact number of transfers, and for forks.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::Stdio;

use granary_tests::node::full;
use granary_tests::over_each_node;
use granary_tests::pager::{
    Outcome, Running, Scratch, assert_same, assert_same_within, paged, plain,
};
use granary_tests::run::{NodeKind, Paged, Site};
use pager::config::EXIT_POOL_GONE;
use pager::stats::Counter;
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

over_each_node![
    sort_has_the_same_output,
    sort_uses_the_overflow_file_when_the_pool_is_full,
    sort_ends_when_the_node_is_killed,
    no_wrong_data_is_read_when_the_node_is_killed,
    no_wrong_data_is_read_when_the_node_stops,
    python_with_threads_and_subprocesses,
    gcc_compiles_a_real_file,
    sqlite_builds_and_queries_a_table_in_memory,
    threads_share_paged_memory,
    system_calls_reach_paged_buffers,
    mappings_are_changed_as_the_kernel_would,
    memory_at_addresses_of_the_programs_choice,
    advice_does_not_change_memory,
];

/// The size for `make test` or for `make test-full`.
fn size<T>(short: T, long: T) -> T {
    if full() { long } else { short }
}

/// Lines in a pseudo-random order, the same in every run.
fn lines(count: u32) -> String {
    let (mut text, mut state) = (String::new(), 1u64);
    for _ in 0..count {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let width = (state >> 59) as usize;
        writeln!(text, "{:012} {}", state >> 24, "x".repeat(width)).expect("memory");
    }
    text
}

/// Runs a program without the pager and paged. Asserts the same status and output, at least `pages`
/// moved in each direction, the limit of local memory, and that all chunks are free at the end.
fn compare(site: &Site, pages: u64, program: &str, arguments: &[&str]) -> (Outcome, Paged) {
    compare_within(site.local_bytes() + pager::CONSTANT_BYTES, site, pages, program, arguments)
}

fn compare_within(
    limit: u64,
    site: &Site,
    pages: u64,
    program: &str,
    arguments: &[&str],
) -> (Outcome, Paged) {
    let plain = plain(program, arguments);
    let paged = site.run(program, arguments);
    assert_same_within(&plain, &paged.outcome, limit);
    paged.assert_moved(pages);
    site.assert_all_chunks_free();
    (plain, paged)
}

/// Peak resident memory of a run without the pager, in bytes, from the rusage of a child of a small
/// process. The peak in an [`Outcome`] is sampled, and a short run may end between two samples.
fn plain_peak(program: &str, arguments: &[&str]) -> u64 {
    let script = "import resource, subprocess, sys\n\
                  subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)\n\
                  print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";
    let mut command = std::process::Command::new("/usr/bin/python3");
    let output = command.args(["-c", script, program]).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.trim().parse::<u64>().expect("a number of KiB") * 1024
}

fn sort_has_the_same_output(node: NodeKind) {
    let site = Site::new(node, "sort", size(8, 16) * MIB, "1GiB");
    let input = site.scratch.0.join("lines");
    std::fs::write(&input, lines(size(200_000, 600_000))).unwrap();
    let input = input.to_str().unwrap();
    let arguments = ["--parallel=1", "-S", "300M", input];
    compare(&site, 2000, "sort", &arguments);
    assert!(plain_peak("sort", &arguments) > 16 * MIB, "the program needs too little memory");
}

fn sort_uses_the_overflow_file_when_the_pool_is_full(node: NodeKind) {
    let site = Site::new(node, "full", size(8, 16) * MIB, "4MiB");
    let input = site.scratch.0.join("lines");
    std::fs::write(&input, lines(size(200_000, 600_000))).unwrap();
    let input = input.to_str().unwrap();
    let (_, paged) = compare(&site, 1000, "sort", &["--parallel=2", "-S", "200M", input]);
    assert_eq!(paged.count("chunks_peak"), 4, "{}", paged.stats);
    assert!(paged.count("overflow_peak_bytes") >= 4 * MIB, "{}", paged.stats);
}

/// The memory node is killed while the program's memory is in the pool and the program waits for
/// input.
fn sort_ends_when_the_node_is_killed(node: NodeKind) {
    let mut site = Site::new(node, "killed", 8 * MIB, "1GiB");
    let mut command = site.command("sort", &["-S", "200M"]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let mut input = running.input();
    input.write_all(lines(400_000).as_bytes()).unwrap();
    site.wait_for_pages_out(&running, 500);
    site.kill_node(&running);
    // Fails if the program has already ended.
    let _ = input.write_all(b"the last line\n");
    drop(input);
    let Paged { outcome, stats } = site.finish(running);
    assert_gone(&outcome);
    assert!(outcome.stdout.is_empty(), "nothing was sorted yet");
    assert!(stats["pages_out"].as_u64() >= Some(500), "{stats}");
}

/// A program that continuously reads and checks paged memory never sees wrong data.
fn no_wrong_data_is_read_when_the_node_is_killed(node: NodeKind) {
    no_wrong_data_is_read(node, "holder", Signal::KILL, 1);
}

/// A memory node that stops clears the chunks of its clients.
fn no_wrong_data_is_read_when_the_node_stops(node: NodeKind) {
    no_wrong_data_is_read(node, "holder-stop", Signal::TERM, 8);
}

fn no_wrong_data_is_read(node: NodeKind, name: &str, signal: Signal, rounds: u32) {
    for round in 0..rounds {
        let site = Site::new(node, &format!("{name}-{round}"), 8 * MIB, "1GiB");
        let program = site.scratch.compile("holder", include_str!("pager_programs/holder.c"));
        let running = Running::start(&mut site.command(program.to_str().unwrap(), &[]));
        // More pages than the program fills, so it is already rereading and changing them.
        site.wait_for_pages_out(&running, 10_000);
        site.signal_node(&running, signal);
        let Paged { outcome, stats } = site.finish(running);
        assert_gone(&outcome);
        assert_eq!(String::from_utf8_lossy(&outcome.stdout), "filled\n");
        assert!(stats["pages_in"].as_u64() >= Some(1000), "{stats}");
    }
}

fn assert_gone(outcome: &Outcome) {
    let Outcome { code, stderr, .. } = outcome;
    assert_eq!(*code, EXIT_POOL_GONE, "{stderr}");
    assert!(stderr.contains("the memory pool is gone"), "{stderr}");
}

/// Python program; `ROWS` is defined before it.
const PYTHON: &str = "
import hashlib, subprocess, sys, threading
rows = [(i * 7919 % 1000003, str(i) * 3) for i in range(ROWS)]
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

fn python_with_threads_and_subprocesses(node: NodeKind) {
    let site = Site::new(node, "python", size(8, 24) * MIB, "1GiB");
    let script = format!("ROWS = {}\n{PYTHON}", size(40_000, 150_000));
    let (plain, paged) = compare(&site, 2000, "/usr/bin/python3", &["-c", &script]);
    assert_eq!(plain.code, 3);
    let peak = plain_peak("/usr/bin/python3", &["-c", &script]);
    assert!(peak > 16 * MIB, "the program needs too little memory");
    assert!(paged.count("processes") >= 3, "child processes are not paged: {}", paged.stats);
}

/// The compiler's text segment is larger than other programs' memory. Therefore the limit is
/// `--local` plus the resident memory of a compilation of a single function, during which few pages
/// move.
fn gcc_compiles_a_real_file(node: NodeKind) {
    let site = Site::new(node, "gcc", size(12, 20) * MIB, "1GiB");
    let source = |name: &str, functions| {
        let mut text = String::from("#include <stdio.h>\n#include <string.h>\n");
        for number in 0..functions {
            writeln!(
                text,
                "int f{number}(int a, char *s) {{ for (int i = 0; i < a; i++) s[i] = i * {number} \
                 + strlen(s); printf(\"%d %s\", a, s); return a * {number} + s[0]; }}"
            )
            .unwrap();
        }
        let file = site.scratch.0.join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (one, many) = (source("one.c", 1), source("many.c", size(300, 1500)));
    let alone = site.run("gcc", &["-O1", "-S", "-o", "-", &one]);
    // The compiler and its driver share the bound. Depending on their timing, one process leaves
    // about 100 pages to the other.
    assert!(alone.count("pages_out") < 300, "{}", alone.stats);
    let limit = site.local_bytes() + alone.outcome.resident_bytes;
    let (plain, _) = compare_within(limit, &site, 2000, "gcc", &["-O1", "-S", "-o", "-", &many]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
}

fn sqlite_builds_and_queries_a_table_in_memory(node: NodeKind) {
    let site = Site::new(node, "sqlite", 4 * MIB, "1GiB");
    let rows = size(100_000, 200_000);
    let statements = format!(
        "create table t(a integer primary key, b text, c real); \
         with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows}) \
         insert into t select i, printf('%064d', i * 7919 % 1000003), i * 0.5 from n; \
         create index tb on t(b); \
         select count(*), sum(a), max(b), avg(c) from t; \
         select a, b from t order by b limit 20 offset {};",
        rows / 2
    );
    compare(&site, 2000, "sqlite3", &[":memory:", &statements]);
    let peak = plain_peak("sqlite3", &[":memory:", &statements]);
    assert!(peak > 16 * MIB, "the program needs too little memory");
}

fn threads_share_paged_memory(node: NodeKind) {
    let steps = size(6000, 30_000).to_string();
    self_checking(node, "threads", include_str!("pager_programs/threads.c"), &steps);
}

fn system_calls_reach_paged_buffers(node: NodeKind) {
    self_checking(node, "syscalls", include_str!("pager_programs/syscalls.c"), "data");
}

fn mappings_are_changed_as_the_kernel_would(node: NodeKind) {
    self_checking(node, "mappings", include_str!("pager_programs/mappings.c"), "data");
}

fn memory_at_addresses_of_the_programs_choice(node: NodeKind) {
    self_checking(node, "extents", include_str!("pager_programs/extents.c"), "data");
}

fn advice_does_not_change_memory(node: NodeKind) {
    self_checking(node, "advice", include_str!("pager_programs/advice.c"), "data");
}

/// Runs a C program that checks itself. `argument` is a number, or the name of a file in the
/// scratch directory.
fn self_checking(node: NodeKind, name: &str, source: &str, argument: &str) {
    let site = Site::new(node, name, 12 * MIB, "1GiB");
    let program = site.scratch.compile(name, source);
    let file = site.scratch.0.join(argument);
    let number = argument.parse::<u32>().is_ok();
    let argument = if number { argument } else { file.to_str().unwrap() };
    let (plain, _) = compare(&site, 500, program.to_str().unwrap(), &[argument]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
}

/// Programs that allocate memory by other means than malloc, or with another malloc than the first
/// that the dynamic linker finds.
mod allocators {
    use super::*;

    const LOCAL: u64 = 12 * MIB;

    fn site(name: &str) -> Site {
        Site::new(NodeKind::Private, name, LOCAL, "1GiB")
    }

    #[test]
    fn heap_information_has_the_bytes_in_use() {
        let source = include_str!("pager_programs/heapinfo.c");
        check(&site("heapinfo"), 500, source, &["-pthread"], &[]);
    }

    /// Compiles a shared object into the site's directory; returns its path.
    fn object(site: &Site, name: &str, source: &str, macros: &str) -> String {
        let options = ["-shared", "-fPIC", "-fno-plt", macros];
        site.scratch.compile_with(name, source, &options).to_str().unwrap().to_owned()
    }

    /// Runs a C program that checks itself, without the pager and paged, and compares the runs.
    fn check(site: &Site, pages: u64, source: &str, options: &[&str], arguments: &[&str]) {
        let program = site.scratch.compile_with("program", source, options);
        let (plain, _) = compare(site, pages, program.to_str().unwrap(), arguments);
        assert_eq!(plain.code, 0, "{}", plain.stderr);
    }

    #[test]
    fn deepbind_library_exchanges_memory_with_the_program() {
        let site = site("deepbind");
        let source = include_str!("pager_programs/deepbind.c");
        let plugin = object(&site, "plugin.so", source, "-DPLUGIN");
        check(&site, 2000, source, &["-ldl"], &[&plugin]);
    }

    /// This memory is not paged, because it is small.
    #[test]
    fn library_allocates_in_resolvers_constructors_and_destructors() {
        let site = site("early");
        let source = include_str!("pager_programs/early.c");
        let library = object(&site, "libearly.so", source, "-DLIBRARY");
        let program = site.scratch.compile_with("program", source, &["-fno-plt", &library]);
        let program = program.to_str().unwrap();
        let (plain, paged) = (plain(program, &[]), site.run(program, &[]));
        assert_eq!((plain.code, plain.stderr.as_str()), (0, ""));
        assert_same(&plain, &paged.outcome, LOCAL);
        assert_eq!(paged.count("processes"), 1, "{}", paged.stats);
    }

    #[test]
    fn opened_library_fills_more_than_the_bound_in_its_constructor() {
        let site = site("opens");
        let source = include_str!("pager_programs/opens.c");
        let library = object(&site, "libopened.so", source, "-DLIBRARY");
        let program = site.scratch.compile("opens", source);
        let paged = site.run(program.to_str().unwrap(), &[&library]);
        assert_eq!(paged.outcome.code, 0, "{}", paged.outcome.stderr);
        assert_eq!(paged.outcome.stdout, b"ok\n");
        assert!(paged.count("pages_out") > 2000, "{}", paged.stats);
    }

    #[test]
    fn libc_malloc_is_paged_and_libc_free_accepts_all_memory() {
        let source = include_str!("pager_programs/wrapper.c");
        check(&site("libc-names"), 2000, source, &[], &[]);
    }

    #[test]
    fn program_wraps_malloc_around_libc_malloc() {
        let source = include_str!("pager_programs/wrapper.c");
        check(&site("wrapper"), 2000, source, &["-DWRAPPED"], &[]);
    }

    #[test]
    fn program_mixes_libjemalloc_functions_with_malloc() {
        let source = include_str!("pager_programs/jemalloc.c");
        check(&site("jemalloc"), 2000, source, &["-l:libjemalloc.so.2"], &[]);
    }

    #[test]
    fn program_mixes_libtcmalloc_functions_with_malloc() {
        let source = include_str!("pager_programs/tcmalloc.c");
        check(&site("tcmalloc"), 2000, source, &["-l:libtcmalloc_minimal.so.4"], &[]);
    }

    /// A decoder's frames, for example: what one thread allocates another one frees.
    #[test]
    fn blocks_freed_by_another_thread_are_used_again() {
        let site = site("handover");
        let source = include_str!("pager_programs/handover.c");
        let program = site.scratch.compile("program", source);
        let program = program.to_str().unwrap();
        let (plain, paged) = (plain(program, &[]), site.run(program, &[]));
        assert_same(&plain, &paged.outcome, LOCAL);
        // Of two blocks of 1 MiB at a time, and of what the allocator rounds them up to.
        assert!(paged.count("chunks_peak") <= 16, "{}", paged.stats);
    }

    #[test]
    fn program_break_is_paged() {
        check(&site("break"), 2000, include_str!("pager_programs/brk.c"), &[], &[]);
    }

    #[test]
    fn another_preloaded_library_passes_calls_on() {
        let site = site("interposer");
        let source = include_str!("pager_programs/interposer.c");
        let interposer = object(&site, "interposer.so", source, "-DINTERPOSER");
        let program = site.scratch.compile("program", source);
        let program = program.to_str().unwrap();
        assert_eq!(plain(program, &[]).code, 2, "without the library the program fails");
        let mut command = site.command(program, &[]);
        let paged = site.finish(Running::start(command.env("LD_PRELOAD", interposer)));
        let Outcome { code, stdout, stderr, .. } = paged.outcome;
        assert_eq!((code, &stdout[..]), (0, &b"done\n"[..]), "{stderr}");
    }

    /// PHP opens its extensions with RTLD_DEEPBIND and has its own allocator over mmap. Its
    /// just-in-time compiler has a large shared mapping that is written and executed.
    #[test]
    fn php_with_extensions_and_a_just_in_time_compiler() {
        let site = site("php");
        let script = format!("$rows = {};\n{PHP}", size(40_000, 300_000));
        let options =
            ["opcache.enable_cli=1", "opcache.jit=tracing", "opcache.jit_buffer_size=16M"];
        let mut arguments = vec!["-r", &script];
        options.iter().for_each(|option| arguments.extend(["-d", option]));
        let plain = plain("php", &arguments);
        let paged = site.run("php", &arguments);
        assert_eq!(plain.code, 0, "{}", plain.stderr);
        assert_eq!(paged.outcome.code, 0, "{}", paged.outcome.stderr);
        assert_eq!(
            String::from_utf8_lossy(&paged.outcome.stdout),
            String::from_utf8_lossy(&plain.stdout)
        );
        paged.assert_moved(2000);
    }

    const PHP: &str = r#"
        $lines = [];
        for ($i = 0; $i < $rows; $i++) $lines[] = str_repeat(chr(97 + $i % 26), $i * 7 % 500) . $i;
        sort($lines);
        echo count($lines), ' ', md5(implode("\n", $lines)), "\n";
        $table = [];
        for ($i = 0; $i < $rows; $i++) $table['k' . $i * 7919 % 1000003] = [$i, "v$i"];
        ksort($table);
        echo count($table), ' ', md5(serialize($table)), ' ', strlen(json_encode($table)), "\n";
        echo implode(' ', get_loaded_extensions()), "\n";
    "#;
}

mod diagnostic_pool {
    use super::*;

    #[test]
    fn lost_pool_ends_the_program_with_a_message() {
        let scratch = Scratch::new("gone");
        let input = scratch.0.join("lines");
        std::fs::write(&input, lines(400_000)).unwrap();
        let input = input.to_str().unwrap();
        let paged = paged(16 * MIB, "memory:1GiB,gone-after=20", "sort", &["-S", "200M", input]);
        assert_gone(&paged);
        assert!(paged.stdout.is_empty(), "nothing was sorted yet");
    }

    #[test]
    fn library_without_limit_pages_nothing() {
        let scratch = Scratch::new("unbound");
        let program = scratch.compile("unbound", include_str!("pager_programs/mappings.c"));
        let mut command = std::process::Command::new(program);
        let output = command.env("LD_PRELOAD", granary_tests::pager::library()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Runs a C program that checks itself, without the pager and paged.
    fn self_checking(name: &str, source: &str, local: u64) {
        let scratch = Scratch::new(&format!("{name}-diagnostic"));
        let program = scratch.compile(name, source);
        let file = scratch.0.join("data");
        let (program, file) = (program.to_str().unwrap(), file.to_str().unwrap());
        let plain = plain(program, &[file]);
        assert_eq!(plain.code, 0, "{}", plain.stderr);
        let paged = paged(local, "memory:1GiB", program, &[file]);
        assert_same(&plain, &paged, local);
        assert!(paged.summary.get(Counter::PagesIn) > 100, "{}", paged.summary);
        assert!(paged.summary.get(Counter::PagesOut) > 100, "{}", paged.summary);
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
    fn child_sees_memory_as_of_the_fork() {
        self_checking("forks", include_str!("pager_programs/forks.c"), 12 * MIB);
    }

    #[test]
    fn child_survives_when_its_parent_ends() {
        let scratch = Scratch::new("orphan");
        let program = scratch.compile("orphan", include_str!("pager_programs/orphan.c"));
        let paged = paged(12 * MIB, "memory:1GiB", program.to_str().unwrap(), &[]);
        // The output pipe closes when the child has ended, too.
        assert_eq!(String::from_utf8_lossy(&paged.stdout), "parent ends\nread all\n");
        assert_eq!(paged.stderr, "");
    }
}
