//! Devices, protection domains and regions (IBTA vol. 1, chapter 10, resource and memory
//! management).

use super::pair::{Pair, SHORT, Shape, bytes, pattern};
use super::{Bench, Case, always, never, with};
use crate::{
    Access, CompletionQueue, CqAttr, Error, Feature, Key, MemoryRegion, Nic, Op, QpAttr, Receive,
    Remote, Rereg, Sge, Status,
};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    use Feature::Rereg;
    vec![
        always(
            "device.limits",
            &["test_device.test_query_device", "test_device.test_query_device_ex"],
            device_limits,
        ),
        never(
            "device.ports_and_gids",
            &[
                "test_device.test_query_port",
                "test_device.test_query_gid",
                "test_device.test_query_pkey",
            ],
            "a function has no ports, GIDs or partition keys: the caller passes peer addresses",
        ),
        always(
            "pds.many",
            &["test_pd.test_alloc_pd", "test_pd.test_multiple_pd_creation"],
            many_pds,
        ),
        always("pds.end_with_their_last_user", &["test_pd.test_dealloc_pd"], pds_end_last),
        never(
            "pds.end_twice",
            &["test_pd.test_destroy_pd_twice"],
            "an object is destroyed once, when its last handle is dropped",
        ),
        always("pds.are_apart", &[], pds_are_apart),
        always("regions.rights", &[], region_rights),
        always("regions.range", &[], region_range),
        always("regions.end", &[], region_end),
        always("regions.overlap", &[], regions_overlap),
        with(Feature::ZeroBased, "regions.zero_based", &[], zero_based_region),
        with(
            Feature::RemoteNeedsLocalWrite,
            "regions.remote_write_needs_local_write",
            &["test_mr.test_reg_mr_bad_flags", "test_mr.test_reg_mrex_bad_flags"],
            remote_write_needs_local_write,
        ),
        with(
            Rereg,
            "regions.change_memory",
            &["test_mr.test_mr_rereg_addr", "test_mr.test_mrex_rereg_addr"],
            change_memory,
        ),
        with(
            Rereg,
            "regions.change_rights",
            &[
                "test_mr.test_mr_rereg_access",
                "test_mr.test_mrex_rereg_access",
                "test_mr.test_mr_rereg_access_bad_flow",
            ],
            change_rights,
        ),
        with(
            Rereg,
            "regions.change_atomic_right",
            &["test_mr.test_mr_rereg_atomic"],
            change_atomic_right,
        ),
        with(Rereg, "regions.change_pd", &["test_mr.test_mr_rereg_pd"], change_pd),
        never(
            "regions.of_devices",
            &[
                "test_mr.DeviceMemoryAPITest",
                "test_mr.DeviceMemoryTest",
                "test_mr.DmaBufMRTest",
                "test_mr.DmaBufTestCase",
                "test_mr.test_reg_mrex_inval_params",
            ],
            "only memory from alloc_dma can be registered: no device memory, dma-buf or extended \
             registration",
        ),
        never(
            "regions.relaxed_ordering",
            &["test_relaxed_ordering.test_ro_rc_traffic"],
            "relaxed ordering does not exist: accesses are always ordered",
        ),
    ]
}

fn device_limits<B: Bench>(bench: &B) {
    for nic in [bench.client(), bench.server()] {
        let info = nic.query_device().expect("limits");
        let caps = nic.caps();
        for limit in [info.pds, info.qps, info.cqs, info.keys] {
            assert!(limit > 0, "{info:?}");
        }
        assert!(info.registered_bytes > 4096 && info.ring_bytes > 4096, "{info:?}");
        assert!(info.send_blocks >= caps.max_queue && info.sges >= caps.max_sges, "{info:?}");
        assert!(info.rdma_bytes >= 1 << 20 && info.send_bytes >= 4096, "{info:?}");
        assert!(caps.max_inline >= 64 && caps.max_sges >= 2, "{caps:?}");
    }
}

