/* Fills MIB, and then visits all pages in a fixed order that read-ahead does not recognise: the
 * given number of times, or without a number until standard input ends. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "check.h"

int main(int argc, char **argv) {
    CHECK(argc > 1);
    unsigned long pages = strtoul(argv[1], 0, 10) << 8, rounds = 0;
    unsigned long most = argc > 2 ? strtoul(argv[2], 0, 10) : 0;
    unsigned char *block =
        mmap(0, pages << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(block != MAP_FAILED);
    fill_block(block, pages << 12, 1);
    puts("filled");
    fflush(stdout);
    CHECK(!fcntl(0, F_SETFL, O_NONBLOCK));
    for (char byte;;) {
        for (unsigned long step = 0; step < pages; step++) {
            size_t at = (step * 4099 % pages) << 12;
            CHECK(block[at] == block_byte(at, 1));
        }
        if (most ? ++rounds == most : read(0, &byte, 1) == 0) return 0;
    }
}
