//! CPUs of the host.

use std::sync::OnceLock;
use std::thread;

/// Returns the number of cores that this process may use: those of its affinity mask, or fewer if a
/// control group limits its CPU time. The first call decides.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, |n| n.get()))
}

/// Returns whether this process may run on one CPU only. A thread that spins there takes the CPU
/// from the thread that it waits for.
///
/// The affinity mask of the main thread counts, because other threads may be pinned.
pub fn has_one_cpu() -> bool {
    let main = rustix::process::getpid();
    rustix::thread::sched_getaffinity(Some(main)).is_ok_and(|set| set.count() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_count_follows_the_main_threads_affinity() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        // A single number is one CPU.
        assert_eq!(has_one_cpu(), list.trim().parse::<u32>().is_ok(), "{list}");
    }
}
