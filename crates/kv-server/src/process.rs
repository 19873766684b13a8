//! Memory and CPU time of this process, as the kernel counts them.

use std::fs;
use std::time::Duration;

/// Resident memory of the process in bytes.
pub(crate) fn memory() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_ascii_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Descriptors that are no connections: sockets that listen, files, the pool.
const OWN_DESCRIPTORS: u64 = 128;

/// The connections of a process that may open `limit` descriptors. Below 512 descriptors, a quarter
/// is for everything else.
pub fn connections_within(limit: u64) -> u64 {
    (limit - OWN_DESCRIPTORS.min(limit / 4)).max(1)
}

/// The connections for which the process may open descriptors. `None`: there is no limit.
pub(crate) fn connections_max() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map(connections_within)
}

/// Memory of the machine in bytes.
pub(crate) fn system_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// CPU time of the process: in the program, and in the kernel.
pub(crate) fn cpu_times() -> (Duration, Duration) {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program, in parentheses, may have blanks.
    let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = |at: usize| {
        let word = fields.split_ascii_whitespace().nth(at);
        word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
    };
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let time = |ticks: u64| Duration::from_secs_f64(ticks as f64 / per_second as f64);
    (time(ticks(11)), time(ticks(12)))
}

/// Version of the kernel.
pub(crate) fn kernel_release() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}
