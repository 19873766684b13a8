//! `granary kv` as a process, with raw connections and the clients of Redis.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use granary_tests::kv::{Connection, PATIENCE, Server};
use granary_tests::needs::skip;
use granary_tests::node::{MemoryNode, granary};
use granary_tests::pager::Scratch;
use granary_tests::scrape::{Page, address_of, names_in_docs};
use granary_tests::signals::signal;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::Value;

#[test]
fn server_tells_its_addresses_and_what_survives() -> Result<()> {
    let server = Server::start(&["--set", "save ''"])?;
    assert_eq!(server.ready["addresses"][0], format!("127.0.0.1:{}", server.port));
    assert_eq!(server.ready["chunk_bytes"], 64 << 10);
    assert_eq!(server.ready["scheme"], "onesidedmw");
    let survival = server.ready["survival"].as_str().context("no text")?;
    ensure!(survival.starts_with("the data lives as long as this process"), "{survival}");
    assert_eq!(server.connect()?.ask("PING")?, "+PONG");
    Ok(())
}

#[test]
fn sigterm_and_shutdown_end_the_server_in_order() -> Result<()> {
    let mut server = Server::start(&[])?;
    assert_eq!(server.connect()?.ask("PING")?, "+PONG");
    server.signal(Signal::TERM)?;
    let status = server.child.wait()?;
    ensure!(status.success(), "{status:?}, signal {:?}", status.signal());
    let mut server = Server::start(&["--threads", "2"])?;
    assert_eq!(server.connect()?.ask("SHUTDOWN NOSAVE")?, "");
    ensure!(server.child.wait()?.success());
    Ok(())
}

/// A field of INFO as a number.
fn field(connection: &mut Connection, section: &str, name: &str) -> Result<f64> {
    let bulk = connection.ask(&format!("INFO {section}"))?;
    let mut left: i64 = bulk.strip_prefix('$').context("no text")?.parse()?;
    let mut found = None;
    while left >= 0 {
        let line = connection.line()?;
        left -= line.len() as i64 + 2;
        found = line.strip_prefix(name).and_then(|rest| rest.strip_prefix(':')?.parse().ok());
        if found.is_some() {
            break;
        }
    }
    while left >= 0 {
        left -= connection.line()?.len() as i64 + 2;
    }
    found.with_context(|| format!("INFO has no {name}"))
}

/// Large requests that are not whole, and many small ones that wait for EXEC.
#[test]
fn memory_of_closed_connections_is_given_back() -> Result<()> {
    const MIB: f64 = (1 << 20) as f64;
    let server = Server::start(&["--set", "save ''"])?;
    let mut connection = server.connect()?;
    let mut resident = |section: &str, name: &str| field(&mut connection, section, name);
    let before = resident("memory", "process_memory")?;
    let part = ["*3\r\n$3\r\nSET\r\n$1\r\na\r\n$2000000\r\n", &"x".repeat(1 << 20)].concat();
    let queue = ["MULTI\r\n", &format!("SET a {}\r\n", "y".repeat(900)).repeat(1000)].concat();
    for (request, held) in [(part, 250.0), (queue, 200.0)] {
        let mut clients = Vec::new();
        for _ in 0..300 {
            let mut client = server.connect()?;
            client.send(&request)?;
            clients.push(client);
        }
        let start = std::time::Instant::now();
        while resident("memory", "mem_clients_normal")? < held * MIB {
            ensure!(start.elapsed() < PATIENCE, "the requests do not come");
        }
        ensure!(resident("memory", "process_memory")? - before > held * MIB);
        drop(clients);
        let start = std::time::Instant::now();
        while resident("memory", "process_memory")? - before > 32.0 * MIB {
            let rest = (resident("memory", "process_memory")? - before) / MIB;
            ensure!(start.elapsed() < PATIENCE, "{rest} MiB are kept");
        }
        ensure!(resident("clients", "connected_clients")? < 2.0);
    }
    Ok(())
}

