//! Sealing and opening of pages (TDMEM, table 2 and figure 14), beside a copy of a page.
//!
//! | setting | values |
//! | --- | --- |
//! | `operation` | `seal`, `open`, `copy` (memcpy) |
//! | `scheme` | the cipher, or `bare` for the copy |
//! | `memory` | `private`; `shared`: other processes may change the sealed page during the call, so it is copied |
//! | `cache` | `warm`: the same two pages each time; `cold`: pages of 256 MiB in a scattered order |
//!
//! | metric | definition |
//! | --- | --- |
//! | `page_us` | time of a page: the median over batches of 64 pages, and then over the rounds |
//! | `page_gb_per_s` | bytes of a page divided by this time |

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use ::seal::{Cipher, Seal, Sealer};
use units::PAGE_BYTES;

use crate::Error;
use bench_report::claims::Claims;
use bench_report::record::{BASELINE_SCHEME, Record, Setting, SettingValue, Statistic, Unit};
use bench_report::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "seal";

/// Bytes of all pages of a cold measurement: half of them are sources.
pub const COLD_BYTES: usize = 256 << 20;

/// Pages between readings of the clock.
const BATCH: usize = 64;

/// The measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Encryption of a page.
    Seal(Cipher, Memory),
    /// Verification and decryption of a page.
    Open(Cipher, Memory),
    /// A memcpy of a page.
    Copy,
}

/// Whether other processes may access the sealed page during the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// They may not: `Sealer::seal` and `Sealer::open`.
    Private,
    /// They may: `Sealer::seal_raw` and `Sealer::open_raw`.
    Shared,
}

/// Whether the pages are in the caches of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// The same two pages each time.
    Warm,
    /// Pages of [`COLD_BYTES`], in an order that no prefetcher follows from page to page.
    Cold,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The operation.
    pub operation: Operation,
    /// The state of the caches.
    pub cache: Cache,
}

impl Spec {
    /// All measurements, in the order of the tables.
    pub fn all() -> Vec<Self> {
        let mut operations = vec![Operation::Copy];
        for operation in [Operation::Seal, Operation::Open] {
            for cipher in Cipher::ALL {
                operations.push(operation(cipher, Memory::Private));
                operations.push(operation(cipher, Memory::Shared));
            }
        }
        let with = |cache| operations.iter().map(move |&operation| Self { operation, cache });
        with(Cache::Warm).chain(with(Cache::Cold)).collect()
    }

    fn setting(&self) -> Setting {
        let (operation, scheme, memory) = match self.operation {
            Operation::Seal(cipher, memory) => ("seal", cipher.name(), Some(memory)),
            Operation::Open(cipher, memory) => ("open", cipher.name(), Some(memory)),
            Operation::Copy => ("copy", BASELINE_SCHEME, None),
        };
        let setting = Setting::new().with("operation", operation).scheme(scheme);
        let setting = match memory {
            Some(Memory::Private) => setting.with("memory", "private"),
            Some(Memory::Shared) => setting.with("memory", "shared"),
            None => setting,
        };
        setting.with("cache", if self.cache == Cache::Warm { "warm" } else { "cold" })
    }

    /// The paper's number for this measurement.
    fn claim(&self) -> Option<&'static str> {
        if self.cache == Cache::Cold {
            return None;
        }
        match self.operation {
            Operation::Seal(Cipher::Aes128Gcm, Memory::Private) => Some("tdmem.seal"),
            Operation::Open(Cipher::Aes128Gcm, Memory::Private) => Some("tdmem.open"),
            _ => None,
        }
    }

    /// The records of a measurement, from the seconds for a page in each round.
    pub fn records(&self, rounds: &mut [f64]) -> Vec<Record> {
        let median = median(rounds);
        let setting = self.setting();
        let time = Record::of(EXPERIMENT, &setting, "page_us", Unit::Us);
        let time = time.value(Statistic::P50, median * 1e6);
        let time = match self.claim() {
            Some(id) => time.against(Claims::builtin().get(id).expect("the claim exists")),
            None => time,
        };
        let rate = PAGE_BYTES as f64 / median / 1e9;
        let rate = Record::of(EXPERIMENT, &setting, "page_gb_per_s", Unit::GbPerSecond)
            .value(Statistic::P50, rate);
        vec![time, rate]
    }
}

/// Memory and keys of all measurements.
pub struct Bench {
    sources: Pages,
    targets: Pages,
    sealers: [Sealer; 2],
    seals: Vec<Seal>,
}

impl Bench {
    /// Makes the keys and fills the pages.
    ///
    /// # Errors
    /// As [`Sealer::new`].
    pub fn new() -> Result<Self, Error> {
        Self::with_cold(COLD_BYTES)
    }

