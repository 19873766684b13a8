//! Tests of a compute node's belief in its leases.

use rnic::nic::SoftNic;
use scheme::{NodeScheme, NodeSettings};

use super::*;
use crate::patronus::{Node, PATRONUS};

fn client() -> Client<SoftNic> {
    let settings = NodeSettings::new(PATRONUS, 64, 4096);
    let nic = SoftNic::inline();
    let node = Node::new(&nic, &settings).unwrap();
    let offer = Offer::new(&settings, 1, node.terms());
    Client::new(&nic, &nic.alloc_pd().unwrap(), &offer).unwrap()
}

/// The result of an extension that a renewal has overtaken belongs to the former lease.
#[test]
fn extension_of_the_former_lease_does_not_extend_the_renewed_one() {
    let client = client();
    let (former, renewed) = (PermissionNumber::new(1, 0), PermissionNumber::new(2, 0));
    let until = Duration::from_secs(10);
    let grant = Grant::new(0, 64, EntryId::new(0), GroupId(0), &[]).leased(Right::Write, until);
    let lease = |number: PermissionNumber| Lease {
        grant,
        number: number.0,
        slot: 0,
        word: Lifetime::new(number.nonce(), 1_000_000).0,
        header: None,
        since: Duration::from_secs(9),
        ended: false,
    };
    let object = Object { incarnation: 0, entry: 0, generation: 0, len: 64, node: 0 };
    let terms = LeaseTerms::exclusive(Duration::from_secs(1));
    let permission = Permission::new(object, terms, lease(renewed));
    let extended = Lifetime::new(former.nonce(), 60_000_000);
    assert!(!client.note_lifetime(&permission, &lease(former), extended));
    let after = permission.lease();
    assert_eq!((after.grant.until, after.word), (until, lease(renewed).word));

    let extended = Lifetime::new(renewed.nonce(), 60_000_000);
    assert!(client.note_lifetime(&permission, &lease(renewed), extended));
    assert!(permission.lease().grant.until > until);
}
