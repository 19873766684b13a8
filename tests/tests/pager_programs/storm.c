/* One thread creates children, by fork(3), by syscall(2) or by an instruction, while another thread
 * writes more pages than the limit allows. Pages are therefore evicted during forks. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, KEPT = 500, CHANGED = 4000 };
static atomic_int done;

static void *change(void *pages) {
    unsigned *memory = pages, round = 0;
    while (!done) {
        for (unsigned i = 0; i < CHANGED && !done; i++) {
            unsigned *word = &memory[i * (PAGE / 4)];
            CHECK(*word == round);
            *word = round + 1;
        }
        round++;
    }
    return 0;
}

static pid_t by_instruction(void) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_fork) : "rcx", "r11", "memory");
    return (pid_t)result;
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    const char *way = arguments[1];
    int children = atoi(arguments[2]);
    unsigned *kept = malloc(KEPT * PAGE), *changed = calloc(CHANGED, PAGE);
    CHECK(kept && changed);
    for (unsigned i = 0; i < KEPT; i++) kept[i * (PAGE / 4)] = i;
    pthread_t thread;
    CHECK(!pthread_create(&thread, 0, change, changed));
    for (int c = 0; c < children; c++) {
        pid_t child = !strcmp(way, "fork") ? fork()
            : !strcmp(way, "number")       ? (pid_t)syscall(SYS_fork)
                                           : by_instruction();
        CHECK(child >= 0);
        if (child == 0) {
            for (unsigned i = (unsigned)c % 7; i < KEPT; i += 7) CHECK(kept[i * (PAGE / 4)] == i);
            _exit(7);
        }
        check_child(child, 7);
    }
    done = 1;
    CHECK(!pthread_join(thread, 0));
    puts("as expected");
    return 0;
}
