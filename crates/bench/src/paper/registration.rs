//! Time of the memory node's CPU to grant access: to register a region, to bind and unbind a window
//! (OneSidedMW §2.2; the numbers are from FineMem's table 1 and Patronus §4.1).
//!
//! FineMem states times per 4 MiB. Its row of windows over 100 GB can only mean 25,600 windows in
//! sequence, because the time of a bind does not depend on the length (Patronus §4.1), neither here
//! nor on hardware. Therefore that row is measured as a pass over 25,600 windows.

use super::experiment::Experiment;
use super::results::Results;
use super::verb_times::Region;
use super::{Extent, Run, picture};
use crate::Error;
use bench_report::histogram::Latencies;
use bench_report::record::Unit;
use units::Size;

/// FineMem's table 1.
pub const EXPERIMENT: Experiment = Experiment {
    name: "registration",
    title: "Granting access by the CPU: regions and windows (OneSidedMW §2.2, FineMem table 1)",
    claims: &[
        "mr.generate.4m",
        "mr.invalidate.4m",
        "mr.regenerate.4m",
        "mr.generate.100g",
        "mw.generate.4m",
        "mw.generate.100g",
        "mw.invalidate.4m",
        "mw.regenerate.4m",
        "patronus.bind",
    ],
    steps: |_| 1,
    run,
    draw: picture::registration,
};

const SIZES: &[u64] = &[4 << 10, 64 << 10, 1 << 20, UNIT_BYTES, 16 << 20, 64 << 20, 256 << 20];
const SIZES_QUICK: &[u64] = &[4 << 10, UNIT_BYTES, 64 << 20];
/// The paper's largest region, for the simulation. It is never touched, so it takes no memory.
const LARGEST: u64 = 100 << 30;
/// The largest region on this machine.
const LARGEST_HERE: u64 = 1 << 30;
const ROUNDS: u32 = 100;
/// Unit of FineMem's table in bytes.
const UNIT_BYTES: u64 = 4 << 20;

fn sizes(run: &Run<'_>) -> Vec<u64> {
    let largest = match (run.testbed.simulated(), run.extent) {
        (true, _) => Some(LARGEST),
        (false, Extent::Full) => Some(LARGEST_HERE),
        (false, Extent::Quick) => None,
    };
    let sizes = if run.extent == Extent::Full { SIZES } else { SIZES_QUICK };
    sizes.iter().copied().chain(largest).collect()
}

/// Times the verbs. In the simulation all claims but the fitted ones are sums of parameters: of one
/// WQE and its completion, and of the CPU's times of a registration.
///
/// # Errors
/// Errors of the verbs.
pub fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let sizes = sizes(run);
    run.bar.say("regions and windows");
    let times = run.testbed.verbs(&sizes, run.rounds(ROUNDS))?;
    run.bar.step();
    let setting = run.setting("mr");
    for Region { bytes, register, deregister, reregister } in &times.regions {
        let setting = setting.clone().size(*bytes);
        let builder = results.record(&setting, "register_us", Unit::Us);
        let (statistic, register_us) = run.typical(register);
        let record = builder.value(statistic, register_us);
        let what = format!("register {}", Size(*bytes));
        match *bytes {
            UNIT_BYTES => results.claimed(what, record, "mr.generate.4m"),
            _ => results.add(what, record),
        }
        if *bytes == UNIT_BYTES {
            let builder = results.record(&setting, "deregister_us", Unit::Us);
            let record = builder.value(statistic, run.typical(deregister).1);
            results.claimed(format!("deregister {}", Size(*bytes)), record, "mr.invalidate.4m");
            let builder = results.record(&setting, "reregister_us", Unit::Us);
            let record = builder.value(statistic, run.typical(reregister).1);
            let what = format!("reregister {} (access rights)", Size(*bytes));
            results.derived(what, record, "mr.regenerate.4m");
        }
        if Some(bytes) == sizes.last() {
            let each = register_us * UNIT_BYTES as f64 / *bytes as f64;
            let builder = results.record(&setting, "register_4mib_us", Unit::Us);
            let record = builder.value(statistic, each);
            let what = format!("register {}, per 4 MiB", Size(*bytes));
            results.derived(what, record, "mr.generate.100g");
        }
    }
    let setting = run.setting("mw").size(UNIT_BYTES);
    let record = |metric: &str, latencies: &Latencies| {
        let (statistic, us) = run.typical(latencies);
        results.record(&setting, metric, Unit::Us).value(statistic, us)
    };
    let bind = record("bind_us", &times.bind);
    let pass = record("bind_pass_us", &times.pass);
    let unbind = record("unbind_us", &times.unbind);
    let rebind = record("rebind_us", &times.rebind);
    results.derived("bind a window (FineMem)", bind.clone(), "mw.generate.4m");
    results.derived("bind a window (Patronus)", bind, "patronus.bind");
    results.derived("bind windows of 4 MiB over 100 GiB, per window", pass, "mw.generate.100g");
    results.derived("unbind a window", unbind, "mw.invalidate.4m");
    results.derived("unbind and bind a window", rebind, "mw.regenerate.4m");
    Ok(())
}
