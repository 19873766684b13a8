//! Several memory nodes used as one pool: a compute node connects to all of them and allocates on
//! those that respond (FineMem §6.2 spreads its chunks over memory nodes round-robin).
//!
//! A grant carries the index of its memory node ([`PlacedGrant`]). If a memory node fails, its
//! contents are lost and nothing else: allocations continue on the other memory nodes, and accesses
//! to grants there are unaffected. A failed memory node is excluded until [`MultiPool::rejoin`]
//! reconnects it; grants from before stay invalid.
//!
//! The end of a memory node's process is detected at once. The loss of its host is detected only by
//! timeouts: requests fail once the NIC's retransmissions or the control connection time out. From
//! the first such failure the memory node counts as *silent*: allocations try it last, so that they
//! do not wait for it. The state ends when its control connection ends, which makes the memory node
//! *gone*, or after [`SILENCE`], which makes it a normal memory node again.

mod leases;

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use verbs::executor::{self, block_on};
use verbs::{Nic, Status};

use crate::join::join;
use crate::{DefaultNic, Error, Pool};
use scheme::Grant;

/// Requests of one thread in flight at a time. As many as a management QP has credits by default.
const IN_FLIGHT: usize = 16;

/// Maximum age of the cached amount of free memory.
const FRESH: Duration = Duration::from_millis(500);

/// Time for which a memory node stays silent after a timeout, beyond the time that its control
/// connection takes to detect that the host is unreachable.
const SILENCE: Duration = Duration::from_secs(3);

/// Policy that selects the memory node of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// Round-robin over the memory nodes.
    #[default]
    RoundRobin,
    /// The memory node with the most free memory. The amount is queried periodically, and this
    /// process's own allocations and frees are added in between.
    MostFree,
}

/// Index of a memory node in the list of addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeIndex(pub u16);

/// A grant with the index of its memory node.
#[derive(Clone, Copy, Debug)]
pub struct PlacedGrant {
    /// The memory node that issued the grant.
    pub node: NodeIndex,
    /// The grant at that memory node.
    pub grant: Grant,
}

/// Connections to several memory nodes. Any number of threads can use it.
///
/// ```
/// use pool::{MultiPool, Placement, Pool, Settings};
///
/// let settings = Settings { donate_bytes: 8 << 20, ..Settings::default() };
/// let nodes = vec![Pool::embedded(settings.clone())?, Pool::embedded(settings)?];
/// let pool = MultiPool::over(nodes, Placement::RoundRobin)?;
///
/// let (first, second) = (pool.allocate_blocking()?, pool.allocate_blocking()?);
/// assert_ne!(first.node, second.node);
/// pool.write_blocking(&first, 0, b"hello")?;
/// pool.free_blocking(first)?;
/// pool.free_blocking(second)?;
/// # Ok::<(), pool::Error>(())
/// ```
pub struct MultiPool<N: Nic = DefaultNic> {
    nodes: Vec<Node<N>>,
    placement: Placement,
    next: AtomicUsize,
    chunk_bytes: u64,
    started: Instant,
}

struct Node<N: Nic> {
    pool: RwLock<Pool<N>>,
    /// Requests to this memory node have failed for good.
    gone: AtomicBool,
    /// Time of the last timeout, in nanoseconds since `started`; 0: none.
    silent: AtomicU64,
    /// Estimated number of free bytes.
    free: AtomicI64,
    /// Bytes of all chunks, free or not; 0 before the first query.
    all: AtomicU64,
    /// Time of the last query of the free bytes, in nanoseconds since `started`; `query_lock` is
    /// held during a query.
    queried_at: AtomicU64,
    query_lock: Mutex<()>,
}

