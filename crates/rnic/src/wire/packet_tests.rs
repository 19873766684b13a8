//! Round trips of every opcode, and arbitrary bytes as input of the parser.

use super::*;
use proptest::prelude::*;

const PAYLOAD: [u8; 4096] = {
    let mut bytes = [0; 4096];
    let mut i = 0;
    while i < 4096 {
        bytes[i] = (i * 7) as u8;
        i += 1;
    }
    bytes
};

fn remote() -> impl Strategy<Value = Remote> {
    (any::<u64>(), any::<u32>()).prop_map(|(addr, key)| Remote { addr, rkey: Key(key) })
}

fn reth() -> impl Strategy<Value = Reth> {
    (remote(), any::<u32>()).prop_map(|(at, len)| Reth { at, len })
}

fn aeth() -> impl Strategy<Value = Aeth> {
    let nak = prop_oneof![
        Just(Nak::Sequence),
        Just(Nak::InvalidRequest),
        Just(Nak::RemoteAccess),
        Just(Nak::RemoteOperation)
    ];
    let syndrome = prop_oneof![
        (0..32u8).prop_map(Syndrome::Ack),
        (0..32u8).prop_map(Syndrome::Rnr),
        nak.prop_map(Syndrome::Nak)
    ];
    (syndrome, 0..1u32 << 24).prop_map(|(syndrome, msn)| Aeth { syndrome, msn })
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![Just(Part::First), Just(Part::Middle), Just(Part::Last), Just(Part::Only)]
}

fn body() -> impl Strategy<Value = Body> {
    let notice = prop_oneof![
        Just(Notice::None),
        any::<u32>().prop_map(Notice::Imm),
        any::<u32>().prop_map(|k| Notice::Invalidate(Key(k)))
    ];
    let op = prop_oneof![
        (any::<u64>(), any::<u64>())
            .prop_map(|(compare, swap)| AtomicOp::CompareSwap { compare, swap }),
        any::<u64>().prop_map(|add| AtomicOp::FetchAdd { add })
    ];
    prop_oneof![
        (part(), notice).prop_map(|(part, notice)| Body::Send {
            part,
            notice: if part.ends() { notice } else { Notice::None }
        }),
        (part(), reth(), any::<Option<u32>>()).prop_map(|(part, reth, imm)| Body::Write {
            part,
            reth: part.begins().then_some(reth),
            imm: imm.filter(|_| part.ends())
        }),
        reth().prop_map(Body::Read),
        (part(), aeth()).prop_map(|(part, aeth)| Body::ReadResponse {
            part,
            aeth: (part != Part::Middle).then_some(aeth)
        }),
        aeth().prop_map(Body::Acknowledge),
        (aeth(), any::<u64>()).prop_map(|(aeth, old)| Body::AtomicAcknowledge { aeth, old }),
        (remote(), op).prop_map(|(at, op)| Body::Atomic { at, op }),
    ]
}

/// Valid packets, with the lengths of their payloads.
fn packet() -> impl Strategy<Value = (Packet<'static>, usize)> {
    let ids = (0..1u32 << 24, 0..1u32 << 24);
    (ids, any::<bool>(), any::<bool>(), body(), 0..=4096usize).prop_map(
        |((qpn, psn), ack_request, solicited, body, len)| {
            let len = match body.payload() {
                Carries::Nothing => 0,
                Carries::Something => len.max(1),
                Carries::Anything => len,
            };
            let full = body.part().is_some_and(|p| !p.ends());
            let len = if full { len.next_multiple_of(4) } else { len };
            let packet = Packet {
                qpn: Qpn::new(qpn),
                psn: Psn::new(psn),
                ack_request,
                solicited,
                body,
                payload: &PAYLOAD[..len],
            };
            (packet, len)
        },
    )
}

proptest! {
    #[test]
    fn encoded_packet_parses_to_itself((packet, len) in packet()) {
        let mut bytes = [0xaa; PACKET_MAX];
        let total = packet.encode(&mut bytes);
        prop_assert!(total.is_multiple_of(4) && total <= BTH + 28 + len + TRAILER_MAX);
        prop_assert_eq!(Packet::parse(&bytes[..total]), Ok(packet));
        // A truncated packet is not parsed as the same packet.
        for cut in [1, 4, total / 2, total] {
            prop_assert_ne!(Packet::parse(&bytes[..total - cut]), Ok(packet));
        }
    }

    #[test]
    fn arbitrary_bytes_parse_or_are_rejected(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        if let Some(code) = bytes.first_mut() {
            *code &= 0x1f;
        }
        if let Some(flags) = bytes.get_mut(1) {
            *flags &= 0xf0;
        }
        if let Some(pkey) = bytes.get_mut(2..4) {
            pkey.fill(0xff);
        }
        if let Ok(packet) = Packet::parse(&bytes) {
            let mut again = [0; PACKET_MAX];
            let total = packet.encode(&mut again);
            prop_assert_eq!(total, bytes.len());
            prop_assert_eq!(Packet::parse(&again[..total]), Ok(packet));
        }
    }
}

/// A WRITE ONLY of four bytes, written by hand.
const WRITE: [u8; 36] = [
    0x0a, 0x40, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef, // BTH
    1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 4, // RETH
    9, 8, 7, 6, 0, 0, 0, 0, // payload, ICRC
];

