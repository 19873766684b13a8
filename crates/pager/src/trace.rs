//! Traces of page faults: the file format and its reader.
//!
//! `granary run --trace FILE` records each fault on a missing page, and `granary bench policy`
//! replays traces over the replacement policies. All numbers are little-endian:
//!
//! ```text
//!  0   8  magic "grantrac"          event, 16 bytes:
//!  8   4  version, 1                0   4  number of the page
//! 12   4  bytes of an event, 16     4   4  thread id, not 0
//! 16   8  number of events          8   4  nanoseconds since the last event, 2^32-1 if more
//! 24   8  events that are missing   12  4  1: write, 0: read
//! 32   4  end of the page numbers
//! 36   4  n: one zone of 256 pages in n is recorded
//! 40  16  name of the program
//! 56   8  0
//! 64      events
//! ```
//!
//! A file may be longer than its events, because the recorder reserves room. An event of zeros is
//! unfinished: the process was killed while a handler wrote it. The reader skips such events.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::Path;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Bytes of an event.
pub const EVENT_BYTES: usize = 16;
/// Pages of a zone, the unit of sampling.
pub const ZONE_PAGES: u32 = 256;
const MAGIC: [u8; 8] = *b"grantrac";
const VERSION: u32 = 1;
/// Bytes of the program's name.
const NAME_BYTES: usize = 16;

/// A fault on a missing page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Number of the page: of the region, or of an extent behind it.
    pub page: u32,
    /// Id of the faulting thread.
    pub thread: u32,
    /// Nanoseconds since the last event, at most 2^32-1.
    pub ns: u32,
    /// True if the access was a write.
    pub write: bool,
}

impl Event {
    /// Returns the event as two words of the file.
    pub fn words(self) -> [u64; 2] {
        let flags = u64::from(self.write);
        let pair = |low: u32, high: u64| u64::from(low) | high << 32;
        [pair(self.page, u64::from(self.thread)), pair(self.ns, flags)]
    }
}

/// The first bytes of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of events in the file.
    pub events: u64,
    /// Events that could not be recorded.
    pub dropped: u64,
    /// End of the page numbers; each event's page is below.
    pub region_pages: u32,
    /// One zone in this many is recorded.
    pub one_zone_in: u32,
    /// Name of the program, at most 16 bytes.
    pub program: String,
}

/// Errors of reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {path}: {source}")]
    Read {
        /// Path of the file.
        path: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The content is not a trace of this version.
    #[error("the trace is not usable: {0}; record it again with granary run --trace")]
    Format(String),
}

fn wrong<T>(why: impl Into<String>) -> Result<T, TraceError> {
    Err(TraceError::Format(why.into()))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

impl Header {
    /// Decodes a header.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, TraceError> {
        if bytes[..8] != MAGIC {
            return wrong("it does not begin with the magic number of traces");
        }
        let (version, event_bytes) = (u32_at(bytes, 8), u32_at(bytes, 12));
        if (version, event_bytes) != (VERSION, EVENT_BYTES as u32) {
            return wrong(format!(
                "version {version} with events of {event_bytes} bytes is unknown"
            ));
        }
        if u64_at(bytes, 56) != 0 {
            return wrong("reserved bytes are not 0");
        }
        let one_zone_in = u32_at(bytes, 36);
        if one_zone_in == 0 {
            return wrong("one zone in 0 is recorded");
        }
        let name = bytes[40..40 + NAME_BYTES].split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(Self {
            events: u64_at(bytes, 16),
            dropped: u64_at(bytes, 24),
            region_pages: u32_at(bytes, 32),
            one_zone_in,
            program: String::from_utf8_lossy(name).into_owned(),
        })
    }

    /// Encodes the header. A name of more than 16 bytes is cut.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(EVENT_BYTES as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.events.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.dropped.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.region_pages.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.one_zone_in.to_le_bytes());
        let len = self.program.len().min(NAME_BYTES);
        bytes[40..40 + len].copy_from_slice(&self.program.as_bytes()[..len]);
        bytes
    }
}

/// A recorded trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The header; `events` is the number of [`Trace::events`].
    pub header: Header,
    /// The faults in their order.
    pub events: Vec<Event>,
}

impl Trace {
    /// Creates a trace of a program from events.
    pub fn new(program: &str, region_pages: u32, events: Vec<Event>) -> Self {
        let header = Header {
            events: events.len() as u64,
            dropped: 0,
            region_pages,
            one_zone_in: 1,
            program: program.to_owned(),
        };
        Self { header, events }
    }

