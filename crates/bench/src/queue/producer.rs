//! Inserts into a queue.

use pool::{Error, Grant, Object};
use verbs::Nic;

use super::held::Connection;
use super::layout::{
    self, ENTRY_BYTES, Entry, INSERTED, Link, NEXT, Payload, TAIL, entry_offset, new_segment,
};
use super::{Held, Metadata, STEPS_MAX, Segment, allocate_segment, damaged, has_ended};

/// READs of the next link before a producer links a segment of its own. The producer with the first
/// index behind the entries links at once; the others look as often for its segment, so that few
/// segments are allocated in vain.
const LOOKS: u32 = 64;

/// A member of a queue that inserts entries.
///
/// A producer makes one insert at a time. An insert whose future is dropped after its first poll
/// may be in the queue or not.
pub struct Producer<N: Nic> {
    metadata: Metadata<N>,
    segment: Option<Segment>,
    /// True if the tail was at the segment when this producer last looked.
    is_at_tail: bool,
}

impl<N: Nic> Producer<N> {
    /// Joins a queue.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`], [`Error::Protocol`] if the object is not a queue, errors of the
    /// pool.
    pub async fn open(connection: Connection<N>, queue: &Object) -> Result<Self, Error> {
        let metadata = Metadata::open(connection, queue).await?;
        Ok(Self { metadata, segment: None, is_at_tail: false })
    }

    /// Inserts an entry at the back.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Protocol`] if the queue is damaged; other errors of the
    /// pool. After an error the entry may be in the queue or not.
    pub async fn insert(&mut self, payload: &Payload) -> Result<(), Error> {
        let mut spare = None;
        let inserted = self.insert_with(payload, &mut spare).await;
        if inserted.is_err() {
            self.segment = None;
        }
        match spare {
            // Another producer has linked its segment instead.
            Some(spare) => {
                let freed = self.connection().pool.free_object(spare.object()).await;
                inserted.and(freed)
            }
            None => inserted,
        }
    }

    fn connection(&self) -> &Connection<N> {
        &self.metadata.connection
    }

