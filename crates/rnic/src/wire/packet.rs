//! Packets of reliable connections: the UDP payload of RoCEv2, from the base transport header to
//! the trailer (IBTA vol. 1, §9.2 to §9.4; RoCEv2 is annex A17).
//!
//! ```text
//! BTH                                              RETH                    AETH
//! +0  opcode                                       +0  address  (8)        +0  syndrome
//! +1  SE (1) | M (1) | pad (2) | version (4)       +8  rkey     (4)        +1  MSN (3)
//! +2  partition key (2)                            +12 length   (4)
//! +4  FECN (1) | BECN (1) | reserved (6)
//! +5  destination QPN (3)                          AtomicETH               AtomicAckETH
//! +8  ack request (1) | reserved (7)               +0  address  (8)        +0  old value (8)
//! +9  PSN (3)                                      +8  rkey     (4)
//!                                                  +12 swap/add (8)        ImmDt, IETH
//! then headers, payload, pad, trailer              +20 compare  (8)        +0  data or rkey (4)
//! ```
//!
//! The trailer is the ICRC (4 bytes), or counter and tag ([`super::mac`], 20 bytes).
//!
//! [`Packet::parse`] accepts any bytes, and returns a reason if they are not a packet. It reads no
//! byte twice.

use super::mac;
use verbs::wqe::Remote;
use verbs::{Key, Psn, Qpn};

/// Bytes of the base transport header.
pub const BTH: usize = 12;
/// Bytes of the ICRC.
pub const ICRC: usize = 4;
/// Bytes of the longest sequence of headers: BTH and AtomicETH.
pub const HEADERS_MAX: usize = BTH + 28;
/// Maximum bytes after the payload: padding and the longest trailer.
pub const TRAILER_MAX: usize = 3 + mac::TRAILER;
/// Bytes of the longest packet.
pub const PACKET_MAX: usize = 4096 + HEADERS_MAX + TRAILER_MAX;
/// The default partition key (IBTA vol. 1, §10.9.1).
const PKEY: u16 = 0xffff;

/// Opcodes of reliable connections.
pub mod opcode {
    #![expect(missing_docs, reason = "the names are those of the standard")]
    pub const SEND_FIRST: u8 = 0x00;
    pub const SEND_MIDDLE: u8 = 0x01;
    pub const SEND_LAST: u8 = 0x02;
    pub const SEND_LAST_IMM: u8 = 0x03;
    pub const SEND_ONLY: u8 = 0x04;
    pub const SEND_ONLY_IMM: u8 = 0x05;
    pub const WRITE_FIRST: u8 = 0x06;
    pub const WRITE_MIDDLE: u8 = 0x07;
    pub const WRITE_LAST: u8 = 0x08;
    pub const WRITE_LAST_IMM: u8 = 0x09;
    pub const WRITE_ONLY: u8 = 0x0a;
    pub const WRITE_ONLY_IMM: u8 = 0x0b;
    pub const READ_REQUEST: u8 = 0x0c;
    pub const READ_RESPONSE_FIRST: u8 = 0x0d;
    pub const READ_RESPONSE_MIDDLE: u8 = 0x0e;
    pub const READ_RESPONSE_LAST: u8 = 0x0f;
    pub const READ_RESPONSE_ONLY: u8 = 0x10;
    pub const ACKNOWLEDGE: u8 = 0x11;
    pub const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
    pub const COMPARE_SWAP: u8 = 0x13;
    pub const FETCH_ADD: u8 = 0x14;
    pub const SEND_LAST_INV: u8 = 0x16;
    pub const SEND_ONLY_INV: u8 = 0x17;
}

/// Reason for which bytes are not a packet of a reliable connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Malformed {
    /// The packet has fewer bytes than the headers of its opcode and the trailer.
    #[error("packet shorter than its headers")]
    Short,
    /// The packet or its payload exceeds the maximum length.
    #[error("packet longer than the maximum")]
    Long,
    /// The version of the transport header is not 0.
    #[error("unknown version of the transport header")]
    Version,
    /// The opcode is not one of a reliable connection.
    #[error("opcode of another transport service than reliable connection")]
    Opcode,
    /// The partition key is not the default one.
    #[error("partition key other than the default")]
    Partition,
    /// The packet has padding that is not allowed, or its length is not a multiple of four.
    #[error("wrong padding")]
    Pad,
    /// The packet has a payload that its opcode does not allow, or lacks one that it requires.
    #[error("payload does not match the opcode")]
    Payload,
    /// The AETH syndrome is reserved.
    #[error("reserved AETH syndrome")]
    Syndrome,
}

