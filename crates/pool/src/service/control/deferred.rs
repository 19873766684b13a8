//! Deferred requests: answered when their condition holds or their timeout has passed.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{AWAITS_MAX, Control, refused};
use crate::Error;
use crate::protocol::Reply;
use crate::service::connection::{Connection, Deferred, DeferredOp, MemoryWait};
use crate::service::connection_limits::ConnectionId;

/// Maximum time for which a request for memory waits.
const AWAIT_MAX: Duration = Duration::from_secs(3600);

impl Control<'_> {
    /// Defers the answer to a request.
    pub(super) fn defer(&mut self, from: ConnectionId, id: u64, what: DeferredOp) {
        let Some(session) = self.connections.get_mut(&from).and_then(Connection::pool) else {
            return;
        };
        session.deferred.push(Deferred { id, what });
        // Incremented before this round checks the condition: a poll after that check then wakes
        // this thread.
        self.shared.wake.awaiting.fetch_add(1, Ordering::SeqCst);
    }

    /// Answers the deferred requests whose condition holds.
    pub(super) fn answer_deferred(&mut self) {
        if self.shared.wake.awaiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let waiting: Vec<ConnectionId> = self
            .connections
            .iter_mut()
            .filter_map(|(id, c)| c.pool().is_some_and(|p| !p.deferred.is_empty()).then_some(*id))
            .collect();
        for id in waiting {
            match self.answer_deferred_of(id) {
                true => self.update_interest(id),
                false => self.close(id),
            }
        }
    }

    fn answer_deferred_of(&mut self, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return true };
        let Some(session) = connection.pool() else { return true };
        let mut alive = true;
        for deferred in std::mem::take(&mut session.deferred) {
            let reply = match deferred.what {
                DeferredOp::Goodbye(client) if self.shared.node.is_retired(client) => {
                    Ok(Reply::Done)
                }
                DeferredOp::Goodbye(_) => {
                    connection.pool().expect("just seen").deferred.push(deferred);
                    continue;
                }
                DeferredOp::ResetManagement(client) => {
                    match self.shared.node.reset_management(client) {
                        Ok(None) => {
                            connection.pool().expect("just seen").deferred.push(deferred);
                            continue;
                        }
                        Ok(Some(peers)) => Ok(Reply::Management { peers }),
                        Err(e) => Err(e),
                    }
                }
            };
            self.shared.wake.awaiting.fetch_sub(1, Ordering::SeqCst);
            alive &= match reply {
                Ok(reply) => connection.reply(deferred.id, reply),
                Err(e) => {
                    self.refusals.request(id, connection, &e, self.started.elapsed());
                    connection.refuse(deferred.id, &e)
                }
            };
        }
        alive
    }

    pub(super) fn start_await(
        &mut self,
        from: ConnectionId,
        id: u64,
        ms: u64,
    ) -> Result<(), Error> {
        let session = self.connections.get_mut(&from).and_then(Connection::pool);
        let session = session.ok_or_else(|| refused("the connection has ended"))?;
        if session.client.is_none() {
            return Err(refused("it is not admitted"));
        }
        if session.awaiting.len() >= AWAITS_MAX {
            return Err(refused(&format!("{AWAITS_MAX} such requests wait already")));
        }
        let deadline = Instant::now() + Duration::from_millis(ms).min(AWAIT_MAX);
        session.awaiting.push(MemoryWait { id, deadline });
        // Incremented before the next check of the condition: a poll after that check then wakes
        // this thread.
        self.shared.wake.awaiting.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Answers the requests for memory if a chunk is free or the timeout has passed.
    pub(super) fn answer_awaits(&mut self) {
        if self.shared.wake.awaiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let waiting: VecDeque<ConnectionId> = self
            .connections
            .iter_mut()
            .filter_map(|(id, c)| c.pool().is_some_and(|p| !p.awaiting.is_empty()).then_some(*id))
            .collect();
        for id in waiting {
            if !self.answer_awaits_of(id) {
                self.close(id);
            } else {
                self.update_interest(id);
            }
        }
    }

    fn answer_awaits_of(&mut self, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return true };
        let Some(session) = connection.pool() else { return true };
        let Some(client) = session.client else { return true };
        let available = self.shared.node.has_memory(client);
        let now = Instant::now();
        let (ready, rest): (Vec<_>, Vec<_>) = session
            .awaiting
            .drain(..)
            .partition(|a| !matches!(available, Ok(false)) || a.deadline <= now);
        session.awaiting = rest;
        self.shared.wake.awaiting.fetch_sub(ready.len(), Ordering::SeqCst);
        ready.into_iter().all(|a| match &available {
            Ok(available) => connection.reply(a.id, Reply::Memory { available: *available }),
            Err(e) => connection.refuse(a.id, e),
        })
    }

    pub(super) fn next_await(&mut self) -> Option<Instant> {
        if self.shared.wake.awaiting.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let deadlines = self
            .connections
            .values_mut()
            .filter_map(|c| c.pool().and_then(|p| p.awaiting.iter().map(|a| a.deadline).min()));
        deadlines.min()
    }
}
