//! Settings of the scheme, and the terms that clients get.

use std::ops::RangeInclusive;
use std::time::Duration;

use scheme::{Error, NodeSettings, Scheme, require};
use serde::{Deserialize, Serialize};

use super::book::Deviations;
use super::header::HEADER_BYTES;
use super::message::PermissionNumber;
use crate::rpc::ControlMode;

/// Settings of the scheme.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Options {
    /// CPU cores that answer requests. More cores than compute nodes have no effect.
    pub cores: u32,
    /// How the CPU is notified of requests.
    pub control: ControlMode,
    /// Shortest lease in microseconds.
    pub lease_min_us: u64,
    /// Longest lease in microseconds, with all its extensions.
    pub lease_max_us: u64,
    /// Permissions of a compute node.
    pub permissions_max: u32,
    /// Bytes of the objects of a domain, and of a compute node without a domain; `None`: no limit.
    pub domain_bytes: Option<u64>,
    /// Spare QPs of each lane.
    pub spares: u32,
    /// Largest difference of the rates of two clocks, in parts per million. Compute nodes end their
    /// belief in a lease earlier by this share.
    pub clock_drift_ppm_max: u32,
    /// Only in the published form: what is done to save window operations.
    #[serde(flatten)]
    pub techniques: Techniques,
    /// Only in the published form: headers for each million bytes of memory, in bytes.
    pub headers_ppm: u32,
    /// Only in schemes without protection: clear freed objects. `None`: `unprotected` does, the
    /// published form does not.
    pub clear: Option<bool>,
    /// Period in microseconds at which the QPs of compute nodes are polled, and time limit of their
    /// answers (Patronus §5.3, the alternative to leases); 0: never.
    pub poll_qps_us: u64,
}

/// Techniques of the published form that save window operations (Patronus §5.4, table 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(default)]
pub struct Techniques {
    /// Windows over headers, and over freed objects while memory is adequate, are not unbound.
    pub delay: bool,
    /// The header is in front of the object where possible, and one window opens both.
    pub contiguity: bool,
    /// A window that closes is rebound for a permission that opens.
    pub handover: bool,
}

impl Default for Techniques {
    fn default() -> Self {
        Self { delay: true, contiguity: true, handover: true }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cores: 1,
            control: ControlMode::default(),
            lease_min_us: 50,
            lease_max_us: 1_000_000,
            permissions_max: 4096,
            domain_bytes: None,
            spares: 1,
            clock_drift_ppm_max: 1_000,
            techniques: Techniques::default(),
            headers_ppm: 244,
            clear: None,
            poll_qps_us: 0,
        }
    }
}

impl Options {
    /// Names of the settings.
    pub const NAMES: &[&str] = &[
        "cores",
        "control",
        "lease_min_us",
        "lease_max_us",
        "permissions_max",
        "domain_bytes",
        "spares",
        "clock_drift_ppm_max",
        "poll_qps_us",
    ];
    /// Names of the settings of the published form.
    pub const PUBLISHED_NAMES: &[&str] = &[
        "cores",
        "control",
        "lease_min_us",
        "lease_max_us",
        "permissions_max",
        "domain_bytes",
        "spares",
        "clock_drift_ppm_max",
        "delay",
        "contiguity",
        "handover",
        "headers_ppm",
        "clear",
    ];
    /// Names of the settings of `unprotected`.
    pub const UNPROTECTED_NAMES: &[&str] = &[
        "cores",
        "control",
        "lease_min_us",
        "lease_max_us",
        "permissions_max",
        "domain_bytes",
        "spares",
        "clock_drift_ppm_max",
        "clear",
    ];

    /// Longest possible lease, in microseconds: a day.
    const LEASE_US: u64 = 86_400_000_000;
    /// Largest number of spare QPs of a lane.
    const SPARES_MAX: u32 = 3;
    /// Largest drift, in parts per million.
    const DRIFT_PPM_MAX: u32 = 500_000;
    /// Least number of headers of a core.
    const HEADERS_MIN: u64 = 64;
    /// Largest memory whose objects `unprotected` can name, in bytes.
    const UNPROTECTED_BYTES: u64 = (1 << 32) * super::client::UNIT;
    /// Shortest and longest period of QP polling, in microseconds.
    const POLL_QPS_US: RangeInclusive<u64> = 50..=60_000_000;

