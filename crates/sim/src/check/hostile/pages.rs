//! Hostile clients with access by pages: requests for any page number, over both queues at once,
//! with addresses that cannot be read or written.

use schemes::odrp::{PAGE_BYTES, PageOp, REPLY_BYTES, status};
use verbs::{Key, MemoryRegion, Remote};

use super::{Hostile, PAGE};
use crate::check::invariant::Invariant;

/// The byte that the client writes, to recognize foreign contents.
const OWN: u8 = 0xbb;
/// The queue for reads of mapped pages, and the queue for all other requests.
const READS: usize = 0;
const WRITES: usize = 1;

impl Hostile {
    pub(super) fn round_on_pages(&mut self) {
        let number = self.random.below(9) as u32;
        match self.random.below(16) {
            0..=3 => _ = self.request(PageOp::Write as u8, number),
            4 | 5 => self.read_anything(number),
            6 | 7 => self.read_mapped(number),
            8 | 9 => _ = self.request(PageOp::Free as u8, number),
            10 => self.beyond_the_table(),
            11 => self.invalid_addresses(number),
            12 => {
                let op = self.random.bits() as u8;
                self.request(op, number);
            }
            13 => self.not_a_request(),
            14 => self.all_at_once(number),
            _ => self.windows(),
        }
    }

    fn place(&self) -> Remote {
        self.memory.remote(PAGE)
    }

    fn reply(&self) -> Remote {
        self.memory.remote(0)
    }

    /// Sends a request over the queue that always answers; returns the status in the answer.
    fn request(&mut self, op: u8, number: u32) -> Option<u64> {
        let data = request(op, number, self.place(), self.reply());
        self.request_with(op, &data)
    }

    fn request_with(&mut self, op: u8, data: &[u8]) -> Option<u64> {
        let fill = if op == PageOp::Write as u8 { OWN } else { 0 };
        self.memory.memory().write(PAGE, &[fill; PAGE_BYTES]);
        self.memory.memory().zero(0, REPLY_BYTES);
        let sent = self.send(WRITES, data);
        if sent.then(|| self.answer(WRITES)).flatten() != Some(true) {
            self.recover();
            return None;
        }
        Some(self.memory.memory().load_be64(0))
    }

    fn read_anything(&mut self, number: u32) {
        if self.request(PageOp::Read as u8, number) == Some(status::PENDING) {
            self.check_page(number);
        }
    }

    /// Reads over the queue that answers only for mapped pages.
    fn read_mapped(&mut self, number: u32) {
        self.memory.memory().zero(PAGE, PAGE_BYTES);
        let data = request_to_read(number, self.place());
        let sent = self.send(READS, &data);
        match sent.then(|| self.answer(READS)).flatten() {
            Some(true) => self.check_page(number),
            _ => self.recover(),
        }
    }

    /// Checks that a page read contains only the client's own bytes or zeros.
    fn check_page(&mut self, number: u32) {
        let mut page = [0; PAGE_BYTES];
        self.memory.memory().read(PAGE, &mut page);
        if let Some(at) = page.iter().position(|b| ![0, OWN].contains(b)) {
            let (name, byte) =
                (self.cx.with_oracle(|o| o.name(self.cx.client).to_owned()), page[at]);
            let why = format!("{name} reads {byte:#x} at byte {at} of page number {number}");
            self.cx.with_oracle(|o| o.wrong(Invariant::Contents, why));
        }
    }

    fn beyond_the_table(&mut self) {
        let number = 9 + self.random.below(0xff_ffff - 9) as u32;
        let op = 1 + self.random.below(3) as u8;
        self.request(op, number);
    }

    /// Sends a request whose page or reply address has an invalid key or is foreign.
    fn invalid_addresses(&mut self, number: u32) {
        let (mut place, mut reply) = (self.place(), self.reply());
        let wrong = if self.random.below(2) == 0 { &mut place } else { &mut reply };
        match self.random.below(2) {
            0 => wrong.rkey = Key(self.random.bits() as u32),
            _ => wrong.addr = self.random.bits(),
        }
        let op = 1 + self.random.below(3) as u8;
        let data = request(op, number, place, reply);
        self.request_with(op, &data);
    }

    fn not_a_request(&mut self) {
        let which = self.random.below(self.kinds() as u64) as usize;
        let data: Vec<u8> = (0..self.random.below(40)).map(|_| self.random.bits() as u8).collect();
        self.send(which, &data);
        let _ = self.answer(which);
        self.recover();
    }

    /// Frees a page while a read of it is in flight.
    pub(super) fn read_while_it_is_freed(&mut self) {
        let number = self.random.below(4) as u32;
        if self.request(PageOp::Write as u8, number) != Some(status::DONE) {
            return;
        }
        let read = request_to_read(number, self.place());
        let free = request(PageOp::Free as u8, number, self.place(), self.reply());
        let sent = self.send(READS, &read) & self.send(WRITES, &free);
        if !sent || self.answer(WRITES) != Some(true) || self.answer(READS) != Some(true) {
            self.recover();
        }
    }

    pub(super) fn any_request(&mut self, which: usize, number: u32) -> Vec<u8> {
        match which {
            READS => request_to_read(number, self.place()),
            _ => request(1 + self.random.below(3) as u8, number, self.place(), self.reply()),
        }
    }

    /// Writes, reads and frees a page over both queues without waiting in between.
    fn all_at_once(&mut self, number: u32) {
        let mut waits = [0; 2];
        for _ in 0..2 + self.random.below(6) {
            let which = self.random.below(4).min(1) as usize;
            let data = self.any_request(which, number);
            waits[which] += self.send(which, &data) as u32;
        }
        for which in [WRITES, READS] {
            for _ in 0..waits[which] {
                if self.answer(which) != Some(true) {
                    return self.recover();
                }
            }
        }
    }
}

fn request(op: u8, number: u32, page: Remote, reply: Remote) -> Vec<u8> {
    let mut data = (((op as u32) << 24) | number).to_be_bytes().to_vec();
    put(&mut data, page);
    put(&mut data, reply);
    data
}

fn request_to_read(number: u32, page: Remote) -> Vec<u8> {
    let mut data = number.to_be_bytes()[1..].to_vec();
    put(&mut data, page);
    data
}

fn put(data: &mut Vec<u8>, place: Remote) {
    data.extend(place.addr.to_be_bytes());
    data.extend(place.rkey.0.to_be_bytes());
}
