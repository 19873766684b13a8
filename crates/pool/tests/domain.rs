//! Tests of the token of a domain: named on one host, proved between hosts, never sent there.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};

use pool::protocol::{self, Admission, Numbered, Opening, Reply, Request};
use pool::remote::RoceEnd;
use pool::remote::token::{Greeting, Nonce, VERSION};
use pool::{
    DomainToken, Endpoint, Error, Listen, Options, Pool, Remote, Service, Settings, schemes,
};
use verbs::PathMtu;

const KNOWN: DomainToken = DomainToken([0x5a; 32]);
const UNKNOWN: DomainToken = DomainToken([0x5b; 32]);

fn serve(domains: Vec<DomainToken>) -> (Service, SocketAddr) {
    let listen = Listen { domains, ..Listen::to_all("127.0.0.1:0".parse().unwrap()) };
    let scheme = schemes::RPC_MW_2;
    let settings =
        Settings { donate_bytes: 1 << 20, chunk_bytes: 64 << 10, scheme, ..Settings::default() };
    let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).unwrap();
    let address = service.address().unwrap();
    (service, address)
}

fn connect(to: SocketAddr, domain: Option<DomainToken>) -> Result<Pool, Error> {
    let options = Options { groups: Some(1), domain, ..Options::default() };
    Pool::connect_remote(&Remote { to: to.into(), token: None, nic: None }, options)
}

#[test]
fn compute_node_of_another_host_proves_its_domain() {
    let (service, to) = serve(vec![UNKNOWN, KNOWN]);
    for domain in [None, Some(KNOWN), Some(UNKNOWN)] {
        connect(to, domain).unwrap();
    }
    drop(service);
    for domains in [vec![KNOWN], Vec::new()] {
        let (_service, to) = serve(domains);
        match connect(to, Some(UNKNOWN)) {
            Err(Error::Refused { why, .. }) => assert!(why.contains("--domain-token"), "{why}"),
            other => panic!("{:?}", other.err()),
        }
        connect(to, None).unwrap();
    }
}

#[test]
fn compute_node_of_this_host_names_its_domain() {
    let (service, _) = serve(Vec::new());
    let options = Options { groups: Some(1), domain: Some(UNKNOWN), ..Options::default() };
    let pool = Pool::connect(service.path(), options).unwrap();
    pool.free_blocking(pool.allocate_blocking().unwrap()).unwrap();
}

/// A proxy that reports what a compute node sends on its control connection, when it has ended.
fn overheard(to: SocketAddr) -> (SocketAddr, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (report, reports) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut client, server) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
        let (mut from, mut into) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut into));
        let (mut server, mut all, mut part) = (server, Vec::new(), [0; 4096]);
        while let Ok(bytes @ 1..) = client.read(&mut part) {
            all.extend(&part[..bytes]);
            server.write_all(&part[..bytes]).unwrap();
        }
        let _ = server.shutdown(Shutdown::Both);
        report.send(all).unwrap();
    });
    (address, reports)
}

/// Exchanges messages with the memory node over TCP, like a compute node of another host.
struct Raw(TcpStream);

impl Raw {
    fn open(to: SocketAddr) -> Self {
        let mut raw = Self(TcpStream::connect(to).unwrap());
        let nonce = Nonce::random().unwrap();
        raw.ask(
            &protocol::encode("", &Greeting { granary: VERSION, nonce, token: false }).unwrap(),
        );
        raw.ask(&protocol::encode("", &Opening::pool()).unwrap());
        raw
    }

    fn ask(&mut self, message: &[u8]) -> Vec<u8> {
        self.0.write_all(&(message.len() as u32).to_be_bytes()).unwrap();
        self.0.write_all(message).unwrap();
        let mut len = [0; 4];
        self.0.read_exact(&mut len).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(len) as usize];
        self.0.read_exact(&mut answer).unwrap();
        answer
    }

    fn admit(&mut self, domain: Option<DomainToken>, domain_proof: Option<String>) -> Reply {
        let roce = Some(RoceEnd { port: 1, mtu: PathMtu::Mtu1024 });
        let salt = Some(Nonce::random().unwrap());
        let admission = Admission { roce, salt, domain, domain_proof, ..Admission::default() };
        let request = Numbered { id: 1, body: Request::Admit(Box::new(admission)) };
        let answer = self.ask(&protocol::encode("", &request).unwrap());
        protocol::decode::<Numbered<Reply>>("", &answer).unwrap().body
    }
}

#[test]
fn token_is_never_sent_and_its_proof_cannot_be_replayed() {
    let (_service, to) = serve(vec![KNOWN]);
    let (proxy, sent) = overheard(to);
    drop(connect(proxy, Some(KNOWN)).unwrap());
    let sent = sent.recv().unwrap();
    let text = String::from_utf8_lossy(&sent);
    assert!(!text.contains(&"5a".repeat(32)) && !sent.windows(32).any(|part| part == KNOWN.0));
    let proof = text.split(r#""domain_proof":""#).nth(1).expect("a proof was sent");
    let proof = proof.split('"').next().unwrap().to_owned();
    assert_eq!(proof.len(), 64);

    for (domain, proof, why) in [
        (None, Some(proof), "is not one of the memory node's"),
        (None, Some("5a".into()), "is not one of the memory node's"),
        (None, Some("é".repeat(40)), "is not one of the memory node's"),
        (Some(KNOWN), None, "other hosts must prove"),
    ] {
        match Raw::open(to).admit(domain, proof) {
            Reply::Error { why: error } => assert!(error.contains(why), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}
