/* A daemon that root starts. Its workers drop root's rights before they need memory, like those of
 * nginx and Apache. A worker also has a child. With an argument, the workers change their root
 * directory first. */
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 8192, NOBODY = 65534 };

#include "check.h"

static unsigned char *fill(int with) {
    unsigned char *memory = malloc(PAGES * PAGE);
    CHECK(memory);
    for (int page = 0; page < PAGES; page++) memset(memory + page * PAGE, with + page % 7, PAGE);
    return memory;
}

static void check(const unsigned char *memory, int with) {
    for (int page = 0; page < PAGES; page++) {
        CHECK(memory[page * PAGE] == with + page % 7);
        CHECK(memory[page * PAGE + PAGE - 1] == with + page % 7);
    }
}

static void wait_for(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void work(const unsigned char *inherited, const char *root) {
    CHECK(!root || (chdir(root) == 0 && chroot(root) == 0));
    CHECK(setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0 && setuid(0) != 0);
    unsigned char *own = fill(20);
    check(inherited, 10);
    pid_t child = fork();
    if (child == 0) {
        unsigned char *last = fill(30);
        check(inherited, 10);
        check(own, 20);
        check(last, 30);
        _exit(0);
    }
    wait_for(child);
    check(own, 20);
    _exit(0);
}

int main(int count, char **arguments) {
    unsigned char *memory = fill(10);
    pid_t workers[2];
    for (int at = 0; at < 2; at++)
        if ((workers[at] = fork()) == 0) work(memory, count > 1 ? arguments[1] : NULL);
    for (int at = 0; at < 2; at++) wait_for(workers[at]);
    check(memory, 10);
    puts("done");
    return 0;
}
