//! Tests of the `granary` binary with a memory node: serve, status, run, benchmarks, quickstart.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use bench_report::record::{Record, Statistic};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

fn granary<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_granary"));
    command.args(arguments).stdin(Stdio::null());
    command.env("GRANARY_PRELOAD", granary_tests::pager::library());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, stderr(output));
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Starts a child whose output the test reads line by line.
fn started(mut command: Command) -> (Child, BufReader<ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

fn line(output: &mut impl BufRead) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line
}

fn serve(socket: &Path) -> Command {
    let mut command = granary(["serve", "--json", "--memory", "4MiB", "--chunk", "4KiB"]);
    command.arg("--socket").arg(socket);
    command
}

#[test]
fn memory_node_serves_reports_status_and_stops() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pool.sock");
    let (mut node, mut lines) = started(serve(&socket));
    let ready: Value = serde_json::from_str(&line(&mut lines)).unwrap();
    let pool = format!("shm:{}", socket.display());
    assert_eq!(ready["event"], "ready");
    assert_eq!(ready["pool"], pool.as_str());
    assert_eq!(ready["chunks"], 1024);
    assert_eq!(ready["scheme"], "onesidedmw");

    let output = granary(["status", "--json", "--pool", &pool]).output().unwrap();
    succeeded(&output);
    let status: Value = serde_json::from_str(stdout(&output)).unwrap();
    assert_eq!((&status["free"], &status["chunks"]), (&1024.into(), &1024.into()));

    let output = granary(["status", "--pool", &pool]).output().unwrap();
    succeeded(&output);
    for part in [pool.as_str(), "onesidedmw on NIC shm", "NIC thread", "control CPU"] {
        assert!(stdout(&output).contains(part), "no {part:?} in {}", stdout(&output));
    }

    // A second node at the same socket fails, and the first node keeps serving.
    let output = serve(&socket).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("serves it already"), "{}", stderr(&output));

    signal(&node, Signal::INT);
    let stopped: Value = serde_json::from_str(&line(&mut lines)).unwrap();
    assert_eq!(stopped["event"], "stopped");
    assert!(stopped["control_cpu_ns"].as_u64().unwrap() > 0, "{stopped}");
    assert!(stopped["nic_cpu_ns"].is_u64(), "{stopped}");
    assert!(node.wait().unwrap().success());
    assert!(!socket.exists());

    let output = granary(["status", "--pool", &pool]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("start one with `granary serve --socket PATH`"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn start_up_message_shows_how_to_use_the_node() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pool.sock");
    let mut command = granary(["serve", "--memory", "1MiB", "--scheme", "rpc-mw-2"]);
    command.arg("--socket").arg(&socket);
    let (mut node, mut lines) = started(command);
    let message: String = (0..6).map(|_| line(&mut lines)).collect();
    for part in ["serving 1MiB in 1 chunks", "rpc-mw-2, control event", "granary run --pool shm:"] {
        assert!(message.contains(part), "no {part:?} in {message}");
    }
    signal(&node, Signal::TERM);
    assert!(node.wait().unwrap().success());
}

#[test]
fn invalid_setting_error_names_the_option() {
    for (option, value) in [("--group-size", "1"), ("--credits", "12"), ("--scheme", "rpc")] {
        let output = granary(["serve", option, value]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(option), "{}", stderr(&output));
    }
}

#[test]
fn run_passes_output_and_exit_status_through() {
    for (script, code, text) in [
        ("echo out; exit 7", 7, "out\n"),
        ("kill -TERM $$", 143, ""),
        ("cat; echo end", 0, "end\n"),
    ] {
        let output = granary(["run", "--local", "16MiB", "--", "sh", "-c", script]).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(code), "{script}: {}", stderr(&output));
        assert_eq!(stdout(&output), text, "{script}");
        assert_eq!(stderr(&output), "", "{script}");
    }
}

#[test]
fn run_forwards_signals_to_the_program() {
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let (mut run, mut lines) =
        started(granary(["run", "--local", "16MiB", "--", "sh", "-c", script]));
    assert_eq!(line(&mut lines), "ready\n");
    signal(&run, Signal::TERM);
    assert_eq!(run.wait().unwrap().code(), Some(9));
}

