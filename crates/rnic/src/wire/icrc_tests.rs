//! Comparison with a bit-by-bit CRC, and with a packet that scapy has built.

use super::*;

fn route(v6: bool) -> Route {
    let (source, destination) = match v6 {
        false => ("10.1.2.3:49153", "10.1.2.4:4791"),
        true => ("[fd00::1:2]:49153", "[fd00::9]:4791"),
    };
    Route::new(source.parse().unwrap(), destination.parse().unwrap())
}

#[test]
fn sealed_packet_passes_check_and_damage_fails() {
    for v6 in [false, true] {
        let mut packet: Vec<u8> = (0..64).collect();
        seal(&route(v6), &mut packet);
        assert!(check(&route(v6), &packet));
        for at in 0..packet.len() {
            packet[at] ^= 0x10;
            // The byte of congestion marks (FECN, BECN) is not covered.
            assert_eq!(check(&route(v6), &packet), at == 4, "byte {at}");
            packet[at] ^= 0x10;
        }
        let other = Route { identification: 7, ..route(v6) };
        assert_eq!(check(&other, &packet), v6);
        let port = Route { source: "10.1.2.3:49154".parse().unwrap(), ..route(v6) };
        assert!(!check(&port, &packet));
    }
    assert!(!check(&route(false), &[1, 2, 3]));
    assert_eq!(of(&route(false), &[0; 11]), None);
    seal(&route(false), &mut [0; 3]);
}

/// Reference: CRC-32 computed bit by bit.
fn crc(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= *byte as u32;
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
        }
    }
    !crc
}

#[test]
fn icrc_is_the_crc_of_the_masked_headers() {
    let packet: Vec<u8> = (100..141).collect();
    let mut whole = vec![0xff; 8];
    whole.extend([0x45, 0xff, 0, (20 + 8 + 41 + 4) as u8, 0, 9, 0, 0, 0xff, 17, 0xff, 0xff]);
    whole.extend([10, 1, 2, 3, 10, 1, 2, 4, 0xc0, 1, 0x12, 0xb7, 0, 53, 0xff, 0xff]);
    whole.extend(&packet);
    whole[8 + 20 + 8 + 4] = 0xff;
    let odd = Route { identification: 9, dont_fragment: false, ..route(false) };
    assert_eq!(of(&odd, &packet), Some(crc(&whole)));
}

#[test]
fn route_cache_yields_the_icrc_of_each_packet() {
    let bytes: Vec<u8> = (0..4200u32).map(|i| (i * 31) as u8).collect();
    for v6 in [false, true] {
        let mut icrcs = RouteIcrc::new(route(v6));
        for (len, identification) in
            [(4108, 0), (4108, 1), (4108, 14), (12, 2), (13, 0x8000), (4108, 0xffff), (64, 0x1234)]
        {
            let (packet, at) = (&bytes[..len], 8 + if v6 { 40 } else { 20 } + 8);
            let mut whole = vec![0xff; at];
            let one = Route { identification, ..route(v6) };
            let ip = &mut whole[8..];
            let below = (8 + len + 4) as u16;
            if v6 {
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&below.to_be_bytes());
                ip[6] = 17;
                ip[8..24].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2]);
                ip[24..40].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
            } else {
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&(20 + below).to_be_bytes());
                ip[4..6].copy_from_slice(&identification.to_be_bytes());
                ip[6..8].copy_from_slice(&[0x40, 0]);
                ip[9] = 17;
                ip[12..20].copy_from_slice(&[10, 1, 2, 3, 10, 1, 2, 4]);
            }
            whole[at - 8..at - 2].copy_from_slice(&[0xc0, 1, 0x12, 0xb7, 0, 0]);
            whole[at - 4..at - 2].copy_from_slice(&below.to_be_bytes());
            whole.extend(packet);
            whole[at + 4] = 0xff;
            assert_eq!(icrcs.of(identification, packet), Some(crc(&whole)), "{one:?}, {len} bytes");
            assert_eq!(of(&one, packet), Some(crc(&whole)));
        }
    }
}

