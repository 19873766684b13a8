//! Decoding of WQEs.

use verbs::wqe::umr::Umr;
use verbs::wqe::{Builder, Control, MAX_BYTES, SEGMENT, Sges, Wqe, decode};

/// Decodes `bytes` as the engine does: the part that the control segment specifies.
pub fn run(bytes: &[u8]) {
    let mut wqe = [0; MAX_BYTES];
    let len = bytes.len().min(MAX_BYTES);
    wqe[..len].copy_from_slice(&bytes[..len]);
    let ctrl = Control::from_bytes(wqe.first_chunk().expect("more than a segment"));
    // Also with fewer bytes than the control segment specifies.
    let _ = decode(&ctrl, bytes);
    assert!((1..=16).contains(&ctrl.blocks()), "{} blocks", ctrl.blocks());
    let named = ctrl.ds as usize * SEGMENT;
    match decode(&ctrl, &wqe) {
        Ok(Wqe::Send { from, .. } | Wqe::Write { from, .. }) => list(from, named),
        Ok(Wqe::Read { to, .. }) => list(to, named),
        Ok(Wqe::Umr(umr)) => {
            let once = again(&umr);
            assert_eq!(again(&once), once);
        }
        Ok(_) | Err(_) => {}
    }
}

/// Encodes `umr` and decodes the result.
fn again(umr: &Umr) -> Umr {
    let mut builder = Builder::new(umr.qpn, 0);
    builder.umr(umr);
    let bytes = builder.bytes();
    let ctrl = Control::from_bytes(bytes.first_chunk().expect("a WQE"));
    match decode(&ctrl, bytes) {
        Ok(Wqe::Umr(umr)) => umr,
        other => panic!("{umr:?} became {other:?}"),
    }
}

fn list(sges: Sges<'_>, named: usize) {
    let sum: u64 = sges.iter().map(|sge| sge.len as u64).sum();
    match sges {
        Sges::List(_) => assert_eq!(sum, sges.total_len()),
        Sges::Inline(data) => {
            assert_eq!(sges.total_len(), data.len() as u64);
            assert!(data.len() <= named);
        }
    }
    for sge in sges.iter() {
        assert_ne!(sge.len, 0);
        assert_eq!(verbs::wqe::Sge::from_bytes(&sge.to_bytes()), sge);
    }
}
