//! `libgranary_preload.so`, the library that `granary run` preloads into a program.
//!
//! The constructor reads the settings ([`pager::config`]), sets up the pager, and gives the arena
//! in the pager's region to mimalloc. From then on the program's `malloc` and private anonymous
//! `mmap`s are paged. Without `GRANARY_LOCAL` in the environment, the library serves `malloc` from
//! its internal heap and pages nothing.
//!
//! Code in this library must not allocate paged memory, take a lock that the program may hold at a
//! fault, or use the program's stdio.

mod brk;
mod bss;
mod calls;
#[cfg(target_arch = "x86_64")]
mod clones;
mod credentials;
mod descriptors;
mod direct;
mod early;
mod exec;
mod forks;
mod heap;
mod heapinfo;
mod jemalloc;
mod leaks;
mod malloc;
mod mapping;
mod own_memory;
mod redirect;
mod reentrancy;
mod segv;
mod thread_exit;
mod tools;
mod unpinned;
mod unseen;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmimalloc_sys as mi;
use pager::config::{Config, EXIT_PAGER};
use pager::execs::Reason;
use pager::executable::{Kind, kind_of};
use pager::run_memory::RunMemory;
use pager::sys::{self, PAGE_BYTES};
use pager::{Error, Pager};

#[global_allocator]
static INTERNAL: heap::Internal = heap::Internal;

static ARENA_OPEN: AtomicBool = AtomicBool::new(false);

/// Returns the pager, once it is set up. `None` in a child that has no threads of a pager
/// ([`unseen`]), although parts of its memory are paged.
fn pager() -> Option<&'static Pager> {
    paged_memory().filter(|_| !unseen::is_this_process())
}

/// Returns the pager of which this process has a copy: it tells which memory is paged. Before this
/// library is relocated ([`early`]), the pager crate's variable cannot be accessed.
fn paged_memory() -> Option<&'static Pager> {
    if early::is_relocated() { pager::current() } else { None }
}

/// Returns true once mimalloc serves the program.
fn arena_is_open() -> bool {
    ARENA_OPEN.load(Ordering::Acquire)
}

type Constructor = extern "C" fn(c_int, *const *const c_char, *const *const c_char);

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: Constructor = construct;

extern "C" fn construct(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    let _guard = reentrancy::ReentrancyGuard::new();
    if let Err(error) = redirect::redirect() {
        sys::say(&format!(
            "cannot change the C library's symbol table: {error}; a library that the program opens \
             with RTLD_DEEPBIND may abort the program with \"invalid pointer\""
        ));
    }
    own_memory::prepare();
    credentials::prepare();
    segv::prepare();
    #[cfg(target_arch = "x86_64")]
    clones::prepare();
    let get = |name: &str| {
        // SAFETY: the loader passes the environment as C strings, terminated by null.
        unsafe { variable(environment, name) }
    };
    if get(exec::UNPAGED).as_deref() == Some("1") {
        return;
    }
    let started = Config::from_environment(get).and_then(|config| match config {
        Some(config) => {
            if let Some(memory) = &config.run_memory {
                // Without this memory, the start of the pager names the reason.
                let _ = RunMemory::of_this_process(memory);
            }
            // SAFETY: as above.
            unsafe { exec::prepare(environment) };
            start(&config)
        }
        None => Ok(()),
    });
    if let Err(error) = started {
        exec::is_paged();
        sys::die(EXIT_PAGER, &error.to_string());
    }
}

/// Checks that the program can be paged. `granary run` checks the program that it starts, but not
/// the programs that this one starts. Returns the reason if the program runs without the pool.
fn check_program(config: &Config) -> Result<Option<Reason>, Error> {
    if tools::filter_refuses_sockets() {
        return Ok(Some(Reason::Filter));
    }
    let refused = |why: &str| {
        let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let program = program.display().to_string();
        Error::Unpaged { program, why: why.into() }
    };
    if let Some(why) = tools::obstacle() {
        let error = refused(why);
        if !config.allow_unpaged {
            return Err(error);
        }
        sys::say(&format!("{error}, as it does now"));
        return Ok(Some(Reason::Tool));
    }
    // Without /proc the program is not checked.
    let Ok(file) = std::fs::File::open("/proc/self/exe") else { return Ok(None) };
    let kind = kind_of(&file)
        .map_err(|source| Error::System { what: "read the program's file".into(), source })?;
    if kind != Some(Kind::GoWithoutLibc) || config.allow_unpaged {
        return Ok(None);
    }
    Err(refused(
        "it is a Go program without cgo, whose runtime maps its memory by raw system calls",
    ))
}

fn start(config: &Config) -> Result<(), Error> {
    if let Some(reason) = check_program(config)? {
        exec::is_not_paged(reason);
        return Ok(());
    }
    let transport = Pager::open_transport(config)?;
    let pager = Pager::new(config, transport)?;
    pager.start_in(enter_permanently)?;
    let pager: &'static Arc<Pager> = Box::leak(Box::new(pager));
    pager::set_current(pager);
    let region = pager.region();
    let arena = region.arena();
    let mut id = 0;
    // SAFETY: the arena is readable, writable, zeroed, and used by no other code.
    let managed = unsafe {
        mi::mi_option_set(mi::mi_option_limit_os_alloc, 1);
        mi::mi_manage_os_memory_ex(
            region.base() as *mut c_void,
            arena.len() * PAGE_BYTES,
            true,
            false,
            true,
            -1,
            false,
            &mut id,
        )
    };
    if !managed {
        return Err(Error::System {
            what: "give the arena to the allocator".into(),
            source: std::io::Error::last_os_error(),
        });
    }
    forks::register();
    if !pager.reports_forks() {
        segv::install();
    }
    bss::adopt(pager);
    ARENA_OPEN.store(true, Ordering::Release);
    exec::is_paged();
    Ok(())
}

/// Enters the reentrancy guard permanently. Called in every thread of the pager.
fn enter_permanently() {
    std::mem::forget(reentrancy::ReentrancyGuard::new());
}

/// Returns the value of an environment variable.
///
/// # Safety
/// `environment` is an array of C strings, terminated by null.
unsafe fn variable(environment: *const *const c_char, name: &str) -> Option<String> {
    let mut at = environment;
    // SAFETY: by the caller.
    while let Some(entry) = unsafe { at.as_ref() }.filter(|entry| !entry.is_null()) {
        // SAFETY: by the caller.
        let text = unsafe { CStr::from_ptr(*entry) }.to_string_lossy();
        if let Some((key, value)) = text.split_once('=')
            && key == name
        {
            return Some(value.to_owned());
        }
        // SAFETY: not at the end yet.
        at = unsafe { at.add(1) };
    }
    None
}
