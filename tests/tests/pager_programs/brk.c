/* A program with its own allocator, which uses sbrk and brk. */

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define BLOCKS 64
#define BLOCK (1000 * 1000)

static void check(const unsigned char *block, int blocks) {
    for (int at = 0; at < blocks; at++)
        for (size_t byte = 0; byte < BLOCK; byte += 50)
            CHECK(block[(size_t)at * BLOCK + byte] == (unsigned char)(at + 1));
}

int main(void) {
    unsigned char *first = sbrk(0);
    CHECK(first == sbrk(0));
    for (int at = 0; at < BLOCKS; at++) {
        unsigned char *block = sbrk(BLOCK);
        CHECK(block == first + (size_t)at * BLOCK);
        for (size_t byte = 0; byte < BLOCK; byte += 50) CHECK(block[byte] == 0);
        for (size_t byte = 0; byte < BLOCK; byte += 50) block[byte] = (unsigned char)(at + 1);
    }
    check(first, BLOCKS);
    int status;
    pid_t child = fork();
    if (child == 0) {
        check(first, BLOCKS);
        CHECK(sbrk(BLOCK) == first + (size_t)BLOCKS * BLOCK);
        first[0] = 99;
        _Exit(7);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    check(first, BLOCKS);
    /* Memory that is released and requested again is zero. */
    CHECK(brk(first + 10 * BLOCK + 100) == 0);
    CHECK(sbrk(0) == first + 10 * BLOCK + 100);
    check(first, 10);
    CHECK(sbrk(BLOCK) == first + 10 * BLOCK + 100);
    for (size_t byte = 8192; byte < BLOCK; byte++) CHECK(first[10 * BLOCK + 100 + byte] == 0);
    CHECK(sbrk(-10 * BLOCK) == first + 11 * BLOCK + 100);
    check(first, 1);
    errno = 0;
    CHECK(sbrk((intptr_t)1 << 46) == (void *)-1 && errno == ENOMEM);
    CHECK(brk(first) == 0 && sbrk(0) == first);
    puts("done");
    return 0;
}
