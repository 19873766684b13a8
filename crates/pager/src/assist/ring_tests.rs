use proptest::prelude::*;
use smallvec::smallvec;

use super::*;

const FRAMES: u32 = 32;

fn pair() -> (Producer, Consumer, DmaMemory) {
    let memory = DmaMemory::anonymous(BYTES).unwrap();
    let producer = Producer::new(memory.clone());
    (producer, Consumer::new(memory.clone(), &[FRAMES]).unwrap(), memory)
}

fn request(seed: u32) -> Request {
    let direction = if seed.is_multiple_of(2) { Direction::Read } else { Direction::Write };
    let item = |index: u32| Item {
        address: u64::from(seed) << 33 | u64::from(index),
        rkey: seed.wrapping_mul(index),
        node: 0,
        qp: (seed >> 3) as u16,
        frame: seed % FRAMES,
        pages: 1,
    };
    Request { direction, items: (0..1 + seed % ITEMS_MAX as u32).map(item).collect() }
}

#[test]
fn requests_arrive_in_order_and_end_in_any_order() {
    let (mut producer, mut consumer, _) = pair();
    let completions = producer.completions();
    // More than a lap, from a number that wraps.
    producer.next = Number(u32::MAX - 70);
    consumer.next = producer.next;
    for round in 0..50 {
        let numbers: Vec<Number> = (0..4)
            .map(|at| {
                let number = producer.next();
                producer.push(&request(round * 4 + at));
                number
            })
            .collect();
        for (at, number) in (0..).zip(&numbers) {
            assert!(consumer.has_request());
            assert_eq!(consumer.take().unwrap(), Some((*number, request(round * 4 + at))));
        }
        assert_eq!(consumer.take().unwrap(), None);
        for at in [2, 0, 3, 1] {
            assert_eq!(completions.outcome(numbers[at]), None);
            let outcome = if at == 3 { Outcome::Failed } else { Outcome::Moved };
            consumer.complete(numbers[at], outcome);
            assert_eq!(completions.outcome(numbers[at]), Some(outcome));
        }
    }
}

#[test]
fn two_threads_lose_no_request_and_no_completion() {
    const REQUESTS: u32 = 20_000;
    let (mut producer, mut consumer, _) = pair();
    let completions = producer.completions();
    let (wake, woken) = std::sync::mpsc::channel();
    let assist = std::thread::spawn(move || {
        let mut taken = 0;
        while taken < REQUESTS {
            let Some((number, request)) = consumer.take().unwrap() else {
                consumer.announce_sleep();
                if !consumer.has_request() {
                    woken.recv().unwrap();
                }
                consumer.announce_awake();
                continue;
            };
            assert_eq!(request, self::request(taken));
            taken += 1;
            consumer.complete(number, Outcome::Moved);
        }
    });
    let mut open = std::collections::VecDeque::new();
    for seed in 0..REQUESTS {
        if open.len() == ENTRIES as usize || seed % 7 == 0 {
            for number in open.drain(..) {
                while completions.outcome(number).is_none() {
                    completions.sleep(number, u64::MAX / 2_000_000);
                }
            }
        }
        open.push_back(producer.next());
        if producer.push(&request(seed)) {
            // Superfluous wake-ups are allowed.
            let _ = wake.send(());
        }
    }
    assist.join().unwrap();
    assert!(open.into_iter().all(|number| completions.outcome(number) == Some(Outcome::Moved)));
}

#[test]
fn memory_of_another_kind_is_refused() {
    let zeros = DmaMemory::anonymous(BYTES).unwrap();
    assert_eq!(Consumer::new(zeros, &[FRAMES]).err(), Some(Violation::Version));
    let (_, _, memory) = pair();
    let short = memory.slice(0, BYTES - 8).unwrap();
    assert_eq!(Consumer::new(short, &[FRAMES]).err(), Some(Violation::Version));
}

#[test]
fn violations_are_named() {
    let take = |change: &dyn Fn(&mut Producer, &DmaMemory)| {
        let (mut producer, mut consumer, memory) = pair();
        change(&mut producer, &memory);
        consumer.take().unwrap_err()
    };
    let overrun = take(&|_, memory| memory.word32(PRODUCED).store(65, Ordering::Relaxed));
    assert_eq!(overrun, Violation::Overrun { produced: 65, consumed: 0 });
    let none = Request { direction: Direction::Read, items: smallvec![] };
    assert_eq!(take(&|producer, _| assert!(!producer.push(&none))), Violation::Items(0));
    let item = Item { address: 0, rkey: 0, node: 0, qp: 0, frame: FRAMES - 1, pages: 1 };
    for item in [
        Item { pages: 2, ..item },
        Item { pages: 0, ..item },
        Item { frame: u32::MAX, ..item },
        Item { node: 1, ..item },
    ] {
        let request = Request { direction: Direction::Write, items: smallvec![item] };
        let violation = take(&|producer, _| assert!(!producer.push(&request)));
        assert!(matches!(violation, Violation::Frames { .. }), "{violation}");
    }
}

proptest! {
    /// A host that writes any bytes gets its requests refused or executed within its frames.
    #[test]
    fn any_bytes_are_valid_requests_or_violations(
        bytes in proptest::collection::vec(any::<u8>(), 0..2048),
        produced in any::<u32>(),
        is_near in any::<bool>(),
        frames in proptest::collection::vec(0u32..100, 0..3),
    ) {
        let (_, _, memory) = pair();
        memory.write(ENTRIES_AT, &bytes);
        let produced = if is_near { produced % 80 } else { produced };
        memory.word32(PRODUCED).store(produced, Ordering::Relaxed);
        let mut consumer = Consumer::new(memory, &frames).unwrap();
        for _ in 0..=ENTRIES {
            let Ok(Some((number, request))) = consumer.take() else { break };
            prop_assert!((1..=ITEMS_MAX).contains(&request.items.len()));
            for item in &request.items {
                prop_assert_eq!(item.node, request.items[0].node);
                let end = u64::from(item.frame) + u64::from(item.pages);
                prop_assert!(item.pages > 0);
                prop_assert!(end <= u64::from(frames[usize::from(item.node)]));
            }
            consumer.complete(number, Outcome::Moved);
        }
    }
}
