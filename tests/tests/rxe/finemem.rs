//! Allocates, uses and frees memory of scheme `finemem` from the guest with READ, WRITE and CAS
//! only. A compute node needs no more than docs/internals/finemem.md. This file builds the words
//! from that page, without the code of the allocator.
//!
//! The pool has fewer chunks than a span, so its only span is in use from the start.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pool::remote::route::{Route, Start};
use pool::{ClientId, ConnectRequest, Settings, schemes};
use scheme::NodeScheme;
use schemes::finemem::{Metadata, Node};

use crate::bench::{BUFFER, Bench, How, REMOTE_ACCESS, SUCCESS};

const CHUNKS: u32 = 16;
const CHUNK_BYTES: u64 = 64 << 10;
/// Offset in the guest's memory of the results of READs and atomics.
const RESULT: usize = 0;
/// Offset in the guest's memory of a chunk's data.
const DATA: usize = 4096;
/// Time limit of the memory node to release a chunk.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A QP of the guest, by its slot.
struct Path(usize);

/// The guest as a compute node.
struct ComputeNode<'a> {
    bench: &'a mut Bench,
    management: Path,
    metadata: Metadata,
}

/// An allocated chunk, with the guest's key.
struct Chunk {
    index: u32,
    address: u64,
    key: u32,
}

/// Allocates, uses and frees chunks. The key of a freed chunk is revoked, and its memory is zero at
/// the next allocation.
pub fn chunks(bench: &mut Bench, how: How) -> Result<()> {
    let settings = Settings {
        scheme: schemes::FINEMEM,
        donate_bytes: CHUNKS as u64 * CHUNK_BYTES,
        chunk_bytes: CHUNK_BYTES,
        group_size: 2,
        ..Settings::default()
    }
    .node()?;
    let mut node = Node::new(&bench.nic(how), &settings)?;
    let (management, access) = (Path(bench.take_slot()?), Path(bench.take_slot()?));
    let qpn = |bench: &mut Bench, path: &Path| bench.guest.number(&format!("qp {}", path.0));
    let [local, remote]: [IpAddr; 2] = Bench::addresses(how)?;
    let psn = 0xff_ffe0;
    let route =
        Route { address: SocketAddr::new(remote, rnic::wire::UDP_PORT), local, mtu: how.mtu };
    let admission = ConnectRequest {
        management: vec![qpn(bench, &management)? as u32],
        groups: vec![vec![qpn(bench, &access)? as u32]],
        start: Start::Psn(verbs::Psn::new(psn)),
        route: Some(route),
        ..ConnectRequest::default()
    };
    let admitted = node.admit(ClientId(1), &admission)?;
    bench.connect(how, management.0, admitted.management[0], psn)?;
    bench.connect(how, access.0, admitted.groups[0][0], psn)?;
    let metadata = Metadata::of(&admitted).context("the reply names no metadata")?;
    let mut guest = ComputeNode { bench, management, metadata };

    // Allocates all chunks, until the pool is empty.
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

    // Freed chunks are allocated again with other keys and zeroed; the other chunks are unchanged.
    let freed = held.split_off(CHUNKS as usize / 2);
    for chunk in &freed {
        guest.free(chunk)?;
    }
    let start = Instant::now();
    while node.status()?.free < freed.len() as u64 {
        node.poll()?;
        ensure!(start.elapsed() < TIMEOUT, "not released: {:?}", node.status()?);
    }
    for old in &freed {
        let new = guest.allocate()?.context("a released chunk is not available")?;
        ensure!(new.index == old.index, "chunk {} before {}", new.index, old.index);
        ensure!(new.key != old.key, "a freed chunk has the same key again");
        guest.check_empty(&access, &new)?;
        held.push(new);
    }
    ensure!(guest.allocate()?.is_none(), "an allocation from an empty pool succeeded");
    for chunk in &held[..CHUNKS as usize / 2] {
        guest.check(&access, chunk, 1000 + chunk.index as u64)?;
    }
    node.audit()?;

    // An access with the old key breaks the access connection, as any wrong key does.
    let (old, new) = (&freed[0], &held[CHUNKS as usize / 2]);
    let wc = guest.read(&access, old.address, old.key, DATA, 8)?;
    ensure!(wc == REMOTE_ACCESS, "a revoked key: status {wc}");
    ensure!(new.address == old.address, "the chunk has another address");

    // The client disconnects, and all of its chunks are reclaimed.
    node.retire(ClientId(1))?;
    let start = Instant::now();
    while !node.is_retired(ClientId(1)) {
        node.poll()?;
        ensure!(start.elapsed() < TIMEOUT, "not reclaimed: {:?}", node.status()?);
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
    /// Layout of the metadata words: one section, 16 spans, the full logs, the capabilities.
    const SPAN: u32 = 1;
    const LOGS: u32 = 1 + 16;
    const CAPABILITIES: u32 = Self::LOGS + CHUNKS;

    fn at(&self, word: u32) -> u64 {
        self.metadata.addr + 8 * word as u64
    }

    /// READs a word of the metadata. The word is big-endian in memory.
    fn load(&mut self, word: u32) -> Result<u64> {
        let (at, key, path) = (self.at(word), self.metadata.rkey, Path(self.management.0));
        let status = self.read(&path, at, key, RESULT, 8)?;
        ensure!(status == SUCCESS, "READ of word {word}: status {status}");
        Ok(self.bench.guest.number(&format!("get {RESULT}"))?.swap_bytes())
    }

    /// CASes a word and returns its old value. Atomics return values in the requester's byte order.
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
            // The last client that changed the header may not have flushed its log (user,
            // timestamp, size, taken).
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

    /// Flushes the log of the span header's last change to the full log of the changed chunk.
    fn flush(&mut self, header: u64) -> Result<()> {
        let field = |at: u32, bits: u32| header >> at & ((1 << bits) - 1);
        let (user, timestamp, offset) = (field(1, 14), field(15, 7), field(25, 5));
        if user == 0 {
            return Ok(()); // the header was never changed
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

    /// Frees a chunk: clears its main key and keeps the backup key.
    fn free(&mut self, chunk: &Chunk) -> Result<()> {
        let (word, open) = (Self::CAPABILITIES + chunk.index, (chunk.key as u64) << 32);
        let found = self.swap(word, open, chunk.key as u64)?;
        ensure!(found == open, "chunk {} was not ours: {found:#x}", chunk.index);
        Ok(())
    }

    /// READs into the guest's memory; returns the status.
    fn read(&mut self, path: &Path, from: u64, key: u32, to: usize, len: u64) -> Result<u32> {
        self.bench.run_on(path.0, "read", &format!("{to} {len} {from} {key}"))
    }

    fn write(&mut self, path: &Path, chunk: &Chunk, seed: u64) -> Result<()> {
        self.bench.fill(DATA, CHUNK_BYTES as usize, seed)?;
        let arguments = format!("{DATA} {CHUNK_BYTES} {} {}", chunk.address, chunk.key);
        let status = self.bench.run_on(path.0, "write", &arguments)?;
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
