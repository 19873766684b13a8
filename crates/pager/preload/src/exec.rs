//! exec: the programs that a process starts are paged too, whatever environment it gives them.
//!
//! Each new program's environment gets what it lacks: this library in `LD_PRELOAD`, and the run's
//! `GRANARY_*` variables. Variables that are there keep their values. The process is noted in the
//! run's memory ([`pager::execs`]) until the new program pages. A process that has changed its user
//! hands the sockets of memory nodes on to the program ([`pager::node_sockets`]).
//!
//! All functions of the C library that start programs (the `exec` family, `posix_spawn`, `system`,
//! `popen`, `wordexp`) end in its `execve`, most of them by calls that no symbol table is looked up
//! for. So the beginning of this function's code becomes a jump to [`execve`]. `execveat` and
//! `fexecve` make a system call of their own, and are interposed.
//!
//! The code here also runs in children of `vfork` and `posix_spawn`, which have their parent's
//! memory, and a stack of 32 KiB. So nothing here allocates, takes a lock, or changes the program's
//! `environ`.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use pager::execs::{Execs, Reason};
use pager::executable::kind_of;
use pager::node_sockets::{self, HandedOn};
use pager::run_memory::RunMemory;
use pager::sys::{self, PAGE_BYTES, system_call};
use pager::{Pager, descriptor};

use crate::{early, redirect};

const PRELOAD: &[u8] = b"LD_PRELOAD=";
const PREFIX: &[u8] = b"GRANARY_";
/// A variable with which a process and its children are not paged.
pub const UNPAGED: &str = "GRANARY_UNPAGED";
const UNPAGED_ENTRY: &[u8] = b"GRANARY_UNPAGED=1";
/// Words on the stack for a changed environment; a larger one is mapped.
const WORDS: usize = 512;
/// Number of scripts that the kernel follows to their interpreters.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script that the kernel reads for its interpreter.
const LINE_BYTES: usize = 256;

/// What each new program's environment needs.
struct Needed {
    /// Path of this library.
    library: CString,
    /// Entries of the form NAME=VALUE; the first one is `LD_PRELOAD`.
    entries: Vec<CString>,
}

static NEEDED: OnceLock<Needed> = OnceLock::new();

/// Keeps the variables of this process for the programs that it starts.
///
/// # Safety
/// `environment` is an array of C strings, terminated by null.
pub unsafe fn prepare(environment: *const *const c_char) {
    // SAFETY: this library stays loaded as long as it runs; an all-zero Dl_info is valid.
    let library = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(prepare as *const c_void, &mut info) == 0 {
            return;
        }
        CStr::from_ptr(info.dli_fname).to_owned()
    };
    let preload = CString::new([PRELOAD, library.to_bytes()].concat());
    // SAFETY: by the caller.
    let ours = unsafe { Environment(environment).entries() }
        .filter(|entry| entry.to_bytes().starts_with(PREFIX) && !is_of_descriptors(entry))
        .map(CStr::to_owned);
    let entries = preload.into_iter().chain(ours).collect();
    if NEEDED.set(Needed { library, entries }).is_err() {
        return;
    }
    if let Err(error) = patch::patch() {
        sys::say(&format!(
            "cannot change the C library's execve: {error}; programs that this one starts with an \
             environment of their own are not paged"
        ));
    }
}

/// Withdraws the note of this process, because its program is paged or ends.
pub fn is_paged() {
    if let Some(memory) = RunMemory::current() {
        Execs::of(memory).withdraw(process());
    }
}

/// Notes why this process is not paged.
pub fn is_not_paged(reason: Reason) {
    if let Some(memory) = RunMemory::current() {
        Execs::of(memory).explain(process(), reason);
    }
}

/// Returns the process id. In a child of `vfork` it is not the one that this library knows.
fn process() -> u32 {
    // SAFETY: returns a number.
    unsafe { system_call(libc::SYS_getpid, [0; 6]) }.unwrap_or(0) as u32
}

