//! The client of memcached: fills the server, reads random keys from it, and asks it for its CPU
//! time, all over a Unix socket in memcached's text protocol.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use super::Measured;
use super::workload::unit;
use units::Random;

/// Bytes of a value. With key and header an item fits into memcached's slab class of 1184 bytes.
const VALUE_BYTES: usize = 1024;
/// Bytes of the server's memory that an item takes.
const ITEM_BYTES: usize = 1184;
/// Keys of one request, as caches in front of databases ask for them.
const KEYS: u64 = 16;
/// A prime larger than the number of items, which scatters the ranks of items.
const SCATTER: u64 = 2_654_435_761;

/// The reads of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Reads of each item, on average.
    pub reads: u64,
    /// Few items have most reads. Otherwise all items have equally many.
    pub is_skewed: bool,
}

impl Load {
    /// Equally many reads of all items.
    pub const EVEN: Self = Self { reads: 2, is_skewed: false };
    /// A few hot items among many cold ones, as in Facebook's pool ETC.
    pub const ETC: Self = Self { reads: 1, is_skewed: true };

    /// A random item.
    fn item(self, random: &mut Random, items: u64) -> u64 {
        if !self.is_skewed {
            return random.below(items);
        }
        let u = unit(random);
        (u * u * u * items as f64) as u64 * SCATTER % items
    }
}

