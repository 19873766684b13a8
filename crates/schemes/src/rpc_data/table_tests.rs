use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const CHUNKS: u32 = 6;
const CHUNK: u64 = 4096;
const CLIENTS: u32 = 4;
const BYTES_MAX: u64 = 4 * CHUNK;

fn table() -> Table {
    Table::new(TableSettings {
        blocks: Blocks::new(CHUNKS, CHUNK, true),
        chunk_bytes: CHUNK,
        domain_bytes: Some(BYTES_MAX),
        objects_max: 5,
    })
}

/// Clients 0 and 1 have one domain, 2 has another one, 3 has none.
fn token(client: u32) -> Option<DomainToken> {
    (client < 3).then_some(DomainToken([client as u8 / 2; 32]))
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Join(u32),
    Depart(u32),
    Allocate(u32, u64, Others),
    /// Frees the object of this position among all that there were.
    Free(u32, usize),
    TakeBack(u32, usize),
    /// Releases the oldest object that is being freed.
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..CLIENTS;
    let others =
        prop::sample::select(&[Others::None, Others::Read, Others::Write, Others::Own][..]);
    let bytes = prop_oneof![1..200u64, 1..3 * CHUNK, Just(0), Just(u64::MAX)];
    prop_oneof![
        2 => client.clone().prop_map(Step::Join),
        1 => client.clone().prop_map(Step::Depart),
        8 => (client.clone(), bytes, others).prop_map(|(c, b, o)| Step::Allocate(c, b, o)),
        4 => (client.clone(), any::<usize>()).prop_map(|(c, at)| Step::Free(c, at)),
        1 => (client, any::<usize>()).prop_map(|(c, at)| Step::TakeBack(c, at)),
        4 => Just(Step::Release),
    ]
}

/// An object that was not freed, as the model has it.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// `None`: it has departed.
    owner: Option<u32>,
    domain: Option<DomainToken>,
    others: Others,
    len: u64,
    offset: u64,
}

#[derive(Default)]
struct Model {
    here: BTreeSet<u32>,
    objects: BTreeMap<ObjectId, Known>,
    names: Vec<ObjectId>,
    freed: Vec<Freed>,
}

impl Model {
    fn may_free(&self, client: u32, id: ObjectId) -> bool {
        self.objects.get(&id).is_some_and(|object| {
            object.owner == Some(client)
                || (object.others == Others::Own
                    && self.here.contains(&client)
                    && object.domain.is_some()
                    && object.domain == token(client))
        })
    }

    fn may(&self, client: u32, object: &Known, right: Right) -> bool {
        let most = match object.others {
            Others::None => None,
            Others::Read => Some(Right::Read),
            _ => Some(Right::Write),
        };
        let is_member = self.here.contains(&client)
            && object.domain.is_some()
            && object.domain == token(client);
        object.owner == Some(client) || (is_member && most.is_some_and(|most| right <= most))
    }

    /// Objects and bytes of a domain, or of a client without one, also of those that are being
    /// freed.
    fn account(&self, table: &Table, client: u32) -> Account {
        match token(client) {
            Some(_) => {
                let domain = table.members[&ClientId(client)].domain.expect("a member");
                table.domains.get(domain).account
            }
            None => table.members[&ClientId(client)].account,
        }
    }

