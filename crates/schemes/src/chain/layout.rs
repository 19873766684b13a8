//! Memory that the chains work on: the MW table, the free queue, the steering table and the
//! counters (OneSidedMW §3.1, §4.1). Words that feed WQE fields are big-endian.
//!
//! An entry of the table is a patch image: its bytes stand in the order in which the chains' READs
//! scatter them over the fields of later WQEs. G windows, W = 1 or 2 tag words (4 windows each):
//!
//! ```text
//! entry i at table + 256 i
//!   0  queue value: the address of T; the free queue holds this value         8   |
//!   8  reply to a free: entry index (4), status FREED (4)                     8   | read by
//!  16  chunk address                                                          8   | the free
//!  24  address of OWN                                                         8   | chain,
//!  32  key index of each window, 3 bytes each, 6 places                      18   | from here
//!  50  zero                                                                   6   |
//!  56  T: tag words; each: 4 windows' current tags, then their next tags    8 W   |    | read by
//!      per window: opcode (1), key index (3), start (8), KLM address (8)   20 G        | the
//!      address of each tag word                                             8 W        | alloc
//!      address of OWN                                                         8        | chain,
//!      grant: chunk address (8), entry index (3), status (1),                30        | from T
//!             key index of each window (18)                                            |
//! 248  OWN: owner_id of the compute node, 0 if free                           8
//! ```
//!
//! Entry N, beyond the chunks, is the null entry: its window opcodes are NOP, its status is EMPTY.
//!
//! ```text
//! free queue: S slots of 8 bytes, S a power of two, at an address that is a multiple of 8 S
//!   a slot holds a queue value, or 0
//! words:  +0 head: address of the next slot to take    +64 avail: address in the steering table
//! steering table: P rows of 64 bytes, P a power of two, at a multiple of 64 P
//!   `avail` counts permits: it points at row "permits"; row r steers a request that read r:
//!   0 word to add to: head, or avail (8)   8 addend (8)   16 boundary (8)
//!   24 opcode: masked CAS, or NOP (1)      25 address of the null entry's T (8)
//!   rows 1 to N: "take a slot"; all other rows: "return the permit and answer EMPTY"
//! ```

use std::ops::Range;

use scheme::index::{EntryId, IndexRange};
use scheme::{Error, MAX_GROUP};
use verbs::wqe::opcode;
use verbs::{Access, DmaMemory, Key, MemoryRegion, Nic};

/// Bytes from one entry to the next. A free names an entry by its index, three bytes that the chain
/// puts over bytes 4 to 6 of the table's address: the stride must be 256, and the table must start
/// where those bytes are zero.
pub const ENTRY_BYTES: usize = 256;
/// Maximum number of entries, including the null entry: the index has three bytes.
pub const MAX_ENTRIES: u64 = 1 << 24;
/// Alignment of the table's address: entry indices replace address bits 8 to 31.
const TABLE_ALIGN: u64 = 1 << 32;

/// Offsets within an entry.
pub mod entry {
    /// The value that the free queue holds for this entry.
    pub const QUEUE_VALUE: usize = 0;
    /// The reply to a free.
    pub const FREE_REPLY: usize = 8;
    /// Address of the chunk.
    pub const CHUNK: usize = 16;
    /// Address of OWN.
    pub const OWNER_ADDR: usize = 24;
    /// Key indices of the windows.
    pub const KEYS: usize = 32;
    /// Bytes of [`KEYS`], and of the key indices in a grant.
    pub const KEYS_BYTES: usize = 3 * scheme::MAX_GROUP;
    /// T: the offset at which the alloc chain starts to read.
    pub const T: usize = 56;
    /// `owner_id`.
    pub const OWN: usize = 248;
    /// Bytes of a window's image.
    pub const IMAGE_BYTES: usize = 20;
    /// Bytes of the grant.
    pub const GRANT_BYTES: usize = 30;
}

/// Bytes that a chain reads of a row of the steering table.
pub const STEER_BYTES: usize = 33;
/// Bytes from one row of the steering table to the next.
pub const STEER_STRIDE: u64 = 64;
/// Offset of `avail` in the words, away from `head`'s cache line.
pub const AVAIL: usize = 64;