/// Fills a server with `bytes` of items, then reads random ones.
///
/// # Errors
/// The socket fails, or the server answers with another value than the stored one.
pub fn run(socket: &Path, bytes: usize, load: Load) -> io::Result<Measured> {
    let begin = Instant::now();
    let mut server = Server::connect(socket)?;
    let items = (bytes / ITEM_BYTES).max(KEYS as usize) as u64;
    (0..items).try_for_each(|key| server.set(key))?;
    server.wait_stored()?;
    let mut random = Random::stream(0x6d63, 0);
    let (start, cpu) = (Instant::now(), server.cpu_seconds()?);
    let mut checksum = 0;
    for _ in 0..load.reads * items / KEYS {
        let keys: [u64; KEYS as usize] = std::array::from_fn(|_| load.item(&mut random, items));
        checksum ^= server.get(&keys)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu_seconds = server.cpu_seconds()? - cpu;
    Ok(Measured { seconds, cpu_seconds, whole_seconds: begin.elapsed().as_secs_f64(), checksum })
}

struct Server {
    input: BufReader<UnixStream>,
    output: UnixStream,
    line: String,
}

fn unexpected(asked: &str, line: &str) -> io::Error {
    let text = format!("{asked}: memcached answers {:?}", line.trim_end());
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The value of a key, which no compression or table of equal pages makes small.
fn value(key: u64) -> Vec<u8> {
    let mut random = Random::stream(0x7661_6c75, key as u32);
    (0..VALUE_BYTES / 8).flat_map(|_| random.bits().to_le_bytes()).collect()
}

impl Server {
    fn connect(socket: &Path) -> io::Result<Self> {
        let output = UnixStream::connect(socket)?;
        Ok(Self { input: BufReader::new(output.try_clone()?), output, line: String::new() })
    }

    fn line(&mut self) -> io::Result<&str> {
        self.line.clear();
        match self.input.read_line(&mut self.line)? {
            0 => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "memcached closed the connection: it has ended, or its read found no memory",
            )),
            _ => Ok(&self.line),
        }
    }

    /// Stores a value, without an answer.
    fn set(&mut self, key: u64) -> io::Result<()> {
        let mut request = format!("set k{key} 0 0 {VALUE_BYTES} noreply\r\n").into_bytes();
        request.extend(value(key));
        request.extend(b"\r\n");
        self.output.write_all(&request)
    }

    /// Waits until the server has handled all requests before this one.
    fn wait_stored(&mut self) -> io::Result<()> {
        self.output.write_all(b"version\r\n")?;
        let line = self.line()?;
        if line.starts_with("VERSION") { Ok(()) } else { Err(unexpected("store a value", line)) }
    }

    /// Reads keys. Returns a checksum of their values.
    fn get(&mut self, keys: &[u64]) -> io::Result<u64> {
        let names: Vec<String> = keys.iter().map(|key| format!(" k{key}")).collect();
        self.output.write_all(format!("get{}\r\n", names.concat()).as_bytes())?;
        let mut sum = 0;
        let mut bytes = [0; VALUE_BYTES + 2];
        for key in keys {
            let line = self.line()?;
            if !line.starts_with(&format!("VALUE k{key} ")) {
                return Err(unexpected(&format!("read k{key}"), line));
            }
            self.input.read_exact(&mut bytes)?;
            let first = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            if bytes[..VALUE_BYTES] != value(*key)[..] {
                return Err(unexpected(
                    &format!("read k{key}"),
                    "another value than the stored one",
                ));
            }
            sum ^= first;
        }
        let line = self.line()?;
        if line == "END\r\n" { Ok(sum) } else { Err(unexpected("read", line)) }
    }

    /// The CPU time of the server's process.
    fn cpu_seconds(&mut self) -> io::Result<f64> {
        self.output.write_all(b"stats\r\n")?;
        let mut sum = 0.0;
        loop {
            let line = self.line()?;
            let mut words = line.split_ascii_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some("STAT"), Some("rusage_user" | "rusage_system"), Some(seconds)) => {
                    sum += seconds.parse::<f64>().map_err(|_| unexpected("stats", line))?;
                }
                (Some("STAT"), ..) => {}
                (Some("END"), ..) => return Ok(sum),
                _ => return Err(unexpected("stats", line)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Answers like memcached, but with wrong values if `damaged`. The client may
    /// close the connection at any time.
    fn serve(socket: &UnixListener, damaged: bool) -> io::Result<()> {
        let (stream, _) = socket.accept()?;
        let (mut input, mut output) = (BufReader::new(stream.try_clone()?), stream);
        let mut values = std::collections::BTreeMap::new();
        let mut line = String::new();
        while input.read_line(&mut line)? > 0 {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match words[0] {
                "set" => {
                    let mut bytes = vec![0; VALUE_BYTES + 2];
                    input.read_exact(&mut bytes)?;
                    bytes[9] ^= u8::from(damaged);
                    values.insert(words[1].to_owned(), bytes);
                }
                "get" => {
                    for key in &words[1..] {
                        write!(output, "VALUE {key} 0 {VALUE_BYTES}\r\n")?;
                        output.write_all(&values[*key])?;
                    }
                    output.write_all(b"END\r\n")?;
                }
                "version" => output.write_all(b"VERSION 1.6\r\n")?,
                "stats" => {
                    let stats = "STAT pid 1\r\nSTAT rusage_user 1.5\r\nSTAT rusage_system 0.25\r\n";
                    write!(output, "{stats}END\r\n")?;
                }
                other => panic!("{other}"),
            }
            line.clear();
        }
        Ok(())
    }

    fn run_against(damaged: bool) -> io::Result<Measured> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve(&listener, damaged));
            run(&path, 100 * ITEM_BYTES, Load::EVEN)
        })
    }

    #[test]
    fn client_reads_what_it_has_stored() {
        let (first, second) = (run_against(false).unwrap(), run_against(false).unwrap());
        assert_eq!(first.checksum, second.checksum);
        assert_eq!(first.cpu_seconds, 0.0, "the same time before and after");
    }

    #[test]
    fn few_items_of_a_skewed_load_have_most_reads() {
        let (items, reads) = (1000, 100_000);
        let most = |load: Load| {
            let mut random = Random::stream(1, 0);
            let mut counts = vec![0; items as usize];
            (0..reads).for_each(|_| counts[load.item(&mut random, items) as usize] += 1);
            counts.sort_unstable_by(|a, b| b.cmp(a));
            assert!(load.is_skewed || counts[items as usize - 1] > 0, "an item without a read");
            counts[..items as usize / 10].iter().sum::<u32>()
        };
        assert!(most(Load::ETC) > 40_000, "{}", most(Load::ETC));
        assert!(most(Load::EVEN) < 15_000, "{}", most(Load::EVEN));
    }

    #[test]
    fn wrong_value_is_an_error() {
        let error = run_against(true).unwrap_err().to_string();
        assert!(error.contains("another value than the stored one"), "{error}");
    }
}
