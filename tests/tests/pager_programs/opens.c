/* A program and, with -DLIBRARY, a library that it opens. The constructor of the library fills more
 * memory than the bound. Meanwhile its thread holds the lock of the dynamic linker, which no thread
 * of the pager may need. Threads with thread-local destructors run before and after. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
enum { WORDS = 1024, BLOCKS = 8192 };

#ifdef LIBRARY
/* No page has one repeated word, because such pages are not stored. */
static unsigned *blocks[BLOCKS];
__attribute__((constructor)) static void fill(void) {
    for (unsigned i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(WORDS * sizeof(unsigned));
        for (unsigned at = 0; at < WORDS; at++) blocks[i][at] = i * WORDS + at;
    }
}
int holds(void) {
    for (unsigned i = 0; i < BLOCKS; i++)
        for (unsigned at = 0; at < WORDS; at++)
            if (blocks[i][at] != i * WORDS + at) return 0;
    return 1;
}
#else
extern int __cxa_thread_atexit_impl(void (*)(void *), void *, void *);
extern void *__dso_handle;
static int destroyed;
static void destroy(void *count) { ++*(int *)count; }
static void *thread(void *unused) {
    (void)unused;
    CHECK(!__cxa_thread_atexit_impl(destroy, &destroyed, &__dso_handle));
    return 0;
}
int main(int count, char **arguments) {
    CHECK(count == 2);
    pthread_t id;
    CHECK(!pthread_create(&id, 0, thread, 0) && !pthread_join(id, 0) && destroyed == 1);
    void *library = dlopen(arguments[1], RTLD_NOW);
    CHECK(library);
    int (*holds)(void) = (int (*)(void))dlsym(library, "holds");
    CHECK(holds && holds());
    CHECK(!pthread_create(&id, 0, thread, 0) && !pthread_join(id, 0) && destroyed == 2);
    puts("ok");
    return 0;
}
#endif
