//! The data behind a server, opened again after a memory node did not answer.
//!
//! | phase | commands on data | begins | ends |
//! | --- | --- | --- | --- |
//! | serving | are executed | | |
//! | silent | `MASTERDOWN` at once | a command, or the work in the background, has no answer for `pool-timeout`; or the connection has ended | the memory node answers again, or a new one serves at its address |
//! | loading | `LOADING` | a new memory node answers: the data is lost | the file is loaded |
//!
//! A memory node that answers again over the same connection has all data. The first thread then
//! re-establishes the QPs, which ends all operations in flight, and opens the store again from its
//! index. So each write that had no answer is settled by what is in remote memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use kv::Ahead;
use kv::environment::System;
use kv::pooled::PoolMemory;
use parking_lot::RwLock;
use pool::{DefaultNic, Pool};
use redis_formats::command::bits::flag::WRITE;
use redis_formats::command::{Command, Id};
use verbs::Nic;

use super::state::State;
use super::{Data, Store};
use crate::context::Context;
use crate::keyspace::{Fact, Keyspace, Outages, Size, Usage};
use crate::server::Server;
use crate::session::Queue;
use crate::worker::Worker;

/// Pause between two attempts to reach the memory nodes.
const PAUSE: Duration = Duration::from_millis(200);
/// Interval in which a thread looks for the end of an attempt, or of the outage.
const LOOK: Duration = Duration::from_millis(10);
/// Failed attempts to open the store over memory nodes that answer, after which the server ends.
const OPENINGS: u32 = 5;
/// Attempts between two lines of the log.
const LINES: u32 = 50;

const SILENT: &str = "MASTERDOWN The memory node does not answer, so nothing was done; the server \
                      goes on when the memory node does: try again";
const UNCERTAIN: &str = "UNCERTAIN The memory node did not answer: whether this command has taken \
                         effect is not known; read its keys when the server goes on";

/// The data behind a server, opened again after a memory node did not answer.
pub struct Reopened<N: Nic = DefaultNic> {
    current: RwLock<Arc<Data<N>>>,
    /// The memory whose completions are polled: that of the present data, or of the next.
    memory: RwLock<PoolMemory<N>>,
    heap: heap::Settings,
    settings: kv::Settings,
    is_silent: AtomicBool,
    outages: AtomicU64,
    losses: AtomicU64,
}

/// The memory nodes after an outage.
enum Again<N: Nic> {
    /// The same, with all their contents.
    Same,
    /// Connections to memory nodes that have no contents of this store.
    New(Vec<Pool<N>>),
}

impl<N: Nic> Reopened<N> {
    /// Serves `data`, which has these settings.
    pub fn new(data: Data<N>, heap: heap::Settings, settings: kv::Settings) -> Self {
        Self {
            memory: RwLock::new(data.memory.clone()),
            current: RwLock::new(Arc::new(data)),
            heap,
            settings,
            is_silent: AtomicBool::new(false),
            outages: AtomicU64::new(0),
            losses: AtomicU64::new(0),
        }
    }

    fn current(&self) -> Arc<Data<N>> {
        self.current.read().clone()
    }

    /// The data, unless the memory nodes do not answer.
    fn serving(&self) -> Option<Arc<Data<N>>> {
        (!self.is_silent.load(Ordering::Acquire)).then(|| self.current())
    }

    /// Begins an outage if an operation on `data` had no answer: it has failed, or has not
    /// `ended` in time.
    fn look(&self, data: &Arc<Data<N>>, ended: bool) {
        if ended && !data.has_failed() {
            return;
        }
        // From now on the old data changes nothing in remote memory.
        data.store.interrupt();
        let current = self.current.read();
        if Arc::ptr_eq(&current, data) && !self.is_silent.swap(true, Ordering::AcqRel) {
            self.outages.fetch_add(1, Ordering::Relaxed);
            tracing::error!(
                "a memory node does not answer: commands on data fail with MASTERDOWN until it does"
            );
        }
    }