#[test]
fn fields_have_the_documented_offsets() {
    let packet = Packet::parse(&WRITE).unwrap();
    let at = Remote { addr: 0x0102030405060708, rkey: Key(0x11223344) };
    assert_eq!(
        packet,
        Packet {
            qpn: Qpn::new(0x123456),
            psn: Psn::new(0xabcdef),
            ack_request: true,
            solicited: false,
            body: Body::Write { part: Part::Only, reth: Some(Reth { at, len: 4 }), imm: None },
            payload: &[9, 8, 7, 6],
        }
    );
    let mut out = [0xff; 64];
    assert_eq!(packet.encode(&mut out), WRITE.len());
    assert_eq!(out[..36], WRITE);
}

#[test]
fn malformed_packets_yield_their_reason() {
    let spoilt = |at: usize, value: u8| {
        let mut bytes = WRITE;
        bytes[at] = value;
        Packet::parse(&bytes).map(|p| p.body).unwrap_err()
    };
    assert_eq!(spoilt(1, 0x41), Malformed::Version);
    assert_eq!(spoilt(0, 0x15), Malformed::Opcode);
    assert_eq!(spoilt(0, 0x64), Malformed::Opcode);
    assert_eq!(spoilt(2, 0x00), Malformed::Partition);
    assert_eq!(spoilt(0, opcode::READ_REQUEST), Malformed::Payload);
    assert_eq!(spoilt(0, opcode::COMPARE_SWAP), Malformed::Short);
    // A middle packet with padding.
    let mut middle = WRITE;
    (middle[0], middle[1]) = (opcode::SEND_MIDDLE, 0x70);
    assert_eq!(Packet::parse(&middle), Err(Malformed::Pad));
    assert_eq!(Packet::parse(&WRITE[..35]), Err(Malformed::Pad));
    assert_eq!(Packet::parse(&WRITE[..15]), Err(Malformed::Short));
    assert_eq!(Packet::parse(&[0; PACKET_MAX + 1]), Err(Malformed::Long));
    let mut ack = [0u8; 20];
    (ack[0], ack[2], ack[3], ack[12]) = (opcode::ACKNOWLEDGE, 0xff, 0xff, 0x64);
    assert_eq!(Packet::parse(&ack), Err(Malformed::Syndrome));
    ack[12] = 0x40;
    assert_eq!(Packet::parse(&ack), Err(Malformed::Syndrome));
    ack[12] = 0x62;
    let aeth = Aeth { syndrome: Syndrome::Nak(Nak::RemoteAccess), msn: 0 };
    assert_eq!(Packet::parse(&ack).unwrap().body, Body::Acknowledge(aeth));
}

/// The bytes of a packet with this opcode, `headers` bytes of zeros after the BTH, and a payload.
fn raw(code: u8, headers: usize, payload: usize) -> Vec<u8> {
    let mut bytes = vec![0; BTH + headers + payload + ICRC];
    (bytes[0], bytes[2], bytes[3]) = (code, 0xff, 0xff);
    bytes
}

#[test]
fn message_part_has_payload_within_the_path_mtu() {
    let parts = [
        (opcode::SEND_FIRST, 0),
        (opcode::SEND_MIDDLE, 0),
        (opcode::SEND_LAST, 0),
        (opcode::SEND_LAST_IMM, 4),
        (opcode::WRITE_FIRST, 16),
        (opcode::WRITE_MIDDLE, 0),
        (opcode::WRITE_LAST, 0),
        (opcode::READ_RESPONSE_FIRST, 4),
        (opcode::READ_RESPONSE_MIDDLE, 0),
        (opcode::READ_RESPONSE_LAST, 4),
    ];
    for (code, headers) in parts {
        assert_eq!(Packet::parse(&raw(code, headers, 0)), Err(Malformed::Payload), "{code:#x}");
    }
    let whole = [
        (opcode::SEND_ONLY, 0),
        (opcode::WRITE_ONLY, 16),
        (opcode::WRITE_ONLY_IMM, 20),
        (opcode::READ_RESPONSE_ONLY, 4),
    ];
    for (code, headers) in whole {
        assert!(Packet::parse(&raw(code, headers, 0)).is_ok(), "{code:#x}");
    }
    for (code, headers) in parts.into_iter().chain(whole) {
        assert!(Packet::parse(&raw(code, headers, 4096)).is_ok(), "{code:#x}");
        assert_eq!(Packet::parse(&raw(code, headers, 4100)), Err(Malformed::Long), "{code:#x}");
    }
}

#[test]
fn nak_codes_round_trip() {
    let naks = [Nak::Sequence, Nak::InvalidRequest, Nak::RemoteAccess, Nak::RemoteOperation];
    for (code, nak) in naks.into_iter().enumerate() {
        let body = Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(nak), msn: 5 });
        let (qpn, psn) = (Qpn::new(1), Psn::new(2));
        let packet = Packet { qpn, psn, ack_request: false, solicited: false, body, payload: &[] };
        let mut bytes = [0; PACKET_MAX];
        let len = packet.encode(&mut bytes);
        assert_eq!(bytes[BTH], 0x60 | code as u8);
        assert_eq!(Packet::parse(&bytes[..len]), Ok(packet));
    }
}
