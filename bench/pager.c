/* The programs of `bench/peers pager`: access patterns and whole programs over anonymous memory.
 *
 *   pager --memory BYTES --accesses N PROGRAM...  runs the programs, a JSON line for each
 *   pager text BYTES                              prints text, the same at every call
 *   pager spin                                    computes until its parent ends
 *
 * Each page of the data is half random and half one repeated word, so it compresses to a half. All
 * numbers come from generators with fixed seeds: a checksum depends only on the program and its
 * arguments, not on the system that holds the memory.
 *
 * Access patterns run in the order of the command line over one mapping. Each touches one word of a
 * page. A pattern in address order (sequential, stride) begins where the one before ended, so that
 * its pages are those that were not touched for the longest time.
 */

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

enum { PAGE_WORDS = 512, PAGE_BYTES = 4096 };
/* The longest list of times of single accesses. */
enum { TIMES_MAX = 1 << 17 };
/* A pattern that the pager can serve in batches makes this many times `accesses` accesses. */
enum { BATCHED = 8 };

static size_t memory_bytes = 256 << 20, accesses = 8192;
/* The data of the access patterns. */
static uint64_t *data;
static size_t pages;
/* The page at which the next pattern in address order begins. */
static size_t cursor;
static uint32_t times[TIMES_MAX];

/* --- generators and clocks -------------------------------------------------------------------- */

/* SplitMix64: the next number of a sequence. */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

/* A number in [0, 1). In every second half page it is 0.5, so that pages compress to a half. */
static double half_random(uint64_t *state, size_t bytes_before) {
    double value = (double)(next_random(state) >> 11) * 0x1p-53;
    return bytes_before / (PAGE_BYTES / 2) % 2 ? 0.5 : value;
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t mix(uint64_t hash, uint64_t word) {
    return (hash ^ word) * 0x100000001b3 + (hash >> 47);
}

/* A hash of all words, for the checksums of memory. */
static uint64_t hash_of(const void *memory, size_t bytes) {
    const uint64_t *words = memory;
    uint64_t hash = 1;
    for (size_t i = 0; i < bytes / 8; i++) hash = mix(hash, words[i]);
    return hash;
}

static void *map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("pager: mmap");
        exit(1);
    }
    return memory;
}

/* --- access patterns -------------------------------------------------------------------------- */

typedef enum { READ, WRITE, MODIFY } Operation;

/* The word of a page that is touched. */
static volatile uint64_t *word_of(size_t page) {
    return data + page * PAGE_WORDS;
}

