//! LCS: the longest common subsequence of two strings.

use super::call::{Call, Cells, Done, Output, Refusal, SYNTAX, refuse};

#[derive(Clone, Copy, Debug, Default)]
struct Options {
    only_length: bool,
    ranges: bool,
    with_lengths: bool,
    least: i64,
}

impl Options {
    fn parse(call: &Call<'_>) -> Result<Self, Refusal> {
        let mut options = Self::default();
        let mut at = 3;
        while at < call.args.count() {
            match () {
                () if call.args.is(at, "idx") => options.ranges = true,
                () if call.args.is(at, "len") => options.only_length = true,
                () if call.args.is(at, "withmatchlen") => options.with_lengths = true,
                () if call.args.is(at, "minmatchlen") && at + 1 < call.args.count() => {
                    options.least = call.integer(at + 1)?.max(0);
                    at += 1;
                }
                () => return refuse(SYNTAX),
            }
            at += 1;
        }
        if options.ranges && options.only_length {
            return refuse("ERR If you want both the length and indexes, please just use IDX.");
        }
        Ok(options)
    }
}

/// Lengths of the longest common subsequences of all pairs of prefixes.
struct Lengths {
    rows: Vec<u32>,
    width: usize,
}

impl Lengths {
    fn new(a: &[u8], b: &[u8]) -> Self {
        let width = b.len() + 1;
        let mut rows = vec![0_u32; (a.len() + 1) * width];
        for (i, one) in a.iter().enumerate() {
            let (before, now) = rows[i * width..].split_at_mut(width);
            for (j, other) in b.iter().enumerate() {
                now[j + 1] = if one == other { before[j] + 1 } else { before[j + 1].max(now[j]) };
            }
        }
        Self { rows, width }
    }

    fn at(&self, i: usize, j: usize) -> u32 {
        self.rows[i * self.width + j]
    }
}

/// Equal bytes of both strings: where they begin, and how many they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    a: usize,
    b: usize,
    len: usize,
}

/// The subsequence, and its runs from the last to the first.
fn trace(a: &[u8], b: &[u8], lengths: &Lengths) -> (Vec<u8>, Vec<Match>) {
    let (mut common, mut matches) = (Vec::new(), Vec::<Match>::new());
    let (mut i, mut j) = (a.len(), b.len());
    while i > 0 && j > 0 {
        if a[i - 1] == b[j - 1] {
            (i, j) = (i - 1, j - 1);
            common.push(a[i]);
            match matches.last_mut() {
                Some(last) if (last.a, last.b) == (i + 1, j + 1) => {
                    *last = Match { a: i, b: j, len: last.len + 1 };
                }
                _ => matches.push(Match { a: i, b: j, len: 1 }),
            }
        } else if lengths.at(i - 1, j) > lengths.at(i, j - 1) {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    common.reverse();
    (common, matches)
}

pub(super) fn lcs(call: &Call<'_>, cells: &mut Cells<'_, '_, '_>, out: &mut Output<'_>) -> Done {
    let options = Options::parse(call)?;
    (0..2).for_each(|key| out.note_read(key, cells.at(key).exists()));
    let [a, b] = [0, 1].map(|key| cells.at(key).value().unwrap_or_default());
    let bytes = (a.len() as u128 + 1) * (b.len() as u128 + 1) * 4;
    if bytes > call.bulk_max as u128 {
        return refuse(
            "ERR Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len",
        );
    }
    let lengths = Lengths::new(a, b);
    let total = lengths.at(a.len(), b.len());
    if options.only_length {
        out.integer(total.into());
        return Ok(());
    }
    let (common, mut matches) = trace(a, b, &lengths);
    if !options.ranges {
        out.reply().bulk(common);
        return Ok(());
    }
    matches.retain(|own| own.len as i64 >= options.least);
    let mut reply = out.reply();
    reply.map(2);
    reply.bulk("matches");
    reply.array(matches.len());
    for own in matches {
        reply.array(if options.with_lengths { 3 } else { 2 });
        for start in [own.a, own.b] {
            reply.array(2);
            reply.integer(start as i64);
            reply.integer((start + own.len - 1) as i64);
        }
        if options.with_lengths {
            reply.integer(own.len as i64);
        }
    }
    reply.bulk("len");
    reply.integer(total.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsequence_and_its_runs_are_found() {
        let (a, b) = (b"ohmytext", b"mynewtext");
        let lengths = Lengths::new(a, b);
        assert_eq!(lengths.at(a.len(), b.len()), 6);
        let (common, matches) = trace(a, b, &lengths);
        assert_eq!(common, b"mytext");
        let expected = [Match { a: 4, b: 5, len: 4 }, Match { a: 2, b: 0, len: 2 }];
        assert_eq!(matches, expected);
    }
}
