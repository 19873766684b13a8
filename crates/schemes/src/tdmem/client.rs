//! The compute node's side of `tdmem` (the paper's donee). Commands, loads and answers go over one
//! management QP.
//!
//! | operation | here | requests |
//! | --- | --- | --- |
//! | allocate | takes a name | none |
//! | write | STORE; it names the page that it replaces | WRITE page, WRITE command, READ answer |
//! | read | LOAD | READ page |
//! | free | INVALIDATE PAGE | WRITE command |
//!
//! A command that failed may have been executed. Its slot is set aside, and the page is in state
//! `State::Unknown`, until the client has read the slot's answer: the command was executed if
//! the answer has its sequence number.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use scheme::credits::{Credit, Credits};
use scheme::index::{EntryId, Slot};
use scheme::options::SchemeOptions;
use scheme::request_queue::{ManagementQp, RequestQueue, RequestQueueAttr};
use scheme::{
    Access, Answer as Future, ClientScheme, ConnectReply, Counter, Error, Grant, GroupId, Offer,
    PageAccess, check_whole_page,
};
use verbs::{Access as Rights, MemoryRegion, Nic, Op, Remote, WorkRequest};

use super::command::{ANSWER_BYTES, Answer, Command, Operation, Status};
use super::layout::Peer;
use super::local::LocalTier;
use super::options::Region;
use super::translation::{Entry, Place, State, Translation};
use super::{ClientOptions, PAGE_BYTES, TDMEM, Tier};

/// Building blocks of the send queue for each request: a STORE has a WRITE, a WRITE of inline data,
/// and a READ.
const BLOCKS: u32 = 8;

/// The scheme's client on the NIC `N`.
pub struct Client<N: Nic> {
    queue: RequestQueue<N>,
    credits: u32,
    /// Buffers of the slots: content to store, loaded content, answers.
    stored: N::Mr,
    loaded: N::Mr,
    answers: N::Mr,
    sequence: AtomicU64,
    table: Translation,
    local: Option<LocalTier>,
    region: OnceLock<Region>,
    /// Commands whose result is not known, by slot.
    open: Mutex<Vec<Option<OpenCommand>>>,
    /// Held while the results of such commands are asked for.
    settling: Credits,
    /// Number of STOREs by tier.
    stores: [AtomicU64; 3],
}

/// A command from its posting until its result is known.
#[derive(Clone, Copy)]
struct OpenCommand {
    command: Command,
    purpose: Purpose,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A STORE for the page of this name, which was in this state before.
    Store { name: u32, before: State },
    /// INVALIDATE PAGE for a page that is being freed.
    Free { name: u32 },
    /// INVALIDATE PAGE for the old place of a page that is stored elsewhere now.
    Leave,
}

impl<N: Nic> Client<N> {
    /// Creates the QP.
    pub fn new(nic: &N, pd: &N::Pd, offer: &Offer, options: &SchemeOptions) -> Result<Self, Error> {
        if offer.chunk_bytes != PAGE_BYTES as u64 {
            return Err(Error::Protocol {
                attempt: "connecting to a memory node with scheme tdmem".into(),
                why: format!(
                    "the memory node's pages have {} bytes, not {PAGE_BYTES}",
                    offer.chunk_bytes
                ),
            });
        }
        let local = LocalTier::new(&ClientOptions::of(options)?)?;
        let local_pages = local.as_ref().map_or(0, LocalTier::pages);
        let names = offer.chunks.saturating_add(local_pages.into()).min(u32::MAX as u64);
        let credits = offer.credits;
        let blocks = (credits * BLOCKS).next_power_of_two().max(16);
        let attr = RequestQueueAttr {
            credits,
            receives: 1,
            send_blocks: blocks,
            completions: 2 * blocks,
            access: Rights::NONE,
        };
        let buffer = |bytes: usize| -> Result<N::Mr, Error> {
            let memory = nic.alloc_dma(credits as usize * bytes)?;
            Ok(nic.reg_mr(pd, &memory, Rights::LOCAL_WRITE)?)
        };
        Ok(Self {
            queue: RequestQueue::new(nic, pd, attr)?,
            credits,
            stored: buffer(PAGE_BYTES)?,
            loaded: buffer(PAGE_BYTES)?,
            answers: buffer(ANSWER_BYTES)?,
            sequence: AtomicU64::new(1),
            table: Translation::new(names as u32),
            local,
            region: OnceLock::new(),
            open: Mutex::new(vec![None; credits as usize]),
            settling: Credits::new(1),
            stores: Default::default(),
        })
    }