/// A SEND ONLY of four bytes, built by scapy 2.5, from the BTH on.
#[test]
fn icrc_matches_scapy() {
    let packet = [
        0x04, 0x00, 0xff, 0xff, 0x00, 0x12, 0x34, 0x56, 0x80, 0x00, 0x00, 0x07, 0x61, 0x62, 0x63,
        0x64, 0xd4, 0xa8, 0xb6, 0xe8,
    ];
    assert!(check(&route(false), &packet));
}

#[test]
fn unidentified_check_accepts_any_identification() {
    let mut packet: Vec<u8> = (0..200u32).map(|i| (i * 37) as u8).collect();
    for identification in [0, 1, 2, 63, 0x100, 0x8000, 0xffff, 0x1234] {
        for len in [16, 17, 20, 64, 200] {
            let packet = &mut packet[..len];
            seal(&Route { identification, ..route(false) }, packet);
            assert!(check_unidentified(&route(false), packet), "{identification:#x}, {len} bytes");
            for at in (0..len).filter(|at| *at != 4) {
                packet[at] ^= 0x10;
                assert!(!check_unidentified(&route(false), packet), "{len} bytes, byte {at}");
                packet[at] ^= 0x10;
            }
        }
    }
    seal(&route(true), &mut packet);
    assert!(check_unidentified(&route(true), &packet));
    packet[20] ^= 1;
    assert!(!check_unidentified(&route(true), &packet));
    assert!(!check_unidentified(&route(false), &[1, 2, 3]));
}

#[test]
fn powers_of_x_have_inverses() {
    let x = ONE >> 1;
    let mut power = ONE;
    for n in 0..200 {
        assert_eq!(times(power, inverse_power(n)), ONE, "x^{n}");
        power = times(power, x);
    }
}

/// Exactly the ICRCs of the 65,536 identifications of a packet pass.
#[test]
fn unidentified_check_accepts_no_other_icrc() {
    let mut packet: Vec<u8> = (0..24).collect();
    let tail = packet.len() - ICRC;
    let sealed: std::collections::HashSet<[u8; ICRC]> = (0..=u16::MAX)
        .map(|identification| {
            seal(&Route { identification, ..route(false) }, &mut packet);
            *packet.last_chunk().unwrap()
        })
        .collect();
    assert_eq!(sealed.len(), 1 << 16);
    // A Weyl sequence: values spread evenly over all 2^32.
    for n in 0..1u32 << 17 {
        let icrc = n.wrapping_mul(0x9e37_79b9).to_le_bytes();
        packet[tail..].copy_from_slice(&icrc);
        let passes = check_unidentified(&route(false), &packet);
        assert_eq!(passes, sealed.contains(&icrc), "{icrc:x?}");
    }
}

/// The result does not depend on the split into headers and payload.
#[test]
fn icrc_is_right_for_every_packet_length() {
    let bytes: Vec<u8> = (0..4300u32).map(|i| (i * 29 + (i >> 8)) as u8).collect();
    // The ICRC covers these bytes before the packet. Two fields hold the length.
    let mut head = [0xff; 8 + 20 + 8];
    head[8..][..20].copy_from_slice(&[
        0x45, 0xff, 0, 0, 0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff, 10, 1, 2, 3, 10, 1, 2, 4,
    ]);
    head[28..32].copy_from_slice(&[0xc0, 1, 0x12, 0xb7]);
    for len in (BTH..600).chain((600..bytes.len()).step_by(13)).chain([1036, 2060, 4108]) {
        let below = (8 + len + 4) as u16;
        head[10..12].copy_from_slice(&(20 + below).to_be_bytes());
        head[32..34].copy_from_slice(&below.to_be_bytes());
        let mut whole = [&head[..], &bytes[..len]].concat();
        whole[head.len() + 4] = 0xff;
        assert_eq!(of(&route(false), &bytes[..len]), Some(crc(&whole)), "{len} bytes");
    }
}
