//! Commands on keys of any type.

use kv::Measure::{self, Frequency, Recency};
use redis_formats::command::Id;
use redis_formats::number::parse_i64;
use redis_formats::rdb::{
    Compressor, Limits, RdbError, Value, dump as write_dump, restore as read,
};

use super::call::{Call, Cells, Done, NOT_INTEGER, Output, Refusal, SYNTAX, refuse};
use crate::keyspace::DATABASES;

pub(super) fn del(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let mut deleted = 0;
    for key in 0..cells.len() {
        if cells.key(key).delete() {
            deleted += 1;
            out.event(b'g', "del", key);
        }
    }
    out.integer(deleted);
    Ok(())
}

/// EXISTS and TOUCH.
pub(super) fn exists(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let mut found = 0;
    for key in 0..cells.len() {
        let is_there = cells.at(key).exists();
        out.note_read(key, is_there);
        found += i64::from(is_there);
    }
    out.integer(found);
    Ok(())
}

pub(super) fn kind(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    out.note_read(0, cells.at(0).exists());
    out.reply().simple(if cells.at(0).exists() { "string" } else { "none" });
    Ok(())
}

/// RENAME and RENAMENX.
pub(super) fn rename(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let only_new = call.command.id == Id::Renamenx;
    let Some(value) = cells.at(0).value() else { return refuse("ERR no such key") };
    let is_free = !cells.at(1).exists();
    if !cells.are_same(0, 1) && (is_free || !only_new) {
        let (value, expiry) = (value.to_vec(), cells.at(0).expiry());
        cells.key(1).put(value, expiry);
        cells.key(0).delete();
        if is_free {
            out.event(b'n', "new", 1);
        }
        out.event(b'g', "rename_from", 0);
        out.event(b'g', "rename_to", 1);
    }
    if only_new {
        out.boolean(is_free)
    } else {
        out.ok()
    }
    Ok(())
}

fn database(call: &Call<'_>, at: usize) -> Result<u8, Refusal> {
    let number = parse_i64(call.args.get(at));
    let Some(number) = number.filter(|own| i32::try_from(*own).is_ok()) else {
        return match number {
            None => refuse(NOT_INTEGER),
            Some(_) => {
                refuse("ERR value is out of range, value must between -2147483648 and 2147483647")
            }
        };
    };
    match u8::try_from(number) {
        Ok(db) if usize::from(db) < DATABASES => Ok(db),
        _ => refuse("ERR DB index is out of range"),
    }
}

/// Options of COPY: the target's database, and whether a key there is replaced.
fn copy_options(call: &Call<'_>) -> Result<(u8, bool), Refusal> {
    let (mut db, mut replaces) = (call.db, false);
    let mut at = 3;
    while at < call.args.count() {
        if call.args.is(at, "replace") {
            replaces = true;
        } else if call.args.is(at, "db") && at + 1 < call.args.count() {
            db = database(call, at + 1)?;
            at += 1;
        } else {
            return refuse(SYNTAX);
        }
        at += 1;
    }
    Ok((db, replaces))
}

/// The database of the second key of COPY and MOVE. Errors come when the command is executed.
pub(super) fn target_db(call: &Call<'_>) -> u8 {
    let db = match call.command.id {
        Id::Move => database(call, 2),
        _ => copy_options(call).map(|(db, _)| db),
    };
    db.unwrap_or(call.db)
}

const SAME: &str = "ERR source and destination objects are the same";

pub(super) fn copy(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let (_, replaces) = copy_options(call)?;
    if cells.are_same(0, 1) {
        return refuse(SAME);
    }
    let is_free = replaces || !cells.at(1).exists();
    let source = cells.at(0);
    out.note_read(0, source.exists());
    match source.value().filter(|_| is_free).map(<[u8]>::to_vec) {
        None => out.boolean(false),
        Some(value) => {
            let expiry = source.expiry();
            cells.key(1).put(value, expiry);
            out.event(b'g', "copy_to", 1);
            out.boolean(true);
        }
    }
    Ok(())
}

pub(super) fn relocate(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    if database(call, 2)? == call.db {
        return refuse(SAME);
    }
    let is_free = !cells.at(1).exists();
    match cells.at(0).value().filter(|_| is_free).map(<[u8]>::to_vec) {
        None => out.boolean(false),
        Some(value) => {
            let expiry = cells.at(0).expiry();
            cells.key(1).put(value, expiry);
            cells.key(0).delete();
            out.event(b'n', "new", 1);
            out.event(b'g', "move_from", 0);
            out.event(b'g', "move_to", 1);
            out.boolean(true);
        }
    }
    Ok(())
}

