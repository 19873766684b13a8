//! CPUs of the host.

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