impl<N: Nic> MultiPool<N> {
    /// Creates the pool over existing connections.
    ///
    /// # Errors
    /// The list is empty, or the memory nodes differ in chunk size.
    pub fn over(pools: Vec<Pool<N>>, placement: Placement) -> Result<Self, Error> {
        let wrong = |why: String| Error::Setting {
            setting: "pool",
            value: format!("{} memory nodes", pools.len()),
            why,
        };
        let Some(chunk_bytes) = pools.first().map(Pool::chunk_bytes) else {
            return Err(wrong("name at least one".into()));
        };
        if pools.len() > u16::MAX as usize {
            return Err(wrong(format!("the maximum is {}", u16::MAX)));
        }
        if let Some(other) = pools.iter().map(Pool::chunk_bytes).find(|b| *b != chunk_bytes) {
            return Err(wrong(format!(
                "their chunk sizes differ ({chunk_bytes} and {other} bytes); serve all with the \
                 same --chunk"
            )));
        }
        let member = |pool: Pool<N>| Node {
            pool: RwLock::new(pool),
            gone: AtomicBool::new(false),
            silent: AtomicU64::new(0),
            free: AtomicI64::new(0),
            all: AtomicU64::new(0),
            queried_at: AtomicU64::new(0),
            query_lock: Mutex::new(()),
        };
        Ok(Self {
            nodes: pools.into_iter().map(member).collect(),
            placement,
            next: AtomicUsize::new(0),
            chunk_bytes,
            started: Instant::now(),
        })
    }

    /// Reconnects to memory nodes that are gone and run again. Returns the number of reconnected
    /// memory nodes. Their earlier grants stay lost.
    pub fn rejoin(&self) -> usize {
        let gone = self.nodes.iter().filter(|node| node.gone.load(Ordering::Acquire));
        gone.filter(|node| {
            let before = node.pool.read().clone();
            let Ok(pool) = before.reconnect() else { return false };
            if pool.chunk_bytes() != self.chunk_bytes {
                return false; // a memory node with other settings
            }
            *node.pool.write() = pool;
            node.queried_at.store(0, Ordering::Relaxed);
            node.silent.store(0, Ordering::Relaxed);
            node.gone.store(false, Ordering::Release);
            true
        })
        .count()
    }

    /// Number of memory nodes, including those that are gone.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Always false: there is at least one memory node.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Memory nodes that are not known to be gone.
    pub fn alive(&self) -> impl Iterator<Item = NodeIndex> {
        let alive = |(_, node): &(u16, &Node<N>)| !node.gone.load(Ordering::Acquire);
        (0..).zip(&self.nodes).filter(alive).map(|(index, _)| NodeIndex(index))
    }

    /// Chunk size in bytes, equal on all memory nodes.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The connection to a memory node, for accesses. Panics if there is no such node.
    pub fn node(&self, index: NodeIndex) -> Pool<N> {
        self.nodes[index.0 as usize].pool.read().clone()
    }

    /// Returns the percentage of all memory nodes' chunks that is allocated, by all clients. Asks
    /// the memory nodes unless the last answers are recent. 0 if no memory node answers.
    pub fn used_percent(&self) -> u8 {
        let (mut free, mut all) = (0u64, 0u64);
        for (index, node) in (0..).map(NodeIndex).zip(&self.nodes) {
            self.refresh_free_bytes(index);
            free += node.free.load(Ordering::Relaxed).max(0) as u64;
            all += node.all.load(Ordering::Relaxed);
        }
        let used = all.saturating_sub(free);
        (used * 100).checked_div(all).unwrap_or(0) as u8
    }

    /// Reports a failed access to a memory node, for callers that access it through
    /// [`MultiPool::node`].
    pub fn failed(&self, index: NodeIndex, error: &Error) {
        let node = &self.nodes[index.0 as usize];
        if is_gone(error) {
            node.gone.store(true, Ordering::Release);
        } else if is_silent(error) {
            node.silent.store(self.now(), Ordering::Relaxed);
        }
    }

