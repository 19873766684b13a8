//! A server in this process, and raw connections to it.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod map;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kv_server::config::Config;
use kv_server::{Error, Setup, Stop};

use self::map::Map;

/// A test fails if a reply takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server.
pub struct Started {
    pub store: Arc<Map>,
    pub addresses: Vec<String>,
    stop: Stop,
    ended: Option<JoinHandle<Result<(), Error>>>,
}

/// Starts a server at a free port, with parameters.
pub fn start(parameters: &[(&str, &str)]) -> Started {
    let config = Config::default();
    config.set_at_start("port", &[b"0"]).unwrap();
    config.set_at_start("bind", &[b"127.0.0.1"]).unwrap();
    let mut has_address = false;
    for (name, value) in parameters {
        has_address |= ["tls-port", "unixsocket", "port"].contains(name);
        assert!(config.set_at_start(name, &[value.as_bytes()]).unwrap(), "{name}");
    }
    if !has_address {
        config.set_at_start("port", &[free_port().to_string().as_bytes()]).unwrap();
    }
    start_with(Setup { config, ..Setup::default() })
}

pub fn start_with(setup: Setup) -> Started {
    let store = Arc::new(Map::default());
    let running = setup.start(store.clone()).unwrap();
    let (stop, addresses) = (running.stop(), running.addresses().to_vec());
    let ended = Some(std::thread::spawn(move || running.wait()));
    Started { store, addresses, stop, ended }
}

/// A port that is free now.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Started {
    pub fn connect(&self) -> Client<TcpStream> {
        let stream = TcpStream::connect(&self.addresses[0]).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client::new(stream)
    }

    /// Asks the server to end, as SIGTERM does.
    pub fn ask_to_stop(&self) {
        self.stop.stop();
    }

    /// Waits for the end of a server that ends by itself.
    pub fn wait(mut self) -> Result<(), Error> {
        self.ended.take().unwrap().join().unwrap()
    }

    pub fn stop(self) -> Result<(), Error> {
        self.stop.stop();
        self.wait()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            self.stop.stop();
            let result = ended.join().unwrap();
            if !std::thread::panicking() {
                result.unwrap();
            }
        }
    }
}

/// A connection.
pub struct Client<S> {
    pub stream: S,
    read: Vec<u8>,
}

impl<S: Read + Write> Client<S> {
    pub fn new(stream: S) -> Self {
        Self { stream, read: Vec::new() }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// Sends a command as an array of bulk strings.
    pub fn command(&mut self, words: &[&[u8]]) {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend(format!("${}\r\n", word.len()).bytes());
            bytes.extend_from_slice(word);
            bytes.extend(b"\r\n");
        }
        self.send(bytes);
    }

    /// Reads a reply, and prints it on one line: elements of arrays in brackets.
    pub fn reply(&mut self) -> String {
        let line = self.line();
        let (kind, text) = line.split_at(1);
        match kind {
            "$" | "=" => match text.parse::<usize>() {
                Ok(len) => {
                    let bytes = self.take(len + 2);
                    String::from_utf8_lossy(&bytes[..len]).into_owned()
                }
                Err(_) => "nil".to_owned(),
            },
            "*" | ">" | "~" | "%" => match text.parse::<usize>() {
                Ok(count) => {
                    let count = if kind == "%" { count * 2 } else { count };
                    let all: Vec<String> = (0..count).map(|_| self.reply()).collect();
                    format!("[{}]", all.join(" "))
                }
                Err(_) => "nil".to_owned(),
            },
            "_" => "nil".to_owned(),
            ":" | "+" | "," | "#" | "(" => text.to_owned(),
            "-" => line,
            _ => panic!("no reply: {line:?}"),
        }
    }

    /// Sends an inline command, and reads its reply.
    pub fn ask(&mut self, line: &str) -> String {
        self.send(format!("{line}\r\n"));
        self.reply()
    }

    /// Reads the rest until the end of the connection.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = std::mem::take(&mut self.read);
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return rest,
                Ok(count) => rest.extend_from_slice(&buffer[..count]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return rest,
                Err(e) => panic!("the connection did not end: {e}"),
            }
        }
    }

    pub fn line(&mut self) -> String {
        loop {
            if let Some(at) = self.read.windows(2).position(|two| two == b"\r\n") {
                let line = self.take(at + 2);
                return String::from_utf8_lossy(&line[..at]).into_owned();
            }
            self.more();
        }
    }

    pub fn take(&mut self, count: usize) -> Vec<u8> {
        while self.read.len() < count {
            self.more();
        }
        self.read.drain(..count).collect()
    }

    fn more(&mut self) {
        let mut buffer = [0; 65536];
        let count = self.stream.read(&mut buffer).unwrap();
        assert!(count > 0, "the connection ended");
        self.read.extend_from_slice(&buffer[..count]);
    }
}

impl Client<TcpStream> {
    pub fn finish_sending(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}
