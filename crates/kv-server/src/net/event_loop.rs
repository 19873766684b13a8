//! The event loop of a thread: epoll, tasks, the pool, timers.
//!
//! A turn runs the tasks that are ready (a *wave*), then takes completions of the pool. When
//! nothing is ready, the thread waits for sockets, or, with operations of the pool in flight, for
//! those.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use super::listen::{Accepted, Listener};
use super::tasks::{Ready, Tasks};
use crate::client::{Client, Origin};
use crate::error::Error;
use crate::keyspace::Keyspace;
use crate::server::Server;
use crate::worker::Worker;
use crate::{connection, cron, duties};

/// Events that one call takes from epoll.
const EVENTS_MAX: usize = 256;
/// Turns without a look at the sockets, while tasks are ready.
const TURNS_MAX: u32 = 64;
/// Longest wait for the pool, after which sockets are looked at.
const PARK: Duration = Duration::from_millis(1);
/// Interval of the periodic work.
const CRON_NS: u64 = 100_000_000;
/// Data of the event that ends the sleep of the thread.
const WAKE_UP: u64 = u64::MAX;

/// What a task does.
#[derive(Debug)]
pub(crate) enum Job {
    /// Loads the file, once.
    Load,
    /// Works in the background.
    Maintain,
    /// Saves, and ends the server.
    Finish,
    /// Accepts connections.
    Accept(Listener),
    /// Serves a connection.
    Serve(Accepted),
}

/// Readiness of a socket, as epoll has told it.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    pub readable: Cell<bool>,
    pub writable: Cell<bool>,
    /// The peer has closed its side: a read must go on until the end.
    pub ends: Cell<bool>,
}

/// What a task has besides its job.
pub(crate) struct Seat<K> {
    pub worker: Rc<Worker>,
    pub store: Arc<K>,
    pub readiness: Rc<Readiness>,
    pub client: Option<Arc<Client>>,
}

/// The socket of a task.
struct Entry {
    readiness: Rc<Readiness>,
    client: Option<Arc<Client>>,
    /// Tells events of an earlier task in the same slot apart.
    generation: u32,
}

async fn perform<K: Keyspace>(job: Job, seat: Seat<K>) {
    match job {
        Job::Load => duties::load(&seat).await,
        Job::Maintain => seat.store.maintain(&seat.worker).await,
        Job::Finish => duties::finish(&seat).await,
        Job::Accept(listener) => duties::accept(listener, &seat).await,
        Job::Serve(accepted) => connection::serve(accepted, seat).await,
    }
}

/// Runs a thread of the server until the server ends.
pub(crate) fn run<K: Keyspace>(
    server: Arc<Server>,
    store: Arc<K>,
    index: usize,
) -> Result<(), Error> {
    let error =
        |attempt| move |cause: rustix::io::Errno| Error::System { attempt, cause: cause.into() };
    let ready = server.threads[index].ready.clone();
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(error("creating an epoll"))?;
    let (data, flags) = (epoll::EventData::new_u64(WAKE_UP), epoll::EventFlags::IN);
    epoll::add(&epoll, ready.event(), data, flags).map_err(error("watching an event"))?;
    let worker = Rc::new(Worker::new(index, server));
    let mut tasks = Tasks::new(ready.clone());
    let mut poller = Poller { epoll, entries: Vec::new(), events: Vec::with_capacity(EVENTS_MAX) };
    let (mut turns, mut cron_ns, mut is_ended) = (0, 0, false);
    let mut cron = cron::Cron::default();
    let mut ended = Vec::new();
    loop {
        worker.tick();
        if ready.take_poke() {
            while let Some(job) = worker.server.threads[index].take() {
                if let Some((slot, seat)) = poller.seat(&job, &mut tasks, &worker, &store) {
                    tasks.start(slot, perform(job, seat));
                }
            }
        }
        if worker.server.is_ending() && !is_ended {
            is_ended = true;
            poller.clients().for_each(|client| client.kill());
            tasks.mark_all();
        }
        worker.stats().waves.add(1);
        tasks.run_wave(|slot| ended.push(slot));
        ended.drain(..).for_each(|slot| poller.entries[slot] = None);
        if is_ended && tasks.count() == 0 {
            return Ok(());
        }
        let completed = store.poll();
        let is_busy = completed > 0 || ready.is_any();
        turns = if is_busy { turns + 1 } else { 0 };
        if is_busy && turns % TURNS_MAX != 0 {
            continue;
        }
        poller
            .wait(&worker, &*store, &ready, is_busy, cron_ns)
            .map_err(error("waiting for sockets"))?;
        worker.tick();
        worker.timers.fire(worker.now_ns());
        if worker.now_ns() >= cron_ns {
            cron_ns = worker.now_ns() + CRON_NS;
            cron.run(&worker, &*store, poller.clients());
        }
    }
}

