//! The `granary` command.

fn main() {}