impl Malformed {
    /// All reasons, in the order of the counters in [`super::WireStats`].
    pub const ALL: [Malformed; 8] = [
        Malformed::Short,
        Malformed::Long,
        Malformed::Version,
        Malformed::Opcode,
        Malformed::Partition,
        Malformed::Pad,
        Malformed::Payload,
        Malformed::Syndrome,
    ];
}

/// Position of a packet in its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The first of several packets.
    First,
    /// Neither the first nor the last packet.
    Middle,
    /// The last of several packets.
    Last,
    /// The only packet.
    Only,
}

impl Part {
    /// Whether the packet begins a message.
    pub fn begins(self) -> bool {
        matches!(self, Part::First | Part::Only)
    }

    /// Whether the packet ends a message.
    pub fn ends(self) -> bool {
        matches!(self, Part::Last | Part::Only)
    }

    /// Position of packet `at` of `count`.
    pub fn of(at: u32, count: u32) -> Part {
        match (at == 0, at + 1 >= count) {
            (true, true) => Part::Only,
            (true, false) => Part::First,
            (false, true) => Part::Last,
            (false, false) => Part::Middle,
        }
    }
}

/// Additional data in the last packet of a SEND.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// None.
    None,
    /// Immediate data.
    Imm(u32),
    /// A key of the responder that is to be invalidated.
    Invalidate(Key),
}

/// The syndrome of an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// ACK: all packets up to the PSN have arrived. With the credit code, which encodes the number
    /// of receive WQEs; 31 means no credit count.
    Ack(u8),
    /// RNR NAK: there is no receive WQE for this PSN. With the timer code of the delay before a
    /// retry.
    Rnr(u8),
    /// NAK: the packet with this PSN is missing or was rejected.
    Nak(Nak),
}

/// The code of a NAK (IBTA vol. 1, §9.7.5.2.8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Nak {
    /// PSN sequence error: the packet with this PSN is missing.
    Sequence = 0,
    /// The request is invalid.
    InvalidRequest = 1,
    /// The key, its range or its rights do not allow the access.
    RemoteAccess = 2,
    /// The responder cannot execute the request.
    RemoteOperation = 3,
}

/// The ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// The syndrome.
    pub syndrome: Syndrome,
    /// Message sequence number: messages that the responder has completed, modulo 2^24.
    pub msn: u32,
}

/// The RDMA extended transport header: the target of a READ or WRITE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// Address and key.
    pub at: Remote,
    /// Bytes of the whole message.
    pub len: u32,
}

/// Operation of an atomic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Stores `swap` if the word equals `compare`.
    CompareSwap {
        /// The expected value.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Adds `add` to the word.
    FetchAdd {
        /// The addend.
        add: u64,
    },
}

/// The kind of a packet, with its headers after the BTH.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// SEND. Only the last packet has a notice.
    Send {
        /// Position in the message.
        part: Part,
        /// Additional data of the last packet.
        notice: Notice,
    },
    /// WRITE. Only the first packet has a target, and only the last one immediate data.
    Write {
        /// Position in the message.
        part: Part,
        /// Target of the whole message.
        reth: Option<Reth>,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// READ request.
    Read(Reth),
    /// READ response. All packets except middle ones have an AETH.
    ReadResponse {
        /// Position in the response.
        part: Part,
        /// The acknowledgement.
        aeth: Option<Aeth>,
    },
    /// ACK, NAK or RNR NAK.
    Acknowledge(Aeth),
    /// Response to an atomic.
    AtomicAcknowledge {
        /// The acknowledgement.
        aeth: Aeth,
        /// The value of the word before the operation.
        old: u64,
    },
    /// CAS or FAA request.
    Atomic {
        /// Address and key of the word.
        at: Remote,
        /// The operation.
        op: AtomicOp,
    },
}

