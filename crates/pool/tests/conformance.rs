//! Every scheme passes the conformance suite, with each value of its options.

use pool::{Scheme, Settings, conformance, schemes};
use rnic::nic::SoftNic;

fn settings(scheme: Scheme) -> Settings {
    Settings {
        donate_bytes: 5 * 4096,
        chunk_bytes: 4096,
        scheme,
        clients_max: 4,
        credits: 4,
        ..Settings::default()
    }
}

fn check(settings: &Settings) {
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
                "budget" => settings(scheme)
                    .with(option, pool::Budget { chunks: Some(100), ..Default::default() }),
                other => panic!("option {other} has no check"),
            });
        }
    }
}
