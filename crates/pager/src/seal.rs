//! Authenticated encryption of pages in a file on disk.
//!
//! Each page is sealed with AES-256-GCM. The key is random and belongs to one file. The key, and
//! the nonce and tag of each page, exist only in this process's memory; the file holds only
//! ciphertext. The nonce is a counter that never repeats under a key. A page is opened only with
//! the nonce of its last store. So an older content of the same page, or the content of another
//! page, fails authentication like any other change.
//!
//! A light forked child reads the file through its parent's page server, which shares the parent's
//! memory ([`crate::fork`]). A promoted child has a file and a key of its own.

use std::io;
use std::ops::Range;
use std::sync::Mutex;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::sys::PAGE_BYTES;

const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;

/// Data needed to open a page: the number of its store, from 1 on, and its tag. Store 0 marks a
/// page that was never stored.
#[derive(Clone, Copy)]
struct Seal {
    store: u64,
    tag: [u8; TAG_BYTES],
}

/// Pages whose seals are allocated and freed together: 1 MiB of the file.
const BLOCK_PAGES: u64 = 256;
type Block = Box<[Seal; BLOCK_PAGES as usize]>;

#[derive(Default)]
struct Seals {
    /// Number of stores under this key.
    stores: u64,
    blocks: Vec<Option<Block>>,
}

/// Key of a file and the seals of its pages, 24 bytes per page.
pub struct Sealer {
    key: LessSafeKey,
    seals: Mutex<Seals>,
}

impl Sealer {
    /// Creates a sealer with a random key.
    ///
    /// # Errors
    /// Errors of `getrandom(2)`.
    pub fn new() -> io::Result<Self> {
        let mut key = [0u8; KEY_BYTES];
        // SAFETY: the buffer is valid for the write. Requests of up to 256 bytes are served
        // completely.
        let got = unsafe { libc::getrandom(key.as_mut_ptr().cast(), KEY_BYTES, 0) };
        if got != KEY_BYTES as isize {
            return Err(io::Error::last_os_error());
        }
        let key = UnboundKey::new(&AES_256_GCM, &key).expect("a key of this length is a key");
        Ok(Self { key: LessSafeKey::new(key), seals: Mutex::default() })
    }

    /// Seals `plain` into `sealed`, to be stored as page `page` of the file.
    pub fn seal(&self, page: u64, plain: &[u8], sealed: &mut [u8; PAGE_BYTES]) {
        let store = {
            let mut seals = self.seals();
            seals.stores += 1;
            seals.stores
        };
        let mut tag = [0; TAG_BYTES];
        self.key
            .seal_out_of_place_scatter(nonce(store), Aad::empty(), plain, sealed, &[], &mut tag)
            .expect("a page and its tag have their lengths");
        *self.seals().place(page) = Seal { store, tag };
    }

    /// Opens `sealed`, read from page `page` of the file, into `plain`. A page that was never
    /// stored yields zeros.
    ///
    /// # Errors
    /// `InvalidData` if `sealed` is not the last content stored at `page`.
    pub fn open(&self, page: u64, sealed: &[u8], plain: &mut [u8]) -> io::Result<()> {
        let seal = *self.seals().place(page);
        if seal.store == 0 {
            plain.fill(0);
            return Ok(());
        }
        self.key
            .open_separate_gather(nonce(seal.store), Aad::empty(), sealed, &seal.tag, plain)
            .map_err(|_| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("page {page} of the file has been changed since it was stored"),
                )
            })
    }

    /// Forgets pages, which yield zeros afterwards.
    pub fn forget(&self, pages: Range<u64>) {
        let mut seals = self.seals();
        for index in pages.start / BLOCK_PAGES..pages.end.div_ceil(BLOCK_PAGES) {
            let Some(block) = seals.blocks.get_mut(index as usize) else { return };
            let first = index * BLOCK_PAGES;
            let here = pages.start.max(first)..pages.end.min(first + BLOCK_PAGES);
            if here.end - here.start == BLOCK_PAGES {
                *block = None;
            } else if let Some(block) = block {
                block[(here.start - first) as usize..(here.end - first) as usize].fill(NONE);
            }
        }
    }

    fn seals(&self) -> std::sync::MutexGuard<'_, Seals> {
        self.seals.lock().expect("no thread panics while it holds this lock")
    }
}

const NONE: Seal = Seal { store: 0, tag: [0; TAG_BYTES] };

impl Seals {
    fn place(&mut self, page: u64) -> &mut Seal {
        let (index, at) = ((page / BLOCK_PAGES) as usize, (page % BLOCK_PAGES) as usize);
        if index >= self.blocks.len() {
            self.blocks.resize_with(index + 1, || None);
        }
        &mut self.blocks[index].get_or_insert_with(|| Box::new([NONE; BLOCK_PAGES as usize]))[at]
    }
}

/// Returns the nonce of a store. No two stores under a key have the same nonce.
fn nonce(store: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&store.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(sealer: &Sealer, page: u64, byte: u8) -> [u8; PAGE_BYTES] {
        let mut sealed = [0; PAGE_BYTES];
        sealer.seal(page, &[byte; PAGE_BYTES], &mut sealed);
        sealed
    }

    fn opened(sealer: &Sealer, page: u64, sealed: &[u8]) -> Option<u8> {
        let mut plain = [0xff; PAGE_BYTES];
        sealer.open(page, sealed, &mut plain).ok()?;
        assert!(plain.iter().all(|&byte| byte == plain[0]));
        Some(plain[0])
    }

    #[test]
    fn only_the_last_stored_content_of_a_page_opens() {
        let sealer = Sealer::new().unwrap();
        let first = stored(&sealer, 7, 1);
        assert_eq!(opened(&sealer, 7, &first), Some(1));
        let other = stored(&sealer, 8, 1);
        assert_ne!(first, other, "equal pages have different ciphertexts");
        assert_eq!(opened(&sealer, 8, &first), None, "the content of another page");
        let second = stored(&sealer, 7, 1);
        assert_ne!(first, second, "two stores of equal content differ");
        assert_eq!(opened(&sealer, 7, &first), None, "an older content of the page");
        assert_eq!(opened(&sealer, 7, &second), Some(1));
        let stranger = Sealer::new().unwrap();
        let strange = stored(&stranger, 7, 1);
        assert_eq!(opened(&sealer, 7, &strange), None, "another file's key");
    }

    #[test]
    fn changed_bit_fails_authentication() {
        let sealer = Sealer::new().unwrap();
        let sealed = stored(&sealer, 300, 5);
        for bit in (0..PAGE_BYTES * 8).step_by(997) {
            let mut changed = sealed;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(opened(&sealer, 300, &changed), None, "bit {bit}");
        }
        assert_eq!(opened(&sealer, 300, &sealed), Some(5));
    }

    #[test]
    fn forgotten_and_unstored_pages_are_zeros() {
        let sealer = Sealer::new().unwrap();
        assert_eq!(opened(&sealer, 9, &[3; PAGE_BYTES]), Some(0));
        let all: Vec<_> = (0..600).map(|page| stored(&sealer, page, 1)).collect();
        sealer.forget(255..512);
        sealer.forget(10_000..10_256);
        for (page, sealed) in (0..).zip(&all) {
            let there = !(255..512).contains(&page);
            assert_eq!(opened(&sealer, page, sealed), Some(u8::from(there)), "page {page}");
        }
    }
}
