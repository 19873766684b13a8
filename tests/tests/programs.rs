//! Programs that people run, unmodified, with a quarter of their memory local. The output is that
//! of a run without the pager. With `GRANARY_TEST_FULL=1`, more programs that a distribution or a
//! package index has, at 100, 50, 25 and 10 percent.
//!
//! `GRANARY_TEST_PERCENT` replaces the percentages, and `scripts/test-deps` installs the programs.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use granary_tests::needs::skip;
use granary_tests::node::full;
use granary_tests::pager::{Running, Scratch, plain};
use granary_tests::run::{NodeKind, Site};

const MIB: u64 = 1 << 20;
/// Least local memory of a run. A smaller one is legal, but then even a shell pages.
const LOCAL_LEAST: u64 = 8 * MIB;
/// Memory of the private memory node.
const POOL: &str = "6GiB";

/// A program to run, with its arguments.
type Line = Vec<String>;

fn line(words: &[&str]) -> Line {
    words.iter().map(|word| word.to_string()).collect()
}

/// Returns the path of a file of the directory of programs, which is copied to the scratch
/// directory.
fn file(scratch: &Scratch, name: &str, text: &str) -> String {
    let path = scratch.0.join(name);
    std::fs::write(&path, text).expect("the scratch directory is writable");
    path.to_str().expect("UTF-8").to_owned()
}

/// Returns true if a program is in the path, or a Python module is installed (`python3:NAME`).
fn is_installed(what: &str) -> bool {
    let check = match what.split_once(':') {
        Some((_, module)) => format!("/usr/bin/python3 -c 'import {module}'"),
        None => format!("command -v {what}"),
    };
    let done = Command::new("sh").args(["-c", &check]).output();
    done.is_ok_and(|output| output.status.success())
}

/// Peak resident memory of the largest process of a run without the pager, in bytes.
fn peak(program: &[&str]) -> u64 {
    let script = "import resource, subprocess, sys\n\
                  subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL, \
                  stderr=subprocess.DEVNULL)\n\
                  print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";
    let output = Command::new("/usr/bin/python3").args(["-c", script]).args(program).output();
    let text = String::from_utf8(output.expect("Python is installed").stdout).expect("a number");
    text.trim().parse::<u64>().expect("a number of KiB") * 1024
}

fn percents() -> Vec<u64> {
    match std::env::var("GRANARY_TEST_PERCENT") {
        Ok(list) => list.split(',').map(|percent| percent.parse().expect("a number")).collect(),
        Err(_) if full() => vec![100, 50, 25, 10],
        Err(_) => vec![25],
    }
}

/// Returns the words that start a command as another user, who may open a userfaultfd.
fn as_user(user: &str) -> Line {
    line(&[
        "setpriv",
        "--reuid",
        user,
        "--regid",
        user,
        "--clear-groups",
        "--inh-caps",
        "+sys_ptrace",
        "--ambient-caps",
        "+sys_ptrace",
    ])
}

/// Gives a directory to a user.
fn give(directory: &Scratch, user: &str) {
    let given = Command::new("chown").args(["-R", user]).arg(&directory.0).status();
    assert!(given.expect("chown starts").success());
}

/// Compares runs of a program with shares of its memory local with a run without the pager.
/// `prepare` puts the program's files into a directory and returns the command.
fn check(name: &str, needs: &[&str], prepare: impl Fn(&Scratch) -> Line) {
    check_as(None, name, needs, prepare);
}

