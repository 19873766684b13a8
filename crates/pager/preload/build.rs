//! Compiles the thread-local variables of the initial-exec model, which Rust cannot declare, and
//! sets the linker options of the library.

fn main() {
    println!("cargo:rerun-if-changed=src/depth.c");
    cc::Build::new().file("src/depth.c").opt_level(2).compile("granary_depth");
    // Calls of `mmap` or `free` within the library must reach the library's own functions, even if
    // the program defines functions of these names: the program's function may have called the
    // library's under another name (`mmap64`, `__libc_free`).
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
