//! Where threads wait for each other: under virtual time and on a clock alike, since it is a future.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A place for so many threads.
#[derive(Default)]
struct Hall {
    members: u32,
    arrived: u32,
    /// Counts how often all were there.
    met: u64,
    waiting: Vec<Waker>,
}

/// A thread's part. When it is dropped nobody waits for that thread any more.
pub struct Member(Arc<Mutex<Hall>>);

/// Members of a meeting of `count` threads.
pub fn of(count: u32) -> Vec<Member> {
    let hall = Arc::new(Mutex::new(Hall { members: count, ..Hall::default() }));
    (0..count).map(|_| Member(hall.clone())).collect()
}

impl Hall {
    fn look(&mut self) {
        if self.arrived >= self.members {
            self.arrived = 0;
            self.met += 1;
            self.waiting.drain(..).for_each(Waker::wake);
        }
    }
}

impl Member {
    fn hall(&self) -> MutexGuard<'_, Hall> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all are there.
    pub async fn meet(&self) {
        let before = {
            let mut hall = self.hall();
            let before = hall.met;
            hall.arrived += 1;
            hall.look();
            before
        };
        poll_fn(|context| {
            let mut hall = self.hall();
            if hall.met != before {
                return Poll::Ready(());
            }
            hall.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut hall = self.hall();
        hall.members -= 1;
        hall.look();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use fabric::executor::block_on;

    use super::*;

    #[test]
    fn nobody_goes_on_before_all_are_there_and_who_has_left_is_not_waited_for() {
        let arrived = AtomicU32::new(0);
        thread::scope(|scope| {
            for (at, member) in of(4).into_iter().enumerate() {
                let arrived = &arrived;
                scope.spawn(move || {
                    for round in 1..=3 {
                        if at == 3 && round == 2 {
                            return;
                        }
                        arrived.fetch_add(1, Ordering::SeqCst);
                        block_on(member.meet());
                        let here = if round == 1 { 4 } else { 4 + 3 * (round - 1) };
                        assert!(arrived.load(Ordering::SeqCst) >= here);
                    }
                });
            }
        });
    }
}
