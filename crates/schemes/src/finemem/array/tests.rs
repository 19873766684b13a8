//! The array on plain memory: allocation under any order of verbs, and recovery after crashes.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::*;
use crate::finemem::layout::Word;
use crate::finemem::tree::Changed;

/// Memory on which each verb yields once before it is executed.
struct Memory(Vec<AtomicU64>);

impl Memory {
    fn new(shape: Shape) -> Self {
        Self((0..shape.words()).map(|_| AtomicU64::new(0)).collect())
    }

    fn load(&self, at: Word) -> u64 {
        self.0[at.as_usize()].load(Ordering::Relaxed)
    }
}

/// Is ready at the second poll.
async fn once() {
    let mut waited = false;
    std::future::poll_fn(|_| match std::mem::replace(&mut waited, true) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await
}

impl Verbs for Memory {
    type Error = Infallible;

    fn repeat(&self, _: Changed) -> Result<(), Infallible> {
        Ok(())
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        once().await;
        (0..).zip(out).for_each(|(i, word)| *word = self.load(at.plus(i)));
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Infallible> {
        once().await;
        let (word, relaxed) = (&self.0[at.as_usize()], Ordering::Relaxed);
        Ok(word.compare_exchange(expected, new, relaxed, relaxed).unwrap_or_else(|found| found))
    }
}

fn shape(chunks: u32) -> Shape {
    Shape { chunks, chunk_bytes: 4096 }
}

fn block(chunk: u32, order: u32) -> Block {
    Block { chunk: ChunkIndex::new(chunk), order: Order::new(order) }
}

fn user(number: u16) -> User {
    User::new(number).unwrap()
}

fn step<T>(task: &mut Pin<Box<dyn Future<Output = Result<T, Infallible>> + '_>>) -> Option<T> {
    match task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(value)) => Some(value),
        Poll::Ready(Err(never)) => match never {},
        Poll::Pending => None,
    }
}

fn run<T>(future: impl Future<Output = Result<T, Infallible>>) -> T {
    let mut task: Pin<Box<dyn Future<Output = _>>> = Box::pin(future);
    loop {
        if let Some(value) = step(&mut task) {
            return value;
        }
    }
}

#[test]
fn search_resumes_where_the_last_one_ended() {
    search_goes_on(Array::new);
    search_goes_on(Array::without_contention_control);
}

fn search_goes_on(new: fn(Shape, User) -> Array) {
    let shape = shape(8);
    let (memory, array) = (Memory::new(shape), new(shape, user(1)));
    let take =
        |order| run(array.allocate(&memory, Order::new(order))).map(|(block, _)| block.chunk.raw());
    assert_eq!((take(0), take(0), take(1), take(0)), (Some(0), Some(1), Some(2), Some(4)));
    run(array.give_back(&memory, &[block(0, 0)]));
    assert_eq!((take(1), take(0), take(0), take(0)), (Some(6), Some(0), Some(5), None));
    let other = new(shape, user(2));
    run(array.give_back(&memory, &[block(6, 1)]));
    assert_eq!(run(other.allocate(&memory, Order::new(0))).unwrap().0, block(6, 0));
    assert_eq!(run(other.allocate(&memory, Order::new(1))), None);
    assert_eq!(memory.load(shape.log(ChunkIndex::new(7))), 0);
}

/// A taken chunk costs a round trip, and one more if it is CASed nevertheless.
#[test]
fn search_without_contention_control_costs_more() {
    let shape = shape(8);
    let polls = |new: fn(Shape, User) -> Array| {
        let memory = Memory::new(shape);
        let taken = Taker { user: user(2), order: Order::new(0) }.to_word();
        (0..7).for_each(|at| {
            memory.0[shape.log(ChunkIndex::new(at)).as_usize()].store(taken, Ordering::Relaxed)
        });
        let array = new(shape, user(1));
        let mut task: Pin<Box<dyn Future<Output = _>>> =
            Box::pin(array.allocate(&memory, Order::new(0)));
        let waited = std::iter::repeat_with(|| step(&mut task)).take_while(Option::is_none).count();
        assert!((0..7).all(|at| memory.load(shape.log(ChunkIndex::new(at))) == taken));
        waited
    };
    assert_eq!(polls(Array::without_contention_control) - polls(Array::new), 7);
}

