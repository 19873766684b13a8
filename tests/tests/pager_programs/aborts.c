/* Calls abort() while most of its memory is paged out. */
#include <stdio.h>
#include <stdlib.h>

enum { PAGE = 4096, PAGES = 6000 };
unsigned *volatile paged;

__attribute__((noinline)) unsigned word_of_page(size_t page) { return paged[page * (PAGE / 4)]; }

__attribute__((noinline)) void fail(void) {
    for (size_t i = 0; i < PAGES; i++) if (word_of_page(i) != i + 1) exit(1);
    puts("all there");
    fflush(stdout);
    abort();
}

int main(void) {
    paged = malloc((size_t)PAGES * PAGE);
    for (size_t i = 0; i < PAGES; i++) paged[i * (PAGE / 4)] = i + 1;
    fail();
    return 0;
}
