//! Ratios between measures of one place, their targets, and the tables.

use std::fmt;

use pool::ControlMode;
use pool::schemes::patronus::book::PERMISSION_BYTES;
use units::number::{engineering, significant};

use super::{BYTES, EXPERIMENT, IN_FLIGHT, KILLED, LATENESS, Measure, Place};
use bench_report::histogram::Latencies;
use bench_report::record::{Record, Setting, Statistic, Unit};
use bench_report::table::{Cell, Table};

/// A bound that the design states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// The value is at least this.
    AtLeast(f64),
    /// The value is at most this.
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "≥ {least}"),
            Self::AtMost(most) => write!(f, "≤ {most}"),
        }
    }
}

/// Two measures that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ratio {
    /// Rate of pairs, one at a time, over the rate of allocations and frees by RPC.
    Pair,
    /// The same, several in flight.
    Pairs,
    /// Rate of acquisitions whose permissions expire, over the rate of pairs.
    Expiring,
    /// Rate of extensions by CAS, over the rate of those by RPC.
    Extend,
    /// Rate of lifecycles with extensions, over the rate of those with new acquisitions.
    Extended,
    /// Time of a READ under a permission, over the time of one under a grant.
    Read,
    /// Rate of three READs with their acquisition, over the rate of three READs by RPC.
    Reads,
    /// Time from a refused READ to the next success with a spare QP, over the time without.
    Refused,
}

impl Ratio {
    /// All ratios, in the order of the tables.
    pub const ALL: [Self; 8] = [
        Self::Pair,
        Self::Pairs,
        Self::Expiring,
        Self::Extend,
        Self::Extended,
        Self::Read,
        Self::Reads,
        Self::Refused,
    ];

    /// Name of the metric.
    pub fn metric(self) -> &'static str {
        match self {
            Self::Pair | Self::Pairs => "pairs_over_rpc_ratio",
            Self::Expiring => "expiring_over_pairs_ratio",
            Self::Extend => "cas_over_rpc_ratio",
            Self::Extended => "extended_over_reacquired_ratio",
            Self::Read => "permission_over_grant_ratio",
            Self::Reads => "reads_over_rpc_ratio",
            Self::Refused => "spare_over_reset_ratio",
        }
    }

    /// The two measures.
    pub fn measures(self) -> (Measure, Measure) {
        match self {
            Self::Pair => (Measure::Pair, Measure::AllocatePair),
            Self::Pairs => (Measure::Pairs, Measure::AllocatePairs),
            Self::Expiring => (Measure::Expiring, Measure::Pairs),
            Self::Extend => (Measure::ExtendByCas, Measure::ExtendByRpc),
            Self::Extended => (Measure::Extended, Measure::Reacquired),
            Self::Read => (Measure::ReadPermission, Measure::ReadGrant),
            Self::Reads => (Measure::ThreeReads, Measure::ThreeReadsByRpc),
            Self::Refused => (Measure::RefusedWithSpare, Measure::RefusedWithout),
        }
    }

    /// True for a quotient of times, false for one of rates.
    fn is_of_times(self) -> bool {
        matches!(self, Self::Read | Self::Refused)
    }

    /// The ratio of two times.
    fn of(self, time: f64, over: f64) -> f64 {
        if self.is_of_times() { time / over } else { over / time }
    }

    /// The target at a place, if the design states one.
    pub fn target(self, place: Place) -> Option<Bound> {
        let is_inline = place.nic == "inline";
        Some(match self {
            Self::Pair => Bound::AtLeast(1.0),
            Self::Pairs => Bound::AtLeast(1.3),
            Self::Expiring => Bound::AtLeast(1.5),
            Self::Extend if is_inline && place.control == ControlMode::Polling => {
                Bound::AtLeast(3.0)
            }
            Self::Extend if !is_inline => Bound::AtLeast(20.0),
            Self::Extend => return None,
            Self::Extended => Bound::AtLeast(if is_inline { 3.0 } else { 6.0 }),
            Self::Read => Bound::AtMost(1.1),
            Self::Reads => Bound::AtLeast(1.5),
            Self::Refused => Bound::AtMost(0.1),
        })
    }
}

/// All results of one place.
#[derive(Clone, Debug)]
pub struct Results {
    /// The place.
    pub place: Place,
    /// Seconds of a unit in each turn, in the order of [`Measure::ALL`].
    times: [Vec<f64>; Measure::ALL.len()],
    /// Window operations for each permission in each turn: one in flight, [`IN_FLIGHT`].
    windows: [Vec<f64>; 2],
    /// Lateness of expiries.
    pub lateness: Latencies,
    /// Waits after the SIGKILL of a holder, where compute nodes are processes.
    pub killed: Latencies,
    /// Wake-ups while no lease exists, where the CPU sleeps between requests.
    pub asleep: Option<u64>,
}

