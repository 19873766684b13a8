//! A memory node's socket: the input is packets from any process that can connect.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use pool::protocol::{
    Admission, MAX_BYTES, Numbered, Opening, Reply, Request, decode, encode, id_of,
};
use pool::{ConnectRequest, Endpoint, Service, Settings};
use rnic::port::shm::{protocol, socket};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::Input;

/// Maximum number of packets per input.
const PACKETS: usize = 20;

fn service() -> &'static Service {
    static SERVICE: OnceLock<Service> = OnceLock::new();
    SERVICE.get_or_init(|| {
        let settings = Settings { donate_bytes: 1 << 20, chunk_bytes: 4096, ..Settings::default() };
        Service::start(&settings, &Endpoint::Fresh).expect("a memory node")
    })
}

fn connect() -> OwnedFd {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let fd = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket");
    let address = SocketAddrUnix::new(service().path()).expect("a path");
    rustix::net::connect(&fd, &address).expect("connecting");
    let timeout = Some(std::time::Duration::from_secs(20));
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, timeout).expect("a timeout");
    fd
}

/// Runs the input `bytes`.
pub fn run(bytes: &[u8]) {
    decoding(bytes);
    let mut input = Input::new(bytes);
    let mut connection = connect();
    for _ in 0..PACKETS {
        if input.is_empty() {
            break;
        }
        let (packet, fds) = packet(&mut input);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        // The memory node may have closed the connection.
        if socket::send(&connection, &packet, &fds).is_err() || input.byte() == 0 {
            connection = connect();
        }
        honest();
    }
}

/// Checks that any bytes decode to a message or an error.
fn decoding(bytes: &[u8]) {
    let request = decode::<Numbered<Request>>("fuzzing", bytes);
    let _ = decode::<Opening>("fuzzing", bytes);
    let _ = decode::<Numbered<Reply>>("fuzzing", bytes);
    if let Ok(request) = request {
        assert_eq!(id_of(bytes), request.id);
        if bytes.len() <= MAX_BYTES / 4 {
            let again = encode("fuzzing", &request).expect("a decoded request can be encoded");
            assert_eq!(decode::<Numbered<Request>>("fuzzing", &again).ok(), Some(request));
        }
    }
}

fn packet(input: &mut Input<'_>) -> (Vec<u8>, Vec<OwnedFd>) {
    let kind = input.byte();
    let fds = (0..kind >> 6 & 1).map(|_| rustix::pipe::pipe().expect("a pipe").0).collect();
    let mut bytes = match kind % 8 {
        0 => encode("fuzzing", &Opening::pool()).expect("a message"),
        1 => protocol::SERVICE.as_bytes().to_vec(),
        2 => input.take(input_length(kind)).to_vec(),
        3 => {
            let hello = protocol::Request::Hello { version: protocol::VERSION, bytes: 8192 };
            serde_json::to_vec(&hello).expect("plain data")
        }
        _ => {
            let id = input.number().into();
            encode("fuzzing", &Numbered { id, body: request(input) }).unwrap_or_default()
        }
    };
    if kind & 0x80 != 0 && !bytes.is_empty() {
        let at = input.short() as usize % bytes.len();
        bytes[at] = input.byte();
    }
    (bytes, fds)
}

fn input_length(kind: u8) -> usize {
    1 + kind as usize * 2
}

/// Returns a request of a compute node.
pub(crate) fn request(input: &mut Input<'_>) -> Request {
    match input.byte() % 8 {
        0 => {
            let (groups, lanes) = (input.byte() as usize % 80, input.byte() as usize % 10);
            let connect = ConnectRequest {
                management: (0..input.byte() % 5).map(|_| input.number()).collect(),
                groups: (0..groups).map(|_| (0..lanes).map(|_| input.number()).collect()).collect(),
                bulletin_addr: input.number() as u64 * 8,
                bulletin_rkey: input.number(),
                ..ConnectRequest::default()
            };
            Request::Admit(Box::new(Admission { connect, ..Admission::default() }))
        }
        1 => Request::AwaitMemory { timeout_ms: input.number().into() },
        2 => Request::Status,
        3 => Request::ResetManagement { salt: None },
        4 => Request::ResetAccess { group: input.short(), lane: input.byte(), salt: None },
        5 => Request::Audit,
        6 => Request::Goodbye,
        _ => Request::AwaitMemory { timeout_ms: u64::MAX },
    }
}

/// Checks that another client gets an answer.
fn honest() {
    static HONEST: OnceLock<Mutex<(OwnedFd, u64)>> = OnceLock::new();
    let honest = HONEST.get_or_init(|| {
        let fd = connect();
        let opening = encode("opening", &Opening::pool()).expect("a message");
        socket::send(&fd, &opening, &[]).expect("sending");
        assert!(matches!(answer(&fd).body, Reply::Welcome(_)));
        Mutex::new((fd, 0))
    });
    let (fd, id) = &mut *honest.lock().unwrap_or_else(PoisonError::into_inner);
    *id += 1;
    let question = encode("asking", &Numbered { id: *id, body: Request::Status });
    socket::send(&*fd, &question.expect("a message"), &[]).expect("sending");
    let answer = answer(fd);
    assert_eq!(answer.id, *id);
    assert!(matches!(answer.body, Reply::Status(_)), "{answer:?}");
    assert_eq!(service().failure(), None);
}

fn answer(fd: &OwnedFd) -> Numbered<Reply> {
    let packet = socket::receive(fd).expect("an answer in time").expect("a memory node");
    decode("receiving", &packet.bytes).expect("a reply")
}
