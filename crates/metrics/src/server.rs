//! Serves the page over HTTP: `GET /metrics`.
//!
//! One thread serves all connections without blocking on any of them. A scraper is not trusted:
//!
//! | bound | value |
//! | --- | --- |
//! | open connections; a further one replaces the oldest | [`CONNECTIONS`] |
//! | time from the accept to the end of the answer | [`DEADLINE`] |
//! | bytes of a request | [`REQUEST_BYTES`] |
//! | new connections per second | 1 / [`ACCEPT_EACH`] |
//! | pages composed per second; others get the last page | 1 / [`PAGE_EACH`] |

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Maximum number of open connections.
pub const CONNECTIONS: usize = 8;
/// Time after which a connection is closed.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// Maximum length of a request in bytes.
pub const REQUEST_BYTES: usize = 8 << 10;
/// Minimum time between two accepted connections.
pub const ACCEPT_EACH: Duration = Duration::from_millis(2);
/// Time for which a page is served again.
pub const PAGE_EACH: Duration = Duration::from_millis(100);
/// Delay of the next attempt after a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Maximum number of header fields of a request.
const HEADERS: usize = 64;

const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// Parses `PORT`, `ADDRESS:PORT` or `[ADDRESS]:PORT`. A port alone means the loopback interface.
///
/// # Errors
/// A description of the accepted values.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<u16>() {
        Ok(port) => Ok((IpAddr::from(Ipv4Addr::LOCALHOST), port).into()),
        Err(_) => text.parse().map_err(|_| {
            "expected a port, or an IP address of this host and a port: 9464, 10.0.0.2:9464, \
             [fd00::2]:9464"
                .into()
        }),
    }
}

/// A running server; dropping it stops it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves at `address` what `page` returns. An error of `page` is answered with status 503.
    ///
    /// # Errors
    /// If the address is not one of this host or is in use, or if no thread can be started.
    pub fn start(
        address: SocketAddr,
        page: impl FnMut() -> Result<String, String> + Send + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = stop.clone();
        let thread = thread::Builder::new().name("granary-metrics".into()).spawn(move || {
            let page = Page { compose: page, last: None };
            Loop { listener, connections: Vec::new(), accept_at: None, page }.run(&stopped);
        })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// The address, with the port that the kernel has chosen for port 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the page.
    pub fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The write does not block. If the counter is at its maximum, a wake-up is pending already.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread is reported on stderr already.
            let _ = thread.join();
        }
    }
}

/// The source of pages, and the last page.
struct Page<F> {
    compose: F,
    last: Option<(Instant, Result<String, String>)>,
}

impl<F: FnMut() -> Result<String, String>> Page<F> {
    /// The complete answer with the page.
    fn answer(&mut self) -> Vec<u8> {
        let is_new = |at: &Instant| at.elapsed() < PAGE_EACH;
        if !self.last.as_ref().is_some_and(|(at, _)| is_new(at)) {
            let page = (self.compose)();
            // Timed after the call, so that a slow source does not run all the time.
            self.last = Some((Instant::now(), page));
        }
        match &self.last.as_ref().expect("just composed").1 {
            Ok(page) => answer("200 OK", CONTENT, page),
            Err(why) => answer("503 Service Unavailable", TEXT, &format!("{why}\n")),
        }
    }
}

fn answer(status: &str, content: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

struct Loop<F> {
    listener: TcpListener,
    /// Oldest first.
    connections: Vec<Connection>,
    /// Time before which no connection is accepted.
    accept_at: Option<Instant>,
    page: Page<F>,
}

struct Connection {
    stream: TcpStream,
    until: Instant,
    request: Vec<u8>,
    /// The answer, and the number of its bytes that are sent.
    answer: Option<(Vec<u8>, usize)>,
}

impl<F: FnMut() -> Result<String, String>> Loop<F> {
    fn run(&mut self, stop: &OwnedFd) {
        loop {
            let now = Instant::now();
            self.connections.retain(|connection| connection.until > now);
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept_at = None;
            }
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            fds.extend(self.connections.iter().map(Connection::poll_fd));
            if self.accept_at.is_none() {
                fds.push(PollFd::new(&self.listener, PollFlags::IN));
            }
            let next = self.connections.iter().map(|connection| connection.until);
            let next = next.chain(self.accept_at).min();
            let timeout = next.map(|at| timespec(at.saturating_duration_since(now)));
            if poll(&mut fds, timeout.as_ref()).is_err() {
                // A signal, or the kernel lacks memory for the call.
                thread::sleep(ACCEPT_EACH);
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if ready[0] {
                return;
            }
            let accepts = self.accept_at.is_none() && ready.last() == Some(&true);
            let mut ready = ready[1..].iter();
            let page = &mut self.page;
            self.connections.retain_mut(|connection| match ready.next() {
                Some(true) => connection.serve(page).is_ok(),
                _ => true,
            });
            if accepts {
                self.accept();
            }
        }
    }

    fn accept(&mut self) {
        let now = Instant::now();
        let stream = self.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        self.accept_at = match stream {
            Ok(stream) => {
                if self.connections.len() >= CONNECTIONS {
                    self.connections.remove(0);
                }
                let (request, answer, until) = (Vec::new(), None, now + DEADLINE);
                self.connections.push(Connection { stream, until, request, answer });
                Some(now + ACCEPT_EACH)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {
                None
            }
            // No descriptor or memory is available: connections stay in the backlog.
            Err(_) => Some(now + ACCEPT_AGAIN),
        };
    }
}

fn timespec(left: Duration) -> Timespec {
    // Rounded up, so that the time has come when the thread wakes.
    let left = left + Duration::from_micros(100);
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
}

impl Connection {
    fn poll_fd(&self) -> PollFd<'_> {
        let flags = if self.answer.is_some() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&self.stream, flags)
    }

    /// Reads or writes as much as is possible now. The connection is closed at an error.
    fn serve(&mut self, page: &mut Page<impl FnMut() -> Result<String, String>>) -> io::Result<()> {
        if self.answer.is_none() && !self.read()? {
            return Ok(());
        }
        let request = &self.request;
        let (answer, sent) = self.answer.get_or_insert_with(|| (respond(request, page), 0));
        while *sent < answer.len() {
            match self.stream.write(&answer[*sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => *sent += bytes,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Err(ErrorKind::ConnectionAborted.into())
    }

    /// Reads once. True if the request is complete or cannot become a valid one.
    fn read(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 2 << 10];
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.request.extend_from_slice(&bytes[..count]);
                let is_too_long = self.request.len() > REQUEST_BYTES;
                Ok(is_too_long || !matches!(parse(&self.request), Ok(Parsed::Part)))
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }
}

enum Parsed {
    /// The header is incomplete.
    Part,
    /// A request for the page.
    Page,
    /// Another request.
    Other,
}

fn parse(request: &[u8]) -> Result<Parsed, httparse::Error> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    if parsed.parse(request)?.is_partial() {
        return Ok(Parsed::Part);
    }
    let path = parsed.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Ok(match (parsed.method, path) {
        (Some("GET"), "/metrics") => Parsed::Page,
        _ => Parsed::Other,
    })
}

fn respond(request: &[u8], page: &mut Page<impl FnMut() -> Result<String, String>>) -> Vec<u8> {
    match parse(request) {
        Ok(Parsed::Page) => page.answer(),
        Ok(Parsed::Other) => answer("404 Not Found", TEXT, "only GET /metrics is served\n"),
        Ok(Parsed::Part) | Err(_) => answer("400 Bad Request", TEXT, "not a valid request\n"),
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
