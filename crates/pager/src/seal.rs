//! Pages sealed for a file: encrypted, and refused when the file was changed from outside.
//!
//! AES-256-GCM, one page at a time. The key is random, for one file, and lives in this process's memory
//! only, as do the nonce and the tag of each page: what lies in the file is nothing but ciphertext. The
//! nonce is a counter that never repeats under a key, and a page is opened under the nonce of its last
//! store alone, so an older content of the same place, and the content of another place, fail as any
//! other change does.
//!
//! Forked children reach such a file through their parent's keeper, which shares the parent's memory
//! ([`crate::fork`]); a child that pages for itself has a file and a key of its own.

use std::io;
use std::ops::Range;
use std::sync::Mutex;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::sys::PAGE_BYTES;

const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;

/// What opens a page: the number of its store, from 1 on, and its tag.
#[derive(Clone, Copy)]
struct Seal {
    store: u64,
    tag: [u8; TAG_BYTES],
}

/// Pages whose seals are kept together, and given back together: 1 MiB of the file.
const BLOCK_PAGES: u64 = 256;
type Block = Box<[Seal; BLOCK_PAGES as usize]>;

#[derive(Default)]
struct Seals {
    /// Stores so far.
    stores: u64,
    blocks: Vec<Option<Block>>,
}

/// The key of a file, and what opens each of its pages: 24 bytes for a page.
pub struct Sealer {
    key: LessSafeKey,
    seals: Mutex<Seals>,
}

impl Sealer {
    /// A fresh key.
    ///
    /// # Errors
    /// Those of `getrandom(2)`.
    pub fn new() -> io::Result<Self> {
        let mut key = [0u8; KEY_BYTES];
        // SAFETY: the buffer is valid for the write. Up to 256 bytes come whole.
        let got = unsafe { libc::getrandom(key.as_mut_ptr().cast(), KEY_BYTES, 0) };
        if got != KEY_BYTES as isize {
            return Err(io::Error::last_os_error());
        }
        let key = UnboundKey::new(&AES_256_GCM, &key).expect("a key of this length is a key");
        Ok(Self { key: LessSafeKey::new(key), seals: Mutex::default() })
    }

    /// Seals `plain`, to be stored as the file's page `page`, into `sealed`.
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

    /// Opens what the file has as its page `page` into `plain`. A page that was never stored is zeros.
    ///
    /// # Errors
    /// If that is not what was stored there last.
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
                    format!("page {page} of the file is not what was stored there: it was changed"),
                )
            })
    }

    /// Forgets pages: they are zeros from now on.
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
        self.seals.lock().expect("nobody panics with the seals locked")
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

/// The nonce of a store: no two stores under a key have the same.
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
    fn only_what_was_stored_last_at_a_place_opens_there() {
        let sealer = Sealer::new().unwrap();
        let first = stored(&sealer, 7, 1);
        assert_eq!(opened(&sealer, 7, &first), Some(1));
        let other = stored(&sealer, 8, 1);
        assert_ne!(first, other, "equal pages do not look alike");
        assert_eq!(opened(&sealer, 8, &first), None, "the content of another place");
        let second = stored(&sealer, 7, 1);
        assert_ne!(first, second, "nor do two stores of one content");
        assert_eq!(opened(&sealer, 7, &first), None, "an older content of the place");
        assert_eq!(opened(&sealer, 7, &second), Some(1));
        let stranger = Sealer::new().unwrap();
        let strange = stored(&stranger, 7, 1);
        assert_eq!(opened(&sealer, 7, &strange), None, "another file's key");
    }

    #[test]
    fn every_changed_bit_is_noticed() {
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
    fn what_is_forgotten_or_was_never_stored_is_zeros() {
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
