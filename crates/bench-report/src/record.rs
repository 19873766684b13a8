//! The machine-readable record: one measured number, as one JSON object on one line.
//!
//! `granary bench … --json` prints only records on standard output:
//!
//! ```text
//! {"experiment":"access","setting":{"scheme":"onesidedmw","nic":"shm","size":4096,"in_flight":1},
//!  "metric":"read_latency_us","statistic":"p50","value":0.41,"unit":"us","simulated":false}
//! ```
//!
//! If a paper states the number, further fields follow: `claim` (the id in `claims.toml`), `paper`
//! (the paper's value) and, if the timing model was fitted to that claim, `fitted: true`.
//!
//! Invariants: a value is finite; a metric's name ends in its unit ([`Unit::suffix`]), so that each
//! line is understandable by itself; a setting keeps its keys in insertion order, each key once.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::claims::Claim;

/// Scheme in the records of a baseline measurement without a pool.
pub const BASELINE_SCHEME: &str = "bare";
/// NIC in the records of a baseline measurement without a NIC.
pub const BASELINE_NIC: &str = "none";

/// One measured or simulated number with its description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The experiment's name, as in `granary bench NAME`.
    pub experiment: String,
    /// The varied parameters: scheme, NIC, clients, size, …
    pub setting: Setting,
    /// Name of the measured quantity, with the unit as its suffix, e.g. `read_latency_us`.
    pub metric: String,
    /// Reduction of the samples to one number.
    pub statistic: Statistic,
    /// The number, in `unit`.
    pub value: f64,
    /// The unit of `value` and of `paper`.
    pub unit: Unit,
    /// True if the number comes from virtual time, false if it comes from a clock.
    pub simulated: bool,
    /// Id of the claim in `claims.toml` that states this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The number that the paper states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paper: Option<f64>,
    /// Whether the claim was used to fit the timing model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fitted: Option<bool>,
}

impl Record {
    /// Starts a record of an experiment; the builder's methods add the statistic and the value.
    pub fn of(experiment: &str, setting: &Setting, metric: &str, unit: Unit) -> RecordBuilder {
        assert!(
            metric.ends_with(unit.suffix()),
            "metric {metric} must end in its unit's suffix {}",
            unit.suffix()
        );
        RecordBuilder {
            experiment: experiment.into(),
            setting: setting.clone(),
            metric: metric.into(),
            unit,
            simulated: false,
        }
    }

    /// Adds the paper's number.
    pub fn against(mut self, claim: &Claim) -> Self {
        self.claim = Some(claim.id.clone());
        self.paper = Some(claim.value);
        self
    }

    /// Marks that the claim was used to fit the timing model.
    pub fn fitted(mut self) -> Self {
        assert!(self.claim.is_some(), "only a record with a claim can be marked as fitted");
        self.fitted = Some(true);
        self
    }

    /// The record as one line of JSON, without the newline.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a record has string keys and finite numbers only")
    }
}

/// A record without its value. One builder gives the several statistics of one metric.
#[derive(Clone, Debug)]
pub struct RecordBuilder {
    experiment: String,
    setting: Setting,
    metric: String,
    unit: Unit,
    simulated: bool,
}

impl RecordBuilder {
    /// Marks the numbers as coming from virtual time.
    pub fn simulated(mut self) -> Self {
        self.simulated = true;
        self
    }

    /// The record of the metric's mean. Counts and rates over a whole run are means too.
    pub fn mean(&self, value: f64) -> Record {
        self.value(Statistic::Mean, value)
    }

    /// The record of a statistic of the metric.
    pub fn value(&self, statistic: Statistic, value: f64) -> Record {
        assert!(value.is_finite(), "{} {statistic} is not finite: {value}", self.metric);
        Record {
            experiment: self.experiment.clone(),
            setting: self.setting.clone(),
            metric: self.metric.clone(),
            statistic,
            value,
            unit: self.unit,
            simulated: self.simulated,
            claim: None,
            paper: None,
            fitted: None,
        }
    }
}

/// Reduction of samples to one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Statistic {
    /// Arithmetic mean, or the total of a run divided by its time.
    Mean,
    /// Median.
    P50,
    /// 99th percentile.
    P99,
    /// 99.9th percentile.
    P999,
    /// Largest.
    Max,
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mean => "mean",
            Self::P50 => "p50",
            Self::P99 => "p99",
            Self::P999 => "p99.9",
            Self::Max => "max",
        })
    }
}

