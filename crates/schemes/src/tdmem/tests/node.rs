//! The memory node: admission, departure, numbers of owners, bulletins.

use std::sync::atomic::Ordering;

use super::member::*;
use super::*;
use crate::tdmem::Node;
use crate::tdmem::layout::CONTROL_BYTES;
use rnic::nic::SoftNic;
use scheme::{ClientScheme, Error, NodeScheme};
use verbs::{Caps, MemoryRegion, Nic};

#[test]
fn nic_without_region_engines_is_refused_by_name() {
    let whole = SoftNic::inline().caps();
    assert!(crate::TDMEM.check_caps(&whole).is_ok());
    let why = crate::TDMEM.check_caps(&Caps { features: &[], ..whole }).unwrap_err().to_string();
    assert!(why.contains("regions behind an engine"), "{why}");
}

#[test]
fn foreign_load_breaks_only_its_sender() {
    let settings = settings(8);
    let (nic, node) = start(&settings);
    let (bad, good) =
        (Member::join(&nic, &node, &settings, 1), Member::join(&nic, &node, &settings, 2));
    let (mine, theirs) = (bad.allocate(), good.allocate());
    bad.write(&mine, 1).unwrap();
    good.write(&theirs, 2).unwrap();
    // The memory node takes the page away, as if the client had an old address.
    let page = page_of(&node, bad.region.owner);
    node.lock().tables().set_owner(page, good.region.owner);
    assert!(matches!(bad.read(&mine), Err(Error::ManagementBroken { .. })));
    assert!(!node.lock().management_is_open(bad.id).unwrap());
    assert_eq!(good.read(&theirs).unwrap(), 2);
    bad.reconnect();
    assert!(node.lock().management_is_open(bad.id).unwrap());
    bad.write(&bad.allocate(), 3).unwrap();
}

fn page_of(node: &Shared, owner: Owner) -> u32 {
    let node = node.lock();
    (0..node.layout().pages).find(|page| node.tables().owner(*page) == owner).unwrap()
}

#[test]
fn departure_frees_pages_and_slots_before_the_number_is_reused() {
    let settings = settings(100);
    let (nic, node) = start(&settings);
    for round in 1..=4 {
        let members = [1, 2, 3].map(|id| Member::join(&nic, &node, &settings, 10 * round + id));
        let owners = [0, 1, 2].map(|i| members[i].region.owner);
        assert!(owners.iter().all(|owner| (1..=3).contains(owner)) && owners[0] != owners[1]);
        let next = Member::join_with(&nic, &node, &settings, 99, &Default::default());
        assert!(matches!(next.err().unwrap(), Error::Refused { .. }), "three numbers");
        for (member, value) in members.iter().zip(1..) {
            for _ in 0..33 {
                member.write(&member.allocate(), value).unwrap();
            }
        }
        assert_eq!(node.lock().status().unwrap().free, 1);
        let [first, second, third] = members;
        node.lock().retire(first.id).unwrap();
        assert!(!node.lock().is_retired(first.id), "33 pages take more than one slice");
        let next = Member::join_with(&nic, &node, &settings, 98, &Default::default());
        assert!(next.is_err(), "the number is in use until its pages are free");
        assert!(matches!(first.read(&grant_of(&first)), Err(Error::ManagementBroken { .. })));
        retire(&node, second.id);
        while !node.lock().is_retired(first.id) {
            node.lock().poll().unwrap();
        }
        assert_eq!(node.lock().status().unwrap().free, 67);
        node.lock().audit().unwrap();
        check_slots(&node, &[first.region.owner, second.region.owner]);
        retire(&node, third.id);
        assert_eq!(node.lock().status().unwrap().free, 100);
        assert_eq!(
            node.lock().tables().counts.reclaimed.load(Ordering::Relaxed),
            99 * u64::from(round)
        );
    }
    let node = node.lock();
    let (first, len) = (node.layout().page(0) as usize, 100 * PAGE_BYTES);
    let mut pages = vec![1; len];
    node.memory().read(first, &mut pages);
    assert!(pages.iter().all(|byte| *byte == 0), "pages are not clear");
}

/// The first grant of a member.
fn grant_of(member: &Member) -> scheme::Grant {
    scheme::Grant::new(0, PAGE_BYTES as u64, 0.into(), scheme::GroupId(0), &[])
        .with_connection(scheme::ConnectionEpoch { incarnation: 0, client: member.id.0 })
}

/// Checks that the slots of owners are clear.
fn check_slots(node: &Shared, owners: &[Owner]) {
    let node = node.lock();
    let layout = node.layout();
    for owner in owners {
        let slot = layout.first_slot(Peer::Donee(*owner));
        for (at, bytes) in [
            (layout.data(slot), u64::from(layout.slots) * PAGE_BYTES as u64),
            (layout.command(slot), u64::from(layout.slots) * CONTROL_BYTES),
        ] {
            let mut content = vec![1; bytes as usize];
            node.memory().read(at as usize, &mut content);
            assert!(content.iter().all(|byte| *byte == 0), "a slot of owner {owner} is not clear");
        }
    }
}

#[test]
fn availability_is_broadcast() {
    let settings = settings(2);
    let (nic, node) = start(&settings);
    let (a, b) = (Member::join(&nic, &node, &settings, 1), Member::join(&nic, &node, &settings, 2));
    let held = [a.allocate(), a.allocate()];
    held.iter().for_each(|grant| a.write(grant, 1).unwrap());
    let wanted = b.allocate();
    assert!(matches!(b.write(&wanted, 2), Err(Error::OutOfMemory { .. })));
    assert!(node.lock().client_waits(b.id).unwrap() && node.lock().is_watching());
    assert_eq!(b.bulletin.memory().load_be64(0) >> 32, u64::from(scheme::bulletin::EMPTY));
    assert!(!node.lock().poll().unwrap());
    a.free(&held[0]).unwrap();
    assert!(node.lock().poll().unwrap() && !node.lock().is_watching());
    assert_eq!(b.bulletin.memory().load_be64(0) >> 32, u64::from(scheme::bulletin::AVAILABLE));
    assert!(!node.lock().client_waits(b.id).unwrap());
    b.write(&wanted, 2).unwrap();
    assert_eq!(b.read(&wanted).unwrap(), 2);
}

#[test]
fn status_counts_draws_and_frees() {
    let settings = settings(8);
    let (nic, node) = start(&settings);
    let member = Member::join(&nic, &node, &settings, 1);
    let grants = [member.allocate(), member.allocate()];
    grants.iter().for_each(|grant| member.write(grant, 1).unwrap());
    member.write(&grants[0], 2).unwrap();
    member.free(&grants[0]).unwrap();
    let status = node.lock().status().unwrap();
    assert_eq!((status.allocations_nic, status.frees_nic, status.free), (3, 2, 7));
    assert_eq!((status.clients, status.refused, status.chunks), (1, 0, 8));
    retire(&node, member.id);
    let status = node.lock().status().unwrap();
    assert_eq!((status.frees_nic, status.frees_cpu, status.free, status.clients), (2, 1, 8, 0));
    let gone = node.lock().reset_management(member.id);
    assert!(matches!(gone, Err(Error::Refused { .. })));
    let _ = member.client.management();
}

#[test]
fn memory_is_that_of_the_settings() {
    let node = Node::new(SoftNic::inline(), settings(5)).unwrap();
    let layout = node.layout();
    assert_eq!((layout.owners, layout.slots, layout.pages), (3, 4, 5));
    assert_eq!(node.memory().len() as u64, layout.bytes());
}