/// Layout of the reply to an allocation: the entry's grant, then the tag words from before this
/// allocation's bind advanced them.
pub mod reply {
    /// Chunk address.
    pub const CHUNK: usize = 0;
    /// Entry index, 3 bytes.
    pub const ENTRY: usize = 8;
    /// Status.
    pub const STATUS: usize = 11;
    /// Key indices, 3 bytes each.
    pub const KEYS: usize = 12;
    /// Tag words.
    pub const TAGS: usize = 32;
    /// Bytes of a reply to an allocation.
    pub const BYTES: usize = 48;
    /// Offset of the status in the reply to a free (4 bytes).
    pub const FREE_STATUS: usize = 4;
    /// Bytes of a reply to a free.
    pub const FREE_BYTES: usize = 8;
}

/// Status codes in replies.
pub mod status {
    /// No reply yet.
    pub const PENDING: u8 = 0;
    /// A chunk was allocated.
    pub const GRANTED: u8 = 1;
    /// There is no free chunk.
    pub const EMPTY: u8 = 2;
    /// The chunk was freed.
    pub const FREED: u8 = 3;
    /// The free was refused: the sender does not own the chunk.
    pub const REFUSED: u8 = 4;
    /// The free was not executed because an earlier free was refused: resend it.
    pub const AGAIN: u8 = 5;
}

/// Offset of an entry in the MW table.
pub const fn table_offset(entry: EntryId) -> usize {
    entry.as_usize() * ENTRY_BYTES
}

/// The index by which a request or a grant names an entry.
pub const fn entry_index(entry: EntryId) -> [u8; 3] {
    let [_, index @ ..] = entry.raw().to_be_bytes();
    index
}

/// The entry that the word at [`reply::ENTRY`] of a grant names: its index, then the status.
pub const fn granted_entry(word: u32) -> EntryId {
    EntryId::new(word >> 8)
}

/// Sizes that determine the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of chunks.
    pub chunks: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Windows of a group, the guard included.
    pub group: usize,
    /// Maximum number of requests in flight, over all clients.
    pub in_flight: u32,
    /// True: the layout of scheme `onesidedmw-paper`. The tags of keys never change, an entry ends
    /// with the tags in place of their addresses, and a slot of the free queue has a second word,
    /// its own address. No permits are taken.
    pub published: bool,
}

impl Shape {
    /// All entries but the null entry.
    pub fn entries(&self) -> Range<EntryId> {
        EntryId::new(0)..self.null_entry()
    }

    /// The null entry, beyond the chunks.
    pub fn null_entry(&self) -> EntryId {
        EntryId::new(self.chunks)
    }

    /// Tag words of an entry.
    pub fn tag_words(&self) -> usize {
        self.group.div_ceil(4)
    }

    /// Offset of the window images in an entry.
    pub fn images(&self) -> usize {
        entry::T + 8 * self.tag_words()
    }

    /// Offset of the tag words' addresses in an entry.
    fn tag_addrs(&self) -> usize {
        self.images() + entry::IMAGE_BYTES * self.group
    }

    /// Slots of the free queue: one for every entry and one for every push in flight.
    pub fn slots(&self) -> u32 {
        (self.chunks + self.in_flight + 16).next_power_of_two()
    }

    /// Bytes of a slot of the free queue.
    pub fn slot_bytes(&self) -> u64 {
        if self.published { 16 } else { 8 }
    }

    /// Offset of a slot in the free queue. Slots beyond the last wrap around.
    pub fn slot_offset(&self, slot: usize) -> usize {
        slot % self.slots() as usize * self.slot_bytes() as usize
    }

    /// Bytes of the grant in an entry.
    pub fn grant_bytes(&self) -> usize {
        if self.published { reply::BYTES } else { entry::GRANT_BYTES }
    }

    /// Number of addresses of tag words in an entry.
    pub fn tag_addresses(&self) -> usize {
        if self.published { 0 } else { self.tag_words() }
    }

    /// The tag that a bind assigns to a window whose tag is `tag`.
    fn next_tag(&self, tag: u8) -> u8 {
        if self.published { tag } else { tag.wrapping_add(1) }
    }

    /// Rows of the steering table: one for every permit count, and one for every request that
    /// overdraws the permits.
    pub fn rows(&self) -> u32 {
        (self.chunks + self.in_flight + 2).next_power_of_two()
    }

    /// Boundary bit of additions to `head`: the address wraps around within the free queue.
    pub fn head_boundary(&self) -> u64 {
        self.slots() as u64 * self.slot_bytes() / 2
    }

    /// Boundary bit of additions to `avail`.
    pub fn avail_boundary(&self) -> u64 {
        self.rows() as u64 * STEER_STRIDE / 2
    }

    /// Addend for `avail` that takes a permit: -64 within the field.
    pub fn take_permit(&self) -> u64 {
        self.rows() as u64 * STEER_STRIDE - STEER_STRIDE
    }
}

