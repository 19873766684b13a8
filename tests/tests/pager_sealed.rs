//! Sealed pages (`--seal`) over memory nodes that lie: they change, exchange, replay, clear and cut
//! pages that a waiting program has stored, and the program reads them afterwards.
//!
//! The memory node runs in the test, which writes to the chunks as their donor can.

use std::fs::File;
use std::os::unix::fs::FileExt;

use granary_tests::node::full;
use granary_tests::pager::Scratch;
use granary_tests::waiting::{self, SECRET, Waiting};
use pager::config::{Cipher, EXIT_TAMPERED};
use pager::sys::PAGE_BYTES;
use pool::{ChunkMemory, Endpoint, Service, Settings};

const MIB: u64 = 1 << 20;

/// A memory node whose chunks the test can change, and the program that checks its memory.
struct Scene {
    node: Service,
    chunks: Vec<(File, u64)>,
    scratch: Scratch,
}

impl Scene {
    fn new(name: &str) -> Self {
        let settings =
            Settings { donate_bytes: 48 << 20, shares_chunks: true, ..Settings::default() };
        let node = Service::start(&settings, &Endpoint::Fresh).unwrap();
        let memory = ChunkMemory::open(node.path()).unwrap().unwrap();
        let chunks = memory
            .parts()
            .map(|(part, file)| (File::from(file.try_clone_to_owned().unwrap()), part.bytes));
        let chunks = chunks.collect();
        let scratch = Scratch::new(name);
        waiting::compile(&scratch);
        Self { node, chunks, scratch }
    }

    fn fill(&self, seal: Option<Cipher>) -> Waiting {
        let pool = format!("shm:{}", self.node.path().display());
        let config = pager::Config { seal, ..pager::Config::new(8 * MIB, pool) };
        Waiting::start(self.scratch.0.join("fsize"), &config)
    }

    /// All bytes of the chunks.
    fn bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (file, bytes) in &self.chunks {
            let from = all.len();
            all.resize(from + *bytes as usize, 0);
            file.read_exact_at(&mut all[from..], 0).unwrap();
        }
        all
    }

    fn set_bytes(&self, mut all: &[u8]) {
        for (file, bytes) in &self.chunks {
            let (now, rest) = all.split_at(*bytes as usize);
            file.write_all_at(now, 0).unwrap();
            all = rest;
        }
    }

    /// Lets `change` change the pages in the chunks that are not all zero.
    fn change(&self, change: impl FnOnce(&mut Vec<&mut [u8]>)) {
        let mut all = self.bytes();
        let pages = all.chunks_exact_mut(PAGE_BYTES);
        let mut used: Vec<_> = pages.filter(|page| page.iter().any(|byte| *byte != 0)).collect();
        assert!(used.len() >= 2_000, "{} pages are in the pool", used.len());
        change(&mut used);
        self.set_bytes(&all);
    }
}

/// Checks that the program ends before it has read a changed page.
fn ends_with_119(waiting: Waiting, case: &str) {
    let (status, stdout, stderr) = waiting.check_memory();
    assert_eq!(status, Some(EXIT_TAMPERED), "{case}: {stdout}{stderr}");
    assert_eq!(stdout, "", "{case}");
    assert!(stderr.contains("the memory node shm:"), "{case}: {stderr}");
    assert!(!stderr.contains("secret"), "{case}: {stderr}");
}

const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::Aes128Gcm];

#[test]
fn memory_node_sees_no_content_of_sealed_pages() {
    let scene = Scene::new("sealed-read");
    let has_secret = || scene.bytes().windows(SECRET.len()).any(|part| part == SECRET);
    let filled = scene.fill(None);
    assert!(has_secret(), "the control shows plain text");
    assert_eq!(filled.check_memory().0, Some(0));
    for cipher in CIPHERS {
        let filled = scene.fill(Some(cipher));
        assert!(!has_secret(), "{cipher}: a chunk contains plain text");
        let (status, stdout, stderr) = filled.check_memory();
        assert_eq!((status, &*stdout), (Some(0), "as expected\n"), "{cipher}: {stderr}");
    }
}

#[test]
fn changed_byte_of_a_sealed_page_ends_the_program() {
    let scene = Scene::new("sealed-changed");
    let positions = if full() { 64 } else { 4 };
    for case in 0..3 * positions {
        let at = (case / 3) * PAGE_BYTES / positions + case % 61;
        let filled = scene.fill(Some(CIPHERS[case % 2]));
        scene.change(|pages| {
            for page in pages {
                page[at] = match case % 3 {
                    0 => page[at] ^ 1 << (case % 8),
                    // Bytes that are already so are changed otherwise.
                    1 if page[at] != 0 => 0,
                    2 if page[at] != 0xff => 0xff,
                    _ => !page[at],
                };
            }
        });
        ends_with_119(filled, &format!("case {case}: byte {at}"));
    }
}

#[test]
fn exchanged_sealed_pages_end_the_program() {
    let scene = Scene::new("sealed-exchanged");
    let filled = scene.fill(Some(Cipher::Aes256Gcm));
    scene.change(|pages| {
        for pair in pages.chunks_exact_mut(2) {
            let [one, other] = pair else { unreachable!("pairs") };
            one.swap_with_slice(other);
        }
    });
    ends_with_119(filled, "neighbours exchanged");
}

#[test]
fn cleared_and_cut_sealed_pages_end_the_program() {
    let scene = Scene::new("sealed-cleared");
    for from in [0, 1, PAGE_BYTES / 2, PAGE_BYTES - 16] {
        let filled = scene.fill(Some(Cipher::Aes256Gcm));
        scene.change(|pages| pages.iter_mut().for_each(|page| page[from..].fill(0)));
        ends_with_119(filled, &format!("cleared from byte {from}"));
    }
}

/// The pages of another process, with the same content in the same chunks, are those of another
/// key.
#[test]
fn sealed_pages_of_another_process_end_the_program() {
    let scene = Scene::new("sealed-replayed");
    let first = scene.fill(Some(Cipher::Aes256Gcm));
    let before = scene.bytes();
    assert_eq!(first.check_memory().0, Some(0));
    let second = scene.fill(Some(Cipher::Aes256Gcm));
    scene.set_bytes(&before);
    ends_with_119(second, "the pages of the process before");
}

#[test]
fn changed_plain_pages_are_read_as_they_are() {
    let scene = Scene::new("sealed-control");
    let filled = scene.fill(None);
    scene.change(|pages| pages.iter_mut().for_each(|page| page[100] ^= 4));
    let (status, stdout, stderr) = filled.check_memory();
    assert_eq!((status, &*stdout), (Some(1), "wrong data\n"), "{stderr}");
}
