//! Tests of the engine: what each opcode does, what each error does, and what chains are built of.

mod attributes;
pub(crate) mod bed;
mod chains;
mod control;
mod data;
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
