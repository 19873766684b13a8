//! Programs that a paged program starts: they are paged too, whatever environment they are given.
//! Those that cannot be paged are named at the end of the run, or refused with the reason.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use granary_tests::needs;
use granary_tests::pager::{Outcome, Running, plain};
use granary_tests::run::{NodeKind, Paged, Site};
use pager::config::EXIT_PAGER;

const LOCAL: u64 = 8 << 20;
/// Part of the line about processes without the pool.
const WITHOUT: &str = " ran without the pool: ";
const RESIDENT: &str = include_str!("pager_programs/resident.c");

fn site(name: &str) -> Site {
    Site::new(NodeKind::Private, name, LOCAL, "256MiB")
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn output(outcome: &Outcome) -> String {
    String::from_utf8_lossy(&outcome.stdout).trim_end().to_owned()
}

/// The line about processes without the pool.
fn line(outcome: &Outcome) -> Option<&str> {
    outcome.stderr.lines().find(|line| line.contains(WITHOUT))
}

/// Runs a shell command paged.
fn shell(site: &Site, command: &str) -> Paged {
    site.run("/bin/sh", &["-c", command])
}

/// Asserts that a shell command starts a program that is paged.
fn is_paged(site: &Site, command: &str) {
    let Paged { outcome, stats } = shell(site, command);
    assert_eq!(output(&outcome), "paged", "{command}: {}", outcome.stderr);
    assert_eq!((outcome.code, line(&outcome)), (0, None), "{command}: {}", outcome.stderr);
    assert_eq!(stats["processes_without_pool"], 0, "{command}: {stats}");
}

/// Asserts that a shell command starts a program that runs without the pool, and that the line at
/// the end has the reason.
fn is_named(site: &Site, command: &str, program: &Path, reason: &str) {
    let Paged { outcome, stats } = shell(site, command);
    assert_eq!((output(&outcome).as_str(), outcome.code), ("resident", 0), "{}", outcome.stderr);
    assert_eq!(stats["processes_without_pool"], 1, "{command}: {stats}");
    let named = format!("granary: 1 process{WITHOUT}{} ({reason})", text(program));
    let found = line(&outcome);
    assert!(found.is_some_and(|line| line.starts_with(&named)), "{command}: {}", outcome.stderr);
}

/// Asserts that `granary run` refuses a program before it starts, and names the remedy, with which
/// the program then runs.
fn is_refused(name: &str, program: &Path, reason: &str) {
    let refused = site(name).run(text(program), &[]).outcome;
    assert_ne!(refused.code, 0, "{}", refused.stderr);
    assert_eq!(output(&refused), "", "it has not started");
    for part in [reason, "--allow-unpaged"] {
        assert!(refused.stderr.contains(part), "{name}: {}", refused.stderr);
    }
    let allowed = site(name).with_options(&["--allow-unpaged"]).run(text(program), &[]).outcome;
    assert_eq!((output(&allowed).as_str(), allowed.code), ("resident", 0), "{}", allowed.stderr);
    assert!(allowed.stderr.contains("unpaged memory"), "{}", allowed.stderr);
}

#[test]
fn programs_are_paged_in_an_environment_without_the_preload_library() {
    let site = site("exec-ways");
    let program = site.scratch.compile("resident", RESIDENT);
    let starts = site.scratch.compile("starts", include_str!("pager_programs/starts.c"));
    for way in [
        "execve",
        "null",
        "many",
        "execle",
        "execvpe",
        "fexecve",
        "execveat",
        "number",
        "number-at",
        "vfork-execve",
        "vfork-many",
        "spawn",
        "spawn-many",
        "spawnp",
        "chdir",
        "system",
        "popen",
        "wordexp",
    ] {
        let arguments = [way, text(&program)];
        let plain = plain(text(&starts), &arguments);
        assert_eq!((plain.code, output(&plain).as_str()), (0, "resident"), "{way}");
        let Paged { outcome, stats } = site.run(text(&starts), &arguments);
        assert_eq!((outcome.code, output(&outcome).as_str()), (0, "paged"), "{way}: {outcome:?}");
        assert_eq!(stats["processes_without_pool"], 0, "{way}: {stats}");
    }
}

#[test]
fn shells_and_tools_start_paged_programs() {
    let site = site("exec-shells");
    let program = site.scratch.compile("resident", RESIDENT);
    let directory = site.scratch.0.clone();
    let path = text(&program);
    is_paged(&site, &format!("env -i {path}"));
    is_paged(&site, &format!("LD_PRELOAD= {path}"));
    is_paged(&site, &format!("LD_PRELOAD=/no/such/library.so {path} 2>&1 | tail -n 1"));
    is_paged(&site, &format!("env -i sh -c 'sh -c {path}'"));
    is_paged(&site, &format!("env -u GRANARY_LOCAL -u GRANARY_POOL {path}"));
    // A script whose interpreter is relative to the working directory, and the dynamic linker as a
    // program.
    let script = directory.join("script");
    fs::write(&script, "#! resident\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    is_paged(&site, &format!("cd {} && env -i ./script | cut -d ' ' -f 2", text(&directory)));
    let linker = "/lib64/ld-linux-x86-64.so.2";
    if cfg!(target_arch = "x86_64") {
        is_paged(&site, &format!("env -i {linker} {path}"));
        let outcome = site.run(linker, &[path]).outcome;
        assert_eq!(output(&outcome), "paged", "{}", outcome.stderr);
    }
}

#[test]
fn static_programs_are_named_at_the_end() {
    let site = site("exec-static");
    let program = site.scratch.compile_with("resident", RESIDENT, &["-static"]);
    let path = text(&program);
    is_named(&site, path, &program, "linked statically");
    is_named(
        &site,
        &format!("cd {} && ./resident", text(&site.scratch.0)),
        &program,
        "linked statically",
    );
    let Paged { outcome, stats } = shell(&site, &format!("{path}; {path} 1; env -i {path} 2"));
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(stats["processes_without_pool"], 3, "{stats}");
    let found = line(&outcome).unwrap_or_default();
    assert!(found.starts_with("granary: 3 processes ran without the pool: "), "{found}");
    assert_eq!(found.matches(path).count(), 1, "{found}");
    is_refused("exec-static-first", &program, "linked statically");
}

/// A program that a static one starts is paged, and the process is not named.
#[test]
fn programs_of_static_programs_are_paged() {
    const SOURCE: &str = "
        #include <unistd.h>
        int main(int count, char **arguments) {
            return execv(arguments[1], arguments + 1);
        }";
    let site = site("exec-through-static");
    let program = site.scratch.compile("resident", RESIDENT);
    let through = site.scratch.compile_with("through", SOURCE, &["-static"]);
    is_paged(&site, &format!("{} {}", text(&through), text(&program)));
}

/// A program without the library starts another one with an environment of its own, as Go does by
/// system calls of its own. The reaper finds the process.
#[test]
fn programs_of_unpaged_programs_are_named_at_the_end() {
    const SOURCE: &str = "
        #include <sys/wait.h>
        #include <unistd.h>
        int main(int count, char **arguments) {
            char *none[] = {0};
            if (fork() == 0) {
                execve(arguments[1], arguments + 1, none);
                _exit(1);
            }
            return wait(0) < 0;
        }";
    let site = site("exec-below-static");
    let through = site.scratch.compile_with("through", SOURCE, &["-static"]);
    let other = site.scratch.compile_with(
        "other",
        "#include <stdio.h>\nint main(void) { getchar(); }",
        &[],
    );
    let words = ["-c", "$0 $1; true", text(&through), text(&other)];
    let mut command = site.command("/bin/sh", &words);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let input = running.input();
    site.wait_for_processes_without_pool(&running, 2);
    drop(input);
    let Paged { outcome, stats } = site.finish(running);
    assert_eq!((outcome.code, &stats["processes_without_pool"]), (0, &2.into()), "{outcome:?}");
    let found = line(&outcome).unwrap_or_default();
    for (program, reason) in [
        (&through, "linked statically"),
        (&other, "its dynamic linker did not load the preload library"),
    ] {
        assert!(found.contains(&format!("{} ({reason}", text(program))), "{found}");
    }
}

#[test]
fn programs_are_not_paged_if_their_environment_says_so() {
    let site = site("exec-asked");
    let program = site.scratch.compile("resident", RESIDENT);
    let command = format!("GRANARY_UNPAGED=1 {}", text(&program));
    is_named(&site, &command, &program, "GRANARY_UNPAGED=1");
}

#[test]
fn set_user_id_programs_are_named_at_the_end() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root makes programs set-user-ID");
    }
    let site = site("exec-setuid");
    let program = site.scratch.compile("resident", RESIDENT);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    // As root the program gains nothing.
    is_paged(&site, text(&program));
    let command = format!("setpriv --reuid=65534 --regid=65534 --clear-groups {}", text(&program));
    let Paged { outcome, stats } = shell(&site, &command);
    assert_eq!((output(&outcome).as_str(), outcome.code), ("resident", 0), "{}", outcome.stderr);
    assert_eq!(stats["processes_without_pool"], 1, "{stats}");
    assert!(line(&outcome).is_some_and(|line| line.contains(text(&program))), "{outcome:?}");
}

