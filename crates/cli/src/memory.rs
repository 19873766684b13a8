//! Memory size of this machine, or of the control group of this process.

use std::fs;
use std::path::{Path, PathBuf};

use units::Size;

/// Memory in bytes that this process can use; `None` where the kernel does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The machine's memory, or the control group's limit if that is lower.
    pub total: Option<u64>,
    /// Memory that can be allocated now without swapping (`MemAvailable`), or the rest up to the
    /// control group's limit if that is less.
    pub available: Option<u64>,
}

/// Result of comparing a donation with the memory of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DonationCheck {
    /// The donation fits into the available memory.
    Fits,
    /// The donation fits into the total memory but exceeds the available memory.
    Tight { warning: String },
    /// The donation exceeds the total memory.
    TooLarge { why: String },
}

impl HostMemory {
    /// Reads `/proc/meminfo` and the limits of the control groups.
    pub fn read() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::of(&meminfo, &group_limits(&groups, Path::new("/sys/fs/cgroup")))
    }

    /// Combines the text of `/proc/meminfo` with the limit and use of each control group above this
    /// process.
    fn of(meminfo: &str, groups: &[(u64, u64)]) -> Self {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let limits = groups.iter().map(|(limit, _)| *limit);
        let left = groups.iter().map(|(limit, used)| limit.saturating_sub(*used));
        Self {
            total: field("MemTotal:").into_iter().chain(limits).min(),
            available: field("MemAvailable:").into_iter().chain(left).min(),
        }
    }

    /// Compares a donation in bytes with this memory.
    pub fn check_donation(&self, donated: u64) -> DonationCheck {
        let size = |bytes: u64| Size(bytes).rounded();
        if let Some(total) = self.total.filter(|total| donated > *total) {
            let why = format!(
                "--memory {}: this machine or its control group has {}; donate less, or add \
                 --overcommit. With --overcommit, the kernel's OOM killer ends this memory node, \
                 and the data in it is lost, when clients use more memory than there is",
                size(donated),
                size(total),
            );
            return DonationCheck::TooLarge { why };
        }
        if let Some(available) = self.available.filter(|available| donated > *available) {
            let warning = format!(
                "--memory {} exceeds the {} that are available now. Chunks take memory at their \
                 first use; if no memory is left then, the kernel's OOM killer ends this memory \
                 node, and the data in it is lost",
                size(donated),
                size(available),
            );
            return DonationCheck::Tight { warning };
        }
        DonationCheck::Fits
    }
}

/// Limit and use in bytes of the control groups in the text of `/proc/self/cgroup` and of their
/// ancestors; groups without a limit are left out. Covers both hierarchies: version 2 under `root`,
/// version 1 under `root/memory`.
fn group_limits(groups: &str, root: &Path) -> Vec<(u64, u64)> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let (base, limit, used) = match controllers {
            "" => (root.to_owned(), "memory.max", "memory.current"),
            list if list.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let group = base.join(path.trim_start_matches('/'));
        for group in group.ancestors().take_while(|group| group.starts_with(&base)) {
            // Without a limit the file contains "max" or does not exist.
            if let (Some(limit), Some(used)) = (number(group.join(limit)), number(group.join(used)))
            {
                limits.push((limit, used));
            }
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       24683940 kB\nMemFree:         1234 kB\nMemAvailable:   20000000 kB\n";

    #[test]
    fn lowest_limit_of_all_groups_applies() {
        let whole = HostMemory::of(MEMINFO, &[]);
        assert_eq!(whole.total, Some(24_683_940 << 10));
        assert_eq!(whole.available, Some(20_000_000 << 10));
        let group = HostMemory::of(MEMINFO, &[(4 << 30, 1 << 30), (64 << 30, 1 << 30)]);
        assert_eq!(group, HostMemory { total: Some(4 << 30), available: Some(3 << 30) });
        let unknown = HostMemory::of("nothing known", &[]);
        assert_eq!(unknown.check_donation(u64::MAX), DonationCheck::Fits);
    }

    #[test]
    fn donation_is_refused_above_total_and_warned_of_above_available() {
        let host = HostMemory { total: Some(24 << 30), available: Some(20 << 30) };
        assert_eq!(host.check_donation(20 << 30), DonationCheck::Fits);
        let DonationCheck::Tight { warning } = host.check_donation(22 << 30) else {
            panic!("no warning")
        };
        for part in ["22GiB", "20GiB", "OOM killer", "lost"] {
            assert!(warning.contains(part), "{warning}");
        }
        let DonationCheck::TooLarge { why } = host.check_donation(1 << 40) else {
            panic!("not refused")
        };
        for part in ["1TiB", "24GiB", "--overcommit"] {
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn group_limits_cover_both_cgroup_versions_and_ancestors() {
        let root = tempfile::tempdir().unwrap();
        let put = |group: &str, name: &str, text: &str| {
            let group = root.path().join(group);
            fs::create_dir_all(&group).unwrap();
            fs::write(group.join(name), text).unwrap();
        };
        put("user/app", "memory.max", "max\n");
        put("user/app", "memory.current", "5\n");
        put("user", "memory.max", "1000\n");
        put("user", "memory.current", "10\n");
        put("memory/old", "memory.limit_in_bytes", "77\n");
        put("memory/old", "memory.usage_in_bytes", "7\n");
        let groups = "5:cpu,cpuacct:/x\n4:memory:/old\n0::/user/app\n";
        assert_eq!(group_limits(groups, root.path()), [(77, 7), (1000, 10)]);
    }
}