    fn execute(&mut self, table: &mut Table, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Join(client) if self.here.insert(client) => {
                table.join(ClientId(client), token(client));
            }
            Step::Join(_) => {}
            Step::Depart(client) => {
                let mut freed = table.depart(ClientId(client));
                if !self.here.remove(&client) {
                    prop_assert!(freed.is_empty());
                    return Ok(());
                }
                let is_last = !self.here.iter().any(|other| token(*other) == token(client));
                let goes = |object: &Known| match object.others {
                    Others::None => object.owner == Some(client),
                    _ => is_last && object.domain == token(client),
                };
                let gone: BTreeSet<_> =
                    self.objects.iter().filter(|(_, o)| goes(o)).map(|(id, _)| *id).collect();
                prop_assert_eq!(&gone, &freed.iter().map(|freed| freed.object).collect());
                self.objects.retain(|id, _| !gone.contains(id));
                for object in self.objects.values_mut().filter(|o| o.owner == Some(client)) {
                    object.owner = None;
                }
                self.freed.append(&mut freed);
            }
            Step::Allocate(client, bytes, others) => {
                let outcome = table.allocate(ClientId(client), bytes, others);
                let is_possible = self.here.contains(&client)
                    && bytes > 0
                    && (others == Others::None || token(client).is_some());
                match outcome {
                    Outcome::Allocated(id) => {
                        prop_assert!(is_possible && !self.names.contains(&id));
                        let range = Range { object: id, offset: 0, len: bytes as u32 };
                        let offset = table.find(ClientId(client), range, Right::Write);
                        let offset = offset.expect("the owner finds its object") as u64;
                        let (owner, domain) = (Some(client), token(client));
                        let known = Known { owner, domain, others, len: bytes, offset };
                        self.names.push(id);
                        self.objects.insert(id, known);
                        let Account { objects, bytes } = self.account(table, client);
                        prop_assert!(objects <= 5 && bytes <= BYTES_MAX);
                    }
                    Outcome::BadRequest => prop_assert!(!is_possible),
                    Outcome::TooMany(limit, _) => {
                        let account = self.account(table, client);
                        let is_reached = match limit {
                            Limit::Objects => account.objects == 5,
                            _ => account.bytes.checked_add(bytes).is_none_or(|b| b > BYTES_MAX),
                        };
                        prop_assert!(is_possible && is_reached);
                    }
                    Outcome::Empty => prop_assert_eq!(table.free_chunks(), 0),
                    Outcome::NoBlock => prop_assert!(bytes > CHUNK),
                    other => prop_assert!(false, "{:?}", other),
                }
            }
            Step::Free(client, at) if !self.names.is_empty() => {
                let id = self.names[at % self.names.len()];
                let freed = table.begin_free(ClientId(client), id);
                prop_assert_eq!(freed.is_some(), self.may_free(client, id));
                self.note(freed);
            }
            Step::TakeBack(client, at) if !self.names.is_empty() => {
                let id = self.names[at % self.names.len()];
                let is_own = self.objects.get(&id).is_some_and(|o| o.owner == Some(client));
                let freed = table.take_back(ClientId(client), id);
                prop_assert_eq!(freed.is_some(), is_own);
                self.note(freed);
            }
            Step::Release if !self.freed.is_empty() => {
                table.release(self.freed.remove(0).object);
            }
            Step::Free(..) | Step::TakeBack(..) | Step::Release => {}
        }
        Ok(())
    }

    fn note(&mut self, freed: Option<Freed>) {
        if let Some(freed) = freed {
            self.objects.remove(&freed.object);
            self.freed.push(freed);
        }
    }

    /// An object is found up to its end by the clients that may access it, and by no other client.
    /// A freed object is not found.
    fn check(&self, table: &Table) -> Result<(), TestCaseError> {
        prop_assert_eq!(table.audit(), Ok(()));
        let mut ends = BTreeMap::new();
        for (id, object) in &self.objects {
            ends.insert(object.offset, object.offset + object.len);
            for client in 0..CLIENTS {
                for right in [Right::Read, Right::Write] {
                    let find = |offset, len| {
                        table.find(ClientId(client), Range { object: *id, offset, len }, right)
                    };
                    let last = (object.offset + object.len - 1) as usize;
                    let expected = self.may(client, object, right).then_some(last);
                    prop_assert_eq!(find(object.len - 1, 1), expected);
                    for (offset, len) in [(object.len, 1), (u64::MAX, 1), (0, u32::MAX)] {
                        prop_assert_eq!(find(offset, len), None);
                    }
                }
            }
        }
        let starts = ends.keys().skip(1);
        prop_assert!(ends.values().zip(starts).all(|(end, next)| end <= next), "{:?}", ends);
        for id in self.names.iter().filter(|id| !self.objects.contains_key(id)) {
            let range = Range { object: *id, offset: 0, len: 1 };
            for client in (0..CLIENTS).map(ClientId) {
                prop_assert_eq!(table.find(client, range, Right::Read), None);
            }
        }
        Ok(())
    }
}

proptest! {
    /// The table agrees with a map of objects, its accounts add up, and objects do not overlap.
    #[test]
    fn table_agrees_with_a_map(steps in prop::collection::vec(step(), 1..60)) {
        let (mut table, mut model) = (table(), Model::default());
        for step in steps {
            model.execute(&mut table, step)?;
            model.check(&table)?;
        }
        for client in 0..CLIENTS {
            model.execute(&mut table, Step::Depart(client))?;
        }
        while !model.freed.is_empty() {
            model.execute(&mut table, Step::Release)?;
        }
        model.check(&table)?;
        prop_assert!(model.objects.is_empty() && table.members.is_empty());
        prop_assert_eq!(table.free_chunks(), u64::from(CHUNKS));
        prop_assert_eq!(table.domains.iter().count(), 0);
    }
}
