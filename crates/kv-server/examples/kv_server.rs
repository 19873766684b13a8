//! A server over an embedded pool, for tests with clients and with Redis's own suite.
//!
//! `cargo run -p granary-kv-server --example kv_server -- port 6380 save ""`

use std::sync::Arc;

use kv_server::Setup;
use kv_server::config::Config;
use kv_server::data::Data;
use pool::Pool;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let config = Config::default();
    for pair in words.chunks(2) {
        let [name, value] = pair else { return Err("give pairs of names and values".into()) };
        let values: Vec<&[u8]> = value.split(' ').map(str::as_bytes).collect();
        if !config.set_at_start(name, &values)? {
            return Err(format!("there is no parameter {name}").into());
        }
    }
    let settings =
        pool::Settings { donate_bytes: 1 << 30, chunk_bytes: 64 << 10, ..Default::default() };
    let pool = Pool::embedded(settings)?;
    let data = Data::create(pool, heap::Settings::default(), kv::Settings::default())?;
    let running = Setup { config, ..Setup::default() }.start(Arc::new(data))?;
    for address in running.addresses() {
        println!("ready at {address}");
    }
    Ok(running.wait()?)
}
