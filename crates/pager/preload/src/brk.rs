//! `sbrk` and `brk`: the program break, from which a program's own allocator (tcmalloc, a Lisp's)
//! may take memory.
//!
//! The kernel's break lies outside of the region. So a part of the region is set aside at the first
//! call, and the break moves in it. If the program moved the break before this library's
//! constructor ran, it used the kernel's break, and that memory stays unpaged. In the resolver of
//! an IFUNC ([`crate::early`]) the call fails, and an allocator falls back to `mmap`.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use pager::Pager;
use pager::mapping::with_current;
use pager::sys::PAGE_BYTES;

use crate::direct::Next;
use crate::early::{self, set_errno};
use crate::reentrancy::{ReentrancyGuard, is_reentrant};

/// The break gets one part in `REGION_SHARE` of the region.
const REGION_SHARE: usize = 16;

type Sbrk = unsafe extern "C" fn(isize) -> *mut c_void;
type Brk = unsafe extern "C" fn(*mut c_void) -> c_int;

/// First address and bytes of the part that is set aside; `None` if there is no room.
static PART: OnceLock<Option<(usize, usize)>> = OnceLock::new();
static BREAK: AtomicUsize = AtomicUsize::new(0);

fn failed() -> c_int {
    set_errno(libc::ENOMEM);
    -1
}

/// Returns the part; `None` if the calling thread must move the kernel's break.
fn part() -> Option<(usize, usize)> {
    let pager = crate::pager().filter(|_| !is_reentrant())?;
    *PART.get_or_init(|| {
        let _guard = ReentrancyGuard::new();
        let len = pager.region().len() / REGION_SHARE;
        let start = with_current(|pager| pager.map(len, libc::PROT_NONE))?.ok()?;
        BREAK.store(start, Ordering::Release);
        Some((start, len))
    })
}

/// Moves the break from `old` to `new`. Returns false if the break was not at `old`.
fn move_break(old: usize, new: usize) -> Result<bool, ()> {
    let (from, to) = (old.next_multiple_of(PAGE_BYTES), new.next_multiple_of(PAGE_BYTES));
    let call = |call: &dyn Fn(&'static Pager) -> Result<(), i32>| {
        let _guard = ReentrancyGuard::new();
        with_current(call).unwrap_or(Err(libc::EINVAL)).map_err(drop)
    };
    if to > from {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        call(&|pager| pager.protect(from, to - from, access))?;
    }
    if BREAK.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return Ok(false);
    }
    if to < from {
        call(&|pager| {
            pager.advise(to, from - to, libc::MADV_DONTNEED)?;
            pager.protect(to, from - to, libc::PROT_NONE)
        })?;
    }
    Ok(true)
}

/// sbrk(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sbrk(increment: isize) -> *mut c_void {
    static NEXT: Next = Next::new(c"sbrk");
    if !early::is_relocated() {
        return failed() as isize as *mut c_void;
    }
    let Some((start, len)) = part() else {
        // SAFETY: the C library's function of this name has this type.
        return NEXT
            .call(|next| unsafe { std::mem::transmute::<*mut c_void, Sbrk>(next)(increment) });
    };
    loop {
        let old = BREAK.load(Ordering::Acquire);
        let new = old.checked_add_signed(increment);
        let Some(new) = new.filter(|new| (start..=start + len).contains(new)) else {
            return failed() as isize as *mut c_void;
        };
        match move_break(old, new) {
            Ok(true) => return old as *mut c_void,
            Ok(false) => {}
            Err(()) => return failed() as isize as *mut c_void,
        }
    }
}

/// `sbrk` under the C library's other name.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sbrk(increment: isize) -> *mut c_void {
    // SAFETY: by the caller.
    unsafe { sbrk(increment) }
}

/// brk(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn brk(address: *mut c_void) -> c_int {
    static NEXT: Next = Next::new(c"brk");
    let new = address as usize;
    if !early::is_relocated() {
        return failed();
    }
    if !part().is_some_and(|(start, len)| (start..=start + len).contains(&new)) {
        // SAFETY: the C library's function of this name has this type.
        return NEXT.call(|next| unsafe { std::mem::transmute::<*mut c_void, Brk>(next)(address) });
    }
    loop {
        match move_break(BREAK.load(Ordering::Acquire), new) {
            Ok(true) => return 0,
            Ok(false) => {}
            Err(()) => return failed(),
        }
    }
}
