//! Entries taken from a queue in order, skipped entries, and segments freed.

use std::time::Duration;

use pool::{Error, LeaseTerms, Object};
use verbs::Nic;

use super::held::Connection;
use super::layout::{
    self, ENTRY_BYTES, Entry, HEAD, HEADER_BYTES, Header, Link, PREVIOUS, Payload, TAIL, TAKEN,
    check_offset, entry_offset,
};
use super::{Held, Metadata, STEPS_MAX, Segment, damaged, has_ended};

/// A member of a queue that takes entries from the front. A queue may have several consumers.
pub struct Consumer<N: Nic> {
    metadata: Metadata<N>,
    segment: Option<Segment>,
    /// Time for which an index is waited for before its entry is skipped.
    patience: Duration,
    hole: Option<Hole>,
}

/// An entry whose index was given out and that is not written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Hole {
    segment: Link,
    index: u64,
    /// When the consumer found it.
    since: Duration,
}

/// Result of a step.
enum Step {
    /// These entries were taken.
    Taken(Vec<Payload>),
    /// Another step may find entries.
    Again,
    /// No entry is there.
    Empty,
}

impl<N: Nic> Consumer<N> {
    /// Joins a queue. An entry that is not written `patience` after its index was found to be given
    /// out is skipped.
    ///
    /// # Errors
    /// As [`Producer::open`](super::Producer::open).
    pub async fn open(
        connection: Connection<N>,
        queue: &Object,
        patience: Duration,
    ) -> Result<Self, Error> {
        let metadata = Metadata::open(connection, queue).await?;
        Ok(Self { metadata, segment: None, patience, hole: None })
    }

    /// Takes entries from the front: at least one and at most `most`, or none if the queue is empty
    /// or its first entry is not written yet.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the queue is damaged; other errors of the pool. If a CAS of this
    /// operation got no answer, up to `most` entries may be lost with the error. The same holds if
    /// the consumer ends before this function returns.
    pub async fn take(&mut self, most: usize) -> Result<Vec<Payload>, Error> {
        let mut last = None;
        for _ in 0..STEPS_MAX {
            last = match self.step(most).await {
                Ok(Step::Taken(entries)) if !entries.is_empty() => return Ok(entries),
                Ok(Step::Taken(_) | Step::Again) => None,
                // Another consumer has the segment exclusively.
                Ok(Step::Empty) | Err(Error::Busy { .. }) => return Ok(Vec::new()),
                // The segment was freed: the head is behind it.
                Err(Error::NoSuchObject { .. }) if self.segment.is_some() => {
                    self.segment = None;
                    None
                }
                Err(error) if has_ended(&error) => {
                    self.metadata.held.forget();
                    self.segment.iter_mut().for_each(|segment| segment.held.forget());
                    Some(error)
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| damaged("taking an entry", "its links lead to no entry")))
    }

    async fn step(&mut self, most: usize) -> Result<Step, Error> {
        if self.segment.is_none() {
            self.segment = Some(self.metadata.segment(HEAD).await?);
        }
        let (entries, connection) = (self.metadata.shape.entries, &self.metadata.connection);
        let segment = self.segment.as_mut().expect("it was found above");
        let mut grant = segment.held.open(connection).await?;
        let mut header = [0; HEADER_BYTES];
        connection.pool.read(&grant, 0, &mut header).await?;
        let header = Header::of(&header);
        if let Some(previous) = header.previous {
            Self::free(connection, &self.metadata.shape.segment(previous)).await?;
            grant = segment.held.open(connection).await?;
            connection.pool.compare_and_swap(&grant, PREVIOUS, previous.word(), 0).await?;
        }
        if header.taken >= entries {
            return match header.next {
                Some(next) => self.pass(next).await.map(|()| Step::Again),
                None => Ok(Step::Empty),
            };
        }
        let there = header.inserted.min(entries).saturating_sub(header.taken);
        let read = there.min(most as u64);
        if read == 0 {
            return Ok(Step::Empty);
        }
        let mut bytes = vec![0; read as usize * ENTRY_BYTES];
        connection.pool.read(&grant, entry_offset(header.taken), &mut bytes).await?;
        let (mut taken, mut end) = (Vec::new(), header.taken);
        for bytes in bytes.as_chunks::<ENTRY_BYTES>().0 {
            match Entry::of(end, bytes) {
                Entry::Written(payload) => taken.push(payload),
                Entry::Skipped => {}
                Entry::Empty => break,
            }
            end += 1;
        }
        if end == header.taken {
            return self.wait_for(end).await;
        }
        let was = connection.pool.compare_and_swap(&grant, TAKEN, header.taken, end).await?;
        // Otherwise another consumer has taken them.
        Ok(if was == header.taken { Step::Taken(taken) } else { Step::Again })
    }

    /// Frees a segment that another member may have freed already.
    async fn free(connection: &Connection<N>, segment: &Object) -> Result<(), Error> {
        match connection.pool.free_object(segment).await {
            Ok(()) | Err(Error::NoSuchObject { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Goes on from a segment of which all entries are taken. The tail is moved before the head, so
    /// that it never is at a segment that may be freed.
    async fn pass(&mut self, next: Link) -> Result<(), Error> {
        let current = self.segment.as_ref().expect("a segment without entries").link;
        self.metadata.advance(TAIL, current, next).await?;
        self.metadata.advance(HEAD, current, next).await?;
        // The head may be further on already.
        self.segment = None;
        Ok(())
    }

    /// Handles an entry whose index was given out and that is not written.
    async fn wait_for(&mut self, index: u64) -> Result<Step, Error> {
        let segment = self.segment.as_ref().expect("the segment of the entry").link;
        let now = self.metadata.connection.now();
        match self.hole {
            Some(hole) if (hole.segment, hole.index) == (segment, index) => {
                if now.saturating_sub(hole.since) < self.patience {
                    return Ok(Step::Empty);
                }
                self.hole = None;
                self.skip(index).await.map(|()| Step::Again)
            }
            _ => {
                self.hole = Some(Hole { segment, index, since: now });
                Ok(Step::Empty)
            }
        }
    }

    /// Skips the entries from `first` on whose index was given out and that are not written, while
    /// no other permission for the segment is open.
    async fn skip(&mut self, first: u64) -> Result<(), Error> {
        let (connection, shape) = (&self.metadata.connection, self.metadata.shape);
        let pool = &connection.pool;
        let segment = self.segment.as_mut().expect("the segment of the entry");
        // It would conflict with the exclusive permission.
        if let Some(permission) = segment.held.take() {
            pool.revoke(&permission).await?;
        }
        let terms = LeaseTerms::exclusive(connection.lease);
        let mut exclusive = Held::new(*segment.held.object(), terms);
        let grant = exclusive.open_surely(connection).await?;
        let skipped = async {
            let mut bytes = vec![0; shape.segment_bytes() as usize];
            pool.read(&grant, 0, &mut bytes).await?;
            let (header, entries) = bytes.split_at(HEADER_BYTES);
            let header = Header::of(header.try_into().expect("the length of a header"));
            let end = header.inserted.min(shape.entries);
            for (index, entry) in (0..end).zip(entries.as_chunks::<ENTRY_BYTES>().0) {
                if index >= first && Entry::of(index, entry) == Entry::Empty {
                    pool.write(&grant, check_offset(index), &layout::skipped()).await?;
                }
            }
            Ok(())
        };
        let skipped = skipped.await;
        let permission = exclusive.take().expect("it was acquired above");
        let revoked = pool.revoke(&permission).await;
        skipped.and(revoked)
    }
}
