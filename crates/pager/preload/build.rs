//! Compiles the variables that Rust cannot declare: thread-local, of the initial-exec model. Says how
//! the library is linked.

fn main() {
    println!("cargo:rerun-if-changed=src/depth.c");
    cc::Build::new().file("src/depth.c").opt_level(2).compile("granary_depth");
    // A call of `mmap` or `free` within the library ends in the library, also where the program has a
    // function of that name: the program's may have called the library's by another name (`mmap64`,
    // `__libc_free`).
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
