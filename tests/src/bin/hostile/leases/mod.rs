//! Attacks on scheme patronus: lifetime words, keys, requests, resources.

pub mod exhaust;
pub mod keys;
mod node;
pub mod requests;
pub mod words;
