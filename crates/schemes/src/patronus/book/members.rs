//! Compute nodes and domains, and what belongs to them.

use std::collections::{BTreeMap, BTreeSet};

use scheme::DomainToken;

use super::permissions::Slots;

/// Index of a domain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DomainId(u32);

/// Objects of a domain, or of a compute node without one.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Account {
    pub objects: u64,
    /// Sum of the lengths.
    pub bytes: u64,
}

/// A compute node.
#[cfg_attr(test, derive(Clone))]
pub struct Member {
    pub domain: Option<DomainId>,
    pub slots: Slots,
    /// Requests that wait for permissions to end.
    pub waiting: u32,
    /// Entries of its objects. Those of others than `None` pass to the domain when it departs.
    pub objects: BTreeSet<u32>,
    /// Entries of the objects whose free it waits for.
    pub frees: BTreeSet<u32>,
    /// Revokes that wait until a permission is closed: its slot, and the number of the request.
    pub revokes: BTreeSet<(u32, u64)>,
    /// Its objects, if it has no domain.
    pub account: Account,
    pub is_departed: bool,
}

impl Member {
    /// A compute node with as many permissions.
    pub fn new(domain: Option<DomainId>, permissions_max: u32) -> Self {
        Self {
            domain,
            slots: Slots::new(permissions_max),
            waiting: 0,
            objects: BTreeSet::new(),
            frees: BTreeSet::new(),
            revokes: BTreeSet::new(),
            account: Account::default(),
            is_departed: false,
        }
    }

    /// True if the compute node is gone, and so are its permissions and objects.
    pub fn has_left(&self) -> bool {
        self.is_departed && self.slots.are_empty() && self.objects.is_empty()
    }
}

/// A domain: compute nodes with the same token.
#[cfg_attr(test, derive(Clone))]
pub struct Domain {
    token: DomainToken,
    /// Compute nodes that have not departed.
    pub members: u32,
    /// Entries of the objects that live as long as the domain.
    pub objects: BTreeSet<u32>,
    pub account: Account,
}

/// The domains with members or objects.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Domains {
    by_token: BTreeMap<DomainToken, DomainId>,
    domains: BTreeMap<DomainId, Domain>,
    next: u32,
}

impl Domains {
    /// Counts a new member of the domain with this token.
    pub fn join(&mut self, token: DomainToken) -> DomainId {
        let id = *self.by_token.entry(token).or_insert_with(|| {
            while self.domains.contains_key(&DomainId(self.next)) {
                self.next = self.next.wrapping_add(1);
            }
            DomainId(self.next)
        });
        self.next = self.next.wrapping_add(1);
        let empty =
            || Domain { token, members: 0, objects: BTreeSet::new(), account: Account::default() };
        self.domains.entry(id).or_insert_with(empty).members += 1;
        id
    }

    /// A domain with members or objects.
    pub fn get(&self, id: DomainId) -> &Domain {
        &self.domains[&id]
    }

    /// A domain with members or objects.
    pub fn get_mut(&mut self, id: DomainId) -> &mut Domain {
        self.domains.get_mut(&id).expect("a domain with members or objects")
    }

    /// Forgets a domain that has neither members nor objects.
    pub fn forget_if_empty(&mut self, id: DomainId) {
        let is_empty = |domain: &&Domain| domain.members == 0 && domain.account.objects == 0;
        if let Some(domain) = self.domains.get(&id).filter(is_empty) {
            self.by_token.remove(&domain.token);
            self.domains.remove(&id);
        }
    }

    /// All domains.
    pub fn iter(&self) -> impl Iterator<Item = (DomainId, &Domain)> {
        self.domains.iter().map(|(id, domain)| (*id, domain))
    }

    /// The token of a domain.
    pub fn token(&self, id: DomainId) -> DomainToken {
        self.get(id).token
    }

    /// Number of domains with members.
    pub fn count(&self) -> u64 {
        self.domains.values().filter(|domain| domain.members > 0).count() as u64
    }
}
