//! A user without privileges: the error of `granary run` if userfaultfd is refused, and paging of
//! programs and process trees if the user may open the device file.
//!
//! Only root can drop privileges for a test; for other users the tests are skipped (`needs`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use granary_tests::needs;
use granary_tests::node::{full, granary};
use granary_tests::pager::Scratch;

const DEVICE: &str = "/dev/userfaultfd";
/// A part of the message of a child that was made past libc.
const PAST_LIBC: &str = "which was made by a system call past libc, needs memory of its parent";
const SYSCTL: &str = "/proc/sys/vm/unprivileged_userfaultfd";

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Copies the command and its library to the scratch directory, executable by all users.
fn installed(scratch: &Scratch) {
    let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let built = granary();
    open(&scratch.0);
    for name in ["granary", pager::run::LIBRARY] {
        let copy = scratch.0.join(name);
        fs::copy(built.with_file_name(name), &copy).unwrap();
        open(&copy);
    }
    // TMPDIR, for the memory node's socket and the counters.
    let directory = scratch.0.join("tmp");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777)).unwrap();
}

/// Runs a shell script in a mount namespace of its own. In the script, `as_user COMMAND` runs a
/// command without any privilege, and `./granary` is the command under test.
fn run(scratch: &Scratch, script: &str) -> Output {
    let here = scratch.0.to_str().unwrap();
    let script = format!(
        "as_user() {{ setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all \
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

/// The reason why these tests cannot run on this machine, if any.
fn obstacle(scratch: &Scratch) -> Option<String> {
    if !is_root() {
        return Some("only root can drop privileges".into());
    }
    let tried = run(scratch, "as_user true");
    (!tried.status.success()).then(|| String::from_utf8_lossy(&tried.stderr).into_owned())
}

#[test]
fn refused_userfaultfd_error_names_the_remedy() {
    let scratch = Scratch::new("refused");
    if let Some(why) = obstacle(&scratch) {
        return needs::skip(why);
    }
    if fs::read_to_string(SYSCTL).is_ok_and(|value| value.trim() != "0") {
        let why = "vm.unprivileged_userfaultfd permits it to every user here: set it to 0";
        return needs::skip(why);
    }
    installed(&scratch);
    // Hides the device file behind a file that the user may not open, without changing it.
    let script = format!(
        "touch closed; chmod 600 closed; if [ -e {DEVICE} ]; then mount --bind closed {DEVICE}; \
         fi\n as_user ./granary run --local 16MiB -- sh -c 'echo it ran'"
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
fn user_with_the_device_file_pages_like_root() {
    let scratch = Scratch::new("device");
    if let Some(why) = obstacle(&scratch) {
        return needs::skip(why);
    }
    if !Path::new(DEVICE).exists() {
        let why = format!("this kernel has no {DEVICE} (Linux before 6.1)");
        return needs::skip(why);
    }
    installed(&scratch);
    // A copy of the device file with other permissions, visible to this test only.
    let script = format!(
        "cp -a {DEVICE} device; chmod 666 device; mount --bind device {DEVICE}\n\
         as_user test -w {DEVICE}\n\
         as_user awk 'BEGIN {{ for (i = 0; i < 150000; i++) print i * 7919 % 1000003 }}' > \
         numbers\n\
         sort -n -S 100M numbers > plain\n\
         as_user ./granary run --local 4MiB --stats-json tmp/stats -- sort -n -S 100M numbers > \
         paged\n cmp plain paged"
    );
    let output = run(&scratch, &script);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stats = fs::read_to_string(scratch.0.join("tmp/stats")).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    let count = |name: &str| stats[name].as_u64().unwrap();
    assert!(count("pages_out") > 500 && count("pages_in") > 500, "{stats}");
    assert!(count("local_peak_bytes") < (4 << 20) + pager::CONSTANT_BYTES, "{stats}");
}

/// A scratch directory in which `as_user` may run paged programs; `None` if the test is skipped.
fn scratch_for(test: &str) -> Option<Scratch> {
    // Truncated, because the path of a socket in the directory must not be too long.
    let scratch = Scratch::new(&format!("user-{}", &test[..test.len().min(24)]));
    let permitted = fs::read_to_string(SYSCTL).is_ok_and(|value| value.trim() != "0");
    let why = match obstacle(&scratch) {
        None if !permitted && !Path::new(DEVICE).exists() => {
            Some(format!("this kernel has no {DEVICE} (Linux before 6.1)"))
        }
        other => other,
    };
    match why {
        Some(why) => needs::skip(why),
        None => {
            installed(&scratch);
            return Some(scratch);
        }
    }
    None
}

/// Shell commands that make the device file accessible to all users, in this script only.
fn open_device() -> String {
    format!(
        "if [ -e {DEVICE} ]; then cp -a {DEVICE} device; chmod 666 device; mount --bind device \
         {DEVICE}; fi\n"
    )
}

/// Runs a command as an unprivileged user, first without the pager and then paged, and compares the
/// outputs and the limit of local memory. `$d` is an empty directory.
fn same_paged(scratch: &Scratch, local_mib: u64, command: &str) {
    let script = format!(
        "{}d=$PWD/tmp/d; export d\n\
         as_user mkdir $d; as_user sh -c '{command}' > plain; rm -rf $d; as_user mkdir $d\n\
         as_user ./granary run --local {local_mib}MiB --stats-json tmp/stats -- \
         sh -c '{command}' > paged\n cmp plain paged; test -s plain",
        open_device()
    );
    let output = run(scratch, &script);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {stderr}");
    let stats = fs::read_to_string(scratch.0.join("tmp/stats")).unwrap();
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    let peak = stats["local_peak_bytes"].as_u64().unwrap();
    assert!(peak > 0 && peak < (local_mib << 20) + pager::CONSTANT_BYTES, "{stats}");
}

/// Writes a file to the scratch directory, readable by all users.
fn share(scratch: &Scratch, name: &str, text: &str) -> String {
    let path = scratch.0.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().into()
}

/// The kernel reports forks only to processes with CAP_SYS_PTRACE; the pager must follow forks
/// without these reports.
#[test]
fn a_shell_script_of_a_user() {
    let Some(scratch) = scratch_for("a_shell_script_of_a_user") else { return };
    let script = share(&scratch, "subshells.sh", include_str!("pager_programs/subshells.sh"));
    same_paged(&scratch, 4, &format!("sh {script} 60000"));
}

#[test]
fn make_with_two_jobs_of_gcc_of_a_user() {
    let Some(scratch) = scratch_for("make_with_two_jobs_of_gcc_of_a_user") else { return };
    let makefile = share(&scratch, "Makefile", include_str!("pager_programs/build.mk"));
    same_paged(&scratch, 28, &format!("make -s -B -j2 -C $d -f {makefile} FILES=\"1 2\""));
}

#[test]
fn python_with_processes_of_a_user() {
    let Some(scratch) = scratch_for("python_with_processes_of_a_user") else { return };
    let program = share(&scratch, "processes.py", include_str!("pager_programs/processes.py"));
    same_paged(&scratch, 16, &format!("python3 {program} 60000"));
}

#[test]
fn redis_of_a_user_saves_in_the_background() {
    let Some(scratch) = scratch_for("redis_of_a_user_saves_in_the_background") else { return };
    let program = share(&scratch, "redis.sh", include_str!("pager_programs/redis.sh"));
    same_paged(&scratch, 8, &format!("sh {program} $d 20000"));
}

#[test]
fn process_family_of_a_user_keeps_its_page_contents() {
    let Some(scratch) = scratch_for("process_family_of_a_user_keeps_its_page_contents") else {
        return;
    };
    let family = scratch.compile("family", include_str!("pager_programs/family.c"));
    let seeds = if full() { 40 } else { 4 };
    let family = family.to_str().unwrap();
    let command = format!(
        "i=0; while [ $i -lt {seeds} ]; do i=$((i + 1)); {family} $i 4000 250 3 || exit; done"
    );
    // Sorted, because processes of consecutive runs may overlap.
    same_paged(&scratch, 8, &format!("{{ {command}; echo whole; }} | sort"));
}

/// A child that cannot page its memory ends before it accesses any of it.
#[test]
fn child_without_userfaultfd_ends_with_a_message() {
    let Some(scratch) = scratch_for("child_without_userfaultfd_ends_with_a_message") else {
        return;
    };
    if fs::read_to_string(SYSCTL).is_ok_and(|value| value.trim() != "0") {
        let why = "vm.unprivileged_userfaultfd permits it to every user here: set it to 0";
        return needs::skip(why);
    }
    let program = "import os, sys; x = list(range(1000000)); print(\"ready\", flush=True)\n\
                   sys.stdin.readline(); child = os.fork()\n\
                   if child == 0: print(\"forked\", flush=True)\n\
                   print(os.waitstatus_to_exitcode(os.wait()[1]), sum(x))";
    let program = share(&scratch, "forks.py", program);
    // The device file becomes inaccessible after the program has started. Both processes hold both
    // ends of the FIFO, so that neither blocks in open.
    let script = format!(
        "{}mkfifo go; exec 3<>go; touch out\n\
         {{ for i in $(seq 3000); do if grep -q ready out; then break; fi; sleep 0.01; done\n\
         chmod 600 {DEVICE}; echo >&3; }} &\n\
         as_user ./granary run --local 4MiB -- python3 {program} <&3 > out; cat out",
        open_device()
    );
    let output = run(&scratch, &script);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let expected = format!("ready\n{} 499999500000\n", pager::config::EXIT_PAGER);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{stderr}");
    assert!(stderr.contains("cannot open a userfaultfd"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

/// A child by an instruction of the program has none of the parent's paged memory; its accesses end
/// it with the reason, and do not read zeros.
#[test]
fn raw_fork_of_a_user_ends_with_the_reason() {
    let Some(scratch) = scratch_for("raw_fork_of_a_user_ends_with_the_reason") else { return };
    let program = scratch.compile("raw", include_str!("pager_programs/raw.c"));
    let script = format!(
        "{}as_user ./granary run --local 4MiB -- {}",
        open_device(),
        program.to_str().unwrap()
    );
    let output = run(&scratch, &script);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "as expected\n");
    let reasons = stderr.lines().filter(|line| line.contains(PAST_LIBC)).count();
    assert!(reasons > 0 && reasons == stderr.lines().count(), "{stderr}");
}
