//! Tests of the book.

mod deviations;
mod effects;
mod exhaustive;
mod expected;
mod invariants;
mod objects;
mod random;
mod rules;
mod scene;
mod slabs;
mod world;
