//! CRC-32 of payloads whose length is a path MTU, computed during the copy or without a copy.
//!
//! A packet's payload is copied out of memory that other processes may change, so the CRC must be
//! computed over the copied bytes. Copy and CRC are one pass: each byte is loaded once.
//!
//! ```text
//!   payload   |  32 bytes  |  32  |  32  |  32  | ...   loaded, stored to the packet, and added to
//!                                                       one of four registers, each first
//!                                                       multiplied by x^1024
//!   Sum       128 bits with the same remainder as the payload
//!   CRC       CRC of the bytes before the payload, times x^(8 times its length), plus the sum,
//!             modulo the polynomial
//! ```
//!
//! The bytes before the payload are therefore not needed during the copy. The CPU must have
//! carry-less multiplication (VPCLMULQDQ: Intel since 2019, AMD since 2020). Without it there is no
//! [`Sum`], and CRCs are computed over whole packets.
//!
//! Bits are reflected: the first byte's lowest bit has the highest power. The method is that of V.
//! Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel,
//! 2009.

/// CRC-32's polynomial without its highest power; the most significant bit is the coefficient of
/// x^0.
pub(crate) const POLYNOMIAL: u32 = 0xedb8_8320;
/// The constant polynomial 1.
pub(crate) const ONE: u32 = 1 << 31;

/// Returns the product of two polynomials, modulo CRC-32's.
pub(crate) const fn times(mut a: u32, b: u32) -> u32 {
    let (mut product, mut bit) = (0, ONE);
    while bit != 0 {
        if b & bit != 0 {
            product ^= a;
        }
        // a times x
        a = (a >> 1) ^ if a & 1 != 0 { POLYNOMIAL } else { 0 };
        bit >>= 1;
    }
    product
}

/// Returns the `n`th power of a polynomial, modulo CRC-32's.
pub(crate) const fn power(mut square: u32, mut n: u64) -> u32 {
    let mut power = ONE;
    while n > 0 {
        if n & 1 != 0 {
            power = times(power, square);
        }
        square = times(square, square);
        n >>= 1;
    }
    power
}

/// Maximum length of the head that [`Sum::crc`] takes: BTH, RETH and immediate data.
pub(crate) const HEAD_MAX: usize = 32;

/// The payload's contribution to the CRC of a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    /// An integer, so that it is passed in registers. A value that is stored in two parts and
    /// loaded as one would wait for all earlier stores, including those of the payload's copy.
    bits: u128,
    /// Index of the payload's length in [`LENGTHS`].
    length: u8,
}

/// Payload lengths that have sums: the path MTUs.
pub(crate) const LENGTHS: [usize; 5] = [256, 512, 1024, 2048, 4096];

impl Sum {
    /// Computes the sum of `bytes`. `None` if the length is no path MTU, or the CPU has no
    /// carry-less multiplication.
    #[inline]
    pub fn of(bytes: &[u8]) -> Option<Sum> {
        let from = bytes.as_ptr();
        // SAFETY: the bytes are readable, and nothing is written.
        unsafe { x86::sum::<false>(std::ptr::null_mut(), from, bytes.len()) }
    }

    /// Copies `len` bytes from `from` to `to` and returns their sum. If the result is `None`,
    /// nothing was copied.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for `len` bytes; they do not overlap. The bytes at
    /// `from` may change during the call: each byte is loaded once.
    #[inline]
    pub unsafe fn copying(to: *mut u8, from: *const u8, len: usize) -> Option<Sum> {
        // SAFETY: the caller's guarantee.
        unsafe { x86::sum::<true>(to, from, len) }
    }

    /// Length of the payload in bytes.
    #[inline]
    pub fn len(self) -> usize {
        LENGTHS[self.length as usize]
    }

