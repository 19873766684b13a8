//! LZF: literal runs of up to 32 bytes, and references of 3 to 264 bytes up to 8 KiB back.
//!
//! | first byte | then | meaning |
//! | --- | --- | --- |
//! | `000nnnnn` | n + 1 bytes | these bytes |
//! | `nnnooooo`, n below 7 | low byte of o | n + 2 bytes from o + 1 bytes back |
//! | `111ooooo` | m, low byte of o | m + 9 bytes from o + 1 bytes back |

/// Longest run of literal bytes.
const LITERALS_MAX: usize = 32;
const MATCH_MIN: usize = 3;
const MATCH_MAX: usize = 264;
/// Farthest distance of a reference.
const DISTANCE_MAX: usize = 1 << 13;

/// Decompresses `input` to exactly `len` bytes and adds them to `out`.
///
/// Returns false if the input is damaged; the added bytes are then undefined.
pub fn decompress(mut input: &[u8], len: usize, out: &mut Vec<u8>) -> bool {
    let begin = out.len();
    let end = begin.saturating_add(len);
    while let [control, rest @ ..] = input {
        let high = usize::from(control >> 5);
        if high == 0 {
            let Some((literals, rest)) = rest.split_at_checked(usize::from(*control) + 1) else {
                return false;
            };
            out.extend_from_slice(literals);
            input = rest;
        } else {
            let (more, rest) = match rest {
                [more, rest @ ..] if high == 7 => (usize::from(*more), rest),
                rest if high < 7 => (0, rest),
                _ => return false,
            };
            let [low, rest @ ..] = rest else { return false };
            let distance = (usize::from(control & 0x1f) << 8 | usize::from(*low)) + 1;
            if distance > out.len() - begin {
                return false;
            }
            repeat(out, distance, high + more + 2);
            input = rest;
        }
        if out.len() > end {
            return false;
        }
    }
    out.len() == end
}

/// Adds `len` bytes from `distance` bytes back, which may overlap the added ones.
fn repeat(out: &mut Vec<u8>, distance: usize, len: usize) {
    let from = out.len() - distance;
    let mut left = len;
    while left > 0 {
        let part = left.min(out.len() - from);
        out.extend_from_within(from..from + part);
        left -= part;
    }
}

/// Slots of the largest table.
const TABLE_BITS: u32 = 14;

/// Compresses. The output depends on the input only.
#[derive(Debug, Default)]
pub struct Compressor {
    /// Place of the latest three bytes of each hash, plus one.
    table: Vec<u32>,
}

impl Compressor {
    /// Compresses `input` and adds the result to `out`, if it has at most `most` bytes.
    ///
    /// Returns the number of bytes, or `None` if the result is longer; `out` is then unchanged.
    pub fn compress(&mut self, input: &[u8], most: usize, out: &mut Vec<u8>) -> Option<usize> {
        if input.len() > u32::MAX as usize - 1 {
            return None;
        }
        // A small input has a small table, because the table is cleared each time.
        let bits = (usize::BITS - input.len().leading_zeros()).clamp(6, TABLE_BITS);
        self.table.clear();
        self.table.resize(1 << bits, 0);
        let begin = out.len();
        let (mut at, mut literal) = (0, 0);
        while at + MATCH_MIN <= input.len() {
            match self.find(input, at, bits) {
                Some((distance, len)) => {
                    put_literals(&input[literal..at], out);
                    put_reference(distance, len, out);
                    at += len;
                    literal = at;
                }
                None => at += 1,
            }
            if out.len() - begin + (at - literal) > most {
                out.truncate(begin);
                return None;
            }
        }
        put_literals(&input[literal..], out);
        if out.len() - begin > most {
            out.truncate(begin);
            return None;
        }
        Some(out.len() - begin)
    }

