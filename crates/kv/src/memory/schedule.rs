//! A deterministic executor: the order of tasks is a function of a seed.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Random numbers of a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Seeded(u64);

impl Seeded {
    /// The numbers of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mixed(self.0)
    }

    /// The next number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw() % end.max(1)
    }
}

/// Distance of two states of the numbers.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random number of a state (splitmix64).
pub(crate) fn mixed(state: u64) -> u64 {
    let state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ state >> 31
}

#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Lets other tasks run.
pub async fn turn() {
    let mut first = true;
    poll_fn(|cx| {
        if !std::mem::take(&mut first) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Runs `tasks` to their ends. `seed` chooses which of the tasks that were woken runs next.
///
/// Panics if no task was woken: a lost wake-up, or tasks that wait for each other.
pub fn run<'a>(seed: u64, tasks: Vec<Pin<Box<dyn Future<Output = ()> + 'a>>>) {
    let mut random = Seeded::new(seed);
    let mut tasks: Vec<_> =
        tasks.into_iter().map(|task| (task, Arc::new(Flag(AtomicBool::new(true))))).collect();
    while !tasks.is_empty() {
        let woken: Vec<_> =
            (0..tasks.len()).filter(|i| tasks[*i].1.0.load(Ordering::Acquire)).collect();
        assert!(!woken.is_empty(), "{} tasks wait and none was woken, seed {seed}", tasks.len());
        let chosen = woken[random.below(woken.len() as u64) as usize];
        let (task, flag) = &mut tasks[chosen];
        flag.0.store(false, Ordering::Release);
        let waker = Waker::from(flag.clone());
        if task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            drop(tasks.swap_remove(chosen));
        }
    }
}