fn many_pds<B: Bench>(bench: &B) {
    let nic = bench.client();
    for _ in 0..3 {
        let pds: Vec<_> = (0..10).map(|_| nic.alloc_pd().expect("a PD")).collect();
        drop(pds);
    }
}

fn pds_end_last<B: Bench>(bench: &B) {
    let nic = bench.client();
    let cq = nic.create_cq(CqAttr { entries: 4, ignore_overrun: false }).expect("a CQ");
    // More than the limit in total. Each PD ends although the object in it is dropped after the
    // PD's handle.
    let limit = nic.query_device().expect("limits").pds.min(200);
    for _ in 0..limit + 10 {
        let pd = nic.alloc_pd().expect("PDs end with their last user");
        let memory = nic.alloc_dma(4096).expect("memory");
        let mr = nic.reg_mr(&pd, &memory, Access::LOCAL_ALL).expect("a region");
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: 1,
            receive: Receive::None,
            access: Access::NONE,
        };
        let qp = nic.create_qp(&pd, attr).expect("a QP");
        drop(pd);
        drop((qp, mr));
    }
}

fn pds_are_apart<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let other = super::End::new(&p.server.nic, &Shape::default());
    p.refused(Op::WriteInline { to: other.at(0), data: &[1] }, Status::RemoteAccess);
    assert_eq!(other.get(0, 1), [0]);
    let mine = super::End::new(&p.client.nic, &Shape::default());
    let c = p.client.run(Op::Write { to: p.server.at(0), from: &[mine.sge(0, 8)] });
    assert_eq!(c.status, Status::LocalProtection);
}

fn region_rights<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let remote = [Access::REMOTE_READ, Access::REMOTE_WRITE];
    for granted in remote {
        let region = p.server.region(4096, Access::LOCAL_ALL | granted);
        let list = [p.client.sge(0, 8)];
        let ops = [
            (Access::REMOTE_READ, Op::Read { from: region.remote(0), to: &list }),
            (Access::REMOTE_WRITE, Op::Write { to: region.remote(0), from: &list }),
        ];
        for (asked, op) in ops {
            match granted == asked {
                true => _ = p.client.ok(op),
                false => p.refused(op, Status::RemoteAccess),
            }
        }
    }
    // Locally: a READ and a received SEND write memory, which needs local write access.
    let fixed = p.client.region(4096, Access::LOCAL_READ);
    p.client.ok(Op::Write { to: p.server.at(0), from: &[fixed.sge(0, 8)] });
    let c = p.client.run(Op::Read { from: p.server.at(0), to: &[fixed.sge(0, 8)] });
    assert_eq!(c.status, Status::LocalProtection);
    p.connect();
    p.client.receive(4, &[fixed.sge(0, 8)]);
    assert_eq!(p.server.run(Op::SendInline { data: &[1] }).status, Status::RemoteOperation);
    let c = p.client.next();
    assert_eq!((c.id, c.status), (4, Status::LocalProtection));
}

fn region_range<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let len = p.server.mr.memory().len();
    let last = p.server.at(len - 8);
    p.client.ok(Op::WriteInline { to: last, data: &[3; 8] });
    assert_eq!(p.server.get(len - 8, 8), [3; 8]);
    let first = p.server.at(0).addr;
    for addr in [last.addr + 1, first.wrapping_sub(1), last.addr + 8, u64::MAX - 3, 0] {
        let to = Remote { addr, ..last };
        p.refused(Op::WriteInline { to, data: &[9; 8] }, Status::RemoteAccess);
    }
    assert_eq!(p.server.get(len - 8, 8), [3; 8]);
    let beyond = Sge {
        addr: p.client.sge(0, 0).addr + p.client.mr.memory().len() as u64 - 7,
        ..p.client.sge(0, 8)
    };
    let c = p.client.run(Op::Write { to: p.server.at(0), from: &[beyond] });
    assert_eq!(c.status, Status::LocalProtection);
    let p = Pair::new(bench);
    let empty = p.server.mr.memory().slice(0, 0).expect("a slice");
    assert!(p.server.nic.reg_mr(&p.server.pd, &empty, Access::LOCAL_ALL).is_err());
}

