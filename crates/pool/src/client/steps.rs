//! Ordered lists of READ, WRITE, CAS and FAA: one QP, one doorbell, one completion.
//!
//! An RC QP executes a list in order: WRITE, then CAS, then READ. A WRITE behind a READ or an
//! atomic is posted with a fence, because hardware keeps this order only then (IBTA vol. 1,
//! chapter 10, ordering of work requests). Between two QPs there is no order. Therefore all steps
//! must use one QP: their grants must have the same group and the same function.
//!
//! Slices pass through one bounce buffer for the whole list:
//!
//! ```text
//! steps    | WRITE, long | CAS       | READ           | WRITE, short |
//! bounce   | data        | old value | bytes          | (inline)     |   each part aligned to 8
//! ```

use smallvec::SmallVec;
use verbs::completion::{Completer, LIST_MAX, position};
use verbs::executor::block_on;
use verbs::{Completion, Nic, Status};

use super::access::remote;
use super::access_qp::{Counts, STACK_REQUESTS, Work};
use super::batch::Qp;
use super::buffer::{BOUNCE_MAX, BounceBuffer};
use super::inner::Repeat;
use super::path::Posted;
use super::{Buffer, Inner, Pool, Transfer};
use crate::Error;
use scheme::{Grant, Lane, Right};

/// A step of an ordered list: [`Pool::run`].
pub enum Step<'a, N: Nic> {
    /// Reads `into.len()` bytes at `offset` of a chunk.
    Read {
        /// The chunk.
        grant: &'a Grant,
        /// Offset in the chunk.
        offset: u64,
        /// Receives the bytes.
        into: &'a mut [u8],
    },
    /// Writes `from` at `offset` of a chunk.
    Write {
        /// The chunk.
        grant: &'a Grant,
        /// Offset in the chunk.
        offset: u64,
        /// The bytes.
        from: &'a [u8],
    },
    /// Reads from a chunk into registered memory.
    ReadInto(Transfer<'a>, &'a Buffer<N>),
    /// Writes from registered memory to a chunk.
    WriteFrom(Transfer<'a>, &'a Buffer<N>),
    /// Stores `new` in the 8 bytes at `offset` if they hold `expected`, as
    /// [`Pool::compare_and_swap`]. A list goes on whether they do or not.
    CompareAndSwap {
        /// The chunk.
        grant: &'a Grant,
        /// Offset in the chunk, a multiple of 8.
        offset: u64,
        /// Compared with the word.
        expected: u64,
        /// Replaces the word if it equals `expected`.
        new: u64,
        /// Receives the previous value.
        old: &'a mut u64,
    },
    /// Adds `add` to the 8 bytes at `offset`, as [`Pool::fetch_and_add`].
    FetchAndAdd {
        /// The chunk.
        grant: &'a Grant,
        /// Offset in the chunk, a multiple of 8.
        offset: u64,
        /// The addend.
        add: u64,
        /// Receives the previous value.
        old: &'a mut u64,
    },
}

