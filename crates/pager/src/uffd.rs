//! userfaultfd, by its raw ioctls (`linux/userfaultfd.h`; ioctl_userfaultfd(2)).
//!
//! [`Uffd`] is one descriptor. It reports the missing and the write-protection faults of the ranges
//! registered with it, those of system calls included, and resolves them. All lengths and addresses
//! are bytes and multiples of the page size.
//!
//! The memory that the ioctls touch is named by address: the caller owns the ranges that it passes,
//! and the functions that change what is mapped there are `unsafe` for that reason.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::Error;

/// The fault handler may resolve faults of the kernel too, and may write-protect pages.
const API: u64 = 0xAA;
const FEATURE_WP: u64 = 1 << 0;
const FEATURE_EVENT_FORK: u64 = 1 << 1;
const FEATURE_THREAD_ID: u64 = 1 << 8;

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const COPY_MODE_DONTWAKE: u64 = 1 << 0;
const COPY_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const WRITEPROTECT_MODE_DONTWAKE: u64 = 1 << 1;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;

/// `_IOWR(0xAA, number, size)` and its kin.
const fn ioctl_number(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xAA << 8 | number
}
const READ_WRITE: u64 = 3;
const READ: u64 = 2;
const IOCTL_API: u64 = ioctl_number(READ_WRITE, 0x3F, size_of::<ApiArg>());
const IOCTL_REGISTER: u64 = ioctl_number(READ_WRITE, 0x00, size_of::<RegisterArg>());
const IOCTL_UNREGISTER: u64 = ioctl_number(READ, 0x01, size_of::<RangeArg>());
const IOCTL_WAKE: u64 = ioctl_number(READ, 0x02, size_of::<RangeArg>());
const IOCTL_COPY: u64 = ioctl_number(READ_WRITE, 0x03, size_of::<CopyArg>());
const IOCTL_ZEROPAGE: u64 = ioctl_number(READ_WRITE, 0x04, size_of::<ZeropageArg>());
const IOCTL_WRITEPROTECT: u64 = ioctl_number(READ_WRITE, 0x06, size_of::<WriteprotectArg>());
/// `USERFAULTFD_IOC_NEW` of the device file.
const IOCTL_NEW: u64 = 0xAA << 8;

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RangeArg {
    start: u64,
    len: u64,
}
#[repr(C)]
struct RegisterArg {
    range: RangeArg,
    mode: u64,
    ioctls: u64,
}
#[repr(C)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}
#[repr(C)]
struct ZeropageArg {
    range: RangeArg,
    mode: u64,
    zeroed: i64,
}
#[repr(C)]
struct WriteprotectArg {
    range: RangeArg,
    mode: u64,
}

/// `struct uffd_msg`: 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawMessage {
    event: u8,
    reserved: [u8; 7],
    argument: [u64; 3],
}
const _: () = assert!(size_of::<RawMessage>() == 32);

/// What the kernel reports.
#[derive(Debug)]
pub enum Event {
    /// A thread waits at a page.
    Fault(Fault),
    /// The process forked; this descriptor resolves the faults of the child.
    Fork(Uffd),
    /// Any other event; we asked for none.
    Other(u8),
}

/// A page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Address of the page that faulted (rounded down to the page by the kernel).
    pub address: usize,
    /// The access was a write.
    pub write: bool,
    /// The page is there, and is write-protected.
    pub write_protected: bool,
    /// Thread that waits, as its process numbers it.
    pub thread: u32,
}

