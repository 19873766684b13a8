//! The `open` family and `fcntl`, without `O_DIRECT` where the data of a device could be lost.
//!
//! For a direct read, the device writes to the memory of the pages at the time when the read began.
//! If a page is evicted meanwhile, the bytes are lost. A page that the kernel has pinned for the
//! read refuses to be moved, but not to be copied. So a file keeps `O_DIRECT` only if pages are
//! moved ([`pager::Pager::moves_pages`]) and the file system pins pages ([`PINNING`]). If not, the
//! program gets the page cache, which copies through the program's own mapping. This violates no
//! guarantee of `O_DIRECT`: durability is guaranteed by `O_SYNC` and `fsync`.
//!
//! The calls are passed on to the C library's functions, which are cancellation points of threads.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use pager::Pager;
use pager::sys::system_call;

use crate::{early, own_memory, redirect};

unsafe extern "C" {
    safe fn granary_passing() -> *mut c_int;
}

/// The next definition of a function after this library's: another preloaded library's or the C
/// library's. It is looked up once.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
    /// True if `found` is the C library's function, which calls no next definition.
    is_last: AtomicBool,
}

impl Next {
    /// Creates the entry for a function's name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()), is_last: AtomicBool::new(false) }
    }

    /// Looks the next definition up before the first call.
    pub fn prepare(&self) {
        self.get();
    }

    /// Passes the program's call on to the next definition. That may be another library's function,
    /// which calls its next definition in turn and comes back to this library, by another name
    /// (`__sbrk`) or through the C library's table ([`redirect`]). Such a nested call goes to the C
    /// library directly.
    ///
    /// # Panics
    /// If there is no next definition. The C library has all of them.
    pub fn call<T>(&self, call: impl FnOnce(*mut c_void) -> T) -> T {
        let passing = granary_passing();
        // SAFETY: the calling thread's own variable.
        if unsafe { *passing } != 0
            && let Some(own) = redirect::c_library_function(self.name)
        {
            return call(own);
        }
        let next = self.get();
        if self.is_last.load(Ordering::Relaxed) {
            return call(next);
        }
        // Restored by hand and not by a destructor, because a thread may be cancelled in the call.
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
        let found = redirect::resolve_replaced(found);
        let is_last = redirect::c_library_function(self.name) == Some(found);
        self.is_last.store(is_last, Ordering::Relaxed);
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Defines a module `next` with the [`Next`] of each function, and `prepare` for all of them.
macro_rules! next_definitions {
    ($($name:ident = $symbol:expr;)*) => {
        /// Looks the C library's functions up. Otherwise the first call would do so, perhaps in a
        /// signal handler, where `dlsym` is not allowed.
        pub fn prepare() {
            $(next::$name.prepare();)*
        }

        #[allow(non_upper_case_globals)]
        mod next {
            use crate::direct::Next;
            $(pub static $name: Next = Next::new($symbol);)*
        }
    };
}
pub(crate) use next_definitions;

type Open = unsafe extern "C" fn(*const c_char, c_int, c_uint) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, c_uint) -> c_int;
type Fcntl = unsafe extern "C" fn(c_int, c_int, c_long) -> c_int;

/// File systems whose direct I/O pins pages, on the kernels that can move pages. Others only
/// reference them (NFS, and FUSE on some kernels), or pass the request on to any other file system
/// (overlayfs).
const PINNING: [i64; 5] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::F2FS_SUPER_MAGIC,
    // Copies.
    libc::TMPFS_MAGIC,
];

/// Returns true if the file may have `O_DIRECT`. For a pipe the flag means that a read returns the
/// bytes of one write.
fn may_be_direct(pager: &Pager, fd: c_int) -> bool {
    // SAFETY: structures of numbers, valid for the writes.
    let (file, system) = unsafe {
        let (mut file, mut system) = (std::mem::zeroed::<libc::stat>(), std::mem::zeroed());
        if libc::fstat(fd, &mut file) != 0 || libc::fstatfs(fd, &mut system) != 0 {
            return false;
        }
        (file, system)
    };
    match file.st_mode & libc::S_IFMT {
        libc::S_IFREG => pager.moves_pages() && PINNING.contains(&system.f_type),
        libc::S_IFBLK => pager.moves_pages(),
        libc::S_IFIFO => true,
        _ => false,
    }
}

