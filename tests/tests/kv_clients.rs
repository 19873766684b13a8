//! `granary kv` under clients of Redis that were not changed, redis-py and node-redis, and under
//! concurrent connections whose history is checked.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use granary_tests::kv::{Connection, Server};
use granary_tests::needs::skip;
use granary_tests::node::full;
use kv::check::linear::{Did, Event, Value, is_linearizable};
use units::Random;

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

/// Reads the rest of a reply that is a number in a bulk string, or nil.
fn number(connection: &mut Connection, first: &str) -> Result<Value> {
    match first {
        "$-1" => Ok(None),
        _ if first.starts_with('$') => Ok(Some(connection.line()?.parse()?)),
        _ => bail!("reply {first}"),
    }
}

/// Does a random operation on a key; `value` is written by no other operation.
fn operate(connection: &mut Connection, kind: u64, key: &str, value: u64) -> Result<Did> {
    Ok(match kind {
        0 | 1 => {
            let reply = connection.ask(&format!("GET {key}"))?;
            Did::Get(number(connection, &reply)?)
        }
        2 => {
            assert_eq!(connection.ask(&format!("SET {key} {value}"))?, "+OK");
            Did::Set(value)
        }
        3 => match connection.ask(&format!("SET {key} {value} NX"))?.as_str() {
            "+OK" => Did::SetNew(value, true),
            reply => {
                assert_eq!(reply, "$-1");
                Did::SetNew(value, false)
            }
        },
        4 => {
            let reply = connection.ask(&format!("SET {key} {value} GET"))?;
            Did::Swap(value, number(connection, &reply)?)
        }
        _ => match connection.ask(&format!("DEL {key}"))?.as_str() {
            ":1" => Did::Delete(true),
            reply => {
                assert_eq!(reply, ":0");
                Did::Delete(false)
            }
        },
    })
}

/// Four connections, which two threads of the server serve, change the same few keys at once.
#[test]
fn histories_of_concurrent_connections_are_linearizable() -> Result<()> {
    const KEYS: u64 = 3;
    const CONNECTIONS: u64 = 4;
    // At most 64 events of a key can be checked.
    const OPERATIONS: u64 = 16;
    let server = Server::start(&["--threads", "2"])?;
    let start = Instant::now();
    let now = || start.elapsed().as_nanos() as u64;
    let mut clients: Vec<(Connection, Random)> = (0..CONNECTIONS)
        .map(|client| Ok((server.connect()?, Random::new(client))))
        .collect::<Result<_>>()?;
    let mut overlaps = 0;
    for round in 0..if full() { 4000 } else { 200 } {
        let live = |client: u64, (connection, random): &mut (Connection, Random)| {
            let mut operation = |step: u64| -> Result<(u64, Event)> {
                let key = random.below(KEYS);
                let (name, value) =
                    (format!("round:{round}:{key}"), 1 + step * CONNECTIONS + client);
                let begin = now();
                let did = operate(connection, random.below(6), &name, value)?;
                Ok((key, Event { begin, end: now(), did }))
            };
            (0..OPERATIONS).map(&mut operation).collect::<Result<Vec<_>>>()
        };
        let mut events = Vec::new();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(&mut clients)
                .map(|(client, state)| scope.spawn(move || live(client, state)))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                events.extend(thread.join().expect("no panic")?);
                anyhow::Ok(())
            })
        })?;
        for key in 0..KEYS {
            let events = events.iter().filter(|(of, _)| *of == key).map(|(_, event)| *event);
            let events: Vec<Event> = events.collect();
            let meets = |a: &Event| events.iter().any(|b| a.begin < b.begin && b.begin < a.end);
            overlaps += events.iter().filter(|event| meets(event)).count();
            ensure!(is_linearizable(&events), "round {round}, key {key}: {events:#?}");
        }
    }
    ensure!(overlaps > 0, "no operations on one key were concurrent");
    Ok(())
}
