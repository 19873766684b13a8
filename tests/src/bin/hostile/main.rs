//! A hostile compute node. The program implements the attach and control protocols itself, writes
//! its own WQEs, and has one subcommand for each attack.
//!
//! `hostile ATTACK --socket PATH [--of CHUNKS] [--object NAME] [--seed N] [--count N] [--ms
//! N]`. If the memory node is on another host, `--pool
//! ADDRESS` replaces `--socket`; the address includes the attacker's NIC. The program attaches,
//! prints `ready`, waits for a line on standard input, attacks, and prints its results as one JSON
//! object. It ends with an error if the memory node granted something that it must refuse. An
//! attack with several phases prints a report after each phase and waits for a line before the
//! next.

mod access;
mod arguments;
mod blind;
mod compute;
mod control;
mod descriptors;
mod frees;
mod leases;
mod limits;
mod load;
mod nic;
mod noise;
mod parked;
mod path;
mod queue;
mod reach;
mod trees;
mod type1;

use std::io::BufRead;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use granary_tests::record::from_text;
use pool::{Object, Remote};
use serde_json::Value;

use crate::compute::Chunk;

/// Arguments of an attack.
pub struct Arguments {
    /// The memory node's socket, or the local NIC's socket if the memory node is on another host.
    pub socket: PathBuf,
    /// Address of the memory node, if it is on another host.
    pub remote: Option<Remote>,
    /// Chunks of the victims, with their keys.
    pub of: Vec<Chunk>,
    /// Object of another compute node.
    pub object: Option<Object>,
    /// Seed of random choices.
    pub seed: u64,
    /// Number of rounds or objects.
    pub count: u64,
    /// Duration of the attack.
    pub time: Duration,
}

impl Arguments {
    /// Prints `ready` and waits for a line.
    pub fn ready(&self) -> Result<()> {
        println!("ready");
        self.wait()
    }

    /// Prints a report and waits for a line.
    pub fn report(&self, phase: &Value) -> Result<()> {
        println!("{phase}");
        self.wait()
    }

    /// Waits for a line.
    pub fn wait(&self) -> Result<()> {
        self.receive().map(drop)
    }

    /// The next line on standard input.
    pub fn receive(&self) -> Result<String> {
        let line = std::io::stdin().lock().lines().next();
        line.context("standard input was closed")?.context("reading a command")
    }
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let attack = words.next().context("the name of the attack is missing")?;
    let mut a = Arguments {
        socket: PathBuf::new(),
        remote: None,
        of: Vec::new(),
        object: None,
        seed: 1,
        count: 0,
        time: Duration::from_millis(500),
    };
    while let Some(name) = words.next() {
        let value = words.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--socket" => a.socket = value.into(),
            "--pool" => {
                let remote: Remote = value.parse().map_err(anyhow::Error::msg)?;
                a.socket = remote.nic.as_ref().context("--pool names no local NIC")?.socket.clone();
                a.remote = Some(remote);
            }
            "--of" => a.of = serde_json::from_str(&value).context("the chunks of --of")?,
            "--object" => a.object = Some(from_text(&value)?),
            "--seed" => a.seed = value.parse()?,
            "--count" => a.count = value.parse()?,
            "--ms" => a.time = Duration::from_millis(value.parse()?),
            other => bail!("unknown option {other}"),
        }
    }
    let report = match attack.as_str() {
        "foreign-free" => frees::foreign(&a),
        "double-free" => frees::double(&a),
        "unknown-free" => frees::unknown(&a),
        "all-stop-at-once" => frees::all_stop_at_once(&a),
        "sweep" => blind::sweep(&a),
        "junk" => blind::junk(&a),
        "wrong-qpn" => arguments::wrong_qpn(&a),
        "unwritable-reply" => arguments::unwritable_reply(&a),
        "malformed" => arguments::malformed(&a),
        "over-credit" => arguments::over_credit(&a),
        "never-poll" => arguments::never_poll(&a),
        "reset-storm" => arguments::reset_storm(&a),
        "tags" => access::tags(&a),
        "borders" => access::borders(&a),
        "reuse" => access::reuse(&a),
        "spoil" => access::spoil(&a),
        "scavenge" => access::scavenge(&a),
        "umr" => reach::umr(&a),
        "enable" => reach::enable(&a),
        "verbs" => reach::verbs(&a),
        "connect" => reach::connect(&a),
        "lease-words" => leases::words::table(&a),
        "lease-hog" => leases::words::hog(&a),
        "lease-keys" => leases::keys::foreign(&a),
        "lease-rights" => leases::keys::rights(&a),
        "lease-requests" => leases::requests::foreign(&a),
        "lease-malformed" => leases::requests::malformed(&a),
        "lease-limits" => leases::exhaust::limits(&a),
        "lease-deaf" => leases::exhaust::deaf(&a),
        "lease-breaks" => leases::exhaust::breaks(&a),
        "hoard" => limits::hoard(&a),
        "objects" => limits::objects(&a),
        "memories" => limits::memories(&a),
        "connections" => limits::connections(&a),
        "groups" => limits::groups(&a),
        "many-functions" => limits::many_functions(&a),
        "descriptors" => descriptors::kinds(&a),
        "shrink" => descriptors::shrink(&a),
        "noise" => noise::rings(&a),
        "garbage" => control::garbage(&a),
        "deaf" => control::deaf(&a),
        "hijack" => control::hijack(&a),
        "in-flight" => load::in_flight(&a),
        "load" => load::switched(&a),
        "parked" => parked::threads(&a),
        "tree-guess" => trees::guess(&a),
        "tree-late" => trees::late(&a),
        "tree-beyond" => trees::beyond(&a),
        "tree-storm" => trees::storm(&a),
        "tree-misnames" => trees::misnames(&a),
        "tree-takes" => trees::takes(&a),
        "tree-nonsense" => trees::nonsense(&a),
        "type1-server" => type1::server(&a),
        "type1-client" => type1::client(&a),
        other => bail!("unknown attack {other}"),
    }
    .with_context(|| attack.clone())?;
    println!("{report}");
    Ok(())
}