/// A packet: decoded headers and a borrowed payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The destination QP.
    pub qpn: Qpn,
    /// The packet sequence number.
    pub psn: Psn,
    /// The packet requests an acknowledgement.
    pub ack_request: bool,
    /// The receive completion is a solicited event.
    pub solicited: bool,
    /// The kind, with its headers.
    pub body: Body,
    /// The payload, without padding.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a packet. Its last four bytes, the ICRC, are not checked.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        Self::parse_before(bytes, ICRC)
    }

    /// Parses a packet with a trailer of `trailer` bytes, which are not checked.
    #[inline]
    pub(crate) fn parse_before(bytes: &'a [u8], trailer: usize) -> Result<Self, Malformed> {
        if bytes.len() > PACKET_MAX {
            return Err(Malformed::Long);
        }
        let (bth, rest) = bytes.split_at_checked(BTH).ok_or(Malformed::Short)?;
        let inside = rest.len().checked_sub(trailer).ok_or(Malformed::Short)?;
        let mut left = Reader(&rest[..inside]);
        if bth[1] & 0x0f != 0 {
            return Err(Malformed::Version);
        }
        let body = read_body(bth[0], &mut left)?;
        // The upper bit distinguishes full members of the partition from limited members. Both may
        // send.
        if u16::from_be_bytes([bth[2], bth[3]]) | 0x8000 != PKEY {
            return Err(Malformed::Partition);
        }
        let pad = (bth[1] >> 4 & 3) as usize;
        if !left.0.len().is_multiple_of(4) {
            return Err(Malformed::Pad);
        }
        let len = left.0.len().checked_sub(pad).ok_or(Malformed::Pad)?;
        let payload = &left.0[..len];
        match body.payload() {
            Carries::Nothing if !payload.is_empty() || pad != 0 => return Err(Malformed::Payload),
            Carries::Something if payload.is_empty() => return Err(Malformed::Payload),
            // A first or middle packet is full, and the path MTU is a multiple of four.
            _ if pad != 0 && body.part().is_some_and(|p| !p.ends()) => return Err(Malformed::Pad),
            _ if payload.len() > 4096 => return Err(Malformed::Long),
            _ => {}
        }
        Ok(Packet {
            qpn: Qpn::new(be24(&bth[5..8])),
            psn: Psn::new(be24(&bth[9..12])),
            ack_request: bth[8] & 0x80 != 0,
            solicited: bth[1] & 0x80 != 0,
            body,
            payload,
        })
    }

    /// Writes the headers of a packet with a payload of `len` bytes, which the caller appends.
    /// Returns the number of bytes. `out` must have room for [`HEADERS_MAX`].
    pub fn encode_headers(&self, len: usize, out: &mut [u8]) -> usize {
        let pad = padding(len) as u8;
        out[0] = self.body.opcode();
        out[1] = (self.solicited as u8) << 7 | 1 << 6 | pad << 4;
        out[2..4].copy_from_slice(&PKEY.to_be_bytes());
        out[4] = 0;
        out[5..8].copy_from_slice(&self.qpn.raw().to_be_bytes()[1..]);
        out[8] = (self.ack_request as u8) << 7;
        out[9..12].copy_from_slice(&self.psn.raw().to_be_bytes()[1..]);
        let mut w = Writer { out, at: BTH };
        self.body.write(&mut w);
        w.at
    }

    /// Writes the whole packet, with zeros in place of the ICRC. Returns the number of bytes.
    pub fn encode(&self, out: &mut [u8]) -> usize {
        let headers = self.encode_headers(self.payload.len(), out);
        let end = headers + self.payload.len();
        out[headers..end].copy_from_slice(self.payload);
        let total = end + padding(self.payload.len()) + ICRC;
        out[end..total].fill(0);
        total
    }
}

/// The destination QP of a packet, or `None` if the packet is shorter than a BTH.
#[inline]
pub(crate) fn destination(bytes: &[u8]) -> Option<Qpn> {
    Some(Qpn::new(be24(&bytes.first_chunk::<BTH>()?[5..8])))
}

/// Bytes of padding that extend a payload to a multiple of four.
#[inline]
pub fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// Whether a kind of packet requires, forbids or allows a payload.
enum Carries {
    Nothing,
    Something,
    Anything,
}

impl Body {
    fn payload(&self) -> Carries {
        match self {
            Body::Send { part: Part::Only, .. } | Body::Write { part: Part::Only, .. } => {
                Carries::Anything
            }
            Body::ReadResponse { part: Part::Only, .. } => Carries::Anything,
            Body::Send { .. } | Body::Write { .. } | Body::ReadResponse { .. } => {
                Carries::Something
            }
            _ => Carries::Nothing,
        }
    }