#[test]
fn programs_with_musl_run_without_the_pool() {
    let site = site("exec-musl");
    let (source, program) = (site.scratch.0.join("resident.c"), site.scratch.0.join("resident"));
    fs::write(&source, RESIDENT).unwrap();
    match Command::new("musl-gcc").arg("-o").args([&program, &source]).status() {
        Ok(status) => assert!(status.success()),
        Err(_) => return needs::skip("musl-gcc is not installed (Debian: musl-tools)"),
    }
    is_named(&site, text(&program), &program, "linked to musl");
    is_refused("exec-musl-first", &program, "linked to musl");
}

#[test]
fn programs_with_a_sanitizer_run_without_the_pool() {
    let site = site("exec-sanitizers");
    for kind in ["address", "thread"] {
        let option = format!("-fsanitize={kind}");
        let program = site.scratch.compile_with(kind, RESIDENT, &[&option]);
        let command = format!("ASAN_OPTIONS=detect_leaks=0 {}", text(&program));
        is_named(&site, &command, &program, "built with a sanitizer");
        let refused = site.run(text(&program), &[]).outcome;
        assert_eq!(output(&refused), "", "{kind}");
        for part in ["AddressSanitizer or ThreadSanitizer", "--allow-unpaged"] {
            assert!(refused.stderr.contains(part), "{kind}: {}", refused.stderr);
        }
    }
}

