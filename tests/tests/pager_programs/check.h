/* CHECK ends the process with status 1, and says what did not hold, where and in which process. */
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
