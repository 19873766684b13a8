//! Redirection of the C library's exported functions to this library, in the C library's symbol
//! table.
//!
//! `LD_PRELOAD` puts this library first in the scope in which names are looked up. Two kinds of
//! lookup skip that scope and find the C library's functions: lookups by an object that was opened
//! with `RTLD_DEEPBIND` (PHP's extensions, chDB), and `dlsym` with the C library's handle (Python's
//! ctypes, Ruby's Fiddle). Then the C library's `free` would get blocks of this library's `malloc`,
//! and its `munmap` would unmap a part of the region. So each entry of the C library's table
//! (`.dynsym`) that has the name of a function here gets that function's address. No code is
//! changed, and `RTLD_DEEPBIND` works as documented for all other names.
//!
//! A C library in a namespace of its own (`dlmopen`) keeps its table, because it has its own heap.

use std::ffi::{CStr, c_char, c_void};
use std::io;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libc::{Elf64_Ehdr, Elf64_Phdr, Elf64_Sym};
use pager::sys::{self, PAGE_BYTES};

const TYPE_BITS: u32 = 4;
const FUNCTION: u8 = 2;
/// Bit in `.gnu.version` that hides a version from lookups without a version.
const OLD_VERSION: u16 = 0x8000;

/// A function of the C library that a function of this library (`by`) replaces; `own` is the C
/// library's address.
struct Replaced {
    name: &'static CStr,
    by: usize,
    own: usize,
}

static REPLACED: OnceLock<Vec<Replaced>> = OnceLock::new();

fn replaced_where(holds: impl Fn(&Replaced) -> bool) -> Option<*mut c_void> {
    let found = REPLACED.get()?.iter().find(|&replaced| holds(replaced))?;
    Some(found.own as *mut c_void)
}

/// Returns the C library's own function of this name; `None` if its table is not found.
pub fn c_library_function(name: &CStr) -> Option<*mut c_void> {
    if REPLACED.get().is_some() {
        return replaced_where(|replaced| replaced.name == name);
    }
    address_of(name)
}

/// Returns the address of this name in the C library's table, which may be changed.
pub fn address_of(name: &CStr) -> Option<*mut c_void> {
    let found = library()?.named(name).find(|symbol| symbol.is_default)?;
    Some(found.address as *mut c_void)
}

/// Returns the C library's table.
fn library() -> Option<Symbols> {
    // SAFETY: the C library stays loaded.
    unsafe { Symbols::of_object_with(libc::gnu_get_libc_version as *const c_void) }
}

/// Returns the C library's own function if `found` is its replacement in this library, and `found`
/// otherwise.
pub fn resolve_replaced(found: *mut c_void) -> *mut c_void {
    replaced_where(|replaced| replaced.by == found as usize).unwrap_or(found)
}

/// Changes the C library's table.
///
/// # Errors
/// The table is not found, or the system forbids writing it.
pub fn redirect() -> io::Result<()> {
    let missing = || {
        io::Error::new(io::ErrorKind::Unsupported, "a symbol table with a GNU hash was not found")
    };
    // SAFETY: this library stays loaded as long as it runs.
    let ours = unsafe { Symbols::of_object_with(redirect as *const c_void) };
    let (ours, library) = ours.zip(library()).ok_or_else(missing)?;
    let mut replaced = Vec::new();
    let mut entries = Vec::new();
    for own in ours.exported() {
        for entry in library.named(own.name) {
            if entry.is_default {
                let (name, by) = (own.name, own.address);
                replaced.push(Replaced { name, by, own: entry.address });
            }
            entries.push((entry.symbol, own.address));
        }
    }
    let Some(first) = entries.iter().map(|&(entry, _)| entry as usize).min() else {
        return Err(missing());
    };
    let last = entries.iter().map(|&(entry, _)| entry as usize).max().unwrap_or(first);
    let start = first / PAGE_BYTES * PAGE_BYTES;
    let len = (last + size_of::<Elf64_Sym>()).next_multiple_of(PAGE_BYTES) - start;
    let prot = library.protection(first).ok_or_else(missing)?;
    // Set before the table changes: from then on, a lookup may find this library's function.
    REPLACED.set(replaced).map_err(|_| missing())?;
    // SAFETY: the table's pages, which no other code writes; they keep their read and execute
    // access.
    unsafe {
        sys::mprotect(start, len, prot | libc::PROT_WRITE)?;
        for (entry, address) in entries {
            (*entry).st_value = address.wrapping_sub(library.base) as u64;
            (*entry).st_info = (*entry).st_info >> TYPE_BITS << TYPE_BITS | FUNCTION;
        }
        sys::mprotect(start, len, prot)
    }
}

/// A function that an object defines.
struct Symbol {
    symbol: *mut Elf64_Sym,
    name: &'static CStr,
    address: usize,
    is_default: bool,
}

/// The dynamic linker's record of an object: `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

/// An entry of an object's dynamic section: `Elf64_Dyn`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// Symbol table of an object, with its GNU hash table.
struct Symbols {
    base: usize,
    header: *const Elf64_Ehdr,
    table: *mut Elf64_Sym,
    strings: *const c_char,
    versions: *const u16,
    /// First index in the hash table.
    first: u32,
    buckets: &'static [u32],
    /// One word per hashed symbol; a set lowest bit ends a bucket.
    chains: *const u32,
}

