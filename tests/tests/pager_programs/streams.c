/* Data that libc and other libraries access in a child before the pager's atfork handler runs:
 * streams (their locks are reset), the state of the name service, thread-specific data, and
 * handlers that were registered earlier. All of it is in paged memory, and most of it is not
 * resident.
 *
 * Compiled twice: as a library that is initialised before the pager's and has handlers, and as a
 * program. */
#include <errno.h>
#include <pthread.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 4000, STREAMS = 24, KEYS = 300 };

#ifdef LIBRARY
unsigned *watched;
int calls[3];

static void look(int which) {
    calls[which]++;
    if (watched) for (size_t i = which; i < PAGES; i += 7) CHECK(watched[i * (PAGE / 4)] == i + 1);
}
static void before(void) { look(0); }
static void in_parent(void) { look(1); }
static void in_child(void) { look(2); }
__attribute__((constructor)) static void first(void) {
    pthread_atfork(before, in_parent, in_child);
}
#else
extern unsigned *watched;
extern int calls[3];
#pragma weak watched
#pragma weak calls

static pthread_key_t keys[KEYS];
static pthread_barrier_t there;
static void *other(void *nothing) {
    for (int k = 0; k < KEYS; k++) CHECK(!pthread_setspecific(keys[k], (void *)(size_t)(k + 1)));
    pthread_barrier_wait(&there);
    while (!nothing) pause();
    return nothing;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    int forks = atoi(arguments[1]);
    unsigned *memory = mmap(0, (PAGES + 100) * PAGE, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && getpwnam("root"));
    FILE *streams[STREAMS];
    char *between[STREAMS], line[64];
    for (int s = 0; s < STREAMS; s++) {
        CHECK((streams[s] = tmpfile()) && (between[s] = malloc(5000)));
        setvbuf(streams[s], 0, _IOFBF, 4096);
        for (int i = 0; i < 20; i++) CHECK(fprintf(streams[s], "stream %d line %d\n", s, i) > 0);
        rewind(streams[s]);
        memset(between[s], s, 5000);
    }
    CHECK(!pthread_barrier_init(&there, 0, 4));
    for (int k = 0; k < KEYS; k++) CHECK(!pthread_key_create(&keys[k], 0));
    pthread_t threads[3];
    for (int t = 0; t < 3; t++) CHECK(!pthread_create(&threads[t], 0, other, 0));
    pthread_barrier_wait(&there);
    if (&watched) watched = memory;
    for (int f = 0; f < forks; f++) {
        /* Causes all other pages to be evicted, and leaves more space, or less, or none. */
        for (size_t i = 0; i < PAGES; i++) memory[i * (PAGE / 4)] = i + 1;
        for (int i = 0; i < f % 67; i++) memory[(PAGES + i) * (PAGE / 4)] = f;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (int s = 0; s < STREAMS; s++) {
                char expected[64];
                sprintf(expected, "stream %d line 0\n", s);
                rewind(streams[s]);
                CHECK(fgets(line, sizeof line, streams[s]) && !strcmp(line, expected));
                for (int i = 0; i < 5000; i += 499) CHECK(between[s][i] == s);
            }
            CHECK(getpwnam("root"));
            for (size_t i = f % 5; i < PAGES; i += f % 10 ? 97 : 1)
                CHECK(memory[i * (PAGE / 4)] == i + 1);
            if (&calls) CHECK(calls[0] == f + 1 && calls[1] == f && calls[2] == 1);
            _exit(7);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
        if (&calls) CHECK(calls[0] == f + 1 && calls[1] == f + 1 && calls[2] == 0);
    }
    puts("as expected");
    return 0;
}
#endif
