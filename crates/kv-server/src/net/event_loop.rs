//! The event loop of a thread: epoll, tasks, the pool, timers.
//!
//! A turn runs the tasks that are ready (a *wave*), then takes completions of the pool. When
//! nothing is ready, the thread waits for sockets, or, with operations of the pool in flight, for
//! those.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use verbs::executor::{Tasks, thread_waker};

use super::inbox::Inbox;
use super::listen::{Accepted, Listener};
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
/// Time without a look at the sockets, while tasks are ready.
const LOOK_NS: u64 = 1_000_000;
/// Longest wait for the pool, after which sockets are looked at.
const PARK: Duration = Duration::from_millis(1);
/// Interval of the periodic work.
const CRON_NS: u64 = 100_000_000;
/// Data of the event that ends the sleep of the thread.
const WAKE_UP: u64 = u64::MAX;

/// The work of a task.
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

/// Readiness of a socket, by the events of epoll.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    waker: RefCell<Option<Waker>>,
    pub readable: Cell<bool>,
    pub writable: Cell<bool>,
    /// The peer has closed its side: a read must go on until the end.
    pub ends: Cell<bool>,
}

impl Readiness {
    /// Waits until `is_awaited`, which is tested after each event.
    pub async fn wait(&self, is_awaited: impl Fn() -> bool) {
        poll_fn(|cx| {
            if is_awaited() {
                return Poll::Ready(());
            }
            let mut waker = self.waker.borrow_mut();
            if waker.as_ref().is_none_or(|own| !own.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }
}

/// Everything that a task uses besides its job.
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
    /// Tells events of an earlier task with the same key apart.
    generation: u32,
}

/// Does a job. Returns the key of its entry.
async fn perform<K: Keyspace>(job: Job, seat: Seat<K>, key: usize) -> usize {
    match job {
        Job::Load => duties::load(&seat).await,
        Job::Maintain => seat.store.maintain(&seat.worker).await,
        Job::Finish => duties::finish(&seat).await,
        Job::Accept(listener) => duties::accept(listener, &seat).await,
        Job::Serve(accepted) => connection::serve(accepted, seat).await,
    }
    key
}

/// Ends the sleep of a thread, which sleeps in epoll or in the pool.
struct Alarm {
    event: Waker,
    thread: Waker,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.event.wake_by_ref();
        self.thread.wake_by_ref();
    }
}

/// Runs a thread of the server until the server ends.
pub(crate) fn run<K: Keyspace>(
    server: Arc<Server>,
    store: Arc<K>,
    index: usize,
) -> Result<(), Error> {
    let system =
        |attempt| move |cause: rustix::io::Errno| Error::System { attempt, cause: cause.into() };
    let worker = Rc::new(Worker::new(index, server));
    let inbox = &worker.server.threads[index].inbox;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("creating an epoll"))?;
    let (data, flags) = (epoll::EventData::new_u64(WAKE_UP), epoll::EventFlags::IN);
    epoll::add(&epoll, inbox.event(), data, flags).map_err(system("watching an event"))?;
    let mut poller = Poller::new(epoll);
    let alarm = Alarm { event: inbox.event().waker(), thread: thread_waker() };
    let mut tasks = Tasks::new(Arc::new(alarm).into());
    let (mut turns, mut looked_ns, mut cron_ns, mut is_ended) = (0_u32, 0, 0, false);
    let mut cron = cron::Cron::default();
    let mut ended = Vec::new();
    loop {
        worker.tick();
        while let Some(job) = inbox.pop() {
            let (key, seat) = poller.seat(&job, &worker, &store);
            tasks.spawn(perform(job, seat, key));
        }
        if worker.server.is_ending() && !is_ended {
            is_ended = true;
            poller.end();
            worker.timers.fire(u64::MAX);
        }
        worker.stats().waves.add(1);
        tasks.run(|_, key| ended.push(key));
        ended.drain(..).for_each(|key| poller.remove(key));
        if is_ended && tasks.is_empty() {
            return Ok(());
        }
        let completed = store.poll();
        turns = turns.wrapping_add(1);
        // A task that works for long in each turn must not delay the sockets by many turns.
        let is_due = worker.elapsed_ns() - looked_ns >= LOOK_NS;
        let looks = turns.is_multiple_of(TURNS_MAX) || is_due;
        if completed > 0 && !looks {
            continue;
        }
        // A task that waits for no socket and no timer waits for the store.
        let is_busy = tasks.len() > worker.resting();
        let waited = tasks.sleep(|| poller.wait(&worker, &*store, is_busy, cron_ns));
        match waited {
            Some(result) => result.map_err(system("waiting for sockets"))?,
            None if looks => {
                poller.take(Duration::ZERO).map_err(system("waiting for sockets"))?;
            }
            None => continue,
        }
        poller.dispatch(inbox);
        worker.tick();
        looked_ns = worker.now_ns();
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
    /// Keys of entries that are not used.
    free: Vec<usize>,
    events: Vec<epoll::Event>,
    generation: u32,
}

impl Poller {
    fn new(epoll: OwnedFd) -> Self {
        let events = Vec::with_capacity(EVENTS_MAX);
        Self { epoll, entries: Vec::new(), free: Vec::new(), events, generation: 0 }
    }

