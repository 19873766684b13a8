/* mallinfo, mallinfo2, malloc_info, malloc_stats, malloc_trim: blocks of two threads, larger than
 * the limit, some of them freed by the other thread. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
enum { BLOCKS = 40000, BYTES = 1000, LARGE = 4 << 20 };
static char *blocks[BLOCKS];

static void *fill(void *unused) {
    for (int i = 0; i < BLOCKS; i++) CHECK(blocks[i] = memset(malloc(BYTES), i, BYTES));
    return unused;
}
static int is_about(size_t value, size_t expected) {
    return value >= expected && value <= expected + expected / 4 + (1 << 20);
}

int main(void) {
    pthread_t thread;
    size_t all = (size_t)BLOCKS * BYTES, before = mallinfo2().uordblks;
    CHECK(!pthread_create(&thread, 0, fill, 0) && !pthread_join(thread, 0));
    struct mallinfo2 full = mallinfo2();
    CHECK(is_about(full.uordblks + full.hblkhd, before + all));
    CHECK(full.arena + full.hblkhd >= all && full.arena == full.uordblks + full.fordblks);
    CHECK(is_about((size_t)mallinfo().uordblks + mallinfo().hblkhd, before + all));
    char *text = 0;
    size_t size, system = 0;
    FILE *stream = open_memstream(&text, &size);
    CHECK(!malloc_info(0, stream) && !fclose(stream) && malloc_info(1, stdout));
    char *at = strstr(text, "</heap>");
    CHECK(!strncmp(text, "<malloc version=\"1\">", 20) && strstr(text, "</malloc>") && at);
    CHECK((at = strstr(text, "<system type=\"current\" size=\""))
        && sscanf(at, "<system type=\"current\" size=\"%zu\"/>", &system) == 1 && system > 0);
    free(text);
    for (int i = 0; i < BLOCKS; i += 2) free(blocks[i]);
    struct mallinfo2 half = mallinfo2();
    CHECK(is_about(half.uordblks, before + all / 2));
    char *large = malloc(LARGE);
    memset(large, 1, LARGE);
    half = mallinfo2();
    CHECK(is_about(half.uordblks + half.hblkhd, before + all / 2 + LARGE));
    CHECK(large = realloc(large, 2 * LARGE));
    half = mallinfo2();
    CHECK(is_about(half.uordblks + half.hblkhd, before + all / 2 + 2 * LARGE));
    free(large);
    for (int i = 1; i < BLOCKS; i += 2) free(blocks[i]);
    CHECK(mallinfo2().uordblks <= before + (1 << 20));
    malloc_trim(0);
    CHECK(malloc_trim(0) >= 0 && mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1);
    malloc_stats();
    puts("as expected");
    return 0;
}
