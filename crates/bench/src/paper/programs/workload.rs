//! The programs that need no installation.
//!
//! The time and the CPU time are those of the computation, without the initialization of the data.
//! The CPU time is the whole process's, so it contains the pager's threads. Results do not depend
//! on the system; their checksum shows it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::{Measured, Program, graph};
use units::{PAGE_BYTES, Random};

/// Runs a program on `bytes` of data in this process. `None` for a program that is no part of this
/// crate.
pub fn run(program: Program, bytes: usize) -> Option<Measured> {
    let start = Instant::now();
    let measured = match program {
        Program::Linpack => linpack(bytes),
        Program::Quicksort => quicksort(bytes),
        Program::KMeans => k_means(bytes),
        Program::Stream => stream(bytes, Timed::All),
        Program::Triad => stream(bytes, Timed::Triads),
        Program::Sequential => sequential(bytes),
        Program::PageRank => graph::page_rank(bytes),
        Program::Betweenness => graph::betweenness(bytes),
        Program::Memcached => return None,
    };
    Some(Measured { whole_seconds: start.elapsed().as_secs_f64(), ..measured })
}

/// Runs a computation. Returns its time and CPU time in seconds.
pub(super) fn timed(mut compute: impl FnMut()) -> (f64, f64) {
    let (start, cpu) = (Instant::now(), cpu_time());
    compute();
    (start.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64())
}

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Checksum of words.
pub(super) fn fold(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, |sum: u64, word| sum.rotate_left(5) ^ word)
}

/// A number between 0 and 1.
pub(super) fn unit(random: &mut Random) -> f64 {
    (random.bits() >> 11) as f64 / (1u64 << 53) as f64
}

/// Columns that the LU decomposition eliminates together.
const PANEL: usize = 64;
/// Columns that an update of the rest of the matrix goes over at once: a page of numbers.
const TILE: usize = 512;