    /// Makes the seat of a task, and watches its socket. Returns the key of the entry too.
    fn seat<K>(&mut self, job: &Job, worker: &Rc<Worker>, store: &Arc<K>) -> (usize, Seat<K>) {
        let client = match job {
            Job::Serve(accepted) => {
                let client = Arc::new(Client::new(origin(accepted, worker)));
                worker.server.clients.add(&client);
                Some(client)
            }
            _ => None,
        };
        let readiness = Rc::new(Readiness::default());
        readiness.writable.set(true);
        // The highest generation belongs to the event that ends the sleep.
        self.generation = self.generation % (u32::MAX - 1) + 1;
        let generation = self.generation;
        let entry = Entry { readiness: readiness.clone(), client: client.clone(), generation };
        let key = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[key] = Some(entry);
        let data = epoll::EventData::new_u64(u64::from(generation) << 32 | key as u64);
        let ways = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP;
        let flags = ways | epoll::EventFlags::ET;
        let added = match job {
            Job::Serve(accepted) => epoll::add(&self.epoll, &accepted.fd, data, flags),
            Job::Accept(listener) => epoll::add(&self.epoll, &listener.fd, data, flags),
            _ => Ok(()),
        };
        if let Err(cause) = added {
            tracing::warn!(%cause, "watching a socket failed: the socket is not served");
            client.iter().for_each(|client| client.kill());
        }
        let (worker, store) = (worker.clone(), store.clone());
        (key, Seat { worker, store, readiness, client })
    }

    fn remove(&mut self, key: usize) {
        self.entries[key] = None;
        self.free.push(key);
    }

    fn clients(&self) -> impl Iterator<Item = &Arc<Client>> {
        self.entries.iter().flatten().filter_map(|entry| entry.client.as_ref())
    }

    /// Ends all connections, and wakes tasks that wait for a socket.
    fn end(&self) {
        self.clients().for_each(|client| client.kill());
        self.entries.iter().flatten().for_each(|entry| entry.readiness.wake());
    }

    /// Waits for sockets, the pool or a timer.
    fn wait<K: Keyspace>(
        &mut self,
        worker: &Worker,
        store: &K,
        is_busy: bool,
        cron_ns: u64,
    ) -> rustix::io::Result<()> {
        if is_busy {
            self.take(Duration::ZERO)?;
            if self.events.is_empty() {
                store.park(PARK);
            }
            return Ok(());
        }
        let next = worker.timers.earliest().map_or(cron_ns, |due| due.min(cron_ns));
        self.take(Duration::from_nanos(next.saturating_sub(worker.elapsed_ns())))
    }

    /// Takes events, after at most `time`.
    fn take(&mut self, time: Duration) -> rustix::io::Result<()> {
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        self.events.clear();
        match epoll::wait(self.epoll.as_fd(), spare_capacity(&mut self.events), Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Notes the events, and wakes the tasks of their sockets.
    fn dispatch(&mut self, inbox: &Inbox) {
        for event in self.events.drain(..) {
            let (data, flags) = ({ event.data }.u64(), { event.flags });
            if data == WAKE_UP {
                inbox.event().clear();
                continue;
            }
            let (key, generation) = (data as u32 as usize, (data >> 32) as u32);
            let Some(Some(entry)) = self.entries.get(key) else { continue };
            if entry.generation != generation {
                continue;
            }
            let ends = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            let (is_end, readiness) = (flags.intersects(ends), &entry.readiness);
            readiness.ends.set(readiness.ends.get() || is_end);
            if is_end || flags.contains(epoll::EventFlags::IN) {
                readiness.readable.set(true);
            }
            if is_end || flags.contains(epoll::EventFlags::OUT) {
                readiness.writable.set(true);
            }
            readiness.wake();
        }
    }
}

fn origin(accepted: &Accepted, worker: &Worker) -> Origin {
    use std::os::fd::AsRawFd;
    Origin {
        id: worker.server.clients.next_id(),
        address: accepted.peer.as_str().into(),
        local: accepted.local.as_str().into(),
        fd: accepted.fd.as_raw_fd(),
        socket: Arc::downgrade(&accepted.fd),
        thread: worker.index,
        now_ms: worker.now_ms(),
        is_unix: accepted.is_unix,
        user: worker.server.users.first_login().name,
    }
}
