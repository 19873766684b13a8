//! Memory on which verbs execute one at a time, and tasks that can be stopped between verbs.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use scheme::index::EntryId;

use super::*;
use crate::blocks::ChunkIndex;
use crate::finemem::block::SpanOffset;
use crate::finemem::log::{Capability, FullLog};
use crate::finemem::table::initial;

/// Runs a future that never waits.
pub fn run<T>(future: impl Future<Output = Result<T, Infallible>>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(value)) => value,
        _ => panic!("a verb on memory has waited"),
    }
}

/// The metadata of a tree.
#[derive(Clone)]
pub struct Memory {
    shape: Shape,
    words: Arc<Mutex<Vec<u64>>>,
    counts: Arc<(AtomicU32, AtomicU32)>,
}

impl Memory {
    pub fn new(shape: Shape) -> Self {
        let mut words = vec![0; shape.words() as usize];
        initial(shape, |at, word| words[at.as_usize()] = word);
        Self { shape, words: Arc::new(Mutex::new(words)), counts: Arc::default() }
    }

    /// Memory whose headers all have the timestamp `time`, as after that many changes.
    pub fn at(shape: Shape, time: u32) -> Self {
        let memory = Self::new(shape);
        let sections = shape.each_section().map(|section| shape.section(section));
        for at in sections.chain(shape.each_span().map(|span| shape.span(span))) {
            let word = &mut memory.words.lock()[at.as_usize()];
            let timestamp = crate::finemem::header::Timestamp::new(time);
            let header = Header(*word);
            let record = crate::finemem::header::Record { timestamp, ..header.record() };
            *word = header.with_record(record).0;
        }
        memory
    }

    /// Memory with a window for each block: its key is in a word after the metadata, and in the
    /// capability table.
    pub fn with_windows(shape: Shape, time: u32) -> Self {
        let memory = Self::at(shape, time);
        {
            let mut words = memory.words.lock();
            words.resize((shape.words() + shape.entries()) as usize, 0);
            for entry in shape.each_entry() {
                let key = verbs::Key((1 + entry.raw()) << 8 | 1);
                words[shape.capability(entry).as_usize()] = Capability::open(key).to_word();
                words[window(shape, entry).as_usize()] = key.0 as u64;
            }
        }
        memory
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The current key of a block's window.
    pub fn window(&self, entry: EntryId) -> verbs::Key {
        verbs::Key(self.words.lock()[window(self.shape, entry).as_usize()] as u32)
    }

    pub fn capability(&self, entry: EntryId) -> Capability {
        Capability::parse(self.words.lock()[self.shape.capability(entry).as_usize()])
    }

    /// Checks that the full log names the owner of a block.
    pub fn check_log(&self, block: Block, owner: User) {
        let parts = block.parts().into_iter().flat_map(|parts| parts.iter());
        let parts = parts.map(SectionIndex::first_chunk);
        for chunk in parts.chain([block.chunk]) {
            let log = self.log(chunk);
            assert_eq!((log.user, log.taken), (owner, true), "{block:?}");
            assert_eq!(log.block(chunk), block);
        }
    }

    pub fn words(&self) -> Vec<u64> {
        self.words.lock().clone()
    }

    pub fn section(&self, index: u32) -> Header {
        self.header(Place::Section(SectionIndex::new(index)))
    }

    pub fn span(&self, index: SpanIndex) -> Header {
        self.header(Place::Span(index))
    }

    fn header(&self, place: Place) -> Header {
        Header(self.words.lock()[place.word(self.shape).as_usize()])
    }

    pub fn log(&self, chunk: ChunkIndex) -> FullLog {
        FullLog::parse(self.words.lock()[self.shape.log(chunk).as_usize()])
    }

    pub fn set(&self, at: Word, header: Header) {
        self.words.lock()[at.as_usize()] = header.0;
    }

    /// Changes the bits `mask` of a word, as another client does.
    pub fn flip(&self, at: Word, mask: u64) {
        self.words.lock()[at.as_usize()] ^= mask;
    }

    /// READs and CASes since the last call.
    pub fn count(&self) -> (u32, u32) {
        (self.counts.0.swap(0, Ordering::Relaxed), self.counts.1.swap(0, Ordering::Relaxed))
    }

    pub fn check_distinct(&self, blocks: &[Block]) {
        let mut seen = vec![false; self.shape.chunks as usize];
        for chunk in blocks.iter().flat_map(|b| b.chunks().iter()) {
            assert!(!std::mem::replace(&mut seen[chunk.as_usize()], true), "chunk {chunk} twice");
        }
    }

    /// Checks that all words but the logs are as they were initially.
    pub fn check_empty(&self) {
        let mut fresh = vec![0; self.shape.words() as usize];
        initial(self.shape, |at, word| fresh[at.as_usize()] = word);
        for section in self.shape.each_section().map(Place::Section) {
            let now = self.header(section);
            let before = Header(fresh[section.word(self.shape).as_usize()]);
            for at in SpanOffset::all() {
                let span = section.section().span(at);
                let was = Header(fresh[self.shape.span(span).as_usize()]);
                let is = self.span(span);
                assert_eq!(is.bitmap(), was.bitmap(), "span {span}: {is:?}");
                assert_eq!(is.in_use(), was.in_use(), "span {span}: {is:?}");
                let (is, was) = (now.spread(at), before.spread(at));
                assert!(is == was || was != Spread::Empty, "span {span}: {is:?}, was {was:?}");
            }
        }
    }
}

impl Verbs for Memory {
    type Error = Infallible;