    /// Returns distance and length of an earlier copy of the bytes at `at`.
    fn find(&mut self, input: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
        let three = u32::from_le_bytes([input[at], input[at + 1], input[at + 2], 0]);
        let slot = (three.wrapping_mul(0x9e37_79b1) >> (32 - bits)) as usize;
        let place = std::mem::replace(&mut self.table[slot], at as u32 + 1);
        let earlier = (place as usize).checked_sub(1)?;
        let distance = at - earlier;
        if distance > DISTANCE_MAX {
            return None;
        }
        let rest = &input[at..input.len().min(at + MATCH_MAX)];
        let len = rest.iter().zip(&input[earlier..]).take_while(|(a, b)| a == b).count();
        (len >= MATCH_MIN).then_some((distance, len))
    }
}

fn put_literals(bytes: &[u8], out: &mut Vec<u8>) {
    for run in bytes.chunks(LITERALS_MAX) {
        out.push(run.len() as u8 - 1);
        out.extend_from_slice(run);
    }
}

fn put_reference(distance: usize, len: usize, out: &mut Vec<u8>) {
    let (offset, coded) = (distance - 1, len - 2);
    let high = (offset >> 8) as u8;
    match coded {
        0..7 => out.push((coded as u8) << 5 | high),
        _ => out.extend([7 << 5 | high, (coded - 7) as u8]),
    }
    out.push(offset as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn round_trip(input: &[u8]) -> usize {
        let (mut packed, mut out) = (Vec::new(), b"before".to_vec());
        let most = input.len() + input.len() / 32 + 1;
        let len = Compressor::default().compress(input, most, &mut packed).unwrap();
        assert_eq!(len, packed.len());
        assert!(decompress(&packed, input.len(), &mut out));
        assert_eq!(&out[6..], input);
        len
    }

    #[test]
    fn repeated_bytes_are_compressed() {
        assert!(round_trip(&[b'a'; 10_000]) < 150);
        assert!(round_trip("abcdefgh".repeat(1000).as_bytes()) < 120);
        round_trip(b"");
        round_trip(b"ab");
        round_trip(&[[b'x'; 8200].as_slice(), b"abcabcabc", &[b'y'; 9000], b"abcabc"].concat());
    }

    #[test]
    fn references_reach_exactly_8_kib() {
        let len = |distance: usize| {
            let gap = vec![b'x'; distance - 6];
            round_trip(&[b"abcdef", &gap[..], b"abcdef"].concat())
        };
        // Beyond the distance, the letters stand for themselves.
        assert!(len(8193) >= len(8192) + 4);
    }

    #[test]
    fn output_depends_on_the_input_only() {
        let mut used = Compressor::default();
        let input = b"hello hello hello hello".repeat(20);
        used.compress(&[b'z'; 5000], 5000, &mut Vec::new());
        let (mut first, mut second) = (Vec::new(), Vec::new());
        used.compress(&input, 500, &mut first);
        Compressor::default().compress(&input, 500, &mut second);
        assert_eq!(first, second);
    }

    #[test]
    fn result_that_is_too_long_is_dropped() {
        let mut out = vec![7];
        assert_eq!(Compressor::default().compress(b"abcdefghijk", 8, &mut out), None);
        assert_eq!(out, [7]);
    }

    #[test]
    fn damaged_input_is_refused() {
        for (input, len) in [
            (&b"\x05abc"[..], 6),
            (b"\x00a\x20\x01", 4),
            (b"\xe0", 4),
            (b"\x00a\xe0\x00", 4),
            (b"\x00a\x20\x00", 3),
            (b"\x00a\x20\x00", 5),
            (b"", 1),
        ] {
            assert!(!decompress(input, len, &mut Vec::new()), "{input:?}");
        }
        assert!(decompress(b"\x00a\x20\x00", 4, &mut Vec::new()));
    }

    proptest::proptest! {
        #[test]
        fn compressed_bytes_are_decompressed(input in proptest::collection::vec(0..4_u8, 0..3000)) {
            round_trip(&input);
        }
    }
}
