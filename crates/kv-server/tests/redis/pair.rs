//! A redis-server and a server over an embedded pool, with connections to both.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kv_server::config::Config;
use kv_server::data::{Data, Reopened};
use kv_server::{Error, Setup, Stop};
use pool::Pool;
use redis_formats::words;

/// A port that is free now.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A directory, with a copy of `file` under the name that servers load.
fn directory(file: Option<&Path>) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    if let Some(file) = file {
        std::fs::copy(file, directory.path().join("dump.rdb")).unwrap();
    }
    directory
}

/// A redis-server.
pub struct Theirs {
    process: Child,
    port: u16,
    directory: tempfile::TempDir,
}

impl Theirs {
    /// Starts redis-server, if there is one.
    pub fn start(file: Option<&Path>) -> Option<Self> {
        // Another program may take the port before redis-server does, which then ends.
        (0..20).find_map(|_| Self::start_at(free_port(), directory(file)).transpose())?.ok()
    }

    /// Starts redis-server at a port. Returns `None` if the port is taken.
    fn start_at(port: u16, directory: tempfile::TempDir) -> std::io::Result<Option<Self>> {
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", "", "--dir"])
            .arg(directory.path())
            .stdout(Stdio::null())
            .spawn()?;
        let mut theirs = Self { process, port, directory };
        // The server listens only once its process has started.
        while !theirs.answers().unwrap_or(false) {
            if theirs.process.try_wait()?.is_some() {
                return Ok(None);
            }
            std::thread::yield_now();
        }
        Ok(Some(theirs))
    }

    /// True if this process answers at the port, and not a program that has taken the port before.
    fn answers(&self) -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        // Without a listener, a connection that gets this port as its own is one to itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Ok(false);
        }
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"INFO server\r\nQUIT\r\n")?;
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply)?;
        let own = format!("process_id:{}\r\n", self.process.id());
        Ok(String::from_utf8_lossy(&reply).contains(&own))
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Our server.
pub struct Ours {
    address: String,
    stop: Stop,
    ended: Option<JoinHandle<Result<(), Error>>>,
    directory: tempfile::TempDir,
}

impl Ours {
    pub fn start(file: Option<&Path>) -> Self {
        Self::start_over(256 << 20, file)
    }

    /// Starts our server with a pool of `donate_bytes`.
    pub fn start_over(donate_bytes: u64, file: Option<&Path>) -> Self {
        Self::start_with(donate_bytes, file, ("rdb-skip-unknown", "no"))
    }

    /// Starts our server with another parameter.
    pub fn start_with(donate_bytes: u64, file: Option<&Path>, more: (&str, &str)) -> Self {
        let directory = directory(file);
        let config = Config::default();
        let (port, path) = (free_port().to_string(), directory.path().to_str().unwrap().to_owned());
        for (name, value) in [
            ("port", &*port),
            ("bind", "127.0.0.1"),
            ("save", ""),
            ("dir", &path),
            ("io-threads", "2"),
            more,
        ] {
            assert!(config.set_at_start(name, &[value.as_bytes()]).unwrap());
        }
        let settings = pool::Settings { donate_bytes, chunk_bytes: 64 << 10, ..Default::default() };
        let pool = Pool::embedded(settings).unwrap();
        let (heap, settings) = (heap::Settings::default(), kv::Settings::default());
        let data = Data::create(pool, heap, settings.clone()).unwrap();
        // As in the product.
        let data = Reopened::new(data, heap, settings);
        let running = Setup { config, ..Setup::default() }.start(Arc::new(data)).unwrap();
        let (stop, address) = (running.stop(), running.addresses()[0].clone());
        let ended = Some(std::thread::spawn(move || running.wait()));
        Self { address, stop, ended, directory }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.stop.stop();
        let result = self.ended.take().unwrap().join().unwrap();
        if !std::thread::panicking() {
            result.unwrap();
        }
    }
}

/// The request of a line.
fn request(line: &str) -> Vec<u8> {
    let words = words::split(line.as_bytes()).unwrap();
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in &words {
        request.extend(format!("${}\r\n", word.len()).bytes());
        request.extend_from_slice(word);
        request.extend(b"\r\n");
    }
    request
}

/// A connection.
pub struct Client(BufReader<TcpStream>);

impl Client {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn ask(&mut self, line: &str) -> Vec<u8> {
        self.0.get_mut().write_all(&request(line)).unwrap();
        let mut reply = Vec::new();
        self.read(&mut reply);
        // While a file is loaded, commands are refused.
        if reply.starts_with(b"-LOADING") { self.ask(line) } else { reply }
    }

    /// Sends all requests before the first reply is read. Returns the replies.
    pub fn ask_all(&mut self, lines: &[String]) -> Vec<u8> {
        let requests: Vec<u8> = lines.iter().flat_map(|line| request(line)).collect();
        self.0.get_mut().write_all(&requests).unwrap();
        let mut replies = Vec::new();
        lines.iter().for_each(|_| self.read(&mut replies));
        replies
    }

