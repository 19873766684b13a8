//! A shared index over a real memory node: processes that end by SIGKILL, and that stop.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kv::environment::System;
use kv::place::Place;
use kv::pooled::{RegionKeeper, SharedPoolStore, WholePool};
use kv::{Error, Expiry, Form, SetOptions, SharedSettings, Update};
use pool::{Endpoint, GroupId, Options, Pool, Service, schemes};
use rustix::process::{Pid, Signal, kill_process};
use verbs::executor::block_on;

const CHUNK: u64 = 4096;
const CHUNKS: u64 = 8192;
/// The environment variable that makes the test `client_process` a client.
const ROLE: &str = "GRANARY_KV_SHARED_CLIENT";
const TIMEOUT: Duration = Duration::from_secs(30);

fn settings(form: Form) -> SharedSettings {
    // Small subtables, so that they split.
    SharedSettings { form, groups: Some(4), ..SharedSettings::default() }
}

struct Scene {
    directory: PathBuf,
    socket: PathBuf,
    keeper: RegionKeeper,
    service: Option<Service>,
}

impl Scene {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("granary-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let socket = directory.join("pool.sock");
        let settings = pool::Settings {
            donate_bytes: CHUNKS * CHUNK,
            chunk_bytes: CHUNK,
            scheme: schemes::find("shared-region").unwrap(),
            ..pool::Settings::default()
        };
        let service = Service::start(&settings, &Endpoint::At(socket.clone())).unwrap();
        let pool = Pool::connect(&socket, options()).unwrap();
        let keeper = RegionKeeper::start_blocking(pool, 0, CHUNKS - 64).unwrap();
        Self { directory, socket, keeper, service: Some(service) }
    }

    fn client(&self, form: Form) -> SharedPoolStore {
        client(&self.socket, self.keeper.region(), form)
    }

