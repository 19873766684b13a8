//! Debug ring.
#![allow(missing_docs)]
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
const N: usize = 1 << 21;
pub struct E { t: AtomicU64, id: AtomicU64, k: AtomicU64, a: AtomicU64 }
static RING: [E; N] = [const { E { t: AtomicU64::new(0), id: AtomicU64::new(0), k: AtomicU64::new(0), a: AtomicU64::new(0) } }; N];
static AT: AtomicUsize = AtomicUsize::new(0);
thread_local!(static TID: u32 = unsafe { libc::syscall(libc::SYS_gettid) } as u32);
/// kind, position, count
pub fn log(id: usize, kind: u8, pos: u32, count: u32, a: u64) {
    let i = AT.fetch_add(1, Relaxed) % N;
    let tid = unsafe { libc::syscall(libc::SYS_gettid) } as u64;
    RING[i].t.store(crate::sys::now_ns(), Relaxed);
    RING[i].id.store(id as u64, Relaxed);
    RING[i].k.store((kind as u64) << 56 | (count as u64 & 0xff) << 48 | (tid & 0xffffff) << 24 | (pos as u64 & 0xffffff), Relaxed);
    RING[i].a.store(a, Relaxed);
}
pub fn dump(why: &str) {
    use std::io::Write;
    let path = format!("/tmp/dump.{}", std::process::id());
    let f = std::fs::File::create(path).unwrap();
    let mut w = std::io::BufWriter::new(f);
    let _ = writeln!(w, "{why}");
    if let Ok(maps) = std::fs::read_to_string("/proc/self/maps") { let _ = writeln!(w, "{maps}"); }
    let at = AT.load(Relaxed);
    for j in at.saturating_sub(N)..at {
        let e = &RING[j % N];
        let k = e.k.load(Relaxed);
        let _ = writeln!(w, "{} {:x} k={} n={} tid={} pos={} a={:x}", e.t.load(Relaxed), e.id.load(Relaxed), k >> 56, k >> 48 & 0xff, k >> 24 & 0xffffff, k & 0xffffff, e.a.load(Relaxed));
    }
    let _ = w.flush();
}
