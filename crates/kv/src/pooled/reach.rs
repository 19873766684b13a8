//! Verbs on the grants that have the addresses.

use pool::{Grant, Lane};
use smallvec::SmallVec;
use verbs::Nic;

use super::PoolMemory;
use super::lists::{FEW, LIST, LISTS, Part, divide, is_one_list, join, stopped, to_pool};
use crate::place::Address;
use crate::reach::{Range, Reach, Step, Stopped};

impl<N: Nic> PoolMemory<N> {
    /// Executes steps of one list in place: a list of [`Part`] would copy them.
    async fn run_few(
        &self,
        steps: &mut [Step<'_>],
        grants: &[(Grant, u64)],
    ) -> Result<(), Stopped> {
        let posted = steps.iter_mut().zip(grants);
        let mut posted: SmallVec<[pool::Step<'_, N>; FEW]> =
            posted.map(|(step, (grant, offset))| to_pool(step, grant, *offset)).collect();
        self.shared.pool.run(Lane(0), &mut posted).await.map_err(stopped)
    }

    async fn run_list(&self, part: &mut Part<'_>) -> Result<(), Stopped> {
        let mut steps: SmallVec<[pool::Step<'_, N>; LIST]> = SmallVec::new();
        for (verb, grant, offset) in part.iter_mut() {
            steps.push(to_pool(verb, grant, *offset));
        }
        self.shared.pool.run(Lane(0), &mut steps).await.map_err(stopped)
    }
}

impl<N: Nic> Reach for PoolMemory<N> {
    type Right = ();

    async fn open(&self, _range: Range) -> Result<(), Stopped> {
        Ok(())
    }

    async fn close(&self, (): ()) {}

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let locate = |at| {
            let found = self.locate(at);
            found.ok_or_else(|| Stopped::Refused(format!("no chunk of this process has {at}")))
        };
        let mut grants: SmallVec<[(Grant, u64); FEW]> = SmallVec::new();
        for step in steps.iter() {
            grants.push(locate(step.at())?);
        }
        if is_one_list(steps, &grants) {
            return self.run_few(steps, &grants).await;
        }
        let mut lists = SmallVec::new();
        let has_atomics =
            steps.iter().any(|step| matches!(step, Step::Cas { .. } | Step::Add { .. }));
        for step in steps.iter_mut() {
            divide(step, &mut lists, locate)?;
        }
        if let [(part, _)] = lists.as_mut_slice() {
            return self.run_list(part).await;
        }
        // A fence within a list orders it, but no fence stands between two lists.
        let at_once = if has_atomics { 1 } else { LISTS };
        for lists in lists.chunks_mut(at_once) {
            join(lists.iter_mut().map(|(part, _)| self.run_list(part))).await?;
        }
        Ok(())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        match (self.locate(a), self.locate(b)) {
            (Some((a, _)), Some((b, _))) => (a.group, a.function) == (b.group, b.function),
            _ => false,
        }
    }
}