/// What to ask of a new descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// Report forks, with a descriptor for the child. Needs CAP_SYS_PTRACE.
    pub fork_events: bool,
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens a descriptor: by the system call, and where that is refused through
    /// `/dev/userfaultfd`. Reads block.
    ///
    /// # Errors
    /// [`Error::Userfaultfd`] where neither is permitted, and where the kernel does not know
    /// write-protection (before Linux 5.7).
    pub fn open(features: Features) -> Result<Self, Error> {
        let fd = open_descriptor()?;
        let mut wanted = FEATURE_WP | FEATURE_THREAD_ID;
        if features.fork_events {
            wanted |= FEATURE_EVENT_FORK;
        }
        let mut argument = ApiArg { api: API, features: wanted, ioctls: 0 };
        ioctl(fd.as_raw_fd(), IOCTL_API, &mut argument).map_err(Error::UserfaultfdApi)?;
        Ok(Self { fd })
    }

    /// Wraps a descriptor of which the handshake is done, for example a moved one.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// The descriptor alone.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Registers `[start, start + len)` for missing and write-protection faults.
    ///
    /// # Safety
    /// The caller owns the range, and resolves its faults from now on.
    pub unsafe fn register(&self, start: usize, len: usize) -> io::Result<()> {
        let mut argument = RegisterArg {
            range: range(start, len),
            mode: REGISTER_MODE_MISSING | REGISTER_MODE_WP,
            ioctls: 0,
        };
        ioctl(self.fd.as_raw_fd(), IOCTL_REGISTER, &mut argument)
    }

    /// Takes the range back. Threads that wait there are woken.
    pub fn unregister(&self, start: usize, len: usize) -> io::Result<()> {
        ioctl(self.fd.as_raw_fd(), IOCTL_UNREGISTER, &mut range(start, len))
    }

    /// Fills missing pages from `source` and wakes who waits for them. Returns the bytes that were
    /// filled; fewer than `len` if a page in the middle was there already or the layout changed.
    ///
    /// # Errors
    /// `EEXIST` if the first page is there, `ENOENT` if the range is not within one registered
    /// mapping, `EAGAIN` while a fork is in progress, `ESRCH` when the process is ending.
    ///
    /// # Safety
    /// `source` is readable for `len` bytes and `start` is memory that the caller pages.
    pub unsafe fn copy(
        &self,
        start: usize,
        source: usize,
        len: usize,
        protect: bool,
    ) -> io::Result<usize> {
        // SAFETY: by the caller.
        unsafe { self.fill(start, source, len, if protect { COPY_MODE_WP } else { 0 }) }
    }

    /// As [`Uffd::copy`], and wakes nobody.
    ///
    /// # Errors
    /// As for [`Uffd::copy`].
    ///
    /// # Safety
    /// As for [`Uffd::copy`].
    pub unsafe fn copy_without_wake(
        &self,
        start: usize,
        source: usize,
        len: usize,
        protect: bool,
    ) -> io::Result<usize> {
        let mode = COPY_MODE_DONTWAKE | if protect { COPY_MODE_WP } else { 0 };
        // SAFETY: by the caller.
        unsafe { self.fill(start, source, len, mode) }
    }

    /// # Safety
    /// As for [`Uffd::copy`].
    unsafe fn fill(&self, start: usize, source: usize, len: usize, mode: u64) -> io::Result<usize> {
        let mut argument =
            CopyArg { dst: start as u64, src: source as u64, len: len as u64, mode, copied: 0 };
        match ioctl(self.fd.as_raw_fd(), IOCTL_COPY, &mut argument) {
            Ok(()) => Ok(len),
            // The kernel reports a part with EAGAIN and the bytes done.
            Err(_) if argument.copied > 0 => Ok(argument.copied as usize),
            Err(error) => Err(error),
        }
    }

    /// Maps the zero page at missing pages; results as for [`Uffd::copy`].
    ///
    /// # Safety
    /// `start` is memory that the caller pages.
    pub unsafe fn zero(&self, start: usize, len: usize) -> io::Result<usize> {
        let mut argument = ZeropageArg { range: range(start, len), mode: 0, zeroed: 0 };
        match ioctl(self.fd.as_raw_fd(), IOCTL_ZEROPAGE, &mut argument) {
            Ok(()) => Ok(len),
            Err(_) if argument.zeroed > 0 => Ok(argument.zeroed as usize),
            Err(error) => Err(error),
        }
    }

    /// Write-protects the pages of the range that are there. Wakes nobody.
    ///
    /// # Errors
    /// `ENOENT` if a part is not registered, `EAGAIN` while a fork is in progress.
    ///
    /// # Safety
    /// `start` is memory that the caller pages.
    pub unsafe fn protect(&self, start: usize, len: usize) -> io::Result<()> {
        let mut argument = WriteprotectArg { range: range(start, len), mode: WRITEPROTECT_MODE_WP };
        ioctl(self.fd.as_raw_fd(), IOCTL_WRITEPROTECT, &mut argument)
    }

    /// Lifts the write-protection; wakes who waits there if `wake`.
    ///
    /// # Safety
    /// `start` is memory that the caller pages.
    pub unsafe fn unprotect(&self, start: usize, len: usize, wake: bool) -> io::Result<()> {
        let mode = if wake { 0 } else { WRITEPROTECT_MODE_DONTWAKE };
        let mut argument = WriteprotectArg { range: range(start, len), mode };
        ioctl(self.fd.as_raw_fd(), IOCTL_WRITEPROTECT, &mut argument)
    }

    /// Wakes who waits in the range; they try again.
    pub fn wake(&self, start: usize, len: usize) -> io::Result<()> {
        ioctl(self.fd.as_raw_fd(), IOCTL_WAKE, &mut range(start, len))
    }

    /// Makes reads return at once, which poll(2) on a userfaultfd asks for.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        // SAFETY: changes a flag of our descriptor.
        let done = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes reads wait again.
    pub fn set_blocking(&self) -> io::Result<()> {
        // SAFETY: changes a flag of our descriptor.
        let done = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETFL, 0) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until there is something to read. The descriptor must be non-blocking.
    pub fn wait(&self) -> io::Result<()> {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        if unsafe { libc::poll(&mut poll, 1, -1) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Waits for events and appends them to `events`, at most 32 at a time.
    pub fn read(&self, events: &mut Vec<Event>) -> io::Result<()> {
        let mut messages = [RawMessage::default(); 32];
        // SAFETY: the buffer is valid for its size, and any bytes are a valid `RawMessage`.
        let got = unsafe {
            libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(&messages))
        };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        let count = got as usize / size_of::<RawMessage>();
        events.extend(messages[..count].iter().map(decode));
        Ok(())
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn decode(message: &RawMessage) -> Event {
    let [flags, address, thread] = message.argument;
    match message.event {
        EVENT_PAGEFAULT => Event::Fault(Fault {
            address: address as usize & !(crate::sys::PAGE_BYTES - 1),
            write: flags & FLAG_WRITE != 0,
            write_protected: flags & FLAG_WP != 0,
            thread: thread as u32,
        }),
        EVENT_FORK => {
            // SAFETY: the kernel has just installed this descriptor for us, nobody else owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(flags as u32 as i32) };
            Event::Fork(Uffd { fd })
        }
        other => Event::Other(other),
    }
}

fn range(start: usize, len: usize) -> RangeArg {
    RangeArg { start: start as u64, len: len as u64 }
}

fn ioctl<T>(fd: RawFd, number: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: each number is passed with the argument type whose size it encodes.
    let result = unsafe { libc::ioctl(fd, number as libc::Ioctl, argument as *mut T) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn open_descriptor() -> Result<OwnedFd, Error> {
    // SAFETY: a plain system call; a descriptor that it returns is ours.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
    if fd >= 0 {
        // SAFETY: see above.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let refused = io::Error::last_os_error();
    let (path, flags) = (c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
    // Without libc: a forked child comes here before libc is itself again.
    // SAFETY: the path is a C string; a descriptor that is returned is ours.
    let device = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags) } as i32;
    if device < 0 {
        return Err(Error::Userfaultfd { syscall: refused, device: io::Error::last_os_error() });
    }
    // SAFETY: just opened.
    let device = unsafe { OwnedFd::from_raw_fd(device) };
    // SAFETY: USERFAULTFD_IOC_NEW takes the flags by value and returns a descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), IOCTL_NEW as libc::Ioctl, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(Error::Userfaultfd { syscall: refused, device: io::Error::last_os_error() });
    }
    // SAFETY: just created.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
