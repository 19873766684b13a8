//! Compares this crate's layouts and numbers with `infiniband/mlx5dv.h`: a C program compiled
//! against the header prints the header's definitions, and the test compares each line with this
//! crate's value.
//!
//! The header is in Debian's package `libibverbs-dev` (rdma-core). Without the header or a C
//! compiler the test is skipped (`needs`). The C program links to no library.
//!
//! The header does not define WAIT, SEND_EN, RECV_EN and their segment, or the masked
//! compare-and-swap segment. The test does not compare these.

#[path = "../../../tests/src/needs.rs"]
mod needs;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use verbs::cqe::{self, Syndrome};
use verbs::wqe::{self, Builder, Remote, Sge, Umr, UmrFlags, offset, opcode, umr};
use verbs::{Access, Key, Qpn};

/// A C expression, and this crate's value of it.
type Expectation = (String, u64);

fn size(of: &str, ours: usize) -> Expectation {
    (format!("sizeof(struct {of})"), ours as u64)
}

/// The offset of a field of a struct that begins at byte `start` of the WQE; `ours` is its offset
/// in the WQE.
fn field(of: &str, name: &str, start: usize, ours: usize) -> Expectation {
    (format!("offsetof(struct {of}, {name})"), (ours - start) as u64)
}

fn value(expression: &str, ours: impl Into<u64>) -> Expectation {
    (expression.to_string(), ours.into())
}

