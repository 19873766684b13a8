//! Budgets of a running `granary serve` (OneSidedMW §4.4). A client over its budget loses its
//! management connection, and its requests fail with the name of the budget. Other clients are not
//! affected.
//!
//! The client over its budget is this process. The victims are separate processes and stay within
//! the budgets on any machine.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use granary_tests::scene::{Programs, Scene};
use pool::client::control::{ControlPlane, SocketControl};
use pool::protocol::{NodeHello, Status};
use pool::{ConnectReply, ConnectRequest, Error, Grant, GroupId, Lane, Options, Pool};
use rnic::nic::SoftNic;
use scheme::BudgetStatus;
use verbs::PeerAddress;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// Budget of requests per second.
const REQUESTS: u64 = 400;
/// Budget of chunks.
const CHUNKS: u64 = 8;
/// Arguments of a victim. It makes at most 500 rounds per second, with an allocation and a free in
/// every fifth round, which is half of the request budget, and it holds at most five chunks.
const VICTIM: &[&str] = &["--hold", "4", "--pause-us", "2000", "--allocate-every", "5"];
/// Time after which a client over its budget must be suspended: two budget checks, and a reserve
/// for busy machines.
const TIMEOUT: Duration = Duration::from_secs(30);

fn scene(name: &str, budget: &[&str]) -> Result<Scene> {
    let mut serve = vec!["--memory", "4MiB", "--chunk", "16KiB", "--budget-interval-ms", "10"];
    serve.extend(budget);
    Scene::start(name, PROGRAMS, &serve, &[VICTIM, VICTIM])
}

fn options() -> Options {
    Options { groups: Some(1), ..Options::default() }
}

fn budgets(pool: &Pool) -> Result<BudgetStatus> {
    pool.node_status()?.node.budget.context("the memory node has budgets")
}

/// Allocates a chunk and writes a mark into it.
fn allocate_marked(pool: &Pool, mark: u64) -> Result<Grant, Error> {
    let grant = pool.allocate_blocking()?;
    pool.write_blocking(&grant, 64, &mark.to_le_bytes())?;
    Ok(grant)
}

/// Checks that a client's grants are still usable: READ, WRITE and FAA succeed.
fn check_usable(pool: &Pool, held: &[Grant]) -> Result<()> {
    for (mark, grant) in held.iter().enumerate() {
        let mut found = [0; 8];
        pool.read_blocking(grant, 64, &mut found)?;
        ensure!(found == mark.to_le_bytes(), "chunk {} was changed", grant.entry);
        let count = pool.fetch_and_add_blocking(grant, 0, 1)?;
        let at = grant.len - 8;
        pool.write_blocking(grant, at, &count.to_le_bytes())?;
        pool.read_blocking(grant, at, &mut found)?;
        ensure!(found == count.to_le_bytes(), "chunk {} was changed", grant.entry);
    }
    Ok(())
}

/// Checks the error of a refused allocation or free; returns the time of the suspension.
fn check_over_budget(error: &Error, parts: &[&str]) -> Result<Duration> {
    let Error::OverBudget { retry_after, .. } = error else { bail!("{error}") };
    let text = error.to_string();
    for part in parts {
        ensure!(text.contains(part), "{part:?} is not in {text:?}");
    }
    Ok(*retry_after)
}

/// Checks that only the management connection of `over` was closed. The grants of `over`, another
/// client of the same process, and the victims must still work. Returns after the suspension.
fn check_only_management_closed(
    scene: &mut Scene,
    over: &Pool,
    held: &[Grant],
    error_parts: &[&str],
) -> Result<()> {
    let status = budgets(over).context("the control connection must still be open")?;
    ensure!((status.ended, status.suspended) == (1, 1), "{status:?}");
    let suspended: Vec<u32> =
        status.most.iter().filter(|used| used.suspended).map(|used| used.client).collect();
    ensure!(suspended == [over.client()], "{status:?}");
    // Immediately, because the suspension ends after a second.
    let retry_after = match over.allocate_blocking() {
        Err(e) => check_over_budget(&e, error_parts)?,
        Ok(grant) => bail!("{grant:?} was granted during the suspension"),
    };
    check_usable(over, held)?;
    let other = Pool::connect(&scene.node.socket, options()).context("another client")?;
    other.free_blocking(allocate_marked(&other, 0)?)?;
    drop(other);
    scene.mark()?; // discards the victims' work so far
    check_usable(over, held)?;
    // The suspension ends after the time that the error names.
    std::thread::sleep(retry_after);
    scene.victims_worked()?;
    check_usable(over, held)?;
    ensure!(budgets(over)?.ended == 1, "the refused request caused another suspension");
    Ok(())
}

