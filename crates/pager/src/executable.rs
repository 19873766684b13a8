//! Classification of ELF files by whether the pager can serve their programs (System V ABI,
//! chapters 4 and 5).

use std::io;
use std::os::unix::fs::FileExt;

/// Kind of an executable file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Has a dynamic linker, which loads the preload library, or is one.
    Dynamic,
    /// Has no dynamic linker.
    Static,
    /// Has a dynamic linker, but was built by Go without cgo: its runtime maps memory by raw system
    /// calls. With cgo, the runtime calls libc's functions.
    GoWithoutLibc,
    /// For another machine.
    Foreign,
    /// Has musl's dynamic linker, which cannot load a library for glibc.
    Musl,
    /// Needs the library of AddressSanitizer or ThreadSanitizer. This library must be the first
    /// one, and serves `malloc` itself.
    Sanitizer,
}

impl Kind {
    /// Returns the reason why the pager cannot serve a program of this kind, after "it is".
    pub fn obstacle(self) -> Option<&'static str> {
        match self {
            Self::Dynamic => None,
            Self::Static => Some("linked statically"),
            Self::GoWithoutLibc => Some("a Go program without cgo"),
            Self::Foreign => Some("built for another kind of machine"),
            Self::Musl => Some("linked to musl"),
            Self::Sanitizer => Some("built with a sanitizer"),
        }
    }

    /// Returns false if the program does not run with the preload library in `LD_PRELOAD`.
    pub fn runs_with_library(self) -> bool {
        !matches!(self, Self::Musl | Self::Sanitizer)
    }
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_SONAME: u64 = 14;

/// Most entries of a table that are read, against damaged files.
const ENTRIES_MAX: u64 = 4096;
/// Most bytes of a name that are compared.
const NAME_BYTES: usize = 64;

/// A program header.
#[derive(Clone, Copy)]
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    bytes: u64,
}

fn u16_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Reads bytes at an offset and returns their number: fewer at the end of the file, and none behind
/// it.
fn read_part(file: &impl FileExt, offset: u64, part: &mut [u8]) -> io::Result<usize> {
    const LAST: u64 = i64::MAX as u64 - 4096;
    let mut filled = 0;
    while filled < part.len() && offset <= LAST {
        match file.read_at(&mut part[filled..], offset + filled as u64)? {
            0 => break,
            got => filled += got,
        }
    }
    Ok(filled)
}

/// Reads `N` bytes at an offset; `None` if the file ends before.
fn record<const N: usize>(file: &impl FileExt, offset: u64) -> io::Result<Option<[u8; N]>> {
    let mut record = [0; N];
    Ok((read_part(file, offset, &mut record)? == N).then_some(record))
}

/// Returns the kind of an executable; `None` if the file is not in the ELF format.
///
/// Does not allocate: the preload library calls this function in a child of `vfork`.
///
/// # Errors
/// Errors of reading the file.
pub fn kind_of(file: &impl FileExt) -> io::Result<Option<Kind>> {
    let Some(head) = record::<64>(file, 0)?.filter(|head| head.starts_with(b"\x7fELF")) else {
        return Ok(None);
    };
    let ours = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
    if head[4] != 2 || head[5] != 1 || u16_at(&head, 18) != ours {
        return Ok(Some(Kind::Foreign));
    }
    let elf =
        Elf { file, table: u64_at(&head, 32), size: u16_at(&head, 54), count: u16_at(&head, 56) };
    let Some(interpreter) = elf.segment(|segment| segment.kind == PT_INTERP)? else {
        // A dynamic linker is a library without a dynamic linker of its own.
        let is_linker = elf.has_name(DT_SONAME, &[b"ld-linux"])?;
        return Ok(Some(if is_linker { Kind::Dynamic } else { Kind::Static }));
    };
    let mut path = [0; NAME_BYTES];
    let len = (interpreter.bytes as usize).min(path.len());
    let got = read_part(file, interpreter.offset, &mut path[..len])?;
    let is_musl = path[..got].rsplit(|&byte| byte == b'/').next();
    if is_musl.is_some_and(|name| name.starts_with(b"ld-musl-")) {
        return Ok(Some(Kind::Musl));
    }
    if elf.has_name(DT_NEEDED, SANITIZERS)? {
        return Ok(Some(Kind::Sanitizer));
    }
    let without_libc = elf.is_go()? && !elf.has_name(DT_NEEDED, &[b"libc.so"])?;
    Ok(Some(if without_libc { Kind::GoWithoutLibc } else { Kind::Dynamic }))
}

/// Beginnings of the names of the libraries of sanitizers that serve `malloc` and must come first,
/// of GCC and of Clang. LeakSanitizer's comes behind the preload library.
const SANITIZERS: &[&[u8]] = &[
    b"libasan.so",
    b"libhwasan.so",
    b"libtsan.so",
    b"libclang_rt.asan",
    b"libclang_rt.hwasan",
    b"libclang_rt.tsan",
];