fn expectations() -> Vec<Expectation> {
    // Offsets of segments in WQEs: the second segment of any WQE, and the segments of a UMR.
    let (second, umr_ctrl, mkey, klm) = (16, 16, 64, 128);
    let (ctrl, raddr, data) = ("mlx5_wqe_ctrl_seg", "mlx5_wqe_raddr_seg", "mlx5_wqe_data_seg");
    let (atomic, uctrl) = ("mlx5_wqe_atomic_seg", "mlx5_wqe_umr_ctrl_seg");
    let (context, klm_seg) = ("mlx5_wqe_mkey_context_seg", "mlx5_wqe_umr_klm_seg");
    let (ok, err) = ("mlx5_cqe64", "mlx5_err_cqe");
    vec![
        // Segments of WQEs.
        size(ctrl, wqe::SEGMENT),
        field(ctrl, "qpn_ds", 0, offset::QPN),
        field(ctrl, "fm_ce_se", 0, 11),
        field(ctrl, "imm", 0, offset::UMR_KEY_INDEX),
        size(raddr, wqe::SEGMENT),
        field(raddr, "raddr", second, offset::REMOTE_ADDR),
        field(raddr, "rkey", second, offset::REMOTE_KEY),
        size(data, wqe::SEGMENT),
        field(data, "byte_count", 0, 0),
        field(data, "lkey", 0, 4),
        field(data, "addr", 0, 8),
        size("mlx5_wqe_inl_data_seg", 4),
        size(atomic, wqe::SEGMENT),
        field(atomic, "swap_add", offset::RDMA_SGE, offset::ATOMIC_ADD),
        field(atomic, "compare", offset::RDMA_SGE, offset::ATOMIC_COMPARE),
        size(uctrl, mkey - umr_ctrl),
        field(uctrl, "flags", umr_ctrl, umr::FLAGS),
        field(uctrl, "klm_octowords", umr_ctrl, umr::KLM_OCTOWORDS),
        field(uctrl, "mkey_mask", umr_ctrl, umr::MKEY_MASK),
        size(context, klm - mkey),
        field(context, "free", mkey, umr::FREE),
        field(context, "access_flags", mkey, umr::ACCESS),
        field(context, "qpn_mkey", mkey, umr::QPN),
        field(context, "start_addr", mkey, umr::START),
        field(context, "len", mkey, umr::LENGTH),
        size(klm_seg, wqe::SEGMENT),
        field(klm_seg, "byte_count", klm, umr::KLM_BYTES),
        field(klm_seg, "mkey", klm, umr::KLM_LKEY),
        field(klm_seg, "address", klm, umr::KLM_ADDR),
        // Numbers in WQEs.
        value("MLX5_SEND_WQE_BB", wqe::WQEBB as u64),
        value("(uint32_t)MLX5_INLINE_SEG", wqe::INLINE),
        value("MLX5_INVALID_LKEY", wqe::INVALID_LKEY.0),
        value("MLX5_WQE_CTRL_CQ_UPDATE", wqe::CE_SIGNALED),
        value("MLX5_WQE_CTRL_SOLICITED", wqe::SE_SOLICITED),
        value("MLX5_WQE_CTRL_FENCE", wqe::FM_FENCE),
        value("MLX5_OPCODE_NOP", opcode::NOP),
        value("MLX5_OPCODE_SEND_INVAL", opcode::SEND_INVAL),
        value("MLX5_OPCODE_RDMA_WRITE", opcode::RDMA_WRITE),
        value("MLX5_OPCODE_RDMA_WRITE_IMM", opcode::RDMA_WRITE_IMM),
        value("MLX5_OPCODE_SEND", opcode::SEND),
        value("MLX5_OPCODE_SEND_IMM", opcode::SEND_IMM),
        value("MLX5_OPCODE_RDMA_READ", opcode::RDMA_READ),
        value("MLX5_OPCODE_ATOMIC_CS", opcode::ATOMIC_CS),
        value("MLX5_OPCODE_ATOMIC_FA", opcode::ATOMIC_FA),
        value("MLX5_OPCODE_ATOMIC_MASKED_CS", opcode::ATOMIC_MASKED_CS),
        value("MLX5_OPCODE_ATOMIC_MASKED_FA", opcode::ATOMIC_MASKED_FA),
        value("MLX5_OPCODE_LOCAL_INVAL", opcode::LOCAL_INVAL),
        value("MLX5_OPCODE_UMR", opcode::UMR),
        value("MLX5_WQE_UMR_CTRL_FLAG_INLINE", UmrFlags::INLINE.0),
        value("MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE", UmrFlags::CHECK_FREE.0),
        value("MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET", UmrFlags::TRANSLATION_OFFSET.0),
        value("MLX5_WQE_UMR_CTRL_FLAG_CHECK_QPN", UmrFlags::CHECK_QPN.0),
        value("MLX5_WQE_UMR_CTRL_MKEY_MASK_LEN", umr::MASK_LEN),
        value("MLX5_WQE_UMR_CTRL_MKEY_MASK_START_ADDR", umr::MASK_START),
        value("MLX5_WQE_UMR_CTRL_MKEY_MASK_MKEY", umr::MASK_MKEY),
        value("MLX5_WQE_UMR_CTRL_MKEY_MASK_QPN", umr::MASK_QPN),
        value(
            "MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_LOCAL_WRITE \
             | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_READ \
             | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_WRITE \
             | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_ATOMIC",
            umr::MASK_ACCESS,
        ),
        value("MLX5_WQE_UMR_CTRL_MKEY_MASK_FREE", umr::MASK_FREE),
        value("MLX5_WQE_MKEY_CONTEXT_FREE", umr::FREE_BIT),
        value("MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_LOCAL_READ", Access::LOCAL_READ.0),
        value("MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_LOCAL_WRITE", Access::LOCAL_WRITE.0),
        value("MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_READ", Access::REMOTE_READ.0),
        value("MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_WRITE", Access::REMOTE_WRITE.0),
        value("MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_ATOMIC", Access::REMOTE_ATOMIC.0),
        // CQEs.
        size(ok, cqe::CQE),
        field(ok, "srqn_uidx", 0, cqe::offset::SRQN),
        field(ok, "imm_inval_pkey", 0, cqe::offset::IMM),
        field(ok, "byte_cnt", 0, cqe::offset::BYTE_COUNT),
        field(ok, "timestamp", 0, cqe::offset::TIMESTAMP),
        field(ok, "sop_drop_qpn", 0, cqe::offset::OPCODE_QPN),
        field(ok, "wqe_counter", 0, cqe::offset::WQE_COUNTER),
        field(ok, "op_own", 0, cqe::offset::OP_OWN),
        size(err, cqe::CQE),
        field(err, "srqn", 0, cqe::offset::SRQN),
        field(err, "vendor_err_synd", 0, cqe::offset::VENDOR_ERROR),
        field(err, "syndrome", 0, cqe::offset::SYNDROME),
        field(err, "s_wqe_opcode_qpn", 0, cqe::offset::OPCODE_QPN),
        field(err, "wqe_counter", 0, cqe::offset::WQE_COUNTER),
        field(err, "op_own", 0, cqe::offset::OP_OWN),
        value("MLX5_CQE_OWNER_MASK", cqe::OWNER),
        value("MLX5_CQE_REQ", cqe::opcode::REQ),
        value("MLX5_CQE_RESP_WR_IMM", cqe::opcode::RESP_WR_IMM),
        value("MLX5_CQE_RESP_SEND", cqe::opcode::RESP_SEND),
        value("MLX5_CQE_RESP_SEND_IMM", cqe::opcode::RESP_SEND_IMM),
        value("MLX5_CQE_RESP_SEND_INV", cqe::opcode::RESP_SEND_INV),
        value("MLX5_CQE_REQ_ERR", cqe::opcode::REQ_ERR),
        value("MLX5_CQE_RESP_ERR", cqe::opcode::RESP_ERR),
        value("MLX5_CQE_INVALID", cqe::opcode::INVALID),
        value("MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR", Syndrome::LocalLength as u8),
        value("MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR", Syndrome::LocalQpOperation as u8),
        value("MLX5_CQE_SYNDROME_LOCAL_PROT_ERR", Syndrome::LocalProtection as u8),
        value("MLX5_CQE_SYNDROME_WR_FLUSH_ERR", Syndrome::Flushed as u8),
        value("MLX5_CQE_SYNDROME_MW_BIND_ERR", Syndrome::MwBind as u8),
        value("MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR", Syndrome::RemoteInvalidRequest as u8),
        value("MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR", Syndrome::RemoteAccess as u8),
        value("MLX5_CQE_SYNDROME_REMOTE_OP_ERR", Syndrome::RemoteOperation as u8),
        value("MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR", Syndrome::RetryExceeded as u8),
        value("MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR", Syndrome::RnrRetryExceeded as u8),
    ]
}

