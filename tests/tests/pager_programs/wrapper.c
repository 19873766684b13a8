/* A program with its own malloc, linked statically. It calls that of the C library by its other
 * names. Its allocator passes blocks that are not its own to __libc_free. */

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void *__libc_valloc(size_t);
extern void *__libc_pvalloc(size_t);
extern void __libc_free(void *);

#include "check.h"

static unsigned long calls;

#ifdef WRAPPED
void *malloc(size_t size) {
    calls++;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    calls++;
    return __libc_calloc(count, size);
}

void *realloc(void *block, size_t size) {
    calls++;
    return __libc_realloc(block, size);
}

void free(void *block) {
    calls++;
    __libc_free(block);
}

void *mmap(void *address, size_t size, int access, int flags, int fd, off_t offset) {
    calls++;
    return mmap64(address, size, access, flags, fd, offset);
}
#endif

#define POOL (1 << 20)
static char *pool;
static size_t used;

static void *pool_malloc(size_t size) {
    if (!pool) {
        pool = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(pool != MAP_FAILED);
    }
    CHECK(used + size <= POOL);
    used += (size + 15) / 16 * 16;
    return pool + used - (size + 15) / 16 * 16;
}

static void pool_free(void *block) {
    if ((uintptr_t)block - (uintptr_t)pool >= POOL) __libc_free(block);
}

#define BLOCKS 60
#define BLOCK (1 << 20)

int main(void) {
    static unsigned char *blocks[BLOCKS];
    for (int at = 0; at < BLOCKS; at++) {
        blocks[at] = at % 2 ? malloc(BLOCK) : __libc_malloc(BLOCK);
        CHECK(blocks[at]);
        for (size_t byte = 0; byte < BLOCK; byte += 64) blocks[at][byte] = (unsigned char)(at + 1);
    }
    for (int at = 0; at < BLOCKS; at++) {
        if (at % 3 == 0) blocks[at] = __libc_realloc(blocks[at], BLOCK + 4096);
        for (size_t byte = 0; byte < BLOCK; byte += 64)
            CHECK(blocks[at][byte] == (unsigned char)(at + 1));
        if (at % 4 < 2)
            free(blocks[at]);
        else
            __libc_free(blocks[at]);
    }
    char *aligned = __libc_memalign(4096, 100), *page = __libc_valloc(5),
        *pages = __libc_pvalloc(5);
    CHECK((uintptr_t)aligned % 4096 == 0 && (uintptr_t)page % 4096 == 0);
    CHECK((uintptr_t)pages % 4096 == 0);
    memset(pages, 1, 4096);
    free(aligned), free(page), free(pages);
    char *zeros = __libc_calloc(10, 1000);
    for (int at = 0; at < 10000; at++) CHECK(zeros[at] == 0);
    free(zeros);
    errno = 0;
    CHECK(!__libc_calloc(SIZE_MAX / 2, 3) && errno == ENOMEM);

    char *small = pool_malloc(100);
    memset(small, 1, 100);
    pool_free(small);
    pool_free(strdup("of the C library"));
    char *line = NULL;
    CHECK(asprintf(&line, "%d", 17) == 2);
    pool_free(line);
    CHECK(calls == 0 || calls > 50);
    puts("done");
    return 0;
}
