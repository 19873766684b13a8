//! Explores every interleaving of a few clients, with a crash after any verb.
//!
//! A state consists of the memory and of the results that each task has seen. Equal states have
//! equal continuations, so each state is explored once. A state is restored by replaying its
//! schedule.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::world::{Stepped, Task};
use super::*;

/// Preemption bound of the long explorations.
const PREEMPTIONS: usize = 3;

/// A client allocates and frees a block of each order.
#[derive(Clone, Copy)]
struct Client {
    orders: &'static [u32],
    /// Number of verbs after which the client crashes and its recovery starts.
    crash: Option<usize>,
}

/// The owners of blocks: updated when an allocation returns, and before a free.
#[derive(Default)]
pub struct Held(Mutex<Vec<(User, Block)>>);

impl Held {
    pub fn take(&self, user: User, block: Block) {
        let mut all = self.0.lock();
        for (other, had) in all.iter() {
            let apart = had.end() <= block.chunk || block.end() <= had.chunk;
            assert!(apart, "{other:?} has {had:?}, but {user:?} gets {block:?}");
        }
        all.push((user, block));
    }

    pub fn leave(&self, user: User, block: Block) {
        self.0.lock().retain(|held| *held != (user, block));
    }

    pub fn forget(&self, user: User) {
        self.0.lock().retain(|(owner, _)| *owner != user);
    }
}

/// A set of tasks that is explored verb by verb.
pub trait Explored {
    /// Executes the next verb of task `at`.
    fn step(&mut self, at: usize);
    /// Tasks that can continue.
    fn ready(&self) -> Vec<usize>;
    /// Hash of the state: equal states have equal continuations.
    fn state(&self) -> u64;
    /// Checks the state in which no task can continue.
    fn check_end(&self);
}

struct World {
    memory: Memory,
    held: Arc<Held>,
    tasks: Vec<Task>,
    clients: Vec<Client>,
    crashed: Vec<bool>,
}

fn client(memory: Memory, me: User, orders: &'static [u32], held: Arc<Held>) -> Task {
    let shape = memory.shape();
    Task::new(move |verbs: Stepped| async move {
        let tree = Tree::new(shape, me);
        for order in orders {
            let Ok(Some(Taken { block, .. })) = tree.allocate(&verbs, Order::new(*order)).await
            else {
                continue;
            };
            held.take(me, block);
            memory.check_log(block, me);
            held.leave(me, block);
            let Ok(()) = tree.give_back(&verbs, &[block], me).await;
        }
    })
}

/// The memory node's recovery for a crashed client.
fn recovery(shape: Shape, crashed: User) -> Task {
    Task::new(move |verbs: Stepped| async move {
        let tree = Tree::new(shape, user(100));
        for section in shape.each_section() {
            let Ok(blocks) = tree.taken_by(&verbs, crashed, section).await;
            for block in blocks {
                let Ok(()) = tree.give_back(&verbs, &[block], crashed).await;
            }
            let Ok(_) = tree.repair_section(&verbs, section).await;
        }
    })
}

impl World {
    fn new(shape: Shape, clients: &[Client]) -> Self {
        let held = Arc::new(Held::default());
        // Timestamps wrap around at once.
        let memory = Memory::at(shape, 127);
        let tasks = clients
            .iter()
            .enumerate()
            .map(|(i, c)| client(memory.clone(), user(i as u16 + 1), c.orders, held.clone()))
            .collect();
        Self { memory, held, tasks, clients: clients.to_vec(), crashed: vec![false; clients.len()] }
    }
}

impl Explored for World {
    fn step(&mut self, at: usize) {
        let shape = self.memory.shape();
        self.tasks[at].step(&self.memory);
        if let Some(client) = self.clients.get(at)
            && client.crash == Some(self.tasks[at].history.len())
            && !self.tasks[at].ended
        {
            let crashed = user(at as u16 + 1);
            self.crashed[at] = true;
            self.tasks[at].ended = true;
            self.held.forget(crashed);
            self.tasks.push(recovery(shape, crashed));
        }
    }

    fn ready(&self) -> Vec<usize> {
        (0..self.tasks.len()).filter(|i| !self.tasks[*i].ended).collect()
    }