impl Results {
    /// No results yet.
    pub fn new(place: Place) -> Self {
        Self {
            place,
            times: Default::default(),
            windows: Default::default(),
            lateness: Latencies::new(),
            killed: Latencies::new(),
            asleep: None,
        }
    }

    /// Adds the seconds of a unit in one turn.
    pub fn add(&mut self, measure: Measure, seconds: f64) {
        self.times[index(measure)].push(seconds);
    }

    /// Adds the window operations for each permission in one turn of [`Measure::Pair`] or
    /// [`Measure::Pairs`].
    pub fn add_windows(&mut self, measure: Measure, each: f64) {
        self.windows[usize::from(measure.in_flight() > 1)].push(each);
    }

    /// The median seconds of a unit; `None` if it was not measured.
    pub fn seconds(&self, measure: Measure) -> Option<f64> {
        let times = &self.times[index(measure)];
        (!times.is_empty()).then(|| median(times))
    }

    /// The median of the ratios of the turns.
    pub fn ratio(&self, ratio: Ratio) -> Option<f64> {
        let (of, over) = ratio.measures();
        let (of, over) = (&self.times[index(of)], &self.times[index(over)]);
        let turns: Vec<f64> = of.iter().zip(over).map(|(a, b)| ratio.of(*a, *b)).collect();
        (!turns.is_empty()).then(|| median(&turns))
    }

    /// The median window operations of a permission: one in flight, or [`IN_FLIGHT`].
    fn window_operations(&self, measure: Measure) -> Option<f64> {
        let turns = &self.windows[usize::from(measure.in_flight() > 1)];
        (!turns.is_empty()).then(|| median(turns))
    }

    /// The records.
    pub fn records(&self) -> Vec<Record> {
        let mut records = Vec::new();
        let of = |setting: &Setting, metric, unit| Record::of(EXPERIMENT, setting, metric, unit);
        for measure in Measure::ALL {
            let Some(seconds) = self.seconds(measure) else { continue };
            let setting = measure.setting(self.place);
            let (time, rate) = (seconds * 1e6, 1.0 / seconds);
            records.push(of(&setting, "time_us", Unit::Us).value(Statistic::P50, time));
            records.push(of(&setting, "rate_per_s", Unit::PerSecond).value(Statistic::P50, rate));
        }
        for ratio in Ratio::ALL {
            let Some(value) = self.ratio(ratio) else { continue };
            let (measure, over) = ratio.measures();
            let setting = measure.setting(self.place).with("over", over.name());
            let record = of(&setting, ratio.metric(), Unit::Ratio);
            records.push(record.value(Statistic::P50, value));
        }
        for measure in [Measure::Pair, Measure::Pairs] {
            let Some(value) = self.window_operations(measure) else { continue };
            let setting = measure.setting(self.place);
            let record = of(&setting, "window_operations", Unit::Count);
            records.push(record.value(Statistic::P50, value));
        }
        let setting = Setting::new().scheme("patronus").nic(self.place.nic);
        let setting = setting.control(self.place.control.name()).size(BYTES);
        records.extend(self.lateness.records(&of(&setting, "expiry_lateness_us", Unit::Us)));
        let killed = setting.clone().with("lease_us", KILLED.as_micros() as u64);
        records.extend(self.killed.records(&of(&killed, "killed_holder_us", Unit::Us)));
        let asleep = |count| of(&setting, "asleep_wakeups", Unit::Count).mean(count as f64);
        records.extend(self.asleep.map(asleep));
        let bytes = PERMISSION_BYTES as f64;
        records.push(of(&setting, "permission_bytes", Unit::Bytes).mean(bytes));
        records
    }

