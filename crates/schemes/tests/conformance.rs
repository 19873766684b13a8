//! Every scheme passes the conformance suite, with each value of its options.

use rnic::nic::SoftNic;
use scheme::{NodeSettings, Scheme, conformance};
use schemes::onesidedmw::Budget;
use schemes::tdmem::TierSizes;

fn settings(scheme: Scheme) -> NodeSettings {
    NodeSettings { clients_max: 4, credits: 4, ..NodeSettings::new(scheme, 5, 4096) }
}

fn check(settings: &NodeSettings) {
    println!("{} {:?}", settings.scheme, settings.options);
    let nic = SoftNic::inline();
    conformance::check(&nic, &schemes::nodes(), &schemes::clients(), settings);
}

#[test]
fn every_scheme_conforms() {
    schemes::ALL.iter().for_each(|scheme| check(&settings(scheme)));
}

#[test]
fn every_scheme_conforms_with_its_options() {
    for scheme in schemes::ALL {
        for option in scheme.options {
            check(&match *option {
                "separation" | "contention_control" => settings(scheme).with(option, false),
                "control" => settings(scheme).with(option, "polling"),
                "cores" => settings(scheme).with(option, 2),
                "budget" => {
                    settings(scheme).with(option, Budget { chunks: Some(100), ..Budget::default() })
                }
                "tiers" => settings(scheme).with(option, TierSizes { fast: 8192, dram: None }),
                "seed" => settings(scheme).with(option, 7),
                "lease_min_us" => settings(scheme).with(option, 1),
                "lease_max_us" => settings(scheme).with(option, 50),
                "permissions_max" => settings(scheme).with(option, 1),
                "domain_bytes" => settings(scheme).with(option, 6 * 4096),
                "spares" if scheme == &schemes::PATRONUS_2 => settings(scheme).with(option, 0),
                "spares" => settings(scheme).with(option, 3),
                "poll_qps_us" => settings(scheme).with(option, 1000),
                "data_bytes" => settings(scheme).with(option, 64),
                "clock_drift_ppm_max" => settings(scheme).with(option, 0),
                other => panic!("option {other} has no check"),
            });
        }
    }
}