/// Descriptors run out although `maxclients` was within the limit: the limit is lowered later.
#[test]
fn server_without_descriptors_says_so_once_and_goes_on() -> Result<()> {
    let scratch = Scratch::new("kv-descriptors");
    let log = scratch.0.join("log");
    let mut command = Command::new(granary());
    command.stderr(File::create(&log)?);
    let server = Server::start_by(command, &["--set", "save ''"])?;
    let (mut first, mut second) = (server.connect()?, server.connect()?);
    for connection in [&mut first, &mut second] {
        assert_eq!(connection.ask("PING")?, "+PONG");
    }
    let pid = Pid::from_raw(server.child.id() as i32).context("no process id")?;
    let open = std::fs::read_dir(format!("/proc/{}/fd", server.child.id()))?.count() as u64;
    let lowered = Rlimit { current: Some(open), maximum: getrlimit(Resource::Nofile).maximum };
    let before = prlimit(Some(pid), Resource::Nofile, lowered)?;
    let mut waiting = Vec::new();
    for _ in 0..5 {
        waiting.push(server.connect()?);
    }
    let lines = || -> Result<usize> {
        let text = std::fs::read_to_string(&log)?;
        Ok(text.matches("accepting a connection failed").count())
    };
    let start = std::time::Instant::now();
    while lines()? == 0 {
        ensure!(start.elapsed() < PATIENCE, "the log has no line");
    }
    // Time for further attempts, which take little of a core.
    let cpu = |connection: &mut Connection| -> Result<f64> {
        let times = ["used_cpu_user", "used_cpu_sys"];
        times.into_iter().map(|name| field(connection, "cpu", name)).sum()
    };
    let (used, start) = (cpu(&mut first)?, std::time::Instant::now());
    std::thread::sleep(std::time::Duration::from_millis(700));
    let share = (cpu(&mut first)? - used) / start.elapsed().as_secs_f64();
    ensure!(share < 0.5, "{share} of a core");
    assert_eq!(lines()?, 1);
    // An old connection makes room for a new one.
    drop(second);
    assert_eq!(waiting[0].ask("PING")?, "+PONG");
    prlimit(Some(pid), Resource::Nofile, before)?;
    for connection in &mut waiting {
        assert_eq!(connection.ask("PING")?, "+PONG");
    }
    Ok(())
}

/// A process with few descriptors has fewer connections, and a line in the log names them.
#[test]
fn few_descriptors_lower_the_limit_of_connections() -> Result<()> {
    let scratch = Scratch::new("kv-few-descriptors");
    let log = scratch.0.join("log");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\""]).arg(granary());
    command.stderr(File::create(&log)?);
    let dir = scratch.0.to_str().context("no path")?;
    let server = Server::start_by(command, &["--set", "save ''", "--dir", dir])?;
    let text = std::fs::read_to_string(&log)?;
    let said = "this process may open 100 file descriptors, so maxclients is 75 instead of 10000";
    ensure!(text.contains(said), "{text}");
    let mut connections = Vec::new();
    for _ in 0..75 {
        let mut connection = server.connect()?;
        assert_eq!(connection.ask("PING")?, "+PONG");
        connections.push(connection);
    }
    assert_eq!(server.connect()?.line()?, "-ERR max number of clients reached");
    assert_eq!(connections[0].ask("SET a 1")?, "+OK");
    assert_eq!(connections[0].ask("SAVE")?, "+OK");
    Ok(())
}

