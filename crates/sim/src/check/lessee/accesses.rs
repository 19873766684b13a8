//! Accesses of a lessee: use within a lease, after its end, and against its right.

use super::*;

impl Lessee {
    pub(super) fn use_one(&mut self) {
        let Some(at) = self.some_held() else { return };
        let writes = self.held[at].permission.terms().right == Right::Write;
        match self.random.below(4) {
            0 if writes => self.write(at),
            1 if writes => self.add(at),
            2 if writes => {
                self.write(at);
                self.read(at);
            }
            _ => self.read(at),
        }
    }

    /// Makes an access, and checks its outcome against the client's belief.
    pub(super) fn access<T>(
        &mut self,
        at: usize,
        what: &str,
        access: impl FnOnce(&Pool<SimNic>, &Permission) -> Result<T, Error>,
    ) -> Option<T> {
        let permission = self.held[at].permission.clone();
        let refusals = self.cx.with_oracle(|o| o.refusals(self.cx.client));
        let was_left = permission.left(self.now());
        let result = access(&self.pool, &permission);
        self.used(&permission, what, (was_left, refusals), result)
    }

    /// Checks the outcome of an access against the client's belief. Before it, the client had this
    /// time left, and this number of its accesses had been refused.
    pub(super) fn used<T>(
        &mut self,
        permission: &Permission,
        what: &str,
        (was_left, refusals): (Duration, u32),
        result: Result<T, Error>,
    ) -> Option<T> {
        let believed_after = !permission.left(self.now()).is_zero();
        match result {
            Ok(_) if was_left.is_zero() => {
                self.wrong(Invariant::Answers, |name| {
                    format!("{name} {what} by a permission that has expired: {permission:?}")
                });
                None
            }
            Ok(result) => Some(result),
            Err(e) => {
                let by = Use { believed_after, refusals };
                self.cx.with_oracle(|o| o.use_failed(self.cx.client, &by, &e));
                self.failed(what, &e);
                None
            }
        }
    }

    pub(super) fn read(&mut self, at: usize) {
        let mut bytes = vec![0; len_of(&self.held[at].permission) as usize];
        let into = &mut bytes;
        let read = self.access(at, "reads", |pool, by| fiber::block_on(pool.read(by, 0, into)));
        let held = &mut self.held[at];
        let is_exclusive = held.permission.terms().sharing == Sharing::Exclusive;
        if read.is_none() || !is_exclusive {
            return;
        }
        let expected = held.contents.get_or_insert_with(|| bytes.clone());
        if let Some(i) = (0..bytes.len()).find(|i| bytes[*i] != expected[*i]) {
            let (is, must, object) = (bytes[i], expected[i], held.permission.object());
            self.wrong(Invariant::Contents, |name| {
                format!("{name} reads {is:#x} at byte {i} of object {object}, not {must:#x}")
            });
        }
    }

    pub(super) fn write(&mut self, at: usize) {
        let len = len_of(&self.held[at].permission);
        if self.held[at].permission.terms().right == Right::Read {
            return;
        }
        let from = self.random.below(len);
        let count = 1 + self.random.below((len - from).min(300));
        let mark = 1 + (self.cx.client as u8 * 37 + self.random.below(30) as u8) % 250;
        let data: Vec<u8> = (0..count).map(|i| mark.wrapping_add(i as u8).max(1)).collect();
        let old = self.held[at].contents.take();
        let written =
            self.access(at, "writes", |pool, by| fiber::block_on(pool.write(by, from, &data)));
        if let (Some(()), Some(mut contents)) = (written, old) {
            contents[from as usize..][..data.len()].copy_from_slice(&data);
            self.held[at].contents = Some(contents);
        }
    }

    pub(super) fn add(&mut self, at: usize) {
        let permission = &self.held[at].permission;
        let (first, words) = (permission.grant().addr, len_of(permission) / 8);
        if !first.is_multiple_of(8) || words == 0 {
            return;
        }
        let from = 8 * self.random.below(words);
        let by = 1 + self.random.below(1000);
        let old = self.held[at].contents.take();
        let added = self.access(at, "adds", |pool, permission| {
            fiber::block_on(pool.fetch_and_add(permission, from, by))
        });
        if let (Some(was), Some(mut contents)) = (added, old) {
            let word = &mut contents[from as usize..][..8];
            let known = u64::from_be_bytes((&*word).try_into().expect("8 bytes"));
            word.copy_from_slice(&known.wrapping_add(by).to_be_bytes());
            self.held[at].contents = Some(contents);
            if was != known {
                self.wrong(Invariant::Contents, |name| {
                    format!("{name} adds to {was:#x} at byte {from}, not to {known:#x}")
                });
            }
        }
    }

    /// Lets a lease end, and then uses the permission: nothing may be posted.
    pub(super) fn use_after_expiry(&mut self) {
        let Some(at) = self.some_held() else { return };
        let permission = self.held[at].permission.clone();
        let left = permission.left(self.now());
        if left > Duration::from_micros(4 * self.plan.lease_max_us) {
            return;
        }
        fiber::sleep(Time::from(left * 103 / 100));
        self.read(at);
    }

    /// Uses a permission beyond its range or its right: nothing may be posted.
    pub(super) fn misuse(&mut self) {
        let Some(at) = self.some_held() else { return };
        let permission = self.held[at].permission.clone();
        let refusals = self.cx.with_oracle(|o| o.refusals(self.cx.client));
        let len = len_of(&permission);
        let is_reader = permission.terms().right == Right::Read;
        let result = match is_reader {
            true => fiber::block_on(self.pool.write(&permission, 0, &[1])),
            false => fiber::block_on(self.pool.read(&permission, len, &mut [0])),
        };
        let is_right = match result {
            Err(Error::NotPermitted { .. }) => is_reader,
            Err(Error::OutOfRange { .. }) => !is_reader,
            Err(Error::Expired { .. }) => permission.left(self.now()).is_zero(),
            _ => false,
        };
        let was_posted = self.cx.with_oracle(|o| o.refusals(self.cx.client)) != refusals;
        if !is_right || was_posted {
            self.wrong(Invariant::Answers, |name| {
                format!("{name} misuses {permission:?} and gets {result:?}")
            });
        }
    }
}
