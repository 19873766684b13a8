//! Detection of sequential faults, which determines how many pages the handler reads ahead.

use crate::page_table::PageId;

/// Runs of consecutive faults, by thread.
#[derive(Debug, Default)]
pub struct Streams {
    streams: Vec<Stream>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    thread: u32,
    next: u32,
    pages: u32,
    used: u64,
}

/// Maximum number of tracked streams.
const STREAMS: usize = 32;

impl Streams {
    /// Returns the number of pages to serve for a fault of `thread` at `page`. A new stream gets 1
    /// page. A continued stream gets four times its previous window, at most `max` pages.
    pub fn window(&mut self, thread: u32, page: PageId, max: u32) -> u32 {
        self.clock += 1;
        let clock = self.clock;
        // One pass over all streams: a random fault matches none and replaces the least recently
        // used.
        let (mut oldest, mut used) = (0, u64::MAX);
        for (index, stream) in self.streams.iter_mut().enumerate() {
            if stream.thread == thread && stream.next == page.0 {
                stream.pages = (stream.pages * 4).min(max).max(1);
                stream.used = clock;
                stream.next = page.0 + stream.pages;
                return stream.pages;
            }
            if stream.used < used {
                (oldest, used) = (index, stream.used);
            }
        }
        let stream = Stream { thread, next: page.0 + 1, pages: 1, used: clock };
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
        } else {
            self.streams[oldest] = stream;
        }
        1
    }

    /// Records that the batch at `page` was cut from `window` to `served` pages: the stream
    /// continues after them.
    pub fn served(&mut self, thread: u32, page: PageId, window: u32, served: u32) {
        let next = page.0 + window;
        if let Some(s) = self.streams.iter_mut().find(|s| s.thread == thread && s.next == next) {
            s.next = page.0 + served.max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_window_grows_despite_other_threads() {
        let mut streams = Streams::default();
        assert_eq!(streams.window(1, PageId(100), 64), 1);
        assert_eq!(streams.window(2, PageId(101), 64), 1);
        assert_eq!(streams.window(1, PageId(101), 64), 4);
        assert_eq!(streams.window(1, PageId(105), 64), 16);
        assert_eq!(streams.window(1, PageId(121), 64), 64);
        assert_eq!(streams.window(1, PageId(185), 64), 64);
        streams.served(1, PageId(185), 64, 10);
        assert_eq!(streams.window(1, PageId(195), 64), 64);
        assert_eq!(streams.window(1, PageId(5000), 64), 1);
    }

    #[test]
    fn random_faults_never_read_ahead() {
        let mut streams = Streams::default();
        for at in 0..1000u32 {
            assert_eq!(streams.window(1, PageId(at.wrapping_mul(7919) % 100_003 * 2), 64), 1);
        }
    }
}
