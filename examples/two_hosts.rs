//! A memory node for other hosts: RoCEv2 over UDP, with a token and authenticated packets.
//!
//! Both ends run in this process and use the loopback interface. On two hosts the first half is
//! `granary serve --listen ADDRESS --token-file FILE`, and the second half stays as it is.
//!
//! ```sh
//! cargo run --example two_hosts
//! ```

use std::error::Error;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use pool::{Address, Endpoint, Listen, Options, Service, Settings, Token};

fn main() -> Result<(), Box<dyn Error>> {
    // Both hosts have a file with the same secret, which only its owner may read. A real token is
    // random: head -c 32 /dev/urandom | base64
    let directory = tempfile::tempdir()?;
    let token = directory.path().join("token");
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&token)?;
    writeln!(file, "a token has sixteen bytes or more")?;

    // The memory node. Port 0 selects a port that is free for TCP and UDP. Processes of this host
    // could use the memory node too, at the socket of the endpoint.
    let listen = Listen::new("127.0.0.1:0".parse()?, Token::read(&token)?);
    let settings = Settings { donate_bytes: 16 << 20, ..Settings::default() };
    let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen))?;
    let at = service.address().expect("it listens");
    println!("memory node at roce://{at}");

    // The compute node. The same text works as `granary run --pool`.
    let address: Address = format!("roce://{at};token={}", token.display()).parse()?;
    let pool = address.connect(Options::default())?;
    let grant = pool.allocate_blocking()?;
    let page = [7; 4096];
    pool.write_blocking(&grant, 0, &page)?;
    let mut copy = [0; 4096];
    pool.read_blocking(&grant, 0, &mut copy)?;
    assert_eq!(copy, page);
    pool.free_blocking(grant)?;
    println!("wrote and read {} bytes over RoCEv2", page.len());

    // Without the token there is no connection.
    let open: Address = format!("roce://{at}").parse()?;
    let error = open.connect(Options::default()).err().expect("the token is required");
    println!("refused without a token: {error}");

    drop(pool);
    service.stop();
    Ok(())
}
