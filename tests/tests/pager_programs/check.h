/* If the condition is false, CHECK prints the process, line and condition, and ends the process with status 1. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "process %d, line %d: %s (%s)\n", getpid(), __LINE__, #what,           \
                    strerror(errno));                                                              \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