/// Values are on two memory nodes, and the second one is killed.
#[test]
fn values_outlive_another_memory_node() -> Result<()> {
    const KEYS: usize = 400;
    let small = ["--memory", "16MiB", "--chunk", "16KiB"];
    let (first, second) =
        (MemoryNode::start("kv-first", &small)?, MemoryNode::start("kv-second", &small)?);
    let pools = [&first, &second].map(|node| format!("shm:{}", node.socket.display()));
    let server = Server::start(&["--pool", &pools[0], "--pool", &pools[1]])?;
    let mut connection = server.connect()?;
    for key in 0..KEYS {
        assert_eq!(connection.ask(&format!("SET key:{key} value-{key}"))?, "+OK");
    }
    let info = server.run("redis-cli", &["INFO", "pool"])?;
    ensure!(info.contains("pool_nodes:2\r\npool_nodes_gone:0"), "{info}");
    drop(second);

    let mut there = 0;
    for key in 0..KEYS {
        match connection.ask(&format!("GET key:{key}"))?.as_str() {
            "$-1" => {}
            _ => {
                assert_eq!(connection.line()?, format!("value-{key}"));
                there += 1;
            }
        }
    }
    ensure!((KEYS / 4..3 * KEYS / 4).contains(&there), "{there} of {KEYS} keys are left");
    // The work in the background deletes the lost keys.
    let start = std::time::Instant::now();
    while connection.ask("DBSIZE")? != format!(":{there}") {
        ensure!(start.elapsed() < PATIENCE, "{} keys", connection.ask("DBSIZE")?);
    }
    let info = server.run("redis-cli", &["INFO", "pool"])?;
    ensure!(info.contains("pool_nodes_gone:1"), "{info}");
    ensure!(info.contains(&format!("store_keys_gone:{}", KEYS - there)), "{info}");
    for key in 0..KEYS {
        assert_eq!(connection.ask(&format!("SET key:{key} again"))?, "+OK");
    }
    assert_eq!(connection.ask("DBSIZE")?, format!(":{KEYS}"));
    Ok(())
}

