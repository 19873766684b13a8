//! Times of the verbs that grant and take back access (Patronus §2.1, §4.1, §5.6, figure 1).

use crate::Error;
use crate::paper::experiment::Experiment;
use crate::paper::results::Results;
use crate::paper::verb_times::Region;
use crate::paper::{Extent, Run, picture};
use bench_report::histogram::Latencies;
use bench_report::record::Unit;
use units::Size;

/// Figure 1.
pub const EXPERIMENT: Experiment = Experiment {
    name: "operations",
    title: "Verbs that grant and take back access (§2.1, figure 1)",
    claims: &[
        "patronus.bind",
        "patronus.alloc.window",
        "patronus.modify.qp",
        "patronus.register.2m",
        "patronus.register.256m",
    ],
    steps: |_| 1,
    run,
    draw: picture::registration,
};

const SIZES: &[u64] = &[4 << 10, 64 << 10, PAGE_BYTES, 16 << 20, 64 << 20, LARGEST];
/// Bytes of a page of the paper's memory node.
const PAGE_BYTES: u64 = 2 << 20;
const LARGEST: u64 = 256 << 20;
const ROUNDS: u32 = 100;

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    run.bar.say("regions, windows and QPs");
    let few = !run.testbed.simulated() && run.extent == Extent::Quick;
    let sizes = if few { &SIZES[..3] } else { SIZES };
    let times = run.testbed.verbs(sizes, run.rounds(ROUNDS))?;
    run.bar.step();
    let record = |results: &Results, kind: &str, metric: &str, latencies: &Latencies| {
        let (statistic, us) = run.typical(latencies);
        results.record(&run.setting(kind), metric, Unit::Us).value(statistic, us)
    };
    let bind = record(results, "mw", "bind_us", &times.bind);
    results.derived("bind a window", bind, "patronus.bind");
    let unbind = record(results, "mw", "unbind_us", &times.unbind);
    results.add("unbind a window", unbind);
    let allocate = record(results, "mw", "allocate_us", &times.allocate);
    results.claimed("allocate a window", allocate, "patronus.alloc.window");
    for Region { bytes, register, deregister, .. } in &times.regions {
        let (statistic, us) = run.typical(register);
        let setting = run.setting("mr").size(*bytes);
        let builder = results.record(&setting, "register_us", Unit::Us);
        let (what, register) = (format!("register {}", Size(*bytes)), builder.value(statistic, us));
        match *bytes {
            PAGE_BYTES => results.claimed(what, register, "patronus.register.2m"),
            LARGEST => results.claimed(what, register, "patronus.register.256m"),
            _ => results.add(what, register),
        }
        let (statistic, us) = run.typical(deregister);
        let builder = results.record(&setting, "deregister_us", Unit::Us);
        results.add(format!("deregister {}", Size(*bytes)), builder.value(statistic, us));
    }
    let flag = record(results, "qp", "modify_us", &times.flag);
    results.claimed("change the access flags of a QP", flag, "patronus.modify.qp");
    let again = record(results, "qp", "reestablish_us", &times.reestablish);
    results.add("re-establish one side of a QP", again);
    Ok(())
}
