//! Two engines with a network between them, which may lose, repeat, delay, reorder and spoil packets.

mod data;
mod errors;
mod lossy;
mod net;
mod order;
mod tools;

use super::*;
use crate::ids::Qpn;
use crate::verbs::QpChange;
use crate::wqe::Builder;
use net::*;