/// Returns the flags of an open that are passed on. The file is not open yet, so its file system is
/// not known.
fn requested(flags: c_int) -> c_int {
    match crate::pager() {
        Some(pager) if !pager.moves_pages() => flags & !libc::O_DIRECT,
        _ => flags,
    }
}

/// Takes `O_DIRECT` off an open file if the file must not have it, and notes `/proc/self/mem`.
/// Returns the descriptor.
fn opened(fd: c_int, path: *const c_char, flags: c_int) -> c_int {
    own_memory::note_opened(fd, path);
    let has_it = fd >= 0 && requested(flags) & libc::O_DIRECT != 0;
    if has_it && crate::pager().is_some_and(|pager| !may_be_direct(pager, fd)) {
        let control = |command: c_int, argument: usize| {
            let arguments = [fd as usize, command as usize, argument, 0, 0, 0];
            // SAFETY: the status flags of a file that the program has just opened.
            unsafe { system_call(libc::SYS_fcntl, arguments) }
        };
        if let Ok(flags) = control(libc::F_GETFL, 0) {
            let _ = control(libc::F_SETFL, flags & !(libc::O_DIRECT as usize));
        }
    }
    fd
}

/// Returns the flags that `F_SETFL` may set.
fn settable(fd: c_int, flags: c_int) -> c_int {
    match crate::pager() {
        Some(pager) if flags & libc::O_DIRECT != 0 && !may_be_direct(pager, fd) => {
            flags & !libc::O_DIRECT
        }
        _ => flags,
    }
}

/// openat(2) before this library is relocated.
///
/// # Safety
/// As for the C library's function.
unsafe fn at(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    let arguments = [directory as usize, path as usize, flags as usize, mode as usize, 0, 0];
    // SAFETY: by the caller.
    unsafe { early::kernel(libc::SYS_openat, arguments) }
}

macro_rules! open {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// open(2). The mode is read even if the caller passed none: it is passed in a register, so
        /// reading it is harmless.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            static NEXT: Next = Next::new($symbol);
            if !early::is_relocated() {
                // SAFETY: the program's own request.
                return unsafe { at(libc::AT_FDCWD, path, flags, mode) };
            }
            // SAFETY: the C library's function of this name has this type; the arguments are the
            // program's.
            NEXT.call(|next| unsafe {
                let next = std::mem::transmute::<*mut c_void, Open>(next);
                opened(next(path, requested(flags), mode), path, flags)
            })
        }
    )*};
}

macro_rules! open_at {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// openat(2), like open(2).
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            directory: c_int,
            path: *const c_char,
            flags: c_int,
            mode: c_uint,
        ) -> c_int {
            static NEXT: Next = Next::new($symbol);
            if !early::is_relocated() {
                // SAFETY: the program's own request.
                return unsafe { at(directory, path, flags, mode) };
            }
            // SAFETY: as for `open`.
            NEXT.call(|next| unsafe {
                let next = std::mem::transmute::<*mut c_void, OpenAt>(next);
                opened(next(directory, path, requested(flags), mode), path, flags)
            })
        }
    )*};
}

macro_rules! fcntl {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// fcntl(2): `F_SETFL` removes `O_DIRECT` where a file must not have it.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: c_long) -> c_int {
            static NEXT: Next = Next::new($symbol);
            if !early::is_relocated() {
                let arguments = [fd as usize, command as usize, argument as usize, 0, 0, 0];
                // SAFETY: the program's own request.
                return unsafe { early::kernel(libc::SYS_fcntl, arguments) };
            }
            let argument = match command {
                libc::F_SETFL => c_long::from(settable(fd, argument as c_int)),
                _ => argument,
            };
            // SAFETY: as for `open`; the C library ignores an argument that the command does not
            // have.
            NEXT.call(|next| unsafe {
                std::mem::transmute::<*mut c_void, Fcntl>(next)(fd, command, argument)
            })
        }
    )*};
}

// The names to which programs are compiled: with and without large files, and with
// `_FORTIFY_SOURCE`.
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
