//! A memory node for the processes of one host, and two compute nodes that use it.
//!
//! `granary serve` starts the same service as a process of its own. Here it is in this process, so
//! that the example needs one command only. The compute nodes reach it as other processes would:
//! through a Unix socket, and from then on through queues in shared memory.
//!
//! ```sh
//! cargo run --example shared_memory
//! ```

use std::error::Error;

use pool::{Endpoint, Grant, Options, Pool, Service, Settings};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("pool.sock");
    let settings = Settings { donate_bytes: 16 << 20, chunk_bytes: 1 << 20, ..Settings::default() };
    let service = Service::start(&settings, &Endpoint::At(socket.clone()))?;
    println!("memory node at {}", service.path().display());

    // Each connection is a compute node with QPs and keys of its own.
    let alice = Pool::connect(&socket, Options::default())?;
    let mallory = Pool::connect(&socket, Options::default())?;
    println!("connected compute nodes {} and {}", alice.client(), mallory.client());

    let grant = alice.allocate_blocking()?;
    alice.write_blocking(&grant, 0, b"secret")?;

    // The library refuses a grant of another connection.
    let mut stolen = [0; 6];
    let error = mallory.read_blocking(&grant, 0, &mut stolen).unwrap_err();
    assert!(matches!(error, pool::Error::Stale { .. }));
    println!("refused by the library: {error}");

    // The library is not what protects the chunk. With a grant made by hand, the library posts the
    // READ, and the memory node's NIC refuses it: the window belongs to the other QP.
    let forged = Grant::new(grant.addr, grant.len, grant.entry, grant.group, grant.keys());
    let error = mallory.read_blocking(&forged, 0, &mut stolen).unwrap_err();
    assert!(matches!(error, pool::Error::Access { .. }));
    assert_eq!(stolen, [0; 6]);
    println!("refused by the NIC: {error}");

    // The owner notices nothing.
    let mut text = [0; 6];
    alice.read_blocking(&grant, 0, &mut text)?;
    assert_eq!(&text, b"secret");
    alice.free_blocking(grant)?;

    // The end of a connection releases what the compute node still holds. The end of the service
    // removes its socket.
    drop((alice, mallory));
    service.stop();
    assert!(!socket.exists());
    println!("stopped");
    Ok(())
}
