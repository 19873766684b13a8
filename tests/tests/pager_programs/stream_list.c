/* One thread walks the list of open streams, whose lock fork() takes, while the other one forks.
 * The buffers of the streams are larger than the limit, and the C library changes all streams in
 * the child before fork() returns there. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, STREAMS = 6000 };
static atomic_int done;

static void *flush(void *unused) {
    (void)unused;
    while (!done) fflush(0);
    return 0;
}

static ssize_t discard(void *cookie, const char *bytes, size_t count) {
    (void)cookie, (void)bytes;
    return (ssize_t)count;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    int children = atoi(arguments[1]);
    for (int i = 0; i < STREAMS; i++) {
        FILE *stream = fopencookie(0, "w", (cookie_io_functions_t){.write = discard});
        char *buffer = malloc(PAGE);
        CHECK(stream && buffer && !setvbuf(stream, buffer, _IOFBF, PAGE));
        CHECK(fputc('x', stream) == 'x');
    }
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, flush, 0));
    for (int c = 0; c < children; c++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(7);
        check_child(child, 7);
    }
    done = 1;
    CHECK(!pthread_join(thread, 0));
    puts("as expected");
    return 0;
}