impl Symbols {
    /// Returns the table of the object that contains this address; `None` if a part of the table is
    /// missing.
    ///
    /// # Safety
    /// The object stays loaded as long as the value is used.
    unsafe fn of_object_with(address: *const c_void) -> Option<Self> {
        const STRINGS: i64 = 5;
        const SYMBOLS: i64 = 6;
        const GNU_HASH: i64 = 0x6fff_fef5;
        const VERSIONS: i64 = 0x6fff_fff0;
        const RTLD_DL_LINKMAP: i32 = 2;
        let mut map: *const LinkMap = null_mut();
        // SAFETY: an all-zero Dl_info is valid.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: with this flag the function stores a pointer to the object's link_map.
        let known =
            unsafe { libc::dladdr1(address, &mut info, (&raw mut map).cast(), RTLD_DL_LINKMAP) };
        // SAFETY: the dynamic linker's own record, which lives as long as the object.
        let map = unsafe { map.as_ref() }.filter(|_| known != 0)?;
        let find = |tag| {
            let mut at = map.dynamic;
            loop {
                // SAFETY: the dynamic section, which an entry with tag 0 terminates.
                match unsafe { &*at } {
                    Dynamic { tag: 0, .. } => return None,
                    // An offset in the file, if the dynamic linker has not added the base.
                    entry if entry.tag == tag && entry.value < map.base => {
                        return Some(map.base + entry.value);
                    }
                    entry if entry.tag == tag => return Some(entry.value),
                    // SAFETY: the terminating entry has not been reached.
                    _ => at = unsafe { at.add(1) },
                }
            }
        };
        let hash = find(GNU_HASH)? as *const u32;
        // SAFETY: the hash table consists of four words, the filter (8 bytes per element), the
        // buckets and the chains.
        let (first, buckets, chains) = unsafe {
            let (buckets, first, filters) = (*hash, *hash.add(1), *hash.add(2) as usize);
            let start = hash.add(4 + 2 * filters);
            let buckets = std::slice::from_raw_parts(start, buckets as usize);
            (first, buckets, start.add(buckets.len()))
        };
        Some(Self {
            base: map.base,
            header: info.dli_fbase.cast(),
            table: find(SYMBOLS)? as *mut Elf64_Sym,
            strings: find(STRINGS)? as *const c_char,
            versions: find(VERSIONS).map_or(null_mut(), |at| at as *mut u16),
            first,
            buckets,
            chains,
        })
    }

    /// Iterates over the indices and hashes of a bucket's symbols; a hash lacks its lowest bit.
    fn bucket(&self, first: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let mut next = (first >= self.first && first != 0).then_some(first);
        std::iter::from_fn(move || {
            let index = next?;
            // SAFETY: a bucket's chain continues until a word with the lowest bit set.
            let word = unsafe { *self.chains.add((index - self.first) as usize) };
            next = (word & 1 == 0).then_some(index + 1);
            Some((index, word & !1))
        })
    }

    /// Returns the function with this index; `None` if the symbol is of another kind.
    fn function(&self, index: u32) -> Option<Symbol> {
        const INDIRECT: u8 = 10;
        // SAFETY: the index comes from the hash table, so it is within the other tables.
        let (symbol, version) = unsafe {
            let symbol = self.table.add(index as usize);
            let versions = self.versions;
            (symbol, if versions.is_null() { 1 } else { *versions.add(index as usize) })
        };
        // SAFETY: an entry of the table.
        let Elf64_Sym { st_name, st_info, st_shndx, st_value, .. } = unsafe { symbol.read() };
        let kind = st_info & ((1 << TYPE_BITS) - 1);
        (st_shndx != 0 && matches!(kind, FUNCTION | INDIRECT)).then(|| Symbol {
            symbol,
            // SAFETY: a string of the object's string table, which is never unloaded.
            name: unsafe { CStr::from_ptr(self.strings.add(st_name as usize)) },
            address: self.base.wrapping_add(st_value as usize),
            is_default: version & OLD_VERSION == 0,
        })
    }

    /// Iterates over all functions that the object exports.
    fn exported(&self) -> impl Iterator<Item = Symbol> + '_ {
        let all = self.buckets.iter().flat_map(move |&first| self.bucket(first));
        all.filter_map(move |(index, _)| self.function(index))
    }

    /// Iterates over the functions of this name, in all their versions.
    fn named<'a>(&'a self, name: &'a CStr) -> impl Iterator<Item = Symbol> + 'a {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        let first = match self.buckets.len() {
            0 => 0,
            buckets => self.buckets[hash as usize % buckets],
        };
        let alike = self.bucket(first).filter(move |&(_, other)| other == hash & !1);
        alike
            .filter_map(move |(index, _)| self.function(index))
            .filter(move |found| found.name == name)
    }

    /// Returns the protection of the segment that contains this address.
    fn protection(&self, address: usize) -> Option<i32> {
        // SAFETY: an object begins with its ELF header, which locates the program headers.
        let segments: &[Elf64_Phdr] = unsafe {
            let header = &*self.header;
            let segments = self.header.cast::<u8>().add(header.e_phoff as usize).cast();
            std::slice::from_raw_parts(segments, usize::from(header.e_phnum))
        };
        let holds = |segment: &&Elf64_Phdr| {
            let start = self.base.wrapping_add(segment.p_vaddr as usize);
            let range: Range<usize> = start..start + segment.p_memsz as usize;
            segment.p_type == libc::PT_LOAD && range.contains(&address)
        };
        let flags = segments.iter().find(holds)?.p_flags;
        let pairs = [
            (libc::PF_R, libc::PROT_READ),
            (libc::PF_W, libc::PROT_WRITE),
            (libc::PF_X, libc::PROT_EXEC),
        ];
        let set = pairs.into_iter().filter(|&(flag, _)| flags & flag != 0);
        Some(set.fold(0, |all, (_, prot)| all | prot))
    }
}
