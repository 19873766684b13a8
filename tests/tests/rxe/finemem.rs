//! Memory of scheme `finemem`, allocated, used and freed from the guest with READ, WRITE and CAS, and nothing else:
//! what docs/finemem.md says of the words is all that a compute node needs. The words are put together here, by the page;
//! none of this project's allocator has a part in it.
//!
//! The pool has fewer chunks than a span, so that its only span is in use from the start.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pool::finemem::Node;
use pool::remote::route::{Route, Start};
use pool::scheme::{Metadata, NodeScheme};
use pool::{Admission, ClientId, SchemeKind, Settings};

use crate::bench::{BUFFER, Bench, How, REMOTE_ACCESS, SUCCESS};

const CHUNKS: u32 = 16;
const CHUNK_BYTES: u64 = 64 << 10;
/// Where the guest has what READs and atomics return.
const RESULT: usize = 0;
/// Where it has a chunk's bytes.
const DATA: usize = 4096;
/// How long the memory node may take to release a chunk.
const PATIENCE: Duration = Duration::from_secs(60);

/// A queue pair of the guest's: a slot there.
struct Path(usize);

/// The guest as a compute node.
struct ComputeNode<'a> {
    bench: &'a mut Bench,
    management: Path,
    metadata: Metadata,
}

/// A chunk's block as the guest has it.
struct Chunk {
    index: u32,
    address: u64,
    key: u32,
}

/// Allocates, uses and frees chunks; a key of a freed one opens nothing, and its memory comes back empty.
pub fn chunks(bench: &mut Bench, how: How) -> Result<()> {
    let settings = Settings {
        scheme: SchemeKind::FineMem,
        donate_bytes: CHUNKS as u64 * CHUNK_BYTES,
        chunk_bytes: CHUNK_BYTES,
        group_size: 2,
        ..Settings::default()
    };
    let mut node = Node::new(&bench.nic(how), &settings)?;
    let (management, access) = (Path(bench.take_slot()?), Path(bench.take_slot()?));
    let qpn = |bench: &mut Bench, path: &Path| bench.guest.number(&format!("qp {}", path.0));
    let [local, remote]: [IpAddr; 2] = Bench::addresses(how)?;
    let psn = 0xff_ffe0;
    let route =
        Route { address: SocketAddr::new(remote, rnic::wire::UDP_PORT), local, mtu: how.mtu };
    let admission = Admission {
        management: vec![qpn(bench, &management)? as u32],
        groups: vec![vec![qpn(bench, &access)? as u32]],
        start: Start::Psn(rnic::ids::Psn::new(psn)),
        route: Some(route),
        ..Admission::default()
    };
    let admitted = node.admit(ClientId(1), &admission)?;
    bench.connect(how, management.0, admitted.management[0], psn)?;
    bench.connect(how, access.0, admitted.groups[0][0], psn)?;
    let metadata = admitted.metadata.context("a compute node is told where the metadata is")?;
    let mut guest = ComputeNode { bench, management, metadata };

    // All there are, and no more.
    let mut held = Vec::new();
    while let Some(chunk) = guest.allocate()? {
        held.push(chunk);
    }
    ensure!(held.len() == CHUNKS as usize, "{} chunks of {CHUNKS}", held.len());
    node.audit()?;
    ensure!(node.status()?.free == 0, "{:?}", node.status()?);
    for chunk in &held {
        guest.check_empty(&access, chunk)?;
        guest.write(&access, chunk, 1000 + chunk.index as u64)?;
    }
    for chunk in &held {
        guest.check(&access, chunk, 1000 + chunk.index as u64)?;
    }

    // What it frees comes back with another key, and empty; the rest is as it was.
    let freed = held.split_off(CHUNKS as usize / 2);
    for chunk in &freed {
        guest.free(chunk)?;
    }
    let start = Instant::now();
    while node.status()?.free < freed.len() as u64 {
        node.turn()?;
        ensure!(start.elapsed() < PATIENCE, "not released: {:?}", node.status()?);
    }
    for old in &freed {
        let new = guest.allocate()?.context("what was released is there")?;
        ensure!(new.index == old.index, "chunk {} before {}", new.index, old.index);
        ensure!(new.key != old.key, "the key is another one");
        guest.check_empty(&access, &new)?;
        held.push(new);
    }
    ensure!(guest.allocate()?.is_none(), "more than there is");
    for chunk in &held[..CHUNKS as usize / 2] {
        guest.check(&access, chunk, 1000 + chunk.index as u64)?;
    }
    node.audit()?;

    // The old key ends the access connection, as any wrong key does.
    let (old, new) = (&freed[0], &held[CHUNKS as usize / 2]);
    let wc = guest.read(&access, old.address, old.key, DATA, 8)?;
    ensure!(wc == REMOTE_ACCESS, "a dead key: status {wc}");
    ensure!(new.address == old.address, "it is the same memory");

    // It goes, and all that it had comes back.
    node.retire(ClientId(1))?;
    let start = Instant::now();
    while !node.is_retired(ClientId(1)) {
        node.turn()?;
        ensure!(start.elapsed() < PATIENCE, "not taken back: {:?}", node.status()?);
    }
    ensure!(node.status()?.free == CHUNKS as u64, "{:?}", node.status()?);
    node.audit()?;
    for path in [guest.management, access] {
        bench.guest.ask(&format!("destroy {}", path.0))?;
        bench.free(path.0);
    }
    Ok(())
}