impl<N: Nic> Pool<N> {
    /// Executes `steps` in order on one QP, with one doorbell, and waits for one completion.
    ///
    /// All grants must have the same group and the same function of the memory node's NIC, so that
    /// all steps use one QP. At most 64 steps, and at most a quarter of
    /// [`Options::send_blocks`](super::Options::send_blocks); the slices have at most 256 KiB
    /// together. A list within these bounds makes no allocation if it has at most 16 steps.
    ///
    /// If another operation has broken the QP, the rest of the list is repeated as long as it
    /// consists of READs and WRITEs. An atomic is never repeated, because the first execution may
    /// have taken effect.
    ///
    /// If the future is dropped after its first poll, the steps may still take effect.
    ///
    /// # Errors
    /// [`Error::List`] says how many steps took effect; the results of these steps are delivered.
    /// After any other error of a verb or of the connection, each step may have taken effect or
    /// not. A list that is refused, with [`Error::Setting`], [`Error::OutOfRange`],
    /// [`Error::NotPermitted`], [`Error::Expired`] or [`Error::Stale`], had no effect. If a lease
    /// ends while the list is in flight, the error is [`Error::List`], too.
    ///
    /// ```
    /// use pool::{Lane, Step};
    /// use verbs::executor::block_on;
    ///
    /// # let settings = pool::Settings { donate_bytes: 8 << 20, ..pool::Settings::default() };
    /// # let pool = pool::Pool::embedded(settings)?;
    /// let grant = pool.allocate_blocking()?;
    /// let grant = &grant;
    /// // Publishes a block: the CAS is executed after the block is written.
    /// let mut old = 0;
    /// block_on(pool.run(
    ///     Lane(0),
    ///     &mut [
    ///         Step::Write { grant, offset: 4096, from: b"a block" },
    ///         Step::CompareAndSwap { grant, offset: 0, expected: 0, new: 4096, old: &mut old },
    ///     ],
    /// ))?;
    /// assert_eq!(old, 0);
    /// # Ok::<(), pool::Error>(())
    /// ```
    pub async fn run(&self, lane: Lane, steps: &mut [Step<'_, N>]) -> Result<(), Error> {
        if self.inner.by_rpc().is_some() {
            return self.run_by_rpc(lane, steps).await;
        }
        let Some(mut list) = List::post(&self.inner, lane, steps)? else { return Ok(()) };
        while let Some(posted) = &mut list.posted {
            // Polled in place: if this future is dropped here, or the wait ends with an error,
            // `posted` still contains the list, which is in flight.
            let (ended, epoch) = ((&mut posted.pending).await?, posted.epoch);
            list.posted = None;
            list.settle(&ended, epoch)?;
        }
        Ok(())
    }

    /// [`Pool::run`], blocking.
    pub fn run_blocking(&self, lane: Lane, steps: &mut [Step<'_, N>]) -> Result<(), Error> {
        if self.inner.by_rpc().is_some() {
            return block_on(self.run_by_rpc(lane, steps));
        }
        let Some(mut list) = List::post(&self.inner, lane, steps)? else { return Ok(()) };
        let completer = list.completer();
        while let Some(posted) = &mut list.posted {
            let (ended, epoch) = (completer.wait_for(&mut posted.pending)?, posted.epoch);
            list.posted = None;
            list.settle(&ended, epoch)?;
        }
        Ok(())
    }
}

/// An ordered list in flight.
struct List<'p, 's, N: Nic> {
    pool: &'p Inner<N>,
    qp: Qp,
    lane: Lane,
    steps: &'p mut [Step<'s, N>],
    /// Memory of all slices and old values.
    bounce: Option<BounceBuffer<N>>,
    posted: Option<Posted<N>>,
    /// Steps that took effect and whose results were delivered.
    done: usize,
    tries: u32,
}

impl<'p, 's, N: Nic> List<'p, 's, N> {
    /// Checks all steps, then posts them; `None` if there are none.
    fn post(
        pool: &'p Inner<N>,
        lane: Lane,
        steps: &'p mut [Step<'s, N>],
    ) -> Result<Option<Self>, Error> {
        pool.check_length(steps.len())?;
        let Some(qp) = pool.one_qp(lane, steps)? else { return Ok(None) };
        let bounce = match pool.check_slices(steps)? {
            0 => None,
            bytes => Some(pool.bounce.take(bytes)?),
        };
        let mut list = Self { pool, qp, lane, steps, bounce, posted: None, done: 0, tries: 0 };
        list.post_rest()?;
        Ok(Some(list))
    }

    fn completer(&self) -> &'p Completer<N::Cq> {
        self.pool.group(self.qp.0).path(self.qp.1).completer()
    }

    /// Posts the steps that have not taken effect.
    fn post_rest(&mut self) -> Result<(), Error> {
        let mut at = 0;
        let mut works: SmallVec<[Work<'_>; STACK_REQUESTS]> = SmallVec::new();
        for (i, step) in self.steps.iter().enumerate() {
            if i >= self.done {
                works.push(step.work(self.pool, self.lane, self.bounce.as_ref(), at)?);
            }
            at += step.bounced(self.pool);
        }
        let (group, index) = self.qp;
        self.posted = Some(self.pool.post(group, index, works.iter())?);
        Ok(())
    }

    /// Handles the completion of the posted steps: delivers the results of those that took effect,
    /// and posts the rest again if another operation broke the QP.
    fn settle(&mut self, ended: &Completion, epoch: u64) -> Result<(), Error> {
        let is_whole = ended.status == Status::Success;
        let end = if is_whole { self.steps.len() } else { self.done + position(ended) };
        self.deliver(end);
        if is_whole {
            return Ok(());
        }
        let (done, steps) = (self.done, self.steps.len());
        let has_atomics = self.steps[done..].iter().any(Step::is_atomic);
        let repeat = if has_atomics { Repeat::Never } else { Repeat::Always };
        let path = self.pool.group(self.qp.0).path(self.qp.1);
        let status = ended.status;
        if !self.pool.may_repost(path, epoch, status, repeat, &mut self.tries)? {
            return Err(Error::List { done, steps, op: self.steps[done].name(), status });
        }
        match self.post_rest() {
            // The lease of a step has ended meanwhile. The caller needs the number of steps that
            // took effect.
            Err(Error::Expired { op }) => Err(Error::List { done, steps, op, status }),
            posted => posted,
        }
    }

    /// Copies out the results of the steps up to `end`, and counts these steps.
    fn deliver(&mut self, end: usize) {
        let counts = &self.pool.group(self.qp.0).counts;
        let mut at = 0;
        for (i, step) in self.steps[..end].iter_mut().enumerate() {
            let bounced = step.bounced(self.pool);
            if i >= self.done {
                step.deliver(self.bounce.as_ref(), at, counts);
            }
            at += bounced;
        }
        self.done = end;
    }
}

