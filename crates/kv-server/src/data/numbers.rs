//! Commands on strings that are numbers.

use redis_formats::number::{NumberError, add_floats, parse_i64, write_i64};

use super::call::{Call, Cells, Done, NOT_INTEGER, Output, refuse};

fn add(cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>, more: i64) -> Done {
    let cell = cells.key(0);
    let old = match cell.value() {
        Some(text) => parse_i64(text),
        None => Some(0),
    };
    let Some(old) = old else { return refuse(NOT_INTEGER) };
    let Some(new) = old.checked_add(more) else {
        return refuse("ERR increment or decrement would overflow");
    };
    let mut text = Vec::with_capacity(20);
    write_i64(new, &mut text);
    cell.replace(text);
    out.event(b'$', "incrby", 0);
    out.integer(new);
    Ok(())
}

pub(super) fn incr(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    add(cells, out, 1)
}

pub(super) fn decr(_: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    add(cells, out, -1)
}

pub(super) fn incrby(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    add(cells, out, call.integer(2)?)
}

pub(super) fn decrby(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let Some(more) = call.integer(2)?.checked_neg() else {
        return refuse("ERR decrement would overflow");
    };
    add(cells, out, more)
}

pub(super) fn incrbyfloat(
    call: &Call<'_>,
    cells: &mut Cells<'_, '_, '_>,
    out: &mut Output<'_>,
) -> Done {
    let cell = cells.key(0);
    let mut text = Vec::new();
    match add_floats(cell.value().unwrap_or(b"0"), call.args.get(2), &mut text) {
        Err(NumberError::Sum) => refuse("ERR increment would produce NaN or Infinity"),
        Err(_) => refuse("ERR value is not a valid float"),
        Ok(()) => {
            out.reply().bulk(&text);
            cell.replace(text);
            out.event(b'$', "incrbyfloat", 0);
            Ok(())
        }
    }
}