/// An ELF file of 64 bits, with the place of its program headers.
struct Elf<'a, F> {
    file: &'a F,
    table: u64,
    size: u64,
    count: u64,
}

impl<F: FileExt> Elf<'_, F> {
    fn segment_at(&self, index: u64) -> io::Result<Option<Segment>> {
        let offset = self.table.saturating_add(index * self.size.max(56));
        Ok(record::<56>(self.file, offset)?.map(|header| Segment {
            kind: u32_at(&header, 0),
            offset: u64_at(&header, 8),
            address: u64_at(&header, 16),
            bytes: u64_at(&header, 32),
        }))
    }

    /// Returns the first segment for which `holds` is true.
    fn segment(&self, holds: impl Fn(&Segment) -> bool) -> io::Result<Option<Segment>> {
        for index in 0..self.count.min(ENTRIES_MAX) {
            match self.segment_at(index)? {
                Some(segment) if holds(&segment) => return Ok(Some(segment)),
                Some(_) => {}
                None => break,
            }
        }
        Ok(None)
    }

    /// Returns true if the file has Go's note with the id of the build.
    fn is_go(&self) -> io::Result<bool> {
        const BUILD_ID: u32 = 4;
        for index in 0..self.count.min(ENTRIES_MAX) {
            let Some(notes) = self.segment_at(index)? else { break };
            let (mut at, mut left) = (0u64, ENTRIES_MAX);
            // A note: bytes of its name, bytes of its content, kind; then both, padded to 4 bytes.
            while notes.kind == PT_NOTE && at + 16 <= notes.bytes && left > 0 {
                let offset = notes.offset.saturating_add(at);
                let Some(note) = record::<16>(self.file, offset)? else { break };
                if u32_at(&note, 8) == BUILD_ID && note.ends_with(b"Go\0\0") {
                    return Ok(true);
                }
                let padded = |bytes: u32| u64::from(bytes).next_multiple_of(4);
                at += 12 + padded(u32_at(&note, 0)) + padded(u32_at(&note, 4));
                left -= 1;
            }
        }
        Ok(false)
    }

    /// Returns true if the dynamic section has a name with one of these beginnings under a tag.
    fn has_name(&self, tag: u64, beginnings: &[&[u8]]) -> io::Result<bool> {
        let Some(dynamic) = self.segment(|segment| segment.kind == PT_DYNAMIC)? else {
            return Ok(false);
        };
        let entry = |index: u64| -> io::Result<Option<(u64, u64)>> {
            let is_in = index < ENTRIES_MAX && (index + 1) * 16 <= dynamic.bytes;
            let offset = dynamic.offset.saturating_add(index * 16);
            let entry = if is_in { record::<16>(self.file, offset)? } else { None };
            let entry = entry.map(|entry| (u64_at(&entry, 0), u64_at(&entry, 8)));
            Ok(entry.filter(|(tag, _)| *tag != 0))
        };
        let mut strings = None;
        for index in 0.. {
            match entry(index)? {
                Some((DT_STRTAB, address)) => strings = Some(address),
                Some(_) => {}
                None => break,
            }
        }
        let Some(strings) = strings else { return Ok(false) };
        let load = self.segment(|segment| {
            segment.kind == PT_LOAD && strings.wrapping_sub(segment.address) < segment.bytes
        })?;
        let Some(load) = load else { return Ok(false) };
        let strings = load.offset.saturating_add(strings - load.address);
        for index in 0.. {
            let Some((found, name)) = entry(index)? else { break };
            let mut text = [0; NAME_BYTES];
            if found == tag {
                read_part(self.file, strings.saturating_add(name), &mut text)?;
            }
            if found == tag && beginnings.iter().any(|beginning| text.starts_with(beginning)) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn kind(bytes: &[u8]) -> Option<Kind> {
        let path = std::env::temp_dir().join(format!(
            "granary-elf-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&path, bytes).unwrap();
        let kind = kind_of(&File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        kind
    }

    /// A file with these segments: kind and content.
    fn elf(segments: &[(u32, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + 56 * segments.len()];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18] = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
        (bytes[32], bytes[54], bytes[56]) = (64, 56, segments.len() as u8);
        for (at, (kind, content)) in segments.iter().enumerate() {
            let offset = bytes.len() as u64;
            let header = 64 + 56 * at;
            bytes[header..header + 4].copy_from_slice(&kind.to_le_bytes());
            for (field, value) in [(8, offset), (16, offset), (32, content.len() as u64)] {
                bytes[header + field..header + field + 8].copy_from_slice(&value.to_le_bytes());
            }
            bytes.extend_from_slice(content);
        }
        bytes
    }

    const NOTE: &[u8] =
        b"\x04\0\0\0\x04\0\0\0\x01\0\0\0GNU\0abcd\x04\0\0\0\x04\0\0\0\x04\0\0\0Go\0\0wxyz";

    #[test]
    fn go_programs_without_libc_are_told_apart() {
        assert_eq!(kind(b"text"), None);
        assert_eq!(kind(&elf(&[])), Some(Kind::Static));
        assert_eq!(kind(&elf(&[(PT_INTERP, b"/lib/ld.so")])), Some(Kind::Dynamic));
        assert_eq!(
            kind(&elf(&[(PT_INTERP, b"/lib/ld.so"), (PT_NOTE, NOTE)])),
            Some(Kind::GoWithoutLibc)
        );
        assert_eq!(
            kind(&elf(&[(PT_INTERP, b"/lib/ld.so"), (PT_NOTE, &NOTE[..20])])),
            Some(Kind::Dynamic)
        );
        // The strings are at offset 1 of the loaded segment, which lies behind four headers, the
        // interpreter's name and the notes.
        let strings = (64 + 4 * 56 + 10 + NOTE.len() + 1) as u64;
        let dynamic = [DT_NEEDED, 3, DT_STRTAB, strings].map(u64::to_le_bytes).concat();
        let with_libc = |strings: &[u8]| {
            kind(&elf(&[
                (PT_INTERP, b"/lib/ld.so"),
                (PT_NOTE, NOTE),
                (PT_LOAD, strings),
                (PT_DYNAMIC, &dynamic),
            ]))
        };
        assert_eq!(with_libc(b"???\0libc.so.6\0"), Some(Kind::Dynamic));
        assert_eq!(with_libc(b"???\0libm.so.6\0"), Some(Kind::GoWithoutLibc));
        // The loaded segment claims to lie at the end of all offsets.
        let mut damaged = elf(&[
            (PT_INTERP, b"/lib/ld.so"),
            (PT_NOTE, NOTE),
            (PT_LOAD, b"???\0libc.so.6\0"),
            (PT_DYNAMIC, &dynamic),
        ]);
        damaged[64 + 2 * 56 + 8..64 + 2 * 56 + 16].fill(0xff);
        assert_eq!(kind(&damaged), Some(Kind::GoWithoutLibc));
        let mut other = elf(&[]);
        other[18] = 3;
        assert_eq!(kind(&other), Some(Kind::Foreign));
    }

    #[test]
    fn programs_that_do_not_run_with_the_preload_library_are_told_apart() {
        assert_eq!(kind(&elf(&[(PT_INTERP, b"/lib/ld-musl-x86_64.so.1\0")])), Some(Kind::Musl));
        assert_eq!(kind(&elf(&[(PT_INTERP, b"/ld-musl-/ld.so")])), Some(Kind::Dynamic));
        // The strings lie behind the headers and the interpreter's name.
        let named = |interpreter: &[u8], tag: u64, strings: &[u8]| {
            let mut segments = vec![(PT_LOAD, strings)];
            segments.extend((!interpreter.is_empty()).then_some((PT_INTERP, interpreter)));
            let at = 64 + 56 * (segments.len() as u64 + 1);
            let dynamic = [DT_NEEDED, 0, tag, 1, DT_STRTAB, at, 0, 0].map(u64::to_le_bytes);
            let dynamic = dynamic.concat();
            segments.push((PT_DYNAMIC, &dynamic));
            kind(&elf(&segments))
        };
        let needed = |name: &[u8]| named(b"/lib/ld.so", DT_NEEDED, name);
        assert_eq!(needed(b"?libasan.so.8\0"), Some(Kind::Sanitizer));
        assert_eq!(needed(b"?libclang_rt.tsan-x86_64.so\0"), Some(Kind::Sanitizer));
        assert_eq!(needed(b"?liblsan.so.0\0"), Some(Kind::Dynamic));
        // A name under another tag is no library that the program needs.
        assert_eq!(named(b"/lib/ld.so", DT_SONAME, b"?libasan.so.8\0"), Some(Kind::Dynamic));
        assert_eq!(named(b"", DT_SONAME, b"?ld-linux-x86-64.so.2\0"), Some(Kind::Dynamic));
        assert_eq!(named(b"", DT_SONAME, b"?other.so\0"), Some(Kind::Static));
    }

    #[test]
    fn damaged_files_are_no_error() {
        let whole = elf(&[(PT_INTERP, b"/lib/ld.so"), (PT_NOTE, NOTE), (PT_DYNAMIC, &[1; 40])]);
        for len in 0..whole.len() {
            kind(&whole[..len]);
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            kind(&damaged);
        }
    }
}
