/* Memory that the pager's threads allocate must not be paged memory. Otherwise they would wait for
 * the program's allocator, and in a process that forks, for themselves.
 *
 * Compiled twice: as a library that is loaded before the pager's and records the allocations of all
 * threads but the first, and as a program with one thread. All recorded allocations, in the program
 * and in its children, are therefore the pager's. */
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 1 << 16 };
struct notes { atomic_size_t count; void *block[MOST]; };

#ifdef LIBRARY
struct notes *noted;

static void *note(void *block) {
    if (noted && block && gettid() != getpid()) {
        size_t at = atomic_fetch_add(&noted->count, 1);
        if (at < MOST) noted->block[at] = block;
    }
    return block;
}

#define NEXT(name, ...) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    return note(next(__VA_ARGS__))

void *malloc(size_t size) { NEXT(malloc, size); }
void *calloc(size_t count, size_t size) { NEXT(calloc, count, size); }
void *realloc(void *block, size_t size) { NEXT(realloc, block, size); }
void *aligned_alloc(size_t align, size_t size) { NEXT(aligned_alloc, align, size); }
void *memalign(size_t align, size_t size);
void *memalign(size_t align, size_t size) { NEXT(memalign, align, size); }
#else
#include "check.h"
enum { PAGE = 4096, PAGES = 4000 };

/* Is the address in paged memory? Such mappings have the flag "um". */
static int is_paged(void *block) {
    char line[1024];
    int inside = 0, paged = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && strchr(line, '-') < strchr(line, ' '))
            inside = from <= (unsigned long)block && (unsigned long)block < to;
        else if (inside && !strncmp(line, "VmFlags:", 8)) {
            paged = strstr(line, " um") != 0;
            break;
        }
    }
    fclose(maps);
    return paged;
}

int main(void) {
    struct notes **place = dlsym(RTLD_DEFAULT, "noted"), *notes;
    CHECK(place);
    notes = mmap(0, sizeof *notes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(notes != MAP_FAILED);
    *place = notes;
    unsigned *memory = malloc((size_t)PAGES * PAGE);
    for (size_t i = 0; i < PAGES; i++) memory[i * (PAGE / 4)] = i + 1;
    for (int round = 0; round < 4; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            /* More memory than a child can have without its own pager threads. */
            for (size_t i = 0; i < PAGES; i++) CHECK(memory[i * (PAGE / 4)]++ == i + 1);
            pid_t grandchild = fork();
            CHECK(grandchild >= 0);
            if (grandchild == 0) {
                for (size_t i = 0; i < PAGES; i++) CHECK(memory[i * (PAGE / 4)] == i + 2);
                _exit(0);
            }
            int status;
            CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    *place = 0;
    if (getenv("GRANARY_LOCAL")) CHECK(is_paged(memory));
    size_t count = notes->count < MOST ? notes->count : MOST;
    size_t paged = 0;
    for (size_t i = 0; i < count; i++) paged += is_paged(notes->block[i]);
    printf("%zu of what other threads allocated is paged\n", paged);
    return 0;
}
#endif
