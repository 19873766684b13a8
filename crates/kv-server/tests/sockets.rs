//! TLS and Unix sockets.

mod common;

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use common::{Client, Started, free_port, start};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Writes a certificate authority, and certificates of a server and a client.
fn write_certificates(dir: &Path) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let ca = params.self_signed(&key).unwrap();
    std::fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
    let issuer = Issuer::new(params, key);
    for name in ["server", "client"] {
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        std::fs::write(dir.join(format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(dir.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

fn start_tls(dir: &Path, clients: &str) -> Started {
    let path = |name: &str| dir.join(name).display().to_string();
    start(&[
        ("tls-port", &free_port().to_string()),
        ("tls-cert-file", &path("server.pem")),
        ("tls-key-file", &path("server.key")),
        ("tls-ca-cert-file", &path("ca.pem")),
        ("tls-auth-clients", clients),
    ])
}

type Tls = Client<StreamOwned<ClientConnection, TcpStream>>;

fn connect(server: &Started, dir: &Path, with_certificate: bool) -> Tls {
    let read = |name: &str| CertificateDer::from_pem_file(dir.join(name)).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(read("ca.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match with_certificate {
        true => {
            let key = PrivateKeyDer::from_pem_file(dir.join("client.key")).unwrap();
            builder.with_client_auth_cert(vec![read("client.pem")], key).unwrap()
        }
        false => builder.with_no_client_auth(),
    };
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(&server.addresses[0]).unwrap();
    Client::new(StreamOwned::new(connection, socket))
}

#[test]
fn encrypted_connection_carries_pipelines_and_large_values() {
    let dir = tempfile::tempdir().unwrap();
    write_certificates(dir.path());
    let server = start_tls(dir.path(), "yes");
    let mut client = connect(&server, dir.path(), true);
    assert_eq!(client.ask("PING"), "PONG");
    let value: Vec<u8> = (0..3_000_000).map(|at| (at % 249) as u8).collect();
    client.command(&[b"SET", b"k", &value]);
    assert_eq!(client.reply(), "OK");
    for _ in 0..3 {
        client.send("GET k\r\nPING\r\n");
        assert_eq!(client.line(), "$3000000");
        assert_eq!(&client.take(value.len() + 2)[..value.len()], &value[..]);
        assert_eq!(client.reply(), "PONG");
    }
    let pings = "PING\r\n".repeat(10_000);
    client.send(pings);
    (0..10_000).for_each(|_| assert_eq!(client.reply(), "PONG"));
    assert_eq!(client.ask("QUIT"), "OK");
    assert_eq!(client.rest(), b"");
}

#[test]
fn client_needs_a_certificate_unless_it_is_optional() {
    let dir = tempfile::tempdir().unwrap();
    write_certificates(dir.path());
    let server = start_tls(dir.path(), "yes");
    let mut refused = connect(&server, dir.path(), false);
    let mut byte = [0];
    let _ = std::io::Write::write_all(&mut refused.stream, b"PING\r\n");
    assert!(std::io::Read::read(&mut refused.stream, &mut byte).is_err());
    // A connection without TLS is closed.
    let mut plain = server.connect();
    plain.send("PING\r\n");
    plain.rest();
    assert_eq!(connect(&server, dir.path(), true).ask("PING"), "PONG");
    for clients in ["optional", "no"] {
        let server = start_tls(dir.path(), clients);
        assert_eq!(connect(&server, dir.path(), false).ask("PING"), "PONG", "{clients}");
    }
}

#[test]
fn unix_socket_has_its_mode_and_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kv.sock");
    let text = path.display().to_string();
    // The socket of a server that was killed is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = start(&[("unixsocket", &text), ("unixsocketperm", "700")]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    let mut client = Client::new(UnixStream::connect(&path).unwrap());
    assert_eq!(client.ask("PING"), "PONG");
    let info = client.ask("client info");
    assert!(info.contains(&format!("addr={text}:0 laddr={text}:0")), "{info}");
    assert!(info.contains("flags=U"), "{info}");
    server.stop().unwrap();
    assert!(!path.exists());
}
