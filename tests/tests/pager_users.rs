//! Programs that change their user and then start another program: the new program is paged too,
//! by descriptors that it is handed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use granary_tests::needs;
use granary_tests::node::granary;
use granary_tests::pager::{Outcome, Running, plain};
use granary_tests::run::{NodeKind, Paged, Site};
use pager::config::EXIT_PAGER;

/// A quarter of the memory of [`RESIDENT`].
const LOCAL: u64 = 8 << 20;
const RESIDENT: &str = include_str!("pager_programs/resident.c");
const AS_NOBODY: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// A program without the preload library. Its first argument says what becomes of the descriptors
/// before the program that the others name is executed:
/// - `name VALUE` names others, where 7 is `/dev/null`, 8 a socket and 9 a directory;
/// - `close` closes all;
/// - `count` prints the number of those that it has inherited, and executes no program.
const HANDLES: &str = r#"
    #include "check.h"
    #include <fcntl.h>
    #include <stdlib.h>
    #include <sys/socket.h>
    #include <sys/syscall.h>
    int main(int count, char **arguments) {
        char **program = arguments + 2;
        if (!strcmp(arguments[1], "count")) {
            int open = 0;
            for (int fd = 3; fd < 4096; fd++) open += fcntl(fd, F_GETFD) >= 0;
            printf("%d\n", open);
            return 0;
        }
        if (!strcmp(arguments[1], "name")) {
            CHECK(dup2(open("/dev/null", O_RDWR), 7) == 7);
            CHECK(dup2(socket(AF_UNIX, SOCK_SEQPACKET, 0), 8) == 8);
            CHECK(dup2(open("/", O_PATH | O_DIRECTORY), 9) == 9);
            CHECK(setenv("GRANARY_DESCRIPTORS", *program++, 1) == 0);
        } else {
            for (int fd = 3; fd < 4096; fd++) syscall(SYS_close, fd);
        }
        execvp(*program, program);
        return 1;
    }"#;

/// A site whose library and programs each user may read; `None` if the tests cannot act as
/// another user.
fn site(name: &str) -> Option<Site> {
    if !rustix::process::geteuid().is_root() {
        needs::skip("only root can act as another user");
        return None;
    }
    let site = Site::new(NodeKind::Private, name, LOCAL, "256MiB");
    let library = site.scratch.0.join(pager::run::LIBRARY);
    fs::copy(granary().with_file_name(pager::run::LIBRARY), &library).expect("the built library");
    for path in [&site.scratch.0, &library] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("own files");
    }
    Some(site)
}

/// Runs a program paged, with the library of the site.
fn run(site: &Site, words: &[&str]) -> Paged {
    let mut command = site.command(words[0], &words[1..]);
    command.env("GRANARY_PRELOAD", site.scratch.0.join(pager::run::LIBRARY));
    site.finish(Running::start(&mut command))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}

fn output(outcome: &Outcome) -> String {
    String::from_utf8_lossy(&outcome.stdout).trim_end().to_owned()
}

#[test]
fn programs_of_another_user_are_paged() {
    let Some(site) = site("users-ways") else { return };
    let program = site.scratch.compile("resident", RESIDENT);
    let path = text(&program);
    let mut ways: Vec<(&str, Vec<&str>)> = vec![
        ("setpriv", [&AS_NOBODY[..], &[path, "65534"]].concat()),
        ("its child", [&AS_NOBODY[..], &["sh", "-c", "id -u; $0 65534; $0 again", path]].concat()),
        ("clean", [&AS_NOBODY[..], &["env", "-i", path, "65534"]].concat()),
        ("su", vec!["su", "nobody", "-s", "/bin/sh", "-c", "id -u; exec $0 su", path]),
        ("runuser", vec!["runuser", "-u", "nobody", "--", path, "runuser"]),
        ("forked", vec!["sh", "-c", "setpriv --reuid=65534 $0 1; id -u; $0 2 | cat", path]),
    ];
    // In a user namespace of its own, the program may use the socket's path but not the device's.
    let bubble = ["bwrap", "--unshare-user", "--dev-bind", "/", "/"];
    let tried = Command::new(bubble[0]).args(&bubble[1..]).arg("true").status();
    match tried.is_ok_and(|status| status.success()) {
        true => ways.push(("bwrap", [&bubble[..], &[path, "bwrap"]].concat())),
        false => needs::skip("bwrap cannot make a user namespace (Debian: bubblewrap)"),
    }
    for (way, words) in ways {
        let plain = plain(words[0], &words[1..]);
        let expected = output(&plain).replace("resident", "paged");
        assert!(plain.code == 0 && expected.contains("paged"), "{way}: {plain:?}");
        let Paged { outcome, stats } = run(&site, &words);
        assert_eq!((outcome.code, output(&outcome)), (0, expected), "{way}: {}", outcome.stderr);
        assert_eq!(stats["processes_without_pool"], 0, "{way}: {stats}");
        assert!(stats["pages_out"].as_u64() >= Some(4000), "{way}: {stats}");
    }
}