/// As [`check`], as another user.
fn check_as(user: Option<&str>, name: &str, needs: &[&str], prepare: impl Fn(&Scratch) -> Line) {
    if let Some(missing) = needs.iter().find(|what| !is_installed(what)) {
        return skip(format!("{missing} is not installed; scripts/test-deps installs it"));
    }
    let scratch = Scratch::new(&format!("program-{name}"));
    let command = prepare(&scratch);
    let before = user.map(as_user).unwrap_or_default();
    if let Some(user) = user {
        give(&scratch, user);
    }
    let words: Vec<&str> = before.iter().chain(&command).map(String::as_str).collect();
    let start = Instant::now();
    let plain = plain(words[0], &words[1..]);
    let plain_time = start.elapsed().as_secs_f64();
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    assert!(!plain.stdout.is_empty(), "the program prints nothing: {}", plain.stderr);
    let peak = peak(&words);
    let words = &words[before.len()..];
    for percent in percents() {
        let local = (peak * percent / 100).max(LOCAL_LEAST);
        let site = Site::new(NodeKind::Private, &format!("{name}-{percent}"), local, POOL);
        let mut run = site.command(words[0], &words[1..]);
        if let Some(user) = user {
            give(&site.scratch, user);
            let mut other = Command::new(&before[0]);
            other.args(&before[1..]).arg(run.get_program()).args(run.get_args());
            run = other;
        }
        // After `command`, which may build the command first.
        let start = Instant::now();
        let paged = site.finish(Running::start(run.stdin(Stdio::null())));
        let time = start.elapsed().as_secs_f64();
        let outcome = &paged.outcome;
        assert_eq!(outcome.code, 0, "{name} at {percent} %: {}", outcome.stderr);
        assert!(
            outcome.stdout == plain.stdout,
            "{name} at {percent} %: plain {:?}, paged {:?}: {}",
            String::from_utf8_lossy(&plain.stdout),
            String::from_utf8_lossy(&outcome.stdout),
            outcome.stderr
        );
        // Visible with --nocapture.
        println!(
            "| {name} | {percent} % | {} MiB of {} MiB | {time:.1} s, plain {plain_time:.1} s | in \
             {}, out {} | not paged {} MiB |",
            local / MIB,
            peak / MIB,
            paged.count("pages_in"),
            paged.count("pages_out"),
            paged.count("unpaged_peak_bytes") / MIB
        );
        if percent <= 25 && local > LOCAL_LEAST {
            assert!(paged.count("pages_out") > 0, "{name} at {percent} %: {}", outcome.stderr);
        }
    }
}

/// As [`check`], in the full run only.
fn check_in_full(name: &str, needs: &[&str], prepare: impl Fn(&Scratch) -> Line) {
    if full() {
        check(name, needs, prepare);
    }
}

/// The size for `make test` or for `make test-full`.
fn size(short: &'static str, long: &'static str) -> &'static str {
    if full() { long } else { short }
}

#[test]
fn stream_with_static_arrays() {
    check("stream", &["cc"], |scratch| {
        let count = format!("-DCOUNT={}", size("1500000", "6000000"));
        let source = include_str!("programs/stream.c");
        let program = scratch.compile_with("stream", source, &["-O2", &count]);
        line(&[program.to_str().expect("UTF-8")])
    });
}

#[test]
fn pagerank_with_threads() {
    check("pagerank", &["cc"], |scratch| {
        // The program accesses 12 bytes of each node at random. With much less memory than that,
        // nearly each of its accesses faults: 1,000,000 nodes with 8 MiB take minutes.
        let nodes = format!("-DNODES={}", size("300000", "600000"));
        let source = include_str!("programs/pagerank.c");
        let program = scratch.compile_with("pagerank", source, &["-O2", &nodes]);
        line(&[program.to_str().expect("UTF-8")])
    });
}

#[test]
fn make_with_two_compilers() {
    check("make", &["make", "gcc"], |scratch| {
        let script = file(scratch, "build.sh", include_str!("programs/build.sh"));
        line(&["sh", &script, scratch.0.to_str().expect("UTF-8"), size("3", "12")])
    });
}

#[test]
fn fortran_with_static_arrays() {
    check_in_full("fortran", &["gfortran"], |scratch| {
        let source = file(scratch, "static.f90", include_str!("programs/static.f90"));
        let program = scratch.0.join("static");
        let compiled = Command::new("gfortran")
            .args(["-O2", "-o"])
            .args([&program, Path::new(&source)])
            .current_dir(&scratch.0)
            .status();
        assert!(compiled.expect("gfortran is installed").success());
        line(&[program.to_str().expect("UTF-8")])
    });
}