/// The memory that the chains work on, and its registrations.
///
/// The *data* PD holds chunks, windows and the workers' own side. Keys of the *metadata* PD give
/// the right to change metadata. Only W' and F', the loopback peers of the workers, are in the
/// metadata PD, so no client's QP can use its keys.
#[derive(Clone)]
pub struct Memory<N: Nic> {
    /// The sizes.
    pub shape: Shape,
    /// Chunks, registered in the data PD: windows are bound to this MR. It has no remote rights of
    /// its own.
    pub chunks: N::Mr,
    /// Chunks, registered in the metadata PD: for clearing.
    pub chunks_clear: N::Mr,
    /// MW table.
    pub table: N::Mr,
    /// Free queue.
    pub queue: N::Mr,
    /// `head` and `avail`.
    pub words: N::Mr,
    /// Steering table.
    pub steer: N::Mr,
    /// A chunk of zeros, in the data PD.
    pub zeros: N::Mr,
    /// Destination of unused results, in the data PD.
    pub dump: N::Mr,
}

/// Bytes of the dump.
pub const DUMP_BYTES: usize = 64;

impl<N: Nic> Memory<N> {
    /// Allocates and registers all the memory, and initializes the table, the queue and the
    /// steering table. `windows` holds the keys of all chunks' windows, `shape.group` per chunk;
    /// the null entry has none. Free chunks among the first `kept` bytes keep their pages.
    pub fn new(
        nic: &N,
        shape: Shape,
        data: &N::Pd,
        metadata: &N::Pd,
        windows: &[Key],
        kept: usize,
    ) -> Result<Self, Error> {
        assert_eq!(windows.len(), shape.chunks as usize * shape.group);
        let (slots, rows) = (shape.slots() as usize, shape.rows() as usize);
        let chunk_bytes = shape.chunk_bytes as usize;
        let table_bytes = (shape.chunks as usize + 1) * ENTRY_BYTES;
        let remote_word = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let chunk_memory =
            nic.alloc_thin(shape.chunks as usize * chunk_bytes, chunk_bytes, kept)?;
        let table = aligned(nic, table_bytes, TABLE_ALIGN)?;
        let queue_bytes = slots as u64 * shape.slot_bytes();
        let queue = aligned(nic, queue_bytes as usize, queue_bytes)?;
        let steer = aligned(nic, rows * 64, rows as u64 * STEER_STRIDE)?;
        let memory = Self {
            shape,
            chunks: nic.reg_mr(data, &chunk_memory, Access::LOCAL_ALL)?,
            chunks_clear: nic.reg_mr(metadata, &chunk_memory, Access::REMOTE_WRITE)?,
            table: nic.reg_mr(metadata, &table, remote_word)?,
            queue: nic.reg_mr(metadata, &queue, remote_word | Access::LOCAL_WRITE)?,
            words: nic.reg_mr(metadata, &nic.alloc_dma(4096)?, Access::REMOTE_ATOMIC)?,
            steer: nic.reg_mr(metadata, &steer, Access::REMOTE_READ)?,
            zeros: nic.reg_mr(data, &nic.alloc_zeros(chunk_bytes)?, Access::LOCAL_READ)?,
            dump: nic.reg_mr(data, &nic.alloc_dma(DUMP_BYTES)?, Access::LOCAL_ALL)?,
        };
        for i in shape.entries().iter() {
            let first = i.as_usize() * shape.group;
            memory.write_entry(i, Some(&windows[first..first + shape.group]));
            let at = shape.slot_offset(i.as_usize());
            memory.queue.memory().store_be64(at, memory.queue_value(i));
        }
        if shape.published {
            for at in (0..slots).map(|slot| shape.slot_offset(slot)) {
                let addr = memory.queue.memory().addr() + at as u64;
                memory.queue.memory().store_be64(at + 8, addr);
            }
        }
        memory.write_entry(shape.null_entry(), None);
        memory.words.memory().store_be64(0, memory.queue.memory().addr());
        memory.words.memory().store_be64(AVAIL, steer.addr() + STEER_STRIDE * shape.chunks as u64);
        memory.write_steering();
        Ok(memory)
    }

    /// Address of the first byte of the chunk of entry `i`.
    pub fn chunk_addr(&self, i: EntryId) -> u64 {
        self.chunks.memory().addr() + u64::from(i.raw()) * self.shape.chunk_bytes
    }

    /// Address of entry `i`.
    pub fn entry_addr(&self, i: EntryId) -> u64 {
        self.table.memory().addr() + table_offset(i) as u64
    }

