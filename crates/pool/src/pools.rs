//! Several memory nodes as one: a compute node connected to all of them, and allocation over those that answer
//! (FineMem §6.2 spreads its chunks over memory nodes in turn).
//!
//! A grant says on which memory node it is ([`Placed`]). One that fails takes what it held with it, and nothing
//! else: allocations go on at the others, and accesses to grants there do not notice. It is left out until it
//! is connected again ([`Pools::rejoin`]); grants of before stay refused then.
//!
//! A process that ends is gone at once. Of a host that vanishes nothing is heard: what is asked there fails once the NIC
//! has tried often enough, or the control connection has. From the first such failure on that memory node is *silent*: it
//! is tried last, so that allocations do not wait for it, until its control connection has ended, and it is gone, or
//! has outlived [`SILENCE`], and it is one of the others again.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fabric::executor::block_on;
use fabric::soft::SoftNic;
use fabric::{Nic, Status};
use parking_lot::{Mutex, RwLock};

use crate::scheme::Grant;
use crate::{Address, Error, Options, Pool};

/// How old what is known of a memory node's free memory may be.
const FRESH: Duration = Duration::from_millis(500);

/// How long a memory node is left alone that did not answer: longer than its control connection takes to notice that
/// nobody is there.
const SILENCE: Duration = Duration::from_secs(10);

/// Where a block is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// On the next memory node in turn.
    #[default]
    RoundRobin,
    /// On the one with most free memory, as far as is known: each says how much it has now and then, and what is
    /// allocated from here meanwhile is counted.
    MostFree,
}

/// A memory node of several, by its place in the list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeIndex(pub u16);

/// A grant, and which memory node's it is.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Whose.
    pub node: NodeIndex,
    /// Where there.
    pub grant: Grant,
}

/// Connections to several memory nodes, used by any number of threads.
pub struct Pools<N: Nic = SoftNic> {
    nodes: Vec<Member<N>>,
    placement: Placement,
    next: AtomicUsize,
    chunk_bytes: u64,
    started: Instant,
}

struct Member<N: Nic> {
    pool: RwLock<Pool<N>>,
    /// It does not answer any more.
    gone: AtomicBool,
    /// When something failed there for want of an answer, in nanoseconds since the start; 0: nothing did.
    silent: AtomicU64,
    /// Bytes that are free there, as far as is known.
    free: AtomicI64,
    /// When that was asked, in nanoseconds since the start; and a lock for who asks.
    asked: AtomicU64,
    asking: Mutex<()>,
}

impl Pools<SoftNic> {
    /// Connects to the memory nodes at `addresses`. All must be there.
    ///
    /// # Errors
    /// What the first that cannot be connected to says.
    pub fn connect(
        addresses: &[Address],
        options: Options,
        placement: Placement,
    ) -> Result<Self, Error> {
        let pools =
            addresses.iter().map(|a| a.connect(options.clone())).collect::<Result<Vec<_>, _>>()?;
        Self::over(pools, placement)
    }

    /// Connects again to the memory nodes that are gone, if they are back; how many are. Grants of before are
    /// lost.
    pub fn rejoin(&self) -> usize {
        let gone = self.nodes.iter().filter(|node| node.gone.load(Ordering::Acquire));
        gone.filter(|node| {
            let before = node.pool.read().clone();
            let Ok(pool) = before.reconnect() else { return false };
            if pool.chunk_bytes() != self.chunk_bytes {
                return false; // another one serves there
            }
            *node.pool.write() = pool;
            node.asked.store(0, Ordering::Relaxed);
            node.silent.store(0, Ordering::Relaxed);
            node.gone.store(false, Ordering::Release);
            true
        })
        .count()
    }
}