#[test]
fn run_reports_a_start_failure_in_one_line() {
    for (arguments, why) in [
        (&["--local", "1MiB", "--", "true"][..], "at least 4 MiB"),
        (&["--local", "16MiB", "--", "no-such-program"], "not found in PATH"),
        (&["--local", "16MiB", "--pool", "shm:/no/where", "--", "true"], "granary serve"),
    ] {
        let output = granary(["run"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
        assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    }
    let mut command = granary(["run", "--local", "16MiB", "--", "true"]);
    let output = command.env("GRANARY_PRELOAD", "/no/library.so").output().unwrap();
    assert!(stderr(&output).contains("/no/library.so"), "{}", stderr(&output));
}

#[test]
fn paged_program_has_the_same_output_by_nic_allocations() {
    let directory = tempfile::tempdir().unwrap();
    let input = directory.path().join("numbers");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&input).unwrap());
    for n in 0..400_000u64 {
        writeln!(file, "{}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).unwrap();
    }
    drop(file);
    let sort = ["sort", "-n", "--buffer-size=200M", "--parallel=2", input.to_str().unwrap()];
    let plain = Command::new(sort[0]).args(&sort[1..]).output().unwrap();
    let stats = directory.path().join("stats.json");
    let mut command = granary(["run", "--local", "16MiB", "--stats", "--stats-json"]);
    let paged = command.arg(&stats).arg("--").args(sort).output().unwrap();
    succeeded(&paged);
    assert!(plain.stdout == paged.stdout, "the outputs differ");
    let text = stderr(&paged);
    assert!(text.contains("pages out") && text.contains("control CPU"), "{text}");
    let stats: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    let count = |name: &str| stats[name].as_u64().unwrap();
    assert!(count("pages_out") > 1000 && count("pages_in") > 1000, "{stats}");
    assert!(count("allocations_by_nic") >= count("chunks_peak"), "{stats}");
    assert!(count("chunks_peak") > 0 && count("allocations_by_cpu") == 0, "{stats}");
    assert!(count("local_peak_bytes") < (16 << 20) + pager::CONSTANT_BYTES, "{stats}");
    assert!(stats["nic_cpu_s"].as_f64().unwrap() > 0.0, "{stats}");
}

/// Neither memory node alone has enough memory for the program.
#[test]
fn program_pages_to_two_memory_nodes() {
    let directory = tempfile::tempdir().unwrap();
    let nodes = ["a", "b"].map(|name| {
        let socket = directory.path().join(name);
        let mut command = granary(["serve", "--json", "--memory", "24MiB", "--chunk", "256KiB"]);
        command.args(["--scheme", "finemem", "--socket"]).arg(&socket);
        let (node, mut lines) = started(command);
        assert!(line(&mut lines).contains("ready"));
        (node, lines, format!("shm:{}", socket.display()))
    });
    let [pool_a, pool_b] = nodes.each_ref().map(|(_, _, pool)| pool);
    let script = "import hashlib\nl = [b'%020d' % (i * 7919) for i in range(300000)]\n\
                  print(hashlib.sha256(b''.join(l)).hexdigest())";
    let program = ["python3", "-c", script];
    let plain = Command::new(program[0]).args(&program[1..]).output().unwrap();
    let mut command = granary(["run", "--local", "16MiB", "--pool", &format!("{pool_a},{pool_b}")]);
    let paged = command.arg("--").args(program).output().unwrap();
    succeeded(&paged);
    assert_eq!(stdout(&plain), stdout(&paged));
    for (mut node, _lines, pool) in nodes {
        let output = granary(["status", "--json", "--pool", &pool]).output().unwrap();
        let status: Value = serde_json::from_str(stdout(&output)).unwrap();
        assert!(status["allocations_nic"].as_u64().unwrap() > 10, "{pool}: {status}");
        signal(&node, Signal::TERM);
        node.wait().unwrap();
    }
}

#[test]
fn private_memory_node_ends_when_its_command_is_killed() {
    let script = "echo ready; sleep 1000";
    let (mut run, mut lines) =
        started(granary(["run", "--local", "16MiB", "--", "sh", "-c", script]));
    assert_eq!(line(&mut lines), "ready\n");
    let children = format!("/proc/{0}/task/{0}/children", run.id());
    let children = std::fs::read_to_string(children).unwrap();
    let ours = |pid: &&str| {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        command.contains("serve")
    };
    let (nodes, programs): (Vec<&str>, Vec<&str>) = children.split_whitespace().partition(ours);
    let [node] = nodes[..] else { panic!("not one memory node among {children}") };
    let pid = |text: &str| Pid::from_raw(text.parse().unwrap()).unwrap();
    let end = pidfd_open(pid(node), PidfdFlags::empty()).unwrap();
    signal(&run, Signal::KILL);
    run.wait().unwrap();
    let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&minute)).unwrap();
    programs.iter().for_each(|program| {
        // The program may have ended already, because its pool is gone.
        let _ = kill_process(pid(program), Signal::KILL);
    });
    assert_eq!(ended, 1, "the memory node {node} is still running");
}

