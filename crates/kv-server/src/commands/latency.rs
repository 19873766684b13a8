//! SLOWLOG and LATENCY.

use redis_formats::command::{Id, all, find};
use redis_formats::number::parse_i64;

use crate::client::full_name;
use crate::context::Context;
use crate::keyspace::Keyspace;
use crate::stats::CommandSum;

/// Entries of SLOWLOG GET without a number.
const ENTRIES: i64 = 10;

pub(super) fn slowlog_get<K: Keyspace>(cx: &mut Context<'_, K>) {
    let count = match cx.args.find(2).map(parse_i64) {
        None => ENTRIES,
        Some(Some(count @ -1..)) => count,
        Some(_) => return cx.error("ERR count should be greater than or equal to -1"),
    };
    let entries = cx.server().slowlog.newest(usize::try_from(count).unwrap_or(usize::MAX));
    let mut reply = cx.reply();
    reply.array(entries.len());
    for entry in entries {
        reply.array(6);
        reply.integer(entry.id as i64);
        reply.integer(entry.at_s as i64);
        reply.integer(entry.us as i64);
        reply.array(entry.arguments.len());
        entry.arguments.iter().for_each(|argument| reply.bulk(argument));
        reply.bulk(entry.address.as_bytes());
        reply.bulk(entry.name);
    }
}

pub(super) fn slowlog_len<K: Keyspace>(cx: &mut Context<'_, K>) {
    let count = cx.server().slowlog.len() as i64;
    cx.reply().integer(count);
}

pub(super) fn slowlog_reset<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.server().slowlog.clear();
    cx.reply().ok();
}

/// The numbers of all commands and subcommands that can be executed.
pub(super) fn all_ids() -> impl Iterator<Item = Id> {
    all().flat_map(|command| std::iter::once(command).chain(command.subcommands)).map(|own| own.id)
}

pub(super) fn histogram<K: Keyspace>(cx: &mut Context<'_, K>) {
    let ids: Vec<Id> = match cx.args.count() {
        2 => all_ids().collect(),
        _ => {
            let named = cx.args.from(2).filter_map(find);
            named
                .flat_map(|command| std::iter::once(command).chain(command.subcommands))
                .map(|own| own.id)
                .collect()
        }
    };
    let sum = |id| (id, CommandSum::of(cx.server().stats(), id));
    let rows: Vec<_> = ids.into_iter().map(sum).filter(|(_, sum)| sum.times.count() > 0).collect();
    let mut reply = cx.reply();
    reply.map(rows.len());
    for (id, sum) in rows {
        reply.bulk(full_name(id));
        reply.map(2);
        reply.bulk("calls");
        reply.integer(sum.times.count() as i64);
        reply.bulk("histogram_usec");
        let buckets = sum.times.cumulative();
        reply.map(buckets.len());
        for (power, count) in buckets {
            // The largest time that a histogram of Redis, with two digits, puts below the power.
            let upper_ns = (1_u64 << power) + (1 << power >> 7) - 1;
            reply.integer((upper_ns / 1000) as i64);
            reply.integer(count as i64);
        }
    }
}

pub(super) fn latest<K: Keyspace>(cx: &mut Context<'_, K>) {
    let rows = cx.server().latency.latest();
    let mut reply = cx.reply();
    reply.array(rows.len());
    for row in rows {
        reply.array(4);
        reply.bulk(row.event);
        [row.at_s, row.ms, row.max_ms].into_iter().for_each(|value| reply.integer(value as i64));
    }
}

pub(super) fn history<K: Keyspace>(cx: &mut Context<'_, K>) {
    let samples = cx.server().latency.history(cx.args.get(2));
    let mut reply = cx.reply();
    reply.array(samples.len());
    for (at_s, ms) in samples {
        reply.array(2);
        reply.integer(at_s as i64);
        reply.integer(ms as i64);
    }
}

pub(super) fn reset<K: Keyspace>(cx: &mut Context<'_, K>) {
    let args = cx.args;
    let is_wanted =
        |name: &str| args.count() == 2 || args.from(2).any(|own| own == name.as_bytes());
    let count = cx.server().latency.reset(is_wanted);
    cx.reply().integer(count as i64);
}

pub(super) fn doctor<K: Keyspace>(cx: &mut Context<'_, K>) {
    let threshold = cx.server().config.live.latency_ms();
    let rows = cx.server().latency.latest();
    let mut text = match (threshold, rows.len()) {
        (0, _) => "The latency monitor is off: set latency-monitor-threshold to milliseconds, \
                   for example with CONFIG SET latency-monitor-threshold 100.\n"
            .to_owned(),
        (_, 0) => format!("No event took {threshold} ms or longer.\n"),
        (_, count) => format!("Events of {threshold} ms or longer, by kind: {count}.\n"),
    };
    for row in rows {
        text += &format!("{}: latest {} ms, longest {} ms.\n", row.event, row.ms, row.max_ms);
    }
    cx.reply().verbatim(b"txt", text);
}

/// Draws one column for each sample, at most 80.
pub(super) fn graph<K: Keyspace>(cx: &mut Context<'_, K>) {
    let event = cx.args.get(2);
    let samples = cx.server().latency.history(event);
    let newest = &samples[samples.len().saturating_sub(80)..];
    let Some(highest) = newest.iter().map(|(_, ms)| *ms).max() else {
        let text: [&[u8]; 3] = [b"ERR No samples available for event '", event, b"'"];
        return cx.error(text.concat());
    };
    let lowest = newest.iter().map(|(_, ms)| *ms).min().unwrap_or(0);
    let name = String::from_utf8_lossy(event);
    let mut text = format!("{name} - high {highest} ms, low {lowest} ms\n{:-<80}\n", "");
    const ROWS: u64 = 4;
    for row in (0..ROWS).rev() {
        for (_, ms) in newest {
            let height = ms * ROWS / highest.max(1);
            text.push(if height > row { '#' } else { '_' });
        }
        text.push('\n');
    }
    cx.reply().verbatim(b"txt", text);
}

/// Reads the percentiles that INFO shows.
pub(super) fn percentiles<K: Keyspace>(cx: &Context<'_, K>) -> Vec<(String, f64)> {
    let text = cx.server().config.get("latency-tracking-info-percentiles");
    let parse = |word: &str| Some((word.to_owned(), word.parse().ok()?));
    text.split_ascii_whitespace().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn bounds_of_buckets_are_those_of_redis() {
        let bound = |power: u32| ((1_u64 << power) + (1 << power >> 7) - 1) / 1000;
        let bounds: Vec<u64> = (10..21).map(bound).collect();
        assert_eq!(bounds, [1, 2, 4, 8, 16, 33, 66, 132, 264, 528, 1056]);
    }
}