    /// Returns the CRC of bytes whose CRC is `before`, followed by `head` and the payload. `head`
    /// has 8 to [`HEAD_MAX`] bytes; `ones` is first ORed into its first 8 bytes.
    #[inline]
    pub fn crc(self, before: u32, head: &[u8], ones: u64) -> u32 {
        let [first, second] = match head.len() {
            // BTH; BTH with AETH, immediate data or a key; BTH with RETH.
            12 => halves::<12>(head, before, ones),
            16 => halves::<16>(head, before, ones),
            28 => halves::<28>(head, before, ones),
            len => {
                // Zeros in front of data do not change a CRC whose initial value is 0.
                let mut block = [0; HEAD_MAX];
                let place = &mut block[HEAD_MAX - len..];
                place.copy_from_slice(head);
                let first = place.first_chunk_mut().expect("a head has 8 bytes");
                *first = begun(u64::from_le_bytes(*first), before, ones).to_le_bytes();
                halves::<HEAD_MAX>(&block, !0, 0)
            }
        };
        // SAFETY: a sum exists, so this CPU has the required instructions.
        !unsafe { x86::reduce(self.bits, self.length, first, second) }
    }
}

/// Folds the preceding CRC into the first 8 bytes of a head, for a CRC with initial value 0.
#[inline]
fn begun(first: u64, before: u32, ones: u64) -> u64 {
    (first | ones) ^ !before as u64
}

