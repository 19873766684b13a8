//! The construction, and the replacement of keys. `crates/seal/tests` has tests of the guarantees.

use super::*;

/// Run id a0, a1, ... af; keys of 32 bytes 00, 01, ... 1f, and of 16 bytes a0, a1, ... af.
fn pattern(bytes: &mut [u8]) -> io::Result<()> {
    let first = if bytes.len() == 16 { 0xa0 } else { 0 };
    bytes.iter_mut().zip(first..).for_each(|(byte, value)| *byte = value);
    Ok(())
}

fn no_randomness(_: &mut [u8]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The expected values were made with another implementation (OpenSSL), from the layout of nonce
/// and associated data in the documentation of the crate.
#[test]
fn construction_has_the_documented_layout() {
    let expected = [
        (
            Cipher::Aes128Gcm,
            [
                "6e8475c169287ab53f79bf27b7761981473319781d36e925f8380edd77145ed3\
                 6bf1fec7e352ed5a8e201e69dc90f6e9031765f2b24eb539ca71c138f4dc79d6",
                "9d6676bd0d1d0bd88aef5e4665c2a7f9",
                "7d58c2a4883b2df428f37fdde944fc678a42c5c13ebb5e6b25f88f41cfdc42c7\
                 7f6f81fe2dbe885df39574c7a6c2b52be45e26f41f37b9045e5b698a7b3ad426",
                "5a72cbc9b33445bbfc310caa436b07b8",
                "99044a63867c80c2ec64a63c76a7d7ccab28259439abb7d86e095551868974c0\
                 7a147e382a3efac9ce6aeae0e26894869a5586ea9e1878bf418619df4018ca5f",
                "482f02773e879a633332371b99f7af64",
            ],
        ),
        (
            Cipher::Aes256Gcm,
            [
                "15d7bdff40f1361906275b32e0ab34f8058e0e4770a742936b1919c23a2d6d41\
                 1ab745d20c09a21b71f6e92a40c9291c1e2761a1c9db2b70862c275e6488a537",
                "f3fdc2b706d5f16b82829bee9660f5e7",
                "c9702c7eb04edcd6b104361a7b4ce583960627c3fabc19b8966448216dc6459b\
                 c402dbec02440ec331e2c81bbe4eb48d4a36232a94b58412c9e5b91b2c5e49d5",
                "6b1c15b3705ce50d65ae30f85d80e2be",
                "ab16c6cdcadbe5dce23e15b6e7ce36c8615cee10fbcb03e46b4b4c5d7c28f325\
                 2ad8c3f8b880ef39d40af0e50d62ee4172d06f1cb855e5d19574ceb0321f3590",
                "ae05e7c116f2c0385c947b1971cc0fdf",
            ],
        ),
    ];
    let plain: Vec<u8> = (0..64).collect();
    for (cipher, values) in expected {
        let sealer = Sealer::with_random(cipher, pattern).unwrap();
        let mut stored = Vec::new();
        for counter in [1, 2, 1 << 48 | 1] {
            let mut sealed = [0; 64];
            let seal = sealer.seal(0x0102_0304_0506_0708, &plain, &mut sealed).unwrap();
            assert_eq!(seal.counter, counter);
            stored.extend([hex(&sealed), hex(&seal.tag)]);
            if seal.store() == 2 {
                sealer.rekey().unwrap();
            }
        }
        assert_eq!(stored, values, "{cipher}");
    }
}

/// A counter that shares the low 32 bits of its store number with another one has another nonce.
#[test]
fn nonce_has_all_bits_of_generation_and_store_number() {
    for counter in [0, u64::MAX].into_iter().chain((0..64).map(|bit| 1 << bit)) {
        let bytes = nonce(counter);
        let generation = u32::from_be_bytes(bytes[..4].try_into().unwrap());
        let store = u64::from_be_bytes(bytes[4..].try_into().unwrap());
        assert_eq!((u64::from(generation), store), (counter >> 48, counter & ((1 << 48) - 1)));
    }
}

fn sealed_zeros(sealer: &Sealer) -> Seal {
    sealer.seal(0, &[0; 16], &mut [0; 16]).unwrap()
}

#[test]
fn key_is_replaced_after_its_number_of_stores() {
    let mut sealer = Sealer::new(Cipher::default()).unwrap();
    assert_eq!(sealer.seals_per_key, 1 << 36);
    sealer.seals_per_key = 3;
    let counters: Vec<_> =
        (0..7).map(|_| sealed_zeros(&sealer)).map(|s| (s.generation(), s.store())).collect();
    assert_eq!(counters, [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1)]);
    assert_eq!(sealer.statistics().keys, 3);
}

