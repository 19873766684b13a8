//! Authentication of packets between two NICs that share a secret.
//!
//! ```text
//! plain packet           BTH | headers | payload | pad | ICRC (4)
//! authenticated packet   BTH | headers | payload | pad | counter (8) | tag (12)
//! ```
//!
//! - The counter is big-endian. The sender never uses a counter twice on a connection, also not for
//!   retransmissions, so that no nonce repeats under one key.
//! - The tag is the first 12 bytes of AES-128-GCM's tag (NIST SP 800-38D) for an empty plaintext.
//!   The nonce is four zero bytes and the counter; the additional data is the packet up to the
//!   counter.
//! - IP and UDP headers are not covered, because the key is specific to the two QPs and the
//!   direction.
//!
//! [`PairSecret`] is the secret of two QPs. Keys and first PSNs of both directions are derived from
//! it (HMAC-SHA256), so that no other QP, and not the other direction, has the same ones.

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::constant_time::verify_slices_are_equal;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use verbs::{PairSecret, Psn, Qpn, SecretSide};

/// Bytes of the counter.
const COUNTER: usize = 8;
/// Bytes of a nonce.
const NONCE: usize = 12;
/// Bytes of the tag.
const TAG: usize = 12;
/// Bytes after the padding of an authenticated packet.
pub const TRAILER: usize = COUNTER + TAG;

/// Maximum distance of a packet's counter behind the highest counter that was received.
///
/// Older packets are rejected, so that a recorded packet cannot be replayed when its PSN comes
/// again after a wrap around. A packet advances the PSN by at most one READ segment, which is less
/// than a window (960 KiB: 3,840 PSNs at the smallest path MTU). So 2,048 counters span less than
/// half of the PSN space, in which the transport recognizes a replayed packet as a duplicate.
const BEHIND_MAX: u64 = 2048;

const LABEL: &[u8] = b"granary RoCEv2 direction 1";

/// The sealer of packets from the QP `here` to the QP `there`, for programs that build packets
/// themselves. `None` if the packets are not authenticated.
pub fn sealer(secret: &PairSecret, here: Qpn, there: Qpn) -> Option<Sealer> {
    let (out, _) = directions(secret, here, there).keys?;
    Some(Sealer::new(out, 0))
}

/// The first PSN of packets from the QP `here` to the QP `there`, for the same programs.
pub fn first_psn(secret: &PairSecret, here: Qpn, there: Qpn) -> Psn {
    directions(secret, here, there).out_psn
}

/// Keys and first PSNs of the connection between the QP `here` and the QP `there`.
pub(crate) fn directions(secret: &PairSecret, here: Qpn, there: Qpn) -> Directions {
    let asking = secret.side == SecretSide::Asking;
    let (out_key, out_psn) = direction(secret, asking, here, there);
    let (in_key, in_psn) = direction(secret, !asking, there, here);
    let keys = secret.authenticated.then(|| (Key::new(&out_key), Key::new(&in_key)));
    Directions { out_psn, in_psn, keys }
}

fn direction(secret: &PairSecret, from_asking: bool, from: Qpn, to: Qpn) -> ([u8; 16], Psn) {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(&secret.bytes).expect("HMAC takes keys of any length");
    mac.update(LABEL);
    mac.update(&[from_asking as u8]);
    mac.update(&from.raw().to_be_bytes());
    mac.update(&to.raw().to_be_bytes());
    let bytes: [u8; 32] = mac.finalize().into_bytes().into();
    let (key, rest) = bytes.split_first_chunk().expect("32 bytes are more than 16");
    let [a, b, c, d] = *rest.first_chunk().expect("16 bytes are more than 4");
    (*key, Psn::new(u32::from_be_bytes([a, b, c, d])))
}

/// Keys and first PSNs of a connection's two directions.
pub(crate) struct Directions {
    pub out_psn: Psn,
    pub in_psn: Psn,
    /// Keys of sent and of received packets, or `None` if packets have an ICRC.
    pub keys: Option<(Key, Key)>,
}

/// The key of one direction of a connection.
pub(crate) struct Key(LessSafeKey);

impl Key {
    fn new(bytes: &[u8; 16]) -> Self {
        let key = UnboundKey::new(&AES_128_GCM, bytes).expect("a key of this length is a key");
        Self(LessSafeKey::new(key))
    }

