//! What the memory node's CPU needs to open memory: to register a region, to bind and unbind a window
//! (OneSidedMW §2.2; the numbers are FineMem's table 1 and Patronus §4.1).
//!
//! FineMem's rows are by 4 MiB. That of a window over 100 GB can only be 25,600 windows one after the other: a bind
//! takes as long for any length (Patronus §4.1), here and on the hardware. So its row is a pass over as many windows.

use super::experiment::Experiment;
use super::finding::Findings;
use super::verbs::Region;
use super::{Extent, Run, picture};
use crate::Error;
use crate::histogram::Latencies;
use crate::record::Unit;
use crate::size::Size;

/// FineMem's table 1.
pub const EXPERIMENT: Experiment = Experiment {
    name: "registration",
    title: "Opening memory by the CPU: regions and windows (OneSidedMW §2.2, FineMem table 1)",
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
/// The paper's largest region. Nobody touches it: virtual time needs no memory for it.
const LARGEST: u64 = 100 << 30;
/// The largest on this machine.
const LARGEST_HERE: u64 = 1 << 30;
const ROUNDS: u32 = 100;
/// What FineMem's table is by.
const UNIT_BYTES: u64 = 4 << 20;

fn sizes(run: &Run<'_>) -> Vec<u64> {
    let largest = match (run.place.simulated(), run.extent) {
        (true, _) => Some(LARGEST),
        (false, Extent::Full) => Some(LARGEST_HERE),
        (false, Extent::Quick) => None,
    };
    let some = if run.extent == Extent::Full { SIZES } else { SIZES_QUICK };
    some.iter().copied().chain(largest).collect()
}

/// Times the verbs.
///
/// # Errors
/// As the verbs.
pub fn run(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    let sizes = sizes(run);
    run.bar.say("regions and windows");
    let times = run.place.verbs(&sizes, run.rounds(ROUNDS))?;
    run.bar.step();
    let setting = run.setting("mr");
    for Region { bytes, register, deregister, reregister } in &times.regions {
        let setting = setting.clone().size(*bytes);
        let of = findings.record(&setting, "register_us", Unit::Us);
        let (statistic, register_us) = run.typical(register);
        let record = of.value(statistic, register_us);
        let what = format!("register {}", Size(*bytes));
        match *bytes {
            UNIT_BYTES => findings.claimed(what, record, "mr.generate.4m"),
            _ => findings.add(what, record),
        }
        if *bytes == UNIT_BYTES {
            let of = findings.record(&setting, "deregister_us", Unit::Us);
            let record = of.value(statistic, run.typical(deregister).1);
            findings.claimed(format!("deregister {}", Size(*bytes)), record, "mr.invalidate.4m");
            let of = findings.record(&setting, "reregister_us", Unit::Us);
            let record = of.value(statistic, run.typical(reregister).1);
            let what = format!("register {} anew (rights)", Size(*bytes));
            findings.claimed(what, record, "mr.regenerate.4m");
        }
        if Some(bytes) == sizes.last() {
            let each = register_us * UNIT_BYTES as f64 / *bytes as f64;
            let of = findings.record(&setting, "register_4mib_us", Unit::Us);
            let record = of.value(statistic, each);
            let what = format!("register {}, each 4 MiB of it", Size(*bytes));
            findings.claimed(what, record, "mr.generate.100g");
        }
    }
    let setting = run.setting("mw").size(UNIT_BYTES);
    let record = |metric: &str, all: &Latencies| {
        let (statistic, us) = run.typical(all);
        findings.record(&setting, metric, Unit::Us).value(statistic, us)
    };
    let bind = record("bind_us", &times.bind);
    let pass = record("bind_pass_us", &times.pass);
    let unbind = record("unbind_us", &times.unbind);
    let rebind = record("rebind_us", &times.rebind);
    findings.claimed("bind a window (FineMem)", bind.clone(), "mw.generate.4m");
    findings.claimed("bind a window (Patronus)", bind, "patronus.bind");
    findings.claimed("bind windows of 4 MiB, a pass over 100 GiB, each", pass, "mw.generate.100g");
    findings.claimed("unbind a window", unbind, "mw.invalidate.4m");
    findings.claimed("unbind and bind a window", rebind, "mw.regenerate.4m");
    Ok(())
}
