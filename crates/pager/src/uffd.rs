//! userfaultfd through its raw ioctls (`linux/userfaultfd.h`; ioctl_userfaultfd(2)).
//!
//! [`Uffd`] is one descriptor. It reports and resolves missing faults and write-protection faults
//! of the registered ranges, including faults of system calls. All lengths and addresses are in
//! bytes and multiples of the page size.
//!
//! The ioctls name memory by address. The caller owns the ranges that it passes; functions that
//! change the memory mapped there are therefore `unsafe`.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::Error;
use crate::sys::{self, PAGE_BYTES};

/// API version and feature bits: write-protection, fork events, and thread ids in fault messages.
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
const MOVE_MODE_DONTWAKE: u64 = 1 << 0;
const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;

/// Encodes an ioctl number like the kernel's `_IOR` and `_IOWR`.
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
const IOCTL_MOVE: u64 = ioctl_number(READ_WRITE, 0x05, size_of::<MoveArg>());
const IOCTL_POISON: u64 = ioctl_number(READ_WRITE, 0x08, size_of::<ZeropageArg>());
const IOCTL_WRITEPROTECT: u64 = ioctl_number(READ_WRITE, 0x06, size_of::<WriteprotectArg>());
/// `USERFAULTFD_IOC_NEW` of `/dev/userfaultfd`.
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
struct MoveArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}
#[repr(C)]
struct WriteprotectArg {
    range: RangeArg,
    mode: u64,
}

/// `struct uffd_msg`, 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawMessage {
    event: u8,
    reserved: [u8; 7],
    argument: [u64; 3],
}
const _: () = assert!(size_of::<RawMessage>() == 32);

/// An event that the kernel reports.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault(Fault),
    /// The process forked; the descriptor resolves the faults of the child.
    Fork(Uffd),
    /// An event type that the pager did not request.
    Other(u8),
}

/// A page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Address of the page, rounded down to a page boundary by the kernel.
    pub address: usize,
    /// True if the access was a write.
    pub write: bool,
    /// True if the page is mapped but write-protected.
    pub write_protected: bool,
    /// Id of the faulting thread, in its own PID namespace.
    pub thread: u32,
}

/// Optional features of a new descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// Report forks, with a descriptor for the child. Needs CAP_SYS_PTRACE.
    pub fork_events: bool,
}

/// Options of [`Uffd::move_pages`].
#[derive(Clone, Copy, Debug, Default)]
pub struct MoveOptions {
    /// Wake the threads that wait for pages of the target.
    pub wake: bool,
    /// Count missing pages of the source as moved.
    pub holes: bool,
}