    fn with_cold(bytes: usize) -> Result<Self, Error> {
        let [first, second] = Cipher::ALL;
        Ok(Self {
            sources: Pages::new(bytes / 2 / PAGE_BYTES),
            targets: Pages::new(bytes / 2 / PAGE_BYTES),
            sealers: [Sealer::new(first)?, Sealer::new(second)?],
            seals: Vec::new(),
        })
    }

    /// Measures for `duration`, and returns the time of a page in seconds.
    ///
    /// # Errors
    /// As [`Sealer::seal`].
    pub fn measure(&mut self, spec: Spec, duration: Duration) -> Result<f64, Error> {
        let pages = if spec.cache == Cache::Warm { 1 } else { self.sources.count };
        match spec.operation {
            Operation::Copy => Ok(timed(pages, duration, |page| {
                self.targets.page_mut(page).copy_from_slice(black_box(self.sources.page(page)));
            })),
            Operation::Seal(cipher, memory) => self.measure_seal(cipher, memory, pages, duration),
            Operation::Open(cipher, memory) => self.measure_open(cipher, memory, pages, duration),
        }
    }

    fn measure_seal(
        &mut self,
        cipher: Cipher,
        memory: Memory,
        pages: usize,
        duration: Duration,
    ) -> Result<f64, Error> {
        let sealer = sealer_of(&self.sealers, cipher);
        let mut result = Ok(());
        let time = timed(pages, duration, |page| {
            let (plain, sealed) = (self.sources.page(page), self.targets.page_mut(page));
            let seal = match memory {
                Memory::Private => sealer.seal(page as u64, plain, sealed),
                // SAFETY: two separate pages.
                Memory::Shared => unsafe {
                    let (from, to) = (plain.as_ptr(), sealed.as_mut_ptr());
                    sealer.seal_raw(page as u64, from, to, PAGE_BYTES)
                },
            };
            match seal {
                Ok(seal) => sealer.forget(&seal),
                Err(error) => result = Err(error),
            }
        });
        result?;
        Ok(time)
    }

    /// The sealed pages lie in the targets, and are opened into the sources.
    fn measure_open(
        &mut self,
        cipher: Cipher,
        memory: Memory,
        pages: usize,
        duration: Duration,
    ) -> Result<f64, Error> {
        let sealer = sealer_of(&self.sealers, cipher);
        self.seals.clear();
        for page in 0..pages {
            let (plain, sealed) = (self.sources.page(page), self.targets.page_mut(page));
            self.seals.push(sealer.seal(page as u64, plain, sealed)?);
        }
        let mut opened = true;
        let time = timed(pages, duration, |page| {
            let (plain, sealed) = (self.sources.page_mut(page), self.targets.page(page));
            let seal = &self.seals[page];
            opened &= match memory {
                Memory::Private => sealer.open(page as u64, seal, sealed, plain),
                // SAFETY: two separate pages.
                Memory::Shared => unsafe {
                    let (from, to) = (sealed.as_ptr(), plain.as_mut_ptr());
                    sealer.open_raw(page as u64, seal, from, to, PAGE_BYTES)
                },
            }
            .is_ok();
        });
        assert!(opened, "an unchanged page opens");
        self.seals.iter().for_each(|seal| sealer.forget(seal));
        Ok(time)
    }
}

fn sealer_of(sealers: &[Sealer], cipher: Cipher) -> &Sealer {
    sealers.iter().find(|sealer| sealer.cipher() == cipher).expect("a sealer for each cipher")
}

/// Calls `work` with page numbers for `duration` after a warm-up, and returns the time of a call in
/// seconds: the median over batches, which the scheduler and interrupts hardly change.
fn timed(pages: usize, duration: Duration, mut work: impl FnMut(usize)) -> f64 {
    // An odd stride visits each of 2^n pages once.
    let mut page = 0;
    let mut batch = || {
        for _ in 0..BATCH {
            work(page);
            page = (page + 10_007) % pages;
        }
    };
    let warm_up = Instant::now();
    while warm_up.elapsed() < duration / 10 {
        batch();
    }
    let mut times = Vec::new();
    let end = Instant::now() + duration;
    loop {
        let start = Instant::now();
        batch();
        let now = Instant::now();
        times.push((now - start).as_secs_f64() / BATCH as f64);
        if now >= end {
            return median(&mut times);
        }
    }
}

/// The median of at least one number.
fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    let (middle, last) = (numbers.len() / 2, numbers.len() - 1);
    (numbers[middle] + numbers[last - middle]) / 2.0
}

/// Pages with content, so that each has memory of its own.
struct Pages {
    count: usize,
    bytes: Vec<u8>,
}

impl Pages {
    fn new(count: usize) -> Self {
        // One page more, so that the first page can begin at a boundary of pages.
        Self { count, bytes: vec![0x5a; (count + 1) * PAGE_BYTES] }
    }

    fn start(&self, page: usize) -> usize {
        self.bytes.as_ptr().align_offset(PAGE_BYTES) + page * PAGE_BYTES
    }

