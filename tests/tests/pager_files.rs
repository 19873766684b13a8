//! Files of the pager: the overflow file, which is encrypted and authenticated, and the limit of
//! file sizes (`ulimit -f`), under which a program runs or ends with a message.

use std::fs::File;
use std::os::unix::fs::FileExt;

use granary_tests::pager::Scratch;
use granary_tests::run::{NodeKind, Site};
use granary_tests::waiting::{self, Waiting};
use pager::config::{EXIT_PAGER, EXIT_TAMPERED};
use pager::sys::PAGE_BYTES;

const MIB: u64 = 1 << 20;

/// A waiting program that has filled its memory, most of which is in the overflow file.
struct Filled {
    waiting: Waiting,
    file: File,
    _scratch: Scratch,
}

impl Filled {
    fn start(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let program = waiting::compile(&scratch);
        let mut config = pager::Config::new(8 * MIB, "memory:2MiB");
        config.overflow_directory = scratch.0.clone();
        let waiting = Waiting::start(program, &config);
        let file = overflow_file(waiting.pid(), &scratch);
        Self { waiting, file, _scratch: scratch }
    }

    fn check_memory(self) -> (Option<i32>, String, String) {
        self.waiting.check_memory()
    }

    /// The anonymous memory of the program that is resident. The kernel does not read a page that
    /// is in the overflow file for another process.
    fn resident(&self) -> Vec<u8> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.waiting.pid())).unwrap();
        let memory = File::open(format!("/proc/{}/mem", self.waiting.pid())).unwrap();
        let anonymous = maps.lines().filter(|line| line.contains("rw-p") && !line.contains('/'));
        let mut bytes = Vec::new();
        for line in anonymous {
            let (start, rest) = line.split_once('-').unwrap();
            let end = rest.split_once(' ').unwrap().0;
            let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).unwrap());
            let mut page = [0; PAGE_BYTES];
            for at in (start..end.min(start + 64 * MIB)).step_by(PAGE_BYTES) {
                if memory.read_exact_at(&mut page, at).is_ok() {
                    bytes.extend(page);
                }
            }
        }
        bytes
    }
}

fn has_secret(bytes: &[u8]) -> bool {
    bytes.windows(waiting::SECRET.len()).any(|part| part == waiting::SECRET)
}

/// Opens the overflow file of a process. The file has no name; it is open in the pager's threads,
/// which have a separate descriptor table.
fn overflow_file(pid: u32, scratch: &Scratch) -> File {
    let list =
        |path: &std::path::Path| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let here = scratch.0.to_str().unwrap();
    list(format!("/proc/{pid}/task").as_ref())
        .flat_map(|task| list(&task.path().join("fd")).collect::<Vec<_>>())
        .find(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(here)))
        .map(|fd| File::options().read(true).write(true).open(fd.path()).unwrap())
        .expect("the program has an overflow file")
}

#[test]
fn overflow_file_is_encrypted() {
    let filled = Filled::start("overflow-read");
    let len = filled.file.metadata().unwrap().len();
    assert!(len >= 8 * MIB, "{len} bytes are in the file");
    let mut bytes = vec![0; len as usize];
    filled.file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(!has_secret(&bytes), "the file contains plain text");
    // Otherwise the search could miss a text that the program does not have.
    assert!(has_secret(&filled.resident()), "the program's resident memory has the text");
    let (status, stdout, stderr) = filled.check_memory();
    assert_eq!((status, &*stdout), (Some(0), "as expected\n"), "{stderr}");
}

#[test]
fn changed_overflow_file_ends_the_program() {
    let filled = Filled::start("overflow-changed");
    let len = filled.file.metadata().unwrap().len();
    let mut page = [0; PAGE_BYTES];
    for at in (0..len - PAGE_BYTES as u64).step_by(2 * PAGE_BYTES) {
        // Flips one bit of every other page.
        filled.file.read_exact_at(&mut page, at).unwrap();
        page[1000] ^= 4;
        filled.file.write_all_at(&page, at).unwrap();
    }
    let (status, stdout, stderr) = filled.check_memory();
    assert_eq!(status, Some(EXIT_TAMPERED), "{stdout}{stderr}");
    assert_eq!(stdout, "");
    assert!(stderr.contains("overflow file") && stderr.contains("changed"), "{stderr}");
}

#[test]
fn swapped_pages_in_the_overflow_file_end_the_program() {
    let filled = Filled::start("overflow-swapped");
    let len = filled.file.metadata().unwrap().len();
    let mut bytes = vec![0; len as usize];
    filled.file.read_exact_at(&mut bytes, 0).unwrap();
    bytes.rotate_left(PAGE_BYTES);
    filled.file.write_all_at(&bytes, 0).unwrap();
    let (status, stdout, stderr) = filled.check_memory();
    assert_eq!((status, &*stdout), (Some(EXIT_TAMPERED), ""), "{stderr}");
    assert!(stderr.contains("overflow file") && stderr.contains("changed"), "{stderr}");
}

/// Runs `fsize.c` from a shell script, which may set a limit first.
fn under(name: &str, memory: &str, script: &str) -> (i32, String, String) {
    let site = Site::new(NodeKind::Private, name, 8 * MIB, memory);
    let program = site.scratch.compile("fsize", include_str!("pager_programs/fsize.c"));
    let script = script.replace("PROGRAM", program.to_str().unwrap());
    let outcome = site.run("sh", &["-c", &script]).outcome;
    (outcome.code, String::from_utf8_lossy(&outcome.stdout).into_owned(), outcome.stderr)
}

#[test]
fn too_small_file_size_limit_is_named() {
    // In blocks of 512 bytes: zero, and less than the memory that is shared with the NIC.
    for limit in [0, 1, 8, 100, 1000] {
        let script = format!("ulimit -f {limit}; exec PROGRAM");
        let (code, stdout, stderr) = under(&format!("fsize-{limit}"), "256MiB", &script);
        assert_eq!((code, &*stdout), (EXIT_PAGER, ""), "{limit}: {stderr}");
        assert!(
            stderr.contains("RLIMIT_FSIZE") && stderr.contains("ulimit -f"),
            "{limit}: {stderr}"
        );
    }
}

#[test]
fn sufficient_file_size_limit_has_no_effect() {
    let (code, stdout, stderr) = under("fsize-enough", "256MiB", "ulimit -f 40000; exec PROGRAM");
    assert_eq!((code, &*stdout), (0, "as expected\n"), "{stderr}");
}

#[test]
fn file_size_limit_of_a_program_still_applies() {
    let (code, stdout, stderr) = under("fsize-own", "256MiB", "exec PROGRAM 1048576");
    assert_eq!((code, &*stdout), (0, "as expected\n"), "{stderr}");
}

#[test]
fn overflow_file_at_its_size_limit_ends_the_program() {
    for script in ["exec PROGRAM 1048576", "ulimit -f 10000; exec PROGRAM"] {
        let (code, stdout, stderr) = under("fsize-overflow", "4MiB", script);
        assert_eq!((code, &*stdout), (EXIT_PAGER, ""), "{script}: {stderr}");
        assert!(stderr.contains("overflow file"), "{script}: {stderr}");
        assert!(stderr.contains("RLIMIT_FSIZE") && stderr.contains("ulimit -f"), "{stderr}");
    }
}
