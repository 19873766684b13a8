//! Memory of this machine, or of the control group that this process is in.

use std::fs;
use std::path::{Path, PathBuf};

use bench::size::Size;

/// How much memory there is. What the system does not say is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// All of it: the machine's, or the control group's limit if that is less.
    pub total: Option<u64>,
    /// What processes may take now without another's being given up.
    pub available: Option<u64>,
}

/// What is to be said of a donation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It fits.
    Fits,
    /// It fits, but not beside what is in use now.
    Crowded { warning: String },
    /// There is not that much.
    TooLarge { why: String },
}

impl HostMemory {
    /// Asks the system.
    pub fn read() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::of(&meminfo, &group_limits(&groups, Path::new("/sys/fs/cgroup")))
    }

    /// From the text of `/proc/meminfo`, and the limit and use of each control group above this
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

    /// What is to be said of so many donated bytes.
    pub fn judge(&self, donated: u64) -> Verdict {
        let size = |bytes: u64| Size(bytes).rounded();
        if let Some(total) = self.total.filter(|total| donated > *total) {
            let why = format!(
                "--memory {}: this machine or its control group has {}; donate less, or say \
                 --overcommit, and then the kernel's OOM killer ends this memory node, and all \
                 that it holds is lost, when more is used than there is",
                size(donated),
                size(total),
            );
            return Verdict::TooLarge { why };
        }
        if let Some(available) = self.available.filter(|available| donated > *available) {
            let warning = format!(
                "--memory {} is donated and {} is available now; memory is taken when chunks are \
                 first used, and if there is none then, the kernel's OOM killer ends this memory \
                 node, and all that it holds is lost",
                size(donated),
                size(available),
            );
            return Verdict::Crowded { warning };
        }
        Verdict::Fits
    }
}

/// The limit and the use in bytes of each control group in the text of `/proc/self/cgroup`, and of
/// those above it, where they have one. Both hierarchies: version 2 under `root`, version 1 under
/// `root/memory`.
fn group_limits(groups: &str, root: &Path) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
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
            // Without a limit it is "max", or nothing.
            if let (Some(limit), Some(used)) = (number(group.join(limit)), number(group.join(used)))
            {
                all.push((limit, used));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       24683940 kB\nMemFree:         1234 kB\nMemAvailable:   20000000 kB\n";

    #[test]
    fn the_least_limit_counts() {
        let whole = HostMemory::of(MEMINFO, &[]);
        assert_eq!(whole.total, Some(24_683_940 << 10));
        assert_eq!(whole.available, Some(20_000_000 << 10));
        let group = HostMemory::of(MEMINFO, &[(4 << 30, 1 << 30), (64 << 30, 1 << 30)]);
        assert_eq!(group, HostMemory { total: Some(4 << 30), available: Some(3 << 30) });
        assert_eq!(HostMemory::of("nothing known", &[]).judge(u64::MAX), Verdict::Fits);
    }

    #[test]
    fn a_donation_beyond_the_machine_is_refused_and_one_beyond_what_is_free_warned_of() {
        let there = HostMemory { total: Some(24 << 30), available: Some(20 << 30) };
        assert_eq!(there.judge(20 << 30), Verdict::Fits);
        let Verdict::Crowded { warning } = there.judge(22 << 30) else { panic!("no warning") };
        for part in ["22GiB", "20GiB", "OOM killer", "lost"] {
            assert!(warning.contains(part), "{warning}");
        }
        let Verdict::TooLarge { why } = there.judge(1 << 40) else { panic!("not refused") };
        for part in ["1TiB", "24GiB", "--overcommit"] {
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn control_groups_of_both_versions_are_read_with_those_above_them() {
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
