/* A program that accesses its memory by /proc/self/mem and process_vm_readv, as crash reporters,
 * profilers and unwinders do, and whose child accesses it by process_vm_readv. A thread is
 * cancelled in a read. */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include "check.h"
enum { SIZE = 32 << 20, PAGE = 4096, PART = 5 * PAGE };

static unsigned char *block, *copy;

static ssize_t transfer(ssize_t (*call)(pid_t, const struct iovec *, unsigned long,
                            const struct iovec *, unsigned long, unsigned long),
    pid_t process, size_t at, size_t len) {
    struct iovec local = {copy, len}, remote = {block + at, len};
    return call(process, &local, 1, &remote, 1, 0);
}

static void check_part(size_t at, size_t len) {
    for (size_t i = 0; i < len; i++) CHECK(copy[i] == block_byte(at + i, 1));
}

/* Reads the whole block by process_vm_readv. */
static void read_process(pid_t process) {
    for (size_t at = 0; at + PART <= SIZE; at += PART) {
        CHECK(transfer(process_vm_readv, process, at, PART) == PART);
        check_part(at, PART);
    }
}

static void read_file(int mem) {
    for (size_t at = 0; at + PART <= SIZE; at += PART) {
        CHECK(pread(mem, copy, PART, (uintptr_t)block + at) == PART);
        check_part(at, PART);
    }
    CHECK(lseek(mem, (uintptr_t)block + 7, SEEK_SET) == (intptr_t)block + 7);
    for (size_t at = 7; at + PART <= SIZE; at += PART) {
        CHECK(read(mem, copy, PART) == PART);
        check_part(at, PART);
    }
}

/* Writes the block backwards, so that each write finds pages that are not resident. */
static void write_file(int mem) {
    fill_block(block, SIZE, 3);
    for (size_t at = SIZE / PART * PART; at > 0; at -= PART) {
        for (size_t i = 0; i < PART; i++) copy[i] = block_byte(at - PART + i, 1);
        CHECK(pwrite(mem, copy, PART, (uintptr_t)block + at - PART) == PART);
    }
    for (size_t i = SIZE / PART * PART; i < SIZE; i++) block[i] = block_byte(i, 1);
    check_block(block, SIZE, 1);
}

static void check_errors(int mem) {
    unsigned char *hole = mmap(0, PART, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED && !munmap(hole, PART));
    CHECK(pread(mem, copy, 64, (uintptr_t)hole) == -1 && errno == EIO);
    CHECK(pread(mem, copy, 64, 64) == -1 && errno == EIO);
    CHECK(pwrite(mem, copy, 64, (uintptr_t)block) == -1 && errno == EBADF);
}

static void *read_forever(void *fd) {
    char byte;
    CHECK(read(*(int *)fd, &byte, 1) == 1);
    pthread_testcancel();
    read(*(int *)fd, &byte, 1);
    _exit(3);
}

static void cancel_reader(void) {
    int ends[2];
    pthread_t thread;
    void *result;
    CHECK(!pipe(ends) && !pthread_create(&thread, 0, read_forever, &ends[0]));
    CHECK(write(ends[1], "x", 1) == 1);
    CHECK(!pthread_cancel(thread) && !pthread_join(thread, &result) && result == PTHREAD_CANCELED);
}

int main(void) {
    block = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    copy = malloc(PART);
    CHECK(block != MAP_FAILED && copy);
    cancel_reader();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    int go[2];
    CHECK(!pipe(go));
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        char byte;
        CHECK(read(go[0], &byte, 1) == 1);
        read_process(parent);
        _exit(0);
    }
    fill_block(block, SIZE, 1);
    CHECK(write(go[1], "x", 1) == 1);
    check_child(child, 0);
    read_process(parent);
    for (size_t at = 0; at < PART; at++) copy[at] = block_byte(at, 1);
    CHECK(transfer(process_vm_writev, parent, 0, PART) == PART);
    int mem = open("/proc/self/mem", O_RDONLY), writable = open("/proc/self/mem", O_RDWR);
    CHECK(mem >= 0 && writable >= 0);
    read_file(mem);
    write_file(writable);
    check_errors(mem);
    puts("all bytes are right");
    return 0;
}
