//! Verbs on the grants that have the addresses.

use pool::{Grant, Lane};
use smallvec::SmallVec;
use verbs::Nic;

use super::PoolMemory;
use super::lists::{FEW, LIST, LISTS, Part, divide, is_one_list, is_one_qp, join, to_pool};
use super::member::Member;
use crate::place::Address;
use crate::reach::{Range, Reach, Step, Stopped};

/// The grants of the steps of a round trip, and the offsets in them.
type Grants = SmallVec<[(Grant, u64); FEW]>;

impl<N: Nic> Member<N> {
    /// Executes steps of one list in place: a list of [`Part`] would copy them.
    async fn run_few(
        &self,
        steps: &mut [Step<'_>],
        grants: &[(Grant, u64)],
    ) -> Result<(), Stopped> {
        let posted = steps.iter_mut().zip(grants);
        let mut posted: SmallVec<[pool::Step<'_, N>; FEW]> =
            posted.map(|(step, (grant, offset))| to_pool(step, grant, *offset)).collect();
        self.pool.run(Lane(0), &mut posted).await.map_err(|error| self.stopped(error))
    }

    async fn run_list(&self, part: &mut Part<'_>) -> Result<(), Stopped> {
        let mut steps: SmallVec<[pool::Step<'_, N>; LIST]> = SmallVec::new();
        for (verb, grant, offset) in part.iter_mut() {
            steps.push(to_pool(verb, grant, *offset));
        }
        self.pool.run(Lane(0), &mut steps).await.map_err(|error| self.stopped(error))
    }
}

impl<N: Nic> Reach for PoolMemory<N> {
    type Right = ();

    async fn open(&self, _range: Range) -> Result<(), Stopped> {
        Ok(())
    }

    async fn close(&self, (): ()) {}

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let grants = self.grants(steps)?;
        let Some(first) = steps.first() else { return Ok(()) };
        if is_one_list(steps, &grants) {
            return self.reached(first.at())?.run_few(steps, &grants).await;
        }
        // Boxed, because lists are long, and the future of a single list is to be short.
        Box::pin(self.run_lists(steps)).await
    }

    async fn run_in_order(&self, steps: &mut [Step<'_>]) -> Result<bool, Stopped> {
        let grants = self.grants(steps)?;
        let Some(first) = steps.first() else { return Ok(true) };
        let member = self.reached(first.at())?;
        if is_one_list(steps, &grants) {
            member.run_few(steps, &grants).await?;
        } else if is_one_qp(steps, &grants) {
            Box::pin(self.run_lists(steps)).await?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        match (self.locate(a), self.locate(b)) {
            (Ok((first, _)), Ok((second, _))) => {
                let qp = |grant: Grant| (grant.group, grant.function);
                a.node == b.node && qp(first) == qp(second)
            }
            _ => false,
        }
    }

    fn is_lost(&self, node: u8) -> bool {
        self.member(node).is_some_and(Member::is_lost)
    }
}

impl<N: Nic> PoolMemory<N> {
    fn grants(&self, steps: &[Step<'_>]) -> Result<Grants, Stopped> {
        let mut grants = Grants::new();
        for step in steps {
            grants.push(self.locate(step.at())?);
        }
        Ok(grants)
    }

    /// Executes steps that are no single list.
    async fn run_lists(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let mut lists = SmallVec::new();
        let has_atomics =
            steps.iter().any(|step| matches!(step, Step::Cas { .. } | Step::Add { .. }));
        for step in steps.iter_mut() {
            divide(step, &mut lists, |at| self.locate(at))?;
        }
        // A fence within a list orders it, but no fence stands between two lists.
        let at_once = if has_atomics { 1 } else { LISTS };
        for lists in lists.chunks_mut(at_once) {
            join(lists.iter_mut().map(|(part, _)| self.run_part(part))).await?;
        }
        Ok(())
    }

    /// Executes a list. All its steps are on one memory node.
    async fn run_part(&self, part: &mut Part<'_>) -> Result<(), Stopped> {
        let at = part[0].0.at();
        self.reached(at)?.run_list(part).await
    }

    /// The memory node that has `at`.
    fn reached(&self, at: Address) -> Result<&Member<N>, Stopped> {
        let unknown = || Stopped::Refused(format!("the store has no memory node of {at}"));
        let member = self.member(at.node).ok_or_else(unknown)?;
        match member.is_lost() {
            true => Err(Stopped::Gone { node: at.node, why: "noticed earlier".into() }),
            false => Ok(member),
        }
    }

    /// The grant that has `at`, and the offset of `at` in it.
    fn locate(&self, at: Address) -> Result<(Grant, u64), Stopped> {
        let found = self.reached(at)?.locate(at);
        found.ok_or_else(|| Stopped::Refused(format!("no chunk of this process has {at}")))
    }
}