/// A child of a program with another user forks, and needs pages of its parent.
#[test]
fn forks_of_another_users_program_work() {
    let Some(site) = site("users-forks") else { return };
    let script = "import os\n\
        heap = [bytes([n % 251]) * 4096 for n in range(8000)]\n\
        for _ in range(3):\n\
        \x20   pid = os.fork()\n\
        \x20   if pid == 0:\n\
        \x20       heap += [bytes([n % 241]) * 4096 for n in range(8000)]\n\
        \x20       os._exit(sum(page[7] for page in heap) % 100)\n\
        \x20   print(os.waitpid(pid, 0)[1] >> 8, os.getuid())\n";
    let words = [&AS_NOBODY[..], &["/usr/bin/python3", "-c", script]].concat();
    let expected = output(&plain(words[0], &words[1..]));
    assert_eq!(expected.lines().count(), 3, "{expected}");
    let outcome = run(&site, &words).outcome;
    assert_eq!((outcome.code, output(&outcome)), (0, expected), "{}", outcome.stderr);
}

#[test]
fn descriptors_of_another_type_are_refused_with_the_reason() {
    let Some(site) = site("users-types") else { return };
    let program = site.scratch.compile("resident", RESIDENT);
    let handles = site.scratch.compile_with("handles", HANDLES, &["-static"]);
    let refused = |words: &[&str], reason: &str| {
        let words = [&AS_NOBODY[..], &[text(&handles)], words, &[text(&program)]].concat();
        let outcome = run(&site, &words).outcome;
        assert_eq!((outcome.code, output(&outcome)), (EXIT_PAGER, String::new()), "{words:?}");
        assert!(outcome.stderr.contains(reason), "{reason}: {}", outcome.stderr);
    };
    for fd in [7, 8, 9] {
        let named = format!("0:{fd}");
        let reason =
            format!("GRANARY_DESCRIPTORS={named}: descriptor {fd} is not that of a socket");
        refused(&["name", &named], &reason);
    }
    refused(&["name", "0:77"], "descriptor 77 is not open any more");
    // The standard descriptors are the program's, and these texts name none.
    for named in ["0:1", "", "0", "device:7"] {
        refused(&["name", named], "this user may not connect");
    }
    refused(&["close"], "is not open any more");
}

/// Programs without another user inherit one descriptor more than without the pager, that of the
/// run's memory.
#[test]
fn other_programs_inherit_none_of_them() {
    let Some(site) = site("users-none") else { return };
    let handles = site.scratch.compile_with("handles", HANDLES, &["-static"]);
    let path = text(&handles);
    let inherit_one_more = |words: &[&str]| {
        let plain = output(&plain(words[0], &words[1..]));
        let more = |count: &str| count.parse::<u32>().expect("a number") + 1;
        let expected: Vec<_> = plain.lines().map(|count| more(count).to_string()).collect();
        let outcome = run(&site, words).outcome;
        let found = output(&outcome);
        assert_eq!(found.lines().collect::<Vec<_>>(), expected, "{words:?}: {}", outcome.stderr);
    };
    inherit_one_more(&["sh", "-c", "$0 count; $0 count", path]);
    // A musl program gets no library, and its programs none.
    let musl = site.scratch.0.join("musl");
    let source = site.scratch.0.join("handles.c");
    match Command::new("musl-gcc").arg("-D_GNU_SOURCE").arg("-o").args([&musl, &source]).status() {
        Ok(status) => assert!(status.success()),
        Err(_) => return needs::skip("musl-gcc is not installed (Debian: musl-tools)"),
    }
    inherit_one_more(&[&AS_NOBODY[..], &[text(&musl), "count"]].concat());
}
