//! The heap: allocation and frees, and the background work on chunks.

mod compaction;

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pool::GroupId;

use crate::classes::{Class, Classes};
use crate::directory::{ChunkId, Directory};
use crate::epoch::{Epochs, Guard};
use crate::error::Error;
use crate::place::Place;
use crate::returns::Returns;
use crate::source::ChunkSource;
use crate::state::{Chunk, SLICE, State};
use crate::stats::{ClassStats, Stats};

pub use compaction::ChunkUse;

/// A block: a place, and a length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// The first byte.
    pub place: Place,
    /// Length in bytes. An allocation returns the length of its class.
    pub bytes: u64,
}

/// Settings of a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Empty chunks that [`Heap::refill`] keeps in each group, so that allocations do not wait for
    /// a chunk. 0: each allocation that needs a chunk waits for it.
    pub reserve_chunks: usize,
    /// Empty chunks beyond which [`Heap::give_back`] frees chunks of a group: at least
    /// `reserve_chunks`. The difference keeps a chunk from going back and forth.
    pub reserve_chunks_max: usize,
}

impl Default for Settings {
    /// A reserve of two chunks in each group, and at most four.
    fn default() -> Self {
        Self { reserve_chunks: 2, reserve_chunks_max: 4 }
    }
}

impl Settings {
    /// No reserve: chunks are allocated when a block needs one, and go back when they are empty.
    pub const NO_RESERVE: Self = Self { reserve_chunks: 0, reserve_chunks_max: 0 };
}

/// Background work of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Chunks that [`Heap::refill`] would allocate.
    pub missing_chunks: usize,
    /// Chunks that [`Heap::give_back`] would free at once.
    pub surplus_chunks: usize,
    /// Blocks in limbo. [`Heap::give_back`] frees those that no reader can know.
    pub limbo_blocks: usize,
}

/// A group's lock, in cache lines of its own.
#[repr(align(128))]
struct Group<C>(Mutex<State<C>>);

/// A heap over the chunks of `S`. Any number of threads can use it.
pub struct Heap<S: ChunkSource> {
    source: S,
    settings: Settings,
    classes: Arc<Classes>,
    directory: Directory,
    epochs: Arc<Epochs>,
    groups: Box<[Group<S::Chunk>]>,
    returns: Mutex<Returns<S::Chunk>>,
}

impl<S: ChunkSource> Heap<S> {
    /// An empty heap over the chunks of `source`.
    ///
    /// # Errors
    /// [`Error::Setting`] if the chunk length of the source is no power of two from 64 bytes on, or
    /// the maximum of the reserve is below the reserve.
    pub fn new(source: S, settings: Settings) -> Result<Self, Error> {
        let setting = |setting, value, why| Error::Setting { setting, value, why };
        if settings.reserve_chunks_max < settings.reserve_chunks {
            let most = settings.reserve_chunks_max as u64;
            return Err(setting("reserve_chunks_max", most, "must be at least reserve_chunks"));
        }
        let chunk_bytes = source.chunk_bytes();
        let classes = Classes::new(chunk_bytes).ok_or_else(|| {
            setting("chunk_bytes", chunk_bytes, "must be a power of two from 64 bytes on")
        })?;
        let classes = Arc::new(classes);
        let group = |_| Group(Mutex::new(State::new(classes.clone())));
        let groups: Box<[_]> = (0..source.groups()).map(group).collect();
        Ok(Self {
            settings,
            directory: Directory::new(chunk_bytes),
            epochs: Arc::new(Epochs::new(groups.len())),
            groups,
            returns: Mutex::default(),
            classes,
            source,
        })
    }

    /// A heap that has `chunks`, in which the blocks of `used` are live. A block's length may be
    /// the length requested or the length of its class. [`Heap::give_back`] then frees the chunks
    /// without a block.
    ///
    /// # Errors
    /// [`Error::Used`] for a block that is in none of the chunks, cannot begin at its place, or
    /// overlaps another block; [`Error::BadChunk`] for a chunk that is listed twice. The chunks
    /// remain allocated then.
    pub fn rebuild(
        source: S,
        settings: Settings,
        chunks: impl IntoIterator<Item = S::Chunk>,
        used: impl IntoIterator<Item = Block>,
    ) -> Result<Self, Error> {
        let heap = Self::new(source, settings)?;
        for chunk in chunks {
            let group = heap.source.group(&chunk);
            let place = heap.checked_place(&chunk)?;
            let mut state = heap.state(group)?;
            heap.enter(group, &mut state, chunk, place)?;
        }
        for Block { place, bytes } in used {
            let wrong = |why| Error::Used { place, bytes, why };
            let class = heap.classes.class_of(bytes).ok_or_else(|| wrong("no block is as long"))?;
            let claim = |state: &mut State<_>, slot| state.claim(slot, place, class);
            let claimed = heap.with_chunk(place, claim);
            claimed.unwrap_or(Err("the heap has no chunk there")).map_err(wrong)?;
        }
        heap.groups.iter().for_each(|group| group.0.lock().finish_claims());
        Ok(heap)
    }

