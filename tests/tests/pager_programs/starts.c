// Starts a program with an environment that lacks the preload library, in the way that the first
// argument names. The second one is the program's path.
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wordexp.h>

enum { MANY = 5000 };
static char *none[] = {NULL};
static char *other[] = {"LD_PRELOAD=libgranary-other.so:", "X=1", NULL};
static char *many[MANY + 1];
static char *program, *directory, *name;
static char **arguments;

static void by_exec(const char *how) {
    if (!strcmp(how, "execve")) execve(program, arguments, none);
    if (!strcmp(how, "null")) execve(program, arguments, NULL);
    if (!strcmp(how, "many")) execve(program, arguments, many);
    if (!strcmp(how, "execle")) execle(program, program, NULL, none);
    if (!strcmp(how, "execvpe")) execvpe(name, arguments, none);
    if (!strcmp(how, "fexecve")) fexecve(open(program, O_RDONLY | O_CLOEXEC), arguments, none);
    if (!strcmp(how, "execveat")) {
        int fd = open(directory, O_RDONLY | O_DIRECTORY);
        execveat(fd, name, arguments, none, 0);
    }
    if (!strcmp(how, "number")) syscall(SYS_execve, program, arguments, none);
    if (!strcmp(how, "number-at")) syscall(SYS_execveat, AT_FDCWD, program, arguments, none, 0);
}

static pid_t by_spawn(const char *how) {
    pid_t child = 0;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (!strcmp(how, "spawn")) CHECK(!posix_spawn(&child, program, NULL, NULL, arguments, none));
    if (!strcmp(how, "spawn-many"))
        CHECK(!posix_spawn(&child, program, NULL, NULL, arguments, many));
    if (!strcmp(how, "spawnp")) CHECK(!posix_spawnp(&child, name, NULL, NULL, arguments, none));
    if (!strcmp(how, "chdir")) {
        CHECK(!chdir("/"));
        posix_spawn_file_actions_addchdir_np(&actions, directory);
        CHECK(!posix_spawn(&child, name, &actions, NULL, arguments, none));
    }
    return child;
}

static int by_shell(const char *how) {
    CHECK(!unsetenv("LD_PRELOAD"));
    for (int at = 0; environ[at];) {
        if (strncmp(environ[at], "GRANARY_", 8)) { at++; continue; }
        char *variable = strndup(environ[at], strcspn(environ[at], "="));
        CHECK(!unsetenv(variable));
    }
    char **before = environ;
    if (!strcmp(how, "system")) {
        CHECK(system(program) == 0);
    } else if (!strcmp(how, "popen")) {
        char line[100];
        FILE *pipe = popen(program, "r");
        CHECK(pipe && fgets(line, sizeof line, pipe) && pclose(pipe) == 0);
        fputs(line, stdout);
    } else if (!strcmp(how, "wordexp")) {
        char command[5000];
        wordexp_t words;
        snprintf(command, sizeof command, "$(%s)", program);
        CHECK(wordexp(command, &words, 0) == 0 && words.we_wordc == 1);
        puts(words.we_wordv[0]);
    } else {
        return 0;
    }
    CHECK(environ == before && !getenv("LD_PRELOAD") && !getenv("GRANARY_LOCAL"));
    return 1;
}

int main(int count, char **given) {
    CHECK(count == 3);
    char *how = given[1];
    program = given[2];
    directory = strdup(program);
    *strrchr(directory, '/') = 0;
    name = strrchr(program, '/') + 1;
    arguments = (char *[]){program, NULL};
    for (int i = 0; i < MANY; i++) CHECK(asprintf(&many[i], "VARIABLE_%d=%d", i, i) > 0);
    // The first directory of PATH has a directory of the program's name.
    char *first, *wrong, *path;
    CHECK(asprintf(&first, "%s/path", directory) > 0);
    CHECK(asprintf(&wrong, "%s/path/%s", directory, name) > 0);
    CHECK(asprintf(&path, "%s/path:%s", directory, directory) > 0);
    CHECK(!mkdir(first, 0755) || errno == EEXIST);
    CHECK(!mkdir(wrong, 0755) || errno == EEXIST);
    setenv("PATH", path, 1);
    errno = 0;
    // A failed call leaves everything as it was.
    CHECK(execve("/no/such/program", arguments, other) == -1 && errno == ENOENT);
    CHECK(execve(directory, arguments, none) == -1 && errno == EACCES);
    int status = 0;
    pid_t child = by_spawn(how);
    if (child == 0 && by_shell(how)) return 0;
    if (child == 0) {
        int shares = !strncmp(how, "vfork-", 6);
        if (shares) how += 6;
        fflush(NULL);
        child = shares ? vfork() : fork();
        if (child == 0) {
            by_exec(how);
            _exit(99);
        }
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}