/// WQEs that the C program builds with the header's functions and structs, and the same WQEs by
/// this crate: name, C statements that fill `w`, this crate's bytes.
fn encodings() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let built = |fill: &dyn Fn(&mut Builder)| {
        let mut b = Builder::new(Qpn::new(0x123456), 0xabcd);
        fill(&mut b);
        b.bytes().to_vec()
    };
    let sge = Sge { addr: 0x1122_3344_5566_7788, len: 0x1000, lkey: Key(0xaabb_ccdd) };
    let at = Remote { addr: 0x0102_0304_0506_0708, rkey: Key(0xdead_beef) };
    let umr = Umr::bind(
        Key(0x0077_7711),
        0x12,
        Qpn::new(0x654321),
        Access::REMOTE_ALL,
        Key(0x0088_8822),
        0x7000_0000_1000,
        4096,
    );
    vec![
        (
            "WRITE",
            "ctrl(MLX5_OPCODE_RDMA_WRITE, MLX5_WQE_CTRL_CQ_UPDATE, 3, 0); raddr(w + 16);
             data(w + 32);",
            built(&|b| _ = b.rdma_write(at, &[sge]).signaled()),
        ),
        (
            "SEND",
            "ctrl(MLX5_OPCODE_SEND, 0, 3, 0); data(w + 16); data(w + 32);",
            built(&|b| _ = b.send(&[sge, sge])),
        ),
        (
            "CAS",
            "ctrl(MLX5_OPCODE_ATOMIC_CS, 0, 4, 0); raddr(w + 16);
             struct mlx5_wqe_atomic_seg *a = (void *)(w + 32);
             a->swap_add = htobe64(0x55); a->compare = htobe64(0x66);
             data(w + 48);",
            built(&|b| _ = b.compare_swap(at, 0x66, 0x55, sge)),
        ),
        (
            "UMR",
            "ctrl(MLX5_OPCODE_UMR, 0, 12, htobe32(0x00777711));
             struct mlx5_wqe_umr_ctrl_seg *u = (void *)(w + 16);
             u->flags = MLX5_WQE_UMR_CTRL_FLAG_INLINE | MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET
                 | MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE;
             u->klm_octowords = htobe16(4);
             u->mkey_mask = htobe64(MLX5_WQE_UMR_CTRL_MKEY_MASK_LEN
                 | MLX5_WQE_UMR_CTRL_MKEY_MASK_START_ADDR | MLX5_WQE_UMR_CTRL_MKEY_MASK_MKEY
                 | MLX5_WQE_UMR_CTRL_MKEY_MASK_QPN | MLX5_WQE_UMR_CTRL_MKEY_MASK_FREE
                 | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_LOCAL_WRITE
                 | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_READ
                 | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_WRITE
                 | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_ATOMIC);
             struct mlx5_wqe_mkey_context_seg *m = (void *)(w + 64);
             m->access_flags = MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_READ
                 | MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_WRITE
                 | MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_ATOMIC;
             m->qpn_mkey = htobe32(0x65432112);
             m->start_addr = htobe64(0x700000001000); m->len = htobe64(4096);
             struct mlx5_wqe_umr_klm_seg *k = (void *)(w + 128);
             k->byte_count = htobe32(4096); k->mkey = htobe32(0x00888822);
             k->address = htobe64(0x700000001000);",
            built(&|b| _ = b.umr(&umr)),
        ),
    ]
}

