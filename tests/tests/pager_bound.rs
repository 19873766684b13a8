//! The bound of a run: its processes share it, and it changes while they live.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use granary_tests::needs;
use granary_tests::node::granary;
use granary_tests::pager::{Running, Scratch, plain};
use granary_tests::run::{NodeKind, Paged, Site, processes_of};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Runs `granary` with arguments and returns its output.
fn command(arguments: &[&str]) -> String {
    let output = Command::new(granary()).args(arguments).output().expect("granary starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    String::from_utf8(output.stdout).expect("text")
}

/// The run, as `granary status` lists it; null before it is listed.
fn listed(running: &Running) -> Value {
    let runs = command(&["status", "--json"]);
    let mut runs = runs.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    runs.find(|run| run["pid"] == running.pid()).unwrap_or(Value::Null)
}

/// Waits until the run is listed as `wanted` demands.
fn wait_for(running: &Running, what: &str, wanted: impl Fn(&Value) -> bool) {
    let mut run = Value::Null;
    for _ in 0..6_000 {
        run = listed(running);
        if wanted(&run) {
            return;
        }
        let ended = running.ends_within(Duration::from_millis(5));
        assert!(!ended, "the program ended before {what}: {run}");
    }
    panic!("never {what}: {run}");
}

fn wait_for_file(running: &Running, file: &Path) {
    while !file.exists() {
        let ended = running.ends_within(Duration::from_millis(2));
        assert!(!ended, "the program ended before it made {}", file.display());
    }
}

fn number(run: &Value, name: &str) -> u64 {
    run[name].as_u64().unwrap_or(u64::MAX)
}

/// A program that has written its memory and waits, in a run of its own.
struct Holder {
    site: Site,
    program: PathBuf,
}

impl Holder {
    fn new(name: &str, local: u64, options: &[&str]) -> Self {
        let site = Site::new(NodeKind::Private, name, local, "512MiB").with_options(options);
        let program = site.scratch.compile("bound", include_str!("pager_programs/bound.c"));
        Self { site, program }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.site.scratch.0.join(name)
    }

    /// Arguments of the program: makes the file `NAME.ready`, waits for `NAME.go`.
    fn words(&self, mib: u64, name: &str) -> Vec<String> {
        let file = |end: &str| self.file(&format!("{name}.{end}")).display().to_string();
        vec![mib.to_string(), file("ready"), file("go")]
    }

    fn start(&self, mib: u64) -> Running {
        let words = self.words(mib, "one");
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let program = self.program.to_str().expect("text");
        let running = Running::start(&mut self.site.command(program, &words));
        wait_for_file(&running, &self.file("one.ready"));
        running
    }

    fn go(&self, name: &str) {
        fs::write(self.file(&format!("{name}.go")), "").expect("the directory is writable");
    }

    fn finish(&self, running: Running) -> Paged {
        self.go("one");
        let paged = self.site.finish(running);
        assert_eq!(paged.outcome.code, 0, "{}", paged.outcome.stderr);
        assert_eq!(paged.outcome.stdout, b"right\n");
        paged
    }
}

/// Sorts three files at the same time by `run`, and returns its result.
fn sorts<T>(run: impl Fn(&str, &[&str]) -> T, directory: &Path) -> T {
    let files = directory.display();
    let one =
        |n: u32| format!("sort -n -S 60M --parallel=1 {files}/numbers | md5sum > {files}/{n} &");
    let script = format!("{} {} {} wait; cat {files}/[123]", one(1), one(2), one(3));
    run("sh", &["-c", &script])
}

fn write_numbers(directory: &Path) {
    let numbers: String =
        (0..300_000u64).map(|n| format!("{}\n", n.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    fs::write(directory.join("numbers"), numbers).expect("the directory is writable");
}

#[test]
fn processes_share_the_bound_of_their_run() {
    let site = Site::new(NodeKind::Private, "bound-shared", 40 * MIB, "512MiB");
    write_numbers(&site.scratch.0);
    let expected = sorts(plain, &site.scratch.0);
    let Paged { outcome, stats } =
        sorts(|program, words| site.run(program, words), &site.scratch.0);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(outcome.stdout, expected.stdout, "{}", outcome.stderr);
    assert!(number(&stats, "processes") >= 7, "{stats}");
    assert_eq!(number(&stats, "local_limit_bytes"), 40 * MIB, "{stats}");
    let peak = number(&stats, "local_given_peak_bytes");
    assert!((20 * MIB..=40 * MIB).contains(&peak), "{stats}: {}", outcome.stderr);
    assert!(number(&stats, "pages_out") > 1000, "the processes had too little to page: {stats}");
    for part in ["fault_read_us", "fault_evict_us"] {
        assert!(stats[part].as_f64().is_some_and(|us| us > 0.0), "{part}: {stats}");
    }
    assert!(outcome.stderr.contains("of the run; at most"), "{}", outcome.stderr);
}

/// A random family of up to 14 processes, which also drop, move and unmap memory, and of which
/// parents end before their children.
#[test]
fn forked_children_share_the_bound() {
    let scratch = Scratch::new("bound-forks");
    let family = scratch.compile("family", include_str!("pager_programs/family.c"));
    let family = family.to_str().expect("text");
    let stats = scratch.0.join("stats.json");
    for seed in ["1", "3", "5"] {
        let arguments = [seed, "4000", "250", "3"];
        let expected = plain(family, &arguments);
        let mut run = Command::new(granary());
        // Children that outlive the command keep a store, but not a private memory node.
        run.args(["run", "--local", "24MiB", "--pool", "memory:1GiB", "--stats-json"]).arg(&stats);
        let outcome = Running::start(run.arg("--").arg(family).args(arguments)).finish();
        assert_eq!(outcome.stdout, expected.stdout, "seed {seed}: {}", outcome.stderr);
        let stats = fs::read(&stats).expect("--stats-json writes a file");
        let stats: Value = serde_json::from_slice(&stats).expect("JSON");
        // With more than six processes at a time, what is guaranteed exceeds the bound; and on a
        // busy machine a process starts although the others have not made room within a second.
        let most = 24 * MIB + 4 * MIB * number(&stats, "processes");
        let peak = number(&stats, "local_given_peak_bytes");
        assert!((20 * MIB..=most).contains(&peak), "seed {seed}: {stats}");
    }
}

/// Four processes have 16 MiB guaranteed, in a run of 4 MiB.
#[test]
fn processes_run_although_the_guaranteed_pages_exceed_the_bound() {
    let site = Site::new(NodeKind::Private, "bound-guaranteed", 4 * MIB, "512MiB");
    write_numbers(&site.scratch.0);
    let expected = sorts(plain, &site.scratch.0);
    let Paged { outcome, .. } = sorts(|program, words| site.run(program, words), &site.scratch.0);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(outcome.stdout, expected.stdout);
}

#[test]
fn each_process_has_a_bound_of_its_own_if_the_user_says_so() {
    let output = Command::new(granary())
        .args(["run", "--local-each", "8MiB", "--stats", "--", "sh", "-c", "true; true"])
        .output()
        .expect("granary starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("8MiB   of each process"), "{stderr}");
}

#[test]
fn a_live_run_gives_pages_back_and_goes_on() {
    let holder = Holder::new("bound-live", 64 * MIB, &[]);
    let running = holder.start(56);
    wait_for(&running, "has most of its bound", |run| {
        number(run, "given_bytes") >= 40 * MIB && number(run, "given_bytes") <= 64 * MIB
    });
    let pid = running.pid().to_string();
    let text = command(&["local", &pid, "8MiB"]);
    assert!(text.contains("64MiB -> 8MiB") && text.contains("1 process(es)"), "{text}");
    wait_for(&running, "gives pages back", |run| number(run, "given_bytes") <= 8 * MIB);
    let resident = processes_of(&running).into_iter().filter_map(|child| {
        let status = fs::read_to_string(format!("/proc/{child}/status")).ok()?;
        status.contains("Name:\tbound\n").then_some(())?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    });
    let resident = resident.sum::<u64>() * 1024;
    assert!(resident > 0 && resident <= 8 * MIB + pager::CONSTANT_BYTES, "{resident} bytes");
    command(&["local", &pid, "32MiB"]);
    holder.go("one");
    let paged = holder.finish(running);
    assert_eq!(number(&paged.stats, "local_limit_bytes"), 32 * MIB, "{}", paged.stats);
    assert!(number(&paged.stats, "local_given_peak_bytes") <= 64 * MIB, "{}", paged.stats);
}

#[test]
fn pages_of_a_killed_process_go_to_the_others() {
    let holder = Holder::new("bound-killed", 48 * MIB, &[]);
    let (one, two) = (holder.words(24, "one").join(" "), holder.words(40, "two").join(" "));
    let program = holder.program.display();
    let script =
        format!("{program} {two} & echo $! > {}; {program} {one}", holder.file("pid").display());
    let running = Running::start(&mut holder.site.command("sh", &["-c", &script]));
    wait_for_file(&running, &holder.file("one.ready"));
    wait_for_file(&running, &holder.file("two.ready"));
    let killed = fs::read_to_string(holder.file("pid")).expect("the shell wrote it");
    let before = listed(&running);
    assert!(number(&before, "given_bytes") <= 48 * MIB, "{before}");
    let status = Command::new("kill").args(["-9", killed.trim()]).status().expect("kill starts");
    assert!(status.success());
    wait_for(&running, "counts the killed process out", |run| {
        number(run, "processes") == number(&before, "processes") - 1
    });
    let paged = holder.finish(running);
    let peak = number(&paged.stats, "local_given_peak_bytes");
    assert!(peak <= 48 * MIB, "{}", paged.stats);
}

#[test]
fn a_range_follows_memory_pressure() {
    let holder = Holder::new("bound-range", 64 * MIB, &[]);
    let pressure = holder.file("pressure");
    let set = |percent: f64| {
        let text = format!("some avg10={percent:.2} avg60=0.00 avg300=0.00 total=0\n");
        let new = holder.file("pressure.new");
        fs::write(&new, text).and_then(|()| fs::rename(&new, &pressure)).expect("writable");
    };
    set(3.0);
    let words = holder.words(80, "one");
    let mut run = Command::new(granary());
    run.args(["run", "--local", "60MiB..64MiB", "--pressure"]).arg(&pressure).arg("--");
    let running = Running::start(run.arg(&holder.program).args(&words));
    wait_for_file(&running, &holder.file("one.ready"));
    let limit = |run: &Value| number(run, "local_limit_bytes");
    assert_eq!(limit(&listed(&running)), 64 * MIB, "the run starts with the greatest bound");
    set(20.0);
    wait_for(&running, "shrinks to 60 MiB", |run| {
        limit(run) == 60 * MIB && number(run, "given_bytes") <= 60 * MIB
    });
    set(0.0);
    wait_for(&running, "grows to 64 MiB", |run| limit(run) == 64 * MIB);
    holder.go("one");
    let outcome = running.finish();
    assert_eq!((outcome.code, &outcome.stdout[..]), (0, &b"right\n"[..]), "{}", outcome.stderr);
}

#[test]
fn unusable_bounds_are_refused_with_the_reason() {
    let refused = |arguments: &[&str], why: &str| {
        let output = Command::new(granary()).args(arguments).output().expect("granary starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(why), "{arguments:?}: {stderr}");
    };
    let range = ["run", "--local", "8MiB..16MiB", "--pressure", "/no/file", "--", "true"];
    refused(&range, "pressure stall information");
    refused(&["run", "--local", "1MiB..16MiB", "--", "true"], "at least 4 MiB");
    refused(&["run", "--local", "8MiB", "--local-each", "8MiB", "--", "true"], "cannot be used");
    // Linux has no process with an id above 2^22.
    refused(&["local", "4194305", "8MiB"], "granary status lists runs");
    refused(&["local", "4194305", "1MiB"], "at least 4 MiB");
    refused(&["local", "4194305", "900TiB"], "the machine's memory");
}

/// A program of user 65534, which has no right to the files of root.
fn as_nobody(command: &str) -> Command {
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", command]);
    nobody
}

#[test]
fn other_users_cannot_touch_a_run() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can act as another user");
    }
    let site = Site::new(NodeKind::Private, "bound-hostile", 8 * MIB, "64MiB");
    let wait = site.scratch.0.join("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.05; done", wait.display());
    let running = Running::start(&mut site.command("sh", &["-c", &script]));
    wait_for(&running, "counted", |run| number(run, "processes") == 1);
    let directory = listed(&running)["directory"].as_str().expect("a path").to_owned();
    for attack in ["mkfifo stats.77777", "ln -s /dev/zero stats.7", "truncate -s 0 pages.ledger"] {
        let done = as_nobody(&format!("cd {directory} && {attack}")).output().expect("setpriv");
        assert!(!done.status.success(), "{attack}");
    }
    let memory = format!("ls /proc/{}/fd", running.pid());
    assert!(!as_nobody(&memory).output().expect("setpriv").status.success());
    // A directory that has the name of a run, with the files of former versions.
    let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
    let fake = std::env::temp_dir().join(format!("granary-run-{}-0", sleeper.id()));
    let make = format!("mkdir {0} && cd {0} && mkfifo pages.ledger stats.1", fake.display());
    assert!(as_nobody(&make).status().expect("setpriv").success());
    let id = sleeper.id();
    assert!(listed(&running)["pid"] == running.pid(), "the run is listed beside the fake one");
    assert!(!command(&["status", "--json"]).contains(&format!("\"pid\":{id},")));
    let changed = Command::new(granary()).args(["local", &id.to_string(), "64MiB"]).output();
    assert!(!changed.expect("granary starts").status.success());
    sleeper.kill().expect("sleep runs");
    sleeper.wait().expect("sleep ends");
    fs::remove_dir_all(&fake).expect("root may remove it");
    fs::write(&wait, "").expect("the scratch directory");
    assert!(site.finish(running).outcome.code == 0);
}

#[test]
fn processes_with_changed_users_stay_counted() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can act as another user");
    }
    let site = Site::new(NodeKind::Private, "bound-changed", 16 * MIB, "64MiB");
    let program = "import os
child = os.fork()
if not child:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    memory = bytearray(b'x' * (24 << 20))
    os._exit(memory.count(b'x') != 24 << 20)
os._exit(os.waitpid(child, 0)[1] != 0)
";
    let paged = site.run("/usr/bin/python3", &["-c", program]);
    assert_eq!(paged.outcome.code, 0, "{}", paged.outcome.stderr);
    assert_eq!(paged.count("processes"), 2, "{}", paged.outcome.stderr);
    assert!(paged.count("pages_evicted") > 2000, "{}", paged.outcome.stderr);
}
