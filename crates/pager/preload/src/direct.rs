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

/// The next definition of a function, looked up once.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// The one of this name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// # Panics
    /// If there is none: the C library has it.
    pub fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        assert!(!found.is_null(), "the C library has no {:?}", self.name);
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

macro_rules! open {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// open(2). The mode is read where the caller passed one; in a register it harms nobody.
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            static NEXT: Next = Next::new($symbol);
            // SAFETY: the C library's function of this name has this type; the arguments are the
            // program's.
            unsafe {
                let next = std::mem::transmute::<*mut c_void, Open>(NEXT.get());
                next(path, allowed(flags), mode)
            }
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
            // SAFETY: as for `open`.
            unsafe {
                let next = std::mem::transmute::<*mut c_void, OpenAt>(NEXT.get());
                next(directory, path, allowed(flags), mode)
            }
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
            let argument = match command {
                libc::F_SETFL => c_long::from(allowed(argument as c_int)),
                _ => argument,
            };
            // SAFETY: as for `open`; an argument that the command does not have is not looked at.
            unsafe {
                let next = std::mem::transmute::<*mut c_void, Fcntl>(NEXT.get());
                next(fd, command, argument)
            }
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
