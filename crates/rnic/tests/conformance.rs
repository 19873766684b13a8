//! The conformance suite on every port of the software NIC.
//!
//! Each bench lists the cases that it expects to be left out. The test fails if a case is left out
//! for another reason, or if a listed case runs.

mod common;

use rnic::limits::{FunctionLimits, Limits};
use rnic::nic::SoftNic;
use rnic::port::Function;
use rnic::port::inline::InlineNic;
use verbs::Feature;
use verbs::conformance::{self, Bench, Body, Report};

/// Two functions of the software NIC.
struct Soft {
    client: SoftNic,
    server: SoftNic,
    one: bool,
}

impl Bench for Soft {
    type Nic = SoftNic;

    fn client(&self) -> &SoftNic {
        &self.client
    }

    fn server(&self) -> &SoftNic {
        &self.server
    }

    fn is_one_function(&self) -> bool {
        self.one
    }
}

fn check(bench: &Soft, lacks: &[&str]) -> Report {
    let report = conformance::run(bench);
    println!("{report}");
    let lacking: Vec<_> =
        report.skipped.iter().filter(|(_, why)| why.contains(" lacks ")).map(|s| s.0).collect();
    assert_eq!(lacking, lacks);
    let all = conformance::cases::<Soft>();
    assert_eq!(report.passed.len() + report.skipped.len(), all.len());
    report
}

/// The back ends that pass the cases for every NIC, as the table names them.
const ALL: &str = "inline, shm, roce, simulated";

/// Cases that the software NIC leaves out on every port.
const LACKS: [&str; 1] = ["regions.remote_write_needs_local_write"];

/// Cases that are left out if the server's NIC runs in another process.
const LACKS_ATTACHED: [&str; 6] = [
    LACKS[0],
    "engines.act_before_the_next_request",
    "engines.act_before_an_immediate",
    "engines.see_the_tag_of_the_queue_pair",
    "engines.admit_reads_and_writes_only",
    "engines.end_with_their_region",
];

#[test]
fn inline() {
    let nic = InlineNic::new(Limits::default());
    let virtual_function = nic.function(FunctionLimits::default()).expect("a function");
    let server = SoftNic::new(Function::Inline(nic.physical()));
    let client = SoftNic::new(Function::Inline(virtual_function));
    check(&Soft { client: client.clone(), server: server.clone(), one: false }, &LACKS);
    check(&Soft { client: server, server: client, one: false }, &LACKS);
}

#[test]
fn one_function_with_itself() {
    let nic = SoftNic::inline();
    check(&Soft { client: nic.clone(), server: nic, one: true }, &LACKS);
}

#[test]
fn shm_local() {
    let (server, host) = SoftNic::host().expect("a host");
    let function = host.function(FunctionLimits::default()).expect("a function");
    let client = SoftNic::new(Function::Local(function));
    check(&Soft { client, server, one: false }, &LACKS);
}

#[test]
fn shm_attached_with_its_host() {
    // On a NIC that is run by its thread alone, and on a NIC that is also run by waiting threads of
    // the host.
    for (server, host) in [SoftNic::host(), SoftNic::host_own()].map(|nic| nic.expect("a host")) {
        let client = common::attach_in_process(&host);
        check(&Soft { client: client.clone(), server: server.clone(), one: false }, &LACKS);
        check(&Soft { client: server, server: client, one: false }, &LACKS_ATTACHED);
    }
}

#[test]
fn shm_attached_to_another_process() {
    let host = common::process::HostProcess::start();
    let [client, server] = [(); 2].map(|()| SoftNic::attach(&host.socket).expect("attaching"));
    check(&Soft { client, server, one: false }, &LACKS_ATTACHED);
}

/// The host process of [`shm_attached_to_another_process`], which runs this binary.
#[test]
fn other_process() {
    common::process::be_host_if_asked();
}

#[test]
fn the_table_in_the_docs_names_every_case() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/internals/conformance.md");
    let docs = std::fs::read_to_string(docs).expect("docs/internals/conformance.md");
    let mut seen = std::collections::HashSet::new();
    let mut missing = String::new();
    for case in conformance::cases::<Soft>() {
        assert!(seen.insert(case.name), "{} is listed twice", case.name);
        let theirs = case.mirrors.join(", ");
        let (runs_on, passed_by) = match case.body {
            Body::Always(_) => ("every NIC".to_string(), ALL),
            Body::With(feature, _) => {
                let passed_by = match feature {
                    _ if LACKS.contains(&case.name) => "",
                    Feature::SolicitedEvents => "inline, shm, roce",
                    Feature::MaskedAtomics => "inline, shm, simulated",
                    _ => ALL,
                };
                (format!("NICs with `{feature:?}`"), passed_by)
            }
            Body::AtServer(feature, _) => (format!("servers with `{feature:?}`"), ALL),
            Body::Never(why) => (format!("left out: {why}"), ""),
        };
        let row = format!("| `{}` | {theirs} | {runs_on} | {passed_by} |", case.name);
        if !docs.contains(&row) {
            missing += &format!("{row}\n");
        }
    }
    assert!(missing.is_empty(), "docs/internals/conformance.md lacks these rows:\n{missing}");
}
