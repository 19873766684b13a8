/* Variables of the calling thread. Of the initial-exec model: with the general one, the first access
 * in a thread may allocate, and these are read in order to allocate. */

/* How deep the thread is inside the library. */
static __thread int depth __attribute__((tls_model("initial-exec")));
/* Not 0 while the thread is in a function that one of this library's was passed on to. */
static __thread int passing __attribute__((tls_model("initial-exec")));

int *granary_depth(void) { return &depth; }
int *granary_passing(void) { return &passing; }
