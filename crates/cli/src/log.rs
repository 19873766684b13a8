//! Log lines on standard error: one line for each event, with its fields as `name=value`.

use std::io;

use clap::ValueEnum;
use tracing_subscriber::filter::LevelFilter;

/// Level of log lines.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// No lines
    Off,
    /// Errors that end a service
    Error,
    /// Also refusals and failures that the service survives
    Warn,
    /// Also clients that come, leave and are reclaimed
    Info,
    /// Also connections
    Debug,
    /// All events
    Trace,
}

impl LogLevel {
    /// The value of `--log` for another process.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// Writes the events of this process from now on, up to this level. Only the first call in a
    /// process has an effect.
    pub fn start(self) {
        let level = match self {
            Self::Off => LevelFilter::OFF,
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
            Self::Trace => LevelFilter::TRACE,
        };
        let lines = tracing_subscriber::fmt().with_max_level(level).with_target(false);
        // Fails only if the process logs already.
        let _ = lines.with_writer(io::stderr).try_init();
    }
}

/// The option `--log`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Log {
    /// Events to log on standard error: those of this level and of the levels before it [default:
    /// warn; error for granary run]
    #[arg(long, value_name = "LEVEL", value_enum, env = "GRANARY_LOG", hide_env_values = true)]
    log: Option<LogLevel>,
}

impl Log {
    /// Starts the log with the chosen level, or with `default`. Returns the level.
    pub fn start(&self, default: LogLevel) -> LogLevel {
        let level = self.log.unwrap_or(default);
        level.start();
        level
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_names_are_values_of_the_option() {
        for level in LogLevel::value_variants() {
            assert_eq!(LogLevel::from_str(level.name(), false), Ok(*level));
        }
    }
}