    /// Inserts an entry. `spare` is a segment that is allocated and not linked.
    async fn insert_with(
        &mut self,
        payload: &Payload,
        spare: &mut Option<Held>,
    ) -> Result<(), Error> {
        let mut last = None;
        for _ in 0..STEPS_MAX {
            let inserted = match self.index().await {
                // Its errors say nothing about the segment: the entry may have been written.
                Ok((grant, index)) if index < self.metadata.shape.entries => {
                    if self.fill(&grant, index, payload).await? {
                        return Ok(());
                    }
                    continue;
                }
                Ok((_, index)) => {
                    let is_first = index == self.metadata.shape.entries;
                    self.go_on(is_first, payload, spare).await
                }
                Err(error) => Err(error),
            };
            last = match inserted {
                Ok(true) => return Ok(()),
                Ok(false) => None,
                Err(error @ Error::Busy { .. }) => Some(error),
                // The segment was freed: the tail is behind it.
                Err(Error::NoSuchObject { .. }) if self.segment.is_some() => {
                    self.segment = None;
                    None
                }
                Err(error) if has_ended(&error) => {
                    self.forget(spare);
                    Some(error)
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| damaged("inserting an entry", "no segment has a free entry")))
    }

    fn forget(&mut self, spare: &mut Option<Held>) {
        self.metadata.held.forget();
        self.segment.iter_mut().for_each(|segment| segment.held.forget());
        spare.iter_mut().for_each(Held::forget);
    }

    /// Takes an index of the last known segment. The index is behind the entries if the segment is
    /// full.
    async fn index(&mut self) -> Result<(Grant, u64), Error> {
        if self.segment.is_none() {
            self.segment = Some(self.metadata.segment(TAIL).await?);
            self.is_at_tail = true;
        }
        let connection = &self.metadata.connection;
        let segment = self.segment.as_mut().expect("it was found above");
        let grant = segment.held.open(connection).await?;
        let index = connection.pool.fetch_and_add(&grant, INSERTED, 1).await?;
        Ok((grant, index))
    }

    /// Writes the entry with an index that this producer has taken under `grant`. Returns false if
    /// the entry was skipped.
    async fn fill(&mut self, grant: &Grant, index: u64, payload: &Payload) -> Result<bool, Error> {
        let entry = layout::written(index, payload);
        let connection = self.connection();
        let was_over = grant.until <= connection.now();
        match connection.pool.write(grant, entry_offset(index), &entry).await {
            Ok(()) => Ok(true),
            Err(error) if has_ended(&error) => self.fill_late(index, &entry, !was_over).await,
            Err(error) => Err(error),
        }
    }

    /// Writes an entry after the permission under which its index was taken has ended. Returns
    /// false if the entry was skipped. `was_posted`: a WRITE has been posted.
    ///
    /// A consumer skips an entry only while no other permission for the segment is open. So an
    /// entry that is read under a permission and was not skipped is not skipped until this
    /// permission ends.
    async fn fill_late(
        &mut self,
        index: u64,
        entry: &[u8; ENTRY_BYTES],
        mut was_posted: bool,
    ) -> Result<bool, Error> {
        for _ in 0..STEPS_MAX {
            let connection = &self.metadata.connection;
            let segment = self.segment.as_mut().expect("an index of it was taken");
            segment.held.forget();
            let grant = match segment.held.open_surely(connection).await {
                // The segment was freed, so that its entries were taken or skipped.
                Err(Error::NoSuchObject { .. }) if !was_posted => {
                    self.segment = None;
                    return Ok(false);
                }
                Err(Error::Busy { .. }) => continue,
                opened => opened?,
            };
            let (at, mut found) = (entry_offset(index), [0; ENTRY_BYTES]);
            match connection.pool.read(&grant, at, &mut found).await {
                Err(error) if has_ended(&error) => continue,
                read => read?,
            }
            match Entry::of(index, &found) {
                Entry::Skipped => return Ok(false),
                Entry::Written(_) if found == *entry => return Ok(true),
                Entry::Written(_) => break,
                Entry::Empty => {}
            }
            was_posted = true;
            match connection.pool.write(&grant, at, entry).await {
                Ok(()) => return Ok(true),
                Err(error) if has_ended(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Err(damaged("inserting an entry", "another entry has its index"))
    }

    /// Goes on from a full segment. Returns true if the entry was inserted: with a new segment.
    async fn go_on(
        &mut self,
        is_first: bool,
        payload: &Payload,
        spare: &mut Option<Held>,
    ) -> Result<bool, Error> {
        for _ in 0..if is_first { 0 } else { LOOKS } {
            let connection = &self.metadata.connection;
            let segment = self.segment.as_mut().expect("a full segment");
            let grant = segment.held.open(connection).await?;
            if let Some(next) = Link::of(connection.word(&grant, NEXT).await?) {
                self.follow(next).await?;
                return Ok(false);
            }
        }
        self.link(payload, spare).await
    }

    /// Goes on to the next segment, and moves the tail if it is at the current one. So the
    /// producers that read a stale tail move it on.
    async fn follow(&mut self, next: Link) -> Result<(), Error> {
        let current = self.segment.as_ref().expect("a full segment").link;
        if self.is_at_tail {
            self.is_at_tail = self.metadata.advance(TAIL, current, next).await?;
        }
        self.leave_for(self.metadata.linked(next)).await;
        Ok(())
    }

    /// Makes `next` the current segment.
    async fn leave_for(&mut self, next: Segment) {
        let Connection { pool, revokes, .. } = &self.metadata.connection;
        let full = self.segment.replace(next);
        let permission = full.and_then(|mut full| full.held.take());
        if let (true, Some(permission)) = (revokes, permission) {
            // If this fails, the lease ends the permission.
            let _ = pool.revoke(&permission).await;
        }
    }

    /// Allocates a segment, writes the entry there, and links the segment behind the full one.
    /// Returns false if another producer has linked its segment before.
    async fn link(&mut self, payload: &Payload, spare: &mut Option<Held>) -> Result<bool, Error> {
        let connection = &self.metadata.connection;
        let current = self.segment.as_mut().expect("a full segment");
        let mut new = match spare.take() {
            Some(new) => new,
            None => allocate_segment(connection, &self.metadata.shape).await?,
        };
        let link = Link::to(new.object());
        let prepared = async {
            let grant = new.open(connection).await?;
            connection.pool.write(&grant, 0, &new_segment(current.link, payload)).await?;
            current.held.open(connection).await
        };
        let grant = match prepared.await {
            Ok(grant) => grant,
            Err(error) => {
                *spare = Some(new);
                return Err(error);
            }
        };
        match connection.pool.compare_and_swap(&grant, NEXT, 0, link.word()).await {
            Ok(0) => {}
            Ok(other) => {
                *spare = Some(new);
                let other = Link::of(other).expect("not zero");
                return self.follow(other).await.map(|()| false);
            }
            Err(error) => {
                // After any other error, the segment may be linked.
                if has_ended(&error) {
                    *spare = Some(new);
                }
                return Err(error);
            }
        }
        let full = current.link;
        self.leave_for(Segment { link, held: new }).await;
        // The entry is in the queue, and the tail may be stale.
        self.is_at_tail = self.metadata.advance(TAIL, full, link).await.unwrap_or(false);
        Ok(true)
    }
}
