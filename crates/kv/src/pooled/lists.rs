//! Lists of verbs for one QP.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use pool::Grant;
use smallvec::SmallVec;
use verbs::{Nic, Status};

use super::NodeGrant;
use crate::place::Address;
use crate::reach::{Step, Stopped};

/// Steps of one list: as many as [`pool::Pool::run`] takes without an allocation.
pub(crate) const LIST: usize = 16;
/// Bytes of one list. Longer READs and WRITEs are divided.
pub(crate) const LIST_BYTES: usize = 128 << 10;

/// A chunk, and an offset in it.
pub(super) type Located = (NodeGrant, u64);

/// True if verbs on both chunks use one QP.
pub(super) fn is_one_qp(a: &NodeGrant, b: &NodeGrant) -> bool {
    (a.node, a.grant.group, a.grant.function) == (b.node, b.grant.group, b.grant.function)
}

/// A step in the pool's words.
pub(crate) fn to_pool<'a, N: Nic>(
    step: &'a mut Step<'_>,
    grant: &'a Grant,
    offset: u64,
) -> pool::Step<'a, N> {
    match step {
        Step::Read { into, .. } => pool::Step::Read { grant, offset, into },
        Step::Write { from, .. } => pool::Step::Write { grant, offset, from },
        Step::Cas { expected, new, old, .. } => {
            let (expected, new) = (*expected, *new);
            pool::Step::CompareAndSwap { grant, offset, expected, new, old }
        }
        Step::Add { amount, old, .. } => {
            pool::Step::FetchAndAdd { grant, offset, add: *amount, old }
        }
    }
}

/// True if one list can have all steps, undivided.
pub(super) fn is_one_list(steps: &[Step<'_>], grants: &[Located]) -> bool {
    steps.len() <= LIST
        && steps.iter().map(Step::bytes).sum::<usize>() <= LIST_BYTES
        && grants.windows(2).all(|pair| is_one_qp(&pair[0].0, &pair[1].0))
}

/// Verbs of one list, with the grants and the offsets in them.
pub(super) type Part<'a> = SmallVec<[(Step<'a>, NodeGrant, u64); LIST]>;

pub(crate) fn stopped(error: pool::Error) -> Stopped {
    let text = error.to_string();
    match error {
        pool::Error::List { status: Status::RemoteAccess, .. }
        | pool::Error::Access { status: Status::RemoteAccess, .. }
        | pool::Error::Stale { .. }
        | pool::Error::NotYours { .. } => Stopped::Refused(text),
        _ => Stopped::Lost(text),
    }
}

/// Appends `step`, in parts of at most [`LIST_BYTES`], with the grants from `locate`.
pub(super) fn divide<'a>(
    step: &'a mut Step<'_>,
    lists: &mut SmallVec<[(Part<'a>, usize); 1]>,
    locate: impl Fn(Address) -> Result<Located, Stopped>,
) -> Result<(), Stopped> {
    let (grant, offset) = locate(step.at())?;
    let at = step.at();
    let mut add = |step: Step<'a>, bytes: usize, done: u64| {
        let is_full = |(part, total): &(Part<'_>, usize)| {
            part.len() == LIST || total + bytes > LIST_BYTES || !is_one_qp(&part[0].1, &grant)
        };
        if lists.last().is_none_or(is_full) {
            lists.push((Part::new(), 0));
        }
        if let Some((part, total)) = lists.last_mut() {
            part.push((step, grant, offset + done));
            *total += bytes;
        }
    };
    match step {
        Step::Read { into, .. } => {
            let mut done = 0;
            for into in into.chunks_mut(LIST_BYTES) {
                let bytes = into.len();
                add(Step::Read { at: at.plus(done), into }, bytes, done);
                done += bytes as u64;
            }
        }
        Step::Write { from, .. } => {
            let mut done = 0;
            for from in from.chunks(LIST_BYTES) {
                add(Step::Write { at: at.plus(done), from }, from.len(), done);
                done += from.len() as u64;
            }
        }
        Step::Cas { expected, new, old, .. } => {
            add(Step::Cas { at, expected: *expected, new: *new, old }, 8, 0);
        }
        Step::Add { amount, old, .. } => add(Step::Add { at, amount: *amount, old }, 8, 0),
    }
    Ok(())
}

/// Runs futures at the same time. Polls them in order, so that they post in order.
pub(crate) async fn join<F>(futures: impl Iterator<Item = F>) -> Result<(), Stopped>
where
    F: Future<Output = Result<(), Stopped>>,
{
    let mut open: Vec<Option<Pin<Box<F>>>> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut result = Ok(());
    poll_fn(|cx| {
        for future in &mut open {
            if let Some(Poll::Ready(ended)) = future.as_mut().map(|one| one.as_mut().poll(cx)) {
                *future = None;
                if result.is_ok() {
                    result = ended;
                }
            }
        }
        if open.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}
