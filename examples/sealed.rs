//! Values that the memory node can neither read nor change unseen.
//!
//! Each value is encrypted and authenticated before it leaves the process. The key and the seals
//! stay in the process. The memory node has the ciphertext only.
//!
//! ```sh
//! cargo run --example sealed
//! ```

use std::error::Error;

use pool::{Cipher, Pool, SealedError, SealedPool, Settings};

fn main() -> Result<(), Box<dyn Error>> {
    let settings = Settings { donate_bytes: 16 << 20, ..Settings::default() };
    let node = pool::EmbeddedNode::start(&settings)?.into();
    let pool = SealedPool::new(Pool::embedded_in(&node, Default::default())?, Cipher::Aes256Gcm)?;

    let mut block = pool.allocate_blocking(64)?;
    pool.store_blocking(&mut block, b"balance: 100")?;
    println!("loaded: {}", String::from_utf8(pool.load_blocking(&block)?)?);

    // The memory node would see these bytes. `grant` is the plain right to the block.
    let mut seen = vec![0; block.len()];
    pool.pool().read_blocking(block.grant(), 0, &mut seen)?;
    assert!(!seen.windows(7).any(|part| part == b"balance"));

    // One bit that is changed at the memory node makes the value unusable, and is never read.
    seen[9] ^= 1;
    pool.pool().write_blocking(block.grant(), 0, &seen)?;
    match pool.load_blocking(&block) {
        Err(error @ SealedError::Tampered { .. }) => println!("refused: {error}"),
        other => panic!("a changed value was loaded: {other:?}"),
    }

    // A new store makes the block usable again.
    pool.store_blocking(&mut block, b"balance: 50")?;
    println!("loaded: {}", String::from_utf8(pool.load_blocking(&block)?)?);
    pool.free_blocking(block)?;
    Ok(())
}