    /// Executes `work` on the data, for as long as the memory nodes answer.
    async fn run(cx: &mut Context<'_, Self>, work: impl AsyncFnOnce(&mut Context<'_, Data<N>>)) {
        let (own, worker, begin) = (cx.store, cx.worker, cx.out.len());
        let Some(data) = own.serving() else { return cx.error(SILENT) };
        let mut inner = Context {
            command: cx.command,
            args: cx.args,
            out: &mut *cx.out,
            session: &mut *cx.session,
            watches: &mut *cx.watches,
            worker,
            store: &*data,
        };
        let ended = worker.within(limit(worker), work(&mut inner)).await.is_some();
        if !ended {
            cx.out.truncate(begin);
            cx.error(UNCERTAIN);
        }
        own.look(&data, ended);
        let changes = cx.command.has(WRITE) || cx.command.id == Id::Exec;
        if !changes && cx.out[begin..].starts_with(b"-UNCERTAIN") {
            cx.out.truncate(begin);
            cx.error(SILENT);
        }
    }

    /// Reaches the memory nodes again, and opens the store.
    async fn reopen(&self, worker: &Worker) {
        let server = &worker.server;
        let (mut tries, mut openings) = (0_u32, 0);
        while !server.is_ending() {
            let why = match self.again(worker).await {
                None => return,
                Some(Ok(Again::Same)) => match self.open_again(worker).await {
                    Ok(()) => return self.end_outage("the store goes on with all its data"),
                    Err(why) => {
                        openings += 1;
                        if openings == OPENINGS && self.current().memory.reestablish().is_ok() {
                            return server.fail(format!("opening the store again: {why}"));
                        }
                        why
                    }
                },
                Some(Ok(Again::New(pools))) => {
                    self.losses.fetch_add(1, Ordering::Relaxed);
                    if server.config.is("pool-lost", "exit") {
                        let text =
                            "the memory node has ended, and the data with it (pool-lost exit)";
                        return server.fail(text.to_owned());
                    }
                    match self.begin_again(worker, pools).await {
                        Ok(()) => {
                            let text = "the memory node has ended, and the data with it; the \
                                        server has begun again, as after a restart";
                            return self.end_outage(text);
                        }
                        Err(why) => why,
                    }
                }
                Some(Err(why)) => why,
            };
            if tries.is_multiple_of(LINES) {
                tracing::error!(why, "the memory nodes are not reached; trying again");
            }
            tries += 1;
            worker.wait(PAUSE).await;
        }
    }

    fn end_outage(&self, text: &str) {
        self.is_silent.store(false, Ordering::Release);
        tracing::warn!("{text}");
    }

    /// Reaches the memory nodes, on a thread of its own. `None`: the server ends.
    async fn again(&self, worker: &Worker) -> Option<Result<Again<N>, String>> {
        let memory = self.current().memory.clone();
        let exits = worker.server.config.is("pool-lost", "exit");
        let reach = move || match memory.reestablish() {
            Ok(true) => Ok(Again::Same),
            Ok(false) if exits => Ok(Again::New(Vec::new())),
            Ok(false) => {
                memory.pools().map(Pool::reconnect).collect::<Result<_, _>>().map(Again::New)
            }
            Err(error) => Err(error),
        };
        let thread = thread::Builder::new().name("granary-kv-again".into());
        let thread = match thread.spawn(reach) {
            Ok(thread) => thread,
            Err(error) => return Some(Err(format!("starting a thread: {error}"))),
        };
        while !thread.is_finished() {
            worker.wait(LOOK).await;
            if worker.server.is_ending() {
                return None;
            }
        }
        let panicked = || "the thread has panicked; see standard error".to_owned();
        let result = thread.join().map_err(|_| panicked());
        Some(result.and_then(|result| result.map_err(|error| error.to_string())))
    }

    /// Opens the store again from its index, over the same connections.
    async fn open_again(&self, worker: &Worker) -> Result<(), String> {
        let old = self.current();
        let store = worker.within(limit(worker), async {
            // Commands that hold the old data have ended from here on.
            let _alone = old.state.barrier.close().await;
            let memory = old.memory.reopened().map_err(|error| error.to_string())?;
            let (settings, root) = (self.settings.clone(), old.store.root());
            let store = Store::open(memory.clone(), memory.clone(), System, settings, root).await;
            store.map(|store| (store, memory)).map_err(|error| error.to_string())
        });
        let (store, memory) = store.await.ok_or("the memory node does not answer")??;
        let state = State::carried(&old.state);
        self.replace(&worker.server, Data { store, memory, state });
        Ok(())
    }

    /// Begins with an empty store, and loads the file, as at the start of the server.
    async fn begin_again(&self, worker: &Worker, pools: Vec<Pool<N>>) -> Result<(), String> {
        let server = &worker.server;
        let memory = PoolMemory::over(pools, self.heap).map_err(|error| error.to_string())?;
        *self.memory.write() = memory.clone();
        let settings = self.settings.clone();
        let store = Store::create(memory.clone(), memory.clone(), System, settings);
        let store = worker.within(limit(worker), store).await;
        let store = store.ok_or("the memory node does not answer")?;
        let store = store.map_err(|error| error.to_string())?;
        server.loading();
        self.replace(server, Data { store, memory, state: State::default() });
        self.load(worker).await.inspect_err(|why| server.fail(why.clone()))?;
        server.loaded();
        Ok(())
    }

    fn replace(&self, server: &Server, data: Data<N>) {
        data.apply(server);
        *self.memory.write() = data.memory.clone();
        let old = std::mem::replace(&mut *self.current.write(), Arc::new(data));
        // Watched keys may have changed.
        old.store.end_watches();
    }
}