fn region_end<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let region = p.server.region(4096, Access::LOCAL_ALL | Access::REMOTE_ALL);
    let to = region.remote(0);
    p.client.ok(Op::WriteInline { to, data: &[1] });
    drop(region);
    p.refused(Op::WriteInline { to, data: &[1] }, Status::RemoteAccess);
    // A region that reuses the slot has a different key.
    let region = p.server.region(4096, Access::LOCAL_ALL | Access::REMOTE_ALL);
    assert_ne!(region.key(), to.rkey);
    p.refused(Op::WriteInline { to, data: &[1] }, Status::RemoteAccess);
    for key in [Key(0), Key(u32::MAX), Key(0x100)] {
        let to = Remote { rkey: key, ..p.server.at(0) };
        p.refused(Op::WriteInline { to, data: &[1] }, Status::RemoteAccess);
    }
}

fn regions_overlap<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let memory = p.server.mr.memory().slice(4096, 8192).expect("a part");
    let readable = Access::LOCAL_ALL | Access::REMOTE_READ;
    let second = p.server.nic.reg_mr(&p.server.pd, &memory, readable).expect("a second region");
    p.client.ok(Op::WriteInline { to: p.server.at(4096), data: &[5; 16] });
    p.client.ok(Op::Read { from: second.remote(0), to: &[p.client.sge(0, 16)] });
    assert_eq!(p.client.get(0, 16), [5; 16]);
    p.refused(Op::WriteInline { to: second.remote(0), data: &[6] }, Status::RemoteAccess);
    drop(second);
    p.client.ok(Op::WriteInline { to: p.server.at(4096), data: &[7; 16] });
}

fn zero_based_region<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let access = Access::LOCAL_ALL | Access::REMOTE_ALL;
    let region = |end: &super::End<B::Nic>| {
        let memory = end.nic.alloc_dma(4096).expect("memory");
        end.nic.reg_mr_iova(&end.pd, &memory, 0, access).expect("a zero-based region")
    };
    let (mine, theirs) = (region(&p.client), region(&p.server));
    assert_eq!((mine.iova(), theirs.remote(40).addr), (0, 40));
    let data = pattern(3, 100);
    mine.memory().write(10, &data);
    p.client.ok(Op::Write { to: theirs.remote(20), from: &[mine.sge(10, 100)] });
    assert_eq!(bytes(theirs.memory(), 20, 100), data);
    let host = Remote { addr: theirs.memory().addr(), rkey: theirs.key() };
    p.refused(Op::WriteInline { to: host, data: &[1] }, Status::RemoteAccess);
    let memory = p.server.nic.alloc_dma(4096).expect("memory");
    let odd = p.server.nic.reg_mr_iova(&p.server.pd, &memory, 4, access);
    assert!(matches!(odd, Err(Error::Refused { .. })), "words would not be aligned");
}

fn remote_write_needs_local_write<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let memory = p.server.nic.alloc_dma(4096).expect("memory");
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        assert!(p.server.nic.reg_mr(&p.server.pd, &memory, access).is_err(), "{access:?}");
    }
}

fn change_memory<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let region = p.server.region(4096, Access::LOCAL_ALL | Access::REMOTE_ALL);
    // A posted receive that names the old key can no longer be used.
    p.server.receive(1, &[region.sge(0, 64)]);
    let old = region.remote(0);
    let memory = p.server.nic.alloc_dma(8192).expect("memory");
    let change = Rereg { memory: Some(&memory), ..Rereg::default() };
    let region = p.server.nic.rereg_mr(region, change).expect("another place");
    assert_eq!(p.client.run(Op::SendInline { data: &[1] }).status, Status::RemoteOperation);
    assert_eq!(p.server.next().status, Status::LocalProtection);
    p.connect();
    p.refused(Op::WriteInline { to: old, data: &[1] }, Status::RemoteAccess);
    p.client.ok(Op::WriteInline { to: region.remote(8184), data: &[4; 8] });
    assert_eq!(bytes(&memory, 8184, 8), [4; 8]);
    p.server.receive(2, &[region.sge(0, 64)]);
    p.client.ok(Op::SendInline { data: &[8; 5] });
    assert_eq!((p.server.next().status, bytes(&memory, 0, 5)), (Status::Success, vec![8; 5]));
}

