//! Two engines with a network between them, which may lose, repeat, delay, reorder and spoil packets.

mod counts;
mod data;
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
use crate::ids::Qpn;
use crate::verbs::QpChange;
use crate::wqe::Builder;
use net::*;
