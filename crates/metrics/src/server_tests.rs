//! Tests of the HTTP server with well-behaved and hostile scrapers.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A server whose page counts its compositions.
fn start() -> (Server, Arc<AtomicU32>) {
    let composed = Arc::new(AtomicU32::new(0));
    let count = composed.clone();
    let page = move || Ok(format!("page {}\n", count.fetch_add(1, Ordering::SeqCst)));
    (Server::start(parse_address("0").unwrap(), page).unwrap(), composed)
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn exchange(server: &Server, request: &str) -> String {
    let mut stream = connect(server);
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn only_get_of_metrics_returns_the_page() {
    let (server, _) = start();
    for request in ["GET /metrics HTTP/1.1\r\n\r\n", "GET /metrics?x=1 HTTP/1.0\r\nA: b\r\n\r\n"] {
        let text = exchange(&server, request);
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("\r\n\r\npage"), "{text}");
    }
    for request in ["GET / HTTP/1.1\r\n\r\n", "POST /metrics HTTP/1.1\r\n\r\n"] {
        assert!(exchange(&server, request).starts_with("HTTP/1.1 404 "));
    }
    assert!(exchange(&server, "no http\r\n\r\n").starts_with("HTTP/1.1 400 "));
    let failing = Server::start(server_address(), || Err("the source failed".into())).unwrap();
    let text = exchange(&failing, "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(text.starts_with("HTTP/1.1 503 ") && text.ends_with("the source failed\n"), "{text}");
}

fn server_address() -> SocketAddr {
    parse_address("127.0.0.1:0").unwrap()
}

#[test]
fn page_is_composed_at_most_once_in_its_period() {
    let (server, composed) = start();
    let begin = Instant::now();
    for _ in 0..20 {
        exchange(&server, "GET /metrics HTTP/1.1\r\n\r\n");
    }
    let periods = (begin.elapsed().as_millis() / PAGE_EACH.as_millis()) as u32 + 1;
    assert!(composed.load(Ordering::SeqCst) <= periods);
}

#[test]
fn idle_connections_are_bounded_and_delay_no_scrape() {
    let (server, _) = start();
    let mut idle: Vec<TcpStream> = (0..2 * CONNECTIONS).map(|_| connect(&server)).collect();
    // A request that never ends is idle, too.
    idle[CONNECTIONS].write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let begin = Instant::now();
    assert!(exchange(&server, "GET /metrics HTTP/1.1\r\n\r\n").contains("page"));
    assert!(begin.elapsed() < DEADLINE, "{:?}", begin.elapsed());
    // The first ones were replaced, the others end at their deadline.
    for mut stream in idle {
        assert!(!matches!(stream.read(&mut [0]), Ok(1..)));
    }
}

#[test]
fn endless_request_is_refused() {
    let (server, _) = start();
    let mut stream = connect(&server);
    let mut sent = 0;
    // Far more than the socket buffers of both ends hold.
    while sent < 1 << 26 {
        match stream.write(&[b'A'; 1 << 14]) {
            Ok(bytes) => sent += bytes,
            Err(_) => return,
        }
    }
    panic!("{sent} bytes were accepted");
}

#[test]
fn port_alone_is_on_the_loopback_interface() {
    assert!(parse_address("9464").unwrap().ip().is_loopback());
    assert_eq!(parse_address("[::]:1").unwrap().to_string(), "[::]:1");
    for wrong in ["", "host:1", "10.0.0.2", "70000"] {
        assert!(parse_address(wrong).unwrap_err().contains("9464"), "{wrong}");
    }
}
