//! One suite of verbs tests that every NIC must pass: what a back end promises, as a program.
//!
//! A back end brings a [`Bench`]: two functions whose queue pairs it can connect. [`run`] then runs every
//! case on them and says which it has passed, and which it has left out because the NIC says in its
//! [`Caps`](crate::Caps) that it cannot do what the case needs. A case that fails panics.
//!
//! The cases follow what rdma-core's Python tests check of RC queue pairs; each names those that it mirrors.
//! A test of theirs for which these verbs have no call is there too, as a case that is always left out, with
//! the reason. `docs/conformance.md` has the table, and a test compares it with [`cases`].
//!
//! ```text
//! Bench ── client(), server() ──> Pair: two ends, each with PD, CQ, QP and region ──> case
//! ```

mod atomics;
mod cqs;
mod errors;
mod objects;
mod pair;
mod qps;
mod srqs;
mod traffic;
mod windows;

use std::fmt;

pub use pair::{End, Pair, Shape};

use crate::{Error, Feature, Nic, QpChange, QueuePair};

/// A back end to be tested.
pub trait Bench {
    /// Its NICs.
    type Nic: Nic;

    /// A function.
    fn client(&self) -> &Self::Nic;

    /// Another function, or the same. What differs between the two is the back end's affair.
    fn server(&self) -> &Self::Nic;

    /// What the connection between the two cannot do, though their NICs can.
    fn connection_lacks(&self) -> &'static [Feature] {
        &[]
    }

    /// Both are one function.
    fn is_one_function(&self) -> bool {
        false
    }

    /// Takes `qp` from Init to RTR, connected with `peer`; each with the function that it is of. Both ends of a
    /// connection are brought there, in any order, before work is posted; a queue pair can be its own peer.
    fn to_rtr(
        &self,
        (_, qp): (Side, &<Self::Nic as Nic>::Qp),
        (_, peer): (Side, &<Self::Nic as Nic>::Qp),
    ) -> Result<(), Error> {
        qp.modify(QpChange::ReadyToReceive { peer: peer.qpn().into() })
    }
}

/// One of a bench's functions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The client's.
    Client,
    /// The server's.
    Server,
}

/// One test.
pub struct Case<B: Bench> {
    /// Its name.
    pub name: &'static str,
    /// The tests of rdma-core that it mirrors, file and name; empty for one of our own.
    pub mirrors: &'static [&'static str],
    /// What it needs, and what it does.
    pub body: Body<B>,
}

/// What a [`Case`] does.
pub enum Body<B: Bench> {
    /// Runs on every NIC.
    Always(fn(&B)),
    /// Runs on NICs with the feature.
    With(Feature, fn(&B)),
    /// There is no verb for it, for this reason.
    Never(&'static str),
}

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Cases that passed.
    pub passed: Vec<&'static str>,
    /// Cases that were left out, and why.
    pub skipped: Vec<(&'static str, String)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} passed, {} left out", self.passed.len(), self.skipped.len())?;
        for (name, why) in &self.skipped {
            writeln!(f, "  {name}: {why}")?;
        }
        Ok(())
    }
}

/// Every case.
pub fn cases<B: Bench>() -> Vec<Case<B>> {
    let parts = [
        objects::cases(),
        windows::cases(),
        atomics::cases(),
        traffic::cases(),
        cqs::cases(),
        qps::cases(),
        srqs::cases(),
        errors::cases(),
    ];
    parts.into_iter().flatten().collect()
}

/// Runs every case that the NICs of `bench` can run. Panics in the first that fails, having named it on
/// standard error.
pub fn run<B: Bench>(bench: &B) -> Report {
    let mut report = Report::default();
    for case in cases::<B>() {
        let program = match case.body {
            Body::Always(program) => program,
            Body::With(feature, program) => {
                let both = [bench.client(), bench.server()];
                let name = match both.iter().find(|nic| !nic.caps().has(feature)) {
                    Some(nic) => Some(nic.caps().name),
                    None => bench.connection_lacks().contains(&feature).then_some("the connection"),
                };
                if let Some(name) = name {
                    report.skipped.push((case.name, format!("{name} lacks {feature:?}")));
                    continue;
                }
                program
            }
            Body::Never(why) => {
                report.skipped.push((case.name, why.to_string()));
                continue;
            }
        };
        let running = Running { name: case.name };
        program(bench);
        drop(running);
        report.passed.push(case.name);
    }
    report
}

/// Names the case that panics.
struct Running {
    name: &'static str,
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("conformance case failed: {}", self.name);
        }
    }
}

/// A case that runs on every NIC.
fn always<B: Bench>(
    name: &'static str,
    mirrors: &'static [&'static str],
    program: fn(&B),
) -> Case<B> {
    Case { name, mirrors, body: Body::Always(program) }
}

/// A case that needs a feature.
fn with<B: Bench>(
    feature: Feature,
    name: &'static str,
    mirrors: &'static [&'static str],
    program: fn(&B),
) -> Case<B> {
    Case { name, mirrors, body: Body::With(feature, program) }
}

/// A case for which there is no verb.
fn never<B: Bench>(
    name: &'static str,
    mirrors: &'static [&'static str],
    why: &'static str,
) -> Case<B> {
    Case { name, mirrors, body: Body::Never(why) }
}