/// Time without an answer after which the memory nodes count as silent.
fn limit(worker: &Worker) -> Duration {
    worker.server.config.live.pool_timeout()
}

impl<N: Nic> Keyspace for Reopened<N> {
    type Watches = <Data<N> as Keyspace>::Watches;

    async fn execute(context: &mut Context<'_, Self>) {
        Self::run(context, async |inner| Data::execute(inner).await).await;
    }

    async fn execute_queue(context: &mut Context<'_, Self>, queue: &Queue) {
        Self::run(context, async |inner| Data::execute_queue(inner, queue).await).await;
    }

    async fn read_ahead<'k>(
        &self,
        worker: &Worker,
        db: u8,
        keys: impl Iterator<Item = &'k [u8]>,
        ahead: &mut Ahead,
    ) {
        let Some(data) = self.serving() else { return };
        let read = data.read_ahead(worker, db, keys, ahead);
        let ended = worker.within(limit(worker), read).await.is_some();
        self.look(&data, ended);
    }

    fn unwatch(&self, watches: &mut Self::Watches) {
        watches.clear();
    }

    async fn make_room(&self, worker: &Worker, _: &Command) -> bool {
        // The execution of the command then says that the memory node does not answer.
        let Some(data) = self.serving() else { return true };
        let room = worker.within(limit(worker), async {
            let _shared = data.state.barrier.enter(worker.index).await;
            data.make_room(worker).await
        });
        let room = room.await;
        self.look(&data, room.is_some());
        room.unwrap_or(true)
    }

    async fn load(&self, worker: &Worker) -> Result<(), String> {
        let data = self.current();
        let loaded = worker.within(limit(worker), data.load_file(worker)).await;
        loaded
            .unwrap_or_else(|| Err("loading the data: the memory node does not answer".to_owned()))
    }

    async fn maintain(&self, worker: &Worker) {
        while !worker.server.is_ending() {
            match self.serving() {
                Some(data) => {
                    let work = worker.within(limit(worker), data.maintain(worker)).await;
                    self.look(&data, work.is_some());
                }
                None if worker.index == 0 => self.reopen(worker).await,
                None => worker.wait(LOOK).await,
            }
        }
    }

    async fn finish(&self, worker: &Worker, save: Option<bool>) -> Result<(), String> {
        match self.serving() {
            Some(data) => {
                let finished = worker.within(limit(worker), data.finish(worker, save)).await;
                self.look(&data, finished.is_some());
                finished.unwrap_or_else(|| Err(UNSAVED.to_owned()))
            }
            None if self.current().saves_at_end(worker, save) => Err(UNSAVED.to_owned()),
            None => Ok(()),
        }
    }

    fn poll(&self) -> usize {
        self.memory.read().poll()
    }

    fn park(&self, limit: Duration) {
        // The thread must not hold the lock while it sleeps.
        let memory = self.memory.read().clone();
        memory.park(limit);
    }

    fn size(&self, db: u8) -> Size {
        self.current.read().size(db)
    }

    fn usage(&self) -> Usage {
        self.current.read().usage()
    }

    fn persistence(&self) -> Vec<Fact> {
        self.current.read().persistence()
    }

    fn is_save_broken(&self) -> bool {
        self.current.read().is_save_broken()
    }

    fn facts(&self) -> Vec<Fact> {
        let outages = self.outages();
        let status = if outages.is_out { "silent" } else { "ok" };
        let fact = |name, value: u64| Fact { name, value: value.to_string() };
        let mut facts = vec![
            Fact { name: "pool_status", value: status.to_owned() },
            fact("pool_outages", outages.count),
            fact("pool_losses", outages.losses),
        ];
        facts.extend(self.current.read().facts());
        facts
    }

    fn outages(&self) -> Outages {
        Outages {
            is_out: self.is_silent.load(Ordering::Relaxed),
            count: self.outages.load(Ordering::Relaxed),
            losses: self.losses.load(Ordering::Relaxed),
        }
    }

    fn configured(&self, server: &Server) {
        self.current.read().apply(server);
    }
}

const UNSAVED: &str = "saving: the memory node does not answer; wait until it does, or end the \
                       server without a save (SHUTDOWN NOSAVE)";
