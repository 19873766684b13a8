//! Packets of a host to the assist, and the content of the host's ring.

use pager::assist::protocol::Message;
use pager::assist::ring::{BYTES, Consumer, ENTRIES, ITEMS_MAX, Outcome, Producer};
use verbs::DmaMemory;

/// Frames of two memory nodes.
const FRAMES: [u32; 2] = [100, 7];
/// Offsets of the producer's index and of the entries in a ring.
const PRODUCED: usize = 64;
const ENTRIES_AT: usize = 512;

/// Decodes `bytes` as a packet. Then serves a ring with `bytes` in its entries, and the first four
/// bytes as the number of requests.
pub fn run(bytes: &[u8]) {
    if let Some(message) = Message::decode(bytes) {
        // The reason of a refusal may be cut.
        assert!(Message::decode(&message.encode()).is_some());
    }
    let Some((produced, entries)) = bytes.split_first_chunk::<4>() else { return };
    let memory = DmaMemory::anonymous(BYTES).expect("memory for a ring");
    drop(Producer::new(memory.clone()));
    memory.write(ENTRIES_AT, &entries[..entries.len().min(BYTES - ENTRIES_AT)]);
    memory.write(PRODUCED, produced);
    let mut consumer = Consumer::new(memory, &FRAMES).expect("a ring of this version");
    for _ in 0..ENTRIES {
        let Ok(Some((number, request))) = consumer.take() else { return };
        assert!((1..=ITEMS_MAX).contains(&request.items.len()));
        for item in &request.items {
            let frames = FRAMES[usize::from(item.node)];
            assert!(item.pages > 0 && item.frame + u32::from(item.pages) <= frames);
        }
        consumer.complete(number, Outcome::Moved);
    }
    assert!(!consumer.has_request() || consumer.take().is_err());
}
