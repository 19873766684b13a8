//! A user without privileges: what `granary run` says where userfaultfd is refused, and that it works
//! where the device file is open to that user.
//!
//! Only root can take privileges away for a test; anybody else is told that these are skipped.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use granary_tests::node::granary;
use granary_tests::pager::Scratch;

const DEVICE: &str = "/dev/userfaultfd";
const SYSCTL: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// Says why a test is skipped, where the test harness does not swallow it.
fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {why}");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The command and its library where everybody may execute them.
fn installed(scratch: &Scratch) {
    let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let built = granary();
    open(&scratch.0);
    for name in ["granary", pager::run::LIBRARY] {
        let copy = scratch.0.join(name);
        fs::copy(built.with_file_name(name), &copy).unwrap();
        open(&copy);
    }
    // Where the memory node has its socket, and the counters are.
    let directory = scratch.0.join("tmp");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777)).unwrap();
}

/// Runs a script of the shell in a mount namespace of its own. In it `nobody COMMAND` runs a command
/// without any privilege, and `granary` is the command.
fn run(scratch: &Scratch, script: &str) -> Output {
    let here = scratch.0.to_str().unwrap();
    let script = format!(
        "nobody() {{ setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all \
         --bounding-set=-all --no-new-privs \"$@\"; }}\ncd {here}\n{script}"
    );
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-ec", &script])
        .env("TMPDIR", scratch.0.join("tmp"))
        .env_remove("XDG_RUNTIME_DIR")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// What keeps these tests from running here.
fn obstacle(scratch: &Scratch) -> Option<String> {
    if !is_root() {
        return Some("only root can take privileges away".into());
    }
    let tried = run(scratch, "nobody true");
    (!tried.status.success()).then(|| String::from_utf8_lossy(&tried.stderr).into_owned())
}

#[test]
fn where_userfaultfd_is_refused_it_says_what_to_change() {
    let scratch = Scratch::new("refused");
    if let Some(why) = obstacle(&scratch) {
        return skipped("where_userfaultfd_is_refused_it_says_what_to_change", &why);
    }
    if fs::read_to_string(SYSCTL).is_ok_and(|value| value.trim() != "0") {
        let why = "vm.unprivileged_userfaultfd permits it to everybody here";
        return skipped("where_userfaultfd_is_refused_it_says_what_to_change", why);
    }
    installed(&scratch);
    // A device file that nobody may open, and the one that is there is not changed.
    let script = format!(
        "touch closed; chmod 600 closed; if [ -e {DEVICE} ]; then mount --bind closed {DEVICE}; fi\n\
         nobody ./granary run --local 16MiB -- sh -c 'echo it ran'"
    );
    let output = run(&scratch, &script);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(output.stdout.is_empty(), "the program ran");
    for part in ["userfaultfd is not permitted", "vm.unprivileged_userfaultfd=1", DEVICE, "root"] {
        assert!(stderr.contains(part), "no {part:?} in {stderr}");
    }
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn with_the_device_file_a_user_pages_like_root() {
    let scratch = Scratch::new("device");
    if let Some(why) = obstacle(&scratch) {
        return skipped("with_the_device_file_a_user_pages_like_root", &why);
    }
    if !Path::new(DEVICE).exists() {
        let why = format!("this kernel has no {DEVICE} (Linux before 6.1)");
        return skipped("with_the_device_file_a_user_pages_like_root", &why);
    }
    installed(&scratch);
    // A copy of the device file with other rights, seen by this test alone.
    let script = format!(
        "cp -a {DEVICE} device; chmod 666 device; mount --bind device {DEVICE}\n\
         nobody test -w {DEVICE}\n\
         nobody awk 'BEGIN {{ for (i = 0; i < 150000; i++) print i * 7919 % 1000003 }}' > numbers\n\
         sort -n -S 100M numbers > plain\n\
         nobody ./granary run --local 4MiB --stats-json tmp/stats -- sort -n -S 100M numbers > paged\n\
         cmp plain paged"
    );
    let output = run(&scratch, &script);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stats = fs::read_to_string(scratch.0.join("tmp/stats")).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    let count = |name: &str| stats[name].as_u64().unwrap();
    assert!(count("pages_out") > 500 && count("pages_in") > 500, "{stats}");
    assert!(count("local_peak_bytes") < (4 << 20) + pager::CONSTANT_BYTES, "{stats}");
}

/// The kernel reports forks to CAP_SYS_PTRACE only. What it does not report must not happen.
#[test]
fn without_capabilities_fork_is_refused_and_spawning_works() {
    const NAME: &str = "without_capabilities_fork_is_refused_and_spawning_works";
    let scratch = Scratch::new("no-forks");
    if let Some(why) = obstacle(&scratch) {
        return skipped(NAME, &why);
    }
    let permitted = fs::read_to_string(SYSCTL).is_ok_and(|value| value.trim() != "0");
    if !permitted && !Path::new(DEVICE).exists() {
        return skipped(NAME, &format!("this kernel has no {DEVICE} (Linux before 6.1)"));
    }
    installed(&scratch);
    let device = format!(
        "if [ -e {DEVICE} ]; then cp -a {DEVICE} device; chmod 666 device; mount --bind device {DEVICE}; fi\n"
    );
    let python = |script: &str| {
        format!("{device}nobody ./granary run --local 4MiB -- python3 -c '{script}'")
    };

    let spawning = "import os, subprocess; x = list(range(2000000)); \
                    print(subprocess.run([\"sh\", \"-c\", \"exit 7\"]).returncode, \
                    os.waitstatus_to_exitcode(os.system(\"exit 3\")), os.popen(\"echo hi\").read(), sum(x))";
    let output = run(&scratch, &python(spawning));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "7 3 hi\n 1999999000000\n");
    assert_eq!(stderr, "");

    let forking =
        "import os; print(\"starts\", flush=True); os.fork(); print(\"forked\", flush=True)";
    let output = run(&scratch, &python(forking));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(pager::config::EXIT_PAGER), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "starts\n");
    for part in ["calls fork", "CAP_SYS_PTRACE", "as root", "posix_spawn"] {
        assert!(stderr.contains(part), "no {part:?} in {stderr}");
    }
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
