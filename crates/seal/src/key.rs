//! AES-GCM by aws-lc: one key, and the only calls to the library.

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, Algorithm, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::error::Unspecified;
use zeroize::Zeroizing;

use crate::sealer::Random;
use crate::{Cipher, Error, TAG_BYTES};

pub const NONCE_BYTES: usize = 12;
pub const AAD_BYTES: usize = 24;

/// Bytes that aws-lc allocates for a key, rounded up: `EVP_AEAD_CTX` has 584.
pub const HEAP_BYTES: usize = 640;

/// A key of AES-GCM.
///
/// aws-lc keeps the round keys and the hash key within one allocation (`evp_aead_ctx_st` in
/// `include/openssl/aead.h`). `EVP_AEAD_CTX_free` releases this allocation by `OPENSSL_free`
/// (`crypto/mem.c`), which overwrites it with zeros (`OPENSSL_cleanse`) first.
pub struct Key(LessSafeKey);

impl Key {
    /// Makes a random key.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn random(cipher: Cipher, random: Random) -> Result<Self, Error> {
        let algorithm = algorithm(cipher);
        // Filled in place and overwritten with zeros at the end. A move would leave a copy.
        let mut bytes = Zeroizing::new([0; 32]);
        let bytes = &mut bytes[..algorithm.key_len()];
        random(bytes).map_err(Error::Random)?;
        Ok(Self::new(algorithm, bytes))
    }

    fn new(algorithm: &'static Algorithm, bytes: &[u8]) -> Self {
        let key = UnboundKey::new(algorithm, bytes).expect("the key has the cipher's length");
        Self(LessSafeKey::new(key))
    }

    /// Encrypts `plain` into `sealed`, of equal length, and returns the tag.
    ///
    /// The library may read `sealed` again after the encryption to compute the tag. So no other
    /// party may change `sealed` during the call.
    pub fn seal(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        plain: &[u8],
        sealed: &mut [u8],
    ) -> Result<[u8; TAG_BYTES], Unspecified> {
        let mut tag = [0; TAG_BYTES];
        let nonce = Nonce::assume_unique_for_key(nonce);
        let aad = Aad::from(aad);
        self.0.seal_out_of_place_scatter(nonce, aad, plain, sealed, &[], &mut tag)?;
        Ok(tag)
    }

    /// Verifies and decrypts `sealed` into `plain`. On an error the content of `plain` is
    /// unspecified.
    ///
    /// The library may read `sealed` twice: for the tag, and for the decryption. So no other party
    /// may change `sealed` during the call.
    pub fn open(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        tag: &[u8; TAG_BYTES],
        sealed: &[u8],
        plain: &mut [u8],
    ) -> Result<(), Unspecified> {
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.0.open_separate_gather(nonce, Aad::from(aad), sealed, tag, plain)
    }

    /// Like [`Key::open`], for ciphertext in `bytes`, which the plaintext replaces.
    pub fn open_in_place(
        &self,
        nonce: [u8; NONCE_BYTES],
        aad: &[u8],
        tag: &[u8; TAG_BYTES],
        bytes: &mut [u8],
    ) -> Result<(), Unspecified> {
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.0.open_in_place_separate_tag(nonce, Aad::from(aad), tag, bytes)?;
        Ok(())
    }
}

fn algorithm(cipher: Cipher) -> &'static Algorithm {
    match cipher {
        Cipher::Aes256Gcm => &AES_256_GCM,
        Cipher::Aes128Gcm => &AES_128_GCM,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = hex.as_bytes().chunks(2);
        digits.map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
    }

    /// Test cases 4 and 16 of the GCM specification that was submitted to NIST (McGrew and Viega,
    /// "The Galois/Counter Mode of Operation", appendix B).
    #[test]
    fn specification_vectors_seal_and_open() {
        let key = bytes("feffe9928665731c6d6a8f9467308308");
        let nonce: [u8; NONCE_BYTES] = bytes("cafebabefacedbaddecaf888").try_into().unwrap();
        let aad = bytes("feedfacedeadbeeffeedfacedeadbeefabaddad2");
        let plain = bytes(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72\
             1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        );
        let cases = [
            (
                &AES_128_GCM,
                key.clone(),
                "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e\
                 21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091",
                "5bc94fbc3221a5db94fae95ae7121a47",
            ),
            (
                &AES_256_GCM,
                [key.clone(), key].concat(),
                "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa\
                 8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662",
                "76fc6ece0f4e1768cddf8853bb2d551b",
            ),
        ];
        for (algorithm, key, sealed, tag) in cases {
            let key = Key::new(algorithm, &key);
            let tag: [u8; TAG_BYTES] = bytes(tag).try_into().unwrap();
            let mut output = vec![0; plain.len()];
            assert_eq!(key.seal(nonce, &aad, &plain, &mut output), Ok(tag));
            assert_eq!(output, bytes(sealed));
            let mut opened = vec![0; plain.len()];
            assert!(key.open(nonce, &aad, &tag, &output, &mut opened).is_ok());
            assert_eq!(opened, plain);
            assert!(key.open_in_place(nonce, &aad, &tag, &mut output).is_ok());
            assert_eq!(output, plain);
        }
    }
}