struct Poller {
    epoll: OwnedFd,
    entries: Vec<Option<Entry>>,
    events: Vec<epoll::Event>,
}

impl Poller {
    /// Makes the seat of a task, and watches its socket. Without a seat the job is dropped.
    fn seat<K, F: Future<Output = ()>>(
        &mut self,
        job: &Job,
        tasks: &mut Tasks<F>,
        worker: &Rc<Worker>,
        store: &Arc<K>,
    ) -> Option<(usize, Seat<K>)> {
        let server = &worker.server;
        let Some((slot, waker)) = tasks.reserve() else {
            if let Job::Serve(_) = job {
                server.threads[worker.index].connections.fetch_sub(1, Ordering::Relaxed);
                server.clients.leave();
            }
            return None;
        };
        let client = match job {
            Job::Serve(accepted) => {
                let client = Arc::new(Client::new(origin(accepted, worker), waker));
                server.clients.add(&client);
                Some(client)
            }
            _ => None,
        };
        let readiness = Rc::new(Readiness::default());
        readiness.writable.set(true);
        if self.entries.len() <= slot {
            self.entries.resize_with(slot + 1, || None);
        }
        let generation = worker.next_generation();
        let seat = Seat {
            worker: worker.clone(),
            store: store.clone(),
            readiness: readiness.clone(),
            client: client.clone(),
        };
        self.entries[slot] = Some(Entry { readiness, client, generation });
        let data = epoll::EventData::new_u64(u64::from(generation) << 32 | slot as u64);
        let flags = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        let added = match job {
            Job::Serve(accepted) => epoll::add(&self.epoll, &accepted.fd, data, flags),
            Job::Accept(listener) => epoll::add(&self.epoll, &listener.fd, data, flags),
            _ => Ok(()),
        };
        if let (Err(cause), Some(client)) = (added, &seat.client) {
            tracing::warn!(%cause, "watching a socket failed: the connection is closed");
            client.kill();
        }
        Some((slot, seat))
    }

    fn clients(&self) -> impl Iterator<Item = &Arc<Client>> {
        self.entries.iter().flatten().filter_map(|entry| entry.client.as_ref())
    }

    /// Waits for sockets, the pool or a timer, and marks the tasks of ready sockets.
    fn wait<K: Keyspace>(
        &mut self,
        worker: &Worker,
        store: &K,
        ready: &Ready,
        is_busy: bool,
        cron_ns: u64,
    ) -> rustix::io::Result<()> {
        if is_busy {
            return self.take(ready, Duration::ZERO);
        }
        if store.is_busy() {
            self.take(ready, Duration::ZERO)?;
            if !ready.is_any() {
                store.park(PARK);
            }
            return Ok(());
        }
        if !ready.begin_sleep() {
            return Ok(());
        }
        let next = worker.timers.earliest().map_or(cron_ns, |due| due.min(cron_ns));
        let time = Duration::from_nanos(next.saturating_sub(worker.elapsed_ns()));
        let result = self.take(ready, time);
        ready.end_sleep();
        result
    }

    fn take(&mut self, ready: &Ready, time: Duration) -> rustix::io::Result<()> {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        self.events.clear();
        match epoll::wait(self.epoll.as_fd(), spare_capacity(&mut self.events), Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        for event in &self.events {
            let (data, flags) = ({ event.data }.u64(), { event.flags });
            let (slot, generation) = (data as u32 as usize, (data >> 32) as u32);
            let Some(Some(entry)) = self.entries.get(slot) else { continue };
            if data == WAKE_UP || entry.generation != generation {
                continue;
            }
            let ends = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            let is_end = flags.intersects(ends);
            entry.readiness.ends.set(entry.readiness.ends.get() || is_end);
            if is_end || flags.contains(epoll::EventFlags::IN) {
                entry.readiness.readable.set(true);
            }
            if is_end || flags.contains(epoll::EventFlags::OUT) {
                entry.readiness.writable.set(true);
            }
            ready.mark(slot);
        }
        Ok(())
    }
}

fn origin(accepted: &Accepted, worker: &Worker) -> Origin {
    use std::os::fd::AsRawFd;
    Origin {
        id: worker.server.clients.next_id(),
        address: accepted.peer.as_str().into(),
        local: accepted.local.as_str().into(),
        fd: accepted.fd.as_raw_fd(),
        thread: worker.index,
        now_ms: worker.now_ms(),
        is_unix: accepted.is_unix,
        user: worker.server.users.first_login().name,
    }
}