    /// Nanoseconds since `started`, never 0.
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos().max(1) as u64
    }

    /// Allocates a chunk, like [`Pool::allocate`].
    pub async fn allocate(&self) -> Result<PlacedGrant, Error> {
        self.allocate_bytes(self.chunk_bytes).await
    }

    /// Allocates at least `bytes`, like [`Pool::allocate_bytes`], on the memory node that the
    /// placement prefers among those with enough free memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if no responding memory node has enough; [`Error::Gone`] if none
    /// responds.
    pub async fn allocate_bytes(&self, bytes: u64) -> Result<PlacedGrant, Error> {
        let mut last = None;
        for index in self.order() {
            let node = &self.nodes[index.0 as usize];
            let pool = node.pool.read().clone();
            match pool.allocate_bytes(bytes).await {
                Ok(grant) => {
                    node.free.fetch_sub(grant.len as i64, Ordering::Relaxed);
                    return Ok(PlacedGrant { node: index, grant });
                }
                Err(e) => self.try_next(index, e, &mut last)?,
            }
        }
        Err(self.none_has(bytes, last))
    }

    /// Handles a failed allocation. Succeeds if another memory node may have the memory; `last` is
    /// then the error in case that none has.
    fn try_next(
        &self,
        index: NodeIndex,
        error: Error,
        last: &mut Option<Error>,
    ) -> Result<(), Error> {
        match error {
            e if is_gone(&e) || is_silent(&e) => {
                self.failed(index, &e);
                last.get_or_insert(e);
            }
            e @ (Error::OutOfMemory { .. } | Error::OverBudget { .. }) => {
                self.nodes[index.0 as usize].free.store(0, Ordering::Relaxed);
                *last = Some(e);
            }
            // This pool's largest block is smaller than that.
            e @ Error::Setting { .. } => _ = last.get_or_insert(e),
            e => return Err(e),
        }
        Ok(())
    }

    /// The error if no memory node has `bytes`.
    fn none_has(&self, bytes: u64, last: Option<Error>) -> Error {
        last.unwrap_or_else(|| Error::Gone {
            attempt: format!("allocating {bytes} bytes"),
            why: format!("none of {} memory nodes responds", self.nodes.len()),
        })
    }

    /// Frees a block, like [`Pool::free`]. Succeeds if the memory node is gone, because its
    /// contents are lost.
    pub async fn free(&self, placed: PlacedGrant) -> Result<(), Error> {
        let node = &self.nodes[placed.node.0 as usize];
        let pool = node.pool.read().clone();
        match pool.free(placed.grant).await {
            Ok(()) => {
                node.free.fetch_add(placed.grant.len as i64, Ordering::Relaxed);
                Ok(())
            }
            Err(e) if is_gone(&e) => {
                self.failed(placed.node, &e);
                Ok(())
            }
            Err(Error::Stale { .. }) => Ok(()),
            Err(e) => {
                self.failed(placed.node, &e);
                Err(e)
            }
        }
    }

    /// READs, like [`Pool::read`].
    pub async fn read(
        &self,
        placed: &PlacedGrant,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let pool = self.node(placed.node);
        self.report_failure(placed.node, pool.read(&placed.grant, offset, into)).await
    }

    /// WRITEs, like [`Pool::write`].
    pub async fn write(&self, placed: &PlacedGrant, offset: u64, from: &[u8]) -> Result<(), Error> {
        let pool = self.node(placed.node);
        self.report_failure(placed.node, pool.write(&placed.grant, offset, from)).await
    }

    /// [`MultiPool::allocate`], blocking.
    pub fn allocate_blocking(&self) -> Result<PlacedGrant, Error> {
        block_on(self.allocate())
    }

    /// Allocates up to `count` chunks. With a single memory node, several requests are in flight at
    /// a time. Returns fewer if a request fails.
    ///
    /// A thread can sleep on one CQ only. With requests to several memory nodes in flight,
    /// `block_on` would start a thread for each CQ, and a caller that serves page faults must not
    /// wait for a new thread, whose start may fault.
    ///
    /// # Errors
    /// As [`MultiPool::allocate`], if no chunk was allocated.
    pub fn allocate_many_blocking(&self, count: usize) -> Result<Vec<PlacedGrant>, Error> {
        let requests = (0..count).map(|_| self.allocate());
        let mut error = None;
        let mut granted = Vec::with_capacity(count);
        let width = if self.nodes.len() == 1 { IN_FLIGHT } else { 1 };
        for result in block_on(join(requests, width)) {
            match result {
                Ok(grant) => granted.push(grant),
                Err(why) => error = error.or(Some(why)),
            }
        }
        match error {
            Some(error) if granted.is_empty() => Err(error),
            _ => Ok(granted),
        }
    }

    /// Frees blocks, like [`MultiPool::free`], with several requests to one memory node in flight
    /// at a time. Starts no thread, as [`MultiPool::allocate_many_blocking`].
    ///
    /// # Errors
    /// One for each request that failed.
    pub fn free_many_blocking(&self, placed: &[PlacedGrant]) -> Vec<Error> {
        let mut errors = Vec::new();
        for node in 0..self.nodes.len() {
            let here = placed.iter().filter(|placed| placed.node.0 as usize == node);
            let requests = here.map(|placed| self.free(*placed));
            errors.extend(block_on(join(requests, IN_FLIGHT)).into_iter().filter_map(Result::err));
        }
        errors
    }

    /// [`MultiPool::allocate_bytes`], blocking.
    pub fn allocate_bytes_blocking(&self, bytes: u64) -> Result<PlacedGrant, Error> {
        block_on(self.allocate_bytes(bytes))
    }

    /// [`MultiPool::free`], blocking.
    pub fn free_blocking(&self, placed: PlacedGrant) -> Result<(), Error> {
        block_on(self.free(placed))
    }

    /// [`MultiPool::read`], blocking.
    pub fn read_blocking(
        &self,
        placed: &PlacedGrant,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        block_on(self.read(placed, offset, into))
    }

    /// [`MultiPool::write`], blocking.
    pub fn write_blocking(
        &self,
        placed: &PlacedGrant,
        offset: u64,
        from: &[u8],
    ) -> Result<(), Error> {
        block_on(self.write(placed, offset, from))
    }

    async fn report_failure<T>(
        &self,
        index: NodeIndex,
        access: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        access.await.inspect_err(|e| self.failed(index, e))
    }

    /// Responding memory nodes in the order in which an allocation tries them.
    fn order(&self) -> Vec<NodeIndex> {
        let mut order: Vec<NodeIndex> = self.alive().collect();
        // Rotates the start also among memory nodes with equal free memory.
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let first = next % order.len().max(1);
        order.rotate_left(first);
        if self.placement == Placement::MostFree {
            order.iter().for_each(|index| self.refresh_free_bytes(*index));
            let free =
                |index: &NodeIndex| self.nodes[index.0 as usize].free.load(Ordering::Relaxed);
            order.sort_by_key(|index| std::cmp::Reverse(free(index)));
        }
        order.retain(|index| !self.has_ended(*index));
        order.sort_by_key(|index| self.is_silent(*index));
        order
    }

    fn is_silent(&self, index: NodeIndex) -> bool {
        self.nodes[index.0 as usize].silent.load(Ordering::Relaxed) > 0
    }

    /// True if a silent memory node turns out to be gone. Ends the silent state after [`SILENCE`].
    /// Never blocks.
    fn has_ended(&self, index: NodeIndex) -> bool {
        let node = &self.nodes[index.0 as usize];
        let since = node.silent.load(Ordering::Relaxed);
        if since == 0 {
            return false;
        }
        if let Err(e) = node.pool.read().check_alive() {
            self.failed(index, &e);
            return is_gone(&e);
        }
        let detected = node.pool.read().welcome().client_timeout();
        if self.now().saturating_sub(since) > (detected + SILENCE).as_nanos() as u64 {
            node.silent.store(0, Ordering::Relaxed);
        }
        false
    }

    /// Queries the free bytes of a memory node unless the cached value is recent or another thread
    /// queries it.
    fn refresh_free_bytes(&self, index: NodeIndex) {
        let node = &self.nodes[index.0 as usize];
        let now = self.started.elapsed();
        let queried_at = node.queried_at.load(Ordering::Relaxed);
        if self.is_silent(index)
            || queried_at > 0 && now.saturating_sub(Duration::from_nanos(queried_at)) < FRESH
        {
            return;
        }
        let Some(_query_lock) = node.query_lock.try_lock() else { return };
        let pool = node.pool.read().clone();
        match pool.node_status() {
            Ok(status) => {
                let free = status.node.free * status.node.chunk_bytes;
                node.free.store(free as i64, Ordering::Relaxed);
                let all = status.node.chunks * status.node.chunk_bytes;
                node.all.store(all, Ordering::Relaxed);
                node.queried_at.store(now.as_nanos().max(1) as u64, Ordering::Relaxed);
            }
            Err(e) => self.failed(index, &e),
        }
    }
}

