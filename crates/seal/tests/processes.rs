//! No pair of key and nonce is used twice by the processes of a run: parents, forked children and
//! grandchildren, after new keys, and in runs that follow a run that was killed.
//!
//! Each process seals zeros and records the ciphertext. The ciphertext of zeros is the key stream,
//! which follows from key and nonce alone, so a repeated pair would be a repeated record. A process
//! also tries the sealers of its ancestors, and records what they yield.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use seal::{Cipher, Sealer};

/// Environment variable of a process that seals: the file of its records.
const RECORDS: &str = "GRANARY_SEAL_RECORDS";
/// Runs, each of which is killed.
const RUNS: usize = 4;
/// Generations of forked processes in a run, without the first process.
const DEPTH: usize = 3;
/// Children of a process.
const CHILDREN: usize = 2;
/// Stores between two events of a process: a fork or a new key.
const STORES: usize = 50;
/// New keys of a process after its forks.
const REKEYS: usize = 5;

/// Stores of a process that waits for its end.
const STORES_AT_MOST: usize = 2_000;

/// Bytes of a record: depth of the process and of the sealer that it uses, counter, key stream.
const RECORD_BYTES: usize = 42;
type Record = [u8; RECORD_BYTES];

/// A process of a run.
struct Process {
    /// The sealers of the ancestors, and that of the process.
    sealers: Vec<Sealer>,
    /// Number of ancestors.
    depth: usize,
    records: File,
}

impl Process {
    /// Seals with each sealer, and records the results. An ancestor's sealer refuses.
    fn store(&mut self) {
        for (depth, sealer) in self.sealers.iter().enumerate() {
            let mut record = [0; RECORD_BYTES];
            let Ok(seal) = sealer.seal(0, &[0; 32], &mut record[10..]) else { continue };
            record[..2].copy_from_slice(&[self.depth as u8, depth as u8]);
            record[2..10].copy_from_slice(&seal.counter.to_be_bytes());
            // One write of a few bytes to a file that is opened for appending stays whole.
            self.records.write_all(&record).expect("the records are written");
        }
    }

    fn stores(&mut self) {
        (0..STORES).for_each(|_| self.store());
    }

    /// Seals, forks and makes new keys, then makes [`STORES_AT_MOST`] stores and waits for SIGKILL,
    /// which may come before.
    fn run(mut self) -> ! {
        self.stores();
        if self.depth < DEPTH {
            for _ in 0..CHILDREN {
                // SAFETY: the child ends without destructors or exit handlers, in this function or
                // by SIGKILL. No other thread of this process holds a lock that it takes.
                if unsafe { libc::fork() } == 0 {
                    self.depth += 1;
                    self.store();
                    self.sealers.push(Sealer::new(Cipher::default()).expect("a sealer"));
                    self.run();
                }
                self.stores();
            }
        }
        for _ in 0..REKEYS {
            let own = self.sealers.last().expect("each process has a sealer");
            own.rekey().expect("a new key");
            self.stores();
        }
        eprint!("{READY}");
        (0..STORES_AT_MOST).for_each(|_| self.store());
        loop {
            // SAFETY: waits for SIGKILL.
            unsafe { libc::pause() };
        }
    }
}

/// Character that a process writes to standard error after its events.
const READY: char = '+';

#[test]
#[ignore = "a process that is killed: the other test of this file starts it, in make test too"]
fn process_of_a_run() {
    let records = std::env::var_os(RECORDS).expect("set by the other test");
    let records = OpenOptions::new().append(true).create(true).open(records).expect("a file");
    Process { sealers: vec![Sealer::new(Cipher::default()).unwrap()], depth: 0, records }.run()
}

/// Runs processes until each has sealed after its last event, and then kills all at once.
fn run_and_kill(records: &PathBuf) {
    let mut first = Command::new(std::env::current_exe().unwrap())
        .args(["process_of_a_run", "--exact", "--ignored", "--nocapture"])
        .env(RECORDS, records)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let mut stderr = first.stderr.take().unwrap();
    let processes = (0..=DEPTH as u32).map(|depth| CHILDREN.pow(depth)).sum();
    let mut seen = vec![0; processes];
    let all_ready = stderr.read_exact(&mut seen);
    // SAFETY: the process group of the child, which is not reaped yet.
    unsafe { libc::kill(-(first.id() as i32), libc::SIGKILL) };
    // The end of the file comes when no process has it open, so that the last one has ended.
    stderr.read_to_end(&mut seen).unwrap();
    first.wait().unwrap();
    all_ready.unwrap();
    let seen = String::from_utf8_lossy(&seen);
    assert!(seen.chars().all(|byte| byte == READY), "{seen}");
}

#[test]
fn processes_of_killed_runs_repeat_no_key_stream() {
    let records = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("seal-records-{}", std::process::id()));
    let _ = std::fs::remove_file(&records);
    (0..RUNS).for_each(|_| run_and_kill(&records));
    let bytes = std::fs::read(&records).unwrap();
    std::fs::remove_file(&records).unwrap();
    let (all, rest) = bytes.as_chunks::<RECORD_BYTES>();
    assert!(rest.is_empty(), "{} bytes are no record", rest.len());
    let per_process = STORES * (1 + REKEYS);
    let processes = RUNS * (2usize.pow(DEPTH as u32 + 1) - 1);
    assert!(all.len() >= processes * per_process, "only {} stores", all.len());
    let mut known: HashMap<&[u8], &Record> = HashMap::new();
    for record in all {
        if let Some(other) = known.insert(&record[10..], record) {
            panic!(
                "a key stream is used twice: counter {:?}, by processes of depth {} and {} with \
                 the sealers of depth {} and {}",
                u64::from_be_bytes(record[2..10].try_into().unwrap()),
                other[0],
                record[0],
                other[1],
                record[1]
            );
        }
    }
    // The pairs of one counter are those of many keys, so that the test would see a repeated key.
    let of_first_store = all.iter().filter(|record| record[2..10] == 1u64.to_be_bytes()).count();
    assert_eq!(of_first_store, processes);
}
