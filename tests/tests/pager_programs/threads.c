/* Four threads write and check random pages of a mapping that is larger than the limit. argv[1] is
 * the number of visits of each thread (default: 30000). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "check.h"
enum { THREADS = 4, PAGES = 12288 };
static long steps;
static unsigned char *memory;

static void *worker(void *argument) {
    long id = (long)argument;
    unsigned state = id * 77 + 1;
    unsigned long sum = 0;
    for (int step = 0; step < steps; step++) {
        state = state * 1103515245 + 12345;
        size_t page = (state >> 8) % (PAGES / THREADS) * THREADS + id;
        unsigned long *words = (unsigned long *)(memory + page * 4096);
        if (words[0] == 0) {
            words[0] = page + 1;
            words[511] = page + 2;
        }
        CHECK(words[0] == page + 1);
        CHECK(words[511] == page + 2);
        sum += page;
    }
    return (void *)sum;
}

int main(int argc, char **argv) {
    steps = argc > 1 ? atol(argv[1]) : 0;
    if (steps <= 0) steps = 30000;
    memory = mmap(0, PAGES * 4096L, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    pthread_t threads[THREADS];
    for (long id = 0; id < THREADS; id++)
        CHECK(!pthread_create(&threads[id], 0, worker, (void *)id));
    unsigned long sum = 0;
    for (int id = 0; id < THREADS; id++) {
        void *part;
        CHECK(!pthread_join(threads[id], &part));
        sum += (unsigned long)part;
    }
    printf("%lu\n", sum);
    return 0;
}
