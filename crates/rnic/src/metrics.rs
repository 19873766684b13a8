//! Metrics of the NIC: the declarations of the counters in [`Stats`], [`WireStats`] and
//! [`HostStats`].
//!
//! The thread that runs the engine counts in plain words. They are copied when a report is
//! requested.

use metrics::{Declared, Metric, Samples, Unit, counter, declare};

use crate::port::shm::HostStats;
use crate::spec::Stats;
use crate::wire::WireStats;
use verbs::wqe::opcode;

/// Names of opcodes, as values of a label.
const OPCODES: [&str; 64] = {
    let mut names = [""; 64];
    names[opcode::NOP as usize] = "nop";
    names[opcode::SEND_INVAL as usize] = "send_inval";
    names[opcode::RDMA_WRITE as usize] = "write";
    names[opcode::RDMA_WRITE_IMM as usize] = "write_imm";
    names[opcode::SEND as usize] = "send";
    names[opcode::SEND_IMM as usize] = "send_imm";
    names[opcode::WAIT as usize] = "wait";
    names[opcode::RDMA_READ as usize] = "read";
    names[opcode::ATOMIC_CS as usize] = "cs";
    names[opcode::ATOMIC_FA as usize] = "fa";
    names[opcode::ATOMIC_MASKED_CS as usize] = "masked_cs";
    names[opcode::ATOMIC_MASKED_FA as usize] = "masked_fa";
    names[opcode::RECV_EN as usize] = "recv_en";
    names[opcode::SEND_EN as usize] = "send_en";
    names[opcode::LOCAL_INVAL as usize] = "local_inval";
    names[opcode::UMR as usize] = "umr";
    names
};

/// Names of [`crate::wire::packet::Malformed::ALL`], as values of a label.
const MALFORMED: [&str; crate::wire::packet::Malformed::ALL.len()] =
    ["short", "long", "version", "opcode", "partition", "pad", "payload", "syndrome"];

declare! {
    Stats {
        wqes: counter("nic_wqes", "WQEs executed without error.").per("opcode", &OPCODES),
        receives: counter("nic_receives", "Receive WQEs consumed."),
        completions: counter("nic_completions", "Completions written."),
        bytes: counter("nic_moved", "Bytes moved by READ, WRITE and SEND.").in_unit(Unit::Bytes),
        errors: counter("nic_errors", "WQEs that completed with an error."),
        flushed: counter("nic_flushed", "Send and receive WQEs that were flushed."),
        binds: counter("nic_binds", "Memory windows bound."),
        unbinds: counter("nic_unbinds", "Memory windows unbound."),
        rnr: counter("nic_rnr", "WQEs that found no receive WQE at the peer."),
    }
}

declare! {
    WireStats {
        packets_in: counter("nic_packets_received", "Packets received from other hosts."),
        packets_out: counter("nic_packets_sent", "Packets built for other hosts."),
        repeated: counter("nic_packets_repeated", "Of the packets built, retransmitted requests."),
        timeouts: counter("nic_timeouts", "Retransmission timeouts."),
        naks_out: counter("nic_naks_sent", "NAKs sent, RNR NAKs included."),
        naks_in: counter("nic_naks_received", "NAKs received, RNR NAKs included."),
        duplicates: counter("nic_duplicates", "Duplicate requests received."),
        ahead: counter("nic_dropped_ahead", "Requests dropped because they arrived behind a gap."),
        stray: counter(
            "nic_dropped_stray",
            "Responses dropped because they match no outstanding request."
        ),
        unknown_qp: counter(
            "nic_dropped_unknown_qp",
            "Packets dropped because their QP does not exist or is not connected to another NIC."
        ),
        strangers: counter(
            "nic_dropped_address",
            "Packets dropped because their address is not that of the QP or of its peer."
        ),
        bad_icrc: counter("nic_dropped_icrc", "Packets dropped because their ICRC is wrong."),
        forged: counter(
            "nic_dropped_forged",
            "Packets dropped because their authentication tag is wrong or missing."
        ),
        outdated: counter(
            "nic_dropped_outdated",
            "Packets dropped because they are replayed: right tag, old counter."
        ),
        guesses: counter(
            "nic_guesses",
            "Packets with a PSN far from the expected one, on connections without tags."
        ),
        shut_out: counter(
            "nic_dropped_guessed",
            "Packets dropped because their QP has received too many guesses or wrong tags."
        ),
        untimely: counter(
            "nic_dropped_untimely",
            "Packets dropped because their QP is in a state in which it accepts none."
        ),
        malformed: counter("nic_dropped_malformed", "Malformed packets dropped.")
            .per("reason", &MALFORMED),
    }
}

declare! {
    HostStats {
        unsent: counter(
            "nic_unsent",
            "Packets that the kernel did not accept for sending."
        ),
    } except { cpu, sleeps, scheduling, engine, wire }
}

/// The declarations of all counters that [`sample`] reports.
pub const METRICS: [&[Metric]; 3] = [Stats::METRICS, WireStats::METRICS, HostStats::METRICS];

/// Adds the counters of a NIC to a report, without CPU time and sleeps, which the memory node
/// reports with its own.
pub fn sample(stats: &HostStats, to: &mut Samples) {
    stats.engine.sample(to);
    stats.wire.sample(to);
    stats.sample(to);
}
