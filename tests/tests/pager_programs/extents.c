/* Paged memory at addresses that the program chooses: static variables, fixed addresses, low
 * addresses. All of it is larger than the limit, changed by the mmap family, and inherited by
 * children. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 4096, PROT = PROT_READ | PROT_WRITE,
    FLAGS = MAP_PRIVATE | MAP_ANONYMOUS };
#define SIZE ((size_t)PAGES * PAGE)
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static unsigned char in_bss[SIZE];
/* In memory of the file: not paged. */
static unsigned long in_data[PAGE] = {42};

static void fill(unsigned char *at, unsigned seed) {
    for (size_t page = 0; page < PAGES; page++) *(unsigned *)(at + page * PAGE) = page * 3 + seed;
}
static int holds(unsigned char *at, size_t first, size_t end, unsigned seed) {
    for (size_t i = first; i < end; i++)
        if (*(unsigned *)(at + i * PAGE) != i * 3 + seed) return 0;
    return 1;
}
static unsigned char *map(size_t at, size_t size, int flags) {
    return mmap((void *)at, size, PROT, FLAGS | flags, -1, 0);
}
/* Runs before the preload library's constructor or after it: in both cases the bytes stay. */
__attribute__((constructor)) static void begin(void) { in_bss[SIZE / 2 + 1] = 7; }

static int child_of(unsigned char *at, unsigned seed, int change) {
    pid_t child = fork();
    if (child == 0) {
        CHECK(holds(at, 0, PAGES, seed));
        if (change) {
            fill(at, seed + 1);
            CHECK(holds(at, 0, PAGES, seed + 1));
            CHECK(!munmap(at + SIZE / 2, SIZE / 4));
            CHECK(holds(at, 0, PAGES / 2, seed + 1) && holds(at, PAGES * 3 / 4, PAGES, seed + 1));
        }
        _exit(3);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void) {
    CHECK(in_bss[SIZE / 2 + 1] == 7 && in_data[0] == 42);
    fill(in_bss, 1);
    unsigned char *fixed = map(0x200000000000, SIZE, MAP_FIXED);
    CHECK(fixed == (void *)0x200000000000);
    CHECK(map(0x200000000000 + SIZE - PAGE, SIZE, MAP_FIXED_NOREPLACE) == MAP_FAILED
        && errno == EEXIST);
    unsigned char *noreplace = map(0x210000000000, SIZE, MAP_FIXED_NOREPLACE);
    CHECK(noreplace == (void *)0x210000000000);
    unsigned char *low = map(0, SIZE, MAP_32BIT);
    CHECK((size_t)low < (size_t)1 << 31);
    unsigned char *hint = map((size_t)8 << 30, SIZE, 0);
    CHECK(hint == (void *)((size_t)8 << 30));
    /* Every free hint is followed; a hint of which a part is in use is not. */
    for (int shift = 33; shift < 46; shift++) {
        size_t at = ((size_t)1 << shift) + SIZE;
        unsigned char *mapped = map(at, SIZE, 0);
        CHECK(mapped == (void *)at);
        mapped[0] = mapped[SIZE - 1] = shift;
        CHECK(mapped[0] == shift && mapped[SIZE / 2] == 0 && mapped[SIZE - 1] == shift);
        unsigned char *other = map(at + SIZE / 2, SIZE, 0);
        CHECK(other != MAP_FAILED && (other + SIZE <= mapped || mapped + SIZE <= other));
        CHECK(!munmap(mapped, SIZE) && !munmap(other, SIZE));
    }
    unsigned char *all[] = {in_bss, fixed, noreplace, low, hint};
    for (int i = 0; i < 5; i++) fill(all[i], 10 + i);
    for (int i = 0; i < 5; i++) CHECK(holds(all[i], 0, PAGES, 10 + i));
    /* Children see the memory as of the fork; the parent keeps its own. */
    for (int i = 0; i < 5; i++) CHECK(child_of(all[i], 10 + i, i % 2) == 3);
    for (int i = 0; i < 5; i++) CHECK(holds(all[i], 0, PAGES, 10 + i));
    /* A reservation of which fixed mappings commit parts, and of which others drop parts. */
    unsigned char *reserved = mmap((void *)0x220000000000, 16 * SIZE, PROT_NONE,
        FLAGS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(reserved == (void *)0x220000000000);
    CHECK(map((size_t)reserved + 2 * SIZE, SIZE, MAP_FIXED) == reserved + 2 * SIZE);
    CHECK(!mprotect(reserved + 5 * SIZE, SIZE, PROT));
    fill(reserved + 2 * SIZE, 20);
    fill(reserved + 5 * SIZE, 21);
    CHECK(holds(reserved + 2 * SIZE, 0, PAGES, 20) && holds(reserved + 5 * SIZE, 0, PAGES, 21));
    CHECK(mmap(reserved + 2 * SIZE, SIZE, PROT_NONE, FLAGS | MAP_NORESERVE | MAP_FIXED, -1, 0)
        == reserved + 2 * SIZE);
    CHECK(!mprotect(reserved + 2 * SIZE, SIZE, PROT));
    CHECK(reserved[2 * SIZE] == 0 && reserved[3 * SIZE - PAGE] == 0);
    /* Dropped, read-only, unmapped in the middle, and a file over a part. */
    CHECK(!madvise(fixed, SIZE / 4, MADV_DONTNEED));
    CHECK(fixed[0] == 0 && fixed[SIZE / 4 - PAGE] == 0 && holds(fixed, PAGES / 4, PAGES, 11));
    CHECK(!mprotect(noreplace, SIZE, PROT_READ) && holds(noreplace, 0, PAGES, 12));
    CHECK(!munmap(noreplace + SIZE / 4, SIZE / 4));
    CHECK(holds(noreplace, 0, PAGES / 4, 12) && holds(noreplace, PAGES / 2, PAGES, 12));
    FILE *file = fopen("/proc/self/exe", "r");
    CHECK(mmap(low, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, fileno(file), 0) == low);
    CHECK(!memcmp(low, "\177ELF", 4) && holds(low, 1, PAGES, 13));
    CHECK(map((size_t)low, PAGE, MAP_FIXED) == low && low[0] == 0 && holds(low, 1, PAGES, 13));
    /* Moved: to a free place, to a fixed address, and larger. */
    unsigned char *moved = mremap(hint, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED && holds(moved, 0, PAGES, 14) && moved[2 * SIZE - 1] == 0);
    unsigned char *back = mremap(moved, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED,
        (void *)0x230000000000);
    CHECK(back == (void *)0x230000000000 && holds(back, 0, PAGES, 14));
    CHECK(mremap(back, SIZE, SIZE / 2, 0) == back && holds(back, 0, PAGES / 2, 14));
    CHECK(!munmap(back, SIZE) && !munmap(reserved, 16 * SIZE) && !munmap(low, SIZE));
    CHECK(holds(in_bss, 0, PAGES, 10));
    puts("as expected");
    return 0;
}
