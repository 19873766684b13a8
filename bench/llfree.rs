//! The program of `bench/llfree`: compares allocations of FineMem's tree and of LLFree in one
//! process.
//!
//! Prints a line for each measurement of each round: `allocator operation order threads ns`.
//!
//! - `llfree`: get and put by threads that each have a reservation.
//! - `tree`: the tree of scheme finemem in this process's memory. A verb is an atomic instruction.
//! - `embedded`: scheme finemem in an embedded pool. Verbs are work requests, which the inline NIC
//!   executes on the caller's thread. Another thread ends the quarantine of a freed block.

use std::convert::Infallible;
use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use llfree::{Alloc, Classing, FrameId, Init, LLFree, MetaData};
use pool::{Pool, Settings};
use schemes::finemem::header::User;
use schemes::finemem::layout::{Block, Shape, Word};
use schemes::finemem::tree::{Tree, Verbs};

const CHUNK: u64 = 4096;

/// The tree's words in this process's memory.
struct Memory(Vec<AtomicU64>);

impl Verbs for Memory {
    type Error = Infallible;

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        for (word, i) in out.iter_mut().zip(at.0 as usize..) {
            *word = self.0[i].load(Ordering::Acquire);
        }
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Infallible> {
        let word = &self.0[at.0 as usize];
        let found = word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
        Ok(found.unwrap_or_else(|found| found))
    }
}

fn now<T>(future: impl Future<Output = Result<T, Infallible>>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(value)) => value,
        _ => unreachable!("access to memory never waits"),
    }
}

/// An allocator with two inverse operations.
trait Allocator: Sync {
    type Held: Send;
    fn get(&self, order: u32) -> Self::Held;
    fn put(&self, held: Self::Held, order: u32);
    /// Waits until all blocks are free.
    fn settle(&self) {}
}

struct Peer<'a, F> {
    all: &'a LLFree<'a>,
    thread: usize,
    request: &'a F,
}

impl<F: Fn(usize, usize) -> llfree::Request + Sync> Allocator for Peer<'_, F> {
    type Held = FrameId;

    fn get(&self, order: u32) -> FrameId {
        self.all.get(None, (self.request)(order as usize, self.thread)).expect("a free frame").0
    }

    fn put(&self, frame: FrameId, order: u32) {
        self.all.put(frame, (self.request)(order as usize, self.thread)).expect(
            "the frame is \
            allocated",
        );
    }
}

struct Local<'a> {
    words: &'a Memory,
    tree: Tree,
    user: User,
}

impl Allocator for Local<'_> {
    type Held = Block;

    fn get(&self, order: u32) -> Block {
        now(self.tree.allocate(self.words, order)).expect("a free block").block
    }

    fn put(&self, block: Block, _: u32) {
        now(self.tree.give_back(self.words, &[block], self.user));
    }
}

struct Embedded(Pool, u64);

impl Allocator for Embedded {
    type Held = pool::Grant;

    fn get(&self, order: u32) -> pool::Grant {
        self.0.allocate_bytes_blocking(CHUNK << order).expect("a free block")
    }

    fn put(&self, grant: pool::Grant, _: u32) {
        self.0.free_blocking(grant).expect("the block is allocated");
    }

    fn settle(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        while self.0.node_status().expect("a status").node.free < self.1 {
            assert!(Instant::now() < until, "quarantines do not end");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Time in ns of a get, of a put (`count` of each in a row), and of a get and a put of one block.
fn measure<A: Allocator>(all: &[A], order: u32, count: usize) -> [f64; 3] {
    let barrier = Barrier::new(all.len());
    let of_thread = |one: &A| {
        let mut held = Vec::with_capacity(count);
        barrier.wait();
        let begin = Instant::now();
        for _ in 0..count {
            held.push(one.get(order));
        }
        let got = begin.elapsed();
        barrier.wait();
        let begin = Instant::now();
        for one_held in held.drain(..) {
            one.put(one_held, order);
        }
        let put = begin.elapsed();
        one.settle();
        barrier.wait();
        let begin = Instant::now();
        for _ in 0..count {
            one.put(black_box(one.get(order)), order);
        }
        let pair = begin.elapsed();
        one.settle();
        [got, put, pair].map(|time| time.as_nanos() as f64 / count as f64)
    };
    let times: Vec<[f64; 3]> = thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| of_thread(one))).collect();
        threads.into_iter().map(|t| t.join().expect("a thread of a measurement")).collect()
    });
    [0, 1, 2].map(|at| times.iter().map(|t| t[at]).sum::<f64>() / times.len() as f64)
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let (rounds, mib) = (arguments.next().unwrap_or(5), arguments.next().unwrap_or(256));
    let threads = [1, thread::available_parallelism().map_or(1, usize::from)];
    let chunks = (mib << 20) as u32 / CHUNK as u32;
    for round in 0..rounds {
        for &threads in threads.iter().take(if threads[0] == threads[1] { 1 } else { 2 }) {
            for order in [0, 3, 9] {
                // At most half of the memory, and few enough to be quick.
                let count = (chunks as usize >> order) / 2 / threads;
                let count = count.min(20_000);
                let print = |allocator: &str, times: [f64; 3]| {
                    for (operation, ns) in ["get", "put", "pair"].iter().zip(times) {
                        println!("{allocator} {operation} {order} {threads} {ns:.1}");
                    }
                };
                let mut turns: [&dyn Fn(); 3] = [
                    &|| {
                        let (classing, request) = Classing::simple(threads);
                        let frames = chunks as usize;
                        let size = LLFree::metadata_size(&classing, frames);
                        let meta = MetaData::alloc(&size);
                        let all =
                            LLFree::new(frames, Init::FreeAll, &classing, meta).expect("LLFree");
                        let peer = |thread| Peer { all: &all, thread, request: &request };
                        print(
                            "llfree",
                            measure(&(0..threads).map(peer).collect::<Vec<_>>(), order, count),
                        );
                    },
                    &|| {
                        let shape = Shape { chunks, chunk_bytes: CHUNK };
                        let words = Memory((0..shape.words()).map(|_| AtomicU64::new(0)).collect());
                        let local = |thread| {
                            let user = User::new(thread as u16 + 1).expect("a user");
                            Local { words: &words, tree: Tree::new(shape, user), user }
                        };
                        print(
                            "tree",
                            measure(&(0..threads).map(local).collect::<Vec<_>>(), order, count),
                        );
                    },
                    &|| {
                        let settings = Settings {
                            donate_bytes: (mib as u64) << 20,
                            chunk_bytes: CHUNK,
                            scheme: schemes::FINEMEM,
                            ..Settings::default()
                        };
                        let node = pool::EmbeddedNode::start(&settings).expect(
                            "an embedded memory \
                            node",
                        );
                        let node = std::sync::Arc::new(node);
                        let connect = |_| {
                            let pool = Pool::embedded_in(&node, pool::Options::default());
                            Embedded(pool.expect("a pool"), chunks as u64)
                        };
                        let pools: Vec<_> = (0..threads).map(connect).collect();
                        print("embedded", measure(&pools, order, count));
                    },
                ];
                if round % 2 == 1 {
                    turns.reverse();
                }
                turns.iter().for_each(|turn| turn());
            }
        }
    }
}
