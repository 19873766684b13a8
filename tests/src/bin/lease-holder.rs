//! A compute node that holds an exclusive permission of a [`Record`] again and again, and that a
//! test kills, stops and continues.
//!
//! `lease-holder MODE --object NAME (--socket PATH | --pool ADDRESS) --lease-us N --holder N
//! [--second NAME]`. It prints `ready` when it is connected, waits for a line on standard input,
//! and then works:
//!
//! * `count`: updates the record until the command `stop`. `work N` prints a report after N more
//!   updates.
//! * `hang`: prints `holding` in the middle of an update, waits for a line, goes on, and prints how
//!   the update ended.
//! * `flood`: prints `holding`, has 100 WRITEs in flight until one fails, and prints how that
//!   ended.
//! * `cross`: acquires the object, prints `holding`, waits for a line, acquires the second object,
//!   and prints what is left of both leases.
//!
//! A record that two holders have changed at the same time ends the program with an error.

use std::cell::Cell;
use std::io::BufRead;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use granary_tests::record::{DOMAIN, Record, from_text};
use pool::{Address, Error, LeaseTerms, Object, Options, Permission, Pool};
use serde_json::{Value, json};

struct Arguments {
    mode: String,
    node: Address,
    object: Option<Object>,
    second: Option<Object>,
    lease: Duration,
    holder: u64,
}

fn main() -> Result<()> {
    let a = arguments()?;
    let options = Options { groups: Some(1), domain: Some(DOMAIN), ..Options::default() };
    let pool = a.node.connect(options).context("connecting")?;
    println!("ready");
    let (sender, commands) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    commands.recv()?;
    let object = a.object.context("--object is missing")?;
    let holder = Holder { pool, object, commands, lease: a.lease, number: a.holder };
    let report = match a.mode.as_str() {
        "count" => holder.count()?,
        "hang" => holder.hang()?,
        "flood" => holder.flood()?,
        "cross" => holder.cross(&a.second.context("--second is missing")?)?,
        other => bail!("unknown mode {other}"),
    };
    println!("{report}");
    // Stays connected until standard input is closed.
    while holder.commands.recv().is_ok() {}
    Ok(())
}

struct Holder {
    pool: Pool,
    object: Object,
    commands: Receiver<String>,
    lease: Duration,
    number: u64,
}

/// Counts since the last report.
#[derive(Default)]
struct Counts {
    updates: u64,
    /// Records that the last holder had left in the middle of an update.
    repairs: u64,
    /// Permissions that ended before the update was complete.
    expired: u64,
    longest_wait: Duration,
}

impl Holder {
    fn acquire(&self, object: &Object) -> Result<Permission> {
        let terms = LeaseTerms::exclusive(self.lease);
        loop {
            match self.pool.acquire_blocking(object, &terms) {
                // The connection was lost, and is established again. The memory node
                // takes back a grant that was not delivered.
                Err(Error::ManagementBroken { .. }) => {}
                acquired => return acquired.context("acquiring"),
            }
        }
    }

