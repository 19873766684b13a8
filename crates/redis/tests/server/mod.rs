//! A Redis server of the machine, and a client for it.

// No test uses all of it.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use redis_formats::reply::{Kind, Limits, Reply, ReplyParser};
use redis_formats::request::encode;

/// A running server without a TCP port.
pub struct Server {
    child: Child,
    folder: tempfile::TempDir,
}

/// Returns whether the program exists in version 7.0. Otherwise prints why the test is skipped; with
/// `CI` set, the test fails instead.
pub fn is_installed(program: &str) -> bool {
    let output = Command::new(program).arg("--version").output();
    let is_known = output.is_ok_and(|output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        program == "redis-check-rdb" || text.contains("v=7.0.")
    });
    if !is_known {
        let why = format!("{program} 7.0 is not installed; scripts/test-deps installs it");
        let is_ci = std::env::var("CI").is_ok_and(|ci| !matches!(&ci[..], "" | "0" | "false"));
        assert!(!is_ci, "{why}");
        eprintln!("skipped: {why}");
    }
    is_known
}

impl Server {
    /// Starts a server, or returns `None` if Redis 7.0 is not installed.
    pub fn start() -> Option<Self> {
        Self::start_in(tempfile::tempdir().expect("a folder"))
    }

    /// Starts a server that reads `dump.rdb` of the folder.
    pub fn start_in(folder: tempfile::TempDir) -> Option<Self> {
        if !is_installed("redis-server") {
            return None;
        }
        let socket = folder.path().join("socket");
        let options = ["--port", "0", "--save", "", "--enable-debug-command", "yes", "--dir"];
        let mut child = Command::new("redis-server")
            .args(options)
            .arg(folder.path())
            .args([OsStr::new("--unixsocket"), socket.as_os_str()])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a server");
        let mut log = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut text = String::new();
        while !text.contains("ready to accept connections") {
            let len = log.read_line(&mut text).expect("a line");
            assert_ne!(len, 0, "the server ended: {text}");
        }
        // The server must not block on a full pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Some(Self { child, folder })
    }

    pub fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.folder.path().join("socket")).expect("a connection");
        Client { stream, buffer: Vec::new(), parser: ReplyParser::default() }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A reply with memory of its own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tree {
    pub kind: String,
    pub text: Vec<u8>,
    pub children: Vec<Tree>,
}

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.kind)?;
        match self.text.is_empty() {
            true => f.debug_list().entries(&self.children).finish(),
            false => write!(f, ":{}", self.text.escape_ascii()),
        }
    }
}

impl Tree {
    pub fn of(reply: Reply<'_>) -> Self {
        let children = reply.children().map(Self::of).collect();
        Self { kind: format!("{:?}", reply.kind()), text: reply.text().to_vec(), children }
    }

    pub fn str(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }

    pub fn is_null(&self) -> bool {
        self.kind == format!("{:?}", Kind::Null)
    }
}

pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
    parser: ReplyParser,
}

impl Client {
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("a write");
    }

    /// Ends the requests, and returns all bytes up to the end of the connection.
    pub fn rest(mut self) -> Vec<u8> {
        let mut out = Vec::new();
        self.stream.shutdown(Shutdown::Write).expect("a shutdown");
        // A server that closes with unread bytes resets the connection after its reply.
        let _ = self.stream.read_to_end(&mut out);
        out
    }

    pub fn receive(&mut self) -> Tree {
        loop {
            let parsed = self.parser.parse(&self.buffer, &Limits::default()).expect("a reply");
            if let Some(used) = parsed {
                let tree = Tree::of(self.parser.reply(&self.buffer));
                self.buffer.drain(..used);
                return tree;
            }
            let mut part = [0; 1 << 16];
            let len = self.stream.read(&mut part).expect("a read");
            assert_ne!(len, 0, "the server closed the connection");
            self.buffer.extend(&part[..len]);
        }
    }

    pub fn call<T: AsRef<[u8]>>(&mut self, arguments: &[T]) -> Tree {
        let mut bytes = Vec::new();
        encode(arguments, &mut bytes);
        self.send(&bytes);
        self.receive()
    }

    /// Sends words that blanks separate.
    pub fn line(&mut self, line: &str) -> Tree {
        self.call(&line.split(' ').collect::<Vec<_>>())
    }
}