    #[inline]
    fn tag(&self, counter: [u8; COUNTER], packet: &[u8]) -> [u8; TAG] {
        let mut nonce = [0; NONCE];
        nonce[NONCE - COUNTER..].copy_from_slice(&counter);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self.0.seal_in_place_separate_tag(nonce, Aad::from(packet), &mut []);
        let tag = tag.expect("a packet is shorter than GCM's limit");
        *tag.as_ref().first_chunk().expect("GCM's tag has 16 bytes")
    }

    #[inline]
    fn is_tag(&self, counter: [u8; COUNTER], packet: &[u8], tag: &[u8; TAG]) -> bool {
        // The library verifies whole tags only, and also by computing the tag: the cost is the
        // same.
        verify_slices_are_equal(&self.tag(counter, packet), tag).is_ok()
    }
}

/// Authenticates the packets that a connection sends.
pub struct Sealer {
    key: Key,
    /// The counter of the last packet.
    last: u64,
}

impl Sealer {
    /// Makes a sealer whose first packet has the counter `last + 1`.
    pub(crate) fn new(key: Key, last: u64) -> Self {
        Self { key, last }
    }

    /// The counter of the last packet.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Writes counter and tag into the last [`TRAILER`] bytes of `packet`.
    #[inline]
    pub fn seal(&mut self, packet: &mut [u8]) {
        let (inside, trailer) =
            packet.split_last_chunk_mut::<TRAILER>().expect("a packet has a trailer");
        // Does not overflow within half a million years at a million packets per second.
        self.last += 1;
        let counter = self.last.to_be_bytes();
        trailer[..COUNTER].copy_from_slice(&counter);
        trailer[COUNTER..].copy_from_slice(&self.key.tag(counter, inside));
    }
}

/// Reason for which a packet is rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The tag does not match the packet.
    Forged,
    /// The counter is too far behind the highest one.
    Old,
}

/// Checks the packets that a connection receives.
pub(crate) struct Opener {
    key: Key,
    /// The highest counter of a packet with the right tag.
    highest: u64,
}

impl Opener {
    pub fn new(key: Key) -> Self {
        Self { key, highest: 0 }
    }