#[test]
fn failed_cas_undoes_the_partial_allocation() {
    let shape = shape(16);
    let (memory, array) = (Memory::new(shape), Array::new(shape, user(1)));
    let mut task: Pin<Box<dyn Future<Output = _>>> =
        Box::pin(array.allocate(&memory, Order::new(2)));
    for _ in 0..4 {
        assert_eq!(step(&mut task), None);
    }
    assert_ne!(
        memory.load(shape.log(ChunkIndex::new(1))),
        0,
        "the allocation has READ four words and taken two"
    );
    let other = Taker { user: user(2), order: Order::new(0) }.to_word();
    memory.0[shape.log(ChunkIndex::new(3)).as_usize()].store(other, Ordering::Relaxed);
    let taken = std::iter::repeat_with(|| step(&mut task)).flatten().next().unwrap();
    assert_eq!(taken.unwrap().0, block(4, 2));
    let words = [0, 1, 2, 3].map(|chunk| memory.load(shape.log(ChunkIndex::new(chunk))));
    assert_eq!(words, [0, 0, 0, other]);
}

#[test]
fn invalid_array_words_yield_no_large_block() {
    let shape = shape(600);
    let memory = Memory::new(shape);
    let me = user(3);
    for (chunk, word) in [
        (0, Taker { user: me, order: Order::new(31) }.to_word()),
        (9, Taker { user: me, order: Order::new(9) }.to_word()),
        (599, Taker { user: me, order: Order::new(3) }.to_word()),
        (20, u64::MAX),
        (30, Taker { user: user(4), order: Order::new(0) }.to_word()),
    ] {
        memory.0[shape.log(ChunkIndex::new(chunk)).as_usize()].store(word, Ordering::Relaxed);
    }
    let array = Array::new(shape, User::NOBODY);
    let found: Vec<_> = shape
        .each_section()
        .flat_map(|section| run(array.taken_by(&memory, me, section)))
        .collect();
    assert!(found.iter().all(|block| block.order == Order::new(0)), "{found:?}");
}

/// A block that cannot be taken completely, because its taker owns a part of it, must not hide that
/// part.
#[test]
fn partial_block_before_an_own_block_is_recovered() {
    let shape = shape(16);
    let (memory, array) = (Memory::new(shape), Array::new(shape, user(1)));
    let mut task: Pin<Box<dyn Future<Output = _>>> =
        Box::pin(array.allocate(&memory, Order::new(3)));
    for _ in 0..4 {
        assert_eq!(step(&mut task), None);
    }
    drop(task);
    assert_ne!(
        memory.load(shape.log(ChunkIndex::new(0))),
        0,
        "the allocation has taken its first chunk"
    );
    array.next.store(4, Ordering::Relaxed);
    assert_eq!(run(array.allocate(&memory, Order::new(1))).unwrap().0, block(4, 1));
    assert_eq!(run(array.taken_by(&memory, user(1), SectionIndex::new(0))), [block(4, 1)]);
    assert_eq!(memory.load(shape.log(ChunkIndex::new(0))), 0);
}

proptest! {
    /// Several users run concurrently and stop between any two verbs, some of them for ever. No
    /// chunk has two owners, and recovery finds the blocks of stopped users.
    #[test]
    fn no_chunk_has_two_owners(
        chunks in 1u32..80,
        orders in prop::collection::vec(prop::collection::vec(0u32..4, 1..5), 2..5),
        turns in prop::collection::vec(any::<prop::sample::Index>(), 0..400),
    ) {
        let shape = shape(chunks);
        let memory = &Memory::new(shape);
        let users: Vec<_> = (1..).zip(&orders).map(|(n, _)| Array::new(shape, user(n))).collect();
        let mut held: Vec<Vec<Block>> = vec![Vec::new(); users.len()];
        {
            let mut at = vec![0; users.len()];
            let mut tasks: Vec<Pin<Box<dyn Future<Output = _>>>> = users
                .iter()
                .zip(&orders)
                .map(|(array, orders)| {
                    let first = Order::new(orders[0]);
                    Box::pin(array.allocate(memory, first)) as Pin<Box<_>>
                })
                .collect();
            for turn in turns {
                let who = turn.index(users.len());
                if at[who] == orders[who].len() {
                    continue;
                }
                let taken: Option<Option<(Block, Capability)>> = step(&mut tasks[who]);
                if let Some(block) = taken {
                    held[who].extend(block.map(|(block, _)| block));
                    at[who] += 1;
                    let next = orders[who].get(at[who]).copied().unwrap_or(0);
                    tasks[who] = Box::pin(users[who].allocate(memory, Order::new(next)));
                }
            }
        }
        // All users crash here.
        let mut owned = vec![false; chunks as usize];
        for (array, held) in users.iter().zip(&held) {
            let found = run(array.taken_by(memory, array.user, SectionIndex::new(0)));
            for block in held {
                prop_assert!(found.contains(block), "{block:?} is forgotten");
            }
            for chunk in found.iter().flat_map(|block| block.chunks().iter()) {
                prop_assert!(!std::mem::replace(&mut owned[chunk.as_usize()], true));
            }
            run(array.give_back(memory, &found));
        }
        prop_assert!(shape.each_chunk().all(|chunk| memory.load(shape.log(chunk)) == 0));
    }
}