    /// Value that the free queue holds for entry `i`.
    pub fn queue_value(&self, i: EntryId) -> u64 {
        self.entry_addr(i) + entry::T as u64
    }

    /// The entry that `queue_value` names; `None` if the value names no entry.
    pub fn entry_of(&self, queue_value: u64) -> Option<EntryId> {
        let offset = queue_value.checked_sub(self.queue_value(EntryId::new(0)))?;
        let i = offset / ENTRY_BYTES as u64;
        (offset % ENTRY_BYTES as u64 == 0 && i < self.shape.chunks as u64)
            .then_some(EntryId::new(i as u32))
    }

    /// `owner_id` of entry `i`, as the chains last wrote it.
    pub fn owner(&self, i: EntryId) -> u64 {
        self.table.memory().load_be64(table_offset(i) + entry::OWN)
    }

    /// Number of entries with this `owner_id`.
    pub fn owned(&self, owner: u64) -> u64 {
        self.shape.entries().iter().filter(|i| self.owner(*i) == owner).count() as u64
    }

    /// Current permits: free entries minus requests that are taking one. Negative while requests
    /// overdraw the permits.
    pub fn permits(&self) -> i64 {
        let rows = self.shape.rows() as i64;
        let row = (self.words.memory().load_be64(AVAIL) - self.steer.memory().addr()) as i64
            / STEER_STRIDE as i64;
        if row > rows - 1 - self.shape.in_flight as i64 { row - rows } else { row }
    }

    /// The queue values from the head of the free queue on, and the number of filled slots.
    pub fn queued(&self) -> (Vec<u64>, usize) {
        let slots = self.shape.slots() as usize;
        let head = self.head() as usize;
        let run = (0..slots).map(|i| self.slot_value(head + i)).take_while(|&v| v != 0).collect();
        (run, (0..slots).filter(|&i| self.slot_value(i) != 0).count())
    }

    /// The queue value in a slot; 0 if the slot is empty. Slots beyond the last wrap around.
    pub fn slot_value(&self, slot: usize) -> u64 {
        self.queue.memory().load_be64(self.shape.slot_offset(slot))
    }

    /// The slot at the head of the free queue.
    fn head(&self) -> u64 {
        (self.words.memory().load_be64(0) - self.queue.memory().addr()) / self.shape.slot_bytes()
    }

    /// Distance from the head to the tail after `pushes` pushes (modulo 2^24), in the published
    /// layout. Negative if the head has passed empty slots.
    pub fn distance_to_tail(&self, pushes: u32) -> i64 {
        let slots = i64::from(self.shape.slots());
        let tail = i64::from(self.shape.chunks) + i64::from(pushes);
        let ahead = (tail - self.head() as i64).rem_euclid(slots);
        if ahead > i64::from(self.shape.chunks) { ahead - slots } else { ahead }
    }

    /// Takes, from the CPU, the value in the free queue's slot at `addr`. The slot must be one that
    /// the head has passed and that no chain will swap any more. Returns 0 for an invalid address.
    pub fn take_slot(&self, addr: u64) -> u64 {
        let queue = self.queue.memory();
        let at = addr.wrapping_sub(queue.addr());
        if at >= queue.len() as u64 || !at.is_multiple_of(8) {
            return 0;
        }
        let value = queue.load_be64(at as usize);
        queue.store_be64(at as usize, 0);
        value
    }

    /// Clears the owner of entry `i`, so that the CPU may release the entry.
    pub fn disown(&self, i: EntryId) {
        self.table.memory().store_be64(table_offset(i) + entry::OWN, 0);
    }

    /// Writes the current tag of window `j` of entry `i`, and the tag that its next bind assigns.
    pub fn set_tag(&self, i: EntryId, j: usize, tag: u8) {
        let at = table_offset(i) + tag_offset(j);
        self.table.memory().write(at, &[tag]);
        self.table.memory().write(at + 4, &[self.shape.next_tag(tag)]);
    }

