//! Compiles the one variable that Rust cannot declare: thread-local, of the initial-exec model.

fn main() {
    println!("cargo:rerun-if-changed=src/depth.c");
    cc::Build::new().file("src/depth.c").opt_level(2).compile("granary_depth");
}
