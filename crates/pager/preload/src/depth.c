/* How deep the calling thread is inside the library. Of the initial-exec model: with the general one,
 * the first access in a thread may allocate, and this is read in order to allocate. */
static __thread int depth __attribute__((tls_model("initial-exec")));

int *granary_depth(void) { return &depth; }
