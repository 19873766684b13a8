//! Tables that the chain works on besides the free queue: the clients' tables, the table of
//! requests, and the images of pages. Words are big-endian.
//!
//! ```text
//! row n of a client's table, at 256 n; zero: not mapped
//!   0 state: 9, mapped (1)   1 page (8)   9 page (8)   17 queue value (8)
//!
//! row of a request, at 65536 * state + 256 * op: how each part of the chain handles it
//!   0 gate of "allocate": opcode, size (2)   2 gate of "free": opcode, size (2)
//!   4 opcode of the page's transfer (1)   5 opcode of the reply (1)   6 status (8)
//!
//! image of a page, at T of its entry ([`crate::chain::layout`]); the null entry has page 0, NOP,
//! EMPTY and a row of zeros
//!   0 page (8)   8 opcode of the transfer (1)   9 status (8)   17 the row that maps the page (25)
//! ```
//!
//! The state of a mapped page is the opcode of the transfer with which a read answers.
//!
//! A gate is the first WQE of a part. An open gate executes the first step of the part. A closed
//! gate is a NOP as large as the part, so the whole part is skipped.

use crate::chain::layout::table_offset;
use scheme::Error;
use scheme::index::{EntryId, IndexRange};
use verbs::direct::DirectNic;
use verbs::wqe::opcode;
use verbs::{Access, DmaMemory, MemoryRegion};

use super::{PageOp, status};
use crate::chain::layout::{Memory, aligned, entry};

/// Bytes from one row of a client's table to the next.
pub const ROW_STRIDE: usize = 256;
/// Bytes of a row.
pub const ROW_BYTES: usize = 25;
/// State of a mapped page: the opcode of a read's transfer.
const MAPPED: u8 = opcode::RDMA_WRITE_IMM;
/// Maximum number of pages of a client: the page number has three bytes.
pub const PAGES_MAX: u64 = 1 << 24;
/// Page numbers replace bits 8 to 31 of the table's address.
const TABLE_ALIGN: u64 = 1 << 32;

/// Offsets in a page's image.
pub mod image {
    /// Address of the page.
    pub const PAGE: usize = 0;
    /// Opcode of the transfer after an allocation.
    pub const TRANSFER: usize = 8;
    /// Status of the allocation.
    pub const STATUS: usize = 9;
    /// The row that maps the page.
    pub const ROW: usize = 17;
    /// Bytes of an image.
    pub const BYTES: usize = ROW + super::ROW_BYTES;
}

/// Bytes of a row of the table of requests.
pub const STEP_BYTES: usize = 14;
const STEP_STRIDE: usize = 256;
/// State and op of a request replace bits 8 to 23 of the address of the table of requests.
const STEPS_ALIGN: u64 = 1 << 24;
/// Rows for each state.
const OPS: usize = 256;

/// Creates a client's table, with all pages unmapped.
pub fn new_table<N: DirectNic>(nic: &N, metadata: &N::Pd, pages: u64) -> Result<N::Mr, Error> {
    let memory = aligned(nic, pages as usize * ROW_STRIDE, TABLE_ALIGN)?;
    Ok(nic.reg_mr(metadata, &memory, Access::REMOTE_READ | Access::REMOTE_WRITE)?)
}

/// The page that row `n` maps, if any.
pub fn page_of<N: DirectNic>(memory: &Memory<N>, table: &DmaMemory, n: u64) -> Option<EntryId> {
    let mut row = [0; ROW_BYTES];
    table.read(n as usize * ROW_STRIDE, &mut row);
    let value = u64::from_be_bytes(row[17..].try_into().expect("8 bytes"));
    (row[0] == MAPPED).then(|| memory.entry_of(value)).flatten()
}