    fn region(&self) -> Result<&Region, Error> {
        self.region.get().ok_or_else(|| Error::Protocol {
            attempt: "accessing a page".into(),
            why: "the memory node has not admitted this client".into(),
        })
    }

    fn remote(&self, address: u64) -> Result<Remote, Error> {
        Ok(Remote { addr: address, rkey: self.region()?.key() })
    }

    /// Number of a slot within the region.
    fn slot_there(&self, slot: Slot) -> Result<u64, Error> {
        let Region { layout, owner, .. } = self.region()?;
        Ok(layout.first_slot(Peer::Donee(*owner)) + u64::from(slot.raw()))
    }

    /// Takes a slot without an open command.
    async fn slot(&self) -> Result<Credit<'_>, Error> {
        loop {
            let credit = self.queue.slot().await;
            if self.open.lock()[credit.slot().as_usize()].is_none() {
                return Ok(credit);
            }
            drop(credit);
            self.settle_all().await?;
        }
    }

    /// A command of this client with a new sequence number.
    fn command(&self, operation: Operation, of: Option<Place>) -> Result<Command, Error> {
        let Region { layout, owner, fast_pages, .. } = self.region()?;
        let (tier, remote_addr) = of.map_or((0, 0), |p| (p.tier as u8, layout.page(p.page)));
        let target_tier = if *fast_pages > 0 { Tier::Fast } else { Tier::Dram } as u8;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        Ok(Command { operation, tier, target_tier, src_mid: *owner, sequence, remote_addr })
    }

    /// Executes a command in a slot. Its result may stay unknown if the call fails or is dropped.
    async fn execute(&self, credit: &Credit<'_>, open: OpenCommand) -> Result<(), Error> {
        let slot = credit.slot();
        let layout = &self.region()?.layout;
        let there = self.slot_there(slot)?;
        let (to, control) = (self.remote(layout.data(there))?, self.remote(layout.command(there))?);
        let page = [self.stored.sge(slot.offset(PAGE_BYTES), PAGE_BYTES as u32)];
        let bytes = open.command.to_bytes();
        let command = Op::WriteInline { to: control, data: &bytes };
        let answer = [self.answers.sge(slot.offset(ANSWER_BYTES), ANSWER_BYTES as u32)];
        let read = Op::Read { from: self.remote(layout.answer(there))?, to: &answer };
        let request = |op, signaled| WorkRequest { id: 0, op, signaled };
        if let Purpose::Store { name, .. } | Purpose::Free { name } = open.purpose {
            self.table.set_state(name, State::Unknown);
        }
        self.open.lock()[slot.as_usize()] = Some(open);
        if open.command.operation != Operation::Store {
            // The completion of the WRITE says that the command was executed.
            self.queue.execute("freeing a page", &mut [request(command, true)]).await?;
            return self.finish(slot, open, true, None);
        }
        let store = Op::Write { to, from: &page };
        let list = &mut [request(store, false), request(command, false), request(read, true)];
        self.queue.execute("writing a page", list).await?;
        let answer = self.answer(slot);
        self.finish(slot, open, true, answer)
    }

    /// The answer that was read into a slot's buffer.
    fn answer(&self, slot: Slot) -> Option<Answer> {
        let mut bytes = [0; ANSWER_BYTES];
        self.answers.memory().read(slot.offset(ANSWER_BYTES), &mut bytes);
        Answer::parse(&bytes)
    }

    /// Closes a command, which was executed or not, and sets the state of its page.
    fn finish(
        &self,
        slot: Slot,
        OpenCommand { command, purpose }: OpenCommand,
        executed: bool,
        answer: Option<Answer>,
    ) -> Result<(), Error> {
        let result = match purpose {
            Purpose::Store { name, before } => {
                let stored = match executed {
                    true => self.stored_at(&command, answer),
                    false => Ok(None),
                };
                match stored {
                    Ok(Some(place)) => self.table.set_place(name, place),
                    _ => self.table.set_state(name, before),
                }
                stored.map(drop)
            }
            Purpose::Free { name } => {
                self.table.set_state(name, if executed { State::Empty } else { State::Valid });
                Ok(())
            }
            Purpose::Leave => Ok(()),
        };
        self.open.lock()[slot.as_usize()] = None;
        result
    }

    /// The place of a page that a STORE has stored.
    fn stored_at(&self, command: &Command, answer: Option<Answer>) -> Result<Option<Place>, Error> {
        let wrong = |why: String| Error::Protocol { attempt: "writing a page".into(), why };
        let answer = answer
            .filter(|answer| answer.sequence == command.sequence)
            .ok_or_else(|| wrong("the answer is not that of the command".into()))?;
        match answer.status {
            Status::Done => {}
            Status::Full => return Err(Error::OutOfMemory { bytes: PAGE_BYTES as u64 }),
            status => {
                return Err(wrong(format!("the memory node refused the command: {status:?}")));
            }
        }
        let tier = Tier::from_raw(answer.tier).filter(|tier| Tier::DONOR.contains(tier));
        let page = self.region()?.layout.page_at(answer.remote_addr);
        let (Some(tier), Some(page)) = (tier, page) else {
            return Err(wrong(format!("address {:#x} is not that of a page", answer.remote_addr)));
        };
        self.stores[tier as usize].fetch_add(1, Ordering::Relaxed);
        Ok(Some(Place { tier, page }))
    }

    /// Finds out whether the commands without a known result were executed. Takes all slots, so
    /// that nothing else is in flight. The caller holds none.
    async fn settle_all(&self) -> Result<(), Error> {
        let _alone = self.settling.take().await;
        let mut all = Vec::new();
        for _ in 0..self.credits {
            all.push(self.queue.slot().await);
        }
        for credit in &all {
            let open = self.open.lock()[credit.slot().as_usize()];
            if let Some(open) = open {
                self.settle_slot(credit, open).await?;
            }
        }
        Ok(())
    }

    async fn settle_slot(&self, credit: &Credit<'_>, open: OpenCommand) -> Result<(), Error> {
        let slot = credit.slot();
        let from = self.remote(self.region()?.layout.answer(self.slot_there(slot)?))?;
        let to = [self.answers.sge(slot.offset(ANSWER_BYTES), ANSWER_BYTES as u32)];
        let op = Op::Read { from, to: &to };
        let attempt = "asking whether a command was executed";
        self.queue.execute(attempt, &mut [WorkRequest { id: 0, op, signaled: true }]).await?;
        let answer = self.answer(slot);
        let executed = answer.is_some_and(|answer| answer.sequence == open.command.sequence);
        if !executed && open.purpose == Purpose::Leave {
            // No entry names the page any more. A second attempt has the same sequence number, so
            // that it is recognized too.
            return Box::pin(self.execute(credit, open)).await;
        }
        // The caller of a failed command has got an error already.
        let _ = self.finish(slot, open, executed, answer);
        Ok(())
    }

    /// Frees the place that a page had before.
    async fn leave(&self, place: Place) -> Result<(), Error> {
        if let (Tier::Local, Some(local)) = (place.tier, &self.local) {
            local.invalidate(place.page);
            return Ok(());
        }
        let credit = self.slot().await?;
        let command = self.command(Operation::InvalidatePage, Some(place))?;
        let result = self.execute(&credit, OpenCommand { command, purpose: Purpose::Leave }).await;
        match result {
            // The slot stays open, and its next user sends the command again.
            Err(Error::ManagementBroken { .. }) => Ok(()),
            other => other,
        }
    }

    /// Stores a page in the local tier, if there is one with a free page.
    async fn store_locally(
        &self,
        name: u32,
        before: &Entry,
        content: &[u8],
    ) -> Result<bool, Error> {
        let Some(page) = self.local.as_ref().and_then(|local| local.store(content)) else {
            return Ok(false);
        };
        self.stores[Tier::Local as usize].fetch_add(1, Ordering::Relaxed);
        self.table.set_place(name, Place { tier: Tier::Local, page });
        if let Some(place) = before.place() {
            self.leave(place).await?;
        }
        Ok(true)
    }

    async fn store(&self, name: u32, before: &Entry, content: &[u8]) -> Result<(), Error> {
        if self.store_locally(name, before, content).await? {
            return Ok(());
        }
        let old = before.place();
        let remote = old.filter(|place| place.tier != Tier::Local);
        let credit = self.slot().await?;
        self.stored.memory().write(credit.slot().offset(PAGE_BYTES), content);
        let command = self.command(Operation::Store, remote)?;
        let purpose = Purpose::Store { name, before: before.state() };
        let result = self.execute(&credit, OpenCommand { command, purpose }).await;
        drop(credit);
        let place = old.filter(|place| place.tier == Tier::Local);
        match (result, place.zip(self.local.as_ref())) {
            (Ok(()), Some((place, local))) => local.invalidate(place.page),
            // All tiers are full, and a page that has memory stays writable.
            (Err(Error::OutOfMemory { .. }), Some((place, local))) => {
                local.overwrite(place.page, content);
            }
            (result, _) => return result,
        }
        Ok(())
    }

    async fn load(&self, place: Place, into: &mut [u8]) -> Result<(), Error> {
        if let (Tier::Local, Some(local)) = (place.tier, &self.local) {
            local.load(place.page, into);
            return Ok(());
        }
        let credit = self.slot().await?;
        let at = credit.slot().offset(PAGE_BYTES);
        let from = self.remote(self.region()?.layout.page(place.page))?;
        let to = [self.loaded.sge(at, PAGE_BYTES as u32)];
        let op = Op::Read { from, to: &to };
        let list = &mut [WorkRequest { id: 0, op, signaled: true }];
        self.queue.execute("reading a page", list).await?;
        self.loaded.memory().read(at, into);
        Ok(())
    }
}