/// An environment: an array of C strings, terminated by null; or null, if it is empty.
#[derive(Clone, Copy)]
struct Environment(*const *const c_char);

impl Environment {
    /// Iterates over the entries.
    ///
    /// # Safety
    /// The environment is valid as long as the result is used.
    unsafe fn entries<'a>(self) -> impl Iterator<Item = &'a CStr> {
        let mut at = self.0;
        std::iter::from_fn(move || {
            // SAFETY: by the caller; the end has not been reached.
            let entry = unsafe { at.as_ref() }.filter(|entry| !entry.is_null())?;
            // SAFETY: as above.
            unsafe {
                at = at.add(1);
                Some(CStr::from_ptr(*entry))
            }
        })
    }
}

/// Returns true if both entries have the same name.
fn same_name(entry: &CStr, other: &CStr) -> bool {
    let name = |entry: &CStr| entry.to_bytes().iter().position(|&byte| byte == b'=');
    let (len, other_len) = (name(entry), name(other));
    len == other_len && len.is_some_and(|len| entry.to_bytes()[..len] == other.to_bytes()[..len])
}

/// Returns true for the variable that names handed descriptors, which each program gets with
/// values of its own.
fn is_of_descriptors(entry: &CStr) -> bool {
    let rest = entry.to_bytes().strip_prefix(node_sockets::VARIABLE.as_bytes());
    rest.is_some_and(|rest| rest.starts_with(b"="))
}

/// Returns the part after the last slash.
fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

impl Needed {
    fn is_library(&self, path: &[u8]) -> bool {
        file_name(path) == file_name(self.library.to_bytes())
    }

    /// Iterates over the libraries in a value of `LD_PRELOAD`.
    fn libraries(value: &[u8]) -> impl Iterator<Item = &[u8]> {
        value.split(|byte| b": ".contains(byte)).filter(|path| !path.is_empty())
    }

    fn missing(&self, environment: Environment) -> impl Iterator<Item = &CString> {
        self.entries.iter().filter(move |needed| {
            // SAFETY: the program's environment, valid during its call.
            !unsafe { environment.entries() }.any(|entry| same_name(entry, needed))
        })
    }

    /// Calls `run` with the environment that a new program gets: with this library, the run's
    /// variables and the one of `handed` descriptors, or without the library.
    fn change<T>(
        &self,
        environment: Environment,
        with_library: bool,
        handed: Option<&CStr>,
        run: impl FnOnce(*const *const c_char) -> T,
    ) -> T {
        // The dynamic linker uses the last value.
        let (mut count, mut before, mut names_handed) = (0, None, false);
        // SAFETY: the program's environment, valid during its call.
        for entry in unsafe { environment.entries() } {
            count += 1;
            names_handed |= is_of_descriptors(entry);
            before = entry.to_bytes().strip_prefix(PRELOAD).or(before);
        }
        let has_it = before.map(|value| Self::libraries(value).any(|path| self.is_library(path)));
        let (changes_it, missing) = match with_library {
            true => (has_it == Some(false), self.missing(environment).count()),
            false => (has_it == Some(true), 0),
        };
        if !changes_it && missing == 0 && handed.is_none() {
            return run(environment.0);
        }
        let text =
            PRELOAD.len() + self.library.to_bytes().len() + before.map_or(0, <[u8]>::len) + 2;
        let added = handed.filter(|_| !names_handed);
        let pointers = count + missing + usize::from(added.is_some()) + 1;
        with_words(pointers + text.div_ceil(size_of::<usize>()), |words| {
            // Without memory the program starts as it is, and counts as one without the pool.
            let Some(words) = words else { return run(environment.0) };
            let (pointers, text) = words.split_at_mut(pointers);
            // SAFETY: the memory of words, as bytes.
            let text = unsafe {
                let len = size_of_val(text);
                std::slice::from_raw_parts_mut(text.as_mut_ptr().cast::<u8>(), len)
            };
            if changes_it {
                let ours = with_library.then_some(self.library.to_bytes());
                let theirs = Self::libraries(before.unwrap_or_default());
                let kept = theirs.filter(|path| with_library || !self.is_library(path));
                write_preload(text, ours.into_iter().chain(kept));
            }
            let preload = text.as_ptr() as usize;
            // SAFETY: the program's environment, valid during its call.
            let theirs = unsafe { environment.entries() }.map(|entry| {
                let is_changed = changes_it && entry.to_bytes().starts_with(PRELOAD);
                let entry = handed.filter(|_| is_of_descriptors(entry)).unwrap_or(entry);
                if is_changed { preload } else { entry.as_ptr() as usize }
            });
            let ours = self.missing(environment).take(missing).map(CString::as_c_str).chain(added);
            let all = theirs.chain(ours.map(|entry| entry.as_ptr() as usize)).chain([0]);
            pointers.iter_mut().zip(all).for_each(|(pointer, entry)| *pointer = entry);
            run(pointers.as_ptr().cast())
        })
    }
}

