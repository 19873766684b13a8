//! Only the content that was stored opens, and a refused content yields zeros.

use proptest::prelude::*;
use seal::{Cipher, Error, Seal, Sealer, Tampered};

const PAGE: usize = 4096;

fn page(number: u64) -> Vec<u8> {
    (0..PAGE as u64).map(|at| (at * 31 + number * 17) as u8).collect()
}

fn stored(sealer: &Sealer, place: u64, plain: &[u8]) -> (Seal, Vec<u8>) {
    let mut sealed = vec![0; plain.len()];
    let seal = sealer.seal(place, plain, &mut sealed).unwrap();
    (seal, sealed)
}

/// Opens by both ways, which must agree.
fn opened(sealer: &Sealer, place: u64, seal: &Seal, sealed: &[u8]) -> Option<Vec<u8>> {
    let mut plain = vec![0xee; sealed.len()];
    let result = sealer.open(place, seal, sealed, &mut plain);
    let mut raw = vec![0xdd; sealed.len()];
    // SAFETY: two vectors of this length.
    let raw_result =
        unsafe { sealer.open_raw(place, seal, sealed.as_ptr(), raw.as_mut_ptr(), sealed.len()) };
    assert_eq!((result, &plain), (raw_result, &raw));
    if result == Err(Tampered) {
        assert!(plain.iter().all(|&byte| byte == 0), "unverified bytes are visible");
    }
    result.ok().map(|()| plain)
}

#[test]
fn each_position_of_a_page_is_authenticated() {
    for cipher in Cipher::ALL {
        let sealer = Sealer::new(cipher).unwrap();
        let plain = page(1);
        let (seal, mut sealed) = stored(&sealer, 1, &plain);
        for at in 0..PAGE {
            let right = sealed[at];
            for wrong in [right ^ 1 << (at % 8), 0, 0xff] {
                sealed[at] = wrong;
                let content = opened(&sealer, 1, &seal, &sealed);
                assert_eq!(content.is_some(), wrong == right, "byte {at} is {wrong}");
            }
            sealed[at] = right;
        }
        assert_eq!(opened(&sealer, 1, &seal, &sealed), Some(plain));
    }
}

#[test]
fn each_bit_of_seal_and_place_is_authenticated() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let place = 0x0123_4567_89ab_cdef;
    let (seal, sealed) = stored(&sealer, place, &page(2));
    for bit in 0..128 {
        let mut wrong = seal;
        wrong.tag[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(opened(&sealer, place, &wrong, &sealed), None, "bit {bit} of the tag");
    }
    for bit in 0..64 {
        let wrong = Seal { counter: seal.counter ^ 1 << bit, ..seal };
        assert_eq!(opened(&sealer, place, &wrong, &sealed), None, "bit {bit} of the counter");
        assert_eq!(
            opened(&sealer, place ^ 1 << bit, &seal, &sealed),
            None,
            "bit {bit} of the place"
        );
    }
    assert!(opened(&sealer, place, &seal, &sealed).is_some());
}

#[test]
fn exchanged_contents_do_not_open() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let (a, sealed_a) = stored(&sealer, 1, &page(1));
    let (b, sealed_b) = stored(&sealer, 2, &page(2));
    assert_eq!(opened(&sealer, 1, &a, &sealed_b), None, "bytes of another place");
    assert_eq!(opened(&sealer, 1, &b, &sealed_b), None, "bytes and seal of another place");
    assert_eq!(opened(&sealer, 1, &b, &sealed_a), None, "the seal of another place");
    let stranger = Sealer::new(Cipher::default()).unwrap();
    let (c, sealed_c) = stored(&stranger, 1, &page(1));
    assert_eq!(c.counter, a.counter);
    assert_eq!(opened(&sealer, 1, &a, &sealed_c), None, "bytes of another process");
    assert_eq!(opened(&sealer, 1, &c, &sealed_c), None, "bytes and seal of another process");
}

#[test]
fn older_versions_do_not_open() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let mut versions = Vec::new();
    for version in 0..20 {
        // Equal contents in half of the versions: only the seal tells them apart.
        versions.push(stored(&sealer, 3, &page(version / 2)));
        if version % 7 == 6 {
            sealer.rekey().unwrap();
        }
    }
    for (now, (seal, _)) in versions.iter().enumerate() {
        for (then, (_, sealed)) in versions.iter().enumerate() {
            let content = opened(&sealer, 3, seal, sealed);
            assert_eq!(content.is_some(), now == then, "version {then} in place of {now}");
        }
    }
}

#[test]
fn other_lengths_do_not_open() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let (seal, sealed) = stored(&sealer, 4, &page(4));
    for len in [0, 1, 15, 16, 2048, PAGE - 16, PAGE - 1] {
        assert_eq!(opened(&sealer, 4, &seal, &sealed[..len]), None, "{len} bytes");
    }
    for more in [1, 16, PAGE] {
        let longer = [&sealed[..], &vec![0; more]].concat();
        assert_eq!(opened(&sealer, 4, &seal, &longer), None, "{more} bytes more");
    }
    let mut short = [7; 100];
    assert_eq!(sealer.open(4, &seal, &sealed, &mut short), Err(Tampered));
    assert_eq!(short, [0; 100]);
}

#[test]
fn seal_of_nothing_does_not_open() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    for seal in [Seal::default(), Seal { counter: 1 << 48, ..Seal::default() }] {
        assert_eq!(opened(&sealer, 0, &seal, &[]), None);
        assert_eq!(opened(&sealer, 0, &seal, &[0; 64]), None);
    }
}

#[test]
fn output_of_another_length_is_an_error() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let mut sealed = [7; 17];
    let error = sealer.seal(0, &[1; 16], &mut sealed).unwrap_err();
    assert!(matches!(error, Error::Length { plain: 16, sealed: 17 }), "{error}");
    assert_eq!(sealed, [0; 17]);
}

#[test]
fn forgotten_generation_does_not_open() {
    let sealer = Sealer::new(Cipher::default()).unwrap();
    let (old, sealed_old) = stored(&sealer, 5, &page(5));
    sealer.rekey().unwrap();
    let (new, sealed_new) = stored(&sealer, 5, &page(6));
    assert_eq!(opened(&sealer, 5, &old, &sealed_old), Some(page(5)));
    sealer.forget(&old);
    assert_eq!(opened(&sealer, 5, &old, &sealed_old), None);
    sealer.forget(&Seal::default());
    sealer.forget(&new);
    assert_eq!(opened(&sealer, 5, &new, &sealed_new), Some(page(6)), "the current key stays");
}

proptest! {
    #[test]
    fn any_length_opens_and_any_change_does_not(
        plain in prop::collection::vec(any::<u8>(), 0..3 * PAGE),
        place: u64,
        (at, change) in (any::<prop::sample::Index>(), 1..=u8::MAX),
        cipher in prop::sample::select(Cipher::ALL.to_vec()),
    ) {
        let sealer = Sealer::new(cipher).unwrap();
        let mut sealed = vec![0; plain.len()];
        // SAFETY: two vectors of this length.
        let seal = unsafe {
            sealer.seal_raw(place, plain.as_ptr(), sealed.as_mut_ptr(), plain.len()).unwrap()
        };
        prop_assert_eq!(opened(&sealer, place, &seal, &sealed), Some(plain.clone()));
        if plain.len() >= 16 {
            prop_assert_ne!(&sealed, &plain);
        }
        if !plain.is_empty() {
            sealed[at.index(plain.len())] ^= change;
            prop_assert_eq!(opened(&sealer, place, &seal, &sealed), None);
        }
    }
}