/* Touches a page. Returns the value that was read or written. */
static inline uint64_t touch(Operation operation, size_t page, uint64_t number) {
    volatile uint64_t *word = word_of(page);
    switch (operation) {
    case READ: return *word;
    case WRITE: return *word = number * 0x9e3779b97f4a7c15;
    case MODIFY: return *word = *word * 5 + 1;
    }
    return 0;
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Prints the result of a program whose accesses were timed one by one. */
static void print_timed(const char *program, double ns_mean, size_t count, uint64_t checksum) {
    qsort(times, count, sizeof *times, ascending);
    printf("{\"program\": \"%s\", \"us\": %.4f, \"p50_us\": %.3f, \"p99_us\": %.3f, "
           "\"accesses\": %zu, \"checksum\": \"%016lx\"}\n", program, ns_mean / 1e3,
           times[count / 2] / 1e3, times[count * 99 / 100] / 1e3, count, checksum);
}

static void print_mean(const char *program, uint64_t ns, size_t count, uint64_t checksum) {
    printf("{\"program\": \"%s\", \"us\": %.4f, \"accesses\": %zu, \"checksum\": \"%016lx\"}\n",
           program, (double)ns / 1e3 / (double)count, count, checksum);
}

static void print_whole(const char *program, uint64_t ns, uint64_t checksum) {
    printf("{\"program\": \"%s\", \"seconds\": %.4f, \"checksum\": \"%016lx\"}\n", program,
           (double)ns / 1e9, checksum);
}

static size_t at_most(size_t value, size_t limit) {
    return value < limit ? value : limit;
}

/* Touches pages in address order from `cursor` on, each `step` pages further. */
static void run_ordered(const char *program, Operation operation, size_t step) {
    size_t count = at_most(step == 1 ? BATCHED * accesses : accesses, pages / step);
    uint64_t sum = 0, start = now_ns();
    for (size_t i = 0; i < count; i++) {
        sum = mix(sum, touch(operation, cursor, i));
        cursor = (cursor + step) % pages;
    }
    print_mean(program, now_ns() - start, count, sum);
}

/* Reads pages against the address order, beginning half of the memory behind `cursor`. */
static void run_backwards(const char *program) {
    size_t count = at_most(accesses, pages / 4), page = (cursor + pages / 2) % pages;
    uint64_t sum = 0, start = now_ns();
    for (size_t i = 0; i < count; i++) {
        sum = mix(sum, touch(READ, page, i));
        page = (page + pages - 1) % pages;
    }
    print_mean(program, now_ns() - start, count, sum);
}

/* Writes one word of each page of a new mapping. */
static void run_first_touch(const char *program) {
    size_t count = at_most(BATCHED * accesses, pages);
    uint64_t *fresh = map(count * PAGE_BYTES), sum = 0, start = now_ns();
    for (size_t i = 0; i < count; i++) {
        volatile uint64_t *word = fresh + i * PAGE_WORDS;
        *word = i;
        sum = mix(sum, *word);
    }
    print_mean(program, now_ns() - start, count, sum);
    munmap(fresh, count * PAGE_BYTES);
}

/* Random accesses within a range of pages by one thread, each timed. */
typedef struct {
    Operation operation;
    size_t first_page, page_count, count;
    uint64_t seed, gap_ns, checksum;
    uint32_t *times;
    double ns_sum;
} Random;

static void *random_accesses(void *argument) {
    Random *random = argument;
    uint64_t seed = random->seed, next = now_ns();
    for (size_t i = 0; i < random->count; i++) {
        size_t page = random->first_page + next_random(&seed) % random->page_count;
        uint64_t start = now_ns();
        if (random->gap_ns) {
            /* Computes between two accesses, as a program does that rarely faults. */
            for (next += random->gap_ns; start < next;) start = now_ns();
        }
        uint64_t value = touch(random->operation, page, i);
        uint64_t ns = now_ns() - start;
        random->checksum = mix(random->checksum, value);
        random->times[i] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
        random->ns_sum += (double)ns;
    }
    return NULL;
}

/* Accesses at `rate` a second; 0: one after the other. */
static void run_random(const char *program, Operation operation, size_t rate) {
    size_t count = rate ? at_most(rate < 100 ? 100 : rate, accesses) : accesses;
    Random random = {
        .operation = operation, .page_count = pages, .count = count, .seed = 7 + rate + operation,
        .gap_ns = rate ? 1000000000 / rate : 0, .times = times,
    };
    random_accesses(&random);
    print_timed(program, random.ns_sum / (double)count, count, random.checksum);
}

/* Two threads, each with random reads in one half. The mean is of a thread's accesses. */
static void run_threads(const char *program) {
    Random random[2];
    pthread_t threads[2];
    for (size_t i = 0; i < 2; i++) {
        random[i] = (Random){
            .operation = READ, .first_page = i * (pages / 2), .page_count = pages / 2,
            .count = accesses / 2, .seed = 3 + i, .times = times + i * (accesses / 2),
        };
        if (pthread_create(&threads[i], NULL, random_accesses, &random[i]) != 0) exit(1);
    }
    for (size_t i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    size_t count = accesses / 2 * 2;
    print_timed(program, (random[0].ns_sum + random[1].ns_sum) / (double)count, count,
                mix(random[0].checksum, random[1].checksum));
}

static void fill_data(void) {
    pages = memory_bytes / PAGE_BYTES;
    data = map(pages * PAGE_BYTES);
    uint64_t seed = 1;
    for (size_t page = 0; page < pages; page++) {
        uint64_t *words = data + page * PAGE_WORDS;
        for (size_t i = 0; i < PAGE_WORDS / 2; i++) words[i] = next_random(&seed);
        for (size_t i = PAGE_WORDS / 2; i < PAGE_WORDS; i++) words[i] = page;
    }
}

/* --- whole programs --------------------------------------------------------------------------- */

/* STREAM's triad, a = b + s c, over three arrays. */
static void run_triad(const char *program) {
    size_t count = memory_bytes / 3 / sizeof(double);
    double *a = map(count * 8), *b = map(count * 8), *c = map(count * 8);
    uint64_t seed = 1;
    for (size_t i = 0; i < count; i++) {
        a[i] = 0;
        b[i] = half_random(&seed, i * 8);
        c[i] = half_random(&seed, i * 8);
    }
    uint64_t start = now_ns();
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < count; i++) a[i] = b[i] + (3 + round) * c[i];
        /* Otherwise the compiler may leave out the first round, which the second overwrites. */
        __asm__ volatile("" ::: "memory");
    }
    uint64_t ns = now_ns() - start;
    print_whole(program, ns, hash_of(a, count * 8));
}