    /// A process that writes its keys until it is killed.
    fn process(&self, number: u64) -> Process {
        let region = self.keeper.region().bits();
        let role = format!("{number} {region} {}", self.socket.display());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "client_process", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (send, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Process { child, number, lines, written: BTreeMap::new(), counted: 0, wrong: None }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(service) = self.service.take() {
            service.stop();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn options() -> Options {
    Options { groups: Some(1), ..Options::default() }
}

fn client(socket: &std::path::Path, region: Place, form: Form) -> SharedPoolStore {
    let pool = Pool::connect(socket, options()).unwrap();
    let memory = WholePool::new_blocking(pool, 0, GroupId(0)).unwrap();
    SharedPoolStore::join_blocking(memory, System, settings(form), region).unwrap()
}

/// A client in a process of its own, and what it has acknowledged.
struct Process {
    child: Child,
    number: u64,
    lines: Receiver<String>,
    /// The latest number that was written to each key. 0: the key was deleted.
    written: BTreeMap<u64, u64>,
    counted: u64,
    wrong: Option<String>,
}

impl Process {
    /// Reads acknowledgements until `enough` or the end.
    fn read(&mut self, enough: impl Fn(&Self) -> bool) {
        let until = Instant::now() + TIMEOUT;
        while !enough(self) && Instant::now() < until {
            match self.lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => self.note(&line),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn note(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["set", key, number] => {
                self.written.insert(key.parse().unwrap(), number.parse().unwrap());
            }
            ["count"] => self.counted += 1,
            ["wrong", ..] => self.wrong = Some(line.to_owned()),
            _ => {}
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Kills the process, and reads what it has acknowledged before.
    fn kill(mut self) -> Self {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.read(|_| false);
        assert_eq!(self.wrong, None);
        self
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The value with `number`; one in 19 lies in three pieces.
fn value(number: u64) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    let length = if number.is_multiple_of(19) { 9000 } else { number as usize % 300 };
    bytes.resize(8 + length, number as u8);
    bytes
}

fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_be_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(bytes, value(number), "a value that no client has written");
    number
}

fn name(client: u64, key: u64) -> Vec<u8> {
    format!("client-{client}-{key}").into_bytes()
}

fn count(store: &SharedPoolStore) -> Result<(), Error> {
    let add = |value: Option<&[u8]>, _| {
        let count = value.map_or(0, |value| u64::from_be_bytes(value.try_into().unwrap()));
        Update::Put(Cow::Owned((count + 1).to_be_bytes().to_vec()), Expiry::Never)
    };
    store.update_blocking(0, b"counter", add)
}

fn counted(store: &SharedPoolStore) -> u64 {
    let value = store.get_blocking(0, b"counter").unwrap();
    value.map_or(0, |value| u64::from_be_bytes(value.try_into().unwrap()))
}

/// Writes keys and increments the counter, and says what was acknowledged, until it is killed.
#[test]
#[ignore = "a process that the other tests of this file start, in make test too"]
fn client_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.splitn(3, ' ').collect();
    let [me, region, socket] = words.as_slice() else { panic!("{role}") };
    let (me, region): (u64, u64) = (me.parse().unwrap(), region.parse().unwrap());
    let form = if me.is_multiple_of(2) { Form::Fused } else { Form::Published };
    let store = client(socket.as_ref(), Place::of(region), form);
    let mut out = std::io::stdout().lock();
    let mut say = |line: String| {
        writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
    };
    say("ready".into());
    let mut written = BTreeMap::new();
    for step in 1_u64.. {
        let key = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        let name = name(me, key);
        let result = match step % 8 {
            0 => {
                say(format!("set {key} 0"));
                store.delete_blocking(0, &name).map(|_| 0)
            }
            1 => count(&store).map(|()| u64::MAX),
            _ => store.set_blocking(0, &name, &value(step), SetOptions::default()).map(|_| step),
        };
        match result {
            Ok(u64::MAX) => say("count".into()),
            Ok(number) => {
                written.insert(key, number);
                say(format!("set {key} {number}"));
            }
            Err(error) => return say(format!("wrong {error}")),
        }
        if step.is_multiple_of(16) {
            store.tend_blocking().unwrap();
            for (key, expected) in &written {
                let found = store.get_blocking(0, &self::name(me, *key)).unwrap();
                let found = found.map_or(0, |bytes| number(&bytes));
                if found != *expected {
                    return say(format!("wrong key {key}: {found}, not {expected}"));
                }
                if !step.is_multiple_of(512) {
                    break;
                }
            }
        }
    }
}

/// Compares the keys of a process that was killed with what it has acknowledged.
fn check(store: &SharedPoolStore, process: &Process) {
    for (key, acknowledged) in &process.written {
        let found = store.get_blocking(0, &name(process.number, *key)).unwrap();
        let found = found.map_or(0, |bytes| number(&bytes));
        // The last write may have taken effect without an acknowledgement. A deletion is announced
        // before.
        assert!(
            *acknowledged == 0 || found >= *acknowledged,
            "client {}, key {key}: {found}, and {acknowledged} was acknowledged",
            process.number
        );
    }
}

/// Works as a client until `enough`.
fn work(store: &SharedPoolStore, me: u64, first: u64, enough: impl Fn(u64) -> bool) -> u64 {
    let mut step = first;
    while !enough(step) {
        let key = step % 500;
        store.set_blocking(0, &name(me, key), &value(step), SetOptions::default()).unwrap();
        if step.is_multiple_of(16) {
            store.tend_blocking().unwrap();
        }
        step += 1;
    }
    step
}

fn check_own(store: &SharedPoolStore, me: u64, steps: u64) {
    for step in steps.saturating_sub(500)..steps {
        let found = store.get_blocking(0, &name(me, step % 500)).unwrap().unwrap();
        assert_eq!(number(&found), step);
    }
}

/// Collects the blocks of clients that were killed, as soon as the memory node has ended their
/// connections.
fn collect(store: &mut SharedPoolStore) -> u64 {
    let begin = Instant::now();
    loop {
        match block_on(store.collect()) {
            Err(Error::NotAlone(_)) if begin.elapsed() < TIMEOUT => {}
            found => return found.unwrap(),
        }
    }
}

#[test]
fn clients_killed_at_random_moments_lose_nothing_of_others() {
    let scene = Scene::new("kv-killed");
    let mut mine = scene.client(Form::Fused);
    let (mut step, mut counted_all, mut collected) = (0, 0, 0);
    let mut killed: Vec<Process> = Vec::new();
    let rounds = if std::env::var_os("GRANARY_TEST_FULL").is_some() { 200 } else { 12 };
    for round in 0..rounds {
        let mut pair = [0, 1].map(|i| scene.process(10 + 2 * round + i));
        for process in &mut pair {
            process.read(|process| process.written.len() > 20);
            assert_eq!(process.wrong, None);
        }
        let until = Instant::now() + Duration::from_millis(20 + round * 37 % 100);
        step = work(&mine, 1, step, |_| Instant::now() >= until);
        for process in pair.map(Process::kill) {
            check(&mine, &process);
            counted_all += process.counted;
            killed.push(process);
        }
        check_own(&mine, 1, step);
        let found = counted(&mine);
        assert!(found >= counted_all && found <= counted_all + 2 * (round + 1));
        if killed.len() >= 20 {
            // The region has room for some of them.
            for process in killed.drain(..) {
                check(&mine, &process);
                for key in process.written.keys() {
                    mine.delete_blocking(0, &name(process.number, *key)).unwrap();
                }
            }
            collected += collect(&mut mine);
        }
    }
    // The ends of the others hold nothing back.
    let begin = Instant::now();
    while mine.limbo_bytes() > 0 {
        mine.tend_blocking().unwrap();
        assert!(begin.elapsed() < TIMEOUT, "{} bytes are held back", mine.limbo_bytes());
    }
    killed.iter().for_each(|process| check(&mine, process));
    // The blocks that they had taken come back, and no others.
    collected += collect(&mut mine);
    for process in &killed {
        check(&mine, process);
    }
    work(&mine, 1, step, |now| now >= step + 500);
    check_own(&mine, 1, step + 500);
    killed.iter().for_each(|process| check(&mine, process));
    let counted = counted(&mine);
    println!("{rounds} rounds, {step} own writes, {counted} counted, {collected} collected");
}

#[test]
fn client_that_is_stopped_beyond_its_lease_goes_on() {
    let scene = Scene::new("kv-stopped");
    let mine = scene.client(Form::Fused);
    let mut stopped = scene.process(8);
    let mut step = 0;
    for _ in 0..6 {
        let before = stopped.written.len();
        stopped.read(|process| process.written.len() > before + 10);
        stopped.signal(Signal::STOP);
        let until = Instant::now() + Duration::from_millis(150);
        step = work(&mine, 2, step, |_| Instant::now() >= until);
        stopped.signal(Signal::CONT);
        assert_eq!(stopped.wrong, None);
    }
    check_own(&mine, 2, step);
    let stopped = stopped.kill();
    check(&mine, &stopped);
    check_own(&mine, 2, step);
}

/// After all keys are deleted, no block is in use but those of the index.
#[test]
fn blocks_come_back_after_deletions() {
    let scene = Scene::new("kv-room");
    let stores = [Form::Fused, Form::Published].map(|form| scene.client(form));
    let usage = |store: &SharedPoolStore| block_on(store.blocks().usage()).unwrap();
    for round in 0..3 {
        for i in 0..600 {
            let store = &stores[i as usize % 2];
            store.set_blocking(0, &name(0, i), &value(i), SetOptions::default()).unwrap();
        }
        for i in 0..600 {
            let found = stores[i as usize / 3 % 2].get_blocking(0, &name(0, i)).unwrap().unwrap();
            assert_eq!(number(&found), i);
        }
        for i in 0..600 {
            assert!(stores[i as usize / 2 % 2].delete_blocking(0, &name(0, i)).unwrap());
        }
        let begin = Instant::now();
        while stores.iter().any(|store| store.limbo_bytes() > 0) {
            stores.iter().for_each(|store| store.tend_blocking().unwrap());
            assert!(begin.elapsed() < TIMEOUT);
        }
        let index = block_on(stores[0].index_blocks(0)).unwrap();
        let held: u64 = stores.iter().map(|store| store.blocks().held_blocks()).sum();
        let used = usage(&stores[0]).taken_blocks - held;
        assert_eq!(used, index as u64, "round {round}");
    }
    let [one, two] = stores;
    let before = usage(&one);
    two.leave_blocking().unwrap();
    assert!(usage(&one).free_chunks >= before.free_chunks);
    assert_eq!(one.len_blocking(0).unwrap(), 0);
}
