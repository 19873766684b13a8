//! Operations that read one key.

use super::look::{Among, Hit, Want};
use super::{Key, Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::reach::Reach;
use crate::store::pieces;
use crate::store::trips::Operation;

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Reads a value. `None`: the key is not there.
    pub async fn get(&self, db: u8, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let mut value = Vec::new();
        Ok(self.get_into(db, key, &mut value).await?.map(|_| value))
    }

    /// Appends a value to `value`. Returns the expiry (0: none). `None`: the key is not there.
    pub async fn get_into(
        &self,
        db: u8,
        key: &[u8],
        value: &mut Vec<u8>,
    ) -> Result<Option<u64>, Error> {
        let key = self.key(db, key)?;
        let op = self.begin(Operation::Get).await?;
        let mut buffer = self.buffers.take();
        let Some(hit) = self.find(&op, &key, Want::Value, &mut buffer).await? else {
            return Ok(None);
        };
        let block = self.block(&hit, &buffer)?;
        pieces::load(self, &op.trip, hit.word.place, &block, value).await?;
        Ok(Some(hit.head.expiry))
    }

    /// Tests whether a key is there.
    pub async fn exists(&self, db: u8, key: &[u8]) -> Result<bool, Error> {
        Ok(self.expiry(db, key).await?.is_some())
    }

    /// The expiry of a key in milliseconds since 1970; 0: none. `None`: the key is not there.
    pub async fn expiry(&self, db: u8, key: &[u8]) -> Result<Option<u64>, Error> {
        let key = self.key(db, key)?;
        let op = self.begin(Operation::Exists).await?;
        let mut buffer = self.buffers.take();
        let hit = self.find(&op, &key, Want::Presence, &mut buffer).await?;
        Ok(hit.map(|hit| hit.head.expiry))
    }

    /// Looks for a key that has not expired.
    async fn find(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        want: Want,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Hit>, Error> {
        let Some(seen) = self.look(op, key, false, None).await? else { return Ok(None) };
        let among = Among { view: &seen.view, tentative: false, known: &[] };
        let hits = self.search(op, key, want, among, buffer).await?;
        let now = self.environment.now();
        Ok(hits.into_iter().next().filter(|hit| !hit.head.is_expired(now)))
    }
}