    /// Reads and checks a trace file.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let failed = |source| TraceError::Read { path: path.display().to_string(), source };
        let mut file = units::files::open(path).map_err(failed)?;
        let mut head = [0; HEADER_BYTES];
        file.read_exact(&mut head).map_err(failed)?;
        let header = Header::decode(&head)?;
        let room = file.metadata().map_err(failed)?.len().saturating_sub(HEADER_BYTES as u64);
        let bytes = event_bytes(&header, room)?;
        let mut body = Vec::with_capacity(bytes as usize);
        file.take(bytes).read_to_end(&mut body).map_err(failed)?;
        Self::with(header, &body)
    }

    /// Decodes a whole trace.
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        let Some((head, body)) = bytes.split_first_chunk() else {
            return wrong(format!("{} bytes are less than a header", bytes.len()));
        };
        let header = Header::decode(head)?;
        let len = event_bytes(&header, body.len() as u64)?;
        Self::with(header, &body[..len as usize])
    }

    fn with(mut header: Header, body: &[u8]) -> Result<Self, TraceError> {
        let mut events = Vec::with_capacity(body.len() / EVENT_BYTES);
        for (index, bytes) in body.as_chunks::<EVENT_BYTES>().0.iter().enumerate() {
            if *bytes == [0; EVENT_BYTES] {
                continue;
            }
            let (page, thread, flags) = (u32_at(bytes, 0), u32_at(bytes, 4), u32_at(bytes, 12));
            if page >= header.region_pages || thread == 0 || flags > 1 {
                return wrong(format!(
                    "event {index} has page {page} of {}, thread {thread} and flags {flags:#x}",
                    header.region_pages
                ));
            }
            events.push(Event { page, thread, ns: u32_at(bytes, 8), write: flags == 1 });
        }
        header.events = events.len() as u64;
        Ok(Self { header, events })
    }

    /// Writes the trace.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let header = Header { events: self.events.len() as u64, ..self.header.clone() };
        out.write_all(&header.encode())?;
        for event in &self.events {
            for word in event.words() {
                out.write_all(&word.to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Returns the number of different pages.
    pub fn pages(&self) -> u32 {
        self.events.iter().map(|event| event.page).collect::<HashSet<u32>>().len() as u32
    }

    /// Keeps the events of one zone in `n`, chosen by a hash of the zone's number.
    pub fn sample(&self, n: u32) -> Self {
        let hash = |zone: u32| (u64::from(zone).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
        let kept = |event: &&Event| hash(event.page / ZONE_PAGES).is_multiple_of(n);
        let events: Vec<Event> = self.events.iter().filter(kept).copied().collect();
        let one_zone_in = self.header.one_zone_in.saturating_mul(n);
        let header = Header { events: events.len() as u64, one_zone_in, ..self.header.clone() };
        Self { header, events }
    }
}

/// Returns the bytes of the events that `room` bytes behind the header must hold.
fn event_bytes(header: &Header, room: u64) -> Result<u64, TraceError> {
    match header.events.checked_mul(EVENT_BYTES as u64) {
        Some(bytes) if bytes <= room => Ok(bytes),
        _ => wrong(format!(
            "{} events do not fit in the {room} bytes behind the header",
            header.events
        )),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event() -> impl Strategy<Value = Event> {
        (0u32..1000, 1u32.., any::<u32>(), any::<bool>())
            .prop_map(|(page, thread, ns, write)| Event { page, thread, ns, write })
    }

    proptest! {
        #[test]
        fn trace_round_trips_through_its_file(events in proptest::collection::vec(event(), 0..50)) {
            let trace = Trace::new("sort", 1000, events);
            let mut bytes = Vec::new();
            trace.write(&mut bytes).unwrap();
            prop_assert_eq!(&Trace::decode(&bytes).unwrap(), &trace);
            bytes.resize(bytes.len() + 4096, 0);
            prop_assert_eq!(&Trace::decode(&bytes).unwrap(), &trace, "with reserved room");
        }
    }

    fn example() -> Vec<u8> {
        let event = |page| Event { page, thread: 5, ns: 10, write: page % 2 == 0 };
        let mut bytes = Vec::new();
        Trace::new("x", 8, (0..8).map(event).collect()).write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn broken_traces_are_refused_with_the_reason() {
        let refused = |change: fn(&mut Vec<u8>), part: &str| {
            let mut bytes = example();
            change(&mut bytes);
            let text = Trace::decode(&bytes).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        };
        refused(|bytes| bytes.truncate(63), "less than a header");
        refused(|bytes| bytes[0] = 0, "magic");
        refused(|bytes| bytes[8] = 2, "version 2");
        refused(|bytes| bytes[12] = 15, "15 bytes");
        refused(|bytes| bytes[36] = 0, "one zone in 0");
        refused(|bytes| bytes[60] = 1, "reserved");
        refused(|bytes| bytes.truncate(64 + 8 * 16 - 1), "do not fit");
        refused(|bytes| bytes[23] = 0xff, "do not fit");
        refused(|bytes| bytes[64 + 16] = 8, "event 1 has page 8 of 8");
        refused(|bytes| bytes[64 + 4] = 0, "thread 0");
        refused(|bytes| bytes[64 + 12] = 2, "flags 0x2");
    }

    #[test]
    fn unfinished_events_are_skipped() {
        let mut bytes = example();
        bytes[64 + 16..64 + 32].fill(0);
        let trace = Trace::decode(&bytes).unwrap();
        assert_eq!((trace.header.events, trace.events.len(), trace.pages()), (7, 7, 7));
        assert_eq!(trace.events[1].page, 2);
    }

    #[test]
    fn sample_keeps_whole_zones() {
        let events = (0..256 * 64).map(|page| Event { page, thread: 1, ns: 0, write: false });
        let trace = Trace::new("x", 1 << 20, events.collect());
        let small = trace.sample(8);
        assert!((4..=13).contains(&(small.pages() / ZONE_PAGES)), "{} pages", small.pages());
        assert_eq!((small.pages() % ZONE_PAGES, small.header.one_zone_in), (0, 8));
    }
}
