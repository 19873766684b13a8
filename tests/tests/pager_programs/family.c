/* A family of processes. Each starts with the memory of its parent at the fork, then writes, drops,
 * maps, moves and forks as a seed determines, and checks every page. Some end before their
 * children. The last one prints the result.
 * Usage: family SEED PAGES STEPS DEPTH */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, MOST = 1 << 16, WORDS = PAGE / 8 };
/* The expected content of each page: 0 for zeros, otherwise a version. Not paged. */
static uint32_t version[MOST];
static uint64_t *memory;
static uint32_t pages, depth_most;
static uint64_t state;
static struct { atomic_int alive, processes, bad; } *all;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % below);
}

static uint64_t word(uint32_t page, uint32_t version, int at) {
    uint64_t x = ((uint64_t)page << 32 | version) * 0x9e3779b97f4a7c15u + at * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 29;
}

static void fill(uint32_t page) {
    uint64_t *at = memory + (size_t)page * WORDS;
    version[page] = draw(1 << 30) + 1;
    /* Writes two words of the page, or all of it. */
    for (int i = 0; i < WORDS; i++) at[i] = word(page, version[page], i);
}

static void check(uint32_t page) {
    const uint64_t *at = memory + (size_t)page * WORDS;
    for (int i = 0; i < WORDS; i += 1 + draw(64)) {
        uint64_t expected = version[page] ? word(page, version[page], i) : 0;
        if (at[i] != expected) {
            fprintf(stderr, "process %d: page %u (version %u) word %d is %lx, not %lx\n",
                    getpid(), page, version[page], i, at[i], expected);
            all->bad++;
            abort();
        }
    }
}

static void check_all(void) { for (uint32_t p = 0; p < pages; p++) check(p); }

/* A second thread of each process, which reads all pages again and again. */
static atomic_int stop;
static void *look(void *sum) {
    volatile uint64_t *at = memory;
    while (!stop)
        for (uint32_t p = 0; p < pages && !stop; p += 7) *(uint64_t *)sum += at[(size_t)p * WORDS];
    return 0;
}

static _Noreturn void live(uint32_t steps, uint32_t depth) {
    pthread_t looker;
    uint64_t sum = 0;
    pid_t children[64];
    int count = 0, with_thread = draw(2);
    if (with_thread) { stop = 0; pthread_create(&looker, 0, look, &sum); }
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t what = draw(1000), page = draw(pages), run = 1 + draw(64);
        if (page + run > pages) run = pages - page;
        if (what < 600) { while (run--) fill(page + run); }
        else if (what < 900) { while (run--) check(page + run); }
        else if (what < 960 && !with_thread) {
            void *at = memory + (size_t)page * WORDS;
            if (what < 930) madvise(at, (size_t)run * PAGE, MADV_DONTNEED);
            else if (what < 950) {
                munmap(at, (size_t)run * PAGE);
                if (mmap(at, (size_t)run * PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at) abort();
            } else {
                /* To another address and back. */
                void *away = mremap(at, (size_t)run * PAGE, (size_t)run * PAGE + (64 << 10),
                    MREMAP_MAYMOVE);
                /* The kernel moves only one of its mappings per call. */
                if (away == MAP_FAILED) continue;
                /* If there was free space after the memory, it has grown at its old address. */
                if (away != at && mremap(away, (size_t)run * PAGE, (size_t)run * PAGE,
                                         MREMAP_MAYMOVE | MREMAP_FIXED, at) != at) abort();
                munmap((char *)away + (size_t)run * PAGE, 64 << 10);
                continue;
            }
            for (uint32_t p = page; p < page + run; p++) version[p] = 0;
        } else if (what >= 980 && depth < depth_most && count < 3) {
            uint64_t seed = state ^ (uint64_t)(count + 1) << 40;
            draw(2);
            all->alive++;
            all->processes++;
            pid_t child = fork();
            if (child < 0) abort();
            if (child == 0) {
                state = seed;
                live(steps / 2, depth + 1);
            }
            children[count++] = child;
        }
    }
    if (with_thread) { stop = 1; pthread_join(looker, 0); }
    check_all();
    if (draw(2))
        while (count) {
            int status;
            if (waitpid(children[--count], &status, 0) < 0 || status) all->bad++;
        }
    if (--all->alive == 0) printf("%d processes, %d bad\n", all->processes, all->bad);
    fflush(stdout);
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    state = strtoull(argv[1], 0, 10);
    pages = atoi(argv[2]);
    depth_most = atoi(argv[4]);
    all = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memory = mmap(0, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
        0);
    if (pages > MOST || all == MAP_FAILED || memory == MAP_FAILED) return 2;
    all->alive = all->processes = 1;
    live(atoi(argv[3]), 0);
}