/// LU decomposition with partial pivoting, in blocks, as Linpack's.
fn linpack(bytes: usize) -> Measured {
    let n = ((bytes / size_of::<f64>()) as f64).sqrt() as usize;
    let mut random = Random::stream(0x6c75, 0);
    let mut matrix: Vec<f64> = (0..n * n).map(|_| unit(&mut random) - 0.5).collect();
    let (seconds, cpu_seconds) = timed(|| decompose(&mut matrix, n));
    let checksum = fold(matrix.iter().map(|value| value.to_bits()));
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

fn decompose(matrix: &mut [f64], n: usize) {
    let mut upper = Vec::with_capacity(PANEL * TILE);
    for first in (0..n).step_by(PANEL) {
        let end = (first + PANEL).min(n);
        (first..end).for_each(|column| eliminate(matrix, n, column, end));
        for left in (end..n).step_by(TILE) {
            let columns = left..(left + TILE).min(n);
            upper.clear();
            for row in first..end {
                let (above, rest) = matrix.split_at_mut(row * n);
                let (factors, target) = rest.split_at_mut(columns.start);
                let target = &mut target[..columns.len()];
                for pivot in first..row {
                    let source = &above[pivot * n..][columns.clone()];
                    target.iter_mut().zip(source).for_each(|(t, s)| *t -= factors[pivot] * s);
                }
                upper.extend_from_slice(target);
            }
            for row in matrix[end * n..].chunks_exact_mut(n) {
                let (factors, target) = row.split_at_mut(columns.start);
                subtract(&mut target[..columns.len()], &factors[first..end], &upper);
            }
        }
    }
}

/// Finds the pivot of a column, and eliminates the column from the rows below, up to column `end`.
fn eliminate(matrix: &mut [f64], n: usize, column: usize, end: usize) {
    let size = |row: usize| matrix[row * n + column].abs();
    let pivot = (column..n).max_by(|a, b| size(*a).total_cmp(&size(*b))).unwrap_or(column);
    let (above, below) = matrix.split_at_mut((column + 1) * n);
    let upper = &mut above[column * n..];
    if pivot > column {
        upper.swap_with_slice(&mut below[(pivot - column - 1) * n..][..n]);
    }
    for row in below.chunks_exact_mut(n) {
        row[column] /= upper[column];
        let factor = row[column];
        let target = &mut row[column + 1..end];
        target.iter_mut().zip(&upper[column + 1..end]).for_each(|(t, u)| *t -= factor * u);
    }
}

/// Subtracts the rows of `upper`, each times its factor, from `target`.
fn subtract(target: &mut [f64], factors: &[f64], upper: &[f64]) {
    let width = target.len();
    for (four, rows) in factors.chunks(4).zip(upper.chunks(4 * width)) {
        let &[a, b, c, d] = four else {
            for (factor, row) in four.iter().zip(rows.chunks(width)) {
                target.iter_mut().zip(row).for_each(|(t, u)| *t -= factor * u);
            }
            continue;
        };
        // Four rows together, because each load and store of the target costs as much as a sum.
        let (ab, cd) = rows.split_at(2 * width);
        let ((p, q), (r, s)) = (ab.split_at(width), cd.split_at(width));
        for (at, t) in target.iter_mut().enumerate() {
            *t -= a * p[at] + b * q[at] + c * r[at] + d * s[at];
        }
    }
}

/// Numbers below which insertion sort takes over.
const SMALL: usize = 24;

/// Quicksort of random numbers.
fn quicksort(bytes: usize) -> Measured {
    let mut random = Random::stream(0x7173, 0);
    let mut numbers: Vec<u64> = (0..bytes / 8).map(|_| random.bits()).collect();
    let (seconds, cpu_seconds) = timed(|| sort(&mut numbers));
    assert!(numbers.is_sorted(), "the pager lost data, or the sort is wrong: report this bug");
    let checksum = fold(numbers.into_iter());
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

fn sort(mut numbers: &mut [u64]) {
    while numbers.len() > SMALL {
        let middle = partition(numbers);
        let (low, high) = numbers.split_at_mut(middle);
        // The longer half stays in the loop, so that the depth of the calls is bounded.
        let (short, long) = if low.len() < high.len() { (low, high) } else { (high, low) };
        sort(short);
        numbers = long;
    }
    for at in 1..numbers.len() {
        let number = numbers[at];
        let place = numbers[..at].partition_point(|other| *other <= number);
        numbers.copy_within(place..at, place + 1);
        numbers[place] = number;
    }
}

/// Moves the numbers below the median of three to the front (Hoare). Returns the border, which is
/// not at an end.
fn partition(numbers: &mut [u64]) -> usize {
    let mut three = [numbers[0], numbers[numbers.len() / 2], numbers[numbers.len() - 1]];
    three.sort_unstable();
    let pivot = three[1];
    let (mut low, mut high) = (0, numbers.len() - 1);
    loop {
        while numbers[low] < pivot {
            low += 1;
        }
        while numbers[high] > pivot {
            high -= 1;
        }
        if low >= high {
            return low.clamp(1, numbers.len() - 1);
        }
        numbers.swap(low, high);
        low += 1;
        high -= 1;
    }
}

const CLUSTERS: usize = 10;
const COORDINATES: usize = 4;
const K_MEANS_ROUNDS: usize = 5;

/// Lloyd's k-means of points with four coordinates.
fn k_means(bytes: usize) -> Measured {
    type Point = [f32; COORDINATES];
    let mut random = Random::stream(0x6b6d, 0);
    let mut points: Vec<Point> = Vec::with_capacity(bytes / size_of::<Point>());
    points.resize_with(points.capacity(), || std::array::from_fn(|_| unit(&mut random) as f32));
    let mut centers: [Point; CLUSTERS] = std::array::from_fn(|at| points[at]);
    let (seconds, cpu_seconds) = timed(|| {
        for _ in 0..K_MEANS_ROUNDS {
            let mut sums = [([0.0f64; COORDINATES], 0u32); CLUSTERS];
            for point in &points {
                let distance = |center: &Point| -> f32 {
                    center.iter().zip(point).map(|(c, p)| (c - p) * (c - p)).sum()
                };
                let distances = centers.each_ref().map(distance);
                let mut nearest = 0;
                for at in 1..CLUSTERS {
                    nearest = if distances[at] < distances[nearest] { at } else { nearest };
                }
                let (sum, count) = &mut sums[nearest];
                sum.iter_mut().zip(point).for_each(|(s, p)| *s += f64::from(*p));
                *count += 1;
            }
            for (center, (sum, count)) in centers.iter_mut().zip(sums).filter(|(_, s)| s.1 > 0) {
                *center = sum.map(|sum| (sum / f64::from(count)) as f32);
            }
        }
    });
    let checksum = fold(centers.iter().flatten().map(|value| value.to_bits().into()));
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

const STREAM_ROUNDS: usize = 3;

/// Bytes that all triads of [`Program::Triad`] read and write: a triad goes over each array once.
pub fn triad_bytes(bytes: u64) -> u64 {
    STREAM_ROUNDS as u64 * bytes
}

/// The operations of STREAM whose time counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timed {
    All,
    Triads,
}

/// STREAM: copy, scale, add and triad over three arrays.
fn stream(bytes: usize, part: Timed) -> Measured {
    let n = bytes / size_of::<f64>() / 3;
    let mut a: Vec<f64> = (0..n).map(|at| 1.0 + at as f64).collect();
    let mut b: Vec<f64> = (0..n).map(|at| 2.0 + at as f64).collect();
    let mut c: Vec<f64> = (0..n).map(|at| 3.0 + at as f64).collect();
    let (mut seconds, mut cpu_seconds) = (0.0, 0.0);
    for _ in 0..STREAM_ROUNDS {
        let others = timed(|| {
            c.copy_from_slice(&a);
            b.iter_mut().zip(&c).for_each(|(b, c)| *b = 0.25 * c);
            c.iter_mut().zip(a.iter().zip(&b)).for_each(|(c, (a, b))| *c = a + b);
            black_box((&mut a, &mut b, &mut c));
        });
        let triad = timed(|| {
            a.iter_mut().zip(b.iter().zip(&c)).for_each(|(a, (b, c))| *a = b + 0.25 * c);
            black_box((&mut a, &mut b, &mut c));
        });
        let counted = if part == Timed::All { others } else { (0.0, 0.0) };
        seconds += triad.0 + counted.0;
        cpu_seconds += triad.1 + counted.1;
    }
    let checksum = fold(a.iter().chain(&b).chain(&c).map(|value| value.to_bits()));
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

/// Loads one word of each page, in the order of addresses. The words are random, so that no page is
/// a repeated word, which needs no memory elsewhere.
fn sequential(bytes: usize) -> Measured {
    let mut random = Random::stream(0x7365, 0);
    let words: Vec<u64> = (0..bytes / size_of::<u64>()).map(|_| random.bits()).collect();
    let mut checksum = 0;
    let (seconds, cpu_seconds) = timed(|| {
        let pages = words.chunks(PAGE_BYTES / size_of::<u64>());
        checksum = fold(pages.map(|page| black_box(page)[0]));
    });
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decomposition_reproduces_the_matrix() {
        let n = 150;
        let mut random = Random::stream(1, 0);
        // Without exchanges of rows, because the diagonal is large.
        let whole: Vec<f64> = (0..n * n)
            .map(|at| unit(&mut random) + if at % (n + 1) == 0 { n as f64 } else { 0.0 })
            .collect();
        let mut parts = whole.clone();
        decompose(&mut parts, n);
        for row in 0..n {
            for column in 0..n {
                let product = |at: usize| match at {
                    at if at == row => parts[row * n + column],
                    at => parts[row * n + at] * parts[at * n + column],
                };
                let sum: f64 = (0..=row.min(column)).map(product).sum();
                assert!((sum - whole[row * n + column]).abs() < 1e-9, "{row} {column}");
            }
        }
    }

    #[test]
    fn rows_are_exchanged_for_a_pivot_of_zero() {
        let mut matrix = [0.0, 2.0, 4.0, 1.0];
        decompose(&mut matrix, 2);
        assert_eq!(matrix, [4.0, 1.0, 0.0, 2.0]);
    }

    #[test]
    fn numbers_are_sorted() {
        let mut random = Random::stream(2, 0);
        for (len, values) in [(0, 1), (1, 1), (25, 3), (1000, 2), (5000, u64::MAX)] {
            let mut numbers: Vec<u64> = (0..len).map(|_| random.bits() % values).collect();
            let mut expected = numbers.clone();
            expected.sort_unstable();
            sort(&mut numbers);
            assert_eq!(numbers, expected);
        }
    }

    #[test]
    fn programs_give_the_same_checksum_twice() {
        for program in Program::ALL {
            let [first, second] = [(); 2].map(|()| run(program, 1 << 20));
            assert_eq!(first.map(|m| m.checksum), second.map(|m| m.checksum), "{program:?}");
            assert_eq!(first.is_none(), program == Program::Memcached);
        }
    }
}
