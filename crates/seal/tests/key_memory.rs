//! Keys leave the memory of the process. The only test of its process, so that no other code has
//! copies of the key.

#![cfg(target_arch = "x86_64")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use seal::{Cipher, Sealer};

const KEY_BYTES: usize = 32;

/// Byte of the key. The key as a whole is nowhere in this program.
fn byte(at: usize) -> u8 {
    (at as u8).wrapping_mul(89).wrapping_add(23) ^ 0x5c
}

fn pattern(bytes: &mut [u8]) -> std::io::Result<()> {
    let is_key = bytes.len() == KEY_BYTES;
    for (at, place) in bytes.iter_mut().enumerate() {
        *place = if is_key { byte(at) } else { at as u8 };
    }
    Ok(())
}

/// Counts the copies of the key in the writable memory of this process, which the kernel reads.
/// `buffer` itself does not count.
fn copies_of_key(buffer: &mut [u8]) -> usize {
    let memory = File::open("/proc/self/mem").unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let own = buffer.as_ptr() as u64..buffer.as_ptr() as u64 + buffer.len() as u64;
    let mut copies = 0;
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        // Chunks overlap, so that no copy lies across two of them.
        let step = buffer.len() - KEY_BYTES + 1;
        for chunk in (start..end).step_by(step) {
            let len = buffer.len().min((end - chunk) as usize);
            let Ok(len) = memory.read_at(&mut buffer[..len], chunk) else { continue };
            for at in 0..(len + 1).saturating_sub(KEY_BYTES) {
                let found = (0..KEY_BYTES).all(|i| buffer[at + i] == byte(i));
                copies += usize::from(found && !own.contains(&(chunk + at as u64)));
            }
        }
    }
    buffer.fill(0);
    copies
}

#[test]
fn keys_leave_memory() {
    if !std::arch::is_x86_feature_detected!("aes") {
        println!("skipped: without AES instructions, round keys are stored in another order");
        return;
    }
    let mut buffer = vec![0; 1 << 16];
    assert_eq!(copies_of_key(&mut buffer), 0);
    let mut sealer = Sealer::with_random(Cipher::Aes256Gcm, pattern).unwrap();
    assert_eq!(copies_of_key(&mut buffer), 1, "only the round keys of aws-lc");

    let mut sealed = vec![0; 4096];
    let seal = sealer.seal(1, &[1; 4096], &mut sealed).unwrap();
    sealer.open(1, &seal, &sealed, &mut [0; 4096]).unwrap();
    assert_eq!(copies_of_key(&mut buffer), 1, "sealing and opening copy no key");

    sealer.rekey().unwrap();
    assert_eq!(copies_of_key(&mut buffer), 2);
    sealer.forget(&seal);
    assert_eq!(copies_of_key(&mut buffer), 1, "the key of a generation that no seal names");
    sealer.wipe();
    assert_eq!(copies_of_key(&mut buffer), 0);
    let dropped = Sealer::with_random(Cipher::Aes256Gcm, pattern).unwrap();
    assert_eq!(copies_of_key(&mut buffer), 1);
    drop(dropped);
    assert_eq!(copies_of_key(&mut buffer), 0);
}