/// Waits until a command has this reply.
fn until(connection: &mut Connection, command: &str, reply: &str) -> Result<()> {
    let start = std::time::Instant::now();
    loop {
        let got = connection.ask(command)?;
        if got == reply {
            return Ok(());
        }
        ensure!(start.elapsed() < PATIENCE, "{command}: {got} instead of {reply}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

const SMALL: [&str; 4] = ["--memory", "16MiB", "--chunk", "16KiB"];

/// The memory node is stopped, and a write has no answer. Nothing is lost.
#[test]
fn store_goes_on_after_its_memory_node_was_stopped() -> Result<()> {
    let node = MemoryNode::start("kv-stopped", &SMALL)?;
    let pool = format!("shm:{}", node.socket.display());
    let server = Server::start(&["--pool", &pool, "--pool-timeout", "1"])?;
    let mut connection = server.connect()?;
    for key in 0..200 {
        assert_eq!(connection.ask(&format!("INCRBY key:{key} {key}"))?, format!(":{key}"));
    }
    assert_eq!(connection.ask("SWAPDB 0 1")?, "+OK");
    assert_eq!(connection.ask("SELECT 1")?, "+OK");
    assert_eq!(connection.ask("WATCH key:3")?, "+OK");
    signal(node.pid(), Signal::STOP)?;
    let mut other = server.connect()?;
    assert_eq!(other.ask("SELECT 1")?, "+OK");
    let reply = other.ask("INCR key:7")?;
    ensure!(reply.starts_with("-UNCERTAIN "), "{reply}");
    let reply = other.ask("GET key:8")?;
    ensure!(reply.starts_with("-MASTERDOWN "), "{reply}");
    assert_eq!(other.ask("PING")?, "+PONG");
    let info = server.run("redis-cli", &["INFO", "pool"])?;
    ensure!(info.contains("pool_status:silent\r\npool_outages:1\r\npool_losses:0"), "{info}");
    signal(node.pid(), Signal::CONT)?;
    until(&mut other, "INCRBY key:9 0", ":9")?;
    assert_eq!(other.ask("DBSIZE")?, ":200");
    // The write without an answer has taken effect, or not; it has not taken effect twice.
    let now = other.ask("INCRBY key:7 0")?;
    ensure!([":7", ":8"].contains(&&*now), "{now}");
    for key in 8..200 {
        assert_eq!(other.ask(&format!("INCRBY key:{key} 1"))?, format!(":{}", key + 1));
    }
    // A watched key may have changed.
    assert_eq!(connection.ask("MULTI")?, "+OK");
    assert_eq!(connection.ask("GET key:3")?, "+QUEUED");
    assert_eq!(connection.ask("EXEC")?, "*-1");
    let info = server.run("redis-cli", &["INFO", "pool"])?;
    ensure!(info.contains("pool_status:ok\r\npool_outages:1\r\npool_losses:0"), "{info}");
    Ok(())
}

/// `pool-timeout` of a running server is also the time limit of the library's questions.
#[test]
fn changed_pool_timeout_reaches_the_library() -> Result<()> {
    let node = MemoryNode::start("kv-timeout", &SMALL)?;
    let pool = format!("shm:{}", node.socket.display());
    let mut command = Command::new(granary());
    command.stderr(std::process::Stdio::piped());
    let mut server = Server::start_by(command, &["--pool", &pool, "--pool-timeout", "3600"])?;
    let log = BufReader::new(server.child.stderr.take().context("it is piped")?);
    let mut connection = server.connect()?;
    assert_eq!(connection.ask("SET a 1")?, "+OK");
    assert_eq!(connection.ask("CONFIG SET pool-timeout 1")?, "+OK");
    signal(node.pid(), Signal::STOP)?;
    let reply = connection.ask("INCR a")?;
    ensure!(reply.starts_with('-'), "{reply}");
    // With the limit of the start this line would come after an hour.
    let name = node.socket.display().to_string();
    let is_named = |line: &str| line.contains(&name) && line.contains("not answered for 1 s");
    for line in log.lines() {
        if is_named(&line?) {
            signal(node.pid(), Signal::CONT)?;
            return until(&mut connection, "EXISTS a", ":1");
        }
    }
    anyhow::bail!("the log has no such line");
}

/// The memory node is killed, and another one serves at its address.
#[test]
fn server_begins_again_after_the_end_of_its_memory_node() -> Result<()> {
    let mut node = MemoryNode::start("kv-killed", &SMALL)?;
    let pool = format!("shm:{}", node.socket.display());
    let dir = node.directory().to_str().context("no text")?.to_owned();
    let server = Server::start(&["--pool", &pool, "--pool-timeout", "1", "--dir", &dir])?;
    let mut connection = server.connect()?;
    assert_eq!(connection.ask("SET saved 1")?, "+OK");
    assert_eq!(connection.ask("SAVE")?, "+OK");
    assert_eq!(connection.ask("SET unsaved 1")?, "+OK");
    node.kill()?;
    // The work in the background notices the end without a command.
    let start = std::time::Instant::now();
    while !server.run("redis-cli", &["INFO", "pool"])?.contains("pool_status:silent") {
        ensure!(start.elapsed() < PATIENCE, "the end is not noticed");
    }
    let reply = connection.ask("SET unsaved 2")?;
    ensure!(reply.starts_with("-MASTERDOWN "), "{reply}");
    assert_eq!(connection.ask("PING")?, "+PONG");
    node.restart(&SMALL)?;
    until(&mut connection, "INCRBY saved 0", ":1")?;
    assert_eq!(connection.ask("EXISTS unsaved")?, ":0");
    let info = server.run("redis-cli", &["INFO", "pool"])?;
    ensure!(info.contains("pool_outages:1\r\npool_losses:1"), "{info}");

    assert_eq!(connection.ask("CONFIG SET pool-lost exit")?, "+OK");
    node.kill()?;
    let mut server = server;
    let status = server.child.wait()?;
    ensure!(status.code().is_some_and(|code| code != 0), "{status:?}");
    Ok(())
}

/// Counts PINGs that are answered until `is_done`.
fn ping(server: &Server, is_done: &AtomicBool) -> Result<u64> {
    let mut connection = server.connect()?;
    let mut answered = 0;
    while !is_done.load(Ordering::Acquire) {
        assert_eq!(connection.ask("PING")?, "+PONG");
        answered += 1;
    }
    Ok(answered)
}

/// A pool full of values of 1 KB has room for longer ones, at the cost of about their bytes, and
/// other clients are served meanwhile.
#[test]
fn long_values_find_room_while_others_are_served() -> Result<()> {
    const KB: u64 = 1000;
    let server = Server::start(&["--maxmemory-policy", "allkeys-lru", "--set", "save ''"])?;
    let mut connection = server.connect()?;
    let value = vec![b'f'; KB as usize];
    for first in (0..70_000).step_by(1000) {
        for key in first..first + 1000 {
            connection.send_command(&[b"SET", format!("key:{key}").as_bytes(), &value])?;
        }
        for _ in 0..1000 {
            assert_eq!(connection.line()?, "+OK");
        }
    }
    let mut info = server.connect()?;
    let mut evicted = field(&mut info, "stats", "evicted_keys")? as u64;
    ensure!(evicted > 1000, "the pool is not full: {evicted} keys evicted");
    for (bytes, times) in [(10, 10), (200 * KB, 10), (5000 * KB, 3)] {
        let is_done = AtomicBool::new(false);
        let long = vec![b'v'; bytes as usize];
        let pings = std::thread::scope(|scope| -> Result<u64> {
            let pings = scope.spawn(|| ping(&server, &is_done));
            let set = (0..times).try_for_each(|time| -> Result<()> {
                connection.send_command(&[
                    b"SET",
                    format!("long:{bytes}:{time}").as_bytes(),
                    &long,
                ])?;
                assert_eq!(connection.line()?, "+OK", "value {time} of {bytes} bytes");
                Ok(())
            });
            is_done.store(true, Ordering::Release);
            set.and(pings.join().map_err(|_| anyhow::anyhow!("a PING failed"))?)
        })?;
        let after = field(&mut info, "stats", "evicted_keys")? as u64;
        let most = times * (bytes / KB * 2 + 300);
        ensure!(after - evicted <= most, "{times} x {bytes} bytes evicted {}", after - evicted);
        ensure!(pings > 0 || bytes == 10, "no PING was answered beside {bytes} bytes");
        evicted = after;
    }
    Ok(())
}

#[test]
fn store_in_another_process_gives_its_memory_back() -> Result<()> {
    let node = MemoryNode::start("kv", &["--memory", "16MiB", "--chunk", "16KiB"])?;
    let pool = format!("shm:{}", node.socket.display());
    let server = Server::start(&["--pool", &pool, "--threads", "2"])?;
    let mut connection = server.connect()?;
    assert_eq!(connection.ask("PING")?, "+PONG");
    assert_eq!(connection.ask("INFO pool")?.split_at(1).0, "$");
    let free = |status: &Value| status["free"].as_u64().context("no number of free chunks");
    ensure!(free(&node.status()?)? < 1024);
    drop(server);
    while free(&node.status()?)? < 1024 {}
    Ok(())
}

#[test]
fn server_works_on_one_core() -> Result<()> {
    let mut command = Command::new("taskset");
    command.args(["-c", "0"]).arg(granary());
    let server = Server::start_by(command, &["--threads", "2"])?;
    let mut connections: Vec<Connection> =
        (0..50).map(|_| server.connect()).collect::<Result<_>>()?;
    for round in 0..20 {
        for connection in &mut connections {
            assert_eq!(
                connection.ask(&format!("ECHO {round}"))?,
                format!("${}", round.to_string().len())
            );
            assert_eq!(connection.line()?, round.to_string());
        }
    }
    Ok(())
}

#[test]
fn page_has_the_documented_metrics() -> Result<()> {
    let server = Server::start(&["--metrics", "0"])?;
    server.connect()?.ask("PING")?;
    let address = address_of(server.ready["metrics"].as_str().context("no URL")?)?;
    let page = Page::scrape(address)?;
    let mut documented = names_in_docs()?;
    documented.retain(|name| name.starts_with("granary_kv_"));
    assert_eq!(page.names, documented);
    ensure!(page.value("granary_kv_commands_total")? >= 1.0);
    Ok(())
}

#[test]
fn configuration_file_is_read_and_its_unknown_lines_are_named() -> Result<()> {
    let directory = std::env::temp_dir().join(format!("granary-kv-conf-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let file = directory.join("redis.conf");
    std::fs::write(&file, "maxmemory 5mb\nrequirepass secret\nnonsense 1\nappendfsync always\n")?;
    let log = std::fs::File::create(directory.join("log"))?;
    let mut command = Command::new(granary());
    command.stderr(log);
    let server = Server::start_by(command, &[file.to_str().context("no text")?])?;
    let mut connection = server.connect()?;
    assert_eq!(connection.ask("GET a")?, "-NOAUTH Authentication required.");
    assert_eq!(connection.ask("AUTH secret")?, "+OK");
    let log = std::fs::read_to_string(directory.join("log"))?;
    ensure!(log.contains("redis.conf:3 nonsense: unknown parameter"), "{log}");
    ensure!(log.contains("redis.conf:4 appendfsync: the parameter has no effect"), "{log}");
    std::fs::remove_dir_all(&directory)?;
    Ok(())
}

/// A FIFO without a writer, a directory and an endless device take the place of each file.
#[test]
fn files_that_are_not_regular_are_refused() -> Result<()> {
    let directory = std::env::temp_dir().join(format!("granary-kv-kinds-{}", std::process::id()));
    std::fs::create_dir_all(directory.join("db"))?;
    let path = |name: &str| directory.join(name).display().to_string();
    let (fifo, dump, db) = (path("fifo"), path("db/dump.rdb"), path("db"));
    for path in [&fifo, &dump] {
        ensure!(Command::new("mkfifo").arg(path).status()?.success());
    }
    let refused = |arguments: &[&str], kind: &str| -> Result<()> {
        // A command that hangs is killed: it may not end at SIGTERM.
        let mut command = Command::new("timeout");
        command.args(["--signal", "KILL", "60"]).arg(granary()).args(["kv", "--port", "0"]);
        let out = command.args(["--unixsocket", &path("socket")]).args(arguments).output()?;
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(out.status.code() == Some(1), "{arguments:?}: {:?}: {text}", out.status);
        ensure!(text.contains(&format!("{kind}, and not a regular file")), "{arguments:?}: {text}");
        Ok(())
    };
    refused(&["--dir", &db], "a FIFO")?;
    for (file, kind) in
        [(&fifo, "a FIFO"), (&db, "a directory"), (&"/dev/zero".into(), "a socket or a device")]
    {
        let set = |name: &str| format!("{name} {file}");
        refused(&[file], kind)?;
        refused(&["--set", &set("aclfile")], kind)?;
        refused(&["--tls-port", "6380", "--set", &set("tls-cert-file")], kind)?;
        refused(&["--pool", "roce://127.0.0.1", "--token-file", file], kind)?;
        refused(&["--pool", "roce://127.0.0.1", "--domain-token", file], kind)?;
    }
    std::fs::remove_dir_all(&directory)?;
    Ok(())
}

#[test]
fn redis_cli_and_redis_benchmark_work() -> Result<()> {
    if Command::new("redis-cli").arg("--version").output().is_err() {
        skip("redis-cli is not installed");
        return Ok(());
    }
    let server = Server::start(&[])?;
    assert_eq!(server.run("redis-cli", &["ping"])?.trim(), "PONG");
    assert_eq!(server.run("redis-cli", &["-3", "set", "greeting", "hello"])?.trim(), "OK");
    assert_eq!(server.run("redis-cli", &["get", "greeting"])?.trim(), "hello");
    ensure!(server.run("redis-cli", &["info"])?.contains("redis_version:7.0"));
    ensure!(server.run("redis-cli", &["command", "docs", "get"])?.contains("summary"));
    let measured = server.run(
        "redis-benchmark",
        &["-t", "ping,set,get,incr,mset", "-n", "2000", "-c", "20", "-P", "4", "-d", "100", "-q"],
    )?;
    for test in ["PING_MBULK", "SET", "GET", "INCR", "MSET"] {
        ensure!(measured.contains(&format!("{test}: ")) || measured.contains(test), "{measured}");
    }
    Ok(())
}