/// Pads a head of `N` bytes, a multiple of 4, with leading zeros to [`HEAD_MAX`] bytes. Works in
/// registers, because a load that spans several smaller, pending stores has to wait for them.
#[inline]
fn halves<const N: usize>(head: &[u8], before: u32, ones: u64) -> [u128; 2] {
    const { assert!(N >= 8 && N <= HEAD_MAX && N.is_multiple_of(4)) }
    let head: &[u8; N] = head.first_chunk().expect("the head has N bytes");
    let (first, rest) = head.split_first_chunk().expect("8 bytes at least");
    let first = begun(u64::from_le_bytes(*first), before, ones);
    let mut words = [0; HEAD_MAX / 8];
    let at = HEAD_MAX - N;
    if N.is_multiple_of(8) {
        words[at / 8] = first;
        let (rest, _) = rest.as_chunks();
        for (word, bytes) in words[at / 8 + 1..].iter_mut().zip(rest) {
            *word = u64::from_le_bytes(*bytes);
        }
    } else {
        words[at / 8] = first << 32;
        words[at / 8 + 1] = first >> 32;
        let (half, rest) = rest.split_first_chunk().expect("4 bytes more");
        words[at / 8 + 1] |= (u32::from_le_bytes(*half) as u64) << 32;
        let (rest, _) = rest.as_chunks();
        for (word, bytes) in words[at / 8 + 2..].iter_mut().zip(rest) {
            *word = u64::from_le_bytes(*bytes);
        }
    }
    let [a, b, c, d] = words.map(u128::from);
    [a | b << 64, c | d << 64]
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::is_x86_feature_detected;
    use std::arch::x86_64::*;

    use super::{LENGTHS, ONE, POLYNOMIAL, Sum, power};

    /// Number of 32-byte registers, and bytes per round.
    const REGISTERS: usize = 4;
    const ROUND: usize = 32 * REGISTERS;

    /// Multipliers that advance the two halves of a register by `bits` bits. The product of two
    /// reflected polynomials is shifted by one bit, so one factor is shifted the other way.
    const fn ahead(bits: u64) -> [i64; 2] {
        let x = ONE >> 1;
        [(power(x, bits + 32) as i64) << 1, (power(x, bits - 32) as i64) << 1]
    }

    const AHEAD_128: [i64; 2] = ahead(128);
    const AHEAD_256: [i64; 2] = ahead(256);
    const AHEAD_ROUND: [i64; 2] = ahead(8 * ROUND as u64);
    const AHEAD_LENGTHS: [[i64; 2]; LENGTHS.len()] = {
        let mut all = [[0; 2]; LENGTHS.len()];
        let mut n = 0;
        while n < LENGTHS.len() {
            assert!(LENGTHS[n].is_multiple_of(ROUND) && LENGTHS[n].is_power_of_two());
            all[n] = ahead(8 * LENGTHS[n] as u64);
            n += 1;
        }
        all
    };
    /// x^64; and for Barrett's reduction the polynomial and the quotient of x^64 by it, each with
    /// its highest power.
    const POWER_64: i64 = (power(ONE >> 1, 64) as i64) << 1;
    const WHOLE: i64 = (POLYNOMIAL as i64) << 1 | 1;
    const QUOTIENT: i64 = quotient();

    const fn quotient() -> i64 {
        // Long division, highest power first; `rest` has the 32 bits below the current bit.
        let (mut quotient, mut rest, mut n) = (0i64, 0u32, 0);
        while n <= 32 {
            let one = n == 0 || rest & 1 != 0;
            if n > 0 {
                rest >>= 1;
            }
            if one {
                rest ^= POLYNOMIAL;
                quotient |= 1 << n;
            }
            n += 1;
        }
        quotient
    }

    /// Implements [`Sum::of`] and [`Sum::copying`].
    ///
    /// # Safety
    /// `from` is readable for `len` bytes; if `COPY`, `to` is writable for `len` bytes, and they do
    /// not overlap.
    #[inline]
    pub unsafe fn sum<const COPY: bool>(to: *mut u8, from: *const u8, len: usize) -> Option<Sum> {
        if !LENGTHS.contains(&len)
            || !is_x86_feature_detected!("vpclmulqdq")
            || !is_x86_feature_detected!("avx2")
            || !is_x86_feature_detected!("pclmulqdq")
        {
            return None;
        }
        // SAFETY: the CPU has the features; the length is a path MTU; the rest is the caller's
        // guarantee.
        let bits = unsafe { rounds::<COPY>(to, from, len) };
        let length = (len / LENGTHS[0]).trailing_zeros() as u8;
        Some(Sum { bits, length })
    }

    /// # Safety
    /// As of [`sum`]; `len` is a multiple of `ROUND` and not 0, and the CPU has these features.
    #[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq")]
    unsafe fn rounds<const COPY: bool>(to: *mut u8, from: *const u8, len: usize) -> u128 {
        let keys = pair256(AHEAD_ROUND);
        let mut registers = [_mm256_setzero_si256(); REGISTERS];
        let mut at = 0;
        while at < len {
            for (i, register) in registers.iter_mut().enumerate() {
                let place = at + 32 * i;
                // SAFETY: `place + 32 <= at + ROUND <= len`, as `len` is a multiple of `ROUND`.
                // Loads and stores may be unaligned. The loaded bytes may change at any moment, and
                // any value is valid.
                let bytes = unsafe {
                    let bytes = _mm256_loadu_si256(from.add(place).cast());
                    if COPY {
                        _mm256_storeu_si256(to.add(place).cast(), bytes);
                    }
                    bytes
                };
                *register = _mm256_xor_si256(ahead256(*register, keys), bytes);
            }
            at += ROUND;
        }
        let keys = pair256(AHEAD_256);
        let [first, rest @ ..] = registers;
        let last =
            rest.into_iter().fold(first, |sum, next| _mm256_xor_si256(ahead256(sum, keys), next));
        let (low, high) = (_mm256_castsi256_si128(last), _mm256_extracti128_si256::<1>(last));
        bits(_mm_xor_si128(ahead128(low, pair128(AHEAD_128)), high))
    }

    /// Returns the CRC register after a head, given as its two halves, and a payload, given as its
    /// sum and its index in [`LENGTHS`]. The initial value is 0.
    ///
    /// # Safety
    /// The CPU has the features that [`sum`] checks.
    #[target_feature(enable = "avx2,pclmulqdq")]
    pub unsafe fn reduce(sum: u128, length: u8, first: u128, second: u128) -> u32 {
        let head = _mm_xor_si128(ahead128(register(first), pair128(AHEAD_128)), register(second));
        let keys = pair128(AHEAD_LENGTHS[length as usize]);
        let remainder = _mm_xor_si128(ahead128(head, keys), register(sum));
        // Reduces 128 bits, with 32 zeros appended, to 96, to 64, then by Barrett's method.
        let low32 = _mm_set_epi32(0, 0, 0, -1);
        let remainder = _mm_xor_si128(
            _mm_clmulepi64_si128::<0x10>(remainder, pair128(AHEAD_128)),
            _mm_srli_si128::<8>(remainder),
        );
        let remainder = _mm_xor_si128(
            _mm_clmulepi64_si128::<0x00>(
                _mm_and_si128(remainder, low32),
                _mm_set_epi64x(0, POWER_64),
            ),
            _mm_srli_si128::<4>(remainder),
        );
        let keys = _mm_set_epi64x(QUOTIENT, WHOLE);
        let times = _mm_clmulepi64_si128::<0x10>(_mm_and_si128(remainder, low32), keys);
        let over = _mm_clmulepi64_si128::<0x00>(_mm_and_si128(times, low32), keys);
        _mm_extract_epi32::<1>(_mm_xor_si128(remainder, over)) as u32
    }

    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq")]
    fn ahead256(register: __m256i, keys: __m256i) -> __m256i {
        _mm256_xor_si256(
            _mm256_clmulepi64_epi128::<0x00>(register, keys),
            _mm256_clmulepi64_epi128::<0x11>(register, keys),
        )
    }

    #[inline]
    #[target_feature(enable = "sse2,pclmulqdq")]
    fn ahead128(register: __m128i, keys: __m128i) -> __m128i {
        _mm_xor_si128(
            _mm_clmulepi64_si128::<0x00>(register, keys),
            _mm_clmulepi64_si128::<0x11>(register, keys),
        )
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    fn pair128([low, high]: [i64; 2]) -> __m128i {
        _mm_set_epi64x(high, low)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn pair256([low, high]: [i64; 2]) -> __m256i {
        _mm256_set_epi64x(high, low, high, low)
    }

    #[inline]
    #[target_feature(enable = "sse4.1")]
    fn bits(register: __m128i) -> u128 {
        let [low, high] = [_mm_extract_epi64::<0>(register), _mm_extract_epi64::<1>(register)];
        low as u64 as u128 | (high as u64 as u128) << 64
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    fn register(bits: u128) -> __m128i {
        _mm_set_epi64x((bits >> 64) as i64, bits as i64)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod x86 {
    use super::Sum;

    /// Returns `None` and copies nothing: other CPUs compute CRCs over whole packets.
    ///
    /// # Safety
    /// No requirement; unsafe only because the function for x86-64 is.
    pub unsafe fn sum<const COPY: bool>(_: *mut u8, _: *const u8, _: usize) -> Option<Sum> {
        None
    }

    /// # Safety
    /// No requirement. The function takes a sum, and no sum exists on this CPU.
    pub unsafe fn reduce(_: u128, _: u8, _: u128, _: u128) -> u32 {
        unreachable!("no sum is made")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn sums_give_the_crcs_of_whole_packets() {
        if Sum::of(&[0; 256]).is_none() {
            eprintln!("not run: this CPU has no carry-less multiplication of 256 bits");
            return;
        }
        let all = bytes(9000);
        for len in LENGTHS {
            for head in [8, 9, 12, 13, 16, 20, 28, HEAD_MAX] {
                for at in [0, 1, 31, 77] {
                    let (head, payload) = (&all[at..at + head], &all[at + head..][..len]);
                    let mut hasher = crc32fast::Hasher::new_with_initial(0x1234_5678);
                    hasher.update(head);
                    hasher.update(payload);
                    let want = hasher.finalize();
                    let sum = Sum::of(payload).expect("a path MTU");
                    assert_eq!(
                        sum.crc(0x1234_5678, head, 0),
                        want,
                        "{} and {len} bytes",
                        head.len()
                    );
                    let mut copy = vec![0; len + 40];
                    // SAFETY: a part of `copy` that is as long as the payload.
                    let sum = unsafe {
                        Sum::copying(copy[at % 40..].as_mut_ptr(), payload.as_ptr(), len)
                    };
                    assert_eq!(sum.expect("likewise").crc(0x1234_5678, head, 0), want);
                    assert_eq!(copy[at % 40..][..len], *payload);
                    assert!(copy[..at % 40].iter().chain(&copy[at % 40 + len..]).all(|b| *b == 0));
                }
            }
        }
    }

    #[test]
    fn other_lengths_have_no_sum() {
        let all = bytes(8192);
        for len in [0, 1, 64, 128, 255, 257, 384, 4095, 4097, 8192] {
            assert!(Sum::of(&all[..len]).is_none(), "{len} bytes");
            let mut copy = vec![0; len];
            // SAFETY: `copy` is `len` bytes long.
            let sum = unsafe { Sum::copying(copy.as_mut_ptr(), all.as_ptr(), len) };
            assert!(sum.is_none() && copy.iter().all(|b| *b == 0), "{len} bytes");
        }
    }
}
