//! A hostile compute node. It speaks the attach and control protocols itself, writes its own WQEs, and
//! has one subcommand for each attack.
//!
//! `hostile ATTACK --socket PATH [--of CHUNKS] [--seed N] [--count N] [--ms N]`, with `--pool ADDRESS` and
//! the NIC of its own in that where the memory node is on another host. It attaches, prints `ready`,
//! waits for a line on standard input, attacks, and prints what came of it as one JSON object. It ends with an error if something was granted to it that must be refused. An attack with
//! several phases reports after each and waits for a line before the next.

mod access;
mod arguments;
mod blind;
mod compute;
mod control;
mod descriptors;
mod frees;
mod limits;
mod load;
mod nic;
mod noise;
mod parked;
mod queue;
mod reach;
mod trees;
mod type1;

use std::io::BufRead;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pool::Remote;
use serde_json::Value;

use crate::compute::Chunk;

/// What an attack is told.
pub struct Arguments {
    /// The memory node's socket; that of the NIC of this host, if the memory node is on another one.
    pub socket: PathBuf,
    /// The memory node, if it is on another host.
    pub remote: Option<Remote>,
    /// Chunks of others, as their owners know them.
    pub of: Vec<Chunk>,
    /// What random choices follow from.
    pub seed: u64,
    /// How often, or how many.
    pub count: u64,
    /// How long.
    pub time: Duration,
}

impl Arguments {
    /// Says that it is ready and waits until it is told to go on.
    pub fn ready(&self) -> Result<()> {
        println!("ready");
        self.wait()
    }

    /// Reports, and waits for the next phase.
    pub fn report(&self, phase: &Value) -> Result<()> {
        println!("{phase}");
        self.wait()
    }

    /// Waits for a line.
    pub fn wait(&self) -> Result<()> {
        self.hear().map(drop)
    }

    /// The next line.
    pub fn hear(&self) -> Result<String> {
        let line = std::io::stdin().lock().lines().next();
        line.context("who started it has ended")?.context("reading what to do")
    }
}

/// Numbers that follow from a seed (xorshift64*).
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next one.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The next one, below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n
    }
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let attack = words.next().context("which attack?")?;
    let mut a = Arguments {
        socket: PathBuf::new(),
        remote: None,
        of: Vec::new(),
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
                a.socket = remote.nic.as_ref().context("which NIC of this host?")?.socket.clone();
                a.remote = Some(remote);
            }
            "--of" => a.of = serde_json::from_str(&value).context("the chunks of --of")?,
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
        other => bail!("there is no attack {other}"),
    }
    .with_context(|| attack.clone())?;
    println!("{report}");
    Ok(())
}