    /// The options in `settings`, checked.
    pub fn of(settings: &NodeSettings) -> Result<Self, Error> {
        let mut own: Self = settings.options.parse()?;
        if settings.scheme == super::PATRONUS_2 {
            // Its keys are valid on one QP.
            let is_set = settings.options.iter().any(|(name, _)| name == "spares");
            let why = "keys of this scheme are valid on one QP: it has no spare QPs";
            require(!is_set || own.spares == 0, "spares", own.spares, why)?;
            own.spares = 0;
        }
        // Checks the cores, too.
        let cores = crate::rpc::Options { cores: own.cores, control: own.control };
        cores.check()?;
        require(
            (1..=own.lease_max_us).contains(&own.lease_min_us),
            "lease_min_us",
            own.lease_min_us,
            format!("must be 1 to the longest lease, {} us", own.lease_max_us),
        )?;
        require(
            own.lease_max_us <= Self::LEASE_US,
            "lease_max_us",
            own.lease_max_us,
            format!("must be at most {} us, a day", Self::LEASE_US),
        )?;
        require(
            (1..=PermissionNumber::LEASED_MAX).contains(&own.permissions_max),
            "permissions_max",
            own.permissions_max,
            format!("must be 1 to {}", PermissionNumber::LEASED_MAX),
        )?;
        require(
            own.spares <= Self::SPARES_MAX,
            "spares",
            own.spares,
            format!("must be 0 to {}", Self::SPARES_MAX),
        )?;
        require(
            own.clock_drift_ppm_max <= Self::DRIFT_PPM_MAX,
            "clock_drift_ppm_max",
            own.clock_drift_ppm_max,
            format!("must be 0 to {}", Self::DRIFT_PPM_MAX),
        )?;
        require(
            own.headers_ppm <= 1_000_000,
            "headers_ppm",
            own.headers_ppm,
            "must be 0 to 1000000",
        )?;
        let bytes = settings.chunks.saturating_mul(settings.chunk_bytes);
        require(
            settings.scheme != super::UNPROTECTED || bytes <= Self::UNPROTECTED_BYTES,
            "chunks",
            settings.chunks,
            format!("scheme unprotected names at most {} bytes", Self::UNPROTECTED_BYTES),
        )?;
        let (least, most) = (Self::POLL_QPS_US.start(), Self::POLL_QPS_US.end());
        require(
            own.poll_qps_us == 0 || Self::POLL_QPS_US.contains(&own.poll_qps_us),
            "poll_qps_us",
            own.poll_qps_us,
            format!("must be 0, or {least} to {most}"),
        )?;
        Ok(own)
    }

    /// Headers of each of `cores` cores, in the published form, for `bytes` of donated memory.
    pub fn headers_each(&self, bytes: u64, cores: u32) -> u64 {
        let share = u128::from(bytes) * u128::from(self.headers_ppm) / 1_000_000;
        let headers = share as u64 / HEADER_BYTES;
        (headers / u64::from(cores)).max(Self::HEADERS_MIN)
    }

    /// The rules that the book breaks in a scheme.
    pub fn deviations(&self, scheme: Scheme) -> Deviations {
        match scheme {
            super::PATRONUS_PAPER => Deviations {
                everybody: true,
                hole: if self.techniques.contiguity { HEADER_BYTES } else { 0 },
                delays: self.techniques.delay,
                dirty: !self.clear.unwrap_or(false),
                unprotected: false,
            },
            super::UNPROTECTED => Deviations {
                everybody: true,
                dirty: !self.clear.unwrap_or(true),
                unprotected: true,
                ..Deviations::NONE
            },
            _ => Deviations::NONE,
        }
    }

    /// Period of QP polling, if there is any.
    pub fn poll_qps(&self) -> Option<Duration> {
        (self.poll_qps_us > 0).then(|| Duration::from_micros(self.poll_qps_us))
    }

    /// The longest lease.
    pub fn lease_max(&self) -> Duration {
        Duration::from_micros(self.lease_max_us)
    }
}

/// Way in which a compute node extends leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Extension {
    /// One CAS of the lifetime word, without the memory node's CPU (Patronus §5.3).
    #[default]
    Cas,
    /// A request to the memory node's CPU, for comparison.
    Rpc,
}

/// Options of a compute node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ClientOptions {
    /// Way in which leases are extended.
    pub extend: Extension,
}

/// Terms that all clients get with the offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LeaseOffer {
    /// How the CPU is notified of requests.
    pub control: ControlMode,
    /// Shortest lease.
    pub lease_min_us: u64,
    /// Longest lease.
    pub lease_max_us: u64,
    /// Largest difference of the rates of two clocks.
    pub clock_drift_ppm_max: u32,
}

impl From<&Options> for LeaseOffer {
    fn from(options: &Options) -> Self {
        Self {
            control: options.control,
            lease_min_us: options.lease_min_us,
            lease_max_us: options.lease_max_us,
            clock_drift_ppm_max: options.clock_drift_ppm_max,
        }
    }
}

/// Terms that a client of `unprotected` gets with its admission: the region over all memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UnprotectedTerms {
    /// Address of the first byte.
    pub memory_addr: u64,
    /// Key of the region.
    pub memory_key: u32,
}

/// Terms that a client gets with its admission: the table of its lifetime words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TableTerms {
    /// Address of the first word.
    pub lifetimes_addr: u64,
    /// Key of the table, valid on the management QP only.
    pub lifetimes_key: u32,
    /// Number of words.
    pub lifetimes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_node_extends_by_cas_unless_told_otherwise() {
        let mut options = scheme::options::SchemeOptions::default();
        options.set("local_bytes", 4096); // of another scheme
        assert_eq!(options.parse::<ClientOptions>().unwrap().extend, Extension::Cas);
        options.set("extend", Extension::Rpc);
        assert_eq!(options.parse::<ClientOptions>().unwrap().extend, Extension::Rpc);
        options.set("extend", "sometimes");
        assert!(options.parse::<ClientOptions>().is_err());
    }

    #[test]
    fn settings_are_checked() {
        let of = |name: &'static str, value: u64| {
            Options::of(&NodeSettings::new(crate::PATRONUS, 8, 4096).with(name, value))
        };
        assert_eq!(of("spares", 3).unwrap().spares, 3);
        for (name, value) in [
            ("spares", 4),
            ("cores", 0),
            ("lease_min_us", 0),
            ("lease_min_us", 2_000_000),
            ("lease_max_us", 1 << 40),
            ("permissions_max", 0),
            ("permissions_max", 65_537),
            ("clock_drift_ppm_max", 500_001),
            ("poll_qps_us", 49),
            ("poll_qps_us", 60_000_001),
        ] {
            let error = of(name, value).unwrap_err().to_string();
            assert!(error.starts_with(name), "{name} = {value}: {error}");
        }
    }
}
