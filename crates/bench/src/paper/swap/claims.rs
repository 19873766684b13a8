//! The paper's numbers beside ours.

use super::outcomes::{Outcomes, Quantity};
use super::{Program, Variant};
use crate::paper::programs::rounds::median;
use crate::paper::results::Results;
use bench_report::record::{Setting, Statistic, Unit};

/// Ids of the claims that the experiment covers.
pub(super) const CLAIMS: [&str; 12] = [
    "osmw.swap.overhead.25",
    "rpcmw1.swap.overhead",
    "rpcmw2.swap.overhead",
    "finemr1m.swap.overhead",
    "osmw.swap.utilization",
    "staticmr.swap.utilization.low",
    "staticmr.swap.utilization.high",
    "osmw.swap.utilization.gain.low",
    "osmw.swap.utilization.gain.high",
    "grouping.swapin.latency",
    "grouping.swap.performance",
    "separation.swap.performance",
];

/// How the numbers of the workloads become one.
#[derive(Clone, Copy, Debug)]
enum Reduce {
    Least,
    Most,
    Median,
}

/// A number of a workload: of one variant, or of one over another.
#[derive(Clone, Copy, Debug)]
struct Number {
    quantity: Quantity,
    variant: Variant,
    over: Option<Variant>,
    /// The only local share, in percent.
    share: Option<u32>,
}

impl Number {
    fn over(quantity: Quantity, variant: Variant, over: Variant) -> Self {
        Self { quantity, variant, over: Some(over), share: None }
    }

    fn utilization(variant: Variant) -> Self {
        Self { quantity: Quantity::Utilization, variant, over: None, share: None }
    }
}

impl Outcomes {
    /// The paper's numbers beside ours.
    pub fn claims(&self) -> Results {
        use Reduce::{Least, Median, Most};
        use Variant::{FineMr1, OneSidedMw, RpcMw1, RpcMw2, StaticMr, Ungrouped, Unseparated};
        let mut results = Results::new(super::EXPERIMENT.name, None);
        let mut add = |id: &str, what: &str, reduce, number| {
            self.add_claim(&mut results, id, what, reduce, number);
        };
        let time = |variant, over| Number::over(Quantity::Time, variant, over);
        let at_25 = Number { share: Some(25), ..time(OneSidedMw, StaticMr) };
        let what = "time, onesidedmw over static-mr";
        add("osmw.swap.overhead.25", what, Most, at_25);
        let what = "time, rpc-mw-1 over static-mr";
        add("rpcmw1.swap.overhead", what, Most, time(RpcMw1, StaticMr));
        let what = "time, rpc-mw-2 over static-mr";
        add("rpcmw2.swap.overhead", what, Most, time(RpcMw2, StaticMr));
        let what = "time, fine-mr 1 MB over static-mr";
        add("finemr1m.swap.overhead", what, Most, time(FineMr1, StaticMr));
        let what = "utilization, onesidedmw";
        add("osmw.swap.utilization", what, Median, Number::utilization(OneSidedMw));
        let what = "utilization, static-mr";
        add("staticmr.swap.utilization.low", what, Least, Number::utilization(StaticMr));
        add("staticmr.swap.utilization.high", what, Most, Number::utilization(StaticMr));
        let gain = Number::over(Quantity::Utilization, OneSidedMw, StaticMr);
        let what = "utilization, onesidedmw over static-mr";
        add("osmw.swap.utilization.gain.low", what, Least, gain);
        add("osmw.swap.utilization.gain.high", what, Most, gain);
        let what = "time of a fault, with groups over without (both -Sep)";
        let fault = Number::over(Quantity::FaultTime, Unseparated, Ungrouped);
        add("grouping.swapin.latency", what, Median, fault);
        let what = "time, without groups over with (both -Sep)";
        add("grouping.swap.performance", what, Most, time(Ungrouped, Unseparated));
        let what = "time, without separation over with";
        add("separation.swap.performance", what, Most, time(Unseparated, OneSidedMw));
        results
    }

    fn add_claim(
        &self,
        results: &mut Results,
        id: &str,
        what: &str,
        reduce: Reduce,
        number: Number,
    ) {
        let mut numbers = self.numbers(number);
        numbers.sort_by(|a, b| a.0.total_cmp(&b.0));
        let setting = Setting::new().scheme(number.variant.name()).nic("shm");
        let (found, statistic, which) = match reduce {
            Reduce::Least => (numbers.first().copied(), Statistic::P50, "least"),
            Reduce::Most => (numbers.last().copied(), Statistic::Max, "most"),
            Reduce::Median => {
                let Some(value) = median(numbers.iter().map(|number| number.0).collect()) else {
                    return;
                };
                let record = results.record(&setting, "median_ratio", Unit::Ratio);
                let what = format!("{what}, median of the workloads");
                results.claimed(what, record.value(Statistic::P50, value), id);
                return;
            }
        };
        let Some((value, program, share)) = found else { return };
        let setting =
            setting.with("program", program.name()).with("local_percent", u64::from(share));
        let record = results.record(&setting, &format!("{which}_ratio"), Unit::Ratio);
        let what = format!("{what}, {which} ({}, {share}% local)", program.name());
        results.claimed(what, record.value(statistic, value), id);
    }

    /// The number of each workload that has it.
    fn numbers(&self, number: Number) -> Vec<(f64, Program, u32)> {
        let Number { quantity, variant, over, share } = number;
        let workloads = self.plan.workloads().filter(|(_, own)| share.is_none_or(|s| s == *own));
        let value = |(program, share)| {
            let point = self.plan.point(program, share, variant);
            let value = match over {
                Some(over) => {
                    self.ratio(quantity, &point, &self.plan.point(program, share, over))?
                }
                None => self.median(quantity, &point)?,
            };
            Some((value, program, share))
        };
        workloads.filter_map(value).collect()
    }
}
