/* A program sets resource limits on itself while its memory is paged. Its memory stays correct, and
 * requests beyond the limits fail with ENOMEM. A child that needs its own pager under such a limit
 * may end with a message, but never has wrong data. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 5000, MIB = 1 << 20 };
static unsigned *memory;
static void look(void) {
    for (size_t i = 0; i < PAGES; i++) CHECK(memory[i * (PAGE / 4)] == i + 1);
}
static int wait_for(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Allocates up to 16 MiB, or until a request fails, and uses all of it. */
static void allocate(size_t size) {
    enum { MOST = 256 };
    static unsigned char *all[MOST];
    size_t got = 0, most = 16 * MIB / size < MOST ? 16 * MIB / size : MOST;
    for (; got < most; got++) {
        errno = 0;
        unsigned char *block = got % 2 ? malloc(size)
            : mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (!block || block == MAP_FAILED) { CHECK(errno == ENOMEM); break; }
        memset(block, (int)got + 1, size);
        all[got] = block;
    }
    for (size_t i = 0; i < got; i++) {
        for (size_t at = 0; at < size; at += 512) CHECK(all[i][at] == (unsigned char)(i + 1));
        if (i % 2) free(all[i]); else CHECK(!munmap(all[i], size));
    }
}

static void limit(int which, rlim_t most) {
    struct rlimit limit;
    CHECK(!getrlimit(which, &limit));
    limit.rlim_cur = most;
    CHECK(!setrlimit(which, &limit));
    /* User 0 may have any number of processes. */
    if (which == RLIMIT_NPROC && geteuid() == 0) CHECK(!setuid(65534));
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    memory = malloc((size_t)PAGES * PAGE);
    for (size_t i = 0; i < PAGES; i++) memory[i * (PAGE / 4)] = i + 1;
    const char *name = arguments[1];
    int which = !strcmp(name, "as") ? RLIMIT_AS
        : !strcmp(name, "data") ? RLIMIT_DATA
        : RLIMIT_NPROC;
    int early = getenv("GRANARY_LOCAL") ? 118 : 7;
    rlim_t limits[] = {0, which == RLIMIT_NPROC ? 1 : 16 * MIB};
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        if (child == 0) {
            /* Before or after the child allocates memory. */
            if (i < 2) look();
            limit(which, limits[i % 2]);
            look();
            allocate(MIB);
            allocate(70 * 1024);
            look();
            _exit(7);
        }
        int status = wait_for(child);
        CHECK(status == 7 || (i >= 2 && status == early));
    }
    limit(which, limits[1]);
    look();
    allocate(MIB);
    pid_t child = fork();
    if (child == 0) { look(); _exit(7); }
    if (child < 0) CHECK(errno == EAGAIN || errno == ENOMEM);
    else {
        int status = wait_for(child);
        CHECK(status == 7 || status == early);
    }
    look();
    puts("as expected");
    return 0;
}