    /// Verifies that `packet` comes from the peer. A rejected packet changes no state.
    #[inline]
    pub fn check(&mut self, packet: &[u8]) -> Result<(), Refused> {
        let (inside, trailer) = packet.split_last_chunk::<TRAILER>().ok_or(Refused::Forged)?;
        let (counter, tag) = trailer.split_first_chunk::<COUNTER>().expect("a trailer is longer");
        let number = u64::from_be_bytes(*counter);
        if number.saturating_add(BEHIND_MAX) < self.highest {
            return Err(Refused::Old);
        }
        let tag = tag.first_chunk().expect("a trailer has a tag after the counter");
        if !self.key.is_tag(*counter, inside, tag) {
            return Err(Refused::Forged);
        }
        self.highest = self.highest.max(number);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(side: SecretSide) -> PairSecret {
        PairSecret { bytes: [7; PairSecret::BYTES], side, authenticated: true }
    }

    /// The two ends of a connection between the QPs 0x11 and 0x22.
    fn ends() -> [Directions; 2] {
        let (a, b) = (Qpn::new(0x11), Qpn::new(0x22));
        [
            directions(&secret(SecretSide::Asking), a, b),
            directions(&secret(SecretSide::Asked), b, a),
        ]
    }

    fn pair() -> (Sealer, Opener) {
        let [one, other] = ends();
        let (out, _) = one.keys.unwrap();
        let (_, into) = other.keys.unwrap();
        (Sealer::new(out, 0), Opener::new(into))
    }

    #[test]
    fn sealer_has_key_and_psn_of_its_direction() {
        let (a, b) = (Qpn::new(0x11), Qpn::new(0x22));
        let [one, other] = ends();
        let (asking, asked) = (secret(SecretSide::Asking), secret(SecretSide::Asked));
        assert_eq!(first_psn(&asking, a, b), one.out_psn);
        assert_eq!(first_psn(&asked, b, a), other.out_psn);
        assert_ne!(one.out_psn, other.out_psn);
        let mut packet = vec![7; 40 + TRAILER];
        sealer(&asking, a, b).unwrap().seal(&mut packet);
        let (_, into) = other.keys.unwrap();
        assert!(Opener::new(into).check(&packet).is_ok());
        let plain = PairSecret { authenticated: false, ..asking };
        assert!(sealer(&plain, a, b).is_none());
    }

    #[test]
    fn tags_match_the_gcm_test_vector() {
        // The GCM specification's test case 1: key and nonce of zeros, no plaintext, no data.
        let key = Key::new(&[0; 16]);
        let tag = [0x58, 0xe2, 0xfc, 0xce, 0xfa, 0x7e, 0x30, 0x61, 0x36, 0x7f, 0x1d, 0x57];
        assert_eq!(key.tag([0; 8], &[]), tag);
        assert!(key.is_tag([0; 8], &[], &tag));
    }

    #[test]
    fn each_end_opens_packets_of_the_other_end() {
        let [one, other] = ends();
        assert_eq!((one.out_psn, one.in_psn), (other.in_psn, other.out_psn));
        assert_ne!(one.out_psn, one.in_psn);
        for (from, to) in [(&one, &other), (&other, &one)] {
            let keys = |d: &Directions| {
                let (out, into) = d.keys.as_ref().unwrap();
                (out.tag([1; 8], b"packet"), into.tag([1; 8], b"packet"))
            };
            assert_eq!(keys(from).0, keys(to).1);
            assert_ne!(keys(from).0, keys(from).1);
        }
        let elsewhere = directions(&secret(SecretSide::Asking), Qpn::new(0x11), Qpn::new(0x23));
        assert_ne!(one.out_psn, elsewhere.out_psn);
        let plain = PairSecret { authenticated: false, ..secret(SecretSide::Asking) };
        let plain = directions(&plain, Qpn::new(0x11), Qpn::new(0x22));
        assert!(plain.keys.is_none() && plain.out_psn == one.out_psn);
    }

    #[test]
    fn equal_qp_numbers_have_distinct_directions() {
        let n = Qpn::new(0x11);
        let [one, other] =
            [SecretSide::Asking, SecretSide::Asked].map(|side| directions(&secret(side), n, n));
        assert_ne!(one.out_psn, one.in_psn);
        assert_eq!((one.out_psn, one.in_psn), (other.in_psn, other.out_psn));
    }

    #[test]
    fn packet_with_any_flipped_bit_is_rejected() {
        for len in [0, 1, 12, 16, 60] {
            let (mut sealer, mut opener) = pair();
            let mut packet: Vec<u8> = (0..len as u8).chain([0; TRAILER]).collect();
            sealer.seal(&mut packet);
            for bit in 0..8 * packet.len() {
                let mut spoilt = packet.clone();
                spoilt[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(opener.check(&spoilt), Err(Refused::Forged), "{len} bytes, bit {bit}");
            }
            assert_eq!(opener.check(&packet), Ok(()));
            assert_eq!(opener.check(&packet[1..]), Err(Refused::Forged));
            assert_eq!(opener.check(&[]), Err(Refused::Forged));
        }
    }

    #[test]
    fn packet_is_rejected_beyond_the_replay_window() {
        let (mut sealer, mut opener) = pair();
        let mut packets = vec![[0; 12 + TRAILER]; BEHIND_MAX as usize + 2];
        packets.iter_mut().for_each(|packet| sealer.seal(packet));
        assert_eq!(opener.check(packets.last().unwrap()), Ok(()));
        assert_eq!(opener.check(&packets[1]), Ok(()));
        assert_eq!(opener.check(&packets[0]), Err(Refused::Old));
        // A forged packet with the highest counter moves nothing.
        let mut forged = packets[1];
        forged[12..20].fill(0xff);
        assert_eq!(opener.check(&forged), Err(Refused::Forged));
        assert_eq!(opener.check(&packets[1]), Ok(()));
    }

    #[test]
    fn retransmitted_packet_has_a_new_counter() {
        let (mut sealer, _) = pair();
        let [mut a, mut b] = [[9; 12 + TRAILER]; 2];
        sealer.seal(&mut a);
        sealer.seal(&mut b);
        assert_ne!(a[12..], b[12..], "a retransmission has a new counter");
        assert_eq!(sealer.last(), 2);
    }
}
