//! Every interleaving of a few clients, with a crash after any verb.
//!
//! A state is the memory and what each task has seen; what follows from two equal states is the same, so
//! each is looked at once. A state is reached anew by its schedule.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::world::{Stepped, Task};
use super::*;

/// Preemptions of those long explorations that have a bound.
const PREEMPTIONS: usize = 3;

/// What a client does: takes a block and gives it back, for each order.
#[derive(Clone, Copy)]
struct Client {
    orders: &'static [u32],
    /// Crashes after so many verbs; its recovery begins then.
    crash: Option<usize>,
}

/// Who has what: told when an allocation returns, and before it is given back.
#[derive(Default)]
pub struct Held(Mutex<Vec<(User, Block)>>);

impl Held {
    pub fn take(&self, user: User, block: Block) {
        let mut all = self.0.lock();
        for (other, had) in all.iter() {
            let apart = had.chunks().end <= block.chunk || block.chunks().end <= had.chunks().start;
            assert!(apart, "{other:?} has {had:?}, and {user:?} is given {block:?}");
        }
        all.push((user, block));
    }

    pub fn leave(&self, user: User, block: Block) {
        self.0.lock().retain(|held| *held != (user, block));
    }

    pub fn forget(&self, user: User) {
        self.0.lock().retain(|(of, _)| *of != user);
    }
}

/// What is explored: tasks that go on a verb at a time.
pub trait Explored {
    /// Task `at` goes on.
    fn step(&mut self, at: usize);
    /// Tasks that can.
    fn ready(&self) -> Vec<usize>;
    /// What follows is the same from states that are equal.
    fn state(&self) -> u64;
    /// What must hold when none can go on.
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
            let Ok(Some(Taken { block, .. })) = tree.allocate(&verbs, *order).await else {
                continue;
            };
            held.take(me, block);
            memory.check_log(block, me);
            held.leave(me, block);
            let Ok(()) = tree.give_back(&verbs, &[block], me).await;
        }
    })
}

/// What a memory node does for one that crashed.
fn recovery(shape: Shape, of: User) -> Task {
    Task::new(move |verbs: Stepped| async move {
        let tree = Tree::new(shape, user(100));
        for section in 0..shape.sections() {
            let Ok(blocks) = tree.taken_by(&verbs, of, section).await;
            for block in blocks {
                let Ok(()) = tree.give_back(&verbs, &[block], of).await;
            }
            let Ok(_) = tree.settle(&verbs, section).await;
        }
    })
}

impl World {
    fn new(shape: Shape, clients: &[Client]) -> Self {
        let held = Arc::new(Held::default());
        // Timestamps go around at once.
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
            let of = user(at as u16 + 1);
            self.crashed[at] = true;
            self.tasks[at].ended = true;
            self.held.forget(of);
            self.tasks.push(recovery(shape, of));
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

    /// Nothing is leaked, whatever has happened.
    fn check_end(&self) {
        let shape = self.memory.shape();
        let tree = Tree::new(shape, user(101));
        for section in 0..shape.sections() {
            for number in 1..=self.clients.len() as u16 {
                let left = run(tree.taken_by(&self.memory, user(number), section));
                assert_eq!(left, [], "of client {number}");
            }
            run(tree.settle(&self.memory, section));
        }
        self.memory.check_empty();
        for chunk in 0..shape.chunks {
            assert!(!self.memory.log(chunk).taken, "the log of chunk {chunk}");
        }
    }
}

/// All interleavings, or those with at most `most` preemptions: one is when somebody goes on while who went
/// last could. How many states, and how many ends.
fn explore(shape: Shape, clients: &[Client], most: Option<usize>) -> (usize, usize) {
    explore_all(|| World::new(shape, clients), most)
}

/// The same for anything.
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
        // On from here, as long as it is new; what else could come next is kept for later. What may follow
        // depends on what is left of the bound too.
        while seen.insert((world.state(), most.map(|_| (last, preemptions)))) {
            let mut ready = world.ready();
            // Who went last first.
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
            assert!(schedule.len() < 1000, "it does not end: {schedule:?}");
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

/// One opens and closes a span that another would take whole. The long form has more of them, with at most
/// [`PREEMPTIONS`]: all interleavings of three would be too many.
#[test]
fn a_span_is_opened_and_taken_whole() {
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

/// Two sections: one wants both, another a chunk or a section. Nobody is left with a part.
#[test]
fn a_block_of_two_sections_beside_parts_of_it() {
    let pairs: [(&'static [u32], &'static [u32]); 3] =
        [(&[10], &[10]), (&[10], &[9]), (&[10], &[0])];
    for (one, other) in pairs {
        let most = (!full()).then_some(2);
        let (states, ends) = explore(TWO_SECTIONS, &[working(one), working(other)], most);
        println!("{one:?} beside {other:?}: {states} states, {ends} ends");
        assert!(states > 200 && ends > 5);
    }
}

/// Who takes two sections crashes after any verb, with the recovery and another client interleaved.
#[test]
fn a_crash_in_the_middle_of_two_sections() {
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

/// A crash after a verb, with the recovery and another client interleaved: in all ways, after every seventh verb,
/// and after every one in the long form. Two that take one chunk each are for the long form, with at most
/// [`PREEMPTIONS`]: without a bound they have twenty million states.
#[test]
fn a_crash_after_any_verb() {
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