    /// The source of chunks.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The size classes.
    pub fn classes(&self) -> &Classes {
        &self.classes
    }

    /// The epochs, for guards that outlive a borrow of the heap.
    pub fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// Makes a guard, which keeps every block that is live now from being used again. Threads that
    /// pin at the same time should name different groups; the guard holds for all groups.
    pub fn pin(&self, group: GroupId) -> Guard<&Epochs> {
        self.epochs.pin(usize::from(group.0))
    }

    /// Allocates a block of at least `bytes` in chunks that `group` has. `None` if the group needs
    /// another chunk. The block has the bytes of its last owner.
    pub fn try_allocate(&self, group: GroupId, bytes: u64) -> Result<Option<Block>, Error> {
        let class = self.class_of(bytes)?;
        let place = self.state(group)?.allocate(class, &self.epochs);
        Ok(place.map(|place| self.block_of(place, class)))
    }

    /// Like [`Heap::try_allocate`], and allocates a chunk if the group needs one. Each waiting call
    /// allocates a chunk of its own; surplus chunks stay in the reserve.
    ///
    /// # Errors
    /// [`Error::Source`] if the source has no chunk, and no block was freed meanwhile.
    pub async fn allocate(&self, group: GroupId, bytes: u64) -> Result<Block, Error> {
        let class = self.class_of(bytes)?;
        if let Some(place) = self.state(group)?.allocate(class, &self.epochs) {
            return Ok(self.block_of(place, class));
        }
        match self.source.allocate(group).await {
            Ok(chunk) => {
                let place = self.adopt(group, chunk, |state| {
                    state.allocate(class, &self.epochs).expect("an empty chunk has a block")
                });
                Ok(self.block_of(place.await?, class))
            }
            Err(source) => match self.state(group)?.allocate(class, &self.epochs) {
                Some(place) => Ok(self.block_of(place, class)),
                None => Err(Error::Source { attempt: "allocating a chunk for a block", source }),
            },
        }
    }

    /// Frees a block that no index names any more. The block is used again when all guards that
    /// exist now are dropped.
    ///
    /// # Errors
    /// [`Error::NotLive`] if no live block begins at `place`.
    pub fn free(&self, place: Place) -> Result<(), Error> {
        let retire = |state: &mut State<_>, slot| state.retire(slot, place, &self.epochs);
        match self.with_chunk(place, retire) {
            Some(true) => Ok(()),
            _ => Err(Error::NotLive { place }),
        }
    }

    /// The live block that begins at `place`, with the length of its class.
    pub fn block(&self, place: Place) -> Option<Block> {
        let bytes = |state: &mut State<_>, slot| state.live_bytes_at(slot, place);
        self.with_chunk(place, bytes)?.map(|bytes| Block { place, bytes })
    }

    /// The chunk that has `place`, and the offset of `place` in it in bytes. A reader that holds a
    /// guard finds the chunk of every block that was linked when the guard was made.
    pub fn locate(&self, place: Place) -> Option<(S::Chunk, u64)> {
        let found = |state: &mut State<S::Chunk>, slot| {
            let chunk = state.chunk_at(slot, place)?;
            Some((chunk.handle.clone(), place.offset() - chunk.place.offset()))
        };
        self.with_chunk(place, found)?
    }

    /// The background work of `group`.
    pub fn pending(&self, group: GroupId) -> Result<Pending, Error> {
        let state = self.state(group)?;
        let (empty, settings) = (state.empty(), self.settings);
        Ok(Pending {
            missing_chunks: settings.reserve_chunks.saturating_sub(empty + state.coming),
            surplus_chunks: empty.saturating_sub(settings.reserve_chunks_max),
            limbo_blocks: state.limbo(),
        })
    }

