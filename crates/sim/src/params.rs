//! Parameters of the timing model: a file of numbers, each with its source.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::Error;
use crate::time::Time;

/// Parameters of the cluster of OneSidedMW's evaluation.
pub const CONNECTX5: &str = include_str!("../params/connectx5.toml");

/// Parameters of the cluster of FineMem's evaluation.
pub const CONNECTX6: &str = include_str!("../params/connectx6.toml");

/// Parameters of the cluster of Patronus's evaluation.
pub const CONNECTX5_PATRONUS: &str = include_str!("../params/connectx5-patronus.toml");

/// A parameter in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The value; the parameter's name determines its unit.
    pub value: f64,
    /// The source of the value.
    pub source: String,
    /// Claims that the value was fitted to.
    #[serde(default)]
    pub fitted: Vec<String>,
}

type Table = BTreeMap<String, Entry>;

/// The parameter file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    nic: Table,
    pcie: Table,
    link: Table,
    cpu: Table,
    node_cpu: Table,
}

/// All parameters.
#[derive(Clone, Debug)]
pub struct Params {
    /// Name of the described hardware.
    pub name: String,
    /// The NIC.
    pub nic: NicParams,
    /// The NIC's bus.
    pub pcie: PcieParams,
    /// The network.
    pub link: LinkParams,
    /// A compute node's core.
    pub cpu: CpuParams,
    /// A memory node's core.
    pub node_cpu: NodeCpuParams,
    entries: Vec<(String, Entry)>,
}

/// The file documents the meaning and source of each field.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NicParams {
    pub units: usize,
    pub wqe: Time,
    pub managed_wqe: Time,
    pub wait: Time,
    pub window: Time,
    pub receive: Time,
    pub atomic: Time,
    pub atomic_same: Time,
    pub chain_slowdown: Time,
    pub contexts: usize,
    pub context_miss: Time,
    pub fault_report: Time,
    pub windows: u32,
    pub functions: u32,
}

/// The file documents the meaning and source of each field.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PcieParams {
    pub doorbell: Time,
    pub read: Time,
    pub write: Time,
    pub rate: f64,
}

/// The file documents the meaning and source of each field.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct LinkParams {
    pub rate: f64,
    pub latency: Time,
    pub retry: Time,
}

/// The file documents the meaning and source of each field.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct CpuParams {
    pub post: Time,
    pub poll: Time,
}

/// The file documents the meaning and source of each field.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NodeCpuParams {
    pub wakeup: Time,
    pub request: Time,
    pub lock: Time,
    pub window: Time,
    pub alloc_window: Time,
    pub modify_qp: Time,
    pub page_bytes: u64,
    pub register: Time,
    pub register_page: Time,
    pub deregister: Time,
    pub clear_rate: f64,
    pub control: Time,
}

impl Params {
    /// Returns the parameters of [`CONNECTX5`].
    pub fn connectx5() -> Self {
        Self::parse(CONNECTX5).expect("the built-in file is valid")
    }

    /// Returns the parameters of [`CONNECTX6`].
    pub fn connectx6() -> Self {
        Self::parse(CONNECTX6).expect("the built-in file is valid")
    }

    /// Returns the parameters of [`CONNECTX5_PATRONUS`].
    pub fn patronus() -> Self {
        Self::parse(CONNECTX5_PATRONUS).expect("the built-in file is valid")
    }