    /// The current keys (index and tag) of the windows of entry `i`.
    pub fn window_keys(&self, i: EntryId) -> impl Iterator<Item = Key> + '_ {
        let base = table_offset(i);
        (0..self.shape.group).map(move |j| {
            let mut b = [0u8; 4];
            self.table.memory().read(base + entry::KEYS + 3 * j, &mut b[..3]);
            self.table.memory().read(base + tag_offset(j), &mut b[3..]);
            Key(u32::from_be_bytes(b))
        })
    }

    fn write_entry(&self, i: EntryId, windows: Option<&[Key]>) {
        let shape = &self.shape;
        let chunk = if windows.is_some() { self.chunk_addr(i) } else { 0 };
        let own = self.entry_addr(i) + entry::OWN as u64;
        let mut e = [0u8; ENTRY_BYTES];
        put64(&mut e, entry::QUEUE_VALUE, self.queue_value(i));
        put64(&mut e, entry::FREE_REPLY, u64::from(i.raw()) << 32 | status::FREED as u64);
        put64(&mut e, entry::CHUNK, chunk);
        put64(&mut e, entry::OWNER_ADDR, own);
        let grant = shape.tag_addrs() + 8 * shape.tag_addresses() + 8;
        for j in 0..shape.group {
            let key = windows.map_or(Key::default(), |w| w[j]);
            let index = &key.0.to_be_bytes()[..3];
            e[entry::KEYS + 3 * j..][..3].copy_from_slice(index);
            e[tag_offset(j)] = key.tag();
            e[tag_offset(j) + 4] = shape.next_tag(key.tag());
            let image = shape.images() + entry::IMAGE_BYTES * j;
            e[image] = if windows.is_some() { opcode::UMR } else { opcode::NOP };
            e[image + 1..image + 4].copy_from_slice(index);
            put64(&mut e, image + 4, chunk);
            put64(&mut e, image + 12, chunk);
            e[grant + reply::KEYS + 3 * j..][..3].copy_from_slice(index);
            if shape.published {
                let tags = grant + reply::TAGS + tag_offset(j) - entry::T;
                (e[tags], e[tags + 4]) = (key.tag(), key.tag());
            }
        }
        for w in 0..shape.tag_addresses() {
            let word = self.entry_addr(i) + (entry::T + 8 * w) as u64;
            put64(&mut e, shape.tag_addrs() + 8 * w, word);
        }
        put64(&mut e, grant - 8, own);
        put64(&mut e, grant + reply::CHUNK, chunk);
        e[grant + reply::ENTRY..grant + reply::STATUS].copy_from_slice(&entry_index(i));
        e[grant + reply::STATUS] = if windows.is_some() { status::GRANTED } else { status::EMPTY };
        assert!(grant + shape.grant_bytes() <= entry::OWN, "an entry does not fit its stride");
        self.table.memory().write(table_offset(i), &e);
    }

    fn write_steering(&self) {
        let words = self.words.memory().addr();
        let shape = &self.shape;
        let null = self.queue_value(shape.null_entry());
        for row in 0..shape.rows() {
            let take = (1..=shape.chunks).contains(&row);
            let (word, add, boundary, op) = if take {
                (words, 8, shape.head_boundary(), opcode::ATOMIC_MASKED_CS)
            } else {
                (words + AVAIL as u64, STEER_STRIDE, shape.avail_boundary(), opcode::NOP)
            };
            let mut r = [0u8; STEER_BYTES];
            put64(&mut r, 0, word);
            put64(&mut r, 8, add);
            put64(&mut r, 16, boundary);
            r[24] = op;
            put64(&mut r, 25, null);
            self.steer.memory().write(row as usize * STEER_STRIDE as usize, &r);
        }
    }
}

/// Offset in an entry of window `j`'s current tag; the next tag is 4 bytes further.
pub fn tag_offset(j: usize) -> usize {
    entry::T + 8 * (j / 4) + j % 4
}

/// Memory whose address is a multiple of `align`.
pub fn aligned<N: Nic>(nic: &N, bytes: usize, align: u64) -> Result<DmaMemory, Error> {
    let whole = nic.alloc_dma(bytes + align as usize)?;
    let skip = whole.addr().next_multiple_of(align) - whole.addr();
    Ok(whole.slice(skip as usize, bytes).expect("the alignment was allocated too"))
}

fn put64(b: &mut [u8], at: usize, v: u64) {
    b[at..at + 8].copy_from_slice(&v.to_be_bytes());
}

const _: () = {
    assert!(entry::KEYS_BYTES == 3 * MAX_GROUP);
    assert!(entry::T.is_multiple_of(8), "masked FAA works on aligned words");
    assert!(entry::OWN.is_multiple_of(8));
    let tags = 8 * MAX_GROUP.div_ceil(4);
    let full = entry::T + tags + entry::IMAGE_BYTES * MAX_GROUP + tags + 8 + entry::GRANT_BYTES;
    assert!(full <= entry::OWN);
    assert!(reply::KEYS + entry::KEYS_BYTES <= reply::TAGS);
    assert!(entry::GRANT_BYTES == reply::KEYS + entry::KEYS_BYTES);
    assert!(reply::TAGS + tags == reply::BYTES);
};
