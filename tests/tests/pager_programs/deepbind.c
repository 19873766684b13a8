/* A program and, with -DPLUGIN, a shared object that the program opens with RTLD_DEEPBIND.
 *
 * Such an object looks names up in its own dependencies before it asks the program: its malloc,
 * free, mmap and munmap are those of the C library, not those of a preloaded library. The program
 * and the object exchange memory in both directions, like PHP and its extensions. The program also
 * gets the functions from the handle of the C library, like Python's ctypes. */

#include <dlfcn.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct functions {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void *(*aligned_alloc)(size_t, size_t);
    int (*posix_memalign)(void **, size_t, size_t);
    char *(*strdup)(const char *);
    size_t (*usable)(void *);
    void (*free)(void *);
    void *(*mmap)(void *, size_t, int, int, int, off_t);
    int (*munmap)(void *, size_t);
    int (*madvise)(void *, size_t, int);
};

#ifdef PLUGIN

char *made_by_constructor;

__attribute__((constructor)) static void begin(void) {
    made_by_constructor = malloc(100);
    strcpy(made_by_constructor, "constructor");
    free(strdup("freed by the constructor"));
}

static char *duplicate(const char *text) { return strdup(text); }

/* Calls instead of function addresses: an address would be that of the program's definition. */
static void *own_malloc(size_t n) { return malloc(n); }
static void *own_calloc(size_t c, size_t n) { return calloc(c, n); }
static void *own_realloc(void *p, size_t n) { return realloc(p, n); }
static void *own_aligned(size_t a, size_t n) { return aligned_alloc(a, n); }
static int own_memalign(void **p, size_t a, size_t n) { return posix_memalign(p, a, n); }
static size_t own_usable(void *p) { return malloc_usable_size(p); }
static void own_free(void *p) { free(p); }
static void *own_mmap(void *a, size_t n, int p, int f, int d, off_t o) {
    return mmap(a, n, p, f, d, o);
}
static int own_munmap(void *a, size_t n) { return munmap(a, n); }
static int own_madvise(void *a, size_t n, int what) { return madvise(a, n, what); }

struct functions plugin = {
    own_malloc, own_calloc, own_realloc, own_aligned, own_memalign, duplicate,
    own_usable, own_free,   own_mmap,    own_munmap,  own_madvise,
};

#else

#define BLOCKS 48
#define BLOCK (1 << 20)
#define MAPPED (1 << 20)

#include "check.h"

static struct functions own = {
    malloc, calloc, realloc, aligned_alloc, posix_memalign, strdup,
    malloc_usable_size, free, mmap, munmap, madvise,
};

static void *must(void *symbol) {
    CHECK(symbol);
    return symbol;
}

static void fill(unsigned char *block, size_t bytes, unsigned seed) {
    for (size_t at = 0; at < bytes; at += 64) block[at] = (unsigned char)(seed + at / 4096);
}

static void check(const unsigned char *block, size_t bytes, unsigned seed) {
    for (size_t at = 0; at < bytes; at += 64)
        CHECK(block[at] == (unsigned char)(seed + at / 4096));
}

/* `makes` allocates blocks, `changes` resizes them and `frees` frees them. */
static void exchange(const struct functions *makes, const struct functions *changes,
                     const struct functions *frees) {
    static unsigned char *blocks[BLOCKS];
    for (int at = 0; at < BLOCKS; at++) {
        blocks[at] = must(makes->malloc(BLOCK));
        fill(blocks[at], BLOCK, at);
    }
    for (int at = 0; at < BLOCKS; at += 2) {
        blocks[at] = must(changes->realloc(blocks[at], BLOCK + BLOCK / 2));
        CHECK(changes->usable(blocks[at]) >= BLOCK + BLOCK / 2);
    }
    for (int at = 0; at < BLOCKS; at++) {
        check(blocks[at], BLOCK, at);
        frees->free(blocks[at]);
    }
    for (size_t size = 1; size < 100000; size = size * 3 + 1) {
        char *zeros = must(makes->calloc(size, 3));
        for (size_t at = 0; at < size * 3; at++) CHECK(zeros[at] == 0);
        zeros = must(changes->realloc(zeros, size));
        frees->free(zeros);
        char *aligned = must(makes->aligned_alloc(256, 256 * size % 65536 + 256));
        CHECK((uintptr_t)aligned % 256 == 0);
        frees->free(aligned);
        void *page = NULL;
        CHECK(makes->posix_memalign(&page, 4096, size) == 0 && (uintptr_t)page % 4096 == 0);
        CHECK(changes->usable(page) >= size);
        frees->free(page);
    }
    char *text = must(makes->strdup("duplicate"));
    text = must(changes->realloc(text, 5000));
    CHECK(strcmp(text, "duplicate") == 0);
    frees->free(text);
    frees->free(NULL);

    unsigned char *map = makes->mmap(NULL, 8 * MAPPED, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(map != MAP_FAILED);
    fill(map, 8 * MAPPED, 7);
    CHECK(changes->madvise(map + MAPPED, MAPPED, MADV_DONTNEED) == 0);
    for (size_t at = 0; at < MAPPED; at += 64) CHECK(map[MAPPED + at] == 0);
    CHECK(frees->munmap(map + MAPPED, MAPPED) == 0);
    unsigned char *again = makes->mmap(map + MAPPED, MAPPED, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(again == map + MAPPED && again[0] == 0);
    fill(again, MAPPED, 9);
    check(map, MAPPED, 7);
    check(again, MAPPED, 9);
    CHECK(frees->munmap(map, 8 * MAPPED) == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    void *object = dlopen(arguments[1], RTLD_NOW | RTLD_DEEPBIND);
    if (!object) fprintf(stderr, "%s\n", dlerror());
    struct functions *plugin = must(dlsym(object, "plugin"));
    char **made = must(dlsym(object, "made_by_constructor"));
    CHECK(strcmp(*made, "constructor") == 0);
    free(*made);

    void *handle = must(dlopen("libc.so.6", RTLD_NOW));
    struct functions library = {
        must(dlsym(handle, "malloc")), must(dlsym(handle, "calloc")),
        must(dlsym(handle, "realloc")), must(dlsym(handle, "aligned_alloc")),
        must(dlsym(handle, "posix_memalign")), must(dlsym(handle, "strdup")),
        must(dlsym(handle, "malloc_usable_size")), must(dlsym(handle, "free")),
        must(dlsym(handle, "mmap")), must(dlsym(handle, "munmap")), must(dlsym(handle, "madvise")),
    };
    const struct functions *all[] = {&own, plugin, &library};
    for (int makes = 0; makes < 3; makes++)
        for (int changes = 0; changes < 3; changes++)
            exchange(all[makes], all[changes], all[(makes + changes + 1) % 3]);
    printf("done\n");
    return 0;
}

#endif
