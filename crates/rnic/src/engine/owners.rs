//! Functions and their protection domains: limits, and the objects that each function owns.

use super::scheduler::Scheduler;
use crate::error::{Error, Object};
use crate::key_namespaces::{KeyNamespaces, Namespace};
use crate::limits::FunctionLimits;
use crate::table::{InsertError, Table};
use std::collections::{HashMap, HashSet};
use verbs::{FunctionId, Key, KeyIndex, Pdn};

/// The functions and the PDs of the NIC.
pub(super) struct Owners {
    pub functions: HashMap<FunctionId, Function>,
    /// Number of the next function.
    pub next_function: u32,
    pub pds: Table<Pd>,
}

/// A function: its limits and the objects that it owns.
pub(super) struct Function {
    pub limits: FunctionLimits,
    pub used: FunctionLimits,
    pub sched_index: u32,
    /// The namespace of its keys.
    pub namespace: Namespace,
    /// The function that opened this one, if a function did.
    pub opener: Option<FunctionId>,
    pub keys: HashSet<KeyIndex>,
    /// Numbers of its QPs. The sets below contain its CQs, shared receive queues and PDs.
    pub qps: HashSet<u32>,
    pub cqs: HashSet<u32>,
    pub recvs: HashSet<u32>,
    pub pds: HashSet<u32>,
}

/// A protection domain.
pub(super) struct Pd {
    pub function: FunctionId,
    /// Number of keys, QPs and SRQs in this PD.
    pub users: u32,
}

impl Function {
    pub fn new(limits: FunctionLimits, sched_index: u32, namespace: Namespace) -> Self {
        let used = FunctionLimits {
            pds: 0,
            qps: 0,
            cqs: 0,
            srqs: 0,
            keys: 0,
            windows: 0,
            functions: 0,
            registered_bytes: 0,
            ring_bytes: 0,
            remote_peers: 0,
        };
        Self {
            limits,
            used,
            sched_index,
            namespace,
            opener: None,
            keys: HashSet::new(),
            qps: HashSet::new(),
            cqs: HashSet::new(),
            recvs: HashSet::new(),
            pds: HashSet::new(),
        }
    }

    /// Returns the bytes of its rings including `more`, or an error if they exceed the limit.
    pub fn room_for_rings(&self, more: u64) -> Result<u64, Error> {
        let limit = self.limits.ring_bytes;
        let bytes = self.used.ring_bytes.saturating_add(more);
        if bytes > limit {
            return Err(Error::Limit { what: "bytes of rings of the function", limit });
        }
        Ok(bytes)
    }
}

impl Owners {
    /// The physical function alone.
    pub fn new(pds: u32) -> Self {
        let physical =
            Function::new(FunctionLimits::NONE, Scheduler::PHYSICAL, KeyNamespaces::FIRST);
        Self {
            functions: HashMap::from([(FunctionId::PHYSICAL, physical)]),
            next_function: 1,
            pds: Table::new(pds),
        }
    }

    pub fn function(&mut self, f: FunctionId) -> Result<&mut Function, Error> {
        self.functions.get_mut(&f).ok_or(Error::Unknown(Object::Function(f)))
    }

    pub fn pd(&self, f: FunctionId, pd: Pdn) -> Result<&Pd, Error> {
        owned(self.pds.get(pd.raw()), |p| p.function, f, Object::Pd(pd))
    }

    pub fn pd_mut(&mut self, pd: Pdn) -> &mut Pd {
        self.pds.get_mut(pd.raw()).expect("a PD in use exists")
    }

    /// Returns the key namespace of `f` if the function may have one more window. `nic_limit` is
    /// the NIC's limit of windows for each function.
    pub fn namespace_for_window(
        &mut self,
        f: FunctionId,
        pd: Pdn,
        nic_limit: u32,
    ) -> Result<Namespace, Error> {
        self.pd(f, pd)?;
        let Function { limits, used, namespace, .. } = self.function(f)?;
        check_limit("keys of the function", used.keys, limits.keys)?;
        check_limit("windows of the function", used.windows, limits.windows.min(nic_limit))?;
        Ok(*namespace)
    }

    pub fn window_made(&mut self, f: FunctionId, pd: Pdn, key: Key) {
        self.key_made(f, pd, key);
        self.functions.get_mut(&f).expect("the calling function exists").used.windows += 1;
    }

    pub fn key_made(&mut self, f: FunctionId, pd: Pdn, key: Key) {
        self.pd_mut(pd).users += 1;
        let function = self.functions.get_mut(&f).expect("the calling function exists");
        function.used.keys += 1;
        function.keys.insert(key.index());
    }

    pub fn key_ended(&mut self, f: FunctionId, pd: Pdn, key: Key) {
        self.pd_mut(pd).users -= 1;
        let function = self.functions.get_mut(&f).expect("the calling function exists");
        function.used.keys -= 1;
        function.keys.remove(&key.index());
    }
}

/// Checks that an object exists and belongs to the calling function.
pub(super) fn owned<T>(
    found: Option<&T>,
    function: impl Fn(&T) -> FunctionId,
    caller: FunctionId,
    object: Object,
) -> Result<&T, Error> {
    let found = found.ok_or(Error::Unknown(object))?;
    if function(found) != caller {
        return Err(Error::Foreign { object, caller });
    }
    Ok(found)
}

pub(super) fn check_limit(what: &'static str, used: u32, limit: u32) -> Result<(), Error> {
    if used >= limit {
        return Err(Error::Limit { what, limit: limit as u64 });
    }
    Ok(())
}

/// Maps the error of a table of the NIC; `what` names its objects.
pub(super) fn table_error(what: &'static str, capacity: u32) -> impl Fn(InsertError) -> Error {
    move |error| match error {
        InsertError::Full => Error::Limit { what, limit: capacity as u64 },
        InsertError::Random(errno) => Error::Random { what, errno },
    }
}