impl ComputeNode<'_> {
    /// One section, 16 spans, the full logs, the capabilities: the words of a pool of less than a span.
    const SPAN: u32 = 1;
    const LOGS: u32 = 1 + 16;
    const CAPABILITIES: u32 = Self::LOGS + CHUNKS;

    fn at(&self, word: u32) -> u64 {
        self.metadata.addr + 8 * word as u64
    }

    /// A word of the metadata, by READ: it comes as it lies there, big-endian.
    fn load(&mut self, word: u32) -> Result<u64> {
        let (at, key, path) = (self.at(word), self.metadata.rkey, Path(self.management.0));
        let status = self.read(&path, at, key, RESULT, 8)?;
        ensure!(status == SUCCESS, "READ of word {word}: status {status}");
        Ok(self.bench.guest.number(&format!("get {RESULT}"))?.swap_bytes())
    }

    /// CAS of a word; what was there. Atomics give numbers, in the order of the CPU that asks.
    fn swap(&mut self, word: u32, from: u64, to: u64) -> Result<u64> {
        let (at, key, slot) = (self.at(word), self.metadata.rkey, self.management.0);
        let status = self.bench.run_on(slot, "cas", &format!("{RESULT} {at} {key} {from} {to}"))?;
        ensure!(status == SUCCESS, "CAS of word {word}: status {status}");
        self.bench.guest.number(&format!("get {RESULT}"))
    }

    fn allocate(&mut self) -> Result<Option<Chunk>> {
        let user = self.metadata.user as u64;
        let mut header = self.load(Self::SPAN)?;
        loop {
            let bitmap = (header >> 32) as u32;
            let index = bitmap.trailing_ones();
            if index == 32 {
                return Ok(None);
            }
            // Who changed the header last may not have flushed its log: (user, timestamp, size, taken).
            self.flush(header)?;
            let timestamp = ((header >> 15) + 1) & 0x7f;
            let taken = (header >> 32 | 1 << index) << 32 // the bitmap
                | (index as u64) << 25 // offset
                | timestamp << 15 // of size 0: one chunk
                | user << 1
                | 1; // in use
            let found = self.swap(Self::SPAN, header, taken)?;
            if found != header {
                header = found;
                continue;
            }
            self.flush(taken)?;
            let key = (self.load(Self::CAPABILITIES + index)? >> 32) as u32;
            ensure!(key != 0, "chunk {index} is free and has no key");
            let address = self.metadata.data + index as u64 * CHUNK_BYTES;
            return Ok(Some(Chunk { index, address, key }));
        }
    }

    /// Brings what the span's header says of its last change into that chunk's full log.
    fn flush(&mut self, header: u64) -> Result<()> {
        let field = |at: u32, bits: u32| header >> at & ((1 << bits) - 1);
        let (user, timestamp, offset) = (field(1, 14), field(15, 7), field(25, 5));
        if user == 0 {
            return Ok(()); // nobody has changed it yet
        }
        let is_taken = header >> 32 >> offset & 1;
        let log = user | timestamp << 14 | field(22, 3) << 21 | is_taken << 24;
        let word = Self::LOGS + offset as u32;
        let before = self.load(word)?;
        if before != log && self.load(Self::SPAN)? == header {
            self.swap(word, before, log)?;
        }
        Ok(())
    }

    /// Main key 0, backup key what it was: given up.
    fn free(&mut self, chunk: &Chunk) -> Result<()> {
        let (word, open) = (Self::CAPABILITIES + chunk.index, (chunk.key as u64) << 32);
        let found = self.swap(word, open, chunk.key as u64)?;
        ensure!(found == open, "chunk {} was not ours: {found:#x}", chunk.index);
        Ok(())
    }

    /// READs into the guest's memory; how it ended.
    fn read(&mut self, path: &Path, from: u64, key: u32, to: usize, len: u64) -> Result<u32> {
        self.bench.run_on(path.0, "read", &format!("{to} {len} {from} {key}"))
    }

    fn write(&mut self, path: &Path, chunk: &Chunk, seed: u64) -> Result<()> {
        self.bench.fill(DATA, CHUNK_BYTES as usize, seed)?;
        let order = format!("{DATA} {CHUNK_BYTES} {} {}", chunk.address, chunk.key);
        let status = self.bench.run_on(path.0, "write", &order)?;
        ensure!(status == SUCCESS, "WRITE to chunk {}: status {status}", chunk.index);
        Ok(())
    }

    fn check(&mut self, path: &Path, chunk: &Chunk, seed: u64) -> Result<()> {
        self.bench.fill(DATA, CHUNK_BYTES as usize, 1)?;
        let status = self.read(path, chunk.address, chunk.key, DATA, CHUNK_BYTES)?;
        ensure!(status == SUCCESS, "READ of chunk {}: status {status}", chunk.index);
        self.bench.check(DATA, CHUNK_BYTES as usize, seed)
    }

    fn check_empty(&mut self, path: &Path, chunk: &Chunk) -> Result<()> {
        self.bench.fill(DATA, CHUNK_BYTES as usize, 1)?;
        let status = self.read(path, chunk.address, chunk.key, DATA, CHUNK_BYTES)?;
        ensure!(status == SUCCESS, "READ of chunk {}: status {status}", chunk.index);
        let hash = self.bench.guest.number(&format!("hash {DATA} {CHUNK_BYTES}"))?;
        let empty = granary_tests::guest::hash(&[0; CHUNK_BYTES as usize]);
        ensure!(hash == empty, "chunk {} shows old contents", chunk.index);
        Ok(())
    }
}

const _: () = assert!(DATA + CHUNK_BYTES as usize <= BUFFER);