/// Writes an entry of `LD_PRELOAD`, terminated by zero.
fn write_preload<'a>(text: &mut [u8], libraries: impl Iterator<Item = &'a [u8]>) {
    let separated = libraries.enumerate().flat_map(|(index, path)| {
        let separator: &[u8] = if index == 0 { b"" } else { b":" };
        separator.iter().chain(path)
    });
    let bytes = PRELOAD.iter().chain(separated).copied().chain([0]);
    text.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
}

/// Calls `run` with `count` words of memory.
fn with_words<T>(count: usize, run: impl FnOnce(Option<&mut [usize]>) -> T) -> T {
    if count <= WORDS {
        return run(Some(&mut [0; WORDS][..count]));
    }
    let bytes = count * size_of::<usize>();
    let Ok(base) = sys::map_anonymous(bytes) else { return run(None) };
    // A child of `vfork` leaves this mapping to its parent, unless its call fails.
    // SAFETY: just mapped, and used only here.
    unsafe {
        let result = run(Some(std::slice::from_raw_parts_mut(base as *mut usize, count)));
        let _ = sys::unmap_anonymous(base, bytes);
        result
    }
}

/// An open file, which is read by system calls only.
struct RawFile(c_int);

impl FileExt for RawFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let address = buffer.as_mut_ptr() as usize;
        let arguments = [self.0 as usize, address, buffer.len(), offset as usize, 0, 0];
        // SAFETY: the buffer is valid for its length.
        let read = unsafe { system_call(libc::SYS_pread64, arguments) };
        read.map_err(io::Error::from_raw_os_error)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(libc::EBADF))
    }
}

impl RawFile {
    /// Opens a regular file. Opening another one could have an effect.
    ///
    /// # Safety
    /// The path is a C string.
    unsafe fn open(directory: c_int, path: *const c_char, flags: c_int) -> Option<Self> {
        // SAFETY: a structure of numbers; the path is the caller's.
        let is_regular = unsafe {
            let mut found: libc::stat = std::mem::zeroed();
            let arguments =
                [directory as usize, path as usize, &raw mut found as usize, flags as usize, 0, 0];
            system_call(libc::SYS_newfstatat, arguments).is_ok()
                && found.st_mode & libc::S_IFMT == libc::S_IFREG
        };
        if !is_regular {
            return None;
        }
        let how = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
        // SAFETY: the path is the caller's.
        let opened = unsafe {
            if *path == 0 {
                let arguments = [directory as usize, libc::F_DUPFD_CLOEXEC as usize, 0, 0, 0, 0];
                system_call(libc::SYS_fcntl, arguments)
            } else {
                let arguments = [directory as usize, path as usize, how as usize, 0, 0, 0];
                system_call(libc::SYS_openat, arguments)
            }
        };
        opened.ok().map(|fd| Self(fd as c_int))
    }
}

