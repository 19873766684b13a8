/* A program that is linked with a shared libjemalloc and mixes its functions with malloc and
 * free. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *mallocx(size_t, int);
extern void *rallocx(void *, size_t, int);
extern size_t xallocx(void *, size_t, size_t, int);
extern size_t sallocx(const void *, int);
extern void dallocx(void *, int);
extern void sdallocx(void *, size_t, int);
extern size_t nallocx(size_t, int);
extern int mallctl(const char *, void *, size_t *, void *, size_t);

#define ALIGNED(log) (log)
#define ZERO 64

#include "check.h"

#define BLOCKS 64
#define BLOCK (1 << 20)

int main(void) {
    static unsigned char *blocks[BLOCKS];
    for (int at = 0; at < BLOCKS; at++) {
        blocks[at] = at % 2 ? malloc(BLOCK) : mallocx(BLOCK, ALIGNED(13) | (at % 4 ? ZERO : 0));
        CHECK(blocks[at]);
        if (at % 2 == 0) CHECK((uintptr_t)blocks[at] % 8192 == 0);
        if (at % 4 == 2)
            for (size_t byte = 0; byte < BLOCK; byte++) CHECK(blocks[at][byte] == 0);
        fill_block(blocks[at], BLOCK, at);
    }
    for (int at = 0; at < BLOCKS; at++) {
        CHECK(sallocx(blocks[at], 0) >= BLOCK);
        CHECK(xallocx(blocks[at], BLOCK, 0, 0) >= BLOCK);
        size_t size = BLOCK + 70000;
        if (at % 3 == 0) {
            fill_block(blocks[at], sallocx(blocks[at], 0), at);
            blocks[at] = rallocx(blocks[at], size, ZERO | (at % 2 ? ALIGNED(12) : 0));
        }
        check_block(blocks[at], BLOCK, at);
        switch (at % 4) {
        case 0: free(blocks[at]); break;
        case 1: dallocx(blocks[at], 0); break;
        case 2: sdallocx(blocks[at], at % 3 ? BLOCK : size, 0); break;
        case 3: free(realloc(blocks[at], 100)); break;
        }
    }
    char *text = strdup("of the C library");
    sdallocx(text, strlen(text) + 1, 0);
    void *block = mallocx(1000, 0);
    CHECK(nallocx(1000, 0) >= 1000 && sallocx(block, 0) >= 1000);
    dallocx(block, 0);
    unsigned arenas;
    size_t size = sizeof arenas;
    CHECK(mallctl("opt.narenas", &arenas, &size, NULL, 0) == 0 && arenas > 0);
    puts("done");
    return 0;
}