fn java(name: &str, collector: &str) {
    check_in_full(name, &["java", "javac"], |scratch| {
        let source = file(scratch, "Collections.java", include_str!("programs/Collections.java"));
        assert!(Command::new("javac").arg(source).status().expect("javac").success());
        let classes = scratch.0.to_str().expect("UTF-8");
        line(&["java", collector, "-Xmx512m", "-cp", classes, "Collections", "200000"])
    });
}

#[test]
fn java_with_g1() {
    java("java-g1", "-XX:+UseG1GC");
}

#[test]
fn java_with_the_serial_collector() {
    java("java-serial", "-XX:+UseSerialGC");
}

#[test]
fn java_with_the_parallel_collector() {
    java("java-parallel", "-XX:+UseParallelGC");
}

#[test]
fn node_with_arrays_and_buffers() {
    check_in_full("node", &["node"], |scratch| {
        let script = file(scratch, "arrays.js", include_str!("programs/arrays.js"));
        line(&["node", &script, "400000"])
    });
}

fn python(name: &str, modules: &[&str], text: &str, argument: &str) {
    check_in_full(name, modules, |scratch| {
        let script = file(scratch, "program.py", text);
        line(&["/usr/bin/python3", &script, argument])
    });
}

#[test]
fn numpy_decompositions() {
    python("numpy", &["python3:numpy"], include_str!("programs/arrays.py"), "900");
}

#[test]
fn scikit_learn_clusters_with_threads() {
    python("scikit-learn", &["python3:sklearn"], include_str!("programs/clusters.py"), "300000");
}

#[test]
fn pandas_joins_and_groups() {
    python("pandas", &["python3:pandas"], include_str!("programs/tables.py"), "1500000");
}

#[test]
fn duckdb_joins_and_groups() {
    python("duckdb", &["python3:duckdb"], include_str!("programs/queries.py"), "4000000");
}

fn shell(name: &str, needs: &[&str], text: &str, arguments: &[&str]) {
    check_in_full(name, needs, |scratch| {
        let script = file(scratch, &format!("{name}.sh"), text);
        let mut command = line(&["sh", &script, scratch.0.to_str().expect("UTF-8")]);
        command.extend(line(arguments));
        command
    });
}

#[test]
fn redis_saves_in_the_background() {
    let text = include_str!("pager_programs/redis.sh");
    shell("redis", &["redis-server", "redis-cli"], text, &["60000"]);
}

#[test]
fn memcached_with_two_threads() {
    shell("memcached", &["memcached"], include_str!("programs/memcached.sh"), &["150000"]);
}

#[test]
fn mariadb_with_direct_io() {
    let needs = ["mariadbd", "mariadb-install-db"];
    shell("mariadb", &needs, include_str!("programs/mariadb.sh"), &["150000"]);
}

#[test]
fn postgresql_sorts_and_hashes() {
    // Debian has the server's programs in a directory of its version.
    let directories = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut directories: Vec<_> = directories.map(|entry| entry.path().join("bin")).collect();
    directories.retain(|directory| directory.join("postgres").exists());
    let Some(directory) = directories.pop() else {
        if full() {
            skip("postgresql is not installed; scripts/test-deps installs it");
        }
        return;
    };
    let directory = directory.to_str().expect("UTF-8");
    if !full() {
        return;
    }
    // The server refuses to run as root.
    let user = rustix::process::geteuid().is_root().then_some("postgres");
    check_as(user, "postgresql", &["setpriv", "psql"], |scratch| {
        let script = file(scratch, "postgresql.sh", include_str!("programs/postgresql.sh"));
        line(&["sh", &script, scratch.0.to_str().expect("UTF-8"), "400000", directory])
    });
}

