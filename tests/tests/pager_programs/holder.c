/* Fills memory that is larger than the limit, reports it, and then checks and changes the memory
 * for ever. Every page contains its number and the round of the last write, at its start and
 * end. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGES = 8192, WORDS = 4096 / sizeof(unsigned long) };
static unsigned long *memory;

static void put(unsigned long page, unsigned long round) {
    unsigned long *words = memory + page * WORDS;
    words[0] = words[WORDS - 1] = round << 32 | page;
}

static void check(unsigned long page, unsigned long round) {
    unsigned long *words = memory + page * WORDS, expected = round << 32 | page;
    if (words[0] != expected || words[WORDS - 1] != expected) {
        printf("page %lu is wrong: %lx and %lx, not %lx\n", page, words[0], words[WORDS - 1],
            expected);
        exit(1);
    }
}

int main(void) {
    memory = mmap(0, PAGES * 4096L, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (unsigned long page = 0; page < PAGES; page++) put(page, 1);
    puts("filled");
    fflush(stdout);
    for (unsigned long round = 1;; round++) {
        /* The step is odd: it visits every page once, in an order that read-ahead does not
         * recognise. */
        for (unsigned long step = 0; step < PAGES; step++) {
            unsigned long page = step * 4099 % PAGES;
            check(page, round);
            put(page, round + 1);
        }
    }
}