/// Units of a value; spelled as in `claims.toml`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unit {
    /// Microseconds.
    #[serde(rename = "us")]
    Us,
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Operations per second.
    #[serde(rename = "1/s")]
    PerSecond,
    /// 10^6 bytes per second.
    #[serde(rename = "MB/s")]
    MbPerSecond,
    /// 10^9 bytes per second.
    #[serde(rename = "GB/s")]
    GbPerSecond,
    /// Bytes.
    #[serde(rename = "bytes")]
    Bytes,
    /// A number of items.
    #[serde(rename = "count")]
    Count,
    /// A quotient of two numbers.
    #[serde(rename = "ratio")]
    Ratio,
}

impl Unit {
    /// Suffix of the names of metrics in this unit.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Us => "_us",
            Self::Seconds => "_s",
            Self::PerSecond => "_per_s",
            Self::MbPerSecond => "_mb_per_s",
            Self::GbPerSecond => "_gb_per_s",
            Self::Bytes => "_bytes",
            Self::Ratio => "_ratio",
            Self::Count => "",
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Us => "us",
            Self::Seconds => "s",
            Self::PerSecond => "1/s",
            Self::MbPerSecond => "MB/s",
            Self::GbPerSecond => "GB/s",
            Self::Bytes => "bytes",
            Self::Count => "count",
            Self::Ratio => "ratio",
        })
    }
}

/// The parameters of a measurement, in reading order.
///
/// Keys that several experiments share have methods of their own, so that their spelling is the
/// same everywhere. [`Setting::with`] sets any other key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Setting(Vec<(String, SettingValue)>);

impl Setting {
    /// An empty setting.
    pub fn new() -> Self {
        Self::default()
    }

    /// The allocation scheme, or [`BASELINE_SCHEME`].
    pub fn scheme(self, scheme: &str) -> Self {
        self.with("scheme", scheme)
    }

    /// The NIC: `inline`, `shm`, `roce`, `sim`, `verbs`.
    pub fn nic(self, nic: &str) -> Self {
        self.with("nic", nic)
    }

    /// Wait mode of the memory node's control thread: `event` or `polling`.
    pub fn control(self, control: &str) -> Self {
        self.with("control", control)
    }

    /// Number of concurrent clients.
    pub fn clients(self, clients: u64) -> Self {
        self.with("clients", clients)
    }

    /// Size of one operation in bytes.
    pub fn size(self, bytes: u64) -> Self {
        self.with("size", bytes)
    }

    /// Operations in flight per client.
    pub fn in_flight(self, operations: u64) -> Self {
        self.with("in_flight", operations)
    }

    /// The order of accesses: `random` or `sequential`.
    pub fn pattern(self, pattern: &str) -> Self {
        self.with("pattern", pattern)
    }

    /// Sets a key. An existing key keeps its position and gets the new value.
    pub fn with(mut self, key: &str, value: impl Into<SettingValue>) -> Self {
        let value = value.into();
        match self.0.iter_mut().find(|(k, _)| k == key) {
            Some(entry) => entry.1 = value,
            None => self.0.push((key.into(), value)),
        }
        self
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&SettingValue> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// The value of a numeric key.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            SettingValue::Count(n) => Some(*n as f64),
            SettingValue::Number(x) => Some(*x),
            SettingValue::Flag(_) | SettingValue::Text(_) => None,
        }
    }

    /// The pairs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &SettingValue)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }
}

/// The value of one key of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SettingValue {
    /// Yes or no.
    Flag(bool),
    /// A whole number: clients, bytes, …
    Count(u64),
    /// Any other number.
    Number(f64),
    /// A name.
    Text(String),
}

impl fmt::Display for SettingValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(yes) => f.pad(if *yes { "yes" } else { "no" }),
            Self::Count(n) => f.pad(&n.to_string()),
            Self::Number(x) => f.pad(&x.to_string()),
            Self::Text(text) => f.pad(text),
        }
    }
}

