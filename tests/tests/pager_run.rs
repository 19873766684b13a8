//! The library function under `granary run`: it returns the program's status and the counters, and
//! refuses unsupported programs before they start.

use std::ffi::OsStr;

use granary_tests::node::granary;
use granary_tests::pager::{Scratch, library};
use pager::Config;
use pager::run::run;
use pager::stats::Counter;

#[test]
fn run_returns_status_and_counters() {
    library();
    let config = Config::new(16 << 20, "memory:1GiB");
    let script = "x = [i for i in range(2000000)]; import sys; sys.exit(9)";
    let ended =
        run(&config, OsStr::new("/usr/bin/python3"), &["-c".into(), script.into()]).unwrap();
    assert_eq!(ended.code(), 9);
    assert!(ended.summary.get(Counter::PagesOut) > 1000, "{}", ended.summary);
    let ended = run(&config, OsStr::new("sh"), &["-c".into(), "kill -TERM $$".into()]).unwrap();
    assert_eq!(ended.code(), 128 + 15);
    assert_eq!(ended.summary.processes(), 1, "also of a process that was killed");
}

/// A command without a terminal, in a process group with a stopped process, as in a script of
/// cron: the end of its program sends no SIGHUP to the group.
#[test]
fn end_of_a_program_hangs_no_script_up() {
    let script = "trap 'exit 3' HUP; sleep 1000 & kill -STOP $!; \
                  \"$0\" run --local 16MiB -- true; kill -KILL $!; exit 5";
    let mut command = std::process::Command::new("setsid");
    let status = command.args(["--wait", "sh", "-c", script]).arg(granary()).status().unwrap();
    assert_eq!(status.code(), Some(5), "3: the script was hung up");
}

#[test]
fn unsupported_programs_are_refused_before_start() {
    library();
    let scratch = Scratch::new("static");
    let source = scratch.0.join("static.c");
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let program = scratch.0.join("static");
    let compiled = std::process::Command::new("cc")
        .args(["-static", "-o"])
        .args([&program, &source])
        .status()
        .unwrap();
    assert!(compiled.success());
    let config = Config::new(16 << 20, "memory:1GiB");
    let error = run(&config, program.as_os_str(), &[]).unwrap_err();
    assert!(error.to_string().contains("statically"), "{error}");
    let mut allowed = config.clone();
    allowed.allow_unpaged = true;
    assert_eq!(run(&allowed, program.as_os_str(), &[]).unwrap().code(), 0);
    let error = run(&Config::new(1 << 20, "memory:1GiB"), OsStr::new("true"), &[]).unwrap_err();
    assert!(error.to_string().contains("at least 4 MiB"), "{error}");
    let error = run(&config, OsStr::new("no-such-program"), &[]).unwrap_err();
    assert!(error.to_string().contains("PATH"), "{error}");
}
