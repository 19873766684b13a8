//! The conformance suite in virtual time, between two compute nodes of a simulated cluster.

use std::sync::Arc;

use parking_lot::Mutex;
use pool::Settings;
use rnic::port::inline::InlineFunction;
use sim::{Cluster, ClusterSpec, NodeId, Params, SimNic, Time};
use verbs::conformance::{self, Bench};

struct Simulated {
    client: SimNic,
    server: SimNic,
}

impl Bench for Simulated {
    type Nic = SimNic;

    fn client(&self) -> &SimNic {
        &self.client
    }

    fn server(&self) -> &SimNic {
        &self.server
    }
}

#[test]
fn simulated() {
    (1..=4).for_each(with_seed);
}

fn with_seed(seed: u64) {
    let spec = ClusterSpec {
        params: Arc::new(Params::connectx5()),
        seed,
        shuffled: true,
        compute_nodes: 2,
        memory_nodes: 1,
        settings: Settings { donate_bytes: 1 << 20, clients_max: 2, ..Settings::default() },
    };
    let mut cluster = Cluster::new(&spec).expect("a cluster");
    let connector = cluster.connector();
    let functions: [InlineFunction; 2] =
        [(); 2].map(|()| connector.function().expect("a function"));
    let [client, server] = [1, 2].map(|n| connector.nic(NodeId(n), &functions[n as usize - 1]));
    let report = Arc::new(Mutex::new(None));
    let fiber = cluster.sim.spawn("conformance", Time::us(1), {
        let report = report.clone();
        move || *report.lock() = Some(conformance::run(&Simulated { client, server }))
    });
    cluster.sim.run_to_end(&[fiber]).expect("it ends");
    let report = report.lock().take().expect("it has run");
    println!("seed {seed}: {report}after {} us of virtual time", cluster.sim.now().as_ns() / 1000);
    let lacking: Vec<_> =
        report.skipped.iter().filter(|(_, why)| why.contains(" lacks ")).map(|s| s.0).collect();
    assert_eq!(lacking, ["regions.remote_write_needs_local_write", "cqs.solicited_events"]);
    assert_eq!(report.passed.len() + report.skipped.len(), conformance::cases::<Simulated>().len());
}