/* Lloyd's k-means: 10 clusters of points with four coordinates. */
static void run_kmeans(const char *program) {
    enum { K = 10, D = 4 };
    size_t count = memory_bytes / (D * sizeof(float));
    float(*points)[D] = map(count * sizeof *points), centres[K][D];
    uint64_t seed = 1;
    for (size_t i = 0; i < count; i++) {
        for (int d = 0; d < D; d++) points[i][d] = (float)half_random(&seed, i * sizeof *points);
    }
    for (int k = 0; k < K; k++) memcpy(centres[k], points[count / K * (size_t)k], sizeof *centres);
    uint64_t start = now_ns();
    for (int round = 0; round < 2; round++) {
        double sums[K][D] = {{0}}, members[K] = {0};
        for (size_t i = 0; i < count; i++) {
            int nearest = 0;
            float least = INFINITY;
            for (int k = 0; k < K; k++) {
                float distance = 0;
                for (int d = 0; d < D; d++) {
                    float apart = points[i][d] - centres[k][d];
                    distance += apart * apart;
                }
                if (distance < least) least = distance, nearest = k;
            }
            for (int d = 0; d < D; d++) sums[nearest][d] += points[i][d];
            members[nearest]++;
        }
        for (int k = 0; k < K; k++) {
            for (int d = 0; d < D; d++) {
                if (members[k] > 0) centres[k][d] = (float)(sums[k][d] / members[k]);
            }
        }
    }
    uint64_t ns = now_ns() - start;
    print_whole(program, ns, hash_of(centres, sizeof centres));
}

/* LU decomposition in blocks, without pivoting, of a matrix with a large diagonal. Its numbers do
 * not compress. */
static void run_lu(const char *program) {
    enum { BLOCK = 64 };
    size_t n = (size_t)sqrt((double)memory_bytes / sizeof(double)) / BLOCK * BLOCK;
    double *a = map(n * n * 8);
    uint64_t seed = 1;
    for (size_t i = 0; i < n * n; i++) {
        a[i] = (double)(next_random(&seed) >> 11) * 0x1p-53 + (i / n == i % n ? (double)n : 0);
    }
    uint64_t start = now_ns();
    for (size_t at = 0; at < n; at += BLOCK) {
        size_t end = at + BLOCK;
        /* The columns of the block, for all rows below. */
        for (size_t k = at; k < end; k++) {
            for (size_t i = k + 1; i < n; i++) {
                double factor = a[i * n + k] /= a[k * n + k];
                for (size_t j = k + 1; j < end; j++) a[i * n + j] -= factor * a[k * n + j];
            }
        }
        /* The rows of the block, to the right. */
        for (size_t k = at; k < end; k++) {
            for (size_t i = k + 1; i < end; i++) {
                double factor = a[i * n + k];
                for (size_t j = end; j < n; j++) a[i * n + j] -= factor * a[k * n + j];
            }
        }
        /* The rest. */
        for (size_t i = end; i < n; i++) {
            double *restrict row = a + i * n;
            for (size_t k = at; k < end; k++) {
                double factor = row[k];
                const double *restrict above = a + k * n;
                for (size_t j = end; j < n; j++) row[j] -= factor * above[j];
            }
        }
    }
    uint64_t ns = now_ns() - start;
    print_whole(program, ns, hash_of(a, n * n * 8));
}

