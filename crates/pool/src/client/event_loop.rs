//! Completions for an event loop, which polls and sleeps on a thread of its own.

use std::time::Duration;

use verbs::completion::{Completer, Source};
use verbs::{CompletionQueue, Nic, executor};

use super::Pool;
use super::access_qp::Group;
use scheme::ClientScheme;

/// The completions of a connection: of its groups, of the QPs that can be lent, and of the
/// management QPs.
pub(super) fn sources<N: Nic>(
    groups: &[Group<N>],
    lendable: Option<&Completer<N::Cq>>,
    scheme: &dyn ClientScheme,
) -> Vec<Source> {
    let of_groups = groups.iter().map(|group| group.completer.source());
    let mut all: Vec<_> = of_groups.chain(lendable.map(Completer::source)).collect();
    scheme.each_queue(&mut |queue| {
        if !queue.is_shared() {
            all.push(queue.source());
        }
    });
    all
}

impl<N: Nic> Pool<N> {
    /// Polls the completions of all QPs once, and wakes the futures that wait for them. Returns the
    /// number of completions. Never blocks.
    ///
    /// Polls for all groups, also those of other threads: the waker of a thread's future is called
    /// whichever thread polls its completion. Where the NIC runs in this process, the call lets it
    /// run.
    pub fn poll(&self) -> usize {
        self.inner.sources.iter().map(Source::poll).sum()
    }

    /// Polls, as [`Pool::poll`], until something completes or `timeout` has passed: spins for some
    /// tens of microseconds, then sleeps. Returns the number of completions.
    ///
    /// For event loops that run their futures as [`executor::Tasks`]. Together they need no other
    /// thread while the tasks wait for one CQ. The loop notices that the memory node is gone only
    /// in this call, which it must make from time to time.
    ///
    /// ```
    /// use std::time::Duration;
    /// use verbs::executor::{Tasks, thread_waker};
    ///
    /// # let settings = pool::Settings { donate_bytes: 8 << 20, ..pool::Settings::default() };
    /// # let pool = pool::Pool::embedded(settings)?;
    /// let grant = pool.allocate_blocking()?;
    /// let mut tasks = Tasks::new(thread_waker());
    /// for n in 0..100 {
    ///     let (pool, grant) = (&pool, &grant);
    ///     tasks.spawn(async move { pool.fetch_and_add(grant, 0, n).await });
    /// }
    /// loop {
    ///     tasks.run(|_, old| assert!(old.is_ok()));
    ///     if tasks.is_empty() {
    ///         break;
    ///     }
    ///     tasks.sleep(|| pool.park(Duration::from_millis(1)));
    /// }
    /// assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 0)?, 4950);
    /// # Ok::<(), pool::Error>(())
    /// ```
    pub fn park(&self, timeout: Duration) -> usize {
        if !N::Cq::VIRTUAL {
            return executor::park(timeout, || self.poll());
        }
        let polled = self.poll();
        if polled == 0 {
            // Under virtual time the scheduler wakes the thread for its tasks' other CQs, too. If
            // the NIC is gone, the futures have been woken and report the error.
            let _ = self.inner.sources[0].wait(timeout);
            return self.poll();
        }
        polled
    }
}
