//! Tests of the engine: operation of each opcode, effect of each error, and the building blocks of
//! chains.

mod attributes;
pub(crate) mod bed;
mod chains;
mod control;
mod data;
mod engines;
mod errors;
mod fairness;
mod foreign;
mod functions;
mod guards;
mod hostile;
mod model;
mod queues;
mod step;
mod windows;
mod wire;

use bed::*;