impl Drop for RawFile {
    fn drop(&mut self) {
        // SAFETY: this value's own descriptor.
        let _ = unsafe { system_call(libc::SYS_close, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Returns true if a program runs with this library. Follows `#!` to the interpreter, whose path
/// may be relative to the working directory.
///
/// # Safety
/// The path is a C string.
unsafe fn runs_with_library(directory: c_int, path: *const c_char, flags: c_int) -> bool {
    // SAFETY: by the caller.
    let mut file = unsafe { RawFile::open(directory, path, flags) };
    for _ in 0..=SCRIPTS_MAX {
        // Without access to the file, the kernel answers.
        let Some(opened) = &file else { return true };
        let mut line = [0u8; LINE_BYTES];
        let Ok(got) = opened.read_at(&mut line[..LINE_BYTES - 1], 0) else { return true };
        if !line.starts_with(b"#!") {
            let kind = kind_of(opened).ok().flatten();
            return kind.is_none_or(|kind| kind.runs_with_library());
        }
        let is_space = |byte: &u8| b" \t".contains(byte);
        let start = line[2..got].iter().position(|byte| !is_space(byte)).map_or(got, |at| 2 + at);
        let ends = |byte: &u8| is_space(byte) || b"\n\0".contains(byte);
        let end = line[start..].iter().position(ends).map_or(LINE_BYTES - 1, |at| start + at);
        line[end] = 0;
        // SAFETY: terminated by zero.
        file = unsafe { RawFile::open(libc::AT_FDCWD, line[start..].as_ptr().cast(), 0) };
    }
    true
}

/// Notes that this process executes a program.
///
/// # Safety
/// The path is a C string.
unsafe fn note(execs: Execs, directory: c_int, path: *const c_char, reason: Reason) {
    // SAFETY: by the caller.
    let mut path = unsafe { CStr::from_ptr(path) }.to_bytes();
    while let Some(rest) = path.strip_prefix(b"./") {
        path = rest;
    }
    let mut buffer = [0u8; LINE_BYTES];
    let address = buffer.as_mut_ptr() as usize;
    let mut before: &[u8] = b"";
    if path.is_empty() {
        let mut link = [0u8; 32];
        let _ = write!(&mut link[..], "/proc/self/fd/{directory}\0");
        let arguments = [link.as_ptr() as usize, address, LINE_BYTES, 0, 0, 0];
        // SAFETY: the path ends with a zero byte; the buffer is valid for its length.
        let len = unsafe { system_call(libc::SYS_readlink, arguments) }.unwrap_or(0);
        before = &buffer[..len];
    } else if directory == libc::AT_FDCWD && !path.starts_with(b"/") {
        // SAFETY: the buffer is valid for its length. The result includes the final zero.
        let len = unsafe { system_call(libc::SYS_getcwd, [address, LINE_BYTES, 0, 0, 0, 0]) };
        if let Ok(len @ 1..=LINE_BYTES) = len {
            buffer[len - 1] = b'/';
            let is_root = len == c"/".count_bytes() + 1;
            before = &buffer[..if is_root { len - 1 } else { len }];
        }
    }
    execs.note(process(), [before, path], reason);
}

/// Executes a program, by the system call `execve` or `execveat`. Returns if that fails.
///
/// # Safety
/// As for the system call.
unsafe fn execute(
    directory: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_int {
    let call = |environment: *const *const c_char| {
        let [path, arguments, environment] =
            [path as usize, arguments as usize, environment as usize];
        // SAFETY: by the caller.
        unsafe {
            if directory == libc::AT_FDCWD && flags == 0 {
                early::kernel(libc::SYS_execve, [path, arguments, environment, 0, 0, 0])
            } else {
                let directory = directory as usize;
                let all = [directory, path, arguments, environment, flags as usize, 0];
                early::kernel(libc::SYS_execveat, all)
            }
        }
    };
    let needed = if early::is_relocated() { NEEDED.get() } else { None };
    let Some(needed) = needed.filter(|_| !path.is_null()) else { return call(environment) };
    let environment = Environment(environment);
    // SAFETY: by the caller.
    let is_asked = unsafe { environment.entries() }.any(|entry| entry.to_bytes() == UNPAGED_ENTRY);
    // SAFETY: by the caller.
    let with_library = !is_asked && unsafe { runs_with_library(directory, path, flags) };
    let execs = RunMemory::current().map(Execs::of);
    if let Some(execs) = execs {
        let reason = if is_asked { Reason::Asked } else { Reason::NotLoaded };
        // SAFETY: by the caller.
        unsafe { note(execs, directory, path, reason) };
    }
    // In a child of vfork too: the descriptor table is a copy of its parent's.
    let handed = crate::paged_memory().filter(|_| with_library).and_then(Pager::to_hand_on);
    let keep = |stays_open| {
        let all = handed.into_iter().flat_map(HandedOn::descriptors);
        all.for_each(|fd| _ = descriptor::keep_over_exec(fd, stays_open));
    };
    keep(true);
    let result = needed.change(environment, with_library, handed.map(HandedOn::entry), call);
    keep(false);
    if let Some(execs) = execs {
        execs.withdraw(process());
    }
    result
}

/// execve(2), in place of the C library's function.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    // SAFETY: by the caller.
    unsafe { execute(libc::AT_FDCWD, path, arguments, environment, 0) }
}

/// execveat(2).
///
/// # Safety
/// As for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    directory: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_int {
    // SAFETY: by the caller.
    unsafe { execute(directory, path, arguments, environment, flags) }
}

/// fexecve(3).
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(
    fd: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    if fd < 0 || arguments.is_null() || environment.is_null() {
        early::set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: by the caller.
    unsafe { execute(fd, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH) }
}

/// `syscall(SYS_execve, ...)`.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn execve_by_number(
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> c_long {
    // SAFETY: by the caller.
    unsafe { execve(path, arguments, environment) }.into()
}

/// `syscall(SYS_execveat, ...)`.
///
/// # Safety
/// As for the system call.
pub unsafe extern "C" fn execveat_by_number(
    directory: c_int,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_long {
    // SAFETY: by the caller.
    unsafe { execveat(directory, path, arguments, environment, flags) }.into()
}

#[cfg(target_arch = "x86_64")]
mod patch {
    use super::*;

    /// `mov eax, SYS_execve; syscall`: the function's whole work.
    const BEGINNING: [u8; 7] = [0xb8, 59, 0, 0, 0, 0x0f, 0x05];
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    /// `jmp [rip + 0]`, before the address.
    const JUMP: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];

    /// Makes the C library's `execve` jump to this module's.
    pub fn patch() -> io::Result<()> {
        let unknown =
            || io::Error::new(io::ErrorKind::Unsupported, "its code is not the usual one");
        let own = redirect::address_of(c"execve").ok_or_else(unknown)? as usize;
        let starts_with = |at: usize, code: &[u8]| {
            // SAFETY: the beginning of a function, which is longer than that.
            unsafe { std::slice::from_raw_parts(at as *const u8, code.len()) == code }
        };
        let at = if starts_with(own, &ENDBR64) { own + ENDBR64.len() } else { own };
        if !starts_with(at, &BEGINNING) {
            return Err(unknown());
        }
        let mut code = [0; JUMP.len() + size_of::<usize>()];
        code[..JUMP.len()].copy_from_slice(&JUMP);
        code[JUMP.len()..].copy_from_slice(&(execve as *const () as usize).to_le_bytes());
        let start = at / PAGE_BYTES * PAGE_BYTES;
        let len = (at + code.len()).next_multiple_of(PAGE_BYTES) - start;
        let prot = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: the function is at least as long as the code: after the system call it tests the
        // result, and stores an error. Its pages stay executable for other threads, and no thread
        // executes a program yet.
        unsafe {
            sys::mprotect(start, len, prot | libc::PROT_WRITE)?;
            std::ptr::copy_nonoverlapping(code.as_ptr(), at as *mut u8, code.len());
            sys::mprotect(start, len, prot)
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod patch {
    /// On other machines, programs that are started by `execve` keep their environment.
    pub fn patch() -> std::io::Result<()> {
        Ok(())
    }
}
