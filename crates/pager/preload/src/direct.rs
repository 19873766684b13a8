//! The `open` family and `fcntl`, without `O_DIRECT`.
//!
//! A direct read puts its bytes where a page was when the read began: a device writes to the frame,
//! and no fault tells the pager. A page that is evicted meanwhile would come back without them. So a
//! program that asks for `O_DIRECT` gets the page cache, which copies through the program's own
//! mapping. `O_DIRECT` promises nothing that this breaks: durability is `O_SYNC`'s or `fsync`'s.
//!
//! The calls go on to the C library's own functions, which are points of thread cancellation.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::{early, redirect};

unsafe extern "C" {
    safe fn granary_passing() -> *mut c_int;
}

/// The definition of a function after this library's: another preloaded library's or the C library's.
/// It is looked up once.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// The one of this name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Passes the program's call on. Another library's function, to which the call may go, calls the
    /// next one in turn, and comes back here: by another name (`__sbrk`), or through the C library's
    /// table ([`redirect`]). From here such a call goes to the C library.
    ///
    /// # Panics
    /// If there is none: the C library has it.
    pub fn call<T>(&self, call: impl FnOnce(*mut c_void) -> T) -> T {
        let passing = granary_passing();
        // SAFETY: the calling thread's own variable.
        if unsafe { *passing } != 0
            && let Some(own) = redirect::own(self.name)
        {
            return call(own);
        }
        let next = self.get();
        // Nothing is dropped on the way out: a thread may be cancelled in the call.
        // SAFETY: the calling thread's own variable.
        let before = unsafe { passing.replace(1) };
        let result = call(next);
        // SAFETY: as above.
        unsafe { *passing = before };
        result
    }

    fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        assert!(!found.is_null(), "the C library has no {:?}", self.name);
        let found = redirect::beneath(found);
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

type Open = unsafe extern "C" fn(*const c_char, c_int, c_uint) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, c_uint) -> c_int;
type Fcntl = unsafe extern "C" fn(c_int, c_int, c_long) -> c_int;

/// The flags of an open without those that a paged program cannot have.
fn allowed(flags: c_int) -> c_int {
    if crate::pager().is_some() { flags & !libc::O_DIRECT } else { flags }
}

/// openat(2) before this library is relocated.
///
/// # Safety
/// As for the C library's.
unsafe fn at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    let arguments = [directory as usize, path as usize, flags as usize, mode as usize, 0, 0];
    // SAFETY: by the caller.
    unsafe { early::kernel(libc::SYS_openat, arguments) }
}

macro_rules! open {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// open(2). The mode is read where the caller passed one; in a register it harms nobody.
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            static NEXT: Next = Next::new($symbol);
            if !early::is_relocated() {
                // SAFETY: what the program asked for.
                return unsafe { at(libc::AT_FDCWD, path, flags, mode) };
            }
            // SAFETY: the C library's function of this name has this type; the arguments are the
            // program's.
            NEXT.call(|next| unsafe {
                std::mem::transmute::<*mut c_void, Open>(next)(path, allowed(flags), mode)
            })
        }
    )*};
}

macro_rules! open_at {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// openat(2), likewise.
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            directory: c_int,
            path: *const c_char,
            flags: c_int,
            mode: c_uint,
        ) -> c_int {
            static NEXT: Next = Next::new($symbol);
            if !early::is_relocated() {
                // SAFETY: what the program asked for.
                return unsafe { at(directory, path, flags, mode) };
            }
            // SAFETY: as for `open`.
            NEXT.call(|next| unsafe {
                let next = std::mem::transmute::<*mut c_void, OpenAt>(next);
                next(directory, path, allowed(flags), mode)
            })
        }
    )*};
}

macro_rules! fcntl {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// fcntl(2): `F_SETFL` leaves `O_DIRECT` off.
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: c_long) -> c_int {
            static NEXT: Next = Next::new($symbol);
            if !early::is_relocated() {
                let arguments = [fd as usize, command as usize, argument as usize, 0, 0, 0];
                // SAFETY: what the program asked for.
                return unsafe { early::kernel(libc::SYS_fcntl, arguments) };
            }
            let argument = match command {
                libc::F_SETFL => c_long::from(allowed(argument as c_int)),
                _ => argument,
            };
            // SAFETY: as for `open`; an argument that the command does not have is not looked at.
            NEXT.call(|next| unsafe {
                std::mem::transmute::<*mut c_void, Fcntl>(next)(fd, command, argument)
            })
        }
    )*};
}

// What programs are compiled to: with and without large files, and as `_FORTIFY_SOURCE` has it.
open! {
    open, c"open";
    open64, c"open64";
    __open_2, c"__open_2";
    __open64_2, c"__open64_2";
}
open_at! {
    openat, c"openat";
    openat64, c"openat64";
    __openat_2, c"__openat_2";
    __openat64_2, c"__openat64_2";
}
fcntl! {
    fcntl, c"fcntl";
    fcntl64, c"fcntl64";
}
