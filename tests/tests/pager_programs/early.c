/* A program and, with -DLIBRARY, a library that it is linked to. They allocate very early and very
 * late:
 * - in the resolver of an IFUNC of the library, which the dynamic linker calls before it relocates
 *   the preloaded libraries, and in a resolver of the program, which it calls after that. Both also
 *   map memory and read a file, with functions that a preloaded library may define;
 * - in a constructor of the library, which runs before those of preloaded libraries;
 * - in destructors of a thread's variables, and in a destructor of the library. */

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

#define KEPT 64

struct early {
    char *kept[KEPT];
    char *aligned;
    char *zeros;
    char *mapped;
    char text[16];
};

extern struct early *early_blocks(int which);

static void allocate(struct early *early) {
    for (int at = 0; at < KEPT; at++) {
        size_t size = 16 + at * 61;
        char *block = malloc(size);
        for (size_t byte = 0; byte < size; byte++) block[byte] = (char)at;
        char *other = malloc(size);
        block = realloc(block, 3 * size);
        for (size_t byte = size; byte < 3 * size; byte++) block[byte] = (char)at;
        free(other);
        early->kept[at] = block;
    }
    void *aligned = NULL;
    if (posix_memalign(&aligned, 1024, 100) == 0) early->aligned = aligned;
    early->zeros = calloc(100, 7);
    free(malloc(0));
    free(NULL);
    static volatile size_t large = SIZE_MAX / 2;
    if (malloc(large) || calloc(large, 3) || posix_memalign(&aligned, 3, 1) == 0) abort();
    early->mapped = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mprotect(early->mapped, 4096, PROT_READ | PROT_WRITE) || munmap(early->mapped + 4096, 4096))
        abort();
    strcpy(early->mapped, "mapped");
    if (mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) abort();
    int file = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    if (fcntl(file, F_GETFD) != FD_CLOEXEC) abort();
    if (read(file, early->text, sizeof early->text - 1) < 0) abort();
    if (close(file) || close(file) != -1 || open("/proc/self/no", O_RDONLY) != -1) abort();
}

static struct early by_resolver;

#ifdef LIBRARY

static struct early by_constructor;

static struct early *blocks(int which) { return which ? &by_constructor : &by_resolver; }

static void *resolve(void) {
    allocate(&by_resolver);
    return blocks;
}

struct early *indirect(int which) __attribute__((ifunc("resolve"), visibility("hidden")));

/* The relocation of this pointer calls the resolver. */
struct early *(*volatile pointer)(int) = indirect;

struct early *early_blocks(int which) { return pointer(which); }

__attribute__((constructor)) static void begin(void) { allocate(&by_constructor); }

__attribute__((destructor)) static void end(void) {
    struct early late;
    allocate(&late);
    for (int at = 0; at < KEPT; at++) free(late.kept[at]);
    free(late.aligned);
    free(late.zeros);
    munmap(late.mapped, 4096);
    puts("ended");
}

#else

static struct early *own_blocks(void) { return &by_resolver; }

static void *resolve(void) {
    allocate(&by_resolver);
    return own_blocks;
}

static struct early *indirect(void) __attribute__((ifunc("resolve")));

static struct early *(*volatile pointer)(void) = indirect;

static pthread_key_t key;

/* Runs again, with the block of the previous round, until the C library stops calling
 * destructors. */
static void of_thread(void *block) {
    CHECK(strcmp(block, "of a thread") == 0);
    block = realloc(block, 50000);
    CHECK(strcmp(block, "of a thread") == 0);
    free(block);
    pthread_setspecific(key, strdup("of a thread"));
}

static void *thread(void *argument) {
    (void)argument;
    CHECK(pthread_setspecific(key, strdup("of a thread")) == 0);
    for (int at = 0; at < 100; at++) free(malloc(at * 1000));
    return strdup("result");
}

static void take(struct early *early) {
    CHECK(strcmp(early->mapped, "mapped") == 0);
    CHECK(munmap(early->mapped, 4096) == 0);
    CHECK(strcmp(early->text, "program\n") == 0);
    for (int at = 0; at < KEPT; at++) {
        size_t size = 16 + at * 61;
        char *block = early->kept[at];
        CHECK(block && (uintptr_t)block % 16 == 0);
        for (size_t byte = 0; byte < 3 * size; byte++) CHECK(block[byte] == (char)at);
        if (at % 2) {
            block = realloc(block, 100000);
            for (size_t byte = 0; byte < 3 * size; byte++) CHECK(block[byte] == (char)at);
        }
        free(block);
    }
    CHECK(early->aligned && (uintptr_t)early->aligned % 1024 == 0);
    free(early->aligned);
    for (int at = 0; at < 700; at++) CHECK(early->zeros[at] == 0);
    free(early->zeros);
}

int main(void) {
    take(pointer());
    take(early_blocks(0));
    take(early_blocks(1));
    CHECK(pthread_key_create(&key, of_thread) == 0);
    for (int round = 0; round < 50; round++) {
        pthread_t threads[4];
        for (int at = 0; at < 4; at++) CHECK(pthread_create(&threads[at], NULL, thread, NULL) == 0);
        for (int at = 0; at < 4; at++) {
            void *result;
            CHECK(pthread_join(threads[at], &result) == 0);
            CHECK(strcmp(result, "result") == 0);
            free(result);
        }
    }
    puts("done");
    return 0;
}

#endif
