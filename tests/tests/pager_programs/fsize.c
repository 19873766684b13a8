/* Fills 24 MiB with lines of text that contain their position. With a size as argument, it first
 * sets that limit of file sizes. The limit also applies to the program: if it writes beyond it, it
 * gets the signal once, and EFBIG. With the argument "waits" it reports when all memory is filled,
 * and checks the memory after a line of input. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
enum { LINE = 64, LINES = (24 << 20) / LINE };
static volatile sig_atomic_t signals;
static void on_signal(int number) { signals += number == SIGXFSZ; }
static char *memory;

static void line(char *at, int number) {
    snprintf(at, LINE, "a secret of the program's, line %d", number);
}
static void fill(void) { for (int i = 0; i < LINES; i++) line(memory + (size_t)i * LINE, i); }
static void look(void) {
    for (int i = 0; i < LINES; i++) {
        char wanted[LINE] = "";
        line(wanted, i);
        if (strcmp(memory + (size_t)i * LINE, wanted)) { puts("wrong data"); exit(1); }
    }
}

int main(int count, char **arguments) {
    memory = malloc((size_t)LINES * LINE);
    if (count > 1 && !strcmp(arguments[1], "waits")) {
        fill();
        puts("filled");
        fflush(stdout);
        CHECK(getchar() != EOF);
    } else if (count > 1) {
        struct rlimit limit;
        CHECK(!getrlimit(RLIMIT_FSIZE, &limit) && signal(SIGXFSZ, on_signal) != SIG_ERR);
        limit.rlim_cur = atol(arguments[1]);
        CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
        FILE *file = tmpfile();
        CHECK(file);
        errno = 0;
        CHECK(pwrite(fileno(file), "x", 1, limit.rlim_cur) == -1 && errno == EFBIG && signals == 1);
        CHECK(ftruncate(fileno(file), limit.rlim_cur + 1) == -1 && errno == EFBIG && signals == 2);
        fill();
    } else fill();
    look();
    CHECK(signals == (count > 1 && strcmp(arguments[1], "waits") ? 2 : 0));
    puts("as expected");
    return 0;
}
