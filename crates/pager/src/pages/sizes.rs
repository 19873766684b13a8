//! Sizes of the pager's parts, which follow from the bound on local memory.

use crate::config::LOCAL_BYTES_MIN;
use crate::sys::PAGE_BYTES;

/// Frames from which the page server serves forked children.
pub const CHILD_FRAMES: u32 = 16;
/// Frames through which a promoted child reads its parent's pages.
pub const INHERIT_FRAMES: u32 = 16;
/// Single frames for demand READs.
pub const DEMAND_FRAMES: u32 = 8;
/// WRITE transfers in flight.
const WRITES: u32 = 2;

/// Sizes of the pager's parts, in pages unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Maximum number of present pages: resident ones and positions with memory.
    pub limit: u32,
    /// Pages of the longest prefetch window and of a write-back batch; 8 to 64.
    pub window: u32,
    /// Prefetch windows in flight.
    pub windows: u32,
    /// Write-back batches in flight.
    pub writes: u32,
    /// Positions of the shelf.
    pub positions: u32,
    /// Blank positions that the asynchronous path keeps ready.
    pub stock: u32,
    /// Clean positions that stay on the shelf while there are blank ones.
    pub keep: u32,
}

impl Sizes {
    /// Sizes for a bound in bytes.
    ///
    /// The frames, which the NIC reaches, are part of the bound. A window is a 64th of local
    /// memory, so that even the smallest bound ([`LOCAL_BYTES_MIN`]) holds many of them.
    pub fn new(local_bytes: u64) -> Self {
        let local = (local_bytes.max(LOCAL_BYTES_MIN) / PAGE_BYTES as u64).min(1 << 31) as u32;
        let window = (local / 64).clamp(8, 64);
        let sizes = Self {
            limit: 0,
            window,
            windows: if window < 32 { 4 } else { 8 },
            writes: WRITES,
            positions: (16 * window).next_multiple_of(64) + 256,
            stock: 2 * window,
            keep: window,
        };
        Self { limit: local - sizes.frames(), ..sizes }
    }

    /// Returns the number of frames: memory that the NIC reaches.
    pub fn frames(&self) -> u32 {
        self.first_window_frame() + (self.windows + self.writes) * self.window
    }

    /// Returns the first frame that serves forked children.
    pub fn first_child_frame(&self) -> u32 {
        0
    }

    /// Returns the first frame through which a promoted child reads its parent's pages.
    pub fn first_inherit_frame(&self) -> u32 {
        CHILD_FRAMES
    }

    /// Returns the first frame of demand READs.
    pub fn first_demand_frame(&self) -> u32 {
        CHILD_FRAMES + INHERIT_FRAMES
    }

    /// Returns the first frame of windows and write-back batches.
    pub fn first_window_frame(&self) -> u32 {
        self.first_demand_frame() + DEMAND_FRAMES
    }

    /// Returns the frames of prefetch windows.
    pub fn window_frames(&self) -> u32 {
        self.windows * self.window
    }

    /// Returns these sizes for a transport with `frames` frames. `None` if these are too few, or
    /// take more than half of the bound.
    pub fn with_frames(self, frames: u32) -> Option<Self> {
        let needed = self.frames();
        let local = self.limit + needed;
        (needed <= frames && frames <= local / 2).then(|| Self { limit: local - frames, ..self })
    }

    /// Returns these sizes with a shelf that keeps at least `pages` clean pages, at most a quarter
    /// of the limit.
    pub fn with_keep(self, pages: u32) -> Self {
        let keep = self.keep.max(pages.min(self.limit / 4));
        let more = (keep - self.keep).next_multiple_of(64);
        Self { keep, positions: self.positions + more, ..self }
    }

    /// Returns these sizes with a limit that is lower by `pages`. Memory operations may hold that
    /// many pages for a moment in addition to the present ones.
    pub fn with_slack(self, pages: u32) -> Self {
        Self { limit: self.limit - pages, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_a_transport_take_at_most_half_of_the_bound() {
        let sizes = Sizes::new(16 << 20);
        let (needed, local) = (sizes.frames(), sizes.limit + sizes.frames());
        assert_eq!(sizes.with_frames(needed), Some(sizes));
        assert_eq!(sizes.with_frames(needed - 1), None);
        let most = sizes.with_frames(local / 2).expect("half of the bound");
        assert_eq!(most, Sizes { limit: local - local / 2, ..sizes });
        assert_eq!(sizes.with_frames(local / 2 + 1), None);
    }

    #[test]
    fn parts_fit_into_every_bound() {
        for local in [LOCAL_BYTES_MIN, 16 << 20, 64 << 20, 1 << 30, 1 << 40] {
            let sizes = Sizes::new(local);
            assert_eq!(
                u64::from(sizes.limit + sizes.frames()) * PAGE_BYTES as u64,
                local,
                "{sizes:?}"
            );
            assert!(sizes.limit > 2 * (sizes.stock + sizes.keep), "{sizes:?}");
            let kept = sizes.with_keep(sizes.limit / 8);
            assert!(kept.limit > 2 * (kept.stock + kept.keep), "{kept:?}");
            assert!(kept.positions - kept.keep >= sizes.positions - sizes.keep, "{kept:?}");
            assert!(sizes.positions >= sizes.windows * sizes.window + 2 * sizes.stock, "{sizes:?}");
        }
    }
}