fn change_rights<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let region = p.server.region(4096, Access::LOCAL_ALL);
    p.refused(Op::WriteInline { to: region.remote(0), data: &[1] }, Status::RemoteAccess);
    let to = |access| Rereg { access: Some(access), ..Rereg::default() };
    let (nic, first) = (&p.server.nic, region.remote(0));
    let region = nic.rereg_mr(region, to(Access::LOCAL_ALL | Access::REMOTE_WRITE)).expect("more");
    p.refused(Op::WriteInline { to: first, data: &[1] }, Status::RemoteAccess);
    p.client.ok(Op::WriteInline { to: region.remote(0), data: &[2] });
    let old = region.remote(0);
    let region = nic.rereg_mr(region, to(Access::LOCAL_ALL)).expect("less");
    for to in [old, region.remote(0)] {
        p.refused(Op::WriteInline { to, data: &[3] }, Status::RemoteAccess);
    }
    assert_eq!(bytes(region.memory(), 0, 1), [2]);
    // While other handles exist, the region cannot be changed.
    let copy = region.clone();
    assert!(nic.rereg_mr(region, to(Access::LOCAL_ALL)).is_err());
    p.server.ok(Op::Write { to: p.client.at(0), from: &[copy.sge(0, 1)] });
}

fn change_atomic_right<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let with = Access::LOCAL_ALL | Access::REMOTE_ATOMIC;
    let region = p.server.region(4096, with);
    let old = p.client.sge(0, 8);
    let add = |region: &<B::Nic as Nic>::Mr| Op::FetchAdd { at: region.remote(0), add: 1, old };
    p.client.ok(add(&region));
    let to = |access| Rereg { access: Some(access), ..Rereg::default() };
    let region = p.server.nic.rereg_mr(region, to(Access::LOCAL_ALL)).expect("less");
    p.refused(add(&region), Status::RemoteAccess);
    let region = p.server.nic.rereg_mr(region, to(with)).expect("more");
    p.client.ok(add(&region));
    assert_eq!(bytes(region.memory(), 0, 8), p.server.word(2));
}

fn change_pd<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let region = p.server.region(4096, Access::LOCAL_ALL | Access::REMOTE_ALL);
    let receive = |region: &<B::Nic as Nic>::Mr| p.server.receive(1, &[region.sge(0, 64)]);
    receive(&region);
    p.client.ok(Op::SendInline { data: &[1] });
    p.server.next();
    let other = p.server.nic.alloc_pd().expect("a PD");
    let to = |pd| Rereg { pd: Some(pd), ..Rereg::default() };
    let region = p.server.nic.rereg_mr(region, to(&other)).expect("another PD");
    receive(&region);
    assert_eq!(p.client.run(Op::SendInline { data: &[2] }).status, Status::RemoteOperation);
    assert_eq!(p.server.next().status, Status::LocalProtection);
    p.connect();
    p.refused(Op::WriteInline { to: region.remote(0), data: &[3] }, Status::RemoteAccess);
    let region = p.server.nic.rereg_mr(region, to(&p.server.pd)).expect("back");
    receive(&region);
    p.client.ok(Op::SendInline { data: &[4] });
    assert_eq!(p.server.next().status, Status::Success);
    assert_eq!(bytes(region.memory(), 0, 1), [4]);
    assert!(!p.server.cq.wait(SHORT).expect("the NIC is there"));
}
