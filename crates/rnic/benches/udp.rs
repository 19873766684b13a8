//! Speed of plain UDP on this machine: `cargo bench -p granary-rnic --bench udp`.
//!
//! Two polling threads exchange datagrams over two sockets on the loopback interface, without a
//! protocol and without a NIC. The results are upper bounds for the `roce` port.
//!
//! ```text
//!  one way    half of the round-trip time of one datagram
//!  stream     bursts of 15 datagrams of 4 KiB (UDP GSO, UDP GRO). Each burst is acknowledged by a
//!             datagram, and four bursts are in flight: the minimum for a reliable protocol
//!  + CRC      both ends also compute the CRC-32 of each packet
//!  + copy     both ends also copy each packet, before sending and after receiving. The ICRC
//!             requires these copies: data must not change after its ICRC was computed, and must
//!             not reach its destination before its ICRC was checked
//! ```

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a packet with its headers, as the `roce` port sends them.
const PACKET: usize = 4096 + 16;
/// Packets of a burst, as the `roce` port sends them.
const BURST: usize = 15;
/// Bursts in flight.
const IN_FLIGHT: u64 = 4;
const MESSAGE: usize = 1 << 20;
const TIME: Duration = Duration::from_millis(500);
const ROUNDS: usize = 5;

fn set(socket: &UdpSocket, name: i32, value: i32) {
    let size = size_of::<i32>() as u32;
    let value = std::ptr::from_ref(&value);
    // SAFETY: `value` has `size` bytes and lives until the call returns.
    let done =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, name, value.cast(), size) };
    assert_eq!(done, 0, "this kernel has no UDP segmentation");
}

fn pair() -> [UdpSocket; 2] {
    let sockets = [0; 2].map(|_| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
    for (socket, other) in sockets.iter().zip(sockets.iter().rev()) {
        socket.connect(other.local_addr().expect("its address")).expect("connecting");
        socket.set_nonblocking(true).expect("an option");
    }
    sockets
}

/// Polls for a datagram until `over` is set.
fn receive(socket: &UdpSocket, into: &mut [u8], over: &AtomicBool) -> Option<usize> {
    let mut polls = 0u32;
    loop {
        if let Ok(len) = socket.recv(into) {
            return Some(len);
        }
        polls += 1;
        if polls.is_multiple_of(64) {
            // The other thread needs the CPU if there is only one.
            std::thread::yield_now();
            if over.load(Ordering::Relaxed) {
                return None;
            }
        }
    }
}

/// Measures half of the round-trip time, in microseconds.
fn one_way(bytes: usize) -> f64 {
    let [here, there] = pair();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut data = vec![0; bytes];
            while let Some(len) = receive(&there, &mut data, &over) {
                there.send(&data[..len]).expect("sending");
            }
        });
        let mut data = vec![0; bytes];
        let start = Instant::now();
        let mut trips = 0;
        while start.elapsed() < TIME {
            here.send(&data).expect("sending");
            receive(&here, &mut data, &over).expect("an answer");
            trips += 1;
        }
        let took = start.elapsed();
        over.store(true, Ordering::Relaxed);
        took.as_secs_f64() * 1e6 / (2 * trips) as f64
    })
}

/// Work on each packet in addition to sending and receiving it.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    Nothing,
    Crc,
    CopyAndCrc,
}

fn check(packet: &[u8], sum: &mut u32) {
    *sum ^= crc32fast::hash(packet);
}

/// Measures the throughput of a stream, in GB/s.
fn stream(work: Work) -> f64 {
    let [here, there] = pair();
    set(&here, libc::UDP_SEGMENT, PACKET as i32);
    set(&there, libc::UDP_GRO, 1);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut batch, mut message) = (vec![0; 1 << 16], vec![0; MESSAGE]);
            let (mut at, mut sum, mut left) = (0, 0, 0);
            while let Some(len) = receive(&there, &mut batch, &over) {
                for packet in batch[..len].chunks(PACKET) {
                    if work != Work::Nothing {
                        check(packet, &mut sum);
                    }
                    if work == Work::CopyAndCrc {
                        message[at..at + packet.len()].copy_from_slice(packet);
                        at = (at + PACKET) % (MESSAGE - PACKET);
                    }
                    left += packet.len();
                    if left >= BURST * PACKET {
                        left -= BURST * PACKET;
                        there.send(&[0; 16]).expect("sending");
                    }
                }
            }
            std::hint::black_box((&message, sum));
        });
        let message = vec![0x5a; MESSAGE];
        let (mut burst, mut ack) = (vec![0; BURST * PACKET], [0; 16]);
        let (mut at, mut sum, mut sent, mut acknowledged) = (0, 0, 0, 0);
        let start = Instant::now();
        while start.elapsed() < TIME {
            for packet in burst.chunks_mut(PACKET) {
                if work == Work::CopyAndCrc {
                    packet.copy_from_slice(&message[at..at + packet.len()]);
                    at = (at + PACKET) % (MESSAGE - PACKET);
                }
                if work != Work::Nothing {
                    check(packet, &mut sum);
                }
            }
            while sent == acknowledged + IN_FLIGHT {
                receive(&here, &mut ack, &over).expect("an acknowledgement");
                acknowledged += 1;
            }
            here.send(&burst).expect("sending");
            sent += 1;
        }
        let took = start.elapsed();
        over.store(true, Ordering::Relaxed);
        std::hint::black_box(sum);
        (acknowledged as usize * BURST * PACKET) as f64 / took.as_secs_f64() / 1e9
    })
}

/// Prints the median of several rounds, with minimum and maximum.
fn rounds(what: &str, unit: &str, run: impl Fn() -> f64) {
    let mut results: Vec<f64> = (0..ROUNDS).map(|_| run()).collect();
    results.sort_by(f64::total_cmp);
    println!(
        "{what:32} {:8.2} {unit}  ({:.2} to {:.2})",
        results[ROUNDS / 2],
        results[0],
        results[ROUNDS - 1]
    );
}

fn main() {
    // `cargo test --benches` passes no `--bench`: it only builds and starts the program.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    for bytes in [64, 4096] {
        rounds(&format!("one way, {bytes} B"), "us", || one_way(bytes));
    }
    let data = vec![0x5a; PACKET];
    rounds("CRC-32 of a packet", "GB/s", || {
        let (start, mut packets) = (Instant::now(), 0);
        let mut sum = 0;
        while start.elapsed() < TIME / 10 {
            (0..64).for_each(|_| check(std::hint::black_box(&data), &mut sum));
            packets += 64;
        }
        std::hint::black_box(sum);
        (packets * PACKET) as f64 / start.elapsed().as_secs_f64() / 1e9
    });
    rounds("stream", "GB/s", || stream(Work::Nothing));
    rounds("stream + CRC", "GB/s", || stream(Work::Crc));
    rounds("stream + CRC + copy", "GB/s", || stream(Work::CopyAndCrc));
}
