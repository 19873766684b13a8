//! The sealer: nonces, associated data, verification and rekeying.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::generations::{Generations, NotAdded, Pinned};
use crate::home::{self, Home};
use crate::key::{AAD_BYTES, HEAP_BYTES, Key, NONCE_BYTES};
use crate::{Cipher, Error, STORE_BITS, Seal, Tampered};

/// Fills a buffer with random bytes for keys.
pub type Random = fn(&mut [u8]) -> io::Result<()>;

/// Stores under one key. With pages of 4 KiB, 2^44 blocks are encrypted, and the distinguishing
/// advantage by collisions of blocks stays below 2^-40 (NIST SP 800-38D, section 8.3, and the bound
/// for counter mode).
const SEALS_PER_KEY: u64 = 1 << 36;

/// Age at which a key is replaced.
const KEY_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Value of `born` before the first [`Sealer::tick`] of a generation.
const UNKNOWN: u64 = u64::MAX;

/// Longest content of [`Sealer::seal_raw`] whose ciphertext lies on the stack.
const STACK_BYTES: usize = 4096;

/// Seals and opens the contents of one owner, with keys of its own.
///
/// Several threads use a sealer at a time. Sealing and opening take no lock and allocate nothing,
/// except once in 2^36 stores, when the key is replaced.
pub struct Sealer {
    cipher: Cipher,
    random: Random,
    run: [u8; 16],
    keys: Generations<Key>,
    home: Home,
    /// Second at which the current generation was first seen by [`Sealer::tick`].
    born: AtomicU64,
    tampered: AtomicU64,
    seals_per_key: u64,
}

/// Counters of a sealer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Contents that were sealed.
    pub seals: u64,
    /// Contents that were opened.
    pub opens: u64,
    /// Contents that failed authentication.
    pub tampered: u64,
    /// Keys that exist: the current one, and those that live seals name.
    pub keys: u32,
    /// Bytes of memory, without the seals that the owner keeps.
    pub bytes: usize,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealer").field("cipher", &self.cipher).finish_non_exhaustive()
    }
}

impl Sealer {
    /// Makes a sealer with a random key and a random run id from getrandom(2).
    ///
    /// # Errors
    /// [`Error::Random`] and [`Error::WipeOnFork`].
    pub fn new(cipher: Cipher) -> Result<Self, Error> {
        Self::with_random(cipher, kernel_random)
    }

    /// Makes a sealer whose keys are from `random`, for simulations that a seed repeats.
    ///
    /// Two sealers with equal random bytes use equal nonces under equal keys, which reveals their
    /// contents. A sealer of real contents needs [`Sealer::new`].
    ///
    /// # Errors
    /// As [`Sealer::new`].
    pub fn with_random(cipher: Cipher, random: Random) -> Result<Self, Error> {
        let mut run = [0; 16];
        random(&mut run).map_err(Error::Random)?;
        Ok(Self {
            cipher,
            random,
            run,
            keys: Generations::new(Key::random(cipher, random)?),
            home: Home::new()?,
            born: AtomicU64::new(UNKNOWN),
            tampered: AtomicU64::new(0),
            seals_per_key: SEALS_PER_KEY,
        })
    }

    /// Returns the cipher.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// Encrypts `plain` into `sealed` for `place`, and returns the seal that opens it.
    ///
    /// `place` is the owner's name of the place where the bytes will lie, for example a slot. The
    /// same place must be given to [`Sealer::open`]. Equal contents have different ciphertexts each
    /// time. The seal counts as live until [`Sealer::forget`].
    ///
    /// # Errors
    /// [`Error::Forked`], [`Error::Wiped`], [`Error::Nonces`], and [`Error::Length`]. Then `sealed`
    /// has zeros or its old content, and never a ciphertext.
    #[inline]
    pub fn seal(&self, place: u64, plain: &[u8], sealed: &mut [u8]) -> Result<Seal, Error> {
        if self.home.is_left() {
            return Err(Error::Forked);
        }
        let key = self.keys.current().ok_or(Error::Wiped)?;
        let store = key.take_store_number().ok_or(Error::Nonces)?;
        let generation = key.generation();
        let counter = u64::from(generation) << STORE_BITS | store;
        let Ok(tag) = key.seal(nonce(counter), &self.aad(place), plain, sealed) else {
            let lengths = Error::Length { plain: plain.len(), sealed: sealed.len() };
            sealed.fill(0);
            return Err(lengths);
        };
        // A signal handler that interrupted this call may have forked. Then this is the child, and
        // the parent uses the same number.
        if self.home.is_left() {
            sealed.fill(0);
            return Err(Error::Forked);
        }
        key.keep();
        if store >= self.seals_per_key {
            self.replace_used_key(generation);
        }
        Ok(Seal { counter, tag })
    }

