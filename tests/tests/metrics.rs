//! The page of `granary serve --metrics` and `granary run --metrics`, and its names elsewhere.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::{MemoryNode, granary};
use granary_tests::pager::apply_privilege_setting;
use granary_tests::scrape::{Page, address_of, get, names_in_docs};
use pool::{Options, Pool};

const SERVE: [&str; 10] = [
    "--memory",
    "4MiB",
    "--chunk",
    "16KiB",
    "--metrics",
    "0",
    "--budget-chunks",
    "100",
    "--budget-requests-per-s",
    "100000",
];
/// Longer than the time for which a page is served again.
const PAGE: Duration = Duration::from_millis(200);
const TIMEOUT: Duration = Duration::from_secs(60);

fn is_pagers(name: &str) -> bool {
    name.starts_with("granary_pager_")
}

fn is_servers(name: &str) -> bool {
    name.starts_with("granary_kv_")
}

fn is_budgets(name: &str) -> bool {
    name.starts_with("granary_budget_")
}

fn is_leases(name: &str) -> bool {
    name.starts_with("granary_lease_")
}

#[test]
fn served_page_has_documented_names_and_moving_values() -> Result<()> {
    let node = MemoryNode::start("metrics", &SERVE)?;
    let address = address_of(node.ready["metrics"].as_str().context("no URL")?)?;
    ensure!(address.ip().is_loopback(), "{address}");
    let before = Page::scrape(address)?;
    let mut documented = names_in_docs()?;
    documented.retain(|name| !is_pagers(name) && !is_servers(name) && !is_leases(name));
    assert_eq!(before.names, documented);

    let pool = Pool::connect(&node.socket, Options { groups: Some(1), ..Options::default() })?;
    let grant = pool.allocate_blocking()?;
    pool.write_blocking(&grant, 0, &[7; 64])?;
    thread::sleep(PAGE);
    let after = Page::scrape(address)?;
    let grown = |key: &str| Ok::<f64, anyhow::Error>(after.value(key)? - before.value(key)?);
    assert_eq!(grown("granary_pool_clients")?, 1.0);
    assert_eq!(grown("granary_pool_allocations_nic_total")?, 1.0);
    assert_eq!(grown("granary_pool_chunks_free")?, -1.0);
    assert_eq!(grown("granary_pool_held_bytes")?, 16384.0);
    assert_eq!(after.value("granary_budget_chunks")?, 100.0);
    ensure!(grown("granary_nic_wqes_total{opcode=\"write\"}")? >= 1.0, "no WRITE is counted");
    ensure!(grown("granary_node_uptime_seconds")? > 0.1, "the time stands still");

    // The same names and values elsewhere.
    let status = node.status()?;
    let object = status["metrics"].as_object().context("no metrics in --json")?;
    let in_json: BTreeSet<&str> = object.keys().map(String::as_str).collect();
    assert_eq!(in_json, after.values.keys().map(String::as_str).collect());
    assert_eq!(object["granary_pool_allocations_nic_total"], status["allocations_nic"]);
    let pool_address = format!("shm:{}", node.socket.display());
    let text = Command::new(granary()).args(["status", "--pool", &pool_address]).output()?.stdout;
    let text = String::from_utf8(text)?;
    ensure!(text.lines().any(|line| line == "granary_pool_allocations_nic_total 1"), "{text}");

    pool.free_blocking(grant)?;
    drop(pool);
    let (status, _) = get(address, "/")?;
    assert_eq!(status, "HTTP/1.1 404 Not Found");
    Ok(())
}

#[test]
fn page_of_a_scheme_with_leases_has_their_metrics() -> Result<()> {
    let serve =
        ["--memory=4MiB", "--chunk=16KiB", "--metrics=0", "--scheme=patronus", "--spares=2"];
    let node = MemoryNode::start("metrics-leases", &serve)?;
    let address = address_of(node.ready["metrics"].as_str().context("no URL")?)?;
    let pool = Pool::connect(&node.socket, Options { groups: Some(1), ..Options::default() })?;
    let _grant = pool.allocate_blocking()?;
    let page = Page::scrape(address)?;
    let leases = |mut names: BTreeSet<String>| {
        names.retain(|name| is_leases(name));
        names
    };
    assert_eq!(leases(page.names.clone()), leases(names_in_docs()?));
    // A grant is a permission. A group of two lanes has two spare QPs for each lane.
    assert_eq!(page.value("granary_lease_permissions")?, 1.0);
    assert_eq!(page.value("granary_lease_spare_qps")?, 4.0);
    assert_eq!(page.value("granary_lease_binds_total")?, 1.0);
    Ok(())
}

#[test]
fn idle_connections_do_not_delay_a_scrape() -> Result<()> {
    let node = MemoryNode::start("metrics-idle", &SERVE)?;
    let address = address_of(node.ready["metrics"].as_str().context("no URL")?)?;
    let descriptors =
        || Ok::<_, anyhow::Error>(std::fs::read_dir(format!("/proc/{}/fd", node.pid()))?.count());
    let before = descriptors()?;
    let idle: Vec<TcpStream> =
        (0..64).map(|_| TcpStream::connect(address)).collect::<Result<_, _>>()?;
    let begin = Instant::now();
    Page::scrape(address)?;
    // The deadline of an idle connection is 2 s.
    ensure!(begin.elapsed() < Duration::from_millis(1900), "{:?}", begin.elapsed());
    let open = descriptors()?;
    ensure!(open <= before + 8, "{open} descriptors, {before} before");
    for mut stream in idle {
        stream.set_read_timeout(Some(TIMEOUT))?;
        ensure!(!matches!(stream.read(&mut [0]), Ok(1..)), "an idle connection got an answer");
    }
    Ok(())
}

#[test]
fn page_of_a_run_has_pager_and_private_node() -> Result<()> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let script = "import os, sys; x = os.urandom(50000000); sys.stdin.read(); sys.exit(len(x) & 1)";
    let mut command = Command::new(granary());
    command.args([
        "run",
        "--local",
        "16MiB",
        "--metrics",
        &port.to_string(),
        "--",
        // The one in the path may be a script that starts other processes.
        "/usr/bin/python3",
        "-c",
    ]);
    command.arg(script).stdin(Stdio::piped()).stderr(Stdio::piped());
    apply_privilege_setting(&mut command);
    let mut child = command.spawn()?;
    let input = child.stdin.take();
    let begin = Instant::now();
    let page = loop {
        match Page::scrape(address) {
            Ok(page) if page.value("granary_pager_pages_out_total")? > 1000.0 => break page,
            result => ensure!(begin.elapsed() < TIMEOUT, "no pages: {result:?}"),
        }
        thread::sleep(PAGE);
    };
    let mut documented = names_in_docs()?;
    documented.retain(|name| !is_budgets(name) && !is_servers(name) && !is_leases(name));
    assert_eq!(page.names, documented);
    assert_eq!(page.value("granary_pager_processes")?, 1.0);
    let faults = page.value("granary_pager_fault_time_seconds_count")?;
    // Read-ahead and batches make far fewer faults than pages.
    ensure!(faults > 0.0, "{faults} faults");
    assert_eq!(page.value("granary_pager_fault_time_seconds_bucket{le=\"+Inf\"}")?, faults);
    assert_eq!(page.value("granary_pool_clients")?, 1.0);
    drop(input);
    let output = child.wait_with_output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    // The note about memory that is not paged is not a log line.
    let is_silent = stderr.lines().all(|line| line.starts_with("granary: python3"));
    ensure!(output.status.success() && is_silent, "{}: {stderr}", output.status);
    Ok(())
}
