//! Two engines connected by a network that may lose, duplicate, delay, reorder and corrupt packets.

mod counts;
mod data;
mod engines;
mod errors;
mod forged;
mod injected;
mod limits;
mod lossy;
mod net;
mod order;
mod tools;
mod turns;

use super::*;
use net::*;
use verbs::wqe::Builder;
use verbs::{QpChange, Qpn};
