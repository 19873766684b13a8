/* Kills the process that keeps the pages of forked children, at several moments. Children and
 * parent continue with correct data, or end with the pager's status. No process hangs. Without the
 * pager, there is no process to kill. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 5000, ENDED_BY_PAGER = 118, PATIENCE_S = 60 };
static unsigned *memory;
static int is_paged;

static void look(unsigned from, unsigned to) {
    for (unsigned i = from; i < to; i++) CHECK(memory[i * (PAGE / 4)] == i + 1);
}

/* The keeper of `parent`, or 0. */
static pid_t keeper_of(pid_t parent) {
    DIR *all = opendir("/proc");
    CHECK(all);
    pid_t found = 0;
    for (struct dirent *entry; !found && (entry = readdir(all));) {
        char path[300], line[400];
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *stat = fopen(path, "r");
        int pid, above;
        char name[32], state;
        if (!stat) continue;
        if (fgets(line, sizeof line, stat)
            && sscanf(line, "%d (%31[^)]) %c %d", &pid, name, &state, &above) == 4
            && above == parent && !strcmp(name, "granary-keeper") && state != 'Z') found = pid;
        fclose(stat);
    }
    closedir(all);
    return found;
}

/* True if the process waits in poll(2), not for a lock or a core. */
static int waits(pid_t process) {
    char path[40];
    long call = -1;
    snprintf(path, sizeof path, "/proc/%d/syscall", process);
    FILE *file = fopen(path, "r");
    CHECK(file);
    if (fscanf(file, "%ld", &call) != 1) call = -1;
    fclose(file);
    return call == SYS_poll;
}

/* Kills the keeper while it waits, and waits for its end. The keeper gets its name when it starts
 * to work. The child that it served runs before the keeper waits again. */
static void kill_keeper(pid_t parent) {
    if (!is_paged) return;
    pid_t keeper;
    while (!(keeper = keeper_of(parent)) || !waits(keeper)) sched_yield();
    int end = syscall(SYS_pidfd_open, keeper, 0);
    CHECK(end >= 0 && !kill(keeper, SIGKILL));
    struct pollfd gone = {.fd = end, .events = POLLIN};
    CHECK(poll(&gone, 1, PATIENCE_S * 1000) == 1);
    close(end);
}

static int end_of(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* A child that waits for a message before each step, and reports the end of each step. */
struct link { int to[2], from[2]; };
static void say(int end) { CHECK(write(end, "x", 1) == 1); }
static void hear(int end) { char word; CHECK(read(end, &word, 1) == 1); }

/* The keeper is killed while it waits, after the child has read `before` pages. */
static void idle(unsigned before, int executes, char **arguments) {
    struct link link;
    CHECK(!pipe(link.to) && !pipe(link.from));
    pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE_S);
        look(0, before);
        say(link.from[1]);
        hear(link.to[0]);
        if (executes) {
            execl("/proc/self/exe", arguments[0], "executed", (char *)0);
            _exit(1);
        }
        look(0, PAGES);
        /* The same with grandchildren. */
        pid_t grandchild = fork();
        if (grandchild == 0) { alarm(PATIENCE_S); look(0, PAGES); _exit(7); }
        CHECK(end_of(grandchild) == 7);
        _exit(7);
    }
    hear(link.from[0]);
    kill_keeper(getpid());
    say(link.to[1]);
    int status = end_of(child);
    /* If a keeper is killed while it has work, its parent ends too. */
    CHECK(status == 7);
    look(0, PAGES);
}

int main(int count, char **arguments) {
    CHECK(count >= 2);
    const char *mode = arguments[1];
    if (!strcmp(mode, "executed")) return 7;
    if (!strcmp(mode, "killer")) {
        /* Kills the keepers of a process while that process lives. */
        pid_t parent = atoi(arguments[2]);
        srand(parent);
        for (unsigned killed = 0; !kill(parent, 0);) {
            pid_t keeper = keeper_of(parent);
            if (keeper) killed += !kill(keeper, SIGKILL);
            usleep(rand() % 3000);
        }
        return 0;
    }
    is_paged = getenv("GRANARY_LOCAL") != 0;
    memory = malloc((size_t)PAGES * PAGE);
    for (unsigned i = 0; i < PAGES; i++) memory[i * (PAGE / 4)] = i + 1;
    if (!strcmp(mode, "light")) for (int i = 0; i < 5; i++) idle(0, 0, arguments);
    else if (!strcmp(mode, "grown")) for (int i = 0; i < 5; i++) idle(1000, 0, arguments);
    else if (!strcmp(mode, "exec")) for (int i = 0; i < 5; i++) idle(0, 1, arguments);
    else if (!strcmp(mode, "storm")) {
        char self[32];
        snprintf(self, sizeof self, "%d", getpid());
        char *killer[] = {arguments[0], "killer", self, 0}, *nothing[] = {0};
        pid_t other;
        if (is_paged) CHECK(!posix_spawn(&other, "/proc/self/exe", 0, 0, killer, nothing));
        alarm(2 * PATIENCE_S);
        for (int i = 0; i < 60; i++) {
            pid_t child = fork();
            if (child == 0) { alarm(PATIENCE_S); look(0, i % 3 ? PAGES : 40); _exit(7); }
            int status = end_of(child);
            CHECK(status == 7 || (is_paged && status == ENDED_BY_PAGER));
            look(0, PAGES);
        }
        if (is_paged) kill(other, SIGKILL), end_of(other);
    } else return 2;
    puts("as expected");
    return 0;
}
