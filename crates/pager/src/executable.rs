//! Classification of ELF files by whether the pager can serve their programs (System V ABI,
//! chapters 4 and 5).

use std::io;
use std::os::unix::fs::FileExt;

/// Kind of an executable file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Has a dynamic linker, which loads the preload library.
    Dynamic,
    /// Has no dynamic linker.
    Static,
    /// Has a dynamic linker, but was built by Go without cgo: its runtime maps memory by raw system
    /// calls. With cgo, the runtime calls libc's functions.
    GoWithoutLibc,
    /// For another machine.
    Foreign,
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;

/// Most bytes that are read of a part of a file, against damaged files.
const PART_MAX: u64 = 1 << 20;

/// A program header.
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

/// Reads at most `bytes` bytes at an offset; fewer at the end of the file, and none behind it.
fn read_part(file: &impl FileExt, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
    const LAST: u64 = i64::MAX as u64 - PART_MAX;
    if offset > LAST {
        return Ok(Vec::new());
    }
    let mut part = vec![0; bytes.min(PART_MAX) as usize];
    let mut filled = 0;
    while filled < part.len() {
        match file.read_at(&mut part[filled..], offset + filled as u64)? {
            0 => break,
            got => filled += got,
        }
    }
    part.truncate(filled);
    Ok(part)
}

/// Returns the kind of an executable; `None` if the file is not in the ELF format.
///
/// # Errors
/// Errors of reading the file.
pub fn kind_of(file: &impl FileExt) -> io::Result<Option<Kind>> {
    let head = read_part(file, 0, 64)?;
    if head.len() < 64 || !head.starts_with(b"\x7fELF") {
        return Ok(None);
    }
    let ours = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
    if head[4] != 2 || head[5] != 1 || u16_at(&head, 18) != ours {
        return Ok(Some(Kind::Foreign));
    }
    let (size, count) = (u16_at(&head, 54), u16_at(&head, 56));
    let table = read_part(file, u64_at(&head, 32), size * count)?;
    let segments: Vec<Segment> = table
        .chunks_exact(size.max(56) as usize)
        .map(|header| Segment {
            kind: u32_at(header, 0),
            offset: u64_at(header, 8),
            address: u64_at(header, 16),
            bytes: u64_at(header, 32),
        })
        .collect();
    if !segments.iter().any(|segment| segment.kind == PT_INTERP) {
        return Ok(Some(Kind::Static));
    }
    let without_libc = is_go(file, &segments)? && !needs_libc(file, &segments)?;
    Ok(Some(if without_libc { Kind::GoWithoutLibc } else { Kind::Dynamic }))
}

/// Returns true if the file has Go's note with the id of the build.
fn is_go(file: &impl FileExt, segments: &[Segment]) -> io::Result<bool> {
    const BUILD_ID: u32 = 4;
    for segment in segments.iter().filter(|segment| segment.kind == PT_NOTE) {
        let notes = read_part(file, segment.offset, segment.bytes)?;
        let mut at = 0usize;
        // A note: bytes of its name, bytes of its content, kind; then both, padded to 4 bytes.
        while at + 12 <= notes.len() {
            let (name, content) = (u32_at(&notes, at) as usize, u32_at(&notes, at + 4) as usize);
            if u32_at(&notes, at + 8) == BUILD_ID && notes[at + 12..].starts_with(b"Go\0\0") {
                return Ok(true);
            }
            at += 12 + name.next_multiple_of(4) + content.next_multiple_of(4);
        }
    }
    Ok(false)
}

/// Returns true if the dynamic linker must load libc for the file.
fn needs_libc(file: &impl FileExt, segments: &[Segment]) -> io::Result<bool> {
    let Some(dynamic) = segments.iter().find(|segment| segment.kind == PT_DYNAMIC) else {
        return Ok(false);
    };
    let entries = read_part(file, dynamic.offset, dynamic.bytes)?;
    let entries: Vec<(u64, u64)> =
        entries.chunks_exact(16).map(|entry| (u64_at(entry, 0), u64_at(entry, 8))).collect();
    let Some(&(_, strings)) = entries.iter().find(|(tag, _)| *tag == DT_STRTAB) else {
        return Ok(false);
    };
    let holds = |segment: &&Segment| {
        segment.kind == PT_LOAD && strings.wrapping_sub(segment.address) < segment.bytes
    };
    let Some(load) = segments.iter().find(holds) else { return Ok(false) };
    let strings = load.offset.saturating_add(strings - load.address);
    for (_, name) in entries.iter().filter(|(tag, _)| *tag == DT_NEEDED) {
        if read_part(file, strings.saturating_add(*name), 8)?.starts_with(b"libc.so") {
            return Ok(true);
        }
    }
    Ok(false)
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
