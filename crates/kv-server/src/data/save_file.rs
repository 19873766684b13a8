//! The file of a save. A thread of its own compresses and writes what the save reads.

use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use redis_formats::rdb::{Meta, Options, Writer};
use units::files;

use super::save::{BUFFER, path};
use crate::server::Server;
use crate::worker::Worker;

/// Bytes that wait for the thread. The save reads on when fewer wait.
const WAITING_MAX: usize = 4 << 20;
/// Interval of the looks at the thread.
const LOOK: Duration = Duration::from_millis(2);

/// A part of the file.
pub(super) enum Part {
    /// The begin of a database, with the number of its keys.
    Database { number: u64, keys: u64 },
    /// Keys of the database that has begun last.
    Entries(Entries),
    /// The end: the file gets its name.
    End,
}

/// Keys with their values, one after the other.
#[derive(Default)]
pub(super) struct Entries {
    bytes: Vec<u8>,
    /// Length of each key, length of its value, and expiry.
    lengths: Vec<(usize, usize, u64)>,
}

impl Entries {
    /// Appends a key. Expiry in milliseconds since 1970; 0: none.
    pub fn push(&mut self, key: &[u8], value: &[u8], expiry: u64) {
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.lengths.push((key.len(), value.len(), expiry));
    }

    /// Number of keys.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.lengths.len()
    }

    fn write(&self, writer: &mut Writer<BufWriter<File>>) -> Result<(), Failure> {
        let mut rest = &self.bytes[..];
        for (key, value, expiry) in &self.lengths {
            let (key, more) = rest.split_at(*key);
            let (value, more) = more.split_at(*value);
            rest = more;
            let expires_ms = (*expiry != 0).then_some(*expiry as i64);
            writer.entry(key, value, Meta { expires_ms, ..Meta::default() })?;
        }
        Ok(())
    }
}

impl Part {
    fn bytes(&self) -> usize {
        match self {
            Self::Entries(entries) => entries.bytes.len(),
            _ => 0,
        }
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A file that is written beside the one that it replaces in the end.
pub(super) struct Target {
    parts: Sender<Part>,
    waiting: Arc<AtomicUsize>,
    thread: JoinHandle<Result<(), String>>,
}

impl Target {
    /// Creates the file, and starts its thread.
    pub fn create(server: &Server, now_ms: u64) -> Result<Self, String> {
        let path = path(server);
        let temporary = path.with_file_name(format!("temp-{}.rdb", std::process::id()));
        let error = |cause: &dyn std::fmt::Display| {
            format!("creating {}: {cause}; check dir and dbfilename", temporary.display())
        };
        let file = files::create_draft(&temporary).map_err(|cause| error(&cause))?;
        let options = Options {
            compress: server.config.is("rdbcompression", "yes"),
            checksum: server.config.is("rdbchecksum", "yes"),
        };
        let writer = Writer::new(BufWriter::with_capacity(BUFFER, file), options);
        let mut writer = writer.map_err(|cause| error(&cause))?;
        let bits = usize::BITS.to_string();
        let seconds = (now_ms / 1000).to_string();
        for (name, value) in [("redis-ver", "7.0.15"), ("redis-bits", &bits), ("ctime", &seconds)] {
            writer.aux(name.as_bytes(), value.as_bytes()).map_err(|cause| error(&cause))?;
        }
        let (parts, waiting_parts) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let thread = FileThread { writer, temporary, path, waiting: waiting.clone() };
        let thread = std::thread::spawn(|| thread.run(waiting_parts));
        Ok(Self { parts, waiting, thread })
    }

    /// Hands a part to the thread. Waits while many bytes wait there.
    ///
    /// # Errors
    ///
    /// The thread has ended. [`Target::finish`] tells the reason.
    pub async fn send(&self, worker: &Worker, part: Part) -> Result<(), String> {
        let is_full = || self.waiting.load(Ordering::Relaxed) > WAITING_MAX;
        while is_full() && !self.thread.is_finished() && !worker.server.is_ending() {
            worker.wait(LOOK).await;
        }
        self.waiting.fetch_add(part.bytes(), Ordering::Relaxed);
        self.parts.send(part).map_err(|_| "saving: the thread of the file has ended".to_owned())
    }

    /// Waits for the disk, which takes a second for a GiB. If the file `is_whole`, it gets its
    /// name; otherwise it is removed.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub async fn finish(self, worker: &Worker, is_whole: bool) -> Result<(), String> {
        let Self { parts, thread, .. } = self;
        if is_whole {
            // A thread that has ended tells the reason below.
            let _ = parts.send(Part::End);
        }
        drop(parts);
        while !thread.is_finished() && !worker.server.is_ending() {
            worker.wait(LOOK).await;
        }
        let panicked = "saving: the thread that writes the file has panicked; see standard error";
        thread.join().unwrap_or_else(|_| Err(panicked.to_owned()))
    }
}

/// The state of the thread.
struct FileThread {
    writer: Writer<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
    waiting: Arc<AtomicUsize>,
}

impl FileThread {
    /// Writes parts until the end. Removes a file that is not whole.
    fn run(self, parts: Receiver<Part>) -> Result<(), String> {
        let (temporary, path) = (self.temporary.clone(), self.path.clone());
        let written = self.write(parts);
        if !matches!(written, Ok(true)) {
            let _ = std::fs::remove_file(temporary);
        }
        match written {
            Ok(_) => Ok(()),
            Err(cause) => Err(format!("writing {}: {cause}; check the disk", path.display())),
        }
    }

    /// Returns false if the save has ended before the last part.
    fn write(self, parts: Receiver<Part>) -> Result<bool, Failure> {
        let Self { mut writer, temporary, path, waiting } = self;
        for part in parts {
            match &part {
                Part::Database { number, keys } => {
                    writer.database(*number)?;
                    writer.sizes(*keys, 0)?;
                }
                Part::Entries(entries) => entries.write(&mut writer)?,
                Part::End => {
                    let file = writer.finish()?.into_inner()?;
                    file.sync_all()?;
                    std::fs::rename(temporary, path)?;
                    return Ok(true);
                }
            }
            waiting.fetch_sub(part.bytes(), Ordering::Relaxed);
        }
        Ok(false)
    }
}