    fn read(&mut self, reply: &mut Vec<u8>) {
        let begin = reply.len();
        assert!(self.0.read_until(b'\n', reply).unwrap() > 0, "the connection ended");
        let text = String::from_utf8_lossy(&reply[begin + 1..]).trim().to_owned();
        let count = text.parse::<usize>().unwrap_or(0);
        match reply[begin] {
            b'$' | b'=' if text != "-1" => {
                let end = reply.len();
                reply.resize(end + count + 2, 0);
                self.0.read_exact(&mut reply[end..]).unwrap();
            }
            b'*' | b'>' | b'~' => (0..count).for_each(|_| self.read(reply)),
            b'%' => (0..2 * count).for_each(|_| self.read(reply)),
            _ => {}
        }
    }
}

/// Both servers: redis-server (number 0) and ours (number 1).
pub struct Pair {
    theirs: Option<Theirs>,
    ours: Ours,
    clients: Vec<[Option<Client>; 2]>,
}

impl Pair {
    pub fn start() -> Option<Self> {
        match Theirs::start(None) {
            Some(theirs) => Some(Self::of(theirs, Ours::start(None))),
            None => {
                eprintln!("redis-server is not installed: nothing is compared");
                None
            }
        }
    }

    pub fn of(theirs: Theirs, ours: Ours) -> Self {
        Self { theirs: Some(theirs), ours, clients: Vec::new() }
    }

    pub fn of_ours(ours: Ours) -> Self {
        Self { theirs: None, ours, clients: Vec::new() }
    }

    /// Replaces both connections of each server, and empties the servers.
    pub fn connect(&mut self, protocol: &str) {
        self.connect_without_flush(protocol);
        drop(self.ask("FLUSHALL"));
    }

    pub fn connect_without_flush(&mut self, protocol: &str) {
        let theirs = self.theirs.as_ref().map(|own| format!("127.0.0.1:{}", own.port));
        let addresses = [theirs, Some(self.ours.address.clone())];
        let connect = || {
            addresses.clone().map(|address| {
                let mut client = Client::new(TcpStream::connect(address?).unwrap());
                client.ask(&format!("HELLO {protocol}"));
                Some(client)
            })
        };
        self.clients = vec![connect(), connect()];
    }

    /// Another connection to our server.
    pub fn another(&self) -> Client {
        Client::new(TcpStream::connect(&self.ours.address).unwrap())
    }

    /// Sends a command to both servers.
    pub fn ask(&mut self, line: &str) -> [Vec<u8>; 2] {
        [0, 1].map(|which| match which == 0 && self.theirs.is_none() {
            true => Vec::new(),
            false => self.ask_one(which, line),
        })
    }

    /// Sends commands to both servers, each time in one pipeline.
    pub fn ask_all(&mut self, lines: &[String]) -> [Vec<u8>; 2] {
        [0, 1].map(|which| self.clients[0][which].as_mut().unwrap().ask_all(lines))
    }

    /// Sends a command to one server.
    pub fn ask_one(&mut self, which: usize, line: &str) -> Vec<u8> {
        let (connection, line) = match line.strip_prefix("@2 ") {
            Some(line) => (1, line),
            None => (0, line),
        };
        self.clients[connection][which].as_mut().unwrap().ask(line)
    }

    /// A number of INFO.
    pub fn field(&mut self, which: usize, name: &str) -> u64 {
        let info = String::from_utf8(self.ask_one(which, "INFO")).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().trim().parse().unwrap()
    }

    /// The messages that the second connection of each server got up to now. The connection is
    /// subscribed to `done`.
    pub fn messages(&mut self) -> [Vec<Vec<u8>>; 2] {
        let _ = self.ask("PUBLISH done x");
        [0, 1].map(|which| {
            let client = self.clients[1][which].as_mut().unwrap();
            let mut messages = Vec::new();
            loop {
                let mut message = Vec::new();
                client.read(&mut message);
                if message.windows(8).any(|own| own == b"done\r\n$1") {
                    return messages;
                }
                messages.push(message);
            }
        })
    }

    /// The next message of our second connection.
    pub fn message(&mut self) -> Vec<u8> {
        let mut message = Vec::new();
        self.clients[1][1].as_mut().unwrap().read(&mut message);
        message
    }

    /// Takes the directories away, so that saves fail.
    pub fn remove_directories(&self) {
        let theirs = self.theirs.as_ref().map(|own| own.directory.path());
        for directory in [theirs, Some(self.ours.directory.path())].into_iter().flatten() {
            std::fs::remove_dir_all(directory).unwrap();
        }
    }

    /// Takes the name of the files for directories, so that saves fail, or gives the name back.
    pub fn hold_files(&self, are_held: bool) {
        let theirs = self.theirs.as_ref().map(|own| own.directory.path());
        for directory in [theirs, Some(self.ours.directory.path())].into_iter().flatten() {
            let file = directory.join("dump.rdb");
            if are_held {
                // The file of the save before may be there.
                let _ = std::fs::remove_file(&file);
                std::fs::create_dir(&file).unwrap();
            } else {
                std::fs::remove_dir(&file).unwrap();
            }
        }
    }

    /// The files that SAVE has written, copied to places that stay.
    pub fn files(&self) -> [PathBuf; 2] {
        let keep = |directory: Option<&Path>| {
            let Some(directory) = directory else { return PathBuf::new() };
            let kept = tempfile::NamedTempFile::new().unwrap().into_temp_path().keep().unwrap();
            std::fs::copy(directory.join("dump.rdb"), &kept).unwrap();
            kept
        };
        let theirs = self.theirs.as_ref().map(|own| own.directory.path());
        [keep(theirs), keep(Some(self.ours.directory.path()))]
    }
}
