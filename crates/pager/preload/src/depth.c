/* Thread-local variables of the initial-exec model. With the general-dynamic model, a thread's
 * first access may allocate, and the allocator itself reads these variables. */

/* Nesting depth of the thread's calls inside the library. */
static __thread int depth __attribute__((tls_model("initial-exec")));
/* Nonzero while the thread is in a function to which this library has passed a call on. */
static __thread int passing __attribute__((tls_model("initial-exec")));
/* Number of the thread's slot for the bytes of its blocks, from 1 on. */
static __thread int slot __attribute__((tls_model("initial-exec")));

int *granary_depth(void) { return &depth; }
int *granary_passing(void) { return &passing; }
int *granary_slot(void) { return &slot; }
