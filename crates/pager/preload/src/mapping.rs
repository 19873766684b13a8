//! The `mmap` family for the program: requests for paged memory go to the pager, all others to the
//! kernel.

use std::ffi::{c_int, c_uint, c_void};

use pager::Pager;
use pager::mapping::{MapRequest, with_current};
use pager::sys::{self, system_call};

use crate::early::{self, set_errno};
use crate::reentrancy::{ReentrancyGuard, is_reentrant};
use crate::unseen;

fn failed(errno: i32) -> i32 {
    set_errno(errno);
    -1
}

fn answer(result: Result<(), i32>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => failed(errno),
    }
}

fn answer_address(result: Result<usize, i32>) -> *mut c_void {
    match result {
        Ok(address) => address as *mut c_void,
        Err(errno) => {
            failed(errno);
            libc::MAP_FAILED
        }
    }
}

/// Returns true if a part of the range is paged.
fn is_owned(address: usize, len: usize) -> bool {
    crate::pager().is_some_and(|pager| pager.region().overlaps(address, len))
}

/// Calls the pager and returns its result in the C library's form.
fn paged(call: impl Fn(&'static Pager) -> Result<(), i32>) -> i32 {
    let _guard = ReentrancyGuard::new();
    answer(with_current(call).unwrap_or(Err(libc::EINVAL)))
}

/// As [`paged`], for a call that returns an address.
fn paged_address(call: impl Fn(&'static Pager) -> Result<usize, i32>) -> *mut c_void {
    let _guard = ReentrancyGuard::new();
    answer_address(with_current(call).unwrap_or(Err(libc::EINVAL)))
}

/// mmap(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> *mut c_void {
    let request = MapRequest { address: address as usize, len, prot, flags, fd, offset };
    let is_paged = crate::pager().is_some() && request.is_pageable() && !is_reentrant();
    if is_paged || request.is_fixed() && is_owned(request.address, len) {
        return paged_address(|pager| pager.map_request(request));
    }
    // SAFETY: the program's own request.
    answer_address(unsafe {
        let (prot, flags, fd, offset) =
            (prot as usize, flags as usize, fd as usize, offset as usize);
        system_call(libc::SYS_mmap, [request.address, len, prot, flags, fd, offset])
    })
}

/// mmap64(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as mmap.
    unsafe { mmap(address, len, prot, flags, fd, offset) }
}

/// munmap(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> i32 {
    let address = address as usize;
    if is_owned(address, len) {
        return paged(|pager| pager.unmap(address, len));
    }
    // SAFETY: the program's own request.
    unsafe { early::kernel(libc::SYS_munmap, [address, len, 0, 0, 0, 0]) }
}

/// mprotect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, prot: i32) -> i32 {
    let address = address as usize;
    if is_owned(address, len) {
        return paged(|pager| pager.protect(address, len, prot));
    }
    // SAFETY: the program's own request.
    unsafe { early::kernel(libc::SYS_mprotect, [address, len, prot as usize, 0, 0, 0]) }
}

/// pkey_mprotect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(
    address: *mut c_void,
    len: usize,
    prot: i32,
    key: i32,
) -> i32 {
    if key == -1 {
        // SAFETY: by the caller.
        return unsafe { mprotect(address, len, prot) };
    }
    let address = address as usize;
    if is_owned(address, len) {
        return paged(|pager| pager.protect_by_key(address, len, prot, Some(key)));
    }
    let arguments = [address, len, prot as usize, key as usize, 0, 0];
    // SAFETY: the program's own request.
    unsafe { early::kernel(libc::SYS_pkey_mprotect, arguments) }
}

/// madvise(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    let address = address as usize;
    if is_owned(address, len) {
        return paged(|pager| pager.advise(address, len, advice));
    }
    if let Some(answered) = unseen::advise(address, len, advice) {
        return answer(answered);
    }
    // SAFETY: the program's own request.
    unsafe { early::kernel(libc::SYS_madvise, [address, len, advice as usize, 0, 0, 0]) }
}