    fn part(&self) -> Option<Part> {
        match self {
            Body::Send { part, .. }
            | Body::Write { part, .. }
            | Body::ReadResponse { part, .. } => Some(*part),
            _ => None,
        }
    }

    /// Whether the packet is a response to a request of the destination QP.
    pub fn is_response(&self) -> bool {
        matches!(
            self,
            Body::ReadResponse { .. } | Body::Acknowledge(_) | Body::AtomicAcknowledge { .. }
        )
    }

    /// The opcode in the BTH.
    pub fn opcode(&self) -> u8 {
        use opcode::*;
        match *self {
            Body::Send { part: Part::First, .. } => SEND_FIRST,
            Body::Send { part: Part::Middle, .. } => SEND_MIDDLE,
            Body::Send { part: Part::Last, notice } => match notice {
                Notice::None => SEND_LAST,
                Notice::Imm(_) => SEND_LAST_IMM,
                Notice::Invalidate(_) => SEND_LAST_INV,
            },
            Body::Send { part: Part::Only, notice } => match notice {
                Notice::None => SEND_ONLY,
                Notice::Imm(_) => SEND_ONLY_IMM,
                Notice::Invalidate(_) => SEND_ONLY_INV,
            },
            Body::Write { part: Part::First, .. } => WRITE_FIRST,
            Body::Write { part: Part::Middle, .. } => WRITE_MIDDLE,
            Body::Write { part: Part::Last, imm, .. } => match imm {
                None => WRITE_LAST,
                Some(_) => WRITE_LAST_IMM,
            },
            Body::Write { part: Part::Only, imm, .. } => match imm {
                None => WRITE_ONLY,
                Some(_) => WRITE_ONLY_IMM,
            },
            Body::Read(_) => READ_REQUEST,
            Body::ReadResponse { part: Part::First, .. } => READ_RESPONSE_FIRST,
            Body::ReadResponse { part: Part::Middle, .. } => READ_RESPONSE_MIDDLE,
            Body::ReadResponse { part: Part::Last, .. } => READ_RESPONSE_LAST,
            Body::ReadResponse { part: Part::Only, .. } => READ_RESPONSE_ONLY,
            Body::Acknowledge(_) => ACKNOWLEDGE,
            Body::AtomicAcknowledge { .. } => ATOMIC_ACKNOWLEDGE,
            Body::Atomic { op: AtomicOp::CompareSwap { .. }, .. } => COMPARE_SWAP,
            Body::Atomic { op: AtomicOp::FetchAdd { .. }, .. } => FETCH_ADD,
        }
    }

    fn write(&self, w: &mut Writer<'_>) {
        match *self {
            Body::Send { notice, .. } => match notice {
                Notice::None => {}
                Notice::Imm(imm) => w.put(&imm.to_be_bytes()),
                Notice::Invalidate(key) => w.put(&key.0.to_be_bytes()),
            },
            Body::Write { reth, imm, .. } => {
                if let Some(reth) = reth {
                    reth.write(w);
                }
                if let Some(imm) = imm {
                    w.put(&imm.to_be_bytes());
                }
            }
            Body::Read(reth) => reth.write(w),
            Body::ReadResponse { aeth, .. } => {
                if let Some(aeth) = aeth {
                    aeth.write(w);
                }
            }
            Body::Acknowledge(aeth) => aeth.write(w),
            Body::AtomicAcknowledge { aeth, old } => {
                aeth.write(w);
                w.put(&old.to_be_bytes());
            }
            Body::Atomic { at, op } => {
                let (swap_add, compare) = match op {
                    AtomicOp::CompareSwap { compare, swap } => (swap, compare),
                    AtomicOp::FetchAdd { add } => (add, 0),
                };
                w.put(&at.addr.to_be_bytes());
                w.put(&at.rkey.0.to_be_bytes());
                w.put(&swap_add.to_be_bytes());
                w.put(&compare.to_be_bytes());
            }
        }
    }
}