/* --- text and load ---------------------------------------------------------------------------- */

/* Prints lines of words. Words are drawn from 4096, small numbers more often. */
static void print_text(size_t bytes) {
    uint64_t seed = 1;
    size_t printed = 0;
    while (printed < bytes) {
        size_t words = 4 + next_random(&seed) % 12;
        for (size_t i = 0; i < words; i++) {
            uint64_t number = next_random(&seed) % 64 * (next_random(&seed) % 64);
            uint64_t letters = number * 0x9e3779b97f4a7c15;
            char word[16];
            size_t length = 3 + (letters >> 61);
            for (size_t at = 0; at < length; at++, letters >>= 5) {
                word[at] = (char)('a' + (letters & 31) % 26);
            }
            word[length] = i + 1 < words ? ' ' : '\n';
            printed += fwrite(word, 1, length + 1, stdout);
        }
    }
}

static void spin(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (volatile uint64_t turns = 0;; turns++) {}
}

/* --- command line ----------------------------------------------------------------------------- */

static size_t number_of(const char *text) {
    char *end;
    size_t number = strtoull(text ? text : "", &end, 10);
    if (number == 0 || *end) {
        fprintf(stderr, "pager: not a number above 0: %s\n", text ? text : "(missing)");
        exit(2);
    }
    return number;
}

/* Runs an access pattern. Returns 0 if there is none of this name. */
static int run_pattern(const char *name) {
    if (!data) fill_data();
    if (!strcmp(name, "sequential-read")) run_ordered(name, READ, 1);
    else if (!strcmp(name, "sequential-write")) run_ordered(name, WRITE, 1);
    else if (!strcmp(name, "sequential-modify")) run_ordered(name, MODIFY, 1);
    else if (!strcmp(name, "stride-3")) run_ordered(name, READ, 3);
    else if (!strcmp(name, "backwards")) run_backwards(name);
    else if (!strcmp(name, "random-read")) run_random(name, READ, 0);
    else if (!strcmp(name, "random-modify")) run_random(name, MODIFY, 0);
    else if (!strncmp(name, "paced-", 6)) run_random(name, READ, number_of(name + 6));
    else if (!strcmp(name, "first-touch")) run_first_touch(name);
    else if (!strcmp(name, "two-threads")) run_threads(name);
    else if (!strcmp(name, "content")) {
        print_mean(name, 0, pages, hash_of(data, pages * PAGE_BYTES));
    } else return 0;
    return 1;
}

int main(int count, char **words) {
    (void)count;
    for (words++; *words; words++) {
        const char *word = *words;
        if (!strcmp(word, "--memory")) memory_bytes = number_of(*++words);
        else if (!strcmp(word, "--accesses")) {
            accesses = at_most(number_of(*++words), TIMES_MAX);
        } else if (!strcmp(word, "text")) {
            print_text(number_of(*++words));
            return 0;
        }
        else if (!strcmp(word, "spin")) spin();
        else if (!strcmp(word, "triad")) run_triad(word);
        else if (!strcmp(word, "k-means")) run_kmeans(word);
        else if (!strcmp(word, "LU")) run_lu(word);
        else if (!run_pattern(word)) {
            fprintf(stderr, "pager: no program %s\n", word);
            return 2;
        }
    }
    return 0;
}