impl From<&str> for SettingValue {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<u64> for SettingValue {
    fn from(n: u64) -> Self {
        Self::Count(n)
    }
}

impl From<f64> for SettingValue {
    fn from(x: f64) -> Self {
        assert!(x.is_finite(), "a setting must be finite, not {x}");
        Self::Number(x)
    }
}

impl From<bool> for SettingValue {
    fn from(yes: bool) -> Self {
        Self::Flag(yes)
    }
}

impl Serialize for Setting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Setting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names, numbers and flags")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Setting, A::Error> {
                let mut setting = Setting::new();
                while let Some((key, value)) = map.next_entry::<String, SettingValue>()? {
                    setting = setting.with(&key, value);
                }
                Ok(setting)
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Groups the points (`across`, value) of a metric into one series per combination of the settings
/// `named`. The name of a series consists of those values that pass `shown`.
pub fn series(
    records: &[Record],
    metric: &str,
    statistic: Statistic,
    across: &str,
    named: &[&str],
    shown: impl Fn(&str) -> bool,
) -> Vec<(String, Vec<(f64, f64)>)> {
    let mut series: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for record in records.iter().filter(|r| r.metric == metric && r.statistic == statistic) {
        let Some(x) = record.setting.number(across) else { continue };
        let parts = named.iter().filter_map(|key| record.setting.get(key));
        let parts = parts.map(ToString::to_string).filter(|part| shown(part));
        let name = parts.collect::<Vec<_>>().join(", ");
        let point = (x, record.value);
        match series.iter_mut().find(|(n, _)| *n == name) {
            Some((_, points)) => points.push(point),
            None => series.push((name, vec![point])),
        }
    }
    series
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::claims::Claims;

    fn shm() -> Setting {
        Setting::new().scheme("onesidedmw").nic("shm").clients(2)
    }

    #[test]
    fn json_has_one_line_with_fields_in_documented_order() {
        let record = Record::of("alloc", &shm(), "alloc_latency_us", Unit::Us)
            .value(Statistic::P99, 12.5)
            .against(Claims::builtin().get("osmw.alloc.latency.1").unwrap())
            .fitted();
        assert_eq!(
            record.to_json(),
            concat!(
                r#"{"experiment":"alloc","#,
                r#""setting":{"scheme":"onesidedmw","nic":"shm","clients":2},"#,
                r#""metric":"alloc_latency_us","statistic":"p99","value":12.5,"unit":"us","#,
                r#""simulated":false,"claim":"osmw.alloc.latency.1","paper":10.7,"fitted":true}"#
            )
        );
    }

    #[test]
    fn json_without_claim_has_no_claim_fields() {
        let record = Record::of("alloc", &shm(), "alloc_rate_per_s", Unit::PerSecond).mean(1.0);
        let json = record.to_json();
        for field in ["claim", "paper", "fitted"] {
            assert!(!json.contains(field), "{json}");
        }
    }

    #[test]
    fn repeated_key_replaces_the_value() {
        let setting = shm().clients(8);
        assert_eq!(setting.number("clients"), Some(8.0));
        assert_eq!(setting.iter().count(), 3);
    }

    #[test]
    #[should_panic(expected = "must end in its unit")]
    fn metric_without_unit_suffix_panics() {
        let _ = Record::of("alloc", &shm(), "alloc_latency", Unit::Us);
    }

    #[test]
    #[should_panic(expected = "not finite")]
    fn value_that_is_not_finite_panics() {
        let _ = Record::of("alloc", &shm(), "alloc_latency_us", Unit::Us).mean(f64::NAN);
    }

    fn setting_value() -> impl Strategy<Value = SettingValue> {
        prop_oneof![
            any::<bool>().prop_map(SettingValue::Flag),
            any::<u64>().prop_map(SettingValue::Count),
            // Never a whole number: JSON would turn that into a count.
            (1u32..1000).prop_map(|n| SettingValue::Number(f64::from(n) + 0.5)),
            "[a-z0-9\"\\\\ é-]{0,12}".prop_map(SettingValue::Text),
        ]
    }

    proptest! {
        #[test]
        fn json_round_trip(
            pairs in prop::collection::vec(("[a-z_]{1,8}", setting_value()), 0..6),
            value in -1e12f64..1e12,
            simulated: bool,
        ) {
            let setting =
                pairs.into_iter().fold(Setting::new(), |s, (key, value)| s.with(&key, value));
            let mut builder = Record::of("x", &setting, "y_us", Unit::Us);
            if simulated {
                builder = builder.simulated();
            }
            let record = builder.value(Statistic::Max, value);
            let json = record.to_json();
            prop_assert!(!json.contains('\n'));
            prop_assert_eq!(serde_json::from_str::<Record>(&json).unwrap(), record);
        }
    }
}
