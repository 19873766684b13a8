//! Two processes that change one record, and a holder that hangs or is killed in mid-update.
//!
//! The record has two balances, whose sum never changes. A process changes it under an exclusive
//! permission. The permission takes the place of a lock word: the memory node ends it with its
//! lease, so that no dead or hung process locks others out. The next holder finds the record as the
//! last one left it, and repairs it with a sequence number and saved values.
//!
//! ```sh
//! cargo run --example leases
//! ```

use std::error::Error;
use std::io::{BufRead, BufReader, Write, stdin};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pool::{
    DomainToken, Endpoint, LeaseTerms, Object, Options, Others, Permission, Pool, Service,
    Settings, schemes,
};

/// Length of a lease. A holder that hangs keeps others waiting for at most this time.
const LEASE: Duration = Duration::from_millis(500);
/// Secret of the domain. Real secrets are random, and are passed by a file or a descriptor.
const DOMAIN: DomainToken = DomainToken([42; 32]);

/// Offsets of the record's words, which are big-endian.
const SEQUENCE: u64 = 0;
const BALANCES: u64 = 8;
const SAVED: u64 = 24;
const RECORD_BYTES: u64 = 40;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The record, under a permission of this process.
struct Record<'a> {
    pool: &'a Pool,
    permission: Permission,
}

impl Record<'_> {
    fn read<const N: usize>(&self, at: u64) -> Result<[u64; N]> {
        let mut words = [[0; 8]; N];
        self.pool.read_blocking(&self.permission, at, words.as_flattened_mut())?;
        Ok(words.map(u64::from_be_bytes))
    }

    fn write<const N: usize>(
        &self,
        at: u64,
        words: [u64; N],
    ) -> std::result::Result<(), pool::Error> {
        let words = words.map(u64::to_be_bytes);
        self.pool.write_blocking(&self.permission, at, words.as_flattened())
    }

    /// Moves `amount` from the first balance to the second. `halfway` runs in the middle.
    fn transfer(&self, amount: u64, halfway: impl FnOnce() -> Result<()>) -> Result<()> {
        let [sequence] = self.read(SEQUENCE)?;
        let [from, to] = self.read(BALANCES)?;
        self.write(SAVED, [from, to])?;
        // Odd: from now on the saved values count.
        self.write(SEQUENCE, [sequence + 1])?;
        self.write(BALANCES, [from - amount])?;
        halfway()?;
        self.write(BALANCES + 8, [to + amount])?;
        // Even: the update is complete.
        self.write(SEQUENCE, [sequence + 2])?;
        Ok(())
    }

    /// Restores the saved values if the last holder did not complete its update. Each step may be
    /// repeated, so that a holder that dies during the repair does no harm.
    fn repair(&self) -> Result<bool> {
        let [sequence] = self.read(SEQUENCE)?;
        if sequence % 2 == 0 {
            return Ok(false);
        }
        self.write(BALANCES, self.read::<2>(SAVED)?)?;
        self.write(SEQUENCE, [sequence + 1])?;
        Ok(true)
    }
}

fn connect(socket: &Path) -> Result<Pool> {
    Ok(Pool::connect(socket, Options { domain: Some(DOMAIN), ..Options::default() })?)
}

/// The other process: begins a transfer, reports, and waits in the middle for a line of input.
fn holder(socket: &str, object: &str) -> Result<()> {
    let mut name = [0; Object::BYTES];
    for (byte, digits) in name.iter_mut().zip(object.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits)?, 16)?;
    }
    let object = Object::from_bytes(&name).ok_or("the name of an object is expected")?;
    let pool = connect(Path::new(socket))?;
    let permission = pool.acquire_blocking(&object, &LeaseTerms::exclusive(LEASE))?;
    let record = Record { pool: &pool, permission };
    record.repair()?;
    let hang = || {
        println!("holder: has changed one of two balances, and hangs");
        stdin().read_line(&mut String::new())?;
        Ok(())
    };
    let error = record.transfer(30, hang).expect_err("the lease has ended");
    println!("holder: goes on, and is refused: {error}");
    Ok(())
}

/// Starts the other process and waits until it is in mid-update.
fn start_holder(socket: &Path, object: &Object) -> Result<(Child, impl BufRead)> {
    let name: String = object.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut child = Command::new(std::env::current_exe()?)
        .arg(socket)
        .arg(name)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    print_line(&mut output)?;
    Ok((child, output))
}

fn print_line(output: &mut impl BufRead) -> Result<()> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    print!("{line}");
    Ok(())
}

/// Waits for the permission of the other process to end, and looks at the record.
fn take_over(pool: &Pool, object: &Object) -> Result<()> {
    let begin = Instant::now();
    let permission = pool.acquire_blocking(object, &LeaseTerms::exclusive(LEASE))?;
    println!("next holder: waited {} ms", begin.elapsed().as_millis());
    let record = Record { pool, permission };
    let found = record.read::<2>(BALANCES)?;
    assert!(record.repair()?, "the update was not complete");
    let balances = record.read::<2>(BALANCES)?;
    println!("next holder: found balances {found:?}, repaired to {balances:?}");
    assert_eq!(balances, [100, 0]);
    pool.revoke_blocking(&record.permission)?;
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, socket, object] = arguments.as_slice() {
        return holder(socket, object);
    }

    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("pool.sock");
    let settings = Settings {
        donate_bytes: 16 << 20,
        chunk_bytes: 64 << 10,
        scheme: schemes::PATRONUS,
        ..Settings::default()
    };
    let service = Service::start(&settings, &Endpoint::At(socket.clone()))?;
    let pool = connect(&socket)?;

    // Members of the domain may acquire any permission. The object lives on without its allocator.
    let terms = LeaseTerms::exclusive(LEASE);
    let (object, permission) =
        pool.allocate_object_blocking(RECORD_BYTES, Others::Write, &terms)?;
    Record { pool: &pool, permission: permission.clone() }.write(BALANCES, [100, 0])?;
    pool.revoke_blocking(&permission)?;

    // A holder that hangs loses its permission when its lease ends.
    let (mut child, mut output) = start_holder(&socket, &object)?;
    take_over(&pool, &object)?;
    child.stdin.take().expect("a pipe").write_all(b"go on\n")?;
    print_line(&mut output)?;
    assert!(child.wait()?.success());

    // A holder that is killed loses its permission at once: the kernel closes its connection.
    let (mut child, _output) = start_holder(&socket, &object)?;
    child.kill()?;
    child.wait()?;
    take_over(&pool, &object)?;

    // A process outside of the domain is refused as if the object did not exist.
    let stranger = Pool::connect(&socket, Options::default())?;
    let error = stranger.acquire_blocking(&object, &LeaseTerms::shared_read(LEASE)).unwrap_err();
    assert!(matches!(error, pool::Error::NoSuchObject { .. }));
    println!("stranger: {error}");

    pool.free_object_blocking(&object)?;
    drop((pool, stranger));
    service.stop();
    Ok(())
}