    /// Allocates chunks until the reserve of `group` is complete. Returns their number.
    pub async fn refill(&self, group: GroupId) -> Result<usize, Error> {
        let mut chunks = 0;
        while let Some(_coming) = self.announce(group)? {
            let attempt = "allocating a chunk for the reserve";
            let chunk = self.source.allocate(group).await;
            let chunk = chunk.map_err(|source| Error::Source { attempt, source })?;
            self.adopt(group, chunk, |_| ()).await?;
            chunks += 1;
        }
        Ok(chunks)
    }

    /// Frees the blocks of `group` that no reader can know, and then the empty chunks beyond the
    /// maximum of the reserve. Returns the number of chunks freed.
    ///
    /// # Errors
    /// [`Error::Source`] if the source failed to free a chunk. The chunk counts as returning, and
    /// the next call tries again.
    pub async fn give_back(&self, group: GroupId) -> Result<usize, Error> {
        self.give_back_beyond(group, self.settings.reserve_chunks_max).await
    }

    /// Like [`Heap::give_back`], without a reserve.
    pub async fn give_back_all(&self, group: GroupId) -> Result<usize, Error> {
        self.give_back_beyond(group, 0).await
    }

    /// All chunks, without those on their way back to the source.
    pub fn chunks(&self) -> Vec<S::Chunk> {
        let of = |group: &Group<S::Chunk>| group.0.lock().handles();
        self.groups.iter().flat_map(of).collect()
    }

    /// The use of memory, summed over the groups. The groups are counted one after the other.
    pub fn stats(&self) -> Stats {
        let class =
            |class| ClassStats { block_bytes: self.classes.bytes(class), ..Default::default() };
        let mut stats = Stats {
            chunk_bytes: self.classes.chunk_bytes(),
            returning_chunks: self.returns.lock().count(),
            classes: self.classes.iter().map(class).collect(),
            ..Stats::default()
        };
        self.groups.iter().for_each(|group| group.0.lock().add_to(&mut stats));
        stats
    }

    /// Compares the counts of each group with a recount of its bitmaps, and each chunk with the
    /// directory. Holds a group's lock while it counts: for tests and diagnosis.
    pub fn audit(&self) -> Result<(), Error> {
        for (index, group) in self.groups.iter().enumerate() {
            let (state, group) = (group.0.lock(), index as u16);
            state.audit().map_err(|why| Error::Audit { group, why })?;
            for (slot, place) in state.places() {
                if self.directory.find(place) != Some(ChunkId { group, slot }) {
                    let why = format!("the directory does not have the chunk at {place}");
                    return Err(Error::Audit { group, why });
                }
            }
        }
        Ok(())
    }

    async fn give_back_beyond(&self, group: GroupId, keep: usize) -> Result<usize, Error> {
        self.collect(group)?;
        let mut chunks = 0;
        let retry = || self.returns.lock().next_retry();
        while let Some((id, chunk)) = retry() {
            self.return_chunk(id, chunk).await?;
            chunks += 1;
        }
        loop {
            let begun = self.begin_return(&mut *self.state(group)?, keep);
            let Some((id, chunk)) = begun else { return Ok(chunks) };
            self.return_chunk(id, chunk).await?;
            chunks += 1;
        }
    }

    /// Frees the blocks in limbo that no reader can know.
    fn collect(&self, group: GroupId) -> Result<(), Error> {
        self.epochs.advance_twice();
        while self.state(group)?.collect(&self.epochs, SLICE) == SLICE {}
        self.state(group)?.shrink();
        Ok(())
    }

    /// Takes an empty chunk out of the heap.
    fn begin_return(&self, state: &mut State<S::Chunk>, keep: usize) -> Option<(u64, S::Chunk)> {
        let Chunk { handle, place, .. } = state.remove_empty(keep)?;
        self.directory.remove(place);
        let id = self.returns.lock().begin(place, handle.clone());
        Some((id, handle))
    }

    async fn return_chunk(&self, id: u64, chunk: S::Chunk) -> Result<(), Error> {
        // If this future is dropped, the source executes the free nevertheless.
        let mut returning = Returning { returns: &self.returns, id, is_freed: true };
        let freed = self.source.free(chunk).await;
        returning.is_freed = freed.is_ok();
        freed.map_err(|source| Error::Source { attempt: "giving a chunk back", source })
    }

