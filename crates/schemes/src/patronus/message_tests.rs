//! Tests of requests and replies as bytes.

use super::*;
use proptest::prelude::*;

fn terms() -> AskTerms {
    AskTerms {
        group: GroupId(3),
        right: Right::Read,
        sharing: Sharing::Exclusive,
        lease_us: 1 << 40,
        wait_us: u64::MAX,
    }
}

#[test]
fn requests_are_read_back() {
    let (object, permission) =
        (ObjectId { entry: 7, generation: u32::MAX }, PermissionNumber::new(1 << 39, 9));
    let asks = [
        Ask::Allocate { terms: terms(), bytes: 65, others: Others::Own },
        Ask::Acquire { terms: terms(), object, offset: 8, len: 1 << 50 },
        Ask::Renew { permission, lease_us: 5 },
        Ask::Revoke { permission },
        Ask::Free { object },
        Ask::FreeGrant { entry: 7, address: 1 << 63 },
        Ask::Extend { permission, lifetime_us: 12 },
    ];
    for ask in asks {
        let request = Request { number: 1 << 50, ask };
        assert_eq!(Request::parse(&request.to_bytes()), (request.number, Some(ask)));
    }
    assert_eq!(Request::parse(&[0; REQUEST_BYTES]), (0, None));
}

#[test]
fn replies_are_read_back() {
    let mut keys = [Key::default(); MAX_GROUP];
    keys[..2].copy_from_slice(&[Key(5), Key(6)]);
    let object = ObjectId { entry: 7, generation: 8 };
    let granted = Granted {
        object,
        permission: PermissionNumber::new(4, 65_535),
        address: 1 << 40,
        waited_us: 3,
        word: Lifetime::new(4, 100),
        lanes: 2,
        keys,
        header: None,
    };
    let mut published = Granted { header: Some(Remote { addr: 7, rkey: Key(9) }), ..granted };
    published.keys[1] = Key(5);
    let outcomes = [
        Outcome::Granted(granted),
        Outcome::Granted(published),
        Outcome::Extended(Lifetime::new(4, 200)),
        Outcome::Done,
        Outcome::Empty,
        Outcome::NoBlock,
        Outcome::NoSuchObject,
        Outcome::NotYours,
        Outcome::Expired,
        Outcome::NotExtendable,
        Outcome::Busy,
        Outcome::TooMany(Limit::Waiting, 8),
        Outcome::BadRequest,
        Outcome::Failed,
    ];
    for outcome in outcomes {
        let reply = Reply { number: 9, outcome, entry: EntryId::new(7) };
        assert_eq!(Reply::parse(&reply.to_bytes()), Some(reply));
    }
    assert_eq!(Reply::parse(&[0; REPLY_BYTES]), None);
}

proptest! {
    /// Any bytes are decoded without a panic, and a decoded message means the same again.
    #[test]
    fn any_bytes_are_decoded(request: [u8; 32], more: [u8; 32], reply: [u8; 32]) {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..32].copy_from_slice(&request);
        bytes[32..].copy_from_slice(&more);
        bytes[0] %= 9;
        if let (number, Some(ask)) = Request::parse(&bytes) {
            let again = Request { number, ask }.to_bytes();
            prop_assert_eq!(Request::parse(&again), (number, Some(ask)));
        }
        let mut bytes = [0; REPLY_BYTES];
        bytes[..32].copy_from_slice(&reply);
        bytes[32..64].copy_from_slice(&more);
        if let Some(reply) = Reply::parse(&bytes) {
            prop_assert_eq!(Reply::parse(&reply.to_bytes()), Some(reply));
        }
    }
}

#[test]
fn lifetime_has_nonce_and_microseconds() {
    let word = Lifetime::new(0xbeef, u64::MAX);
    assert_eq!((word.nonce(), word.micros()), (0xbeef, (1 << 48) - 1));
    assert_eq!(PermissionNumber::new(0x1_0002, 3).nonce(), 2);
}
