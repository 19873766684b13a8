//! Budgets of a running `granary serve` (OneSidedMW §4.4): a compute node that goes over one loses its
//! management connection, is told which budget it was, and nothing else happens to anybody.
//!
//! The compute node that goes over is this process; the victims are processes of their own, and stay
//! within the budgets however fast the machine is.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fabric::PeerAddress;
use fabric::soft::SoftNic;
use granary_tests::scene::{Programs, Scene};
use pool::budget::BudgetStatus;
use pool::client::control::{ControlPlane, SocketControl};
use pool::protocol::{Status, Welcome};
use pool::{Admission, Admitted, Error, Grant, GroupId, Lane, Options, Pool};

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// Requests in a second.
const REQUESTS: u64 = 400;
/// Chunks.
const CHUNKS: u64 = 8;
/// At most 500 rounds a second, and an allocation and a free in every fifth: half of the budget. Five chunks.
const VICTIM: &[&str] = &["--hold", "4", "--pause-us", "2000", "--allocate-every", "5"];
/// How long a compute node over its budget may go on: two looks, and what a busy machine adds.
const PATIENCE: Duration = Duration::from_secs(30);

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

/// A chunk with something in it.
fn take(pool: &Pool, mark: u64) -> Result<Grant, Error> {
    let grant = pool.allocate_blocking()?;
    pool.write_blocking(&grant, 64, &mark.to_le_bytes())?;
    Ok(grant)
}

/// Its grants are worth what they were: read, written, counted in.
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

/// What an allocation or free is refused with: which budget, and for how long.
fn check_told(error: &Error, parts: &[&str]) -> Result<Duration> {
    let Error::OverBudget { retry_after, .. } = error else { bail!("{error}") };
    let text = error.to_string();
    for part in parts {
        ensure!(text.contains(part), "{part:?} is not in {text:?}");
    }
    Ok(*retry_after)
}

/// Only the management connection of `over` is ended: the grants of `over` and another compute node of
/// the same process go on, and so do the victims. Returns when `over` may come back.
fn check_nothing_else_ended(
    scene: &mut Scene,
    over: &Pool,
    held: &[Grant],
    told: &[&str],
) -> Result<()> {
    let status =
        budgets(over).context("the control connection is not the management connection")?;
    ensure!((status.ended, status.suspended) == (1, 1), "{status:?}");
    let suspended: Vec<u32> =
        status.most.iter().filter(|used| used.suspended).map(|used| used.client).collect();
    ensure!(suspended == [over.client()], "{status:?}");
    // At once: it may come back after a second.
    let refused = match over.allocate_blocking() {
        Err(e) => check_told(&e, told)?,
        Ok(grant) => bail!("{grant:?} although its management connection was ended"),
    };
    check_usable(over, held)?;
    let beside = Pool::connect(&scene.node.socket, options()).context("another compute node")?;
    beside.free_blocking(take(&beside, 0)?)?;
    drop(beside);
    scene.mark()?; // what they did until now is not what is asked for
    check_usable(over, held)?;
    // It may come back then, and not before: this is the time that it was told.
    std::thread::sleep(refused);
    scene.victims_worked()?;
    check_usable(over, held)?;
    ensure!(budgets(over)?.ended == 1, "asking again was held against it");
    Ok(())
}

#[test]
fn who_asks_too_often_is_stopped_and_nobody_else() -> Result<()> {
    let mut scene = scene("budget-requests", &["--budget-requests-per-s", &REQUESTS.to_string()])?;
    let pool = Pool::connect(&scene.node.socket, options())?;
    let held = (0..4).map(|mark| take(&pool, mark)).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let mut requests = held.len() as u64;
    let error = loop {
        ensure!(start.elapsed() < PATIENCE, "{requests} requests, and nobody minds");
        match pool.allocate_blocking() {
            Ok(grant) => match pool.free_blocking(grant) {
                Ok(()) => requests += 2,
                Err(e) => break e,
            },
            Err(e) => break e,
        }
    };
    let told = ["400 a second", "--budget-requests-per-s", "stay usable"];
    check_told(&error, &told)?;
    ensure!(requests >= REQUESTS / 2, "{requests} requests are not too many");
    check_nothing_else_ended(&mut scene, &pool, &held, &told)?;
    // Back again, with what it had.
    pool.free_blocking(pool.allocate_blocking()?)?;
    check_usable(&pool, &held)?;
    held.into_iter().try_for_each(|grant| pool.free_blocking(grant))?;
    ensure!(budgets(&pool)?.suspended == 0);
    drop(pool);
    scene.end().map(drop)
}

#[test]
fn who_holds_too_much_is_stopped_and_nobody_else() -> Result<()> {
    let mut scene = scene("budget-chunks", &["--budget-chunks", &CHUNKS.to_string()])?;
    // The library keeps within the budget by itself, and nothing is ended.
    let honest = Pool::connect(&scene.node.socket, options())?;
    let kept = (0..CHUNKS).map(|mark| take(&honest, mark)).collect::<Result<Vec<_>, _>>()?;
    let error = honest.allocate_blocking().expect_err("one chunk too many");
    let told = ["may hold 8", "--budget-chunks", "stay usable"];
    ensure!(check_told(&error, &told)?.is_zero(), "{error}");
    // One that does not know of the budget, or does not want to.
    let nic = SoftNic::attach(&scene.node.socket)?;
    let control = Unaware::connect(&scene, &nic)?;
    let pool = Pool::over(nic, Box::new(control), options())?;
    let mut held = Vec::new();
    while (held.len() as u64) < CHUNKS + 4 {
        match take(&pool, held.len() as u64) {
            Ok(grant) => held.push(grant),
            // It was looked at before it had them all.
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
        ensure!(start.elapsed() < PATIENCE, "it holds {} chunks, and nobody minds", held.len());
        std::thread::sleep(Duration::from_millis(1));
    }
    let told = ["holds ", " chunks", "budget is 8", "--budget-chunks", "stay usable"];
    check_nothing_else_ended(&mut scene, &pool, &held, &told)?;
    check_usable(&honest, &kept)?;
    // Back again: it may keep what it has, and free.
    held.into_iter().try_for_each(|grant| pool.free_blocking(grant))?;
    ensure!(budgets(&pool)?.suspended == 0);
    kept.into_iter().try_for_each(|grant| honest.free_blocking(grant))?;
    drop((pool, honest));
    scene.end().map(drop)
}

/// A control connection that does not hear of the budget for chunks.
struct Unaware {
    control: SocketControl,
    welcome: Welcome,
}

impl Unaware {
    fn connect(scene: &Scene, nic: &SoftNic) -> Result<Self> {
        let control = SocketControl::connect(&scene.node.socket)?.with_nic(nic);
        let mut welcome = control.welcome().clone();
        ensure!(welcome.budget_chunks.take() == Some(CHUNKS), "the welcome tells the budget");
        Ok(Self { control, welcome })
    }
}

impl ControlPlane for Unaware {
    fn welcome(&self) -> &Welcome {
        &self.welcome
    }
    fn admit(&self, admission: &Admission) -> Result<Admitted, Error> {
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
