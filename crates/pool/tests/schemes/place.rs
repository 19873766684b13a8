//! Location of the memory node under test.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common;
use pool::{
    ControlMode, EmbeddedNode, Endpoint, Options, Pool, Scheme, Service, Settings, schemes,
};

/// Location of the memory node relative to its compute nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In the same process, on the inline NIC.
    Embedded,
    /// In the same process, behind its control socket.
    SameProcess,
    /// In another process.
    OtherProcess,
}

/// Configuration of a memory node.
#[derive(Clone, Copy)]
pub struct How {
    pub scheme: Scheme,
    pub control: ControlMode,
    /// CPU cores that answer requests.
    pub cores: u32,
    /// Allocation uses QPs of its own.
    pub separation: bool,
    /// Functions of the NIC have few windows, so that the chunks are spread over three functions.
    pub few_windows: bool,
}

impl How {
    /// The settings with the options of the scheme that differ from the default.
    fn apply(&self, settings: Settings) -> Settings {
        let mut settings = settings;
        if self.control != ControlMode::Event {
            settings = settings.with("control", self.control);
        }
        if self.cores != 1 {
            settings = settings.with("cores", self.cores);
        }
        if !self.separation {
            settings = settings.with("separation", false);
        }
        settings
    }

    /// The default configuration of a scheme.
    pub fn by(scheme: Scheme) -> Self {
        Self { scheme, control: ControlMode::Event, cores: 1, separation: true, few_windows: false }
    }
}

/// A running memory node.
pub enum Node {
    Embedded(Arc<EmbeddedNode>),
    SameProcess(Service),
    OtherProcess(ServerProcess),
}

/// A memory node in a process of its own.
pub struct ServerProcess {
    child: Child,
    dir: tempfile::TempDir,
}

const SETTINGS: &str = "GRANARY_TEST_SERVE";

impl Node {
    /// Starts a memory node with `chunks` chunks of `chunk_bytes`.
    pub fn start(place: Place, how: How, chunk_bytes: u64, chunks: u64) -> Node {
        let settings = Settings {
            donate_bytes: chunk_bytes * chunks,
            chunk_bytes,
            scheme: how.scheme,
            clients_max: 16,
            groups_max: 4,
            ..Settings::default()
        };
        let settings = how.apply(settings);
        let settings = match how.few_windows {
            true => common::over_functions(settings),
            false => settings,
        };
        Node::with(place, &settings)
    }

    /// Starts a memory node.
    pub fn with(place: Place, settings: &Settings) -> Node {
        match place {
            Place::Embedded => Node::Embedded(Arc::new(EmbeddedNode::start(settings).unwrap())),
            Place::SameProcess => {
                Node::SameProcess(Service::start(settings, &Endpoint::Fresh).unwrap())
            }
            Place::OtherProcess => Node::OtherProcess(ServerProcess::start(settings)),
        }
    }

    /// Connects a compute node with two groups.
    pub fn connect(&self) -> Pool {
        self.connect_with(Options { groups: Some(2), ..Options::default() })
    }

    /// Connects a compute node.
    pub fn connect_with(&self, options: Options) -> Pool {
        match self {
            Node::Embedded(embedded) => Pool::embedded_in(embedded, options).unwrap(),
            Node::SameProcess(service) => Pool::connect(service.path(), options).unwrap(),
            Node::OtherProcess(server) => Pool::connect(server.path(), options).unwrap(),
        }
    }

    /// Checks that all `chunks` are free and that only this connection exists.
    pub fn check_whole(&self, chunks: u64) {
        let asking = self.connect();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let status = asking.node_status().unwrap().node;
            assert_eq!(status.chunks, chunks);
            if status.free == chunks && (status.clients, status.leaving) == (1, 0) {
                break;
            }
            // The memory node notices a departed client only when the connection has closed.
            // Abandoned requests may be in progress until then, and an audit is exact only when
            // there are none.
            assert!(Instant::now() < deadline, "chunks are missing: {status:?}");
            std::thread::yield_now();
        }
        asking.audit().unwrap();
    }
}

impl ServerProcess {
    fn start(settings: &Settings) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool.sock");
        let s = settings;
        let words = format!(
            "{} {} {} {} {} {} {} {}",
            s.donate_bytes,
            s.chunk_bytes,
            s.clients_max,
            s.groups_max,
            s.scheme,
            s.options.iter().any(|option| option == ("control", &"polling".into())),
            s.options.iter().all(|option| option != ("separation", &false.into())),
            s.nic_windows.unwrap_or(u32::MAX)
        );
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "place::serve_for_another_process", "--nocapture"])
            .env(SETTINGS, format!("{words} {}", path.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, dir };
        let deadline = Instant::now() + Duration::from_secs(20);
        while !path.exists() {
            assert!(Instant::now() < deadline, "the memory node does not start");
            std::thread::sleep(Duration::from_millis(2));
        }
        server
    }

    /// Path of the control socket.
    pub fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("pool.sock")
    }

    /// Kills the process, as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Closing its standard input makes the process exit.
        if let Some(mut input) = self.child.stdin.take() {
            let _ = input.flush();
        }
        let _ = self.child.wait();
    }
}

/// Helper, not a test: the memory node of [`Place::OtherProcess`], if the environment variable is
/// set.
#[test]
fn serve_for_another_process() {
    let Ok(words) = std::env::var(SETTINGS) else { return };
    let words: Vec<&str> = words.splitn(9, ' ').collect();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    let settings = Settings {
        donate_bytes: number(0),
        chunk_bytes: number(1),
        clients_max: number(2) as u32,
        groups_max: number(3) as u32,
        scheme: schemes::find(words[4]).unwrap(),
        nic_windows: Some(number(7) as u32).filter(|windows| *windows < u32::MAX),
        ..Settings::default()
    };
    let settings = match words[5] {
        "true" => settings.with("control", "polling"),
        _ => settings,
    };
    let settings = match words[6] {
        "true" => settings,
        _ => settings.with("separation", false),
    };
    let service = Service::start(&settings, &Endpoint::At(words[8].into())).unwrap();
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    assert_eq!(service.failure(), None);
    service.stop();
}
