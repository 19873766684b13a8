//! Opening of sealed bytes that a memory node returns.

use std::sync::LazyLock;

use seal::{Cipher, Seal, Sealer};

use crate::input::Input;

/// Contents that were stored: each place has two, of which the second is current.
struct Stored {
    sealer: Sealer,
    contents: Vec<(u64, Seal, Vec<u8>)>,
}

static STORED: LazyLock<Stored> = LazyLock::new(|| {
    let sealer = Sealer::new(Cipher::default()).expect("this machine has randomness");
    let mut contents = Vec::new();
    for number in 0..16 {
        let plain = content(number);
        let mut sealed = vec![0; plain.len()];
        let place = number as u64 / 2;
        let seal = sealer.seal(place, &plain, &mut sealed).expect("the key is new");
        contents.push((place, seal, sealed));
        if number == 7 {
            sealer.rekey().expect("this machine has randomness");
        }
    }
    Stored { sealer, contents }
});

/// Plaintext of a stored content.
fn content(number: usize) -> Vec<u8> {
    (0..number * 23).map(|at| (at + number) as u8).collect()
}

/// Chooses a place, a seal and bytes, each a stored or an arbitrary one, changes some bytes, and
/// opens them. They open only if they were stored together, and all other outputs are zeros.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let stored = &*STORED;
    let choose = |input: &mut Input| &stored.contents[usize::from(input.byte() % 16)];
    let mut place = choose(&mut input).0;
    let mut seal = choose(&mut input).1;
    let mut sealed = choose(&mut input).2.clone();
    let changes = input.byte();
    if changes & 1 != 0 {
        place ^= 1 << (input.byte() % 64);
    }
    if changes & 2 != 0 {
        seal.counter ^= 1 << (input.byte() % 64);
    }
    if changes & 4 != 0 {
        seal.tag[usize::from(input.byte() % 16)] ^= input.byte();
    }
    if changes & 8 != 0 && !sealed.is_empty() {
        let at = usize::from(input.short()) % sealed.len();
        sealed[at] ^= input.byte();
    }
    if changes & 16 != 0 {
        sealed.truncate(usize::from(input.short()));
    }
    if changes & 32 != 0 {
        let len = input.short();
        sealed.extend_from_slice(input.take(len.into()));
    }
    if changes & 64 != 0 {
        sealed.splice(.., input.take(usize::MAX).iter().copied());
    }
    check(stored, place, seal, &sealed);
}

fn check(stored: &Stored, place: u64, seal: Seal, sealed: &[u8]) {
    let mut plain = vec![0xee; sealed.len()];
    let opened = stored.sealer.open(place, &seal, sealed, &mut plain);
    let contents = &mut stored.contents.iter();
    match contents.position(|(p, s, bytes)| (*p, *s, &bytes[..]) == (place, seal, sealed)) {
        Some(number) => assert_eq!((opened, plain), (Ok(()), content(number))),
        None => {
            assert!(opened.is_err(), "bytes that were never stored");
            assert!(plain.iter().all(|&byte| byte == 0), "unverified bytes are visible");
        }
    }
}