impl<N: Nic> Drop for List<'_, '_, N> {
    fn drop(&mut self) {
        let Some(posted) = self.posted.take() else { return };
        let buffers: Vec<_> = self.steps.iter().filter_map(Step::buffer).cloned().collect();
        self.pool.abandon(posted, Box::new((buffers, self.bounce.take())));
    }
}

impl<N: Nic> Inner<N> {
    /// Checks a list that is not posted: length, QP, and each step.
    pub(super) fn check_list(&self, lane: Lane, steps: &[Step<'_, N>]) -> Result<(), Error> {
        self.check_length(steps.len())?;
        self.one_qp(lane, steps)?;
        self.check_slices(steps)?;
        steps.iter().try_for_each(|step| step.check(self))
    }

    /// Bytes that the steps need in the bounce buffer, at most [`BOUNCE_MAX`].
    fn check_slices(&self, steps: &[Step<'_, N>]) -> Result<usize, Error> {
        let bytes: usize = steps.iter().map(|step| step.bounced(self)).sum();
        match bytes {
            0..=BOUNCE_MAX => Ok(bytes),
            _ => Err(too_long("bytes in slices", bytes, BOUNCE_MAX, "use buffers")),
        }
    }

    fn check_length(&self, steps: usize) -> Result<(), Error> {
        let most = LIST_MAX.min(self.burst);
        match steps <= most {
            true => Ok(()),
            false => Err(too_long(
                "steps",
                steps,
                most,
                "divide the list, or connect with more send_blocks (at most 64 steps)",
            )),
        }
    }

    /// The QP that all steps use; `None` if there are no steps.
    fn one_qp(&self, lane: Lane, steps: &[Step<'_, N>]) -> Result<Option<Qp>, Error> {
        let mut one = None;
        for (i, step) in steps.iter().enumerate() {
            let grant = step.grant();
            let qp = self.qp_of(grant, lane)?;
            if *one.get_or_insert(qp) == qp {
                continue;
            }
            let first = steps[0].grant();
            return Err(Error::Setting {
                setting: "steps",
                value: format!("group {}, function {}", grant.group.0, grant.function),
                why: format!(
                    "step {i} would use another QP than step 0 (group {}, function {}), and two \
                     QPs keep no order: use grants of one group and function",
                    first.group.0, first.function
                ),
            });
        }
        Ok(one)
    }
}

fn too_long(what: &str, value: usize, most: usize, instead: &str) -> Error {
    Error::Setting {
        setting: "steps",
        value: format!("{value} {what}"),
        why: format!("an ordered list has at most {most}: {instead}"),
    }
}

impl<N: Nic> Step<'_, N> {
    fn grant(&self) -> &Grant {
        match self {
            Step::Read { grant, .. }
            | Step::Write { grant, .. }
            | Step::CompareAndSwap { grant, .. }
            | Step::FetchAndAdd { grant, .. } => grant,
            Step::ReadInto(transfer, _) | Step::WriteFrom(transfer, _) => transfer.grant,
        }
    }

    fn buffer(&self) -> Option<&Buffer<N>> {
        match self {
            Step::ReadInto(_, buffer) | Step::WriteFrom(_, buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Name in error messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Step::Read { .. } | Step::ReadInto(..) => "read",
            Step::Write { .. } | Step::WriteFrom(..) => "write",
            Step::CompareAndSwap { .. } => "compare-and-swap",
            Step::FetchAndAdd { .. } => "fetch-and-add",
        }
    }

    fn is_atomic(&self) -> bool {
        matches!(self, Step::CompareAndSwap { .. } | Step::FetchAndAdd { .. })
    }

    /// Bytes that the step needs in the bounce buffer.
    fn bounced(&self, pool: &Inner<N>) -> usize {
        match self {
            Step::Read { into, .. } => into.len().max(1).next_multiple_of(8),
            Step::Write { from, .. } if pool.is_inline(from.len()) => 0,
            Step::Write { from, .. } => from.len().next_multiple_of(8),
            Step::CompareAndSwap { .. } | Step::FetchAndAdd { .. } => 8,
            Step::ReadInto(..) | Step::WriteFrom(..) => 0,
        }
    }

    /// Checks the access.
    fn check(&self, pool: &Inner<N>) -> Result<(), Error> {
        match self {
            Step::Read { grant, offset, into } => {
                pool.check(grant, Right::Read, self.name(), *offset, into.len())
            }
            Step::Write { grant, offset, from } => {
                pool.check(grant, Right::Write, self.name(), *offset, from.len())
            }
            Step::ReadInto(transfer, buffer) => {
                pool.check_transfer(transfer, buffer, Right::Read, self.name()).map(drop)
            }
            Step::WriteFrom(transfer, buffer) => {
                pool.check_transfer(transfer, buffer, Right::Write, self.name()).map(drop)
            }
            Step::CompareAndSwap { grant, offset, .. }
            | Step::FetchAndAdd { grant, offset, .. } => {
                pool.check_word(grant, self.name(), *offset)
            }
        }
    }

    /// The access in its form for the QP, checked. The step's part of `bounce` begins at `at`.
    fn work<'w>(
        &'w self,
        pool: &Inner<N>,
        lane: Lane,
        bounce: Option<&BounceBuffer<N>>,
        at: usize,
    ) -> Result<Work<'w>, Error> {
        let sge = |len| bounce.expect("a list with slices has a bounce buffer").sge(at, len);
        match self {
            Step::Read { grant, offset, into } => {
                pool.check(grant, Right::Read, "read", *offset, into.len())?;
                pool.check_one_sided("read")?;
                Ok(Work::Read { from: remote(grant, *offset, lane), to: sge(into.len()) })
            }
            Step::Write { grant, offset, from } => {
                pool.check(grant, Right::Write, "write", *offset, from.len())?;
                pool.check_one_sided("write")?;
                let to = remote(grant, *offset, lane);
                if pool.is_inline(from.len()) {
                    return Ok(Work::WriteInline { to, data: from });
                }
                bounce.expect("a list with slices has a bounce buffer").write(at, from);
                Ok(Work::Write { to, from: sge(from.len()) })
            }
            Step::ReadInto(transfer, buffer) => pool.read_work(transfer, buffer, lane),
            Step::WriteFrom(transfer, buffer) => pool.write_work(transfer, buffer, lane),
            Step::CompareAndSwap { grant, offset, expected, new, .. } => {
                let word = pool.word(grant, self.name(), *offset, lane)?;
                Ok(Work::CompareSwap { at: word, compare: *expected, swap: *new, old: sge(8) })
            }
            Step::FetchAndAdd { grant, offset, add, .. } => {
                let word = pool.word(grant, self.name(), *offset, lane)?;
                Ok(Work::FetchAdd { at: word, add: *add, old: sge(8) })
            }
        }
    }

    /// Copies out the step's result, and counts the step.
    fn deliver(&mut self, bounce: Option<&BounceBuffer<N>>, at: usize, counts: &Counts) {
        let bounce = || bounce.expect("a list with results has a bounce buffer");
        match self {
            Step::Read { into, .. } => {
                bounce().read(at, into);
                counts.add_read(into.len());
            }
            Step::Write { from, .. } => counts.add_write(from.len()),
            Step::ReadInto(transfer, _) => counts.add_read(transfer.len as usize),
            Step::WriteFrom(transfer, _) => counts.add_write(transfer.len as usize),
            Step::CompareAndSwap { old, .. } | Step::FetchAndAdd { old, .. } => {
                **old = bounce().word(at);
                counts.add_atomic();
            }
        }
    }
}
