//! `granary kv` as a process, and raw connections to it.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::node::{granary, start_and_wait_ready};
use crate::signals;

/// A test fails if a reply takes longer.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running `granary kv`; dropping the value ends the process.
pub struct Server {
    /// The process.
    pub child: Child,
    /// The line that the server prints when it is ready.
    pub ready: Value,
    /// The TCP port.
    pub port: u16,
}

impl Server {
    /// Starts a server on a free port of 127.0.0.1, with 64 MiB of its own unless a pool is named.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        Self::start_by(Command::new(granary()), arguments)
    }

    /// As [`Server::start`], by a command that ends with the path of `granary`.
    pub fn start_by(mut command: Command, arguments: &[&str]) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let port_text = port.to_string();
        command.args(["kv", "--json", "--bind", "127.0.0.1", "--port", &port_text]);
        if !arguments.contains(&"--pool") {
            command.args(["--memory", "64MiB"]);
        }
        let (child, ready) = start_and_wait_ready(command.args(arguments))?;
        Ok(Self { child, ready, port })
    }

    /// Opens a connection.
    pub fn connect(&self) -> Result<Connection> {
        Connection::open(self.port)
    }

    /// Returns the output of a program that gets the port as `-p PORT`.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let port = self.port.to_string();
        let out = Command::new(program).args(["-p", &port]).args(arguments).output()?;
        ensure!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
        Ok(String::from_utf8(out.stdout)?)
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        signals::signal(self.child.id() as i32, signal)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A raw connection to a server.
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Opens a connection to a server of the calling thread's host.
    pub fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Reads a line, without its end.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &str) -> Result<()> {
        Ok(self.0.get_mut().write_all(bytes.as_bytes())?)
    }

    /// Sends a command as bulk strings, of any length.
    pub fn send_command(&mut self, words: &[&[u8]]) -> Result<()> {
        let mut request = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            request.extend(format!("${}\r\n", word.len()).bytes());
            request.extend_from_slice(word);
            request.extend(b"\r\n");
        }
        Ok(self.0.get_mut().write_all(&request)?)
    }

    /// Sends an inline command, and reads the first line of its reply.
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.0.get_mut().write_all(format!("{command}\r\n").as_bytes())?;
        self.line()
    }
}
