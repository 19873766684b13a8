//! `granary kv` as a process, with raw connections and the clients of Redis.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use granary_tests::kv::{Connection, PATIENCE, Server};
use granary_tests::needs::skip;
use granary_tests::node::{MemoryNode, granary};
use granary_tests::scrape::{Page, address_of, names_in_docs};
use rustix::process::Signal;
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
