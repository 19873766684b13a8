//! NodeSettings of the schemes by RPC.

use std::fmt;
use std::str::FromStr;

use scheme::{Error, NodeSettings, require};
use serde::{Deserialize, Serialize};

/// NodeSettings of the schemes by RPC.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Options {
    /// CPU cores that answer requests. More cores than compute nodes have no effect.
    pub cores: u32,
    /// How the CPU is notified of requests.
    pub control: ControlMode,
}

impl Default for Options {
    fn default() -> Self {
        Self { cores: 1, control: ControlMode::default() }
    }
}

impl Options {
    /// Maximum number of cores.
    pub const CORES_MAX: u32 = 4096;

    /// The options in `settings`, checked.
    pub fn of(settings: &NodeSettings) -> Result<Self, Error> {
        let own: Self = settings.options.parse()?;
        own.check()?;
        Ok(own)
    }

    /// Checks the values.
    pub fn check(&self) -> Result<(), Error> {
        require(
            (1..=Self::CORES_MAX).contains(&self.cores),
            "cores",
            self.cores,
            format!("must be 1 to {} cores", Self::CORES_MAX),
        )
    }
}

/// How the memory node's CPU is notified of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControlMode {
    /// The CPU sleeps between requests.
    #[default]
    Event,
    /// The CPU polls on a core of its own. On a machine with one core it yields.
    Polling,
}

impl ControlMode {
    /// All modes.
    pub const ALL: &[ControlMode] = &[ControlMode::Event, ControlMode::Polling];

    /// Name of the mode in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            ControlMode::Event => "event",
            ControlMode::Polling => "polling",
        }
    }
}

impl fmt::Display for ControlMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ControlMode {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Self::ALL.iter().copied().find(|mode| mode.name() == s).ok_or_else(|| Error::Setting {
            setting: "control",
            value: s.to_string(),
            why: "must be one of event, polling".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_names_are_read_back() {
        for mode in ControlMode::ALL {
            assert_eq!(mode.to_string().parse::<ControlMode>().unwrap(), *mode);
        }
    }

    #[test]
    fn number_of_cores_is_limited() {
        let cores = |cores: u32| {
            Options::of(&NodeSettings::new(crate::ONESIDEDMW, 8, 4096).with("cores", cores))
        };
        assert!(cores(2).is_ok());
        assert!(cores(0).is_err() && cores(Options::CORES_MAX + 1).is_err());
    }
}
