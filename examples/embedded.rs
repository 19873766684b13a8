//! A pool inside one process: allocate a chunk, write, read, and free it.
//!
//! The memory node is part of this process, and its software NIC runs on the calling thread. No
//! socket, no root rights and no RDMA hardware are needed.
//!
//! ```sh
//! cargo run --example embedded
//! ```

use std::error::Error;

use pool::{Pool, Settings};

fn main() -> Result<(), Box<dyn Error>> {
    // The memory node donates 16 MiB in chunks of 1 MiB.
    let settings = Settings { donate_bytes: 16 << 20, chunk_bytes: 1 << 20, ..Settings::default() };
    let pool = Pool::embedded(settings)?;

    // The memory node's NIC allocates the chunk. The grant contains its address and the keys that
    // the NIC checks at each access.
    let grant = pool.allocate_blocking()?;
    println!("allocated chunk {} with {} bytes", grant.entry, grant.len);

    // A chunk reads as zeros until it is written.
    let mut text = [0xff; 5];
    pool.read_blocking(&grant, 4096, &mut text)?;
    assert_eq!(text, [0; 5]);

    pool.write_blocking(&grant, 4096, b"hello")?;
    pool.read_blocking(&grant, 4096, &mut text)?;
    assert_eq!(&text, b"hello");
    println!("read {:?} at offset 4096", str::from_utf8(&text)?);

    // Ranges are checked.
    let error = pool.read_blocking(&grant, grant.len, &mut text).unwrap_err();
    assert!(matches!(error, pool::Error::OutOfRange { .. }));
    println!("refused: {error}");

    // Dropping a grant frees nothing; a chunk is freed explicitly.
    pool.free_blocking(grant)?;

    // The grant is a value, so a copy of it is still here. Its keys are dead.
    let error = pool.write_blocking(&grant, 4096, b"again").unwrap_err();
    println!("refused after the free: {error}");

    let status = pool.node_status()?;
    assert_eq!(status.node.free, 16);
    println!(
        "{} allocation by the NIC, {} by the CPU",
        status.node.allocations_nic, status.node.allocations_cpu
    );
    Ok(())
}
