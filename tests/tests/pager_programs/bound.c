/* Uses memory while the bound of the run changes: bound MIB READY GO
   Writes MIB MiB, makes the file READY, waits for the file GO, and checks each page twice. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

static uint64_t word(size_t at) {
    return (at + 1) * 0x9e3779b97f4a7c15u;
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    size_t words = strtoul(argv[1], NULL, 10) << 17;
    uint64_t *memory = malloc(words * 8);
    CHECK(memory != NULL);
    for (size_t at = 0; at < words; at++)
        memory[at] = word(at);
    FILE *ready = fopen(argv[2], "w");
    CHECK(ready != NULL && fclose(ready) == 0);
    struct stat found;
    while (stat(argv[3], &found) != 0)
        usleep(2000);
    for (int round = 0; round < 2; round++)
        for (size_t at = 0; at < words; at++)
            CHECK(memory[at] == word(at));
    puts("right");
    return 0;
}
