//! What it does where access is by pages: it names any number, over both queues at once, with places where
//! nothing can be read or written.

use fabric::{Key, MemoryRegion, Remote};
use pool::odrp::{Ask, PAGE_BYTES, REPLY_BYTES, status};

use super::{Hostile, PAGE};
use crate::check::invariant::Invariant;

/// What it writes, so that it knows what is another's.
const OWN: u8 = 0xbb;
/// The queue that only reads, and the one that does the rest.
const READS: usize = 0;
const WRITES: usize = 1;

impl Hostile {
    pub(super) fn round_on_pages(&mut self) {
        let number = self.random.below(9) as u32;
        match self.random.below(16) {
            0..=3 => _ = self.ask(Ask::Write as u8, number),
            4 | 5 => self.read_anything(number),
            6 | 7 => self.read_mapped(number),
            8 | 9 => _ = self.ask(Ask::Free as u8, number),
            10 => self.beyond_the_table(),
            11 => self.nowhere(number),
            12 => {
                let op = self.random.bits() as u8;
                self.ask(op, number);
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

    /// Asks over the queue that always answers: what was said.
    fn ask(&mut self, op: u8, number: u32) -> Option<u64> {
        let data = request(op, number, self.place(), self.reply());
        self.ask_so(op, &data)
    }

    fn ask_so(&mut self, op: u8, data: &[u8]) -> Option<u64> {
        let fill = if op == Ask::Write as u8 { OWN } else { 0 };
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
        if self.ask(Ask::Read as u8, number) == Some(status::PENDING) {
            self.look_at_it(number);
        }
    }

    /// Reads over the queue that answers only for what is mapped.
    fn read_mapped(&mut self, number: u32) {
        self.memory.memory().zero(PAGE, PAGE_BYTES);
        let data = request_to_read(number, self.place());
        let sent = self.send(READS, &data);
        match sent.then(|| self.answer(READS)).flatten() {
            Some(true) => self.look_at_it(number),
            _ => self.recover(),
        }
    }

    /// All that it may see is what it wrote, or nothing.
    fn look_at_it(&mut self, number: u32) {
        let mut page = [0; PAGE_BYTES];
        self.memory.memory().read(PAGE, &mut page);
        if let Some(at) = page.iter().position(|b| ![0, OWN].contains(b)) {
            let (name, byte) = (self.cx.tell(|o| o.name(self.cx.who).to_owned()), page[at]);
            let why = format!("{name} reads {byte:#x} at byte {at} of page number {number}");
            self.cx.tell(|o| o.wrong(Invariant::Contents, why));
        }
    }

    fn beyond_the_table(&mut self) {
        let number = 9 + self.random.below(0xff_ffff - 9) as u32;
        let op = 1 + self.random.below(3) as u8;
        self.ask(op, number);
    }

    /// A page or a reply with a key that opens nothing, or at an address that is not its own.
    fn nowhere(&mut self, number: u32) {
        let (mut place, mut reply) = (self.place(), self.reply());
        let wrong = if self.random.below(2) == 0 { &mut place } else { &mut reply };
        match self.random.below(2) {
            0 => wrong.rkey = Key(self.random.bits() as u32),
            _ => wrong.addr = self.random.bits(),
        }
        let op = 1 + self.random.below(3) as u8;
        let data = request(op, number, place, reply);
        self.ask_so(op, &data);
    }

    fn not_a_request(&mut self) {
        let which = self.random.below(self.kinds() as u64) as usize;
        let data: Vec<u8> = (0..self.random.below(40)).map(|_| self.random.bits() as u8).collect();
        self.send(which, &data);
        let _ = self.answer(which);
        self.recover();
    }

    /// Frees a page while a read of it is on its way.
    pub(super) fn read_while_it_is_freed(&mut self) {
        let number = self.random.below(4) as u32;
        if self.ask(Ask::Write as u8, number) != Some(status::DONE) {
            return;
        }
        let read = request_to_read(number, self.place());
        let free = request(Ask::Free as u8, number, self.place(), self.reply());
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

    /// Writes, reads and frees a page over both queues, without waiting for anything.
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
