//! Opening and closing of permissions in a turn of the published form: one QP and one list for all
//! compute nodes of the core, and handovers between them.

use scheme::Error;
use scheme::wakeup::poll_until;
use verbs::wqe::Umr;
use verbs::{Nic, Op, QueuePair, Status, WorkRequest};

use super::doors::DoorTask;
use super::{BINDS, Shared, State};
use crate::patronus::door::manager::{Beginning, ManagerWindows, Window};

/// Permissions that close, and permissions that open, in one list: each has at most two windows.
const ROUND: usize = BINDS / 4;

/// A window operation.
struct Operation<N: Nic> {
    window: Window<N>,
    umr: Umr,
    /// The task whose range or lifetime the window opens, and the index of the [`Need`] there.
    ///
    /// [`Need`]: crate::patronus::door::manager::Need
    opens: Option<(usize, usize)>,
    done: bool,
}

impl<N: Nic> State<N> {
    /// Executes the tasks with the windows of the core, in the published form.
    pub(super) fn run_published(
        &mut self,
        shared: &Shared<N>,
        tasks: &mut [DoorTask],
    ) -> Result<(), Error> {
        // In the order of their arrival, whatever compute node they belong to.
        tasks.sort_by_key(|task| task.opening.is_some());
        let closing = tasks.partition_point(|task| task.opening.is_none());
        let (closes, opens) = tasks.split_at_mut(closing);
        let (mut closes, mut opens) = (closes.chunks(ROUND), opens.chunks_mut(ROUND));
        loop {
            let (some_close, some_open) = (closes.next(), opens.next());
            if some_close.is_none() && some_open.is_none() {
                return Ok(());
            }
            let (close, open) = (some_close.unwrap_or_default(), some_open.unwrap_or_default());
            self.run_round(shared, close, open)?;
        }
    }

    fn run_round(
        &mut self,
        shared: &Shared<N>,
        closes: &[DoorTask],
        opens: &mut [DoorTask],
    ) -> Result<(), Error> {
        let (Some(windows), Some(headers)) = (&mut self.published, shared.headers()) else {
            return Ok(());
        };
        let mut ends: Vec<_> =
            closes.iter().flat_map(|task| windows.end(task.id, task.is_delayed, headers)).collect();
        let mut operations: Vec<Operation<N>> = Vec::with_capacity(2 * ROUND);
        let mut beginnings = Vec::with_capacity(opens.len());
        for (at, task) in opens.iter().enumerate() {
            let is_present = self.peers.get(&task.id.client).is_some_and(|peer| !peer.leaving);
            let opening = task.opening.filter(|_| is_present);
            let beginning = opening.and_then(|opening| windows.begin(&opening));
            for (index, need) in beginning.iter().flat_map(|it| it.needs.iter()).enumerate() {
                // MW handover (Patronus §5.4): any window that closes, of any compute node.
                let handed = if windows.techniques.handover { ends.pop() } else { None };
                match handed {
                    Some(_) => self.counts.handovers += 1,
                    None => self.counts.binds += 1,
                }
                let Some(mut window) = handed.or_else(|| windows.take(&shared.nic)) else { break };
                let umr = ManagerWindows::bind(&mut window, *need);
                operations.push(Operation { window, umr, opens: Some((at, index)), done: false });
            }
            beginnings.push(beginning);
        }
        for mut window in ends {
            self.counts.unbinds += 1;
            let umr = windows.unbind(&mut window);
            operations.push(Operation { window, umr, opens: None, done: false });
        }
        self.post_published(&mut operations)?;
        self.settle_published(shared, opens, beginnings, operations)
    }

    /// Posts the operations in their order with one doorbell, and waits for their completions.
    fn post_published(&mut self, operations: &mut [Operation<N>]) -> Result<(), Error> {
        let Some(windows) = &self.published else { return Ok(()) };
        let first = self.serial;
        self.serial += operations.len() as u64;
        let list: Vec<_> = (first..)
            .zip(operations.iter())
            .map(|(id, it)| WorkRequest { id, op: Op::Window(&it.umr), signaled: true })
            .collect();
        let is_posted = !list.is_empty() && windows.binder.post_send(&list).is_ok();
        drop(list);
        let posted = if is_posted { operations.len() } else { 0 };
        poll_until(&self.binds, posted, |c| {
            let index = c.id.checked_sub(first).map(|index| index as usize);
            let Some(operation) = index.and_then(|index| operations.get_mut(index)) else {
                return false; // of an earlier list
            };
            operation.done = c.status == Status::Success;
            true
        })
    }

    /// Notes what is open, and which tasks have failed. The window of a failed operation is
    /// deallocated, so that its keys are dead in any case.
    fn settle_published(
        &mut self,
        shared: &Shared<N>,
        opens: &mut [DoorTask],
        beginnings: Vec<Option<Beginning>>,
        operations: Vec<Operation<N>>,
    ) -> Result<(), Error> {
        let (Some(windows), Some(headers)) = (&mut self.published, shared.headers()) else {
            return Ok(());
        };
        let mut bound: Vec<[Option<Window<N>>; 2]> = opens.iter().map(|_| [None, None]).collect();
        let mut has_failed = false;
        for Operation { window, opens, done, .. } in operations {
            has_failed |= !done;
            match opens {
                _ if !done => drop(window),
                Some((task, need)) => bound[task][need] = Some(window),
                None => windows.give(window),
            }
        }
        if has_failed {
            windows.binder.connect(windows.binder.qpn())?;
        }
        for ((task, beginning), bound) in opens.iter_mut().zip(beginnings).zip(bound) {
            let opening = task.opening.expect("a task that opens");
            let is_open = beginning.is_some_and(|beginning| {
                let of = (&shared.nic, headers);
                windows.opened(of, (task.id, &opening), beginning, bound)
            });
            task.failed = !is_open;
        }
        Ok(())
    }
}