/// Writes the images of all pages and of the null entry.
pub fn write_images<N: DirectNic>(memory: &Memory<N>) {
    let null = memory.shape.null_entry();
    for i in (EntryId::new(0)..null.plus(1)).iter() {
        let mut out = [0; image::BYTES];
        if i < null {
            let page = memory.chunk_addr(i).to_be_bytes();
            out[..8].copy_from_slice(&page);
            out[image::TRANSFER] = opcode::RDMA_READ;
            put_status(&mut out, image::STATUS, status::DONE);
            let row = &mut out[image::ROW..];
            row[0] = MAPPED;
            row[1..9].copy_from_slice(&page);
            row[9..17].copy_from_slice(&page);
            row[17..25].copy_from_slice(&memory.queue_value(i).to_be_bytes());
        } else {
            out[image::TRANSFER] = opcode::NOP;
            put_status(&mut out, image::STATUS, status::EMPTY);
        }
        memory.table.memory().write(table_offset(i) + entry::T, &out);
    }
}

/// The two forms of a part's first WQE: opcode, and size in 16-byte segments.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// The part is executed: the first WQE is a WRITE with one SGE.
    pub open: [u8; 2],
    /// The part is skipped: the first WQE is a NOP that covers it.
    pub closed: [u8; 2],
}

impl Gate {
    /// The gate of a part of `blocks` building blocks.
    pub const fn of(blocks: u32) -> Self {
        assert!(blocks <= 15, "a NOP covers at most 15 building blocks");
        Self { open: [opcode::RDMA_WRITE, 3], closed: [opcode::NOP, (4 * blocks) as u8] }
    }
}

/// Creates the table of requests; `allocate` and `free` are the gates of these parts.
pub fn new_steps<N: DirectNic>(
    nic: &N,
    metadata: &N::Pd,
    allocate: Gate,
    free: Gate,
) -> Result<N::Mr, Error> {
    let states = MAPPED as usize + 1;
    let memory = aligned(nic, states * OPS * STEP_STRIDE, STEPS_ALIGN)?;
    for mapped in [false, true] {
        for op in 0..OPS {
            let (gates, transfer, reply, said) = match (op as u8, mapped) {
                (READ, true) => (
                    (allocate.closed, free.closed),
                    opcode::RDMA_WRITE_IMM,
                    opcode::NOP,
                    status::PENDING,
                ),
                (WRITE, true) => (
                    (allocate.closed, free.closed),
                    opcode::RDMA_READ,
                    opcode::RDMA_WRITE_IMM,
                    status::DONE,
                ),
                // The image of the page replaces the opcode and the status.
                (WRITE, false) => (
                    (allocate.open, free.closed),
                    opcode::NOP,
                    opcode::RDMA_WRITE_IMM,
                    status::EMPTY,
                ),
                (FREE, true) => (
                    (allocate.closed, free.open),
                    opcode::NOP,
                    opcode::RDMA_WRITE_IMM,
                    status::DONE,
                ),
                (READ | FREE, false) => (
                    (allocate.closed, free.closed),
                    opcode::NOP,
                    opcode::RDMA_WRITE_IMM,
                    status::UNMAPPED,
                ),
                _ => (
                    (allocate.closed, free.closed),
                    opcode::NOP,
                    opcode::RDMA_WRITE_IMM,
                    status::BAD,
                ),
            };
            let mut row = [0; STEP_BYTES];
            row[..2].copy_from_slice(&gates.0);
            row[2..4].copy_from_slice(&gates.1);
            row[4..6].copy_from_slice(&[transfer, reply]);
            put_status(&mut row, 6, said);
            let state = if mapped { MAPPED } else { 0 };
            memory.write((state as usize * OPS + op) * STEP_STRIDE, &row);
        }
    }
    Ok(nic.reg_mr(metadata, &memory, Access::REMOTE_READ)?)
}

const READ: u8 = PageOp::Read as u8;
const WRITE: u8 = PageOp::Write as u8;
const FREE: u8 = PageOp::Free as u8;

fn put_status(b: &mut [u8], at: usize, status: u64) {
    b[at..at + 8].copy_from_slice(&status.to_be_bytes());
}
