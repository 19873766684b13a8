//! Enforces budgets in this scheme (OneSidedMW §4.4); [`super::meter`] has the rules.

use scheme::{BudgetStatus, ClientId, Error};
use verbs::direct::DirectNic;

use super::connection::{Connection, Management};
use super::meter::Verdict;
use super::node::Node;

impl<N: DirectNic> Node<N> {
    /// Checks the counters of the management QPs, once per interval. Returns true if it closed a
    /// connection.
    pub(super) fn check_budgets(&mut self) -> Result<bool, Error> {
        let budget = self.options.budget.clone();
        if !budget.is_set() {
            return Ok(false);
        }
        let now = self.nic.now();
        if self.next_budget_check.is_some_and(|at| now < at) {
            return Ok(false);
        }
        self.next_budget_check = Some(now + budget.interval);
        let mut over = Vec::new();
        for (&client, c) in self.clients.iter_mut() {
            if c.management != Management::Open {
                continue;
            }
            let counts =
                (self.nic.cq_count(&c.allocs[0].requests)?, self.nic.cq_count(&c.free.requests)?);
            let mut verdict = c.meter.read(&budget, counts, now);
            if verdict == Verdict::Count {
                let held = self.memory.owned(client.0 as u64);
                verdict = c.meter.counted(&budget, held, self.nic.now().saturating_sub(now), now);
            }
            if let Verdict::Over(why) = verdict {
                over.push((client, why));
            }
        }
        let any = !over.is_empty();
        for (client, why) in over {
            let Some(mut c) = self.clients.remove(&client) else { continue };
            tracing::warn!(client = client.0, why, "client suspended");
            c.meter.suspend(&budget, why, now);
            c.notify = true;
            let closed = self.close(client, &mut c);
            self.clients.insert(client, c);
            closed?;
            self.over_budget += 1;
        }
        Ok(any)
    }

    /// Returns an error while the client is suspended; otherwise restarts its meter.
    pub(super) fn check_suspension(
        &self,
        client: ClientId,
        c: &mut Connection<N>,
    ) -> Result<(), Error> {
        let budget = &self.options.budget;
        if !budget.is_set() {
            return Ok(());
        }
        if let Some((why, retry_after)) = c.meter.suspension(self.nic.now()) {
            return Err(Error::OverBudget {
                attempt: format!("re-establishing the management QPs of client {}", client.0),
                why: why.to_owned(),
                retry_after,
            });
        }
        let held = if budget.chunks.is_some() { self.memory.owned(client.0 as u64) } else { 0 };
        let counts =
            (self.nic.cq_count(&c.allocs[0].requests)?, self.nic.cq_count(&c.free.requests)?);
        c.meter.restart(budget, held, counts);
        Ok(())
    }

    /// State of the budgets; `None` if no budget is set.
    pub(super) fn budget_status(&self) -> Option<BudgetStatus> {
        let budget = &self.options.budget;
        if !budget.is_set() {
            return None;
        }
        let ended = |c: &Connection<N>| c.management != Management::Open;
        let mut most: Vec<_> =
            self.clients.iter().map(|(id, c)| c.meter.usage(id.0, ended(c))).collect();
        most.sort_by_key(|u| std::cmp::Reverse((u.suspended, u.chunks, u.requests_per_s)));
        most.truncate(BudgetStatus::MOST);
        Some(BudgetStatus {
            requests_per_s: budget.requests_per_s,
            chunks: budget.chunks,
            interval_ms: budget.interval.as_millis() as u64,
            ended: self.over_budget,
            suspended: self.clients.values().filter(|c| ended(c)).count() as u64,
            most,
        })
    }
}
