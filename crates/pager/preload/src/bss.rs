//! Adoption of the `.bss` of the program and of the libraries that it starts with.
//!
//! The zeroed variables of an object are private anonymous memory that the kernel or the dynamic
//! linker has mapped before this library runs. Programs with static arrays (Fortran, STREAM) have
//! most of their memory there. The object's last page with bytes of the file is not anonymous and
//! stays unpaged, as does an object's `.bss` below [`LEAST_BYTES`].
//!
//! These objects are never unloaded. Libraries that the program opens later (`dlopen`) can be, by
//! system calls that the pager does not see, so their `.bss` stays unpaged.

use std::ffi::{c_int, c_void};

use pager::Pager;
use pager::sys::{self, PAGE_BYTES};

/// Smallest `.bss` that is paged.
const LEAST_BYTES: usize = 1 << 20;

/// Maximum number of objects with a large `.bss`; further ones stay unpaged.
const OBJECTS: usize = 64;

struct Found {
    ranges: [(usize, usize); OBJECTS],
    count: usize,
}

/// Gives the pager each large `.bss`, except this library's own.
pub fn adopt(pager: &'static Pager) {
    let mut found = Found { ranges: [(0, 0); OBJECTS], count: 0 };
    // SAFETY: the callback gets the pointer to `found`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut found).cast()) };
    for &(start, len) in &found.ranges[..found.count] {
        // SAFETY: whole pages of the `.bss` of an object that is never unloaded.
        if let Err(error) = unsafe { pager.adopt(start, len) } {
            sys::say(&format!(
                "cannot read which pages of static variables exist (/proc/self/pagemap): {error}; \
                 {} MiB of them stay unpaged",
                len >> 20
            ));
        }
    }
}

/// Notes the `.bss` of an object.
unsafe extern "C" fn note(object: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker passes a valid object and `adopt`'s pointer, and the program
    // headers are as many as it says.
    let (object, found, headers) = unsafe {
        let object = &*object;
        let headers = std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum));
        (object, &mut *found.cast::<Found>(), headers)
    };
    let base = object.dlpi_addr as usize;
    let own = note as *const () as usize;
    let contains = |header: &libc::Elf64_Phdr, address: usize| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        header.p_type == libc::PT_LOAD && address.wrapping_sub(start) < header.p_memsz as usize
    };
    if headers.iter().any(|header| contains(header, own)) {
        return 0;
    }
    for header in headers {
        let writable = header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0;
        let start = base.wrapping_add(header.p_vaddr as usize);
        let of_file = (start + header.p_filesz as usize).next_multiple_of(PAGE_BYTES);
        let end = (start + header.p_memsz as usize).next_multiple_of(PAGE_BYTES);
        let len = end.saturating_sub(of_file);
        if writable && len >= LEAST_BYTES && found.count < OBJECTS {
            found.ranges[found.count] = (of_file, len);
            found.count += 1;
        }
    }
    0
}