/// True for an error after which a memory node receives no more requests.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Gone { .. } | Error::NotAdmitted { .. } | Error::Unreachable { .. })
}

/// True for a timeout. A later request may succeed.
fn is_silent(error: &Error) -> bool {
    match error {
        Error::ManagementBroken { .. } | Error::Unanswered { .. } => true,
        Error::Access { status, .. } | Error::List { status, .. } => {
            *status == Status::RetryExceeded
        }
        _ => false,
    }
}

impl<N: Nic> MultiPool<N> {
    /// Polls the completions of all memory nodes: see [`Pool::poll`].
    pub fn poll(&self) -> usize {
        self.nodes.iter().map(|node| node.pool.read().poll()).sum()
    }

    /// Waits for completions of all memory nodes: see [`Pool::park`].
    pub fn park(&self, timeout: Duration) -> usize {
        executor::park(timeout, || self.poll())
    }
}

impl<N: Nic> std::fmt::Debug for MultiPool<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (total, alive) = (self.nodes.len(), self.alive().count());
        write!(f, "{alive} of {total} memory nodes, {:?}", self.placement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Settings, schemes};

    fn pools(sizes: &[u64], placement: Placement) -> MultiPool {
        let start = |chunks: &u64| {
            Pool::embedded(Settings {
                donate_bytes: chunks * 4096,
                chunk_bytes: 4096,
                scheme: schemes::FINEMEM,
                ..Settings::default()
            })
            .unwrap()
        };
        MultiPool::over(sizes.iter().map(start).collect(), placement).unwrap()
    }

    fn counts(pools: &MultiPool, placed: &[PlacedGrant]) -> Vec<usize> {
        let on = |i: u16| placed.iter().filter(|p| p.node == NodeIndex(i)).count();
        (0..pools.len() as u16).map(on).collect()
    }

    #[test]
    fn round_robin_skips_full_memory_nodes() {
        let pools = pools(&[4, 16, 16], Placement::RoundRobin);
        let mut all: Vec<PlacedGrant> =
            (0..9).map(|_| pools.allocate_blocking().unwrap()).collect();
        assert_eq!(counts(&pools, &all), [3, 3, 3]);
        all.extend((0..27).map(|_| pools.allocate_blocking().unwrap()));
        assert_eq!(counts(&pools, &all), [4, 16, 16]);
        assert!(matches!(pools.allocate_blocking(), Err(Error::OutOfMemory { .. })));
        for (i, placed) in all.iter().enumerate() {
            pools.write_blocking(placed, 0, &[i as u8; 16]).unwrap();
        }
        for (i, placed) in all.into_iter().enumerate() {
            let mut bytes = [0; 16];
            pools.read_blocking(&placed, 0, &mut bytes).unwrap();
            assert_eq!(bytes, [i as u8; 16]);
            pools.free_blocking(placed).unwrap();
        }
        pools.allocate_blocking().unwrap();
    }

    #[test]
    fn most_free_placement_prefers_the_emptiest_node() {
        let pools = pools(&[8, 64], Placement::MostFree);
        let all: Vec<PlacedGrant> = (0..56).map(|_| pools.allocate_blocking().unwrap()).collect();
        assert_eq!(counts(&pools, &all), [0, 56]);
        let all: Vec<PlacedGrant> = (0..8).map(|_| pools.allocate_blocking().unwrap()).collect();
        let counts = counts(&pools, &all);
        assert!(counts[0] >= 3 && counts[1] >= 3, "{counts:?}");
    }

    #[test]
    fn large_block_goes_to_a_node_with_room() {
        let pools = pools(&[8, 1024], Placement::RoundRobin);
        for _ in 0..2 {
            let placed = pools.allocate_bytes_blocking(2 << 20).unwrap();
            assert_eq!((placed.node, placed.grant.len), (NodeIndex(1), 2 << 20));
        }
    }

    #[test]
    fn multi_pool_refuses_no_nodes_and_unequal_chunks() {
        assert!(MultiPool::<DefaultNic>::over(Vec::new(), Placement::RoundRobin).is_err());
        let pool = |chunk_bytes| {
            let donate_bytes = 4 * chunk_bytes;
            Pool::embedded(Settings { donate_bytes, chunk_bytes, ..Settings::default() }).unwrap()
        };
        let e = MultiPool::over(vec![pool(4096), pool(8192)], Placement::RoundRobin).unwrap_err();
        assert!(e.to_string().contains("--chunk"), "{e}");
    }
}
