//! Clients of an index that crash within a split.
//!
//! The client of the first split after a planned time stops for ever: nothing of it is sent any
//! more. Its connection stays, so that only the ends of its leases, or nothing, give back what it
//! holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ::kv::blocks::{Length, SharedBlocks};
use ::kv::leased::LeasedMemory;
use ::kv::place::{Address, Place};
use ::kv::reach::{Range, Reach, Step, Stopped};
use verbs::Nic;

/// The planned crash of one of several clients.
#[derive(Debug)]
pub struct Fate {
    /// Time from which on a split is the last one of its client, in nanoseconds of the NIC's clock.
    from_ns: AtomicU64,
    /// Verbs and requests between the lock of the split and the crash.
    verbs: AtomicU64,
    /// The number of the client, above 0. 0: no client has begun such a split.
    victim: AtomicU32,
}

impl Default for Fate {
    /// No client crashes.
    fn default() -> Self {
        let (from_ns, verbs) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
        Self { from_ns, verbs, victim: AtomicU32::new(0) }
    }
}

impl Fate {
    /// Lets the client of the first split from `from` on crash, `verbs` verbs and requests later.
    pub fn plan(&self, from: Duration, verbs: u64) {
        self.verbs.store(verbs, Ordering::Relaxed);
        self.from_ns.store(from.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The memory of a client that may crash. Clones are of one client.
pub struct Mortal<N: Nic> {
    memory: LeasedMemory<N>,
    client: u32,
    fate: Arc<Fate>,
    /// Verbs and requests until the crash.
    left: Arc<AtomicU64>,
}

impl<N: Nic> Clone for Mortal<N> {
    fn clone(&self) -> Self {
        let Self { memory, client, fate, left } = self;
        Self { memory: memory.clone(), client: *client, fate: fate.clone(), left: left.clone() }
    }
}

impl<N: Nic> Mortal<N> {
    /// The memory of the client with this number.
    pub fn new(memory: LeasedMemory<N>, client: u32, fate: Arc<Fate>) -> Self {
        Self { memory, client, fate, left: Arc::new(AtomicU64::new(u64::MAX)) }
    }

    /// The planned crash.
    pub fn fate(&self) -> &Arc<Fate> {
        &self.fate
    }

    /// True if the client has crashed.
    pub fn has_crashed(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Notes that the client has locked a subtable.
    fn begin_split(&self) {
        let now_ns = self.memory.pool().nic().now().as_nanos() as u64;
        let is_due = now_ns >= self.fate.from_ns.load(Ordering::Relaxed);
        let (none, mine) = (0, self.client);
        let order = Ordering::Relaxed;
        if is_due && self.fate.victim.compare_exchange(none, mine, order, order).is_ok() {
            self.left.store(self.fate.verbs.load(order), order);
        }
    }

    /// Takes up to `verbs` of the verbs that are left.
    fn spend(&self, verbs: u64) -> u64 {
        let left = self.left.load(Ordering::Relaxed);
        if left == u64::MAX {
            return verbs;
        }
        let spent = left.min(verbs);
        self.left.store(left - spent, Ordering::Relaxed);
        spent
    }

    fn spend_one(&self) -> Result<(), Stopped> {
        if self.spend(1) == 1 { Ok(()) } else { Err(crashed()) }
    }
}

fn crashed() -> Stopped {
    Stopped::Lost("this client has crashed, as planned".into())
}

/// True for the CAS of a lock without an end: the lower 48 bits of the word are the end.
fn is_plain_lock(step: &Step<'_>) -> bool {
    const NO_END: u64 = (1 << 48) - 1;
    matches!(step, Step::Cas { expected: 0, new, .. } if *new & NO_END == NO_END)
}

impl<N: Nic> Reach for Mortal<N> {
    type Right = <LeasedMemory<N> as Reach>::Right;

    async fn open(&self, range: Range) -> Result<Self::Right, Stopped> {
        let right = self.memory.open(range).await?;
        if range.exclusive {
            self.spend_one()?;
            self.begin_split();
        }
        Ok(right)
    }

    async fn close(&self, right: Self::Right) {
        if self.spend_one().is_ok() {
            self.memory.close(right).await;
        }
    }

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let some = self.spend(steps.len() as u64) as usize;
        if some > 0 {
            self.memory.run(&mut steps[..some]).await?;
        }
        if some < steps.len() {
            return Err(crashed());
        }
        if steps.iter().any(is_plain_lock) {
            self.begin_split();
        }
        Ok(())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        self.memory.ordered(a, b)
    }
}

impl<N: Nic> SharedBlocks for Mortal<N> {
    fn slab(&self) -> u32 {
        SharedBlocks::slab(&self.memory)
    }

    async fn allocate(&self, bytes: u32) -> Result<Place, ::kv::Error> {
        self.spend_one()?;
        self.memory.allocate(bytes).await
    }

    async fn allocate_value(&self, bytes: u32, length: Length) -> Result<Place, ::kv::Error> {
        self.spend_one()?;
        self.memory.allocate_value(bytes, length).await
    }

    fn release(&self, place: Place, bytes: u32) {
        self.memory.release(place, bytes);
    }

    async fn tend(&self) -> Result<(), ::kv::Error> {
        self.spend_one()?;
        SharedBlocks::tend(&self.memory).await
    }

    async fn rebuild(&self, used: &[(Place, u32)]) -> Result<u64, ::kv::Error> {
        self.memory.rebuild(used).await
    }

    async fn leave(&self) -> Result<(), ::kv::Error> {
        SharedBlocks::leave(&self.memory).await
    }
}
