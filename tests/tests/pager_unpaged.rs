//! Memory that the pager does not page: `granary run` reports its amount and kind. Also memory that
//! the pager must page: small mappings, static variables, mappings at addresses of the program's
//! choice, and those of Ruby's garbage collector.

use granary_tests::pager::{Outcome, assert_same_within, plain};
use granary_tests::run::{NodeKind, Paged, Site};

const MIB: u64 = 1 << 20;
/// Limit of local memory.
const LOCAL: u64 = 16 * MIB;
/// Memory of one kind that the program touches.
const TOUCHED: u64 = 48 * MIB;

/// Part of the report's line.
const REPORT: &str = "resident that is not paged: ";

/// Runs `unpaged.c` with one kind of memory, without the pager and paged.
fn run(kind: &str) -> (Outcome, Paged) {
    let site = Site::new(NodeKind::Private, &format!("unpaged-{kind}"), LOCAL, "256MiB");
    let program = site.scratch.compile("unpaged", include_str!("pager_programs/unpaged.c"));
    let program = program.to_str().unwrap();
    let mebibytes = (TOUCHED / MIB).to_string();
    let arguments = [kind, &mebibytes];
    (plain(program, &arguments), site.run(program, &arguments))
}

/// Asserts that a kind of memory is not paged, and that the report has its amount and kind, the
/// largest kind first.
fn is_reported(kind: &str, as_what: &str) {
    let (plain, Paged { outcome, stats }) = run(kind);
    assert_eq!((plain.code, outcome.code), (0, 0), "{}", outcome.stderr);
    assert_eq!(plain.stdout, outcome.stdout);
    let peak = stats["unpaged_peak_bytes"].as_u64().unwrap_or(0);
    assert!((TOUCHED..TOUCHED + 8 * MIB).contains(&peak), "{kind}: {stats}");
    let line = outcome.stderr.lines().find(|line| line.contains(REPORT));
    let line = line.unwrap_or_else(|| panic!("{kind}: no report: {}", outcome.stderr));
    assert!(line.starts_with("granary: unpaged (process "), "{line}");
    let (_, first) = line.split_once(REPORT).unwrap();
    assert!(first.split_once(" MiB ").unwrap().1.starts_with(as_what), "{kind}: {line}");
}

#[test]
fn memory_by_raw_system_calls_is_reported() {
    is_reported("raw", "in mappings by raw system calls");
}

#[test]
fn executable_mappings_are_reported() {
    is_reported("executable", "in mappings by raw system calls or with execute access");
}

#[test]
fn large_data_is_reported() {
    is_reported("data", "in .data, .bss");
}

#[test]
fn written_pages_of_private_file_mappings_are_reported() {
    is_reported("file", "in .data, .bss and other private mappings of files");
}

#[test]
fn stacks_of_threads_are_reported() {
    is_reported("stack", "in stacks");
}

#[test]
fn shared_memory_is_reported() {
    is_reported("shared", "in shared memory");
    is_reported("memfd", "in shared memory");
}

/// The pager's threads must not read the program's memory, because a page that they touch is lost.
#[test]
fn program_with_its_name_on_the_heap_loses_no_page() {
    let (plain, Paged { outcome, stats }) = run("renamed");
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(stats["unpaged_peak_bytes"].as_u64().unwrap_or(0) >= 40 * MIB, "no sample: {stats}");
    let line = outcome.stderr.lines().find(|line| line.contains(REPORT));
    assert!(line.is_some_and(|line| line.starts_with("granary: unpaged ")), "{}", outcome.stderr);
}

/// Reported without `--stats` too, and including a forked child that does not page for itself.
#[test]
fn memory_of_a_forked_child_is_reported_without_stats() {
    let site = Site::new(NodeKind::Private, "unpaged-quiet", LOCAL, "256MiB");
    let program = site.scratch.compile("unpaged", include_str!("pager_programs/unpaged.c"));
    let mebibytes = (TOUCHED / MIB).to_string();
    let output = std::process::Command::new(granary_tests::node::granary())
        .args(["run", "--local", &LOCAL.to_string(), "--memory", "256MiB", "--"])
        .arg(&program)
        .args(["child", &mebibytes])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(
        stderr.contains(REPORT) && stderr.contains("in mappings by raw system calls"),
        "{stderr}"
    );
}

/// More mappings at addresses of the program's choice than the pager has tables for.
#[test]
fn mappings_without_room_are_reported() {
    const SOURCE: &str = "
        #include \"check.h\"
        #include <sys/mman.h>
        int main(void) {
            for (long i = 0; i < 4500; i++) {
                char *wanted = (char *)0x200000000000 + (i << 20);
                int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
                char *at = mmap(wanted, 64 << 10, PROT_READ | PROT_WRITE, flags, -1, 0);
                CHECK(at == wanted);
                at[0] = 1;
            }
            return 0;
        }";
    let site = Site::new(NodeKind::Private, "unpaged-extents", LOCAL, "256MiB");
    let program = site.scratch.compile("extents", SOURCE);
    let outcome = site.run(program.to_str().unwrap(), &[]).outcome;
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let line = outcome.stderr.lines().find(|line| line.contains("in total are not paged"));
    assert!(line.is_some_and(|line| line.starts_with("granary: 4")), "{}", outcome.stderr);
}

/// Asserts that a kind of memory is paged: the program stays within the limit, and nothing is
/// reported.
fn is_paged(kind: &str) {
    let (plain, paged) = run(kind);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    assert_same_within(&plain, &paged.outcome, LOCAL + pager::CONSTANT_BYTES);
    paged.assert_moved(1000);
    assert!(!paged.outcome.stderr.contains(REPORT), "{}", paged.outcome.stderr);
}

#[test]
fn small_mappings_are_paged() {
    is_paged("small");
}

#[test]
fn memory_at_fixed_addresses_is_paged() {
    is_paged("fixed");
}

/// The reservation is larger than the pager's region.
#[test]
fn reservation_larger_than_the_region_is_paged() {
    is_paged("vast");
}

#[test]
fn large_bss_is_paged() {
    is_paged("bss");
}

#[test]
fn aligned_parts_of_larger_mappings_are_paged() {
    is_paged("aligned");
    is_paged("aligned64");
}

#[test]
fn the_heap_of_brk_is_paged() {
    is_paged("brk");
}

#[test]
fn mappings_within_a_reservation_are_paged() {
    is_paged("reserved");
}

/// Ruby program: strings and a table of them, several times the limit of local memory.
const RUBY: &str = "
a = Array.new(500_000) { |i| \"item number #{i * 7919 % 1000003} with some text in it\" }
h = {}
a.each_with_index { |s, i| h[s] = i if i % 3 == 0 }
puts h.size, a.map(&:size).sum, a.sort[250_000]
";

#[test]
fn ruby_is_paged() {
    const RUBY_LOCAL: u64 = 24 * MIB;
    let site = Site::new(NodeKind::Private, "ruby", RUBY_LOCAL, "512MiB");
    let plain = plain("/usr/bin/ruby", &["-e", RUBY]);
    let paged = site.run("/usr/bin/ruby", &["-e", RUBY]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    // Ruby's own text and data take about 16 MiB.
    assert_same_within(&plain, &paged.outcome, RUBY_LOCAL + pager::CONSTANT_BYTES + 8 * MIB);
    paged.assert_moved(5000);
    assert!(!paged.outcome.stderr.contains(REPORT), "{}", paged.outcome.stderr);
}