impl<N: Nic> Pools<N> {
    /// Over connections that were made already.
    ///
    /// # Errors
    /// There is none, or their chunks differ in size.
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
            return Err(wrong(format!("there may be {}", u16::MAX)));
        }
        if let Some(other) = pools.iter().map(Pool::chunk_bytes).find(|b| *b != chunk_bytes) {
            return Err(wrong(format!(
                "one has chunks of {chunk_bytes} bytes and another of {other}; serve with the same --chunk"
            )));
        }
        let member = |pool: Pool<N>| Member {
            pool: RwLock::new(pool),
            gone: AtomicBool::new(false),
            silent: AtomicU64::new(0),
            free: AtomicI64::new(0),
            asked: AtomicU64::new(0),
            asking: Mutex::new(()),
        };
        Ok(Self {
            nodes: pools.into_iter().map(member).collect(),
            placement,
            next: AtomicUsize::new(0),
            chunk_bytes,
            started: Instant::now(),
        })
    }

    /// Memory nodes, those that are gone too.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Never true: there is at least one.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Those that answer, as far as is known.
    pub fn alive(&self) -> impl Iterator<Item = NodeIndex> {
        let alive = |(_, node): &(u16, &Member<N>)| !node.gone.load(Ordering::Acquire);
        (0..).zip(&self.nodes).filter(alive).map(|(index, _)| NodeIndex(index))
    }

    /// Bytes of a chunk, the same everywhere.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The connection to a memory node, for accesses. Panics if there is no such node.
    pub fn node(&self, index: NodeIndex) -> Pool<N> {
        self.nodes[index.0 as usize].pool.read().clone()
    }

    /// Tells that a memory node does not answer any more, for who has accessed it through [`Pools::node`].
    pub fn failed(&self, index: NodeIndex, error: &Error) {
        let node = &self.nodes[index.0 as usize];
        if is_gone(error) {
            node.gone.store(true, Ordering::Release);
        } else if is_silent(error) {
            node.silent.store(self.now(), Ordering::Relaxed);
        }
    }

    /// Nanoseconds since the start, never 0.
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos().max(1) as u64
    }

    /// Allocates a chunk, like [`Pool::allocate`].
    pub async fn allocate(&self) -> Result<Placed, Error> {
        self.allocate_bytes(self.chunk_bytes).await
    }

    /// Allocates at least `bytes`, like [`Pool::allocate_bytes`], on the memory node that the placement prefers of
    /// those that have as much.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if none of those that answer has; [`Error::Gone`] if none answers.
    pub async fn allocate_bytes(&self, bytes: u64) -> Result<Placed, Error> {
        let mut last = None;
        for index in self.order() {
            let node = &self.nodes[index.0 as usize];
            let pool = node.pool.read().clone();
            match pool.allocate_bytes(bytes).await {
                Ok(grant) => {
                    node.free.fetch_sub(grant.len as i64, Ordering::Relaxed);
                    return Ok(Placed { node: index, grant });
                }
                Err(e) if is_gone(&e) || is_silent(&e) => {
                    self.failed(index, &e);
                    last = last.or(Some(e));
                }
                Err(e @ (Error::OutOfMemory { .. } | Error::OverBudget { .. })) => {
                    node.free.store(0, Ordering::Relaxed);
                    last = Some(e);
                }
                // No block of that pool is as large.
                Err(e @ Error::Setting { .. }) => last = last.or(Some(e)),
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or_else(|| Error::Gone {
            attempt: format!("allocating {bytes} bytes"),
            why: format!("none of {} memory nodes answers", self.nodes.len()),
        }))
    }

    /// Frees a block, like [`Pool::free`]. What a memory node held that is gone is lost, and free in that sense.
    pub async fn free(&self, placed: Placed) -> Result<(), Error> {
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
    pub async fn read(&self, placed: &Placed, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let pool = self.node(placed.node);
        self.told(placed.node, pool.read(&placed.grant, offset, into)).await
    }

    /// WRITEs, like [`Pool::write`].
    pub async fn write(&self, placed: &Placed, offset: u64, from: &[u8]) -> Result<(), Error> {
        let pool = self.node(placed.node);
        self.told(placed.node, pool.write(&placed.grant, offset, from)).await
    }

    /// [`Pools::allocate`], blocking.
    pub fn allocate_blocking(&self) -> Result<Placed, Error> {
        block_on(self.allocate())
    }

    /// [`Pools::allocate_bytes`], blocking.
    pub fn allocate_bytes_blocking(&self, bytes: u64) -> Result<Placed, Error> {
        block_on(self.allocate_bytes(bytes))
    }

    /// [`Pools::free`], blocking.
    pub fn free_blocking(&self, placed: Placed) -> Result<(), Error> {
        block_on(self.free(placed))
    }

    /// [`Pools::read`], blocking.
    pub fn read_blocking(
        &self,
        placed: &Placed,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        block_on(self.read(placed, offset, into))
    }

    /// [`Pools::write`], blocking.
    pub fn write_blocking(&self, placed: &Placed, offset: u64, from: &[u8]) -> Result<(), Error> {
        block_on(self.write(placed, offset, from))
    }

    async fn told<T>(
        &self,
        index: NodeIndex,
        access: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        access.await.inspect_err(|e| self.failed(index, e))
    }

    /// Those that answer, in the order in which they are tried.
    fn order(&self) -> Vec<NodeIndex> {
        let mut order: Vec<NodeIndex> = self.alive().collect();
        // In turn also among those that are as good.
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let first = next % order.len().max(1);
        order.rotate_left(first);
        if self.placement == Placement::MostFree {
            order.iter().for_each(|index| self.ask(*index));
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

    /// True if a memory node that was silent is gone. One that has been silent for long enough, and is not, is silent
    /// no more. Never waits.
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
        if self.now().saturating_sub(since) > SILENCE.as_nanos() as u64 {
            node.silent.store(0, Ordering::Relaxed);
        }
        false
    }

    /// Asks a memory node how much is free there, if that was long ago and nobody else asks.
    fn ask(&self, index: NodeIndex) {
        let node = &self.nodes[index.0 as usize];
        let now = self.started.elapsed();
        let asked = node.asked.load(Ordering::Relaxed);
        if self.is_silent(index)
            || asked > 0 && now.saturating_sub(Duration::from_nanos(asked)) < FRESH
        {
            return;
        }
        let Some(_asking) = node.asking.try_lock() else { return };
        let pool = node.pool.read().clone();
        match pool.node_status() {
            Ok(status) => {
                let free = status.node.free * status.node.chunk_bytes;
                node.free.store(free as i64, Ordering::Relaxed);
                node.asked.store(now.as_nanos().max(1) as u64, Ordering::Relaxed);
            }
            Err(e) => self.failed(index, &e),
        }
    }
}

/// True for an error after which a memory node is asked no more.
fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Gone { .. } | Error::NotAdmitted { .. })
}