    /// Parses a parameter file.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bad = |why: String| Error::Params { why };
        let File { name, nic, pcie, link, cpu, node_cpu } =
            toml::from_str(text).map_err(|e| bad(e.to_string()))?;
        let tables =
            [("nic", nic), ("pcie", pcie), ("link", link), ("cpu", cpu), ("node_cpu", node_cpu)];
        let mut entries = Vec::new();
        for (section, table) in tables {
            for (key, entry) in table {
                let name = format!("{section}.{key}");
                if !entry.value.is_finite() || entry.value < 0.0 {
                    return Err(bad(format!("{name} is {}; it must be at least 0", entry.value)));
                }
                if entry.source.is_empty() {
                    return Err(bad(format!("{name} has an empty source")));
                }
                entries.push((name, entry));
            }
        }
        Self::from_entries(name, entries)
    }

    /// Returns these parameters with another value of one, for experiments on the model.
    pub fn with(&self, name: &str, value: f64) -> Result<Self, Error> {
        let bad = |why: &str| Error::Params { why: format!("{name} is {why}") };
        let mut entries = self.entries.clone();
        let found = entries.iter_mut().find(|(other, _)| other == name);
        let (_, entry) = found.ok_or_else(|| bad("not a parameter of the model"))?;
        if !value.is_finite() || value < 0.0 {
            return Err(bad(&format!("{value}; it must be at least 0")));
        }
        *entry = Entry { value, source: "set by a program".into(), fitted: Vec::new() };
        Self::from_entries(self.name.clone(), entries)
    }

    fn from_entries(name: String, entries: Vec<(String, Entry)>) -> Result<Self, Error> {
        let bad = |why: String| Error::Params { why };
        let mut unused: Vec<String> = entries.iter().map(|(name, _)| name.clone()).collect();
        let mut get = |name: &str| {
            unused.retain(|n| n != name);
            let found = entries.iter().find(|(n, _)| n == name);
            found.map(|(_, e)| e.value).ok_or_else(|| bad(format!("{name} is missing")))
        };
        let params = Params {
            name,
            nic: NicParams {
                units: get("nic.units")? as usize,
                wqe: Time::ns(get("nic.wqe")?),
                managed_wqe: Time::ns(get("nic.managed_wqe")?),
                wait: Time::ns(get("nic.wait")?),
                window: Time::ns(get("nic.window")?),
                receive: Time::ns(get("nic.receive")?),
                atomic: Time::ns(get("nic.atomic")?),
                atomic_same: Time::ns(get("nic.atomic_same")?),
                chain_slowdown: Time::ns(get("nic.chain_slowdown")?),
                contexts: get("nic.contexts")? as usize,
                context_miss: Time::ns(get("nic.context_miss")?),
                fault_report: Time::ns(get("nic.fault_report")?),
                windows: get("nic.windows")? as u32,
                functions: get("nic.functions")? as u32,
            },
            pcie: PcieParams {
                doorbell: Time::ns(get("pcie.doorbell")?),
                read: Time::ns(get("pcie.read")?),
                write: Time::ns(get("pcie.write")?),
                rate: get("pcie.rate")?,
            },
            link: LinkParams {
                rate: get("link.rate")?,
                latency: Time::ns(get("link.latency")?),
                retry: Time::ns(get("link.retry")?),
            },
            cpu: CpuParams { post: Time::ns(get("cpu.post")?), poll: Time::ns(get("cpu.poll")?) },
            node_cpu: NodeCpuParams {
                wakeup: Time::ns(get("node_cpu.wakeup")?),
                request: Time::ns(get("node_cpu.request")?),
                lock: Time::ns(get("node_cpu.lock")?),
                window: Time::ns(get("node_cpu.window")?),
                alloc_window: Time::ns(get("node_cpu.alloc_window")?),
                modify_qp: Time::ns(get("node_cpu.modify_qp")?),
                page_bytes: get("node_cpu.page_bytes")? as u64,
                register: Time::ns(get("node_cpu.register")?),
                register_page: Time::ns(get("node_cpu.register_page")?),
                deregister: Time::ns(get("node_cpu.deregister")?),
                clear_rate: get("node_cpu.clear_rate")?,
                control: Time::ns(get("node_cpu.control")?),
            },
            entries: Vec::new(),
        };
        if let Some(name) = unused.first() {
            return Err(bad(format!("{name} is not a parameter of the model")));
        }
        if [params.pcie.rate, params.link.rate, params.node_cpu.clear_rate].contains(&0.0) {
            return Err(bad("a rate must be greater than 0".into()));
        }
        if params.node_cpu.page_bytes == 0 {
            return Err(bad("node_cpu.page_bytes must be at least 1".into()));
        }
        Ok(Self { entries, ..params })
    }

    /// Returns all parameters by name, with their sources.
    pub fn entries(&self) -> &[(String, Entry)] {
        &self.entries
    }

    /// Returns the claims that some parameter was fitted to.
    pub fn fitted(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().flat_map(|(_, e)| e.fitted.iter().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_parameter_files_parse_completely() {
        let params = Params::connectx5();
        assert_eq!(params.nic.units, 8);
        assert_eq!(params.nic.managed_wqe, Time(540_000));
        assert!(params.fitted().any(|c| c == "offload.read.overhead.96qp"));
        assert!(params.entries().iter().all(|(_, e)| e.source.len() > 10));
        assert!(Params::connectx6().fitted().any(|c| c == "finemem.rkey.added"));
        assert!(Params::patronus().fitted().any(|c| c == "patronus.reacquire.rate"));
    }

    #[test]
    fn one_parameter_is_changed_and_the_others_stay() {
        let params = Params::connectx5();
        let changed = params.with("nic.atomic", 20.0).expect("a parameter");
        assert_eq!(changed.nic.atomic, Time(20_000));
        assert_eq!(changed.nic.wqe, params.nic.wqe);
        let claim = "offload.read.overhead.96qp";
        let slowdown = params.with("nic.chain_slowdown", 0.0).expect("a parameter");
        assert!(!slowdown.fitted().any(|c| c == claim), "the value is not the fitted one");
        for (name, value) in [("nic.magic", 1.0), ("nic.wqe", -1.0), ("link.rate", 0.0)] {
            assert!(params.with(name, value).is_err(), "{name} = {value}");
        }
    }

    #[test]
    fn parameter_file_errors_name_the_parameter() {
        let without = CONNECTX5.replace("[nic.units]", "[nic.union]");
        let message = |text: &str| Params::parse(text).expect_err("a bad file").to_string();
        assert!(message(&without).contains("nic.units"), "{}", message(&without));
        let more = format!("{CONNECTX5}\n[nic.magic]\nvalue = 1\nsource = \"nowhere at all\"\n");
        assert!(message(&more).contains("nic.magic"), "{}", message(&more));
        let unsourced = CONNECTX5.replacen("source = \"RedN", "source = \"\" # ", 1);
        assert!(Params::parse(&unsourced).is_err());
        let negative = CONNECTX5.replacen("value = 127", "value = -127", 1);
        assert!(message(&negative).contains("nic.wqe"), "{}", message(&negative));
    }
}