    /// The values that have a target: the name, the baseline, the target and the value.
    fn checks(&self) -> Vec<Check> {
        let p99 = |waits: &Latencies| (waits.count() > 0).then(|| waits.quantile_us(0.99));
        let micros = |time: std::time::Duration| time.as_micros() as f64;
        let ratios = Ratio::ALL.into_iter().map(|ratio| {
            let (of, over) = ratio.measures();
            let what = if ratio.is_of_times() { "time" } else { "rate" };
            let spare = if ratio == Ratio::Refused { ", with a spare QP" } else { "" };
            let what = format!("{}{spare}: {what}, {} in flight", of.name(), of.in_flight());
            let over = if ratio == Ratio::Refused { "without a spare QP" } else { over.name() };
            Check(what, over, ratio.target(self.place), self.ratio(ratio))
        });
        let others = [
            Check(
                format!("window operations of acquire, revoke, {IN_FLIGHT} in flight"),
                "permissions",
                Some(Bound::AtMost(1.1)),
                self.window_operations(Measure::Pairs),
            ),
            Check(
                "lateness of expiry, p99, us".into(),
                "",
                Some(Bound::AtMost(micros(LATENESS))),
                p99(&self.lateness),
            ),
            Check(
                format!("wait after SIGKILL of the holder, lease {} us, p99, us", micros(KILLED)),
                "",
                Some(Bound::AtMost(micros(KILLED + LATENESS))),
                p99(&self.killed),
            ),
            Check(
                "wake-ups of the manager without a lease".into(),
                "",
                Some(Bound::AtMost(0.0)),
                self.asleep.map(|count| count as f64),
            ),
            Check(
                "bytes of a permission".into(),
                "",
                Some(Bound::AtMost(128.0)),
                Some(PERMISSION_BYTES as f64),
            ),
        ];
        ratios.chain(others).collect()
    }
}

/// A value with a target: its name, its baseline, the target, the value.
struct Check(String, &'static str, Option<Bound>, Option<f64>);

impl Check {
    fn cells(&self) -> [Cell; 2] {
        let Self(.., target, value) = self;
        let target_cell = target.map_or(Cell::None, |target| Cell::Number(target.to_string()));
        let value_cell = value.map_or(Cell::None, |value| {
            let is_missed = target.is_some_and(|target| !target.holds(value));
            Cell::Number(format!("{}{}", significant(value), if is_missed { " !" } else { "" }))
        });
        [target_cell, value_cell]
    }
}

/// The tables of a run: ratios beside their targets, and times.
pub fn tables(results: &[Results]) -> Vec<(String, Table)> {
    let places = || results.iter().map(|results| results.place.name());
    let pairs = |labels: [&'static str; 2]| {
        places().flat_map(move |place| labels.map(|label| format!("{place}\n{label}")))
    };
    let mut ratios = Table::new(
        ["what".to_owned(), "over".to_owned()].into_iter().chain(pairs(["target", "here"])),
    );
    let checks: Vec<Vec<Check>> = results.iter().map(Results::checks).collect();
    for row in 0..checks.first().map_or(0, Vec::len) {
        let Check(what, over, ..) = &checks[0][row];
        let names = [Cell::text(what), Cell::text(*over)];
        ratios.row(names.into_iter().chain(checks.iter().flat_map(|all| all[row].cells())));
    }
    let head = ["operation", "in flight", "spares"].map(str::to_owned);
    let mut times = Table::new(head.into_iter().chain(pairs(["us", "per s"])));
    for measure in Measure::ALL {
        let spares = match measure.node() {
            super::NodeKind::Patronus { spares } => Cell::count(spares.into()),
            super::NodeKind::RpcMw2 | super::NodeKind::RpcData => Cell::None,
        };
        let in_flight = Cell::count(measure.in_flight() as u64);
        let mut row = vec![Cell::text(measure.name()), in_flight, spares];
        for results in results {
            row.extend(results.seconds(measure).map_or([Cell::None, Cell::None], |seconds| {
                [Cell::number(seconds * 1e6), Cell::Number(engineering(1.0 / seconds))]
            }));
        }
        times.row(row);
    }
    let head = ["wait".to_owned(), "place".to_owned()];
    let mut waits = Table::new(
        head.into_iter().chain(["trials", "p50\nus", "p99\nus", "max\nus"].map(str::to_owned)),
    );
    for results in results {
        for (name, all) in [
            ("lateness of expiry", &results.lateness),
            ("after SIGKILL of the holder", &results.killed),
        ] {
            if all.count() == 0 {
                continue;
            }
            let numbers = [all.quantile_us(0.5), all.quantile_us(0.99), all.max_us()];
            let names = [Cell::text(name), Cell::text(results.place.name())];
            let counts = [Cell::count(all.count())];
            waits.row(names.into_iter().chain(counts).chain(numbers.map(Cell::number)));
        }
    }
    vec![
        ("Permissions: ratios beside their targets (!: missed)".into(), ratios),
        ("Permissions: times, as medians".into(), times),
        ("Permissions: waits for the end of a lease".into(), waits),
    ]
}

fn index(measure: Measure) -> usize {
    Measure::ALL.iter().position(|m| *m == measure).expect("ALL has every measure")
}

/// The median; the upper one of two.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