    fn repeat(&self, _: Changed) -> Result<(), Infallible> {
        Ok(())
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        self.counts.0.fetch_add(1, Ordering::Relaxed);
        let from = at.as_usize();
        out.copy_from_slice(&self.words.lock()[from..from + out.len()]);
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Infallible> {
        self.counts.1.fetch_add(1, Ordering::Relaxed);
        let word = &mut self.words.lock()[at.as_usize()];
        let old = *word;
        if old == expected {
            *word = new;
        }
        Ok(old)
    }
}

/// The word that holds the key of a block's window.
pub fn window(shape: Shape, entry: EntryId) -> Word {
    Word::new(shape.words() + entry.raw())
}

/// Memory in which another client changes a word just before each of the next CASes on it.
pub struct Disturbed<'a> {
    memory: &'a Memory,
    word: Word,
    left: Mutex<Cell<u32>>,
}

impl<'a> Disturbed<'a> {
    pub fn new(memory: &'a Memory, word: Word, times: u32) -> Self {
        Self { memory, word, left: Mutex::new(Cell::new(times)) }
    }
}

impl Verbs for Disturbed<'_> {
    type Error = Infallible;

    fn repeat(&self, _: Changed) -> Result<(), Infallible> {
        Ok(())
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        self.memory.read(at, out).await
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Infallible> {
        let left = self.left.lock().get();
        if at == self.word && left > 0 {
            self.left.lock().set(left - 1);
            let word = &mut self.memory.words.lock()[at.as_usize()];
            let header = Header(*word);
            // Changing the log's user number represents an operation of another client.
            let record = header.record();
            let other = User::new(record.user.raw() % 100 + 1).unwrap();
            *word = header.with_record(crate::finemem::header::Record { user: other, ..record }).0;
        }
        self.memory.cas(at, expected, new).await
    }
}

/// A verb that waits for its execution.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Request {
    Read(Word, usize),
    Cas(Word, u64, u64),
}

#[derive(Default)]
struct Port {
    request: Option<Request>,
    reply: Option<Vec<u64>>,
}

/// The verbs of a task: each waits until the task is stepped.
#[derive(Clone, Default)]
pub struct Stepped {
    port: Arc<Mutex<Port>>,
    /// READs of capabilities are executed too.
    keys: bool,
}

impl Stepped {
    /// Also executes READs of capabilities.
    pub fn with_keys(self) -> Self {
        Self { keys: true, ..self }
    }

    async fn ask(&self, request: Request) -> Vec<u64> {
        self.port.lock().request = Some(request);
        std::future::poll_fn(|_| match self.port.lock().reply.take() {
            Some(reply) => Poll::Ready(reply),
            None => Poll::Pending,
        })
        .await
    }
}

impl Verbs for Stepped {
    type Error = Infallible;

    fn repeat(&self, _: Changed) -> Result<(), Infallible> {
        Ok(())
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        out.copy_from_slice(&self.ask(Request::Read(at, out.len())).await);
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Infallible> {
        Ok(self.ask(Request::Cas(at, expected, new)).await[0])
    }

    /// Skips the READ of the capability in tests where capabilities do not change.
    async fn cas_and_read(
        &self,
        at: Word,
        expected: u64,
        new: u64,
        then: [Word; 3],
    ) -> Result<(u64, [u64; 3]), Infallible> {
        let (found, mut words) = (self.cas(at, expected, new).await?, [0; 3]);
        if found == expected {
            self.read(then[0], &mut words[..1]).await?;
            self.read(then[1], &mut words[1..2]).await?;
            if self.keys {
                self.read(then[2], &mut words[2..]).await?;
            }
        }
        Ok((found, words))
    }
}

/// A future that is executed verb by verb.
pub struct Task {
    port: Stepped,
    future: Pin<Box<dyn Future<Output = ()>>>,
    pub ended: bool,
    /// Executed verbs, with their results.
    pub history: Vec<(Request, Vec<u64>)>,
}

impl Task {
    pub fn new<F: Future<Output = ()> + 'static>(make: impl FnOnce(Stepped) -> F) -> Self {
        let port = Stepped::default();
        let future = Box::pin(make(port.clone()));
        let mut task = Self { port, future, ended: false, history: Vec::new() };
        task.poll();
        task
    }

    fn poll(&mut self) {
        let cx = &mut Context::from_waker(Waker::noop());
        self.ended = self.future.as_mut().poll(cx).is_ready();
    }

    /// Executes the pending verb, and runs the task to its next verb.
    pub fn step(&mut self, memory: &Memory) {
        let request = self.port.port.lock().request.take().expect("a task waits for a verb");
        let reply = match request {
            Request::Read(at, count) => {
                let mut words = vec![0; count];
                run(memory.read(at, &mut words));
                words
            }
            Request::Cas(at, expected, new) => vec![run(memory.cas(at, expected, new))],
        };
        self.history.push((request, reply.clone()));
        self.port.port.lock().reply = Some(reply);
        self.poll();
    }
}
