//! Decoding of fault traces.

use pager::trace::Trace;

/// Decodes `bytes` as a trace. A decoded trace must be the same after encoding.
pub fn run(bytes: &[u8]) {
    let Ok(trace) = Trace::decode(bytes) else { return };
    assert!(trace.events.iter().all(|event| event.page < trace.header.region_pages));
    assert!(trace.events.iter().all(|event| event.thread != 0));
    let mut again = Vec::new();
    trace.write(&mut again).expect("a vector takes all bytes");
    assert!(again.len() <= bytes.len(), "{} bytes became {}", bytes.len(), again.len());
    let again = Trace::decode(&again).expect("an encoded trace is valid");
    assert_eq!(again.events, trace.events);
    assert_eq!(again.header.one_zone_in, trace.header.one_zone_in);
}
