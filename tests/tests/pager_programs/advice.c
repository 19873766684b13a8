/* Advice on memory that is larger than the limit: by madvise, posix_madvise and process_madvise.
 * Also protection by keys. No advice but DONTNEED and FREE changes the content. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
enum { PAGE = 4096, PAGES = 8192 };
#define SIZE ((size_t)PAGES * PAGE)

static unsigned char *memory;
static void fill(unsigned seed) {
    for (size_t page = 0; page < PAGES; page++) *(unsigned *)(memory + page * PAGE) = page + seed;
}
static int holds(unsigned seed) {
    for (size_t page = 0; page < PAGES; page++)
        if (*(unsigned *)(memory + page * PAGE) != page + seed) return 0;
    return 1;
}

int main(void) {
    memory = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    fill(1);
    static const int advice[] = {MADV_SEQUENTIAL, MADV_RANDOM, MADV_NORMAL, MADV_WILLNEED,
        MADV_COLD, MADV_PAGEOUT};
    for (unsigned i = 0; i < sizeof advice / sizeof *advice; i++) {
        CHECK(!madvise(memory, SIZE / 2, advice[i]));
        CHECK(holds(1 + i));
        fill(2 + i);
    }
    fill(10);
    CHECK(!posix_madvise(memory, SIZE, POSIX_MADV_WILLNEED) && holds(10));
    CHECK(!posix_madvise(memory, SIZE, POSIX_MADV_DONTNEED) && holds(10));
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    CHECK(self >= 0);
    struct iovec parts[2] = {{memory, PAGE}, {memory + SIZE / 2, SIZE / 4}};
    CHECK(process_madvise(self, parts, 2, MADV_PAGEOUT, 0) == (ssize_t)(PAGE + SIZE / 4));
    CHECK(holds(10));
    CHECK(process_madvise(self, parts, 2, MADV_WILLNEED, 0) == (ssize_t)(PAGE + SIZE / 4));
    CHECK(holds(10));
    CHECK(process_madvise(-1, parts, 2, MADV_PAGEOUT, 0) == -1 && errno == EBADF);
    CHECK(!madvise(memory, 10 * PAGE, MADV_FREE));
    memory[5 * PAGE] = 1;
    CHECK(memory[5 * PAGE] == 1 && *(unsigned *)(memory + 10 * PAGE) == 20);
    fill(30);
    CHECK(!pkey_mprotect(memory, SIZE, PROT_READ, -1) && holds(30));
    CHECK(!pkey_mprotect(memory, SIZE, PROT_READ | PROT_WRITE, -1));
    int key = pkey_alloc(0, 0);
    if (key >= 0) {
        CHECK(!pkey_mprotect(memory, SIZE / 2, PROT_READ | PROT_WRITE, key));
        fill(40);
        CHECK(holds(40));
        CHECK(!mprotect(memory, SIZE / 4, PROT_READ | PROT_WRITE) && holds(40));
        CHECK(!munmap(memory, SIZE / 2));
        unsigned char *again = mmap(memory, SIZE / 2, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(again == memory && memory[0] == 0);
        CHECK(!pkey_free(key));
        fill(50);
        CHECK(holds(50));
    }
    puts("as expected");
    return 0;
}
