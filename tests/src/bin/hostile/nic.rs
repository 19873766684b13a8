//! A function of the memory node's NIC, with direct access to its rings, doorbells and descriptors.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rnic::port::control::{Reply, Verb};
use rnic::port::shm::protocol::{Request, Response};
use rnic::port::shm::{Attached, raw, socket};
use rnic::spec::QpDescription;
use rustix::fs::{MemfdFlags, SealFlags};
use verbs::{Access, DmaMemory, Key, MwKind, Pdn, QpState, Qpn, SessionSecret};

/// A function of the NIC.
pub struct Nic {
    attached: Attached,
    /// The doorbell page.
    pub page: DmaMemory,
    /// Number of doorbells in the page.
    pub doorbells: u32,
}

/// A part of memory that the NIC has mapped.
pub fn part(memory: &DmaMemory, offset: usize, bytes: usize) -> DmaMemory {
    memory.slice(offset, bytes).expect("within the memory")
}

impl Nic {
    /// Connects and opens a function.
    pub fn open(path: &Path) -> Result<Self> {
        let attached = Attached::connect(path)?;
        let (page, doorbells) = {
            let raw = attached.raw();
            (raw.doorbells.clone(), raw.slots)
        };
        Ok(Self { attached, page, doorbells })
    }

    /// The secret of its session.
    pub fn secret(&self) -> SessionSecret {
        self.attached.secret()
    }

    /// Sends arbitrary bytes as a request and returns the response.
    pub fn ask(&self, bytes: &[u8], fds: &[&OwnedFd]) -> Result<Response> {
        let raw = self.attached.raw();
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        socket::send(raw.socket, bytes, &fds)?;
        let packet = socket::receive(raw.socket)?.context("the connection was closed")?;
        Ok(serde_json::from_slice(&packet.bytes)?)
    }

    /// Executes a verb; the error is the reason of a refusal.
    pub fn verb(&self, verb: Verb<DmaMemory>) -> Result<Reply> {
        Ok(self.attached.execute(verb)?)
    }

    /// Executes a verb that must be refused; returns the reason.
    pub fn refused(&self, verb: Verb<DmaMemory>) -> Result<String> {
        let name = format!("{verb:?}");
        match self.attached.execute(verb) {
            Err(rnic::port::Error::Refused { why }) => Ok(why),
            Err(other) => bail!("{name}: {other}"),
            Ok(reply) => bail!("{name} was not refused: {reply:?}"),
        }
    }

    /// Sends a descriptor as memory.
    pub fn add_memory(&self, fd: &OwnedFd, bytes: u64) -> Result<u32> {
        match self.ask(&serde_json::to_vec(&Request::AddMemory { bytes })?, &[fd])? {
            Response::Memory(number) => Ok(number),
            Response::Error(why) => Err(anyhow!("refused: {why}")),
            other => bail!("{other:?}"),
        }
    }

    /// Allocates memory and shares it with the NIC, following the protocol.
    pub fn memory(&self, bytes: usize) -> Result<DmaMemory> {
        Ok(self.attached.alloc_dma(bytes)?)
    }

    /// Allocates a protection domain.
    pub fn pd(&self) -> Result<Pdn> {
        match self.verb(Verb::AllocPd)? {
            Reply::Pd(pd) => Ok(pd),
            other => bail!("{other:?}"),
        }
    }

    /// Registers all of `memory` at its address in this process.
    pub fn register(&self, pd: Pdn, memory: &DmaMemory, access: Access) -> Result<Key> {
        let (iova, memory) = (memory.addr(), memory.clone());
        match self.verb(Verb::RegMr { pd, memory, iova, access })? {
            Reply::Key(key) => Ok(key),
            other => bail!("{other:?}"),
        }
    }

    /// Allocates unbound windows.
    pub fn windows(&self, pd: Pdn, kind: MwKind, count: u32) -> Result<Vec<Key>> {
        match self.verb(Verb::AllocMws { pd, kind, count })? {
            Reply::Keys(keys) => Ok(keys),
            other => bail!("{other:?}"),
        }
    }

    /// Queries a QP.
    pub fn query(&self, qpn: Qpn) -> Result<QpDescription> {
        match self.verb(Verb::QueryQp { qpn })? {
            Reply::QpInfo(info) => Ok(info),
            other => bail!("{other:?}"),
        }
    }

    /// Fails unless the QP is in this state.
    pub fn expect_state(&self, qpn: Qpn, state: QpState) -> Result<()> {
        let got = self.query(qpn)?.info.state;
        ensure!(got == state, "QP {qpn} is in {got:?} and not in {state:?}");
        Ok(())
    }

    /// Writes a doorbell and wakes the NIC if it sleeps.
    pub fn write_doorbell(&self, slot: u32, value: u32) {
        self.page.word32(raw::DOORBELLS + slot as usize * 4).store(value, Ordering::Release);
        self.wake_if_asleep();
    }

    /// Wakes the NIC if it sleeps.
    pub fn wake_if_asleep(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.page.word32(raw::SLEEPING).load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    /// Writes the eventfd, even if the NIC does not sleep.
    pub fn wake(&self) {
        let _ = rustix::io::write(self.attached.raw().wake, &1u64.to_ne_bytes());
    }
}

/// Creates a memfd of this size with these seals and without any page.
pub fn memfd(bytes: u64, seals: SealFlags) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("hostile", flags)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}

/// Creates a memfd of this size with all pages allocated, and with these seals.
pub fn filled_memfd(bytes: u64, seals: SealFlags) -> Result<OwnedFd> {
    let fd = memfd(bytes, SealFlags::empty())?;
    // Written and not only allocated, because unwritten pages would count as holes.
    let zeros = vec![0; bytes as usize];
    ensure!(rustix::io::pwrite(&fd, &zeros, 0)? == zeros.len(), "writing all of a memfd");
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}
