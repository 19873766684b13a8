//! Samples of a memory node's CPU time and of the chunks' utilization while programs run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pager::run_memory::RunMemory;
use pager::stats::{Counter, Summary};

/// Interval between two samples.
const INTERVAL: Duration = Duration::from_millis(20);
/// Time over which a peak is a mean.
const PEAK_WINDOW: Duration = Duration::from_millis(100);
/// Name of the NIC thread, which stands in for hardware.
const NIC_THREAD: &str = "granary-nic";

/// Results of the samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// The largest CPU time over [`PEAK_WINDOW`], as a share of a core, without the NIC thread.
    pub cpu_peak: f64,
    /// Mean of the bytes of pages over the bytes of chunks, while there are chunks.
    pub utilization: Option<f64>,
}

/// A thread that takes the samples.
pub struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Seen>,
}

impl Watch {
    /// Starts to watch a memory node and processes of `granary run`, by their process ids.
    pub fn start(node: u32, runs: Vec<u32>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut runs = Runs::new(runs);
            let mut cpu = NodeCpu::new(node);
            let mut peak = Peak::new(Instant::now());
            let mut mean = Mean::default();
            loop {
                let ended = stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout);
                peak.add(Instant::now(), cpu.since_last());
                if ended {
                    return Seen {
                        cpu_peak: peak.finish(Instant::now()),
                        utilization: mean.value(),
                    };
                }
                mean.add(runs.utilization());
            }
        });
        Self { stop, thread }
    }

    /// Ends the samples.
    pub fn finish(self) -> Seen {
        drop(self.stop);
        self.thread.join().expect("the samples do not panic")
    }
}

/// The counters of several processes of `granary run`.
struct Runs(Vec<(u32, Option<RunMemory>)>);

impl Runs {
    fn new(ids: Vec<u32>) -> Self {
        Self(ids.into_iter().map(|id| (id, None)).collect())
    }

    /// Bytes of pages over bytes of chunks; `None` without chunks.
    fn utilization(&mut self) -> Option<f64> {
        let (mut live, mut held) = (0, 0);
        for (id, found) in &mut self.0 {
            if found.is_none() {
                let (process, name) = (format!("/proc/{id}"), format!("granary-run-{id}-"));
                *found = RunMemory::of_run(Path::new(&process), &name).ok();
            }
            if let Some(counters) = found.map(Summary::read) {
                live += counters.get(Counter::LiveBytes);
                held += counters.get(Counter::HeldBytes);
            }
        }
        (held > 0).then(|| live as f64 / held as f64)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.count += 1;
        }
    }

    fn value(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

/// CPU times of the threads of a memory node, without the NIC thread.
struct NodeCpu {
    tasks: PathBuf,
    /// Nanoseconds of each thread; `None` of the NIC thread.
    threads: BTreeMap<PathBuf, Option<u64>>,
}

impl NodeCpu {
    fn new(process: u32) -> Self {
        let mut new =
            Self { tasks: format!("/proc/{process}/task").into(), threads: BTreeMap::new() };
        new.since_last();
        new
    }

    /// CPU time since the last call.
    fn since_last(&mut self) -> Duration {
        let mut sum = 0;
        for entry in fs::read_dir(&self.tasks).into_iter().flatten().flatten() {
            let path = entry.path();
            let last = self.threads.entry(path.clone()).or_insert_with(|| {
                let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
                (name.trim_end() != NIC_THREAD).then_some(0)
            });
            // A thread may have ended since its name was read.
            let now = last.and_then(|_| run_time(&path));
            if let (Some(last), Some(now)) = (last, now) {
                sum += now.saturating_sub(*last);
                *last = now;
            }
        }
        Duration::from_nanos(sum)
    }
}

/// The time in nanoseconds for which a thread has run: the first number of `schedstat`.
fn run_time(task: &std::path::Path) -> Option<u64> {
    let text = fs::read_to_string(task.join("schedstat")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// The largest CPU time over a window, as a share of a core.
struct Peak {
    begin: Instant,
    used: Duration,
    /// `None` before the end of the first window.
    most: Option<f64>,
}

impl Peak {
    fn new(now: Instant) -> Self {
        Self { begin: now, used: Duration::ZERO, most: None }
    }

    fn add(&mut self, now: Instant, used: Duration) {
        self.used += used;
        if now - self.begin >= PEAK_WINDOW {
            let share = self.share(now);
            self.most = Some(self.most.map_or(share, |most| most.max(share)));
            (self.begin, self.used) = (now, Duration::ZERO);
        }
    }

    fn share(&self, now: Instant) -> f64 {
        self.used.as_secs_f64() / (now - self.begin).as_secs_f64().max(1e-3)
    }

    /// The result; of a time shorter than a window, its mean.
    fn finish(self, now: Instant) -> f64 {
        self.most.unwrap_or_else(|| self.share(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_is_that_of_the_busiest_window() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let mut peak = Peak::new(begin);
        for (ms, used) in [(50, 10), (100, 10), (150, 40), (200, 40), (300, 30), (320, 20)] {
            peak.add(at(ms), Duration::from_millis(used));
        }
        assert!((peak.finish(at(320)) - 0.8).abs() < 1e-9);
        let mut short = Peak::new(begin);
        short.add(at(40), Duration::from_millis(10));
        assert!((short.finish(at(40)) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn mean_passes_over_samples_without_chunks() {
        let mut mean = Mean::default();
        assert_eq!(mean.value(), None);
        [None, Some(0.5), Some(1.0)].into_iter().for_each(|value| mean.add(value));
        assert_eq!(mean.value(), Some(0.75));
    }

    #[test]
    fn nic_thread_is_not_counted() {
        // CPU time, because a busy machine may give the thread little of any real time.
        let busy = || {
            let own = || run_time("/proc/thread-self".as_ref()).unwrap();
            let begin = own();
            while own() - begin < 30_000_000 {
                std::hint::black_box(0);
            }
        };
        let spent = |name: &str| {
            let (ready, wait_ready) = mpsc::channel();
            let (go, wait_go) = mpsc::channel::<()>();
            let body = move || {
                // Other tests of this process may have a thread of the same name.
                ready.send(rustix::thread::gettid()).unwrap();
                wait_go.recv().unwrap();
                busy();
                // The thread must exist until its time has been read.
                let _ = wait_go.recv();
            };
            let thread = thread::Builder::new().name(name.into()).spawn(body).unwrap();
            let id = wait_ready.recv().unwrap();
            let task = PathBuf::from(format!("/proc/self/task/{}", id.as_raw_nonzero()));
            let mut cpu = NodeCpu::new(std::process::id());
            let before = run_time(&task).unwrap();
            go.send(()).unwrap();
            while run_time(&task).unwrap() - before < 10_000_000 {
                thread::yield_now();
            }
            cpu.since_last();
            let id: u32 = task.file_name().unwrap().to_str().unwrap().parse().unwrap();
            let key = format!("/proc/{}/task/{id}", std::process::id());
            let seen = cpu.threads[&PathBuf::from(key)];
            drop(go);
            thread.join().unwrap();
            seen
        };
        assert_eq!(spent(NIC_THREAD), None);
        assert!(spent("granary-control").is_some_and(|ns| ns >= 10_000_000));
    }
}