#[test]
fn git_repacks_a_repository() {
    shell("git", &["git"], include_str!("programs/repack.sh"), &["60"]);
}

#[test]
fn r_fits_a_model() {
    check_in_full("r", &["Rscript"], |scratch| {
        let script = file(scratch, "model.R", include_str!("programs/model.R"));
        line(&["Rscript", "--vanilla", &script, "800000"])
    });
}

#[test]
fn ffmpeg_encodes_with_threads() {
    check_in_full("ffmpeg", &["ffmpeg"], |_| {
        let input = "testsrc2=size=1280x720:rate=25:duration=3";
        let options = ["-hide_banner", "-loglevel", "error", "-f", "lavfi", "-i", input];
        let encode = ["-c:v", "libx264", "-preset", "fast", "-threads", "2", "-f", "md5", "-"];
        line(&[&["ffmpeg"], &options[..], &encode[..]].concat())
    });
}

#[test]
fn sqlite_in_memory() {
    check_in_full("sqlite", &["sqlite3"], |_| {
        let statements = "create table t(a integer primary key, b text); \
             with recursive n(i) as (select 1 union all select i + 1 from n where i < 600000) \
             insert into t select i, printf('%048d', i * 7919 % 1000003) from n; \
             create index tb on t(b); select count(*), sum(a), max(b) from t; \
             select a, b from t order by b limit 5 offset 300000;";
        line(&["sqlite3", ":memory:", statements])
    });
}

/// The memory of a whole machine: the emulator maps it as one private mapping.
#[test]
fn qemu_with_a_small_guest() {
    check_in_full("qemu", &["qemu-system-x86_64", "as", "ld"], |scratch| {
        let source = file(scratch, "guest.S", include_str!("programs/guest.S"));
        let image = scratch.0.join("guest.bin");
        let link = format!(
            "as --32 -o guest.o {source} && \
             ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o guest.bin guest.o"
        );
        let made = Command::new("sh").args(["-c", &link]).current_dir(&scratch.0).status();
        assert!(made.expect("a shell").success());
        let emulator = format!(
            "qemu-system-x86_64 -m 96 -nodefaults -display none -no-reboot -boot a \
             -drive file={},format=raw,if=floppy -debugcon stdio \
             -device isa-debug-exit,iobase=0xf4,iosize=4; test $? = 1",
            image.display()
        );
        line(&["sh", "-c", &emulator])
    });
}

/// A Go program without cgo maps its memory by raw system calls.
#[test]
fn go_without_cgo_is_refused() {
    if !full() {
        return;
    }
    if !is_installed("go") {
        return skip("go is not installed");
    }
    let scratch = Scratch::new("program-go");
    let program = scratch.0.join("main");
    let text = "package main\nfunc main() { x := make([]byte, 1<<24); println(len(x)) }\n";
    let source = file(&scratch, "main.go", text);
    let built = Command::new("go")
        .args(["build", "-buildmode=pie", "-o"])
        .args([&program, Path::new(&source)])
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "-mod=mod")
        .env("GOCACHE", scratch.0.join("cache"))
        .output()
        .expect("go starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let site = Site::new(NodeKind::Private, "go", 16 * MIB, "64MiB");
    let program = program.to_str().expect("UTF-8");
    let outcome = site.run(program, &[]).outcome;
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("without cgo"), "{}", outcome.stderr);
    // A program that a paged program starts is refused too.
    let outcome = site.run("sh", &["-c", &format!("{program}; echo $?")]).outcome;
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "118\n", "{}", outcome.stderr);
    let mut command = Command::new(granary_tests::node::granary());
    command.args([
        "run",
        "--local",
        "16MiB",
        "--memory",
        "64MiB",
        "--allow-unpaged",
        "--",
        program,
    ]);
    let output = command.output().expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("16777216"), "{stderr}");
    assert!(stderr.contains("--allow-unpaged"), "{stderr}");
}