    /// Adds a new chunk to `group`, and then calls `then` under the same lock. A chunk that the
    /// heap cannot use goes back.
    async fn adopt<T>(
        &self,
        group: GroupId,
        chunk: S::Chunk,
        then: impl FnOnce(&mut State<S::Chunk>) -> T,
    ) -> Result<T, Error> {
        let adopted = self.checked_place(&chunk).and_then(|place| {
            if !self.returns.lock().arrived(place) {
                // The chunk must not be freed, because a free of the same chunk is in progress.
                let why = "the chunk came back while it was being freed again";
                return Ok(Err(Error::BadChunk { place: place.to_string(), why }));
            }
            let mut state = self.state(group)?;
            self.enter(group, &mut state, chunk.clone(), place)?;
            Ok(Ok(then(&mut state)))
        });
        match adopted {
            Ok(adopted) => adopted,
            Err(bad) => {
                // The first error is the cause; the source frees the chunk when it ends, at the
                // latest.
                let _ = self.source.free(chunk).await;
                Err(bad)
            }
        }
    }

    fn enter(
        &self,
        group: GroupId,
        state: &mut State<S::Chunk>,
        chunk: S::Chunk,
        place: Place,
    ) -> Result<(), Error> {
        let id = ChunkId { group: group.0, slot: state.next_slot() };
        if !self.directory.enter(place, id) {
            let why = "the heap has this chunk already";
            return Err(Error::BadChunk { place: place.to_string(), why });
        }
        state.add(chunk, place);
        Ok(())
    }

    /// The place of a chunk, if the heap can use it.
    fn checked_place(&self, chunk: &S::Chunk) -> Result<Place, Error> {
        let bad = |place, why| Error::BadChunk { place, why };
        let place = self.source.place(chunk).ok_or_else(|| {
            bad("no place".into(), "it lies before the first chunk, or too far behind it")
        })?;
        match self.directory.has_room(place) {
            true => Ok(place),
            false => Err(bad(
                place.to_string(),
                "the offset is no multiple of a chunk, or is beyond 2^24 chunks",
            )),
        }
    }

    /// Counts a chunk that is about to be allocated, if the reserve is incomplete.
    fn announce(&self, group: GroupId) -> Result<Option<Coming<'_, S::Chunk>>, Error> {
        let mut state = self.state(group)?;
        if state.empty() + state.coming >= self.settings.reserve_chunks {
            return Ok(None);
        }
        state.coming += 1;
        Ok(Some(Coming(&self.groups[usize::from(group.0)].0)))
    }

    fn class_of(&self, bytes: u64) -> Result<Class, Error> {
        let too_long = || Error::TooLong { bytes, most: self.classes.slab_bytes() };
        self.classes.class_of(bytes).ok_or_else(too_long)
    }

    fn block_of(&self, place: Place, class: Class) -> Block {
        Block { place, bytes: self.classes.bytes(class) }
    }

    fn state(&self, group: GroupId) -> Result<MutexGuard<'_, State<S::Chunk>>, Error> {
        let groups = self.groups.len() as u16;
        let known = self.groups.get(usize::from(group.0));
        known.map(|known| known.0.lock()).ok_or(Error::NoGroup { group: group.0, groups })
    }

    /// Calls `f` with the state of the group that has `place`, and the slot of the chunk.
    fn with_chunk<T>(
        &self,
        place: Place,
        f: impl FnOnce(&mut State<S::Chunk>, u32) -> T,
    ) -> Option<T> {
        let id = self.directory.find(place)?;
        let mut state = self.groups.get(usize::from(id.group))?.0.lock();
        // The chunk may have gone back since.
        state.chunk_at(id.slot, place)?;
        Some(f(&mut state, id.slot))
    }
}

/// Counts down when the chunk has come, or its allocation has failed.
struct Coming<'a, C>(&'a Mutex<State<C>>);

impl<C> Drop for Coming<'_, C> {
    fn drop(&mut self) {
        self.0.lock().coming -= 1;
    }
}

/// Ends a return, also if its future is dropped.
struct Returning<'a, C: Clone> {
    returns: &'a Mutex<Returns<C>>,
    id: u64,
    is_freed: bool,
}

impl<C: Clone> Drop for Returning<'_, C> {
    fn drop(&mut self) {
        self.returns.lock().finish(self.id, self.is_freed);
    }
}