const PRELUDE: &str = "#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <infiniband/mlx5dv.h>
static uint8_t w[1024];
static void ctrl(uint8_t op, uint8_t ce, uint8_t ds, uint32_t imm) {
    memset(w, 0, sizeof w);
    mlx5dv_set_ctrl_seg((void *)w, 0xabcd, op, 0, 0x123456, ce, ds, 0, imm);
}
static void raddr(uint8_t *at) {
    struct mlx5_wqe_raddr_seg *r = (void *)at;
    r->raddr = htobe64(0x0102030405060708);
    r->rkey = htobe32(0xdeadbeef);
}
static void data(uint8_t *at) {
    mlx5dv_set_data_seg((void *)at, 0x1000, 0xaabbccdd, 0x1122334455667788);
}
int main(void) {
";

fn program() -> String {
    let mut c = String::from(PRELUDE);
    for (expression, _) in expectations() {
        c += &format!(
            "printf(\"%s=%llu\\n\", \"{expression}\", (unsigned long long)({expression}));\n"
        );
    }
    for (name, fill, bytes) in encodings() {
        let n = bytes.len();
        c += &format!(
            "{{ {fill}\nprintf(\"{name}=\"); \
             for (int i = 0; i < {n}; i++) printf(\"%02x\", w[i]); puts(\"\"); }}\n"
        );
    }
    c + "return 0;\n}\n"
}

/// Compiles and runs the C program. An error is the reason for which the test must be skipped.
fn run(dir: &Path) -> Result<String, String> {
    let (source, binary) = (dir.join("mlx5dv.c"), dir.join("mlx5dv"));
    std::fs::write(&source, program()).expect("the test's directory is writable");
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(&cc)
        .args(["-std=gnu11", "-w", "-o"])
        .args([&binary, &source])
        .output()
        .map_err(|e| format!("the C compiler `{cc}` does not start ({e}); install gcc"))?;
    let messages = String::from_utf8_lossy(&built.stderr);
    if messages.contains("infiniband/mlx5dv.h") && messages.contains("No such file") {
        return Err("infiniband/mlx5dv.h is missing; install libibverbs-dev (Debian)".into());
    }
    assert!(built.status.success(), "the program does not compile:\n{messages}");
    let ran = Command::new(&binary).output().expect("a compiled program starts");
    assert!(ran.status.success());
    Ok(String::from_utf8(ran.stdout).expect("the program prints ASCII"))
}

#[test]
fn layouts_and_numbers_match_mlx5dv_header() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let printed = match run(dir) {
        Ok(printed) => printed,
        Err(why) => return needs::skip(format!("cannot compare with mlx5dv.h: {why}")),
    };
    let lines: BTreeMap<&str, &str> =
        printed.lines().map(|l| l.rsplit_once('=').expect("name=value")).collect();
    let (expected, encoded) = (expectations(), encodings());
    assert_eq!(lines.len(), expected.len() + encoded.len(), "one line each");
    let mut wrong = Vec::new();
    for (expression, ours) in &expected {
        let theirs = lines[expression.as_str()];
        if theirs != ours.to_string() {
            wrong.push(format!("{expression} is {theirs} in the header, {ours} in this crate"));
        }
    }
    for (name, _, bytes) in encoded {
        let ours: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        if lines[name] != ours {
            wrong.push(format!("{name}:\n  header      {}\n  this crate  {ours}", lines[name]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
