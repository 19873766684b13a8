//! What the memory node's CPU needs to open memory: to register a region, to bind and unbind a window
//! (OneSidedMW §2.2; the numbers are FineMem's table 1 and Patronus §4.1).

use super::finding::Findings;
use super::{Extent, Run};
use crate::Error;
use crate::histogram::Latencies;
use crate::record::Unit;
use crate::size::Size;

const SIZES: &[u64] =
    &[4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
const SIZES_QUICK: &[u64] = &[4 << 10, 4 << 20, 64 << 20];
const ROUNDS: u32 = 100;
/// What FineMem's table is by.
const UNIT_BYTES: u64 = 4 << 20;

/// Steps of [`run`].
pub fn steps() -> usize {
    1
}

/// Times the verbs.
///
/// # Errors
/// As the verbs.
pub fn run(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    let sizes = match run.extent {
        Extent::Full => SIZES,
        Extent::Quick => SIZES_QUICK,
    };
    run.bar.say("regions and windows");
    let times = run.place.verbs(sizes, run.rounds(ROUNDS))?;
    run.bar.step();
    let setting = run.setting("mr");
    for (bytes, register, deregister) in &times.regions {
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
    let unbind = record("unbind_us", &times.unbind);
    let rebind = record("rebind_us", &times.rebind);
    findings.claimed("bind a window (FineMem)", bind.clone(), "mw.generate.4m");
    findings.claimed("bind a window (Patronus)", bind, "patronus.bind");
    findings.claimed("unbind a window", unbind, "mw.invalidate.4m");
    findings.claimed("unbind and bind a window", rebind, "mw.regenerate.4m");
    Ok(())
}
