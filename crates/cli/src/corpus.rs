//! Input text for `granary quickstart`, collected from this machine's text files.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use units::files;

/// Directories with text on a Unix machine: headers, scripts, documentation, word lists.
const DIRECTORIES: [&str; 5] = ["/usr/include", "/usr/share", "/usr/lib", "/usr/local", "/etc"];
/// Largest file that is used. A few large files would make the text uniform.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Size of the collected text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corpus {
    /// Number of source files; a file that is used twice counts twice.
    pub files: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Writes at least `bytes` of text, in whole lines, to a file. Repeats the machine's text if the
/// machine has less.
///
/// # Errors
/// If the file cannot be written, or if the machine has no text file at all.
pub fn write(path: &Path, bytes: u64) -> anyhow::Result<Corpus> {
    write_from(&DIRECTORIES.map(PathBuf::from), path, bytes)
        .with_context(|| format!("collect {bytes} bytes of text in {}", path.display()))
}

fn write_from(directories: &[PathBuf], path: &Path, bytes: u64) -> anyhow::Result<Corpus> {
    let mut out = BufWriter::new(files::create(path)?);
    let mut corpus = Corpus { files: 0, bytes: 0 };
    while corpus.bytes < bytes {
        let before = corpus.bytes;
        for directory in directories {
            add_directory(directory, &mut out, bytes, &mut corpus)?;
        }
        if corpus.bytes == before {
            bail!("no text file below {directories:?}; install a package with text files");
        }
    }
    out.flush()?;
    Ok(corpus)
}

/// Adds the text files below a directory, in order of names, until `bytes` are reached.
fn add_directory(
    directory: &Path,
    out: &mut impl Write,
    bytes: u64,
    corpus: &mut Corpus,
) -> io::Result<()> {
    // Directories without read permission are skipped.
    let Ok(entries) = fs::read_dir(directory) else { return Ok(()) };
    let mut entries: Vec<_> = entries.flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if corpus.bytes >= bytes {
            break;
        }
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() {
            add_directory(&entry.path(), out, bytes, corpus)?;
        } else if metadata.is_file()
            && let Some(text) = text_of(&entry.path(), metadata.len())
        {
            out.write_all(text.as_bytes())?;
            if !text.ends_with('\n') {
                out.write_all(b"\n")?;
                corpus.bytes += 1;
            }
            corpus.files += 1;
            corpus.bytes += text.len() as u64;
        }
    }
    Ok(())
}

/// The content of a file if it is text: UTF-8 without zero bytes.
fn text_of(path: &Path, bytes: u64) -> Option<String> {
    if bytes == 0 || bytes > FILE_BYTES_MAX {
        return None;
    }
    let mut content = Vec::new();
    // The file may have grown since its size was read.
    files::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut content).ok()?;
    if content.is_empty() || content.contains(&0) {
        return None;
    }
    String::from_utf8(content).ok()
}

/// First difference between two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Offset in bytes of the first byte that differs, or that only the longer file has.
    pub offset: u64,
}

/// Compares two files byte for byte, in constant memory. Returns the first difference.
///
/// # Errors
/// If a file cannot be read.
pub fn compare(left: &Path, right: &Path) -> anyhow::Result<Option<Difference>> {
    let open = |path: &Path| files::open(path).with_context(|| format!("read {}", path.display()));
    let mut files = [open(left)?, open(right)?];
    let mut buffers = [vec![0; 1 << 16], vec![0; 1 << 16]];
    let mut offset = 0;
    loop {
        let mut lengths = [0; 2];
        for ((file, buffer), length) in files.iter_mut().zip(&mut buffers).zip(&mut lengths) {
            *length = read_full(file, buffer)?;
        }
        let [l, r] = [&buffers[0][..lengths[0]], &buffers[1][..lengths[1]]];
        if l != r {
            let same = l.iter().zip(r).take_while(|(l, r)| l == r).count();
            return Ok(Some(Difference { offset: offset + same as u64 }));
        }
        if l.is_empty() {
            return Ok(None);
        }
        offset += l.len() as u64;
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &[u8])]) -> (tempfile::TempDir, [PathBuf; 1]) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("usr");
        for (name, content) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        (directory, [root])
    }

    #[test]
    fn corpus_has_text_files_in_order_repeated_to_size() {
        let (directory, roots) = machine(&[
            ("b.txt", b"second\n"),
            ("a/x.h", b"first"),
            ("program", b"\x7fELF\0\0"),
            ("latin1", b"caf\xe9\n"),
            ("empty", b""),
        ]);
        let path = directory.path().join("corpus");
        let corpus = write_from(&roots, &path, 20).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first\nsecond\nfirst\nsecond\n");
        assert_eq!(corpus, Corpus { files: 4, bytes: 26 });
    }

    #[test]
    fn corpus_fails_on_a_machine_without_text() {
        let (directory, roots) = machine(&[("program", b"\0")]);
        let error = write_from(&roots, &directory.path().join("corpus"), 1).unwrap_err();
        assert!(error.to_string().contains("no text file"), "{error}");
    }

    #[test]
    fn compare_finds_the_first_difference() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| {
            let path = directory.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let long = vec![7; 200_000];
        let mut changed = long.clone();
        changed[150_000] = 8;
        let reference = file("reference", &long);
        for (name, content, offset) in [
            ("same", &long[..], None),
            ("changed", &changed[..], Some(150_000)),
            ("shorter", &long[..1000], Some(1000)),
            ("empty", &[], Some(0)),
        ] {
            let difference = compare(&reference, &file(name, content)).unwrap();
            assert_eq!(difference.map(|d| d.offset), offset, "{name}");
        }
        assert!(compare(&reference, &directory.path().join("missing")).is_err());
    }
}
