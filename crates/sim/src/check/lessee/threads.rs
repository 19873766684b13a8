//! Several requests of a client at the same time, and two threads that use one permission.
//!
//! The threads are simulated: two futures of one fiber, which change places only where they wait.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use super::*;
use crate::check::honest::run_together;
use crate::nic::SimHooks;

/// Result of one of several requests at the same time.
enum Raced {
    Acquired(Result<Permission, Error>),
    Extended(Result<Duration, Error>),
    Revoked(Result<(), Error>),
}

type RacedFuture = Pin<Box<dyn Future<Output = Raced>>>;

/// An operation of a thread.
enum Deed {
    Extend(Duration),
    Renew,
    Revoke,
    Read,
    Pause(Time),
}

impl Lessee {
    /// Sends several requests that concern one permission at the same time.
    pub(super) fn race(&mut self) {
        let Some(at) = self.some_held() else { return };
        let held = self.held.swap_remove(at);
        let permission = held.permission.clone();
        let before = self.before_extension(&permission);
        let kind = self.random.below(3);
        let object = permission.object();
        let board = self.cx.with_oracle(|o| o.board().to_vec());
        let Some(posted) = board.into_iter().find(|posted| posted.object == object) else { return };
        let terms = self.terms_for(&posted);
        let mut requests: Vec<RacedFuture> = Vec::new();
        for at in 0..2 {
            let (pool, permission, terms) = (self.pool.clone(), permission.clone(), terms.clone());
            let (by, group) = (self.some_extension(), self.group());
            requests.push(match (kind, at) {
                (0, _) | (1, 0) => {
                    Box::pin(async move { Raced::Extended(pool.extend(&permission, by).await) })
                }
                (2, 0) => Box::pin(async move {
                    Raced::Acquired(pool.acquire_in(group, &object, &terms).await)
                }),
                _ => Box::pin(async move { Raced::Revoked(pool.revoke(&permission).await) }),
            });
        }
        let mut has_ended = false;
        for raced in fiber::block_on(run_together(requests, |_| {})) {
            match raced {
                Raced::Extended(result) => self.extended(&permission, before, result),
                Raced::Acquired(result) => self.acquired(&posted, &terms, result),
                Raced::Revoked(result) => {
                    has_ended = true;
                    self.revoked(&permission, result);
                }
            }
        }
        if !has_ended {
            self.held.push(held);
        }
    }

    /// Has two threads extend, renew and revoke one permission, or use it while it is extended.
    pub(super) fn work_in_two_threads(&mut self) {
        let Some(at) = self.some_held() else { return };
        let held = self.held.swap_remove(at);
        let permission = held.permission.clone();
        // No access may be in flight while a permission is renewed or revoked.
        let kind = self.random.below(4);
        let scripts = [0, 1].map(|_| self.script(kind));
        let revokes = scripts.iter().flatten().any(|deed| matches!(deed, Deed::Revoke));
        let is_revoked = {
            let state = &RefCell::new((&mut *self, false));
            let thread = |script| -> Pin<Box<dyn Future<Output = ()> + '_>> {
                Box::pin(Self::follow(state, permission.clone(), script))
            };
            fiber::block_on(run_together(scripts.map(thread).into(), |()| {}));
            state.borrow().1
        };
        self.check_after_threads(&permission, revokes, is_revoked);
        if !is_revoked {
            self.held.push(held);
        }
    }

    fn script(&mut self, kind: u64) -> Vec<Deed> {
        let count = 1 + self.random.below(4);
        let deed = |me: &mut Self| match (me.random.below(4), kind) {
            (0, _) => Deed::Pause(Time(me.random.below(Time::us(20).0))),
            (1, 0) => Deed::Read,
            (1, 1 | 2) => Deed::Renew,
            (1, 3) | (2, 2) => Deed::Revoke,
            _ => Deed::Extend(me.some_extension()),
        };
        (0..count).map(|_| deed(self)).collect()
    }

    /// Program of a thread. The state: the client, and whether the permission was revoked.
    async fn follow(state: &RefCell<(&mut Self, bool)>, permission: Permission, script: Vec<Deed>) {
        let pool = state.borrow().0.pool.clone();
        for deed in script {
            match deed {
                Deed::Pause(time) => {
                    let hooks = pool.nic().hooks().clone();
                    let until = hooks.now() + time;
                    Pause { hooks, until }.await;
                }
                Deed::Read => {
                    let by = {
                        let me = &state.borrow().0;
                        me.cx.with_oracle(|o| o.refusals(me.cx.client))
                    };
                    let was_left = permission.left(pool.nic().now());
                    let mut into = vec![0; len_of(&permission) as usize];
                    let result = pool.read(&permission, 0, &mut into).await;
                    state.borrow_mut().0.used(&permission, "reads", (was_left, by), result);
                }
                Deed::Extend(by) => {
                    let before = state.borrow().0.before_extension(&permission);
                    let result = pool.extend(&permission, by).await;
                    state.borrow_mut().0.extended(&permission, before, result);
                }
                Deed::Renew => {
                    let result = pool.renew(&permission).await;
                    let me = &mut state.borrow_mut().0;
                    match result {
                        Ok(_) => me.granted(&permission),
                        Err(e) => me.failed("renews a permission", &e),
                    }
                }
                Deed::Revoke => {
                    let result = pool.revoke(&permission).await;
                    let (me, is_revoked) = &mut *state.borrow_mut();
                    *is_revoked |= me.revoked(&permission, result);
                }
            }
        }
    }

    /// The client's belief is that of the memory node: a revoked permission cannot be used, and one
    /// that the client believes to have ended is not open.
    fn check_after_threads(&self, permission: &Permission, revokes: bool, is_revoked: bool) {
        let lease = permission.lease();
        if is_revoked && !permission.left(self.now()).is_zero() {
            self.wrong(Invariant::Dead, |name| {
                format!("{name} can use a permission that it has revoked: {permission:?}")
            });
        }
        let is_open = self.cx.with_oracle(|o| o.calm && o.is_open(self.cx.client, lease.number));
        if lease.ended && !revokes && is_open {
            self.wrong(Invariant::Belief, |name| {
                format!("{name} takes a permission for ended that is open: {permission:?}")
            });
        }
    }
}

/// A future that is ready at a time.
struct Pause {
    hooks: SimHooks,
    until: Time,
}

impl Future for Pause {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut TaskContext<'_>) -> Poll<()> {
        if self.hooks.now() >= self.until {
            return Poll::Ready(());
        }
        self.hooks.wake_me_at(self.until);
        Poll::Pending
    }
}
