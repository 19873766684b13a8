//! `granary kv` under clients of Redis that were not changed: redis-py and node-redis.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use granary_tests::kv::Server;
use granary_tests::needs::skip;
use granary_tests::node::full;

/// Directory of Debian's packages of Node.js, for any Node.js.
const NODE_PATH: &str = "/usr/share/nodejs";

/// Runs a script of a client against a server of its own. `check` succeeds if the client is
/// installed.
fn run(mut check: Command, mut client: Command, name: &str) -> Result<()> {
    let check = check.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !check.is_ok_and(|status| status.success()) {
        skip(format!("{name} is not installed; scripts/test-deps installs it"));
        return Ok(());
    }
    let server = Server::start(&["--threads", "2"])?;
    let out = client.arg(server.port.to_string()).output()?;
    let stderr = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{name}: {stderr}");
    assert_eq!(String::from_utf8(out.stdout)?, "done\n", "{stderr}");
    Ok(())
}

fn script(name: &str) -> String {
    format!("{}/tests/kv_clients/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn redis_py_works() -> Result<()> {
    let python = |arguments: &[&str]| {
        let mut command = Command::new("/usr/bin/python3");
        command.args(arguments);
        command
    };
    run(python(&["-c", "import redis"]), python(&[&script("redis_py.py")]), "redis-py")
}

/// In the full run only, because node-redis needs Node.js.
#[test]
fn node_redis_works() -> Result<()> {
    if !full() {
        return Ok(());
    }
    let node = |arguments: &[&str]| {
        let mut command = Command::new("node");
        command.env("NODE_PATH", NODE_PATH).args(arguments);
        command
    };
    run(node(&["-e", "require('redis')"]), node(&[&script("node_redis.js")]), "node-redis")
}
