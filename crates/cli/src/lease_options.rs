//! Options of `granary serve` for the leases of scheme patronus and its variants.

use serde_json::{Value, json};
use units::Size;

/// Settings of leases. Without an option the default of the scheme counts.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct LeaseOptions {
    /// Shortest lease in scheme patronus, in microseconds; a request for a shorter one gets this
    /// [default: 50]
    #[arg(long, value_name = "US")]
    lease_min_us: Option<u64>,

    /// Longest lease in scheme patronus, in microseconds, with all its extensions; a hung holder of
    /// an exclusive permission keeps others waiting for at most this time [default: 1000000]
    #[arg(long, value_name = "US")]
    lease_max_us: Option<u64>,

    /// Limit of permissions with leases that a client has at a time in scheme patronus [default:
    /// 4096]
    #[arg(long, value_name = "PERMISSIONS")]
    permissions: Option<u32>,

    /// Limit of the memory of all objects of a domain in schemes patronus and rpc-data, and of each
    /// client without a domain [default: no limit]
    #[arg(long, value_name = "SIZE")]
    domain_bytes: Option<Size>,

    /// Spare queue pairs of each lane in scheme patronus, 0 to 3: after a refused access the client
    /// goes on with a spare one [default: 1]
    #[arg(long, value_name = "QPS")]
    spares: Option<u32>,

    /// Largest difference between the rates of two hosts' clocks in scheme patronus, in parts per
    /// million; clients stop using a lease earlier by this share [default: 1000]
    #[arg(long, value_name = "PPM")]
    clock_drift_ppm: Option<u32>,

    /// Period of QP polling in scheme patronus, in microseconds, and time limit of an answer: a
    /// client whose queue pair does not answer loses all it has, also without a lease; 0: never
    /// [default: 0]
    #[arg(long, value_name = "US")]
    poll_qps_us: Option<u64>,

    /// In scheme patronus-paper, unbind windows at once, even if memory is adequate
    #[arg(long)]
    no_delay: bool,

    /// In scheme patronus-paper, keep headers apart from objects, under windows of their own
    #[arg(long)]
    no_contiguity: bool,

    /// In scheme patronus-paper, unbind each window before it is bound again
    #[arg(long)]
    no_handover: bool,
}

impl LeaseOptions {
    /// The given settings of the scheme: name and value.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, Value)> {
        [
            ("lease_min_us", self.lease_min_us.map(|us| json!(us))),
            ("lease_max_us", self.lease_max_us.map(|us| json!(us))),
            ("permissions_max", self.permissions.map(|count| json!(count))),
            ("domain_bytes", self.domain_bytes.map(|size| json!(size.bytes()))),
            ("spares", self.spares.map(|count| json!(count))),
            ("clock_drift_ppm_max", self.clock_drift_ppm.map(|ppm| json!(ppm))),
            ("poll_qps_us", self.poll_qps_us.map(|us| json!(us))),
            ("delay", self.no_delay.then_some(json!(false))),
            ("contiguity", self.no_contiguity.then_some(json!(false))),
            ("handover", self.no_handover.then_some(json!(false))),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};
    use pool::{Settings, schemes};
    use schemes::patronus::{Options, Techniques};

    use super::*;
    use crate::node::option_name;

    fn parse(arguments: &[&str]) -> Settings {
        let command = LeaseOptions::augment_args(Command::new("serve").no_binary_name(true));
        let matches = command.try_get_matches_from(arguments).unwrap();
        let options = LeaseOptions::from_arg_matches(&matches).unwrap();
        let settings = Settings { scheme: schemes::PATRONUS, ..Settings::default() };
        options.settings().fold(settings, |settings, (name, value)| settings.with(name, value))
    }

    #[test]
    fn settings_of_leases_arrive_at_the_scheme() {
        let of = |arguments: &[&str]| parse(arguments).options.parse::<Options>().unwrap();
        assert_eq!(of(&[]), Options::default());
        let all = of(&[
            "--lease-min-us=7",
            "--lease-max-us=900",
            "--permissions=5",
            "--domain-bytes=2MiB",
            "--spares=3",
            "--clock-drift-ppm=9",
            "--poll-qps-us=100",
            "--no-contiguity",
        ]);
        let expected = Options {
            lease_min_us: 7,
            lease_max_us: 900,
            permissions_max: 5,
            domain_bytes: Some(2 << 20),
            spares: 3,
            clock_drift_ppm_max: 9,
            poll_qps_us: 100,
            techniques: Techniques { contiguity: false, ..Techniques::default() },
            ..Options::default()
        };
        assert_eq!(all, expected);
    }

    /// Help texts state the defaults, which are the scheme's.
    #[test]
    fn help_names_the_defaults_of_the_scheme() {
        let Options {
            lease_min_us,
            lease_max_us,
            permissions_max,
            spares,
            clock_drift_ppm_max,
            domain_bytes,
            poll_qps_us,
            ..
        } = Options::default();
        assert_eq!(domain_bytes, None);
        let command = LeaseOptions::augment_args(Command::new("serve"));
        for (name, default) in [
            ("lease_min_us", lease_min_us.to_string()),
            ("lease_max_us", lease_max_us.to_string()),
            ("permissions_max", permissions_max.to_string()),
            ("domain_bytes", "no limit".into()),
            ("spares", spares.to_string()),
            ("clock_drift_ppm_max", clock_drift_ppm_max.to_string()),
            ("poll_qps_us", poll_qps_us.to_string()),
        ] {
            let option = option_name(name);
            let mut arguments = command.get_arguments();
            let argument = arguments.find(|argument| argument.get_long() == Some(&option));
            let help = argument.unwrap_or_else(|| panic!("no --{option}")).get_help().unwrap();
            let help = help.to_string();
            assert!(help.contains(&format!("[default: {default}]")), "--{option}: {help}");
        }
    }
}
