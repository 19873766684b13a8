//! Edge cases of the ring of frames: the oldest frame first, not more frames than requested, every
//! state.

use super::*;

/// Number of frames in the ring. As many frames precede the ring.
const FRAMES: u32 = 4;

fn staging() -> Staging {
    let frames = 2 * FRAMES;
    let base = crate::sys::map_anonymous(frames as usize * PAGE_BYTES).unwrap();
    Staging::new(StagingMemory { base: base as *mut u8, frames }, FRAMES)
}

fn fill(staging: &Staging, page: u32) -> FrameId {
    let frame = staging.allocate(|_| false).unwrap();
    staging.fill(frame, PageId(page), None);
    frame
}

fn start_writing(staging: &Staging, count: u32) -> Vec<FrameId> {
    let mut batch = Vec::new();
    staging.start_writing(count, &mut batch);
    batch
}

#[test]
fn oldest_frames_are_written_first_up_to_the_limit() {
    let staging = staging();
    // Twice around the ring.
    for round in 0..2 {
        let frames: Vec<_> = (0..FRAMES).map(|n| fill(&staging, round * FRAMES + n)).collect();
        assert_eq!(staging.dirty(), FRAMES);
        assert_eq!(start_writing(&staging, 0), []);
        assert_eq!(start_writing(&staging, 1), frames[..1]);
        assert_eq!(start_writing(&staging, 2), frames[1..3]);
        assert_eq!(staging.dirty(), 1);
        assert_eq!(start_writing(&staging, 9), frames[3..]);
        assert_eq!(start_writing(&staging, 9), []);
        for frame in frames {
            assert_eq!(staging.written(frame), None);
            staging.set_slot(frame, SlotId(1));
            assert_eq!(staging.leave(frame), LeavingSlot::Stored(SlotId(1)));
        }
    }
}

#[test]
fn frame_state_follows_each_transition() {
    let staging = staging();
    assert!(!staging.is_empty() && staging.len() == FRAMES);
    let frame = staging.allocate(|_| false).unwrap();
    assert_eq!(staging.state(frame), FrameState::Free);
    staging.fill(frame, PageId(3), None);
    assert_eq!(staging.state(frame), FrameState::Dirty);
    start_writing(&staging, 1);
    assert_eq!(staging.state(frame), FrameState::Writing);
    assert_eq!(staging.leave(frame), LeavingSlot::Unstored(None));
    assert_eq!(staging.state(frame), FrameState::Orphan);
    assert_eq!(staging.written(frame), None);
    assert_eq!(staging.state(frame), FrameState::Free);
}

#[test]
fn frame_keeps_its_page_and_address() {
    let staging = staging();
    let frames: Vec<_> = (0..FRAMES).map(|n| fill(&staging, n)).collect();
    for (n, frame) in frames.iter().enumerate() {
        assert_eq!(staging.page(*frame), PageId(n as u32));
        let offset = staging.address(*frame) as usize - staging.address(FrameId(0)) as usize;
        assert_eq!(offset, (FRAMES as usize + n) * PAGE_BYTES);
    }
    staging.set_page(frames[1], PageId(77));
    assert_eq!(staging.page(frames[1]), PageId(77));
    assert_eq!(staging.page(frames[2]), PageId(2));
}
