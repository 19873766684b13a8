//! A process that hosts a NIC; it runs the test binary again.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use rnic::nic::SoftNic;
use rnic::port::shm::{Session, SessionLimits};

/// Environment variable with the path of the socket that the host process serves.
const SOCKET: &str = "GRANARY_TEST_HOST_SOCKET";

/// A host process. It exits when its standard input is closed, so at the latest with this process.
pub struct HostProcess {
    /// Path of the served socket.
    pub socket: PathBuf,
    child: Child,
    _input: ChildStdin,
}

impl HostProcess {
    /// Starts this binary again. Its test `other_process` must call [`be_host_if_asked`].
    pub fn start() -> Self {
        let name = format!("granary-conformance-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "other_process", "--nocapture", "--test-threads=1"])
            .env(SOCKET, &socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starting this binary again");
        let input = child.stdin.take().expect("piped");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.contains("SERVES") {
            line.clear();
            assert!(output.read_line(&mut line).expect("a pipe") > 0, "the host has ended");
        }
        Self { socket, child, _input: input }
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Hosts a NIC until standard input ends, if this process was started as a host.
pub fn be_host_if_asked() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let (_nic, host) = SoftNic::host().expect("a host");
    let listener = listen(&PathBuf::from(socket));
    std::thread::spawn(move || {
        while let Ok(connection) = rustix::net::accept(&listener) {
            let session = Session::new(&host, SessionLimits::default());
            std::thread::spawn(move || super::serve(session, connection));
        }
    });
    println!("SERVES");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn listen(path: &std::path::Path) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let _ = std::fs::remove_file(path);
    let flags = SocketFlags::CLOEXEC;
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("a path")).expect("binding");
    rustix::net::listen(&listener, 8).expect("listening");
    listener
}
