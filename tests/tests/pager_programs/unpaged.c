/* Touches a given number of MiB of one kind of memory, writes a line, and ends. The kinds include
 * memory that the pager does not see and memory that it must see. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, MIB = 1 << 20, KIB = 1 << 10 };
static char bss[64 * MIB];
static char data[64 * MIB] = {1};
static size_t bytes;

static void touch(char *at, size_t len) {
    for (size_t i = 0; i < len; i += PAGE) at[i] = (char)(i / PAGE * 7 + 1);
    for (size_t i = 0; i < len; i += PAGE) CHECK(at[i] == (char)(i / PAGE * 7 + 1));
}
static char *map(size_t len, int prot, int flags, int fd) {
    char *at = mmap(0, len, prot, flags, fd, 0);
    CHECK(at != MAP_FAILED);
    return at;
}
static char *raw(void) {
    char *at = (char *)syscall(SYS_mmap, 0, bytes, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}
static void *on_stack(void *none) {
    volatile char room[bytes];
    touch((char *)room, bytes);
    /* The process ends while the stack exists. */
    puts("stack");
    exit(none != 0);
}
/* Like the garbage collector of Ruby 3.1: maps twice the size and unmaps all but an aligned
 * part. */
static char *aligned(size_t size) {
    char *at = map(2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    char *part = (char *)(((size_t)at + size) & ~(size - 1));
    if (part > at) CHECK(!munmap(at, part - at));
    if (part + size < at + 2 * size) CHECK(!munmap(part + size, at + size - part));
    return part;
}
static void in_parts(size_t size, char *(*get)(size_t)) {
    size_t count = bytes / size;
    char **all = malloc(count * sizeof *all);
    for (size_t i = 0; i < count; i++) {
        all[i] = get(size);
        memset(all[i], (int)i, size);
        /* A page of one repeated word would need no slot. */
        for (size_t page = 0; page < size; page += PAGE) all[i][page + 1] = (char)~i;
    }
    for (size_t i = 0; i < count; i++) CHECK(all[i][0] == (char)i && all[i][size - 1] == (char)i);
    for (size_t i = 0; i < count; i += 2) CHECK(!munmap(all[i], size));
    for (size_t i = 1; i < count; i += 2)
        CHECK(all[i][0] == (char)i && all[i][size - 1] == (char)i);
}
/* Like setproctitle of Redis, PostgreSQL and others: the C library's variable for the program's
 * name points to the heap. Unpaged memory grows, and the pager looks for it while the page with the
 * name is not resident. */
static void renamed(void) {
    char *page = aligned_alloc(PAGE, PAGE), *heap = malloc(bytes);
    CHECK(page && heap);
    memset(page, 'x', PAGE);
    strcpy(page, "renamed");
    program_invocation_short_name = page;
    for (int round = 0; round < 20; round++) {
        touch(heap, bytes);
        touch(map(2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1), 2 * MIB);
        usleep(100 * 1000);
        CHECK(page[PAGE - 1] == 'x' && !strcmp(page, "renamed"));
    }
}
static char *small(size_t size) {
    return map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    const char *kind = arguments[1];
    bytes = (size_t)atoi(arguments[2]) * MIB;
    if (!strcmp(kind, "raw")) touch(raw(), bytes);
    else if (!strcmp(kind, "brk")) {
        char *at = sbrk((long)bytes);
        CHECK(at != (char *)-1);
        touch(at, bytes);
    }
    else if (!strcmp(kind, "executable"))
        touch(map(bytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1),
            bytes);
    else if (!strcmp(kind, "data")) { CHECK(bytes <= sizeof data); touch(data, bytes); }
    else if (!strcmp(kind, "bss")) { CHECK(bytes <= sizeof bss); touch(bss, bytes); }
    else if (!strcmp(kind, "stack")) {
        pthread_attr_t attributes;
        pthread_t thread;
        CHECK(!pthread_attr_init(&attributes)
            && !pthread_attr_setstacksize(&attributes, bytes + MIB));
        CHECK(!pthread_create(&thread, &attributes, on_stack, 0) && !pthread_join(thread, 0));
    } else if (!strcmp(kind, "shared"))
        touch(map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1), bytes);
    else if (!strcmp(kind, "memfd")) {
        int fd = memfd_create("unpaged", 0);
        CHECK(fd >= 0 && !ftruncate(fd, (long)bytes));
        touch(map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd), bytes);
    } else if (!strcmp(kind, "file")) {
        char name[] = "/tmp/granary-unpaged-XXXXXX";
        int fd = mkstemp(name);
        CHECK(fd >= 0 && !unlink(name) && !ftruncate(fd, (long)bytes));
        touch(map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd), bytes);
    } else if (!strcmp(kind, "fixed")) {
        char *at = mmap((void *)0x100000000000, bytes, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(at == (char *)0x100000000000);
        touch(at, bytes);
    } else if (!strcmp(kind, "vast")) {
        /* Like MariaDB, which reserves memory for its buffer pool and uses a part of it. */
        size_t reserved = (size_t)8 << 40;
        char *at = map(reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        CHECK(mmap(at, bytes / 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
            -1, 0) == at);
        CHECK(!mprotect(at + bytes / 2, bytes - bytes / 2, PROT_READ | PROT_WRITE));
        touch(at, bytes);
        CHECK(!munmap(at + bytes, reserved - bytes));
    } else if (!strcmp(kind, "child")) {
        pid_t child = fork();
        if (child == 0) { touch(raw(), bytes); exit(0); }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    else if (!strcmp(kind, "renamed")) renamed();
    /* The following kinds are paged. */
    else if (!strcmp(kind, "aligned")) in_parts(16 * KIB, aligned);
    else if (!strcmp(kind, "aligned64")) in_parts(64 * KIB, aligned);
    else if (!strcmp(kind, "small")) in_parts(PAGE, small);
    else if (!strcmp(kind, "reserved")) {
        char *at = map(4 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        CHECK(!mprotect(at, bytes / 2, PROT_READ | PROT_WRITE));
        CHECK(mmap(at + bytes / 2, bytes / 2, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + bytes / 2);
        touch(at, bytes);
    } else return 2;
    printf("%s\n", kind);
    return 0;
}
