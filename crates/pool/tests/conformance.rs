//! Every scheme passes the conformance suite.

use fabric::soft::SoftNic;
use pool::{Settings, conformance, schemes};

#[test]
fn every_scheme_conforms() {
    for scheme in schemes::ALL {
        let settings = Settings {
            donate_bytes: 5 * 4096,
            chunk_bytes: 4096,
            scheme,
            clients_max: 4,
            credits: 4,
            ..Settings::default()
        };
        println!("{scheme}");
        let nic = SoftNic::inline();
        conformance::check(&nic, &schemes::nodes(), &schemes::clients(), &settings);
    }
}
