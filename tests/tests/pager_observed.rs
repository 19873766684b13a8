//! Programs that are traced, debugged or dumped while their memory is paged: no process hangs, and
//! the result is that of a run without the pager.

use std::fs;
use std::io::Write;
use std::process::Command;

use granary_tests::needs;
use granary_tests::pager::{Outcome, Running, Scratch, library, paged_with, plain};
use pager::Config;
use pager::config::Pages;
use pager::stats::Counter;

const MIB: u64 = 1 << 20;

/// A C program that aborts with most of its memory paged out.
struct Aborting {
    scratch: Scratch,
    program: String,
}

impl Aborting {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let source = include_str!("pager_programs/aborts.c");
        let program = scratch.compile("aborts", source).to_str().unwrap().to_owned();
        Self { scratch, program }
    }

    /// Runs a command in the program's directory.
    fn run(&self, command: &mut Command) -> Outcome {
        Running::start(command.current_dir(&self.scratch.0)).finish()
    }

    /// Runs the program in gdb, started by `wrapper`, until it ends, and then runs gdb `commands`.
    /// Returns gdb's output.
    fn debugged(&self, wrapper: &str, commands: &[&str]) -> String {
        let mut command = Command::new("timeout");
        command.args(["120", "gdb", "-batch", "-nx", "-ex", "set debuginfod enabled off"]);
        command.args(["-ex", &format!("set exec-wrapper {wrapper}"), "-ex", "run"]);
        for gdb_command in commands {
            command.args(["-ex", gdb_command]);
        }
        let outcome = self.run(command.args(["--args", &self.program]));
        let text = text(&outcome);
        // 124 is the status of `timeout`; gdb's own status is that of its last command.
        assert_ne!(outcome.code, 124, "gdb hangs: {text}");
        text
    }
}

/// The environment of a paged program, `NAME=VALUE`.
fn variables() -> Vec<String> {
    let mut variables = vec![format!("LD_PRELOAD={}", library().display())];
    for (name, value) in pager::Config::new(8 * MIB, "memory:1GiB").to_environment() {
        variables.push(format!("{name}={}", value.to_str().unwrap()));
    }
    variables
}

fn text(outcome: &Outcome) -> String {
    format!("{}{}", String::from_utf8_lossy(&outcome.stdout), outcome.stderr)
}

#[test]
fn traced_processes_have_the_same_output() {
    let scratch = Scratch::new("strace");
    let program = scratch.compile("many", include_str!("pager_programs/many.c"));
    let log = scratch.0.join("log");
    let mut command = Command::new("timeout");
    command.args(["120", "strace", "-f", "-o"]).arg(&log);
    for variable in variables() {
        command.args(["-E", &variable]);
    }
    command.arg(program).arg("20");
    let outcome = Running::start(&mut command).finish();
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "as expected\n");
    let log = fs::read_to_string(&log).unwrap();
    assert!(log.contains("exited with 19"), "the children were traced too");
}

/// gdb stops all threads, the pager's included, and then cannot read memory that is not resident. A
/// function that gdb calls in the program can read it, because all threads run during the call.
///
/// A gdb that is older than the CPU cannot call functions in any program: version 13 has no room
/// for the registers of a CPU with AMX. The run without the pager detects this, and the test then
/// leaves out the calls.
#[test]
fn debugger_reads_paged_memory_by_calls() {
    let aborting = Aborting::new("gdb");
    let call = r#"printf "called: %u\n", (unsigned)word_of_page(10)"#;
    let look = r#"printf "seen: %u\n", ((unsigned *)paged)[10 * 1024]"#;
    let plain = aborting.debugged("env", &[call]);
    if plain.contains("ptrace: Operation not permitted") {
        return needs::skip("ptrace is not permitted here, which gdb needs");
    }
    let calls = plain.contains("called: 11\n");
    if !calls {
        assert!(plain.contains("Couldn't write extended state status"), "{plain}");
        let _ = writeln!(
            std::io::stderr(),
            "this gdb cannot call functions on this CPU: the calls are left out"
        );
    }
    let paged = format!("env {}", variables().join(" "));
    let text = aborting.debugged(&paged, &["bt", look, call, look]);
    for part in ["all there", "SIGABRT", "in fail ", "in main "] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(text.contains("Cannot access memory at address"), "the page is resident: {text}");
    if calls {
        assert!(text.contains("called: 11\n") && text.contains("seen: 11\n"), "{text}");
    }
}

#[test]
fn core_dump_contains_no_paged_memory() {
    let aborting = Aborting::new("core");
    let script =
        format!("ulimit -c unlimited; exec env {} {}", variables().join(" "), aborting.program);
    let outcome =
        aborting.run(Command::new("timeout").args(["--foreground", "120", "sh", "-c", &script]));
    assert_eq!(outcome.code, 128 + 6, "{}", outcome.stderr);
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "all there\n");
    let mut entries = fs::read_dir(&aborting.scratch.0).unwrap().map(|entry| entry.unwrap());
    let core = entries.find(|entry| entry.file_name().to_string_lossy().starts_with("core"));
    let Some(core) = core else {
        let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
        let pattern = pattern.trim();
        let why = "the core dump is not in the directory that the program runs in";
        return needs::skip(format!("{why}: kernel.core_pattern is {pattern:?}"));
    };
    use std::os::unix::fs::MetadataExt;
    let taken = core.metadata().unwrap().blocks() * 512;
    assert!(taken < 8 * MIB, "the dump of {taken} bytes contains paged memory");
    let core = core.path();
    let mut command = Command::new("timeout");
    command.args(["120", "gdb", "-batch", "-nx", "-ex", "set debuginfod enabled off", "-ex", "bt"]);
    let outcome = aborting.run(command.arg(&aborting.program).arg(core));
    let text = text(&outcome);
    assert!(text.contains("in fail ") && text.contains("in main "), "{text}");
}

/// Runs `procmem.c` plain and paged.
fn own_memory(name: &str, pages: Pages) {
    let scratch = Scratch::new(name);
    let program = scratch.compile("procmem", include_str!("pager_programs/procmem.c"));
    let program = program.to_str().unwrap();
    let plain = plain(program, &[]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    let mut config = Config::new(8 << 20, "memory:256MiB");
    config.pages = pages;
    let paged = paged_with(&config, program, &[]);
    assert_eq!((paged.code, text(&paged)), (0, text(&plain)));
    assert!(paged.summary.get(Counter::PagesOut) > 5000, "{}", paged.summary);
}

#[test]
fn programs_access_their_evicted_pages_by_files_and_calls() {
    own_memory("procmem", Pages::Auto);
}

#[test]
fn programs_access_their_copied_pages_by_files_and_calls() {
    own_memory("procmem-copy", Pages::Copy);
}
