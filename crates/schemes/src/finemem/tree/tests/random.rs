//! Random runs: several clients, all sizes, crashes, and any order of verbs.

use std::sync::Arc;

use proptest::prelude::*;

use super::world::{Stepped, Task};
use super::*;
use crate::finemem::map::Map;

#[derive(Clone, Debug)]
struct Plan {
    orders: Vec<(u32, bool)>,
    crash: Option<usize>,
}

type Held = Arc<Mutex<Vec<Option<u16>>>>;

/// Allocates blocks, and frees each one at once or at the end.
fn client(memory: Memory, me: u16, plan: Plan, held: Held) -> Task {
    let shape = memory.shape();
    Task::new(move |verbs: Stepped| async move {
        let tree = Tree::new(shape, user(me));
        let mut kept = Vec::new();
        let leave = |block: Block| {
            let mut held = held.lock();
            for chunk in block.chunks().iter() {
                assert_eq!(held[chunk.as_usize()].take(), Some(me));
            }
        };
        for (order, keep) in plan.orders {
            let Ok(Some(taken)) = tree.allocate(&verbs, Order::new(order)).await else { continue };
            let block = taken.block;
            for chunk in block.chunks().iter() {
                let before = held.lock()[chunk.as_usize()].replace(me);
                assert_eq!(before, None, "chunk {chunk} has two owners");
            }
            memory.check_log(block, user(me));
            if keep {
                kept.push(block);
                continue;
            }
            leave(block);
            let Ok(()) = tree.give_back(&verbs, &[block], user(me)).await;
        }
        for block in kept {
            leave(block);
            let Ok(()) = tree.give_back(&verbs, &[block], user(me)).await;
        }
    })
}

fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let plan = (
        prop::collection::vec((prop_oneof![5 => 0u32..7, 1 => 7u32..12], any::<bool>()), 1..8),
        prop::option::weighted(0.4, 1usize..60),
    );
    prop::collection::vec(plan.prop_map(|(orders, crash)| Plan { orders, crash }), 2..5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn random_runs_share_no_chunk_and_leak_none(
        chunks in prop_oneof![Just(32u32), Just(40), Just(64), Just(512), Just(2048)],
        plans in plans(),
        // Modulo 128: timestamps wrap around during the run.
        time in prop_oneof![Just(0u32), Just(61), Just(120), Just(127)],
        choices in prop::collection::vec(any::<u16>(), 2000),
    ) {
        let shape = Shape { chunks, chunk_bytes: 4096 };
        let memory = Memory::at(shape, time);
        let held: Held = Arc::new(Mutex::new(vec![None; chunks as usize]));
        let clients: Vec<(u16, Plan)> =
            plans.into_iter().enumerate().map(|(i, plan)| (i as u16 + 1, plan)).collect();
        let mut tasks: Vec<Task> = clients
            .iter()
            .map(|(me, plan)| client(memory.clone(), *me, plan.clone(), held.clone()))
            .collect();
        let mut choices = choices.into_iter().cycle();
        let mut steps = 0;
        loop {
            let ready: Vec<usize> = (0..tasks.len()).filter(|i| !tasks[*i].ended).collect();
            if ready.is_empty() {
                break;
            }
            let at = ready[choices.next().unwrap() as usize % ready.len()];
            tasks[at].step(&memory);
            steps += 1;
            prop_assert!(steps < 100_000, "the run does not end");
            if let Some((me, plan)) = clients.get(at)
                && plan.crash == Some(tasks[at].history.len())
                && !tasks[at].ended
            {
                tasks[at].ended = true;
                held.lock().iter_mut().filter(|h| **h == Some(*me)).for_each(|h| *h = None);
                let me = user(*me);
                tasks.push(Task::new(move |verbs: Stepped| async move {
                    let tree = Tree::new(shape, user(100));
                    for section in shape.each_section() {
                        let Ok(blocks) = tree.taken_by(&verbs, me, section).await;
                        for block in blocks {
                            let Ok(()) = tree.give_back(&verbs, &[block], me).await;
                        }
                    }
                }));
            }
        }
        let tree = Tree::new(shape, user(101));
        shape.each_section().for_each(|section| _ = run(tree.repair_section(&memory, section)));
        memory.check_empty();
        for chunk in shape.each_chunk() {
            prop_assert!(!memory.log(chunk).taken, "the log of chunk {chunk}");
        }
    }
}

proptest! {
    /// The memory node's count of free blocks equals the number that can be allocated, for each
    /// size.
    #[test]
    fn count_of_free_blocks_equals_allocations(
        chunks in prop_oneof![Just(4 * 512u32), 1u32..2600],
        steps in prop::collection::vec((0u32..11, any::<bool>()), 0..60),
        order in 0u32..11,
    ) {
        let shape = Shape { chunks, chunk_bytes: 4096 };
        let memory = Memory::new(shape);
        let tree = Tree::new(shape, user(1));
        let mut held = Vec::new();
        for (order, gives_back) in steps {
            held.extend(take(&tree, &memory, order));
            if gives_back && !held.is_empty() {
                let block = held.swap_remove(held.len() / 2);
                run(tree.give_back(&memory, &[block], user(1)));
            }
        }
        let words = memory.words();
        let map = Map::Tree(Tree::new(shape, user(2)));
        let counted = map.free_blocks(Order::new(order), |at| words[at.as_usize()]);
        let Map::Tree(other) = &map else { unreachable!("it is one") };
        let mut taken = 0;
        while take(other, &memory, order).is_some() {
            taken += 1;
        }
        prop_assert_eq!(counted, taken);
        prop_assert_eq!(shape.order(u64::MAX), None);
    }
}
