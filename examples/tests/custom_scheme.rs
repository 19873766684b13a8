//! The scheme of example `custom_scheme` passes the conformance suite, and serves a pool.

#[path = "../custom_scheme.rs"]
mod custom_scheme;

use std::sync::Arc;

use custom_scheme::{BUMP, Bump};
use pool::{EmbeddedNode, Options, Pool, Settings};
use rnic::nic::SoftNic;
use scheme::{NodeSettings, conformance};

#[test]
fn custom_scheme_conforms() {
    let settings = NodeSettings { clients_max: 4, ..NodeSettings::new(BUMP, 5, 4096) };
    let (nodes, clients) = (schemes::nodes().with(&Bump), schemes::clients().with(&Bump));
    conformance::check(&SoftNic::inline(), &nodes, &clients, &settings);
}

#[test]
fn pool_uses_a_custom_scheme() {
    let settings = Settings { donate_bytes: 8 << 20, scheme: BUMP, ..Settings::default() };
    let (nodes, clients) = (schemes::nodes().with(&Bump), schemes::clients().with(&Bump));
    let node = Arc::new(EmbeddedNode::start_with(&settings, &nodes, clients).unwrap());
    let pool = Pool::embedded_in(&node, Options::default()).unwrap();
    let grant = pool.allocate_blocking().unwrap();
    pool.write_blocking(&grant, 4096, b"hello").unwrap();
    let mut read = [0; 5];
    pool.read_blocking(&grant, 4096, &mut read).unwrap();
    assert_eq!((&read, pool.scheme()), (b"hello", BUMP));
    pool.free_blocking(grant).unwrap();
}
