//! Settings of the scheme, and the terms that clients get.

use scheme::{Error, NodeSettings, require};
use serde::{Deserialize, Serialize};

use crate::rpc::ControlMode;

/// Settings of the scheme.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Options {
    /// CPU cores that answer requests. More cores than compute nodes have no effect.
    pub cores: u32,
    /// How the CPU is notified of requests.
    pub control: ControlMode,
    /// Bytes of the objects of a domain, and of a compute node without a domain; `None`: no limit.
    pub domain_bytes: Option<u64>,
    /// Most bytes that one request transfers: a power of two. A longer access takes several.
    pub data_bytes: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { cores: 1, control: ControlMode::default(), domain_bytes: None, data_bytes: 4096 }
    }
}

impl Options {
    /// Names of the settings.
    pub const NAMES: &[&str] = &["cores", "control", "domain_bytes", "data_bytes"];

    /// Largest value of `data_bytes`.
    const DATA_BYTES_MAX: u32 = 1 << 20;
    /// Smallest value of `data_bytes`.
    const DATA_BYTES_MIN: u32 = 64;

    /// The options in `settings`, checked.
    pub fn of(settings: &NodeSettings) -> Result<Self, Error> {
        let own: Self = settings.options.parse()?;
        let cores = crate::rpc::Options { cores: own.cores, control: own.control };
        cores.check()?;
        let (least, most) = (Self::DATA_BYTES_MIN, Self::DATA_BYTES_MAX);
        require(
            own.data_bytes.is_power_of_two() && (least..=most).contains(&own.data_bytes),
            "data_bytes",
            own.data_bytes,
            format!("must be a power of two from {least} to {most}"),
        )?;
        Ok(own)
    }
}

/// Terms that all clients get with the offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DataOffer {
    /// How the CPU is notified of requests.
    pub control: ControlMode,
    /// Most bytes that one request transfers.
    pub data_bytes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_checked() {
        let of = |name: &'static str, value: u64| {
            Options::of(&NodeSettings::new(crate::RPC_DATA, 8, 4096).with(name, value))
        };
        assert_eq!(of("data_bytes", 64).unwrap().data_bytes, 64);
        for (name, value) in
            [("cores", 0), ("data_bytes", 32), ("data_bytes", 4095), ("data_bytes", 1 << 21)]
        {
            let error = of(name, value).unwrap_err().to_string();
            assert!(error.starts_with(name), "{name} = {value}: {error}");
        }
    }
}