fn records(output: &Output) -> Vec<Record> {
    succeeded(output);
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// True if there is a measured record of a metric with these values in its setting.
fn has(records: &[Record], metric: &str, setting: &[(&str, &str)]) -> bool {
    records.iter().any(|record| {
        let value = |key: &str| record.setting.get(key).map(ToString::to_string);
        record.metric == metric
            && !record.simulated
            && setting.iter().all(|(key, expected)| value(key).as_deref() == Some(*expected))
    })
}

#[test]
fn bench_alloc_measures_every_contender_on_both_nics() {
    for nic in ["shm", "inline"] {
        let mut command = granary(["bench", "alloc", "--nic", nic, "--clients", "1,3", "--json"]);
        command.args(["--seconds", "0.05", "--rounds", "2", "--memory", "1MiB"]);
        let records = records(&command.output().unwrap());
        for clients in ["1", "3"] {
            let here = [("nic", nic), ("clients", clients), ("size", "4096")];
            for contender in [
                &[("scheme", "onesidedmw")][..],
                &[("scheme", "rpc-mw-2"), ("control", "event")],
                &[("scheme", "rpc-mw-2"), ("control", "polling")],
            ] {
                let setting = [&here[..], contender].concat();
                for metric in [
                    "alloc_latency_us",
                    "free_latency_us",
                    "alloc_rate_per_s",
                    "alloc_control_cpu_us",
                ] {
                    assert!(has(&records, metric, &setting), "no {metric} of {setting:?}");
                }
                assert_eq!(has(&records, "alloc_nic_cpu_us", &setting), nic == "shm");
            }
        }
    }
}

#[test]
fn bench_fault_measures_pager_and_bare_userfaultfd() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = granary(["bench", "fault", "--memory", "32MiB", "--local", "8MiB"]);
    command.args(["--seconds", "0.1", "--rounds", "2", "--json", "--out"]).arg(directory.path());
    let records = records(&command.output().unwrap());
    for (scheme, nic) in [("bare", "none"), ("memory", "none"), ("onesidedmw", "shm")] {
        for (pattern, metric) in [
            ("random", "fault_latency_us"),
            ("random", "page_time_us"),
            ("sequential", "page_time_us"),
        ] {
            let setting = [("scheme", scheme), ("nic", nic), ("pattern", pattern)];
            assert!(has(&records, metric, &setting), "no {metric} of {setting:?}");
        }
    }
    // A touch without a fault takes far less than 1 us, so each of these touches faulted.
    let faults = |r: &&Record| r.metric == "fault_latency_us" && r.statistic == Statistic::P50;
    assert!(records.iter().filter(faults).all(|r| r.value > 1.0), "{records:?}");
    assert!(directory.path().join("fault.svg").is_file());
}

#[test]
fn quickstart_compares_real_programs() {
    let output = granary(["quickstart", "--text", "24MiB", "--json"]).output().unwrap();
    let records = records(&output);
    for program in ["sort", "python3"] {
        let paged = [("program", program), ("mode", "paged")];
        for metric in ["time_s", "pages_in", "pages_out", "chunks_peak", "allocations_by_nic"] {
            assert!(has(&records, metric, &paged), "no {metric} of {program}");
        }
        let differs = |r: &&Record| r.metric == "output_differs";
        assert!(records.iter().filter(differs).all(|r| r.value == 0.0));
    }
    assert!(has(&records, "alloc_latency_us", &[("scheme", "onesidedmw")]));
    let moved = |r: &&Record| r.metric == "pages_out" && r.value > 0.0;
    assert!(records.iter().any(|r| moved(&r)), "nothing was paged");
}

#[test]
fn worker_fails_when_its_memory_node_is_killed() {
    // The client must report an error and not wait forever.
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pool.sock");
    let (mut node, mut lines) = started(serve(&socket));
    line(&mut lines);
    let mut worker = granary(["worker", "alloc", "--pool"]);
    let mut worker = worker
        .arg(format!("shm:{}", socket.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut results = BufReader::new(worker.stdout.take().unwrap());
    assert_eq!(line(&mut results), "{\"ready\":true}\n");
    let task = serde_json::json!({ "duration": Duration::from_secs(600) });
    writeln!(worker.stdin.as_mut().unwrap(), "{task}").unwrap();
    signal(&node, Signal::KILL);
    node.wait().unwrap();
    let output = worker.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("gone"), "{}", stderr(&output));
}
