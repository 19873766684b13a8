//! All orders of a small world, up to a number of preemptions.
