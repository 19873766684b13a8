//! Values that are encrypted before they leave the process.
//!
//! A [`SealedPool`] keeps the key, and a [`SealedBlock`] the seal of what was stored last. So the
//! memory node can neither read a value nor change it unseen (TDMEM §4.2), and nor can another
//! compute node that has found a way to the memory.

use std::sync::atomic::{AtomicU64, Ordering};

use seal::{Cipher, Seal, Sealer};
use verbs::Nic;
use verbs::executor::block_on;

use crate::{DefaultNic, Error, Grant, Pool};

/// A pool with a key of this process, for values that are stored and loaded whole.
///
/// ```
/// use pool::{Pool, SealedPool, Settings};
///
/// let pool = Pool::embedded(Settings { donate_bytes: 8 << 20, ..Settings::default() })?;
/// let pool = SealedPool::new(pool, pool::Cipher::default())?;
/// let mut block = pool.allocate_blocking(64)?;
/// pool.store_blocking(&mut block, b"a secret")?;
/// assert_eq!(pool.load_blocking(&block)?, b"a secret");
/// pool.free_blocking(block)?;
/// # Ok::<(), pool::SealedError>(())
/// ```
pub struct SealedPool<N: Nic = DefaultNic> {
    pool: Pool<N>,
    sealer: Sealer,
    /// Number of the next block.
    next: AtomicU64,
}

/// The right to use a block, and the seal of the value in it.
///
/// A block cannot be copied, because the copy would keep the seal of an old value.
#[derive(Debug)]
pub struct SealedBlock {
    grant: Grant,
    /// Number of the block, by which the sealer tells blocks apart.
    number: u64,
    seal: Seal,
    len: usize,
}

/// Errors of a [`SealedPool`].
#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    /// The pool refused or failed.
    #[error(transparent)]
    Pool(#[from] Error),
    /// The key cannot be made or used.
    #[error(transparent)]
    Seal(#[from] seal::Error),
    /// The memory does not have the value that was stored last.
    #[error(
        "loading a value of {len} bytes at {addr:#x}: its tag is wrong; the last store failed, the \
         memory is faulty, or its owner has changed it"
    )]
    Tampered {
        /// Address of the block at the memory node.
        addr: u64,
        /// Bytes of the value.
        len: usize,
    },
    /// No value was stored since the block was allocated.
    #[error("loading a value: nothing was stored in the block; call store first")]
    Empty,
    /// The value is longer than the block.
    #[error("storing {len} bytes: the block has {room}; allocate a larger block")]
    TooLong {
        /// Bytes of the value.
        len: usize,
        /// Bytes of the block.
        room: u64,
    },
}

impl SealedBlock {
    /// Returns the bytes of the stored value.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the value has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the grant, for operations on the ciphertext.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Returns the largest number of bytes that the block holds.
    pub fn capacity(&self) -> u64 {
        self.grant.len
    }
}