/// With the runtime in the program, only the process itself knows about the sanitizer.
#[test]
fn program_with_a_static_thread_sanitizer_is_refused_with_the_reason() {
    let site = site("exec-static-tsan");
    let options = ["-fsanitize=thread", "-static-libtsan"];
    let program = site.scratch.compile_with("resident", RESIDENT, &options);
    let outcome = site.run(text(&program), &[]).outcome;
    assert_eq!((outcome.code, output(&outcome).as_str()), (EXIT_PAGER, ""), "{}", outcome.stderr);
    for part in ["ThreadSanitizer", "--allow-unpaged"] {
        assert!(outcome.stderr.contains(part), "{}", outcome.stderr);
    }
    assert_eq!(line(&outcome), None);
}

/// LeakSanitizer would stop the pager's threads at exit, and wait for their pages.
#[test]
fn leak_sanitizer_checks_nothing_and_says_so() {
    const SOURCE: &str = "
        #include <stdlib.h>
        #include <string.h>
        char *volatile keep;
        int main(void) {
            keep = malloc(64 << 20);
            memset(keep, 1, 64 << 20);
        }";
    for (name, options) in [
        ("exec-leaks", &["-fsanitize=leak"][..]),
        ("exec-leaks-static", &["-fsanitize=leak", "-static-liblsan"][..]),
    ] {
        let site = site(name);
        let program = site.scratch.compile_with("leak", SOURCE, options);
        let outcome = site.run(text(&program), &[]).outcome;
        assert_eq!(outcome.code, 0, "{name}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("LeakSanitizer checks nothing"), "{}", outcome.stderr);
    }
}

#[test]
fn valgrind_is_refused_with_the_reason() {
    let site = site("exec-valgrind");
    let program = site.scratch.compile("resident", RESIDENT);
    if Command::new("valgrind").arg("--version").output().is_err() {
        return needs::skip("valgrind is not installed");
    }
    let outcome = site.run("valgrind", &["-q", text(&program)]).outcome;
    assert_eq!((outcome.code, output(&outcome).as_str()), (EXIT_PAGER, ""), "{}", outcome.stderr);
    for part in ["valgrind runs it", "--allow-unpaged"] {
        assert!(outcome.stderr.contains(part), "{}", outcome.stderr);
    }
    let site = self::site("exec-valgrind-allowed").with_options(&["--allow-unpaged"]);
    let outcome = site.run("valgrind", &["-q", "--error-exitcode=9", text(&program)]).outcome;
    assert_eq!((outcome.code, output(&outcome).as_str()), (0, "resident"), "{}", outcome.stderr);
    assert!(line(&outcome).is_some_and(|line| line.contains("--allow-unpaged")), "{outcome:?}");
}

#[test]
fn programs_behind_a_filter_that_refuses_sockets_are_named_at_the_end() {
    const SOURCE: &str = "
        #include \"check.h\"
        #include <linux/filter.h>
        #include <linux/seccomp.h>
        #include <stddef.h>
        #include <sys/prctl.h>
        #include <sys/syscall.h>
        int main(int count, char **arguments) {
            struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
            };
            struct sock_fprog filter = {4, code};
            CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
            CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
            execv(arguments[1], arguments + 1);
            return 1;
        }";
    let site = site("exec-filter");
    let program = site.scratch.compile("resident", RESIDENT);
    let filter = site.scratch.compile("filter", SOURCE);
    let command = format!("{} {}", text(&filter), text(&program));
    is_named(&site, &command, &program, "its seccomp filter refuses sockets");
}

/// Its seccomp filters would refuse the pager's sockets.
#[test]
fn man_shows_its_page() {
    let site = site("exec-man");
    let page = site.scratch.0.join("page.1");
    fs::write(&page, ".TH PAGE 1\n.SH NAME\npage \\- a page for a test\n").unwrap();
    let arguments = ["-P", "cat", "-l", text(&page)];
    let has_filter = Command::new("man").args(arguments).output();
    if !has_filter.is_ok_and(|output| output.stdout.windows(6).any(|part| part == b"a page")) {
        return needs::skip("man is not installed (Debian: man-db and groff-base)");
    }
    let plain = plain("man", &arguments);
    let outcome = site.run("man", &arguments).outcome;
    assert_eq!((outcome.code, &outcome.stdout), (0, &plain.stdout), "{}", outcome.stderr);
    assert_eq!(line(&outcome), None, "{}", outcome.stderr);
}