/// process_madvise(2). Advice of a process to itself goes to the pager, other advice to the kernel.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    process: c_int,
    ranges: *const libc::iovec,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    if crate::paged_memory().is_none() || flags != 0 || !is_this_process(process) {
        let (process, advice) = (process as usize, advice as usize);
        let arguments = [process, ranges as usize, count, advice, flags as usize, 0];
        // SAFETY: the program's own request.
        return match unsafe { system_call(libc::SYS_process_madvise, arguments) } {
            Ok(bytes) => bytes as isize,
            Err(errno) => failed(errno) as isize,
        };
    }
    let mut done = 0;
    for at in 0..count {
        // SAFETY: the program's array has `count` ranges.
        let range = unsafe { ranges.add(at).read() };
        // SAFETY: the program's own request.
        if unsafe { madvise(range.iov_base, range.iov_len, advice) } != 0 {
            return if done > 0 { done } else { -1 };
        }
        done += range.iov_len as isize;
    }
    done
}

/// Returns true if a descriptor of a process names the calling process.
fn is_this_process(process: c_int) -> bool {
    const SELF_THREAD: c_int = -10000;
    const SELF_PROCESS: c_int = -10001;
    if matches!(process, SELF_THREAD | SELF_PROCESS) {
        return true;
    }
    let _guard = ReentrancyGuard::new();
    // The kernel describes such a descriptor by a line with the id of its process.
    let path = std::ffi::CString::new(format!("/proc/self/fdinfo/{process}"));
    let Ok(Ok(file)) = path.map(|path| sys::open_own(&path)) else { return false };
    let text = std::io::read_to_string(file).unwrap_or_default();
    let mut lines = text.lines();
    let id = lines.find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<u32>().ok());
    id == Some(std::process::id())
}

/// posix_madvise(3). Never drops pages, like glibc's.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    const POSIX_MADV_DONTNEED: i32 = 4;
    if advice == POSIX_MADV_DONTNEED {
        return 0;
    }
    if is_owned(address as usize, len) {
        let _guard = ReentrancyGuard::new();
        // All other advice has the number that madvise has for it.
        let advised = with_current(|pager| pager.advise(address as usize, len, advice));
        return advised.unwrap_or(Ok(())).err().unwrap_or(0);
    }
    // SAFETY: the program's own request.
    unsafe {
        let arguments = [address as usize, len, advice as usize, 0, 0, 0];
        system_call(libc::SYS_madvise, arguments).err().unwrap_or(0)
    }
}

/// mremap(2). The fifth argument is variadic in the C prototype. It is passed in the same register,
/// and is ignored without MREMAP_FIXED or MREMAP_DONTUNMAP.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    address: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: i32,
    new_address: *mut c_void,
) -> *mut c_void {
    let (address, new_address) = (address as usize, new_address as usize);
    if is_owned(address, old_len.max(1)) {
        return paged_address(|pager| pager.remap(address, old_len, new_len, flags, new_address));
    }
    if flags & libc::MREMAP_FIXED != 0 && is_owned(new_address, new_len) {
        // A foreign mapping moved over paged memory would be unknown to the pager.
        return answer_address(Err(libc::EINVAL));
    }
    unseen::check_remap(address, old_len);
    // SAFETY: the program's own request.
    answer_address(unsafe {
        let arguments = [address, old_len, new_len, flags as usize, new_address, 0];
        system_call(libc::SYS_mremap, arguments)
    })
}

/// mlock(2). Paged memory cannot be locked: the call fails as with an RLIMIT_MEMLOCK of 0.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, len: usize) -> i32 {
    if is_owned(address as usize, len) {
        return failed(libc::ENOMEM);
    }
    // SAFETY: the program's own request.
    unsafe { early::kernel(libc::SYS_mlock, [address as usize, len, 0, 0, 0, 0]) }
}

/// mlock2(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, len: usize, flags: u32) -> i32 {
    if is_owned(address as usize, len) {
        return failed(libc::ENOMEM);
    }
    // SAFETY: the program's own request.
    unsafe { early::kernel(libc::SYS_mlock2, [address as usize, len, flags as usize, 0, 0, 0]) }
}

/// mlockall(2). Fails, because it would make the whole region resident.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: i32) -> i32 {
    match crate::pager() {
        Some(_) => failed(libc::ENOMEM),
        // SAFETY: the program's own request.
        None => unsafe { early::kernel(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) },
    }
}