/// Parses the headers after the BTH of a packet with opcode `code`.
fn read_body(code: u8, r: &mut Reader<'_>) -> Result<Body, Malformed> {
    use opcode::*;
    let send = |part, notice| Body::Send { part, notice };
    let write = |part, reth, imm| Body::Write { part, reth, imm };
    let response = |part, aeth| Body::ReadResponse { part, aeth };
    Ok(match code {
        SEND_FIRST => send(Part::First, Notice::None),
        SEND_MIDDLE => send(Part::Middle, Notice::None),
        SEND_LAST => send(Part::Last, Notice::None),
        SEND_LAST_IMM => send(Part::Last, Notice::Imm(r.be32()?)),
        SEND_LAST_INV => send(Part::Last, Notice::Invalidate(Key(r.be32()?))),
        SEND_ONLY => send(Part::Only, Notice::None),
        SEND_ONLY_IMM => send(Part::Only, Notice::Imm(r.be32()?)),
        SEND_ONLY_INV => send(Part::Only, Notice::Invalidate(Key(r.be32()?))),
        WRITE_FIRST => write(Part::First, Some(r.reth()?), None),
        WRITE_MIDDLE => write(Part::Middle, None, None),
        WRITE_LAST => write(Part::Last, None, None),
        WRITE_LAST_IMM => write(Part::Last, None, Some(r.be32()?)),
        WRITE_ONLY => write(Part::Only, Some(r.reth()?), None),
        WRITE_ONLY_IMM => {
            let reth = r.reth()?;
            write(Part::Only, Some(reth), Some(r.be32()?))
        }
        READ_REQUEST => Body::Read(r.reth()?),
        READ_RESPONSE_FIRST => response(Part::First, Some(r.aeth()?)),
        READ_RESPONSE_MIDDLE => response(Part::Middle, None),
        READ_RESPONSE_LAST => response(Part::Last, Some(r.aeth()?)),
        READ_RESPONSE_ONLY => response(Part::Only, Some(r.aeth()?)),
        ACKNOWLEDGE => Body::Acknowledge(r.aeth()?),
        ATOMIC_ACKNOWLEDGE => Body::AtomicAcknowledge { aeth: r.aeth()?, old: r.be64()? },
        COMPARE_SWAP | FETCH_ADD => {
            let at = Remote { addr: r.be64()?, rkey: Key(r.be32()?) };
            let (swap_add, compare) = (r.be64()?, r.be64()?);
            let op = match code {
                COMPARE_SWAP => AtomicOp::CompareSwap { compare, swap: swap_add },
                _ => AtomicOp::FetchAdd { add: swap_add },
            };
            Body::Atomic { at, op }
        }
        _ => return Err(Malformed::Opcode),
    })
}

impl Reth {
    fn write(&self, w: &mut Writer<'_>) {
        w.put(&self.at.addr.to_be_bytes());
        w.put(&self.at.rkey.0.to_be_bytes());
        w.put(&self.len.to_be_bytes());
    }
}

impl Aeth {
    fn write(&self, w: &mut Writer<'_>) {
        let syndrome = match self.syndrome {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::Rnr(timer) => 0x20 | timer & 0x1f,
            Syndrome::Nak(nak) => 0x60 | nak as u8,
        };
        w.put(&((syndrome as u32) << 24 | self.msn & 0xff_ffff).to_be_bytes());
    }
}

/// Reads fields from the front of a slice.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(*first)
    }

    fn be32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_be_bytes)
    }

    fn be64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_be_bytes)
    }

    fn reth(&mut self) -> Result<Reth, Malformed> {
        let at = Remote { addr: self.be64()?, rkey: Key(self.be32()?) };
        Ok(Reth { at, len: self.be32()? })
    }

    fn aeth(&mut self) -> Result<Aeth, Malformed> {
        let word = self.be32()?;
        let (kind, value) = (word >> 29, (word >> 24) as u8 & 0x1f);
        let syndrome = match (kind, value) {
            (0, credits) => Syndrome::Ack(credits),
            (1, timer) => Syndrome::Rnr(timer),
            (3, 0) => Syndrome::Nak(Nak::Sequence),
            (3, 1) => Syndrome::Nak(Nak::InvalidRequest),
            (3, 2) => Syndrome::Nak(Nak::RemoteAccess),
            (3, 3) => Syndrome::Nak(Nak::RemoteOperation),
            _ => return Err(Malformed::Syndrome),
        };
        Ok(Aeth { syndrome, msn: word & 0xff_ffff })
    }
}

/// Writes fields to a slice, front to back.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..][..bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

fn be24(b: &[u8]) -> u32 {
    u32::from_be_bytes([0, b[0], b[1], b[2]])
}

#[cfg(test)]
#[path = "packet_tests.rs"]
mod tests;