    fn page(&self, page: usize) -> &[u8] {
        let start = self.start(page);
        &self.bytes[start..start + PAGE_BYTES]
    }

    fn page_mut(&mut self, page: usize) -> &mut [u8] {
        let start = self.start(page);
        &mut self.bytes[start..start + PAGE_BYTES]
    }
}

/// The tables of a run: pages in the caches, and pages that are not.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let table = |cache: &str| {
        let of_cache = |record: &&Record| record.setting.get("cache") == Some(&cache.into());
        let mut records: Vec<_> = records.iter().filter(of_cache).cloned().collect();
        records.extend(over_copy(&records));
        let table = Pivot::rows(["operation", "scheme", "memory"])
            .column("page_us", Statistic::P50)
            .column("page_gb_per_s", Statistic::P50)
            .column("over_copy_ratio", Statistic::P50)
            .table(&records);
        (format!("A page of 4 KiB, {cache}"), table)
    };
    ["warm", "cold"].map(table).into()
}

/// Times divided by the time of a copy.
fn over_copy(records: &[Record]) -> Vec<Record> {
    let times = || records.iter().filter(|record| record.metric == "page_us");
    let bare = SettingValue::from(BASELINE_SCHEME);
    let Some(copy) = times().find(|record| record.setting.get("scheme") == Some(&bare)) else {
        return Vec::new();
    };
    let over = |time: &Record| {
        Record::of(EXPERIMENT, &time.setting, "over_copy_ratio", Unit::Ratio)
            .value(Statistic::P50, time.value / copy.value)
    };
    times().map(over).collect()
}

/// Describes the instructions that aws-lc uses on this CPU, from `/proc/cpuinfo`.
pub fn instructions() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find(|line| line.split(':').next().map(str::trim) == Some(key));
        line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, value)| value.trim())
    };
    let masked = std::env::var("OPENSSL_ia32cap").ok();
    let masked = masked.map(|mask| format!("; OPENSSL_ia32cap={mask} hides some"));
    let model = value("model name");
    format!("{model}: {}{}", code_path(value("flags")), masked.unwrap_or_default())
}

/// The implementation that aws-lc chooses on a CPU with these flags.
fn code_path(flags: &str) -> &'static str {
    let has = |flag: &str| flags.split_whitespace().any(|f| f == flag);
    let vector = ["vaes", "vpclmulqdq", "avx512f", "avx512dq", "avx512bw", "avx512vl"];
    if vector.into_iter().all(has) {
        "VAES and VPCLMULQDQ with AVX-512"
    } else if ["aes", "pclmulqdq", "avx", "movbe"].into_iter().all(has) {
        "AES-NI and PCLMULQDQ with AVX"
    } else if has("aes") {
        "AES-NI"
    } else {
        "no AES instructions of x86-64"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_is_measured_and_reported() {
        let mut bench = Bench::with_cold(1 << 20).unwrap();
        let mut records = Vec::new();
        for spec in Spec::all() {
            let time = bench.measure(spec, Duration::from_micros(200)).unwrap();
            assert!(time > 0.0);
            records.extend(spec.records(&mut [time]));
        }
        assert_eq!(records.len(), 2 * 18);
        let claims: Vec<_> = records.iter().filter_map(|r| r.claim.as_deref()).collect();
        assert_eq!(claims, ["tdmem.seal", "tdmem.open"]);
        let [(_, warm), (title, cold)] = &tables(&records)[..] else { panic!("two tables") };
        assert!(warm.to_string().contains("over_copy_ratio") && title.ends_with("cold"));
        assert!(!cold.to_string().contains("paper"));
    }

    #[test]
    fn median_of_rounds_is_reported() {
        let spec = Spec { operation: Operation::Copy, cache: Cache::Warm };
        let of = |rounds: &mut [f64]| spec.records(rounds)[0].value / 1e6;
        assert_eq!(of(&mut [3.0]), 3.0);
        assert_eq!(of(&mut [9.0, 1.0, 2.0]), 2.0);
        assert_eq!(of(&mut [8.0, 2.0, 4.0, 6.0]), 5.0);
    }

    #[test]
    fn scattered_order_visits_each_page() {
        let mut visited = [false; 128];
        timed(128, Duration::from_micros(10), |page| visited[page] = true);
        assert_eq!(visited, [true; 128]);
    }

    #[test]
    fn code_path_follows_the_flags() {
        let vaes = "aes avx movbe pclmulqdq vaes vpclmulqdq avx512f avx512dq avx512bw avx512vl";
        assert!(code_path(vaes).starts_with("VAES"));
        assert!(code_path("fpu aes avx movbe pclmulqdq vaes").starts_with("AES-NI and"));
        assert_eq!(code_path("fpu aes"), "AES-NI");
        assert!(code_path("fpu").starts_with("no AES"));
    }
}
