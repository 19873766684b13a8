//! `mmap` and its family, as the program sees them: the region's part goes to the pager, the rest
//! to the kernel.

use std::ffi::c_void;
use std::io;

use pager::mapping::MapRequest;
use pager::{Pager, sys};

use crate::inside::{Inside, is_inside};

fn failed(errno: i32) -> i32 {
    // SAFETY: the calling thread's own variable.
    unsafe { *libc::__errno_location() = errno };
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

fn kernel<T>(result: io::Result<T>) -> Result<T, i32> {
    result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// The pager, if the range has a part in its region.
fn owner(address: usize, len: usize) -> Option<&'static Pager> {
    crate::pager().filter(|pager| pager.region().clip(address, len).is_some())
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
    if let Some(pager) = crate::pager() {
        if request.is_pageable() && !is_inside() {
            let _inside = Inside::new();
            return answer_address(pager.map(len, prot));
        }
        if request.is_fixed() && owner(request.address, len).is_some() {
            let _inside = Inside::new();
            return answer_address(pager.map_fixed(request));
        }
    }
    // SAFETY: what the program asked for.
    answer_address(kernel(unsafe { sys::mmap(request.address, len, prot, flags, fd, offset) }))
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
    if let Some(pager) = owner(address, len) {
        let _inside = Inside::new();
        return answer(pager.unmap(address, len));
    }
    // SAFETY: what the program asked for.
    answer(kernel(unsafe { sys::munmap(address, len) }))
}

/// mprotect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, prot: i32) -> i32 {
    let address = address as usize;
    if let Some(pager) = owner(address, len) {
        let _inside = Inside::new();
        return answer(pager.protect(address, len, prot));
    }
    // SAFETY: what the program asked for.
    answer(kernel(unsafe { sys::mprotect(address, len, prot) }))
}

/// madvise(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    let address = address as usize;
    if let Some(pager) = owner(address, len) {
        let _inside = Inside::new();
        return answer(pager.advise(address, len, advice));
    }
    // SAFETY: what the program asked for.
    answer(kernel(unsafe { sys::madvise(address, len, advice) }))
}

/// posix_madvise(3). Never drops anything, as glibc's does not either.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    const POSIX_MADV_DONTNEED: i32 = 4;
    if advice == POSIX_MADV_DONTNEED || owner(address as usize, len).is_some() {
        return 0;
    }
    // SAFETY: what the program asked for.
    match kernel(unsafe { sys::madvise(address as usize, len, advice) }) {
        Ok(()) => 0,
        Err(errno) => errno,
    }
}

/// mremap(2). The fifth argument is read as the C prototype's variadic one: it is passed in the same
/// register, and has no meaning without MREMAP_FIXED or MREMAP_DONTUNMAP.
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
    if let Some(pager) = owner(address, old_len.max(1)) {
        let _inside = Inside::new();
        return answer_address(pager.remap(address, old_len, new_len, flags, new_address));
    }
    if flags & libc::MREMAP_FIXED != 0 && owner(new_address, new_len).is_some() {
        // A mapping of another kind into the region: it would not be known there.
        return answer_address(Err(libc::EINVAL));
    }
    // SAFETY: what the program asked for.
    answer_address(kernel(unsafe { sys::mremap(address, old_len, new_len, flags, new_address) }))
}

/// mlock(2). Memory that is paged cannot be locked: the program is told, as it is where its limit is 0.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, len: usize) -> i32 {
    if let Some(pager) = owner(address as usize, len) {
        return failed(pager.lock_in_memory());
    }
    // SAFETY: what the program asked for.
    unsafe { libc::syscall(libc::SYS_mlock, address, len) as i32 }
}

/// mlock2(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, len: usize, flags: u32) -> i32 {
    if let Some(pager) = owner(address as usize, len) {
        return failed(pager.lock_in_memory());
    }
    // SAFETY: what the program asked for.
    unsafe { libc::syscall(libc::SYS_mlock2, address, len, flags) as i32 }
}

/// mlockall(2): would bring all of the region in.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: i32) -> i32 {
    match crate::pager() {
        Some(pager) => failed(pager.lock_in_memory()),
        // SAFETY: what the program asked for.
        None => unsafe { libc::syscall(libc::SYS_mlockall, flags) as i32 },
    }
}
