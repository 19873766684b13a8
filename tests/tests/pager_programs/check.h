/* If the condition is false, CHECK prints the process, line and condition, and ends the process with
 * status 1. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "process %d, line %d: %s (%s)\n", getpid(), __LINE__, #what,           \
                    strerror(errno));                                                              \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* Waits for a child, which must end with this status. */
static inline void check_child(pid_t child, int expected) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == expected);
}

/* Contents of which no page is a repeated word: the pager keeps a page of one repeated word without
 * a slot, and such a page would never reach the memory node. */
static inline unsigned char block_byte(size_t at, int seed) {
    return (unsigned char)(at % 251 + (size_t)seed);
}

static inline void fill_block(unsigned char *block, size_t len, int seed) {
    for (size_t at = 0; at < len; at++) block[at] = block_byte(at, seed);
}

static inline void check_block(const unsigned char *block, size_t len, int seed) {
    for (size_t at = 0; at < len; at++) CHECK(block[at] == block_byte(at, seed));
}