impl<N: Nic> SealedPool<N> {
    /// Wraps a pool with a random key.
    ///
    /// # Errors
    /// [`SealedError::Seal`].
    pub fn new(pool: Pool<N>, cipher: Cipher) -> Result<Self, SealedError> {
        Ok(Self { pool, sealer: Sealer::new(cipher)?, next: AtomicU64::new(0) })
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool<N> {
        &self.pool
    }

    /// Allocates a block for values of up to `bytes`, as [`Pool::allocate_bytes`] does.
    pub async fn allocate(&self, bytes: u64) -> Result<SealedBlock, SealedError> {
        let grant = self.pool.allocate_bytes(bytes).await?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(SealedBlock { grant, number, seal: Seal::default(), len: 0 })
    }

    /// Blocking form of [`SealedPool::allocate`].
    pub fn allocate_blocking(&self, bytes: u64) -> Result<SealedBlock, SealedError> {
        block_on(self.allocate(bytes))
    }

    /// Encrypts a value and writes it to the block, in place of the value there.
    ///
    /// # Errors
    /// [`SealedError::TooLong`] changes nothing. After another error neither the old nor the new
    /// value can be loaded.
    pub async fn store(&self, block: &mut SealedBlock, value: &[u8]) -> Result<(), SealedError> {
        if value.len() as u64 > block.grant.len {
            return Err(SealedError::TooLong { len: value.len(), room: block.grant.len });
        }
        let mut sealed = vec![0; value.len()];
        let seal = self.sealer.seal(block.number, value, &mut sealed)?;
        self.sealer.forget(&std::mem::replace(&mut block.seal, seal));
        block.len = value.len();
        Ok(self.pool.write(&block.grant, 0, &sealed).await?)
    }

    /// Blocking form of [`SealedPool::store`].
    pub fn store_blocking(&self, block: &mut SealedBlock, value: &[u8]) -> Result<(), SealedError> {
        block_on(self.store(block, value))
    }

    /// Reads the value of a block, and verifies and decrypts it.
    ///
    /// # Errors
    /// [`SealedError::Tampered`] if the memory has other bytes than were stored last.
    pub async fn load(&self, block: &SealedBlock) -> Result<Vec<u8>, SealedError> {
        if !block.seal.is_stored() {
            return Err(SealedError::Empty);
        }
        let mut sealed = vec![0; block.len];
        self.pool.read(&block.grant, 0, &mut sealed).await?;
        let mut value = vec![0; block.len];
        match self.sealer.open(block.number, &block.seal, &sealed, &mut value) {
            Ok(()) => Ok(value),
            Err(seal::Tampered) => {
                Err(SealedError::Tampered { addr: block.grant.addr, len: block.len })
            }
        }
    }

    /// Blocking form of [`SealedPool::load`].
    pub fn load_blocking(&self, block: &SealedBlock) -> Result<Vec<u8>, SealedError> {
        block_on(self.load(block))
    }

    /// Frees a block.
    pub async fn free(&self, block: SealedBlock) -> Result<(), SealedError> {
        self.sealer.forget(&block.seal);
        Ok(self.pool.free(block.grant).await?)
    }

    /// Blocking form of [`SealedPool::free`].
    pub fn free_blocking(&self, block: SealedBlock) -> Result<(), SealedError> {
        block_on(self.free(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    fn pool() -> SealedPool {
        let settings = Settings { donate_bytes: 8 << 20, ..Settings::default() };
        SealedPool::new(Pool::embedded(settings).unwrap(), Cipher::default()).unwrap()
    }

    #[test]
    fn values_of_all_lengths_come_back() {
        let pool = pool();
        let mut block = pool.allocate_blocking(100_000).unwrap();
        assert!(matches!(pool.load_blocking(&block), Err(SealedError::Empty)));
        for len in [0, 1, 15, 16, 17, 4096, 4097, 100_000] {
            let value: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
            pool.store_blocking(&mut block, &value).unwrap();
            assert_eq!(pool.load_blocking(&block).unwrap(), value);
        }
        let room = block.capacity();
        let long = pool.store_blocking(&mut block, &vec![0; room as usize + 1]);
        assert!(matches!(long, Err(SealedError::TooLong { .. })), "{long:?}");
        assert_eq!(pool.load_blocking(&block).unwrap().len(), 100_000, "a refusal changes nothing");
        pool.free_blocking(block).unwrap();
    }

    #[test]
    fn memory_has_no_plain_text_and_each_change_is_seen() {
        let pool = pool();
        let value = b"a secret that the memory node must not see";
        let [mut one, mut other] = [(); 2].map(|()| pool.allocate_blocking(64).unwrap());
        pool.store_blocking(&mut one, value).unwrap();
        pool.store_blocking(&mut other, value).unwrap();
        let [first, second] = [&one, &other].map(|block| {
            let mut bytes = vec![0; value.len()];
            pool.pool().read_blocking(&block.grant, 0, &mut bytes).unwrap();
            assert_ne!(bytes, value);
            bytes
        });
        assert_ne!(first, second, "equal values have different ciphertexts");
        let put = |bytes: &[u8]| pool.pool().write_blocking(&one.grant, 0, bytes).unwrap();
        let is_refused = || matches!(pool.load_blocking(&one), Err(SealedError::Tampered { .. }));
        for at in 0..first.len() {
            let mut changed = first.clone();
            changed[at] ^= 1 << (at % 8);
            put(&changed);
            assert!(is_refused(), "byte {at}");
        }
        put(&second);
        assert!(is_refused(), "another block's bytes");
        put(&first);
        assert_eq!(pool.load_blocking(&one).unwrap(), value);
    }

    #[test]
    fn older_value_is_refused() {
        let pool = pool();
        let mut block = pool.allocate_blocking(64).unwrap();
        pool.store_blocking(&mut block, b"balance 100").unwrap();
        let mut old = vec![0; block.len()];
        pool.pool().read_blocking(&block.grant, 0, &mut old).unwrap();
        pool.store_blocking(&mut block, b"balance 001").unwrap();
        pool.pool().write_blocking(&block.grant, 0, &old).unwrap();
        let loaded = pool.load_blocking(&block);
        assert!(matches!(loaded, Err(SealedError::Tampered { .. })), "{loaded:?}");
    }
}
