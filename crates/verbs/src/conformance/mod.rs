//! A suite of verbs tests that every NIC must pass: an executable contract for back ends.
//!
//! A back end provides a [`Bench`]: two functions whose queue pairs it can connect. [`run`] runs
//! every case on them and reports the cases that passed and the cases that were left out. A case is
//! left out if the NIC's [`Caps`](crate::Caps) lack a feature that the case needs. A case that
//! fails panics.
//!
//! The cases follow rdma-core's Python tests of RC queue pairs, and each names the tests that it
//! mirrors. An rdma-core test for which these verbs have no call is present as a case that is
//! always left out, with the reason. `docs/internals/conformance.md` has the table; a test compares
//! it with [`cases`].
//!
//! ```text
//! Bench ── client(), server() ──> Pair: two ends, each with PD, CQ, QP and region ──> case
//! ```

mod atomics;
mod cqs;
mod engines;
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

/// A back end under test.
pub trait Bench {
    /// The NIC type.
    type Nic: Nic;

    /// Returns the client's function.
    fn client(&self) -> &Self::Nic;

    /// Returns the server's function, which may be the client's. The back end decides how the two
    /// differ.
    fn server(&self) -> &Self::Nic;

    /// Returns features that the NICs have but the connection between them lacks.
    fn connection_lacks(&self) -> &'static [Feature] {
        &[]
    }

    /// Returns whether client and server are the same function.
    fn is_one_function(&self) -> bool {
        false
    }

    /// Moves `qp` from Init to RTR, connected to `peer`; each is given with the function that it
    /// belongs to.
    ///
    /// Both ends of a connection are moved, in any order, before work is posted. A queue pair can
    /// be its own peer.
    fn to_rtr(
        &self,
        (_, qp): (Side, &<Self::Nic as Nic>::Qp),
        (_, peer): (Side, &<Self::Nic as Nic>::Qp),
    ) -> Result<(), Error> {
        qp.modify(QpChange::ReadyToReceive { peer: peer.qpn().into() })
    }
}

/// A function of a bench.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The client's function.
    Client,
    /// The server's function.
    Server,
}

/// One test.
pub struct Case<B: Bench> {
    /// Its name.
    pub name: &'static str,
    /// Mirrored tests of rdma-core, as file and name; empty for a test without a counterpart.
    pub mirrors: &'static [&'static str],
    /// The features that the case needs, and its code.
    pub body: Body<B>,
}

/// Condition and code of a [`Case`].
pub enum Body<B: Bench> {
    /// Runs on every NIC.
    Always(fn(&B)),
    /// Runs on NICs with the feature.
    With(Feature, fn(&B)),
    /// Runs if the server's NIC has the feature.
    AtServer(Feature, fn(&B)),
    /// Never runs, because no verb exists for it; the text is the reason.
    Never(&'static str),
}

/// Results of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Cases that passed.
    pub passed: Vec<&'static str>,
    /// Cases that were left out, with the reasons.
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

/// Returns all cases.
pub fn cases<B: Bench>() -> Vec<Case<B>> {
    let parts = [
        objects::cases(),
        windows::cases(),
        engines::cases(),
        atomics::cases(),
        traffic::cases(),
        cqs::cases(),
        qps::cases(),
        srqs::cases(),
        errors::cases(),
    ];
    parts.into_iter().flatten().collect()
}

/// Runs every case that the NICs of `bench` support. Panics at the first failure, after printing
/// the name of the case to standard error.
pub fn run<B: Bench>(bench: &B) -> Report {
    let both = [bench.client(), bench.server()];
    let mut report = Report::default();
    for case in cases::<B>() {
        let (program, lacks) = match case.body {
            Body::Always(program) => (program, None),
            Body::With(feature, program) => (program, lacks(bench, &both, feature)),
            Body::AtServer(feature, program) => (program, lacks(bench, &both[1..], feature)),
            Body::Never(why) => {
                report.skipped.push((case.name, why.to_string()));
                continue;
            }
        };
        if let Some(why) = lacks {
            report.skipped.push((case.name, why));
            continue;
        }
        let running = Running { name: case.name };
        program(bench);
        drop(running);
        report.passed.push(case.name);
    }
    report
}

/// Returns which of `nics`, or the connection between them, lacks `feature`.
fn lacks<B: Bench>(bench: &B, nics: &[&B::Nic], feature: Feature) -> Option<String> {
    let name = match nics.iter().find(|nic| !nic.caps().has(feature)) {
        Some(nic) => nic.caps().name,
        None if bench.connection_lacks().contains(&feature) => "the connection",
        None => return None,
    };
    Some(format!("{name} lacks {feature:?}"))
}

/// Prints the name of the case if it panics.
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

/// Creates a case that runs on every NIC.
fn always<B: Bench>(
    name: &'static str,
    mirrors: &'static [&'static str],
    program: fn(&B),
) -> Case<B> {
    Case { name, mirrors, body: Body::Always(program) }
}

/// Creates a case that needs a feature.
fn with<B: Bench>(
    feature: Feature,
    name: &'static str,
    mirrors: &'static [&'static str],
    program: fn(&B),
) -> Case<B> {
    Case { name, mirrors, body: Body::With(feature, program) }
}

/// Creates a case that needs a feature of the server's NIC.
fn at_server<B: Bench>(feature: Feature, name: &'static str, program: fn(&B)) -> Case<B> {
    Case { name, mirrors: &[], body: Body::AtServer(feature, program) }
}

/// Creates a case for which no verb exists.
fn never<B: Bench>(
    name: &'static str,
    mirrors: &'static [&'static str],
    why: &'static str,
) -> Case<B> {
    Case { name, mirrors, body: Body::Never(why) }
}