    /// Verifies and decrypts `sealed` into `plain`.
    ///
    /// # Errors
    /// [`Tampered`] if `sealed` is not the content that `seal` names at `place`, or the key was
    /// dropped. Then `plain` has zeros.
    #[inline]
    pub fn open(
        &self,
        place: u64,
        seal: &Seal,
        sealed: &[u8],
        plain: &mut [u8],
    ) -> Result<(), Tampered> {
        let opened = self.key_of(seal).and_then(|key| {
            let (nonce, aad) = (nonce(seal.counter), self.aad(place));
            key.open(nonce, &aad, &seal.tag, sealed, plain).ok()?;
            key.count_open();
            Some(())
        });
        opened.ok_or_else(|| self.refuse(plain))
    }

    /// Like [`Sealer::seal`], for memory that other processes access during the call.
    ///
    /// aws-lc may read the ciphertext back from the output to compute the tag. A process that
    /// changed the ciphertext in between would get a valid tag for its own bytes. So the ciphertext
    /// is made in private memory, and copied to `sealed` when the tag is known. Up to 4096 bytes
    /// lie on the stack; more are allocated.
    ///
    /// # Safety
    /// `plain` is readable and `sealed` writable for `len` bytes, and they do not overlap. Other
    /// parties may access both during the call. If `plain` changes, the sealed content is a mixture
    /// of its values.
    ///
    /// # Errors
    /// As [`Sealer::seal`]; then `sealed` is unchanged.
    pub unsafe fn seal_raw(
        &self,
        place: u64,
        plain: *const u8,
        sealed: *mut u8,
        len: usize,
    ) -> Result<Seal, Error> {
        let mut short = [0; STACK_BYTES];
        let mut long = Vec::new();
        let private = if len <= STACK_BYTES {
            &mut short[..len]
        } else {
            long.resize(len, 0);
            &mut long[..]
        };
        // SAFETY: the caller's guarantee. The library reads the plaintext only to encrypt it.
        let plain = unsafe { std::slice::from_raw_parts(plain, len) };
        let seal = self.seal(place, plain, private)?;
        // SAFETY: the caller's guarantee; `private` belongs to this call.
        unsafe { std::ptr::copy_nonoverlapping(private.as_ptr(), sealed, len) };
        Ok(seal)
    }

    /// Like [`Sealer::open`], for `sealed` in memory that other processes change during the call.
    ///
    /// aws-lc may read the ciphertext twice, for the tag and for the decryption. A process that
    /// changed the ciphertext in between would make bytes that were never verified. So the
    /// ciphertext is copied to `plain` once, and verified and decrypted there.
    ///
    /// # Safety
    /// `sealed` is readable for `len` bytes, and other parties may change it during the call.
    /// `plain` is writable for `len` bytes, and no other party accesses it during the call. They do
    /// not overlap.
    ///
    /// # Errors
    /// As [`Sealer::open`].
    pub unsafe fn open_raw(
        &self,
        place: u64,
        seal: &Seal,
        sealed: *const u8,
        plain: *mut u8,
        len: usize,
    ) -> Result<(), Tampered> {
        // SAFETY: the caller's guarantee.
        unsafe { std::ptr::copy_nonoverlapping(sealed, plain, len) };
        // SAFETY: written above; the caller excludes other users.
        let bytes = unsafe { std::slice::from_raw_parts_mut(plain, len) };
        let opened = self.key_of(seal).and_then(|key| {
            let (nonce, aad) = (nonce(seal.counter), self.aad(place));
            key.open_in_place(nonce, &aad, &seal.tag, bytes).ok()?;
            key.count_open();
            Some(())
        });
        opened.ok_or_else(|| self.refuse(bytes))
    }

    /// Counts a seal down that [`Sealer::seal`] returned and that will not be opened any more. The
    /// key of an older generation is dropped with its last live seal.
    ///
    /// Each seal is forgotten once, and not while another thread opens it. Otherwise the key can go
    /// early, and other contents of its generation do not open any more.
    #[inline]
    pub fn forget(&self, seal: &Seal) {
        if seal.is_stored() {
            self.keys.forget(seal.generation());
        }
    }

