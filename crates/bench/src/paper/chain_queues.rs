//! READ latency over the number of the memory node's QPs that carry chains (OneSidedMW §3.2).

use pool::schemes;

use super::load::{Load, Work};
use super::results::Results;
use super::{Extent, Run};
use crate::Error;
use bench_report::record::Unit;

/// Numbers of QPs that carry chains.
const QUEUES: &[u32] = &[0, 2, 24, 48, 72, 96, 120, 144, 168, 192];
const QUEUES_QUICK: &[u32] = &[0, 2, 48, 96];
/// QPs with chains per connection in scheme onesidedmw: Alloc and Free.
const PER_CONNECTION: u32 = 2;
const ROUNDS: u32 = 1000;

fn queues(extent: Extent) -> &'static [u32] {
    match extent {
        Extent::Full => QUEUES,
        Extent::Quick => QUEUES_QUICK,
    }
}

/// Number of steps of [`run`].
pub fn steps(run: &Run<'_>) -> usize {
    queues(run.extent).len()
}

/// One thread reads pages; the other connections are idle and only keep their queues.
///
/// # Errors
/// Errors of the testbed.
pub fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let mut none_us = 0.0;
    for &queues in queues(run.extent) {
        // Zero chains: a scheme without chains. The access is the same READ.
        let scheme = if queues == 0 { schemes::STATIC_MR } else { schemes::ONESIDEDMW };
        let idle = (queues / PER_CONNECTION).saturating_sub(1);
        let work = Work::Access { pause_us: 0.0 };
        let load = Load { idle, ..Load::new(scheme, work, run.rounds(ROUNDS)) };
        let outcome = run.load(&format!("{queues} queues with chains"), &load)?;
        let (statistic, us) = run.typical(&outcome.access);
        if queues == 0 {
            none_us = us;
        }
        let setting = run.setting(scheme.name).with("chain_queues", u64::from(queues));
        let record = results.record(&setting, "read_latency_us", Unit::Us);
        let record = record.value(statistic, us);
        results.add(format!("READ of 4 KiB, {queues} QPs with chains, {statistic}"), record);
        if queues == 96 {
            let ratio = results.record(&setting, "read_latency_ratio", Unit::Ratio);
            let ratio = ratio.mean(us / none_us);
            results.claimed("96 QPs with chains over none", ratio, "offload.read.overhead.96qp");
        }
    }
    Ok(())
}
