//! `libgranary_preload.so`: what `granary run` puts into a program.
//!
//! The constructor reads the settings ([`pager::config`]), sets the pager up, and gives the arena in its
//! region to mimalloc. From then on the program's `malloc` and large anonymous `mmap`s are paged. Without
//! `GRANARY_LOCAL` in the environment the library serves `malloc` from its internal heap and pages
//! nothing.
//!
//! Nothing here may allocate paged memory, take a lock that the program may hold at a fault, or use the
//! program's stdio.

mod brk;
mod descriptors;
mod direct;
mod early;
mod forks;
mod heap;
mod inside;
mod jemalloc;
mod malloc;
mod mapping;
mod redirect;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmimalloc_sys as mi;
use pager::config::{Config, EXIT_PAGER};
use pager::sys::{self, PAGE_BYTES};
use pager::{Error, Pager};

#[global_allocator]
static INTERNAL: heap::Internal = heap::Internal;

static ARENA_OPEN: AtomicBool = AtomicBool::new(false);

/// The pager, once it runs. Before this library is relocated ([`early`]) the pager's own variable is
/// out of reach.
fn pager() -> Option<&'static Pager> {
    if early::is_relocated() { pager::current() } else { None }
}

/// True once mimalloc may serve the program.
fn arena_is_open() -> bool {
    ARENA_OPEN.load(Ordering::Acquire)
}

type Constructor = extern "C" fn(c_int, *const *const c_char, *const *const c_char);

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: Constructor = construct;

extern "C" fn construct(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    let _inside = inside::Inside::new();
    if let Err(error) = redirect::redirect() {
        sys::say(&format!(
            "the C library's symbol table cannot be changed: {error}; a library that the program opens \
             with RTLD_DEEPBIND may end it with \"invalid pointer\""
        ));
    }
    let get = |name: &str| {
        // SAFETY: the loader passes the environment: C strings, ended by null.
        unsafe { variable(environment, name) }
    };
    let started = Config::from_environment(get).and_then(|config| match config {
        Some(config) => start(&config).map(Some),
        None => Ok(None),
    });
    if let Err(error) = started {
        sys::die(EXIT_PAGER, &error.to_string());
    }
}

fn start(config: &Config) -> Result<(), Error> {
    let transport = Pager::open_transport(config)?;
    let pager = Pager::new(config, transport)?;
    pager.start_in(enter_for_good)?;
    let pager: &'static Arc<Pager> = Box::leak(Box::new(pager));
    pager::set_current(pager);
    let region = pager.region();
    let arena = region.arena();
    let mut id = 0;
    // SAFETY: the arena is committed, zero, ours, and nobody else's.
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
    ARENA_OPEN.store(true, Ordering::Release);
    Ok(())
}

/// Every thread of the pager's is inside for good.
fn enter_for_good() {
    std::mem::forget(inside::Inside::new());
}

/// # Safety
/// `environment` is an array of C strings, ended by null.
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