#[test]
fn only_the_client_over_its_request_budget_is_suspended() -> Result<()> {
    let mut scene = scene("budget-requests", &["--budget-requests-per-s", &REQUESTS.to_string()])?;
    let pool = Pool::connect(&scene.node.socket, options())?;
    let held = (0..4).map(|mark| allocate_marked(&pool, mark)).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let mut requests = held.len() as u64;
    let error = loop {
        ensure!(start.elapsed() < TIMEOUT, "not suspended after {requests} requests");
        match pool.allocate_blocking() {
            Ok(grant) => match pool.free_blocking(grant) {
                Ok(()) => requests += 2,
                Err(e) => break e,
            },
            Err(e) => break e,
        }
    };
    let error_parts = ["400 a second", "--budget-requests-per-s", "stay usable"];
    check_over_budget(&error, &error_parts)?;
    ensure!(requests >= REQUESTS / 2, "suspended after only {requests} requests");
    check_only_management_closed(&mut scene, &pool, &held, &error_parts)?;
    // After the suspension the client works again and still has its chunks.
    pool.free_blocking(pool.allocate_blocking()?)?;
    check_usable(&pool, &held)?;
    held.into_iter().try_for_each(|grant| pool.free_blocking(grant))?;
    ensure!(budgets(&pool)?.suspended == 0);
    drop(pool);
    scene.end().map(drop)
}

#[test]
fn only_the_client_over_its_chunk_budget_is_suspended() -> Result<()> {
    let mut scene = scene("budget-chunks", &["--budget-chunks", &CHUNKS.to_string()])?;
    // The client library itself keeps within the budget, so there is no suspension.
    let normal = Pool::connect(&scene.node.socket, options())?;
    let kept =
        (0..CHUNKS).map(|mark| allocate_marked(&normal, mark)).collect::<Result<Vec<_>, _>>()?;
    let error = normal.allocate_blocking().expect_err("one chunk over the budget");
    let error_parts = ["budget is 8", "--budget-chunks", "stay usable"];
    ensure!(check_over_budget(&error, &error_parts)?.is_zero(), "{error}");
    // A client that does not know the budget.
    let nic = SoftNic::attach(&scene.node.socket)?;
    let control = Unaware::connect(&scene, &nic)?;
    let pool = Pool::over(nic, Box::new(control), options())?;
    let mut held = Vec::new();
    while (held.len() as u64) < CHUNKS + 4 {
        match allocate_marked(&pool, held.len() as u64) {
            Ok(grant) => held.push(grant),
            // The memory node may check the budget before the client has all chunks.
            Err(Error::OverBudget { .. } | Error::ManagementBroken { .. })
                if held.len() as u64 > CHUNKS =>
            {
                break;
            }
            Err(e) => return Err(e.into()),
        }
    }
    let start = Instant::now();
    while budgets(&pool)?.ended == 0 {
        ensure!(start.elapsed() < TIMEOUT, "not suspended with {} chunks", held.len());
        std::thread::sleep(Duration::from_millis(1));
    }
    let error_parts = ["holds ", " chunks", "budget is 8", "--budget-chunks", "stay usable"];
    check_only_management_closed(&mut scene, &pool, &held, &error_parts)?;
    check_usable(&normal, &kept)?;
    // After the suspension the client still has its chunks and can free them.
    held.into_iter().try_for_each(|grant| pool.free_blocking(grant))?;
    ensure!(budgets(&pool)?.suspended == 0);
    kept.into_iter().try_for_each(|grant| normal.free_blocking(grant))?;
    drop((pool, normal));
    scene.end().map(drop)
}

/// A control connection that hides the chunk budget from the client library.
struct Unaware {
    control: SocketControl,
    welcome: NodeHello,
}

impl Unaware {
    fn connect(scene: &Scene, nic: &SoftNic) -> Result<Self> {
        let control = SocketControl::connect(&scene.node.socket)?.with_session(nic.secret());
        let mut welcome = control.welcome().clone();
        let told = welcome.offer.terms.remove("budget_chunks");
        ensure!(told == Some(CHUNKS.into()), "the welcome has no chunk budget");
        Ok(Self { control, welcome })
    }
}

impl ControlPlane for Unaware {
    fn welcome(&self) -> &NodeHello {
        &self.welcome
    }
    fn admit(&self, admission: &ConnectRequest) -> Result<ConnectReply, Error> {
        self.control.admit(admission)
    }
    fn await_memory(&self, timeout: Duration) -> Result<bool, Error> {
        self.control.await_memory(timeout)
    }
    fn reset_management(&self) -> Result<Vec<PeerAddress>, Error> {
        self.control.reset_management()
    }
    fn management_is_open(&self) -> Option<bool> {
        self.control.management_is_open()
    }
    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, Error> {
        self.control.reset_access(group, lane)
    }
    fn status(&self) -> Result<Status, Error> {
        self.control.status()
    }
    fn audit(&self) -> Result<(), Error> {
        self.control.audit()
    }
    fn goodbye(&self) -> Result<(), Error> {
        self.control.goodbye()
    }
    fn check_alive(&self) -> Result<(), Error> {
        self.control.check_alive()
    }
    fn descriptors(&self) -> Vec<i32> {
        self.control.descriptors()
    }
}
