/* mmap, munmap, mremap, madvise and mprotect on memory that is larger than the limit. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 6144, MADV_GUARD_INSTALL = 102, MADV_GUARD_REMOVE = 103 };
#define SIZE ((size_t)PAGES * PAGE)

static sigjmp_buf back;
static void on_fault(int signal) { siglongjmp(back, signal); }
static int faults(volatile char *at, int write) {
    int signal = sigsetjmp(back, 1);
    if (signal) return signal;
    if (write) *at = 1; else (void)*at;
    return 0;
}
static unsigned char *map(size_t size) {
    unsigned char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}
static void fill(unsigned char *at, unsigned seed) {
    for (size_t page = 0; page < PAGES; page++) *(unsigned *)(at + page * PAGE) = page * 3 + seed;
}
static int holds(unsigned char *at, size_t page, unsigned seed) {
    return *(unsigned *)(at + page * PAGE) == page * 3 + seed;
}

int main(void) {
    signal(SIGSEGV, on_fault);
    unsigned char *a = map(SIZE), *b = map(SIZE);
    fill(a, 1);
    fill(b, 2);
    for (size_t i = 0; i < PAGES; i++) CHECK(holds(a, i, 1) && holds(b, i, 2));
    /* Dropped pages read as zeros. Other pages keep their content. */
    CHECK(!madvise(a + SIZE / 4, SIZE / 2, MADV_DONTNEED));
    for (size_t i = 0; i < PAGES; i++) {
        int dropped = i >= PAGES / 4 && i < PAGES * 3 / 4;
        CHECK(dropped ? *(unsigned *)(a + i * PAGE) == 0 : holds(a, i, 1));
    }
    fill(a, 3);
    /* Holes. */
    for (size_t i = 0; i < PAGES; i += 64) CHECK(!munmap(a + i * PAGE, 16 * PAGE));
    CHECK(faults((char *)a, 0) == SIGSEGV && faults((char *)a + 65 * PAGE, 1) == SIGSEGV);
    for (size_t i = 0; i < PAGES; i++) if (i % 64 >= 16) CHECK(holds(a, i, 3));
    /* A fixed mapping in a hole reads as zeros. */
    CHECK(mmap(a, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
        0) == a);
    CHECK(a[0] == 0 && a[15 * PAGE] == 0 && holds(a, 16, 3));
    /* A mapping of a file over a part, and anonymous memory there again. */
    int fd = open("/proc/self/exe", O_RDONLY);
    CHECK(mmap(a + 20 * PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == a + 20 * PAGE);
    CHECK(!memcmp(a + 20 * PAGE, "\177ELF", 4) && holds(a, 19, 3) && holds(a, 21, 3));
    CHECK(!munmap(a + 20 * PAGE, PAGE) && faults((char *)a + 20 * PAGE, 0) == SIGSEGV);
    CHECK(mmap(a + 20 * PAGE, PAGE, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == a + 20 * PAGE);
    CHECK(a[20 * PAGE] == 0);
    /* Protection: unreadable pages are paged too, and keep their content. */
    CHECK(!mprotect(b, SIZE, PROT_NONE) && faults((char *)b, 0) == SIGSEGV);
    unsigned char *c = map(SIZE);
    fill(c, 4);
    CHECK(!mprotect(b, SIZE, PROT_READ));
    for (size_t i = 0; i < PAGES; i++) CHECK(holds(b, i, 2));
    CHECK(faults((char *)b + 7 * PAGE, 1) == SIGSEGV);
    CHECK(!mprotect(b, SIZE, PROT_READ | PROT_WRITE) && faults((char *)b + 7 * PAGE + 8, 1) == 0);
    /* A guard region (Linux 6.13). Where the system call installs one, accesses fault until the
     * guard is removed. Where the call is refused, memory keeps its content. */
    unsigned char *g = map(SIZE), *guard = g + 16 * PAGE;
    fill(g, 6);
    if (!madvise(guard, 16 * PAGE, MADV_GUARD_INSTALL)) {
        CHECK(faults((char *)guard, 0) == SIGSEGV && faults((char *)guard + PAGE, 1) == SIGSEGV);
        CHECK(!madvise(guard, 16 * PAGE, MADV_GUARD_REMOVE) && guard[0] == 0);
        fill(g, 6);
    } else {
        CHECK(errno == EINVAL && madvise(guard, PAGE, MADV_GUARD_REMOVE) == -1 && errno == EINVAL);
    }
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < PAGES; i++) CHECK(holds(g, i, 6));
    CHECK(madvise(g, PAGE, 9999) == -1 && errno == EINVAL);
    CHECK(!munmap(g, SIZE));
    /* A reservation of which parts become accessible. */
    unsigned char *r = mmap(0, 1ul << 34, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1, 0);
    CHECK(r != MAP_FAILED && faults((char *)r, 0) == SIGSEGV);
    CHECK(!mprotect(r + (1ul << 33), SIZE, PROT_READ | PROT_WRITE));
    fill(r + (1ul << 33), 5);
    CHECK(!munmap(r, 1ul << 33));
    for (size_t i = 0; i < PAGES; i++) CHECK(holds(r + (1ul << 33), i, 5));
    CHECK(!munmap(r + (1ul << 33), 1ul << 33));
    /* Moved and resized. */
    unsigned char *wall = map(64 << 10);
    (void)wall;
    unsigned char *m = mremap(c, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
    CHECK(m != MAP_FAILED);
    for (size_t i = 0; i < PAGES; i++) CHECK(holds(m, i, 4));
    CHECK(m[SIZE] == 0 && m[2 * SIZE - 1] == 0);
    fill(m + SIZE, 6);
    CHECK(mremap(m, 2 * SIZE, SIZE, 0) == m && holds(m, PAGES - 1, 4));
    /* Requests that are too large fail without effect. */
    CHECK(mremap(m, SIZE, ((size_t)1 << 44) - PAGE, MREMAP_MAYMOVE) == MAP_FAILED
        && errno == ENOMEM && holds(m, 1, 4));
    unsigned char *target = map(SIZE);
    CHECK(mremap(m, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target);
    for (size_t i = 0; i < PAGES; i++) CHECK(holds(target, i, 4));
    /* Moved without unmapping: the old range stays and reads as zeros. */
    enum { DONTUNMAP = 4 };
    int may = MREMAP_MAYMOVE | DONTUNMAP;
    unsigned char *copy = mremap(target, SIZE, SIZE, may, (void *)0);
    CHECK(copy != MAP_FAILED && copy != target);
    for (size_t i = 0; i < PAGES; i += 32) CHECK(holds(copy, i, 4) && target[i * PAGE] == 0);
    for (size_t i = 0; i < PAGES; i += 32) *(unsigned *)(target + i * PAGE) = i * 3 + 7;
    for (size_t i = 0; i < PAGES; i += 32) CHECK(holds(copy, i, 4) && holds(target, i, 7));
    CHECK(mremap(target, SIZE, SIZE, may | MREMAP_FIXED, copy) == copy);
    for (size_t i = 0; i < PAGES; i += 32) CHECK(holds(copy, i, 7) && target[i * PAGE] == 0);
    unsigned char *far = (void *)0x240000000000;
    CHECK(mremap(copy, SIZE, SIZE, may, far) == far);
    CHECK(mremap(far, SIZE, SIZE, may | MREMAP_FIXED, far + 2 * SIZE) == far + 2 * SIZE);
    for (size_t i = 0; i < PAGES; i += 32)
        CHECK(copy[i * PAGE] == 0 && far[i * PAGE] == 0 && holds(far + 2 * SIZE, i, 7));
    CHECK(!munmap(copy, SIZE) && !munmap(far, SIZE));
    CHECK(!munmap(far + 2 * SIZE, SIZE));
    *(unsigned *)(target + 9 * PAGE) = 9 * 3 + 4;
    CHECK(mremap(target, SIZE, SIZE, DONTUNMAP, (void *)0) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(target, SIZE, SIZE / 2, may, (void *)0) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(target, SIZE, 2 * SIZE, may, (void *)0) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(target, SIZE, SIZE, may, target + PAGE) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(target, SIZE, SIZE, MREMAP_FIXED, far) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(target, SIZE, SIZE, 64) == MAP_FAILED && errno == EINVAL && holds(target, 9, 4));
    /* Large blocks of the allocator grow and are freed. */
    char *block = malloc(1 << 20);
    memset(block, 9, 1 << 20);
    for (size_t size = 2 << 20; size <= 24 << 20; size += 2 << 20)
        CHECK(block = realloc(block, size));
    for (int i = 0; i < 1 << 20; i += 1000) CHECK(block[i] == 9);
    free(block);
    void *aligned;
    CHECK(!posix_memalign(&aligned, 1 << 16, 100000) && (size_t)aligned % (1 << 16) == 0);
    free(aligned);
    CHECK(!munmap(target, SIZE) && !munmap(b, SIZE));
    puts("as expected");
    return 0;
}
