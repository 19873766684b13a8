//! `cargo run --release -p granary-bench --example recovery [CHUNKS [BYTES]]`: time to reclaim the
//! memory of a departed client; see [`bench::recovery`].

fn main() -> Result<(), pool::Error> {
    let mut numbers = std::env::args().skip(1).filter_map(|n| n.parse::<u64>().ok());
    let chunks = numbers.next().unwrap_or(1 << 18);
    let bytes = numbers.next().unwrap_or(4096);
    println!("{}", bench::recovery::recovery(chunks, bytes)?);
    Ok(())
}
