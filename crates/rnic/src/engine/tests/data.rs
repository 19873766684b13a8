//! READ, WRITE, atomics, SEND: what they move and what they report.

use super::*;
use crate::cqe;
use crate::ids::Access;
use crate::wqe::opcode;

#[test]
fn a_write_moves_bytes_and_completes() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let from = bed.mr(PF, a.pd, 4096, Access::NONE);
    let to = bed.mr(PF, b.pd, 4096, ALL);
    from.mem.write(100, b"hello, window");
    let cqe = bed.execute(&mut a, |w| {
        w.rdma_write(to.remote(200), &[from.sge(100, 5), from.sge(105, 8)]);
    });
    assert_eq!(to.bytes(200, 13), b"hello, window");
    assert_eq!((cqe.opcode, cqe.wqe_opcode), (cqe::opcode::REQ, opcode::RDMA_WRITE));
    assert_eq!((cqe.qpn, cqe.byte_count, cqe.wqe_counter), (a.qpn, 13, 0));
    assert_eq!(cqe.error, None);
}