    fn state(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.memory.words().hash(&mut hasher);
        for task in &self.tasks {
            (task.ended, &task.history).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Checks that nothing has leaked, whatever happened.
    fn check_end(&self) {
        let shape = self.memory.shape();
        let tree = Tree::new(shape, user(101));
        for section in shape.each_section() {
            for number in 1..=self.clients.len() as u16 {
                let left = run(tree.taken_by(&self.memory, user(number), section));
                assert_eq!(left, [], "left behind by client {number}");
            }
            run(tree.repair_section(&self.memory, section));
        }
        self.memory.check_empty();
        for chunk in shape.each_chunk() {
            assert!(!self.memory.log(chunk).taken, "the log of chunk {chunk}");
        }
    }
}

/// Explores all interleavings, or those with at most `most` preemptions. A preemption is a switch
/// to another task while the last task could continue. Returns the numbers of states and of ends.
fn explore(shape: Shape, clients: &[Client], most: Option<usize>) -> (usize, usize) {
    explore_all(|| World::new(shape, clients), most)
}

/// As [`explore`], for any set of tasks.
pub fn explore_all<W: Explored>(make: impl Fn() -> W, most: Option<usize>) -> (usize, usize) {
    let mut seen = HashSet::new();
    let mut ends = 0;
    let mut open: Vec<Vec<u8>> = vec![Vec::new()];
    while let Some(mut schedule) = open.pop() {
        let mut world = make();
        let (mut last, mut preemptions) = (None, 0);
        for at in &schedule {
            let at = *at as usize;
            preemptions += is_preemption(&world, last, at) as usize;
            world.step(at);
            last = Some(at);
        }
        // Continues from here while the states are new; alternatives are queued. The continuations
        // of a state also depend on the remaining preemptions.
        while seen.insert((world.state(), most.map(|_| (last, preemptions)))) {
            let mut ready = world.ready();
            // The last task comes first.
            ready.sort_by_key(|at| Some(*at) != last);
            let Some((first, others)) = ready.split_first() else {
                ends += 1;
                world.check_end();
                break;
            };
            for other in others {
                let over = preemptions + is_preemption(&world, last, *other) as usize;
                if most.is_none_or(|most| over <= most) {
                    let mut next = schedule.clone();
                    next.push(*other as u8);
                    open.push(next);
                }
            }
            schedule.push(*first as u8);
            assert!(schedule.len() < 1000, "the schedule does not end: {schedule:?}");
            world.step(*first);
            last = Some(*first);
        }
    }
    (seen.len(), ends)
}

fn is_preemption(world: &impl Explored, last: Option<usize>, at: usize) -> bool {
    last.is_some_and(|last| last != at && world.ready().contains(&last))
}

fn working(orders: &'static [u32]) -> Client {
    Client { orders, crash: None }
}

pub fn full() -> bool {
    std::env::var_os("GRANARY_TEST_FULL").is_some()
}

#[test]
fn two_clients_in_one_span() {
    let (states, ends) = explore(SMALL, &[working(&[0]), working(&[4])], None);
    println!("{states} states, {ends} ends");
    assert!(states > 500 && ends > 10);
}

/// One client opens and closes a span while another one takes it as a whole. The full test has more
/// clients, with at most [`PREEMPTIONS`], because all interleavings of three clients would be too
/// many.
#[test]
fn span_opening_races_with_whole_allocation() {
    let (states, ends) = explore(SMALL, &[working(&[0]), working(&[5])], None);
    println!("{states} states, {ends} ends");
    assert!(states > 500 && ends > 10);
    if full() {
        let two: &[Client] = &[working(&[0, 0]), working(&[5])];
        let three: &[Client] = &[working(&[0]), working(&[0]), working(&[5])];
        for clients in [two, three] {
            let (states, ends) = explore(SMALL, clients, Some(PREEMPTIONS));
            let count = clients.len();
            println!("{count} clients, {PREEMPTIONS} preemptions: {states} states, {ends} ends");
            assert!(ends > 10);
        }
    }
}

/// Two sections: one client wants both, another a chunk or a section. No client is left with a
/// part.
#[test]
fn two_section_block_races_with_its_parts() {
    let pairs: [(&'static [u32], &'static [u32]); 3] =
        [(&[10], &[10]), (&[10], &[9]), (&[10], &[0])];
    for (one, other) in pairs {
        let most = (!full()).then_some(2);
        let (states, ends) = explore(TWO_SECTIONS, &[working(one), working(other)], most);
        println!("{one:?} beside {other:?}: {states} states, {ends} ends");
        assert!(states > 200 && ends > 5);
    }
}

/// A client that takes two sections crashes after any verb, interleaved with the recovery and
/// another client.
#[test]
fn crash_while_taking_two_sections_loses_nothing() {
    let step = if full() { 1 } else { 9 };
    for (other, most) in [(&[9u32] as &[u32], 2), (&[10], 2)] {
        let mut total = (0, 0);
        for crash in (3..24).step_by(step) {
            let crashing = Client { orders: &[10], crash: Some(crash) };
            let (states, ends) = explore(TWO_SECTIONS, &[crashing, working(other)], Some(most));
            total = (total.0 + states, total.1 + ends);
        }
        let (states, ends) = total;
        println!("crashes beside {other:?}, {most} preemptions: {states} states, {ends} ends");
        assert!(ends > 10);
    }
}

/// A crash after a verb, interleaved with the recovery and another client: all interleavings, after
/// every seventh verb, or after every verb in the full test. Two clients with one chunk each run
/// only in the full test, with at most [`PREEMPTIONS`]: without a bound they have twenty million
/// states.
#[test]
fn crash_after_any_verb_loses_nothing() {
    let mut pairs: Vec<(&[u32], &[u32], Option<usize>)> =
        vec![(&[0], &[5], None), (&[5], &[0], None)];
    pairs.extend(full().then_some((&[0u32] as &[u32], &[0u32] as &[u32], Some(PREEMPTIONS))));
    for (orders, other, most) in pairs {
        let step = if full() { 1 } else { 7 };
        let mut total = (0, 0);
        for crash in (3..20).step_by(step) {
            let crashing = Client { orders, crash: Some(crash) };
            let (states, ends) = explore(SMALL, &[crashing, working(other)], most);
            total = (total.0 + states, total.1 + ends);
        }
        let (states, ends) = total;
        let bound = most.map_or("any number of".into(), |most| most.to_string());
        println!(
            "{orders:?} crashes beside {other:?}, {bound} preemptions: {states} states, {ends} ends"
        );
        assert!(ends > 20);
    }
}