/// The encoding that Redis would have chosen.
pub(super) fn encoding(value: &[u8]) -> &'static str {
    /// Longest string that Redis allocates together with its object.
    const EMBEDDED_MAX: usize = 44;
    match () {
        () if value.len() <= 20 && parse_i64(value).is_some() => "int",
        () if value.len() <= EMBEDDED_MAX => "embstr",
        () => "raw",
    }
}

pub(super) fn object_encoding(
    _: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    out.reply().bulk_or_null(cells.at(0).value().map(|value| encoding(value).as_bytes()));
    Ok(())
}

pub(super) fn object_refcount(
    _: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    /// Redis shares its objects of these numbers, and then tells this count.
    const SHARED: std::ops::Range<i64> = 0..10_000;
    match cells.at(0).value() {
        None => out.null(),
        Some(value) if parse_i64(value).is_some_and(|own| SHARED.contains(&own)) => {
            out.integer(i32::MAX.into());
        }
        Some(_) => out.integer(1),
    }
    Ok(())
}

pub(super) fn memory_usage(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let mut at = 3;
    while at < call.args.count() {
        if !call.args.is(at, "samples") || at + 1 >= call.args.count() {
            return refuse(SYNTAX);
        }
        if call.integer(at + 1)? < 0 {
            return refuse(SYNTAX);
        }
        at += 2;
    }
    /// Header of a block, and a slot with its mirror.
    const OVERHEAD: usize = 32 + 8 + 17;
    match cells.at(0).value() {
        Some(value) => {
            let bytes = (call.args.get(2).len() + value.len()).next_multiple_of(32) + OVERHEAD;
            out.integer(bytes as i64);
        }
        None => out.null(),
    }
    Ok(())
}

pub(super) fn dump(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    out.note_read(0, cells.at(0).exists());
    match cells.at(0).value() {
        None => out.null(),
        Some(value) => {
            let mut payload = Vec::with_capacity(value.len() + 16);
            write_dump(value, Some(&mut Compressor::default()), &mut payload);
            out.reply().bulk(&payload);
        }
    }
    Ok(())
}

/// Options of RESTORE.
#[derive(Clone, Copy, Debug, Default)]
struct RestoreOptions {
    replaces: bool,
    is_absolute: bool,
    worth: Option<(Measure, u64)>,
}

impl RestoreOptions {
    fn parse(call: &Call<'_>) -> Result<Self, Refusal> {
        let mut options = Self::default();
        let is_other = |own: &Self, measure| own.worth.is_some_and(|(given, _)| given != measure);
        let mut at = 4;
        while at < call.args.count() {
            let has_value = at + 1 < call.args.count();
            if call.args.is(at, "replace") {
                options.replaces = true;
            } else if call.args.is(at, "absttl") {
                options.is_absolute = true;
            } else if call.args.is(at, "idletime") && has_value && !is_other(&options, Recency) {
                let Ok(seconds) = u64::try_from(call.integer(at + 1)?) else {
                    return refuse("ERR Invalid IDLETIME value, must be >= 0");
                };
                options.worth = Some((Recency, seconds));
                at += 1;
            } else if call.args.is(at, "freq") && has_value && !is_other(&options, Frequency) {
                let Ok(count) = u8::try_from(call.integer(at + 1)?) else {
                    return refuse("ERR Invalid FREQ value, must be >= 0 and <= 255");
                };
                options.worth = Some((Frequency, count.into()));
                at += 1;
            } else {
                return refuse(SYNTAX);
            }
            at += 1;
        }
        Ok(options)
    }
}

pub(super) fn restore(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let options = RestoreOptions::parse(call)?;
    let cell = cells.key(0);
    if cell.exists() && !options.replaces {
        return refuse("BUSYKEY Target key name already exists.");
    }
    let ttl = call.integer(2)?;
    if ttl < 0 {
        return refuse("ERR Invalid TTL value, must be >= 0");
    }
    let mut value = Vec::new();
    let limits = Limits { value: call.bulk_max };
    match read(call.args.get(3), limits, &mut value) {
        Ok(Value::String(_)) => {}
        Ok(Value::Skipped(kind)) => {
            return Err(format!("ERR Bad data format: this server has no type {kind}").into());
        }
        Err(RdbError::Version(_) | RdbError::Checksum { .. } | RdbError::Truncated { .. }) => {
            return refuse("ERR DUMP payload version or checksum are wrong");
        }
        Err(_) => return refuse("ERR Bad data format"),
    }
    let at = match (ttl, options.is_absolute) {
        (0, _) => 0,
        (ttl, true) => ttl as u64,
        (ttl, false) => (ttl as u64).saturating_add(call.now_ms),
    };
    if at != 0 && at <= call.now_ms {
        if cell.delete() {
            out.event(b'g', "del", 0);
        }
    } else {
        cell.put(value, at);
        out.event(b'g', "restore", 0);
        out.effects.worth = options.worth;
    }
    out.ok();
    Ok(())
}
