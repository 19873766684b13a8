//! CLUSTER: the server is no node of a cluster.

use crate::context::Context;
use crate::keyspace::Keyspace;

pub(super) fn refuse<K: Keyspace>(cx: &mut Context<'_, K>) {
    cx.error("ERR This instance has cluster support disabled");
}