    /// Makes a new key for later stores. Contents of older keys still open.
    ///
    /// # Errors
    /// [`Error::Generations`], [`Error::Random`], [`Error::Forked`], and [`Error::Wiped`]. Then
    /// later stores use the old key.
    pub fn rekey(&self) -> Result<(), Error> {
        if self.home.is_left() {
            return Err(Error::Forked);
        }
        self.keys.replace(|| self.new_key()).map_err(not_rekeyed)
    }

    /// Replaces the key if it is 24 hours old or has made 2^36 stores. `now` is the time since any
    /// fixed moment, by a clock that never goes back. The owner calls this once in a few minutes.
    ///
    /// # Errors
    /// As [`Sealer::rekey`]. The next call tries again.
    pub fn tick(&self, now: Duration) -> Result<(), Error> {
        let now = now.as_secs();
        let born = self.born.load(Ordering::Relaxed);
        if born == UNKNOWN {
            // If another thread has just replaced the key, the age counts from a few minutes later.
            let _ = self.born.compare_exchange(born, now, Ordering::Relaxed, Ordering::Relaxed);
        } else if now.saturating_sub(born) >= KEY_AGE.as_secs() {
            return self.rekey();
        }
        Ok(())
    }

    /// Drops all keys. Afterwards sealing fails with [`Error::Wiped`], and opening with
    /// [`Tampered`].
    pub fn wipe(&mut self) {
        self.keys.wipe();
    }

    /// Like [`Sealer::wipe`], for a forked child, whose other references to the sealer belong to
    /// threads of the parent.
    ///
    /// # Safety
    /// No other thread of this process uses the sealer, and the calling thread is not within a call
    /// to the sealer, in a signal handler for example.
    pub unsafe fn wipe_in_child(&self) {
        // SAFETY: the caller's guarantee.
        unsafe { self.keys.wipe_shared() }
    }

    /// Returns the counters.
    pub fn statistics(&self) -> Statistics {
        let totals = self.keys.totals();
        let bytes = size_of::<Self>() + self.keys.bytes() + home::BYTES;
        Statistics {
            seals: totals.stores,
            opens: totals.opens,
            tampered: self.tampered.load(Ordering::Relaxed),
            keys: totals.keys,
            bytes: bytes + totals.keys as usize * HEAP_BYTES,
        }
    }

    fn aad(&self, place: u64) -> [u8; AAD_BYTES] {
        let mut aad = [0; AAD_BYTES];
        aad[..16].copy_from_slice(&self.run);
        aad[16..].copy_from_slice(&place.to_be_bytes());
        aad
    }

    fn key_of(&self, seal: &Seal) -> Option<Pinned<'_, Key>> {
        if seal.is_stored() { self.keys.pin(seal.generation()) } else { None }
    }

    #[cold]
    fn refuse(&self, plain: &mut [u8]) -> Tampered {
        plain.fill(0);
        self.tampered.fetch_add(1, Ordering::Relaxed);
        Tampered
    }

    /// Replaces a key that has made its number of stores. After a failure the next store tries
    /// again, and sealing goes on until the numbers end.
    #[cold]
    fn replace_used_key(&self, generation: u16) {
        let _ = self.keys.replace_if_current(generation, || self.new_key());
    }

    fn new_key(&self) -> Result<Key, Error> {
        let key = Key::random(self.cipher, self.random)?;
        self.born.store(UNKNOWN, Ordering::Relaxed);
        Ok(key)
    }
}

fn not_rekeyed(error: NotAdded<Error>) -> Error {
    match error {
        NotAdded::Used => Error::Generations,
        NotAdded::Wiped => Error::Wiped,
        NotAdded::Failed(error) => error,
    }
}

/// Returns the nonce of a store: generation and store number.
fn nonce(counter: u64) -> [u8; NONCE_BYTES] {
    let generation = (counter >> STORE_BITS) as u32;
    let store = counter & ((1 << STORE_BITS) - 1);
    let mut nonce = [0; NONCE_BYTES];
    nonce[..4].copy_from_slice(&generation.to_be_bytes());
    nonce[4..].copy_from_slice(&store.to_be_bytes());
    nonce
}

fn kernel_random(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let got = retry_on_intr(|| getrandom(&mut *bytes, GetRandomFlags::empty()))?;
        bytes = &mut bytes[got..];
    }
    Ok(())
}

#[cfg(test)]
mod tests;