fn check_whole(access: &str, len: usize) -> Result<(), Error> {
    check_whole_page(TDMEM, access, len, PAGE_BYTES)
}

impl<N: Nic> PageAccess for Client<N> {
    fn page_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn read_page<'a>(&'a self, page: &'a Grant, into: &'a mut [u8]) -> Future<'a, ()> {
        Box::pin(async move {
            check_whole("read", into.len())?;
            loop {
                let (entry, pending) = self.table.load(page.entry.raw()).await?;
                match (entry.state(), entry.place()) {
                    (_, Some(place)) => return self.load(place, into).await,
                    (State::Unknown, None) => {
                        drop(pending);
                        self.settle_all().await?;
                    }
                    _ => {
                        into.fill(0);
                        return Ok(());
                    }
                }
            }
        })
    }

    fn write_page<'a>(&'a self, page: &'a Grant, from: &'a [u8]) -> Future<'a, ()> {
        Box::pin(async move {
            check_whole("write", from.len())?;
            loop {
                let (before, change) = self.table.change(page.entry.raw()).await?;
                if before.state() != State::Unknown {
                    return self.store(page.entry.raw(), &before, from).await;
                }
                drop(change);
                self.settle_all().await?;
            }
        })
    }
}

impl<N: Nic> ClientScheme for Client<N> {
    /// Takes a name; no request is sent: see [`PageAccess::write_page`].
    fn allocate(&self, group: GroupId) -> Future<'_, Grant> {
        Box::pin(async move {
            let name = self.table.allocate();
            let name = name.ok_or(Error::OutOfMemory { bytes: PAGE_BYTES as u64 })?;
            let addr = u64::from(name) * PAGE_BYTES as u64;
            Ok(Grant::new(addr, PAGE_BYTES as u64, EntryId::new(name), group, &[]))
        })
    }

    fn free<'a>(&'a self, page: &'a Grant) -> Future<'a, ()> {
        Box::pin(async move {
            let name = page.entry.raw();
            loop {
                let (before, change) = self.table.change(name).await?;
                match (before.state(), before.place()) {
                    (State::Unknown, None) => {
                        drop(change);
                        self.settle_all().await?;
                        continue;
                    }
                    (_, Some(place)) if place.tier != Tier::Local => {
                        let credit = self.slot().await?;
                        let command = self.command(Operation::InvalidatePage, Some(place))?;
                        let purpose = Purpose::Free { name };
                        self.execute(&credit, OpenCommand { command, purpose }).await?;
                    }
                    (_, Some(place)) => self.leave(place).await?,
                    (_, None) => {}
                }
                change.forget();
                return Ok(());
            }
        })
    }

    fn access(&self) -> Access<'_> {
        Access::Paged(self)
    }

    fn each_queue(&self, each: &mut dyn FnMut(&dyn ManagementQp)) {
        each(&self.queue);
    }

    fn accept(&self, terms: &ConnectReply) -> Result<(), Error> {
        let _ = self.region.set(Region::of(terms)?);
        Ok(())
    }

    /// Asks for the results of commands that failed.
    fn settle(&self) -> Future<'_, ()> {
        Box::pin(async move {
            let any_open = self.open.lock().iter().any(Option::is_some);
            if any_open { self.settle_all().await } else { Ok(()) }
        })
    }

    fn counters(&self) -> Vec<Counter> {
        let names = ["stores_local", "stores_fast", "stores_dram"];
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        names.into_iter().zip(self.stores.iter().map(count)).collect()
    }
}