#[test]
fn failed_replacement_keeps_the_key_and_is_tried_again() {
    let mut sealer = Sealer::new(Cipher::default()).unwrap();
    sealer.seals_per_key = 2;
    sealer.random = no_randomness;
    assert!((1..=4).all(|store| sealed_zeros(&sealer).counter == store));
    assert!(matches!(sealer.rekey(), Err(Error::Random(_))));
    sealer.random = kernel_random;
    assert_eq!(sealed_zeros(&sealer).counter, 5);
    assert_eq!(sealed_zeros(&sealer).counter, 1 << 48 | 1);
}

#[test]
fn key_is_replaced_after_a_day() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let day = 24 * 60 * 60;
    let generation_at = |second| {
        sealer.tick(Duration::from_secs(second)).unwrap();
        sealed_zeros(&sealer).generation()
    };
    let start = 1_000_000;
    assert_eq!(generation_at(start), 0);
    assert_eq!(generation_at(start + day - 1), 0);
    assert_eq!(generation_at(start - 1), 0, "a clock that goes back");
    assert_eq!(generation_at(start + day), 1);
    assert_eq!(generation_at(start + day + 60), 1);
    assert_eq!(generation_at(start + 2 * day + 59), 1);
    assert_eq!(generation_at(start + 2 * day + 60), 2);
    sealer.rekey().unwrap();
    assert_eq!(generation_at(start + 3 * day + 60), 3, "a replaced key is as old as itself");
}

#[test]
fn sealing_ends_with_the_numbers_of_a_key() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    sealer.keys.current().unwrap().set_stores((1 << 48) - 3);
    let mut sealer = sealer;
    sealer.random = no_randomness;
    assert_eq!(sealed_zeros(&sealer).store(), (1 << 48) - 2);
    assert_eq!(sealed_zeros(&sealer).store(), (1 << 48) - 1);
    let mut sealed = [7; 16];
    for _ in 0..3 {
        assert!(matches!(sealer.seal(0, &[0; 16], &mut sealed), Err(Error::Nonces)));
        assert_eq!(sealed, [7; 16]);
    }
    sealer.random = kernel_random;
    sealer.rekey().unwrap();
    assert_eq!(sealed_zeros(&sealer).counter, 1 << 48 | 1);
}

#[test]
fn sealer_without_randomness_is_an_error() {
    let error = Sealer::with_random(Cipher::default(), no_randomness).unwrap_err();
    assert!(matches!(error, Error::Random(_)), "{error}");
}

#[test]
fn statistics_count_and_bound_the_memory() {
    let sealer = Sealer::new(Cipher::Aes128Gcm).unwrap();
    let first = sealer.statistics();
    assert_eq!(first, Statistics { keys: 1, bytes: first.bytes, ..Statistics::default() });
    assert!(first.bytes < 24 << 10, "{first:?}");
    let mut sealed = [0; 16];
    let seal = sealer.seal(1, &[3; 16], &mut sealed).unwrap();
    sealer.open(1, &seal, &sealed, &mut [0; 16]).unwrap();
    sealer.open(2, &seal, &sealed, &mut [0; 16]).unwrap_err();
    sealer.rekey().unwrap();
    let now = sealer.statistics();
    let bytes = first.bytes + HEAP_BYTES;
    assert_eq!(now, Statistics { seals: 1, opens: 1, tampered: 1, keys: 2, bytes });
    sealer.forget(&seal);
    assert_eq!(sealer.statistics().keys, 1);
}

#[test]
fn wiped_sealer_neither_seals_nor_opens() {
    let mut sealer = Sealer::new(Cipher::default()).unwrap();
    let mut sealed = [0; 16];
    let seal = sealer.seal(1, &[3; 16], &mut sealed).unwrap();
    sealer.wipe();
    let mut plain = [9; 16];
    assert_eq!(sealer.open(1, &seal, &sealed, &mut plain), Err(Tampered));
    assert_eq!(plain, [0; 16]);
    assert!(matches!(sealer.seal(1, &[3; 16], &mut sealed), Err(Error::Wiped)));
    assert!(matches!(sealer.rekey(), Err(Error::Wiped)));
    assert!(sealer.tick(Duration::ZERO).is_ok());
    sealer.forget(&seal);
    assert_eq!(sealer.statistics().keys, 0);
}

#[test]
fn messages_show_no_key() {
    let sealer = Sealer::with_random(Cipher::default(), pattern).unwrap();
    assert_eq!(format!("{sealer:?}"), "Sealer { cipher: Aes256Gcm, .. }");
}
