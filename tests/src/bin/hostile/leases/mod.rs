//! Attacks on schemes patronus, patronus-2 and patronus-mr: lifetime words, keys, requests,
//! resources.

pub mod exhaust;
pub mod keys;
mod node;
pub mod requests;
pub mod words;