    fn count(&self) -> Result<Value> {
        let mut counts = Counts::default();
        // The number of updates at which a report is due.
        let mut due = None;
        loop {
            match self.commands.try_recv() {
                Ok(command) if command == "stop" => return Ok(counts.report()),
                Ok(command) => {
                    let more = command.strip_prefix("work ").context("an unknown command")?;
                    due = Some(counts.updates + more.parse::<u64>()?);
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => bail!("standard input was closed"),
            }
            self.count_once(&mut counts)?;
            if due.is_some_and(|due| counts.updates >= due) {
                println!("{}", std::mem::take(&mut counts).report());
                due = None;
            }
        }
    }

    fn count_once(&self, counts: &mut Counts) -> Result<()> {
        let start = Instant::now();
        let permission = self.acquire(&self.object)?;
        counts.longest_wait = counts.longest_wait.max(start.elapsed());
        let record = Record::new(&self.pool, &permission);
        let updated = record.repair().and_then(|repaired| {
            counts.repairs += u64::from(repaired);
            record.update(self.number, || Ok(()))
        });
        match updated {
            Ok(_) => counts.updates += 1,
            Err(e) if is_expired(&e) => counts.expired += 1,
            Err(e) => return Err(e).context("updating the record"),
        }
        match self.pool.revoke_blocking(&permission) {
            Ok(()) | Err(Error::ManagementBroken { .. }) => Ok(()),
            Err(e) => Err(e).context("revoking"),
        }
    }

    /// Acquires the object and repairs the record, and then works. Begins again if the lease ends
    /// before the work has printed `holding`: on a busy machine it may.
    fn hold_record<T>(
        &self,
        work: impl Fn(&Record<'_>, &Permission, &Cell<bool>) -> Result<T>,
    ) -> Result<T> {
        let is_holding = Cell::new(false);
        loop {
            let permission = self.acquire(&self.object)?;
            let record = Record::new(&self.pool, &permission);
            match record.repair().and_then(|_| work(&record, &permission, &is_holding)) {
                Err(e) if is_expired(&e) && !is_holding.get() => {}
                result => return result,
            }
        }
    }

    fn hang(&self) -> Result<Value> {
        self.hold_record(|record, permission, is_holding| {
            let result = record.update(self.number, || {
                is_holding.set(true);
                self.hold()
            });
            match result {
                Err(e) if !is_holding.get() => Err(e),
                result => {
                    let left_us = self.left_us(permission);
                    Ok(json!({ "ended": ended(result.map(drop)), "left_us": left_us }))
                }
            }
        })
    }

    fn flood(&self) -> Result<Value> {
        let flooded = self.hold_record(|record, _, is_holding| {
            record.flood(|| {
                is_holding.set(true);
                println!("holding");
                Ok(())
            })
        })?;
        Ok(json!({
            "ended": ended(Err(flooded.error.into())),
            "executed": flooded.executed,
            "refused": flooded.refused,
            "promotions": self.pool.stats().promotions,
        }))
    }

    fn cross(&self, second: &Object) -> Result<Value> {
        let first = self.acquire(&self.object)?;
        self.hold()?;
        let start = Instant::now();
        let second = self.acquire(second)?;
        let waited_us = start.elapsed().as_micros() as u64;
        Ok(json!({
            "waited_us": waited_us,
            "first_left_us": self.left_us(&first),
            "second_left_us": self.left_us(&second),
        }))
    }

    /// Prints `holding` and waits for a line.
    fn hold(&self) -> Result<()> {
        println!("holding");
        self.commands.recv().map(drop).context("standard input was closed")
    }

    fn left_us(&self, permission: &Permission) -> u64 {
        self.pool.left(permission).as_micros() as u64
    }
}

impl Counts {
    fn report(self) -> Value {
        json!({
            "updates": self.updates,
            "repairs": self.repairs,
            "expired": self.expired,
            "longest_wait_us": self.longest_wait.as_micros() as u64,
        })
    }
}

fn is_expired(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Expired { .. }))
}

/// `complete`, `expired`, or the text of another error.
fn ended(result: Result<()>) -> String {
    match result {
        Ok(()) => "complete".into(),
        Err(e) if is_expired(&e) => "expired".into(),
        Err(e) => format!("{e:#}"),
    }
}

fn arguments() -> Result<Arguments> {
    let mut words = std::env::args().skip(1);
    let mut a = Arguments {
        mode: words.next().context("the mode is missing")?,
        node: Address::Shm(PathBuf::new()),
        object: None,
        second: None,
        lease: Duration::from_millis(20),
        holder: 1,
    };
    while let Some(name) = words.next() {
        let value = words.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--socket" => a.node = Address::Shm(value.into()),
            "--pool" => a.node = value.parse().map_err(anyhow::Error::msg)?,
            "--object" => a.object = Some(from_text(&value)?),
            "--second" => a.second = Some(from_text(&value)?),
            "--lease-us" => a.lease = Duration::from_micros(value.parse()?),
            "--holder" => a.holder = value.parse()?,
            other => bail!("unknown option {other}"),
        }
    }
    Ok(a)
}