/// A userfaultfd descriptor.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens a descriptor with the system call, or through `/dev/userfaultfd` if the system call is
    /// refused. Reads block.
    ///
    /// # Errors
    /// [`Error::Userfaultfd`] if both are refused, and [`Error::UserfaultfdApi`] if the kernel
    /// lacks a feature (write-protection needs Linux 5.7).
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

    /// Wraps a descriptor whose API handshake is done, for example a duplicate.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Returns the descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Registers `[start, start + len)` for missing faults and write-protection faults.
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

    /// Registers `[start, start + len)` as a target of [`Uffd::move_pages`] whose missing pages the
    /// kernel fills with zeros, as in ordinary memory.
    ///
    /// # Safety
    /// The caller owns the range.
    pub unsafe fn register_target(&self, start: usize, len: usize) -> io::Result<()> {
        let range = range(start, len);
        let mut argument = RegisterArg { range, mode: REGISTER_MODE_WP, ioctls: 0 };
        ioctl(self.fd.as_raw_fd(), IOCTL_REGISTER, &mut argument)
    }

    /// Returns true if the kernel has UFFDIO_MOVE (Linux 6.8 and later).
    pub fn can_move(&self) -> bool {
        let nothing = std::ptr::null_mut::<MoveArg>();
        // SAFETY: a kernel with this ioctl finds no argument at the null address and returns EFAULT
        // (EAGAIN during a fork). A kernel without this ioctl returns EINVAL.
        let done = unsafe { libc::ioctl(self.as_raw_fd(), IOCTL_MOVE as libc::Ioctl, nothing) };
        done < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL)
    }

    /// Moves the pages at `source` to `target`, where pages are missing. Returns the bytes that
    /// were moved: fewer than `len` if a later page cannot be moved.
    ///
    /// Linux 6.18 may move pages and report EEXIST: if it must retry the first page of a step, for
    /// example because it is compacting memory, it takes its own success for another failure, and
    /// then finds the target present. The pages that have left the source count as moved.
    ///
    /// # Errors
    /// They concern the first page. `EEXIST`: a page is present at the target. `ENOENT`: the source
    /// is missing (not with `holes`), or a range is not mapped. `EBUSY`: the page is pinned by a
    /// device, or shared with a forked child. `EINVAL`: a range is not within one mapping, the two
    /// mappings differ in access, the access is not read and write, or the target is not
    /// registered. `EAGAIN` while a fork is in progress, `ESRCH` when the process is ending.
    ///
    /// # Safety
    /// The caller owns both ranges.
    pub unsafe fn move_pages(
        &self,
        target: usize,
        source: usize,
        len: usize,
        options: MoveOptions,
    ) -> io::Result<usize> {
        let wake = if options.wake { 0 } else { MOVE_MODE_DONTWAKE };
        let holes = if options.holes { MOVE_MODE_ALLOW_SRC_HOLES } else { 0 };
        let (dst, src, len) = (target as u64, source as u64, len as u64);
        let mut argument = MoveArg { dst, src, len, mode: wake | holes, moved: 0 };
        match ioctl(self.fd.as_raw_fd(), IOCTL_MOVE, &mut argument) {
            Ok(()) => Ok(len as usize),
            // For a partial move the kernel returns EAGAIN and the number of bytes moved.
            Err(_) if argument.moved > 0 => Ok(argument.moved as usize),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                match moved_unreported(target, source, len as usize) {
                    0 => Err(error),
                    moved => {
                        if options.wake {
                            self.wake(target, moved)?;
                        }
                        Ok(moved)
                    }
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Unregisters a range and wakes the threads that wait there.
    pub fn unregister(&self, start: usize, len: usize) -> io::Result<()> {
        ioctl(self.fd.as_raw_fd(), IOCTL_UNREGISTER, &mut range(start, len))
    }

    /// Fills missing pages from `source` and wakes the threads that wait for them. Returns the
    /// bytes that were filled: fewer than `len` if a later page was already mapped or the layout
    /// changed.
    ///
    /// # Errors
    /// `EEXIST` if the first page is mapped, `ENOENT` if the range is not within one registered
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

    /// As [`Uffd::copy`], but wakes no thread.
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
            // For a partial copy the kernel returns EAGAIN and the number of bytes copied.
            Err(_) if argument.copied > 0 => Ok(argument.copied as usize),
            Err(error) => Err(error),
        }
    }

    /// Maps the zero page at missing pages. Results and errors as for [`Uffd::copy`].
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

    /// Marks missing pages as broken: a thread that waits for one of them, or accesses it later,
    /// gets SIGBUS.
    ///
    /// # Errors
    /// As for [`Uffd::copy`], and `EINVAL` before Linux 6.6.
    ///
    /// # Safety
    /// `start` is memory that the caller pages.
    pub unsafe fn poison(&self, start: usize, len: usize) -> io::Result<()> {
        let mut argument = ZeropageArg { range: range(start, len), mode: 0, zeroed: 0 };
        ioctl(self.fd.as_raw_fd(), IOCTL_POISON, &mut argument)
    }

    /// Write-protects the mapped pages of the range. Wakes no thread.
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

    /// Removes the write-protection, and wakes the threads that wait there if `wake`.
    ///
    /// # Safety
    /// `start` is memory that the caller pages.
    pub unsafe fn unprotect(&self, start: usize, len: usize, wake: bool) -> io::Result<()> {
        let mode = if wake { 0 } else { WRITEPROTECT_MODE_DONTWAKE };
        let mut argument = WriteprotectArg { range: range(start, len), mode };
        ioctl(self.fd.as_raw_fd(), IOCTL_WRITEPROTECT, &mut argument)
    }

    /// Wakes the threads that wait in the range; they retry their access.
    pub fn wake(&self, start: usize, len: usize) -> io::Result<()> {
        ioctl(self.fd.as_raw_fd(), IOCTL_WAKE, &mut range(start, len))
    }

    /// Makes reads return at once; poll(2) on a userfaultfd requires this.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        // SAFETY: changes a flag of this descriptor.
        let done = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes reads block.
    pub fn set_blocking(&self) -> io::Result<()> {
        // SAFETY: changes a flag of this descriptor.
        let done = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_SETFL, 0) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until an event can be read. The descriptor must be non-blocking.
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

/// Returns the bytes of the first pages that are missing at `source` and present at `target`, where
/// they were missing before the move.
fn moved_unreported(target: usize, source: usize, len: usize) -> usize {
    let is_moved = |at: &usize| sys::is_present(target + at) && !sys::is_present(source + at);
    (0..len).step_by(PAGE_BYTES).take_while(is_moved).count() * PAGE_BYTES
}

fn decode(message: &RawMessage) -> Event {
    let [flags, address, thread] = message.argument;
    match message.event {
        EVENT_PAGEFAULT => Event::Fault(Fault {
            address: address as usize & !(PAGE_BYTES - 1),
            write: flags & FLAG_WRITE != 0,
            write_protected: flags & FLAG_WP != 0,
            thread: thread as u32,
        }),
        EVENT_FORK => {
            // SAFETY: the kernel has just installed this descriptor for the reader; it has no other
            // owner.
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

/// The device that the calling process opened with [`keep_device`], or -1.
static DEVICE: AtomicI32 = AtomicI32::new(-1);

/// Path of the device that makes userfaultfds.
pub const DEVICE_PATH: &CStr = c"/dev/userfaultfd";

/// Lets later calls of [`Uffd::open`], in forked children too, use this descriptor of
/// [`DEVICE_PATH`]. A child that has changed its user may no longer open the device.
pub fn keep_device(device: RawFd) {
    DEVICE.store(device, Ordering::Release);
}

fn open_descriptor() -> Result<OwnedFd, Error> {
    // SAFETY: a plain system call; this function owns the returned descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
    if fd >= 0 {
        // SAFETY: see above.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let refused = io::Error::last_os_error();
    let kept = DEVICE.load(Ordering::Acquire);
    if kept >= 0
        && let Ok(fd) = new_from_device(kept)
    {
        return Ok(fd);
    }
    let (path, flags) = (DEVICE_PATH.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
    // Without libc: a forked child calls this before libc has finished its own fork handling.
    // SAFETY: the path is a C string; this function owns the returned descriptor.
    let device = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags) } as i32;
    if device < 0 {
        return Err(not_permitted(refused, io::Error::last_os_error()));
    }
    // SAFETY: just opened.
    let device = unsafe { OwnedFd::from_raw_fd(device) };
    new_from_device(device.as_raw_fd()).map_err(|device| not_permitted(refused, device))
}

fn not_permitted(syscall: io::Error, device: io::Error) -> Error {
    // SAFETY: a question about the calling thread.
    let mode = unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) };
    let filter = match mode == libc::SECCOMP_MODE_FILTER as i32 {
        true => {
            "; besides, this process runs under a seccomp filter, of a container or a sandbox, \
             which must allow userfaultfd and its ioctls"
        }
        false => "",
    };
    Error::Userfaultfd { syscall, device, filter }
}

/// Makes a userfaultfd of the calling process with an open device.
fn new_from_device(device: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: USERFAULTFD_IOC_NEW takes the flags by value and returns a descriptor.
    let fd = unsafe { libc::ioctl(device, IOCTL_NEW as libc::Ioctl, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just created.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