/// True for an error that says that no answer came; the next thing that is asked may be answered.
fn is_silent(error: &Error) -> bool {
    match error {
        Error::ManagementBroken { .. } => true,
        Error::Access { status, .. } => *status == Status::RetryExceeded,
        _ => false,
    }
}

impl<N: Nic> std::fmt::Debug for Pools<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (all, alive) = (self.nodes.len(), self.alive().count());
        write!(f, "{alive} of {all} memory nodes, {:?}", self.placement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SchemeKind, Settings};

    fn pools(sizes: &[u64], placement: Placement) -> Pools {
        let start = |chunks: &u64| {
            Pool::embedded(Settings {
                donate_bytes: chunks * 4096,
                chunk_bytes: 4096,
                scheme: SchemeKind::FineMem,
                ..Settings::default()
            })
            .unwrap()
        };
        Pools::over(sizes.iter().map(start).collect(), placement).unwrap()
    }

    fn counts(pools: &Pools, placed: &[Placed]) -> Vec<usize> {
        let on = |i: u16| placed.iter().filter(|p| p.node == NodeIndex(i)).count();
        (0..pools.len() as u16).map(on).collect()
    }

    #[test]
    fn blocks_go_to_each_in_turn_and_to_others_when_one_is_full() {
        let pools = pools(&[4, 16, 16], Placement::RoundRobin);
        let mut all: Vec<Placed> = (0..9).map(|_| pools.allocate_blocking().unwrap()).collect();
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
    fn most_free_memory_comes_first() {
        let pools = pools(&[8, 64], Placement::MostFree);
        let all: Vec<Placed> = (0..56).map(|_| pools.allocate_blocking().unwrap()).collect();
        assert_eq!(counts(&pools, &all), [0, 56]);
        let all: Vec<Placed> = (0..8).map(|_| pools.allocate_blocking().unwrap()).collect();
        let counts = counts(&pools, &all);
        assert!(counts[0] >= 3 && counts[1] >= 3, "{counts:?}");
    }

    #[test]
    fn a_large_block_goes_where_there_is_room() {
        let pools = pools(&[8, 1024], Placement::RoundRobin);
        for _ in 0..2 {
            let placed = pools.allocate_bytes_blocking(2 << 20).unwrap();
            assert_eq!((placed.node, placed.grant.len), (NodeIndex(1), 2 << 20));
        }
    }

    #[test]
    fn none_at_all_and_different_chunks_are_refused() {
        assert!(Pools::<SoftNic>::over(Vec::new(), Placement::RoundRobin).is_err());
        let pool = |chunk_bytes| {
            let donate_bytes = 4 * chunk_bytes;
            Pool::embedded(Settings { donate_bytes, chunk_bytes, ..Settings::default() }).unwrap()
        };
        let e = Pools::over(vec![pool(4096), pool(8192)], Placement::RoundRobin).unwrap_err();
        assert!(e.to_string().contains("--chunk"), "{e}");
    }
}
