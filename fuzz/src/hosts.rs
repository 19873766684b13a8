//! A memory node's TCP port: the input is bytes from any host that can connect.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use pool::protocol::{Numbered, Opening, encode};
use pool::remote::RoceEnd;
use pool::remote::token::Nonce;
use pool::{Address, ControlPlane, Endpoint, Listen, Service, Settings};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use verbs::PathMtu;

use crate::Input;
use crate::service::request;

/// Maximum number of messages per input.
const MESSAGES: usize = 20;

fn service() -> &'static Service {
    static SERVICE: OnceLock<Service> = OnceLock::new();
    SERVICE.get_or_init(|| {
        let settings = Settings { donate_bytes: 1 << 20, chunk_bytes: 4096, ..Settings::default() };
        let listen = Listen::to_all(SocketAddr::from(([127, 0, 0, 1], 0)));
        Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).expect("a memory node")
    })
}

/// Connects from the next of many source addresses, because the memory node limits the rate of each
/// host.
fn connect() -> TcpStream {
    static HOSTS: AtomicU16 = AtomicU16::new(0);
    let [a, b] = HOSTS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let address = service().address().expect("it listens");
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
    let socket = socket.expect("a socket");
    let from = SocketAddr::from(([127, 1 + a / 2, b, 1 + a % 2], 0));
    rustix::net::bind(&socket, &from).expect("an address of this host");
    rustix::net::connect(&socket, &address).expect("connecting");
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true).expect("an option");
    stream.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
    stream
}

/// Runs the input `bytes`.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut stream = connect();
    for _ in 0..MESSAGES {
        if input.is_empty() {
            break;
        }
        let message = message(&mut input);
        // The memory node may have closed the connection. Answers are read only now and then.
        let sent = stream.write_all(&message).is_ok();
        if sent && input.byte() & 1 == 1 {
            let _ = stream.read(&mut [0; 4096]);
        }
        if !sent || input.byte() == 0 {
            stream = connect();
        }
    }
    honest();
}

fn message(input: &mut Input<'_>) -> Vec<u8> {
    let kind = input.byte();
    let nonce = "5a".repeat(32);
    let body = match kind % 8 {
        0 | 1 => format!(r#"{{"granary":1,"nonce":"{nonce}"}}"#).into_bytes(),
        2 => encode("fuzzing", &Opening::pool()).expect("a message"),
        3 => {
            let proof = Some(nonce);
            encode("fuzzing", &Opening { proof, ..Opening::pool() }).expect("a message")
        }
        4 => input.take(1 + kind as usize).to_vec(),
        _ => {
            let mut body = request(input);
            if let pool::protocol::Request::Admit(admission) = &mut body {
                admission.roce = (kind & 0x20 == 0)
                    .then(|| RoceEnd { port: input.short(), mtu: PathMtu::Mtu1024 });
                admission.salt = (kind & 0x08 == 0).then(salt);
            }
            encode("fuzzing", &Numbered { id: input.number().into(), body }).unwrap_or_default()
        }
    };
    let len = match kind >> 6 {
        // A length that differs from that of the message.
        3 => input.number(),
        _ => body.len() as u32,
    };
    let mut bytes = [&len.to_be_bytes()[..], &body].concat();
    if kind & 0x10 != 0 {
        let at = input.short() as usize % bytes.len();
        bytes[at] = input.byte();
    }
    bytes
}

/// Returns the random salt of a host's QPs.
fn salt() -> Nonce {
    "5a".repeat(32).try_into().expect("a nonce")
}

/// Checks that another host gets an answer.
fn honest() {
    let to = service().address().expect("it listens");
    let address: Address = format!("roce://{to}").parse().expect("an address");
    address.ask().expect("connecting").status().expect("an answer");
    assert_eq!(service().failure(), None);
}
